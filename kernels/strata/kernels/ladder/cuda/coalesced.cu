// Coalesced loads: neighbouring threads read neighbouring addresses.
//
// Idea: the same sum per thread, but the threads of a warp lie along a row of the output. They read the same element of A and 32
// neighbouring elements of B: one or two cache lines per load instruction.
// Bound: still the load units. Two loads for one multiply-add, 0.5 operations per byte.
#include "intrinsics.cuh"

extern "C" __global__ void coalesced(const bf16* a, const bf16* b, bf16* out, int M, int N, int K) {
    int row = blockIdx.y * blockDim.y + threadIdx.y;
    int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= M || column >= N) return;
    float total = 0;
    for (int k = 0; k < K; k++) total += to_float(a[(size_t)row * K + k]) * to_float(b[(size_t)k * N + column]);
    out[(size_t)row * N + column] = to_bf16(total);
}
