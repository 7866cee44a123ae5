// Runs CUDA kernels on a CPU: a thread of the system for each of a block, one block after the other.
#include <barrier>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(...)

struct Three { int x, y, z; };
static thread_local Three threadIdx;
static Three blockIdx, blockDim;
static std::unique_ptr<std::barrier<>> block_barrier;
static void __syncthreads() { block_barrier->arrive_and_wait(); }

static float __uint_as_float(unsigned bits) { float value; std::memcpy(&value, &bits, 4); return value; }
static unsigned __float_as_uint(float value) { unsigned bits; std::memcpy(&bits, &value, 4); return bits; }

#include "intrinsics.cuh"

// What the 32 threads of a warp show each other. The layouts are those of the PTX manual, written down independently of the kernel.
struct Warp {
    std::barrier<> barrier{32};
    const bf16* rows[32];
    unsigned a[32][4], b[32][2];
};
static std::vector<std::unique_ptr<Warp>> warps;
static int lane() { return threadIdx.x % 32; }
static Warp& warp() { return *warps[threadIdx.x / 32]; }

static void copy_async(void* shared, const void* global, bool inside) {
    if (inside) std::memcpy(shared, global, 16); else std::memset(shared, 0, 16);
}
static void commit_copies() {}
template <int pending> static void wait_copies() {}

static unsigned packed(bf16 low, bf16 high) { return (unsigned)high << 16 | low; }

static void load(unsigned (&found)[4], const void* row, bool transposed) {
    Warp& all = warp();
    all.rows[lane()] = (const bf16*)row;
    all.barrier.arrive_and_wait();
    for (int matrix = 0; matrix < 4; matrix++) {
        const bf16** rows = all.rows + matrix * 8;
        int group = lane() / 4, pair = lane() % 4 * 2;
        found[matrix] = transposed ? packed(rows[pair][group], rows[pair + 1][group]) : packed(rows[group][pair], rows[group][pair + 1]);
    }
    all.barrier.arrive_and_wait();
}
static void load_matrices(unsigned (&found)[4], const void* row) { load(found, row, false); }
static void load_matrices_transposed(unsigned (&found)[4], const void* row) { load(found, row, true); }

static void multiply_add(float (&total)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    Warp& all = warp();
    std::memcpy(all.a[lane()], a, sizeof a);
    all.b[lane()][0] = b0, all.b[lane()][1] = b1;
    all.barrier.arrive_and_wait();
    for (int i = 0; i < 4; i++) {
        int row = lane() / 4 + i / 2 * 8, column = lane() % 4 * 2 + i % 2;
        for (int k = 0; k < 16; k++) {
            unsigned left = all.a[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], right = all.b[column * 4 + k % 8 / 2][k / 8];
            total[i] += to_float(left >> k % 2 * 16 & 0xffff) * to_float(right >> k % 2 * 16 & 0xffff);
        }
    }
    all.barrier.arrive_and_wait();
}

template <typename Kernel>
static void launch(Kernel kernel, Three grid, Three block, const bf16* a, const bf16* b, bf16* out, int M, int N, int K) {
    int count = block.x * block.y;
    blockDim = block;
    block_barrier = std::make_unique<std::barrier<>>(count);
    warps.clear();
    for (int i = 0; i * 32 < count; i++) warps.push_back(std::make_unique<Warp>());
    auto run = [&](int index) {
        threadIdx = {index % block.x, index / block.x, 0};
        for (int y = 0; y < grid.y; y++)
            for (int x = 0; x < grid.x; x++) {
                if (index == 0) blockIdx = {x, y, 0};
                block_barrier->arrive_and_wait();
                kernel(a, b, out, M, N, K);
                block_barrier->arrive_and_wait();
            }
    };
    std::vector<std::thread> threads;
    for (int index = 0; index < count; index++) threads.emplace_back(run, index);
    for (auto& thread : threads) thread.join();
}
