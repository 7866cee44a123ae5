// bf16 as its bits, and the PTX instructions of tensor_cores.cu. Needs no CUDA headers, so that NVRTC compiles it anywhere.
#pragma once

typedef unsigned short bf16;

__device__ inline float to_float(bf16 bits) { return __uint_as_float((unsigned)bits << 16); }

// Rounds to the nearest, ties to even. A NaN stays one.
__device__ inline bf16 to_bf16(float value) {
    unsigned bits = __float_as_uint(value);
    return value != value ? (bf16)0x7fff : (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

struct alignas(16) Eight { bf16 values[8]; };  // one 128-bit access

#ifdef __CUDACC__
__device__ inline unsigned shared_address(const void* pointer) {
    unsigned address;
    asm("{ .reg .u64 wide; cvta.to.shared.u64 wide, %1; cvt.u32.u64 %0, wide; }" : "=r"(address) : "l"(pointer));
    return address;
}

// Copies 16 bytes to shared memory without registers; writes zeros if `inside` is false.
__device__ inline void copy_async(void* shared, const void* global, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(shared_address(shared)), "l"(global), "r"(inside ? 16 : 0) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int pending> __device__ inline void wait_copies() {
    asm volatile("cp.async.wait_group %0;" :: "n"(pending) : "memory");
}

// Four 8 x 8 matrices; lane l has the address of row l % 8 of matrix l / 8.
__device__ inline void load_matrices(unsigned (&found)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found[0]), "=r"(found[1]), "=r"(found[2]), "=r"(found[3]) : "r"(shared_address(row)) : "memory");
}
__device__ inline void load_matrices_transposed(unsigned (&found)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found[0]), "=r"(found[1]), "=r"(found[2]), "=r"(found[3]) : "r"(shared_address(row)) : "memory");
}

// total[16 x 8] += a[16 x 16] b[16 x 8], spread over the 32 threads of a warp.
__device__ inline void multiply_add(float (&total)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(total[0]), "+f"(total[1]), "+f"(total[2]), "+f"(total[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif
