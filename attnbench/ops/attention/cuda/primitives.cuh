// The few instructions of a tensor core that C++ has no words for, as functions (PTX ISA, "Warp-level matrix
// instructions" and "cp.async").
//
// A matrix lives in the registers of the 32 threads of a warp. With row = lane / 4 and pair = 2 (lane % 4), a thread
// holds, two halves to a register:
//
//   left  (16 x 16)  [row][pair, pair + 1], [row + 8][...], [row][pair + 8, pair + 9], [row + 8][...]   4 registers
//   right (16 x 8)   [pair, pair + 1][row], [pair + 8, pair + 9][row]                                   2 registers
//   sum   (16 x 8)   [row][pair], [row][pair + 1], [row + 8][pair], [row + 8][pair + 1]                 4 floats
//
// Of two sums side by side, rounded to halves, a thread so holds what it needs of a left matrix: weights go from one
// product to the next without leaving the registers.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// sum += left right
__device__ inline void multiply(float (&sum)[4], const uint32_t (&left)[4], uint32_t right_0, uint32_t right_1,
                                __half) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right_0), "r"(right_1));
}

__device__ inline void multiply(float (&sum)[4], const uint32_t (&left)[4], uint32_t right_0, uint32_t right_1,
                                __nv_bfloat16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right_0), "r"(right_1));
}

// Four 8 x 8 matrices from shared memory at once: threads 8 i ... 8 i + 7 point at the eight rows of matrix i, and each
// thread gets of every matrix its [lane / 4][pair, pair + 1].
__device__ inline void load_matrices(uint32_t (&matrix)[4], const void* row) {
    uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
                 : "r"(address)
                 : "memory");
}

// The same, each matrix transposed on the way: a thread gets [pair, pair + 1][lane / 4].
__device__ inline void load_matrices_transposed(uint32_t (&matrix)[4], const void* row) {
    uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
                 : "r"(address)
                 : "memory");
}

// 16 bytes from global to shared memory, past the registers and without waiting; zeros where nothing is inside.
__device__ inline void copy_async(void* target, const void* source, bool inside) {
    uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(target));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(source), "r"(inside ? 16 : 0)
                 : "memory");
}

// Ends a group of copies.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all groups but the last PENDING have arrived, those of this thread.
template <int PENDING>
__device__ inline void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ inline float power_of_two(float exponent) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
    return power;
}

// Two numbers rounded to halves, the first in the lower bits.
__device__ inline uint32_t pack(float first, float second, __half) {
    __half2 both = __floats2half2_rn(first, second);
    return *reinterpret_cast<uint32_t*>(&both);
}

__device__ inline uint32_t pack(float first, float second, __nv_bfloat16) {
    __nv_bfloat162 both = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<uint32_t*>(&both);
}

__device__ inline unsigned char* shared_memory() {
    extern __shared__ __align__(128) unsigned char memory[];
    return memory;
}
