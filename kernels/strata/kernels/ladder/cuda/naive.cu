// One thread per element of the output, in the order in which one would write the loops.
//
// Idea: each thread computes one sum. Neighbouring threads compute neighbouring rows.
// Bound: the load units. The 32 threads of a warp read 32 rows of A, so one load instruction touches 32 cache lines and
// uses two bytes of each.
#include "intrinsics.cuh"

extern "C" __global__ void naive(const bf16* a, const bf16* b, bf16* out, int M, int N, int K) {
    int row = blockIdx.y * blockDim.x + threadIdx.x;
    int column = blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= M || column >= N) return;
    float total = 0;
    for (int k = 0; k < K; k++) total += to_float(a[(size_t)row * K + k]) * to_float(b[(size_t)k * N + column]);
    out[(size_t)row * N + column] = to_bf16(total);
}
