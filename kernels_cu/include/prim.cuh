// The GPU primitives that kernels are written with: one function per instruction. NVCC and NVRTC get inline
// PTX (the prim/*.cuh files, the only ones with asm), any other C++ compiler gets the simulator, which
// carries the same functions out on the CPU.
//
// Plain CUDA, on both sides: threadIdx blockIdx blockDim gridDim, __syncthreads, __syncthreads_or,
//   __syncwarp, __shfl_sync, __shfl_xor_sync, __shfl_up_sync, __shfl_down_sync, __ballot_sync, __any_sync,
//   __all_sync, atomicAdd, atomicMax, __threadfence, the conversions and arithmetic of cuda_fp16.h and
//   cuda_bf16.h, fmaf fmaxf exp2 tanh ..., __umulhi, __popc, __float_as_uint and its like, min max, printf.
// Here, in the order of the files:
//   prim/warp   shared_memory<T>() smem_addr(p) | ex2 rcp
//               mad_wide opaque pin_schedule permute_bytes pack<T>(x, y) pack_e4m3 to_tf32 | bar_sync bar_arrive | elect_one
//               setmaxnreg_inc<n> setmaxnreg_dec<n>
//               ldmatrix_x1 _x2 _x4, ldmatrix_x1_trans _x2_trans _x4_trans | stmatrix_x1 ... _x4_trans
//               mma_m16n8k16<T> mma_m16n8k8<T> mma_m16n8k8_tf32 mma_m16n8k32_e4m3
//               mma_m16n8k32_e4m3_scaled<byte, thread> mma_m16n8k8_f64 mma_m8n8k4_f64
//   prim/copy   ld_shared<T> st_shared | ld_global ld_global_nc st_global
//               cp_async4 cp_async16 cp_async4_part cp_async16_part cp_async_commit
//               cp_async_wait<n>
//   prim/bulk   mbar_init mbar_init_fence mbar_arrive mbar_arrive_expect_tx mbar_wait
//               fence_proxy_async fence_proxy_async_global | tma_prefetch tma_load tma_store | bulk_load bulk_store bulk_reduce_add
//               tma_store_commit tma_store_wait_read<n> tma_store_wait<n>, which serve the bulk_ stores too
//   prim/semaphore take_ticket semaphore_wait semaphore_release
//   prim/wgmma  matrix_descriptor | wgmma_fence wgmma_commit wgmma_wait<n> wgmma_fence_operand
//               wgmma_m64k16<T, ...> wgmma_m64k32_e4m3
#pragma once
#include "base.cuh"
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Where a matrix operand lies in shared memory. Its swizzle pattern repeats every 8 rows of `swizzle` bytes
// (32, 64 or 128; 16: none) and starts at a multiple of that.
// layout: contiguous along k ("K-major"): `stride` bytes from 8 rows to the next 8; `leading` is not used; 16
//   elements of 16 bits (32 bytes) along k are 32 bytes further within the pattern.
//   Without a swizzle (16): 8 rows of 16 bytes follow each other; `leading` bytes to the next 16 along k.
// contiguous along m or n ("MN-major", the trans flags): rows are k; `stride` bytes from 8 values of k to the
//   next 8, `leading` bytes from one pattern width of m or n to the next.
CF_DEVICE uint64_t matrix_descriptor(uint32_t addr, int leading, int stride, int swizzle = 128) {
    const uint64_t mode = swizzle == 128 ? 1 : swizzle == 64 ? 2 : swizzle == 32 ? 3 : 0;
    return (addr >> 4 & 0x3fff) | uint64_t(leading >> 4 & 0x3fff) << 16 |
           uint64_t(stride >> 4 & 0x3fff) << 32 | mode << 62;
}

#if defined(__CUDACC__)
#include "prim/warp.cuh"
#include "prim/copy.cuh"
#include "prim/bulk.cuh"
#include "prim/semaphore.cuh"
#include "prim/wgmma.cuh"
#else
#include <simulator/simulator.h>
#endif
