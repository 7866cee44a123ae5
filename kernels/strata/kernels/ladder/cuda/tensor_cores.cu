// Tensor cores by hand: mma.sync on two buffers that asynchronous copies fill.
//
// Idea: a warp multiplies 16 x 16 by 16 x 8 in one instruction, and holds 64 x 32 elements of the output. While it multiplies one
// buffer, cp.async fills the other. Rows in shared memory are padded by 16 bytes, so that ldmatrix has no bank conflicts.
// Bound: issue of instructions. Hopper reaches its full rate only with wgmma, which reads operands from shared memory and
// runs asynchronously; mma.sync needs them in registers first.
#include "intrinsics.cuh"

constexpr int TILE = 128, DEPTH = 32, PAD = 8;

struct alignas(16) Stage {
    bf16 a[TILE][DEPTH + PAD];
    bf16 b[DEPTH][TILE + PAD];
};

extern "C" __global__ void __launch_bounds__(256) tensor_cores(const bf16* a, const bf16* b, bf16* out, int M, int N, int K) {
    __shared__ Stage stages[2];
    int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    int first_row = blockIdx.y * TILE, first_column = blockIdx.x * TILE;
    int warp_row = warp / 4 * 64, warp_column = warp % 4 * 32;

    auto load = [&](Stage& stage, int start) {
        for (int i = thread; i < 512; i += 256) {  // 16-byte parts of either block
            int row = i / 4, k = i % 4 * 8;
            bool inside = first_row + row < M && start + k < K;
            copy_async(&stage.a[row][k], inside ? &a[(size_t)(first_row + row) * K + start + k] : a, inside);
            int b_k = i / 16, column = i % 16 * 8;
            inside = start + b_k < K && first_column + column < N;
            copy_async(&stage.b[b_k][column], inside ? &b[(size_t)(start + b_k) * N + first_column + column] : b, inside);
        }
        commit_copies();
    };

    float totals[4][4][4] = {};  // 4 x 4 products of 16 x 8; four elements of each per thread
    load(stages[0], 0);
    for (int start = 0, current = 0; start < K; start += DEPTH, current ^= 1) {
        wait_copies<0>();
        __syncthreads();  // this buffer has arrived, and no warp still reads the other
        if (start + DEPTH < K) load(stages[current ^ 1], start + DEPTH);
        Stage& stage = stages[current];
        for (int k = 0; k < DEPTH; k += 16) {
            unsigned left[4][4], right[2][4];
            for (int i = 0; i < 4; i++) load_matrices(left[i], &stage.a[warp_row + i * 16 + lane % 16][k + lane / 16 * 8]);
            for (int j = 0; j < 2; j++)
                load_matrices_transposed(right[j], &stage.b[k + lane % 16][warp_column + j * 16 + lane / 16 * 8]);
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++)
                    multiply_add(totals[i][j], left[i], right[j / 2][j % 2 * 2], right[j / 2][j % 2 * 2 + 1]);
        }
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++)
            for (int half = 0; half < 2; half++) {
                int row = first_row + warp_row + i * 16 + half * 8 + lane / 4;
                int column = first_column + warp_column + j * 8 + lane % 4 * 2;
                if (row >= M || column >= N) continue;
                unsigned low = to_bf16(totals[i][j][half * 2]), high = to_bf16(totals[i][j][half * 2 + 1]);
                *(unsigned*)&out[(size_t)row * N + column] = high << 16 | low;
            }
}
