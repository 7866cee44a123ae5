// Tiles in shared memory: a block of threads reads each element once and uses it 32 times.
//
// Idea: 32 x 32 threads load a tile of A and one of B together, wait for each other, and multiply out of shared memory.
// Bound: shared memory. Every multiply-add still takes two loads, now of 4 bytes from shared memory, and no load overlaps with
// arithmetic of the same block.
#include "intrinsics.cuh"

constexpr int TILE = 32;

extern "C" __global__ void shared_tiles(const bf16* a, const bf16* b, bf16* out, int M, int N, int K) {
    __shared__ float a_tile[TILE][TILE], b_tile[TILE][TILE];
    int x = threadIdx.x, y = threadIdx.y;
    int row = blockIdx.y * TILE + y, column = blockIdx.x * TILE + x;
    float total = 0;
    for (int start = 0; start < K; start += TILE) {
        a_tile[y][x] = row < M && start + x < K ? to_float(a[(size_t)row * K + start + x]) : 0;
        b_tile[y][x] = start + y < K && column < N ? to_float(b[(size_t)(start + y) * N + column]) : 0;
        __syncthreads();
        for (int k = 0; k < TILE; k++) total += a_tile[y][k] * b_tile[k][x];
        __syncthreads();
    }
    if (row < M && column < N) out[(size_t)row * N + column] = to_bf16(total);
}
