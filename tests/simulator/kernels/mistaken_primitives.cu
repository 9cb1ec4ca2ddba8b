// check_primitives.cu over primitives of which each has a mistake; MISTAKE chooses which: operands, or waits and kinds.
#include "prim.cuh"

namespace mistaken {
template <class T> CF_DEVICE void mma_m16n8k8(float (&d)[4], const uint32_t (&a)[2], uint32_t b0) {
    ::mma_m16n8k8<T>(d, {a[1], a[0]}, b0);
}
template <class T>
CF_DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if (MISTAKE == 0) return ::mma_m16n8k16<T>(d, a, b1, b0);
    // Sums are kept in halves.
    ::mma_m16n8k16<T>(d, a, b0, b1);
    for (float& x : d) x = __half2float(__float2half_rn(x));
}
template <class T> CF_DEVICE uint32_t pack(float x, float y) {
    return MISTAKE == 0 ? ::pack<T>(y, x) : ::pack<T>(x * 0.9995f, y);
}
template <int n> CF_DEVICE void cp_async_wait() { ::cp_async_wait<n + 1>(); }
template <class T, bool kTransA, bool kTransB, int n>
CF_DEVICE void wgmma_m64k16(float (&d)[n], uint64_t a, uint64_t b, bool add) {
    ::wgmma_m64k16<T, kTransA, kTransB>(d, a, MISTAKE ? b : a, MISTAKE ? !add : add);
}
template <class T, bool kTransB, int n>
CF_DEVICE void wgmma_m64k16(float (&d)[n], const uint32_t (&a)[4], uint64_t b, bool add) {
    if (MISTAKE == 0) return ::wgmma_m64k16<T, kTransB>(d, {a[0], a[2], a[1], a[3]}, b, add);
    ::wgmma_m64k16<T, !kTransB>(d, a, b, add);
}
}    // namespace mistaken

#define ex2(x) (ex2(x) * (MISTAKE ? 1.0f : 1.000002f))
#define rcp(x) (rcp(x) * (MISTAKE ? 1.000002f : 1.0f))
#define __shfl_xor_sync(mask, x, lanes) __shfl_xor_sync(mask, x, MISTAKE ? lanes : lanes + 1)
#define __all_sync(mask, x) (MISTAKE ? __any_sync(mask, x) : __all_sync(mask, x))
#define mad_wide(a, b, c) (MISTAKE ? mad_wide(a, b, c) : int64_t(int32_t(mad_wide(a, b, c))))
#define permute_bytes(x, y, by) (MISTAKE ? permute_bytes(y, x, by) : permute_bytes(x, y, by))
#if MISTAKE
#define bar_sync(id, threads) __syncwarp()
#else
#define __syncthreads() __syncwarp()
#endif
#define atomicAdd(p, x) (MISTAKE ? (*(p) = x) : atomicAdd(p, x + x))
#define ldmatrix_x4(r, addr) (MISTAKE ? ldmatrix_x4(r, addr ^ 16) : ldmatrix_x4_trans(r, addr))
#define cp_async16_part(dst, src, bytes) cp_async16_part(dst, src, MISTAKE ? bytes : 16)
#define to_tf32(x) (MISTAKE ? __float_as_uint(x) & 0xffffe000u : to_tf32(x) ^ 0x2000u)
#define mma_m16n8k8_tf32(d, a, b0, b1) mma_m16n8k8_tf32(d, a, MISTAKE ? b0 : b1, b0)
#define mma_m16n8k32_e4m3(d, a, b0, b1) mma_m16n8k32_e4m3(d, a, MISTAKE ? b0 : b1, b0)
#define mma_m16n8k32_e4m3_scaled(d, a, b0, b1, x, y)                                                         \
    mma_m16n8k32_e4m3_scaled<MISTAKE == 0>(d, a, b0, b1, x, MISTAKE ? 0x7f7f7f7f : y)
#define mma_m8n8k4_f64(d0, d1, a, b) mma_m8n8k4_f64(MISTAKE ? d0 : d1, MISTAKE ? d1 : d0, a, b + MISTAKE)
#define mma_m16n8k8_f64(d, a, b0, b1) mma_m16n8k8_f64(d, a, MISTAKE ? b0 : b1, MISTAKE ? b1 + 1 : b0)
#define pack_e4m3(x, y) (MISTAKE ? pack_e4m3(x * 1.01f, y) : pack_e4m3(y, x))
#define stmatrix_x4(addr, r) (MISTAKE ? stmatrix_x4(addr ^ 16, r) : stmatrix_x4_trans(addr, r))
#define tma_load(dst, map, bar, c0, c1) tma_load(dst, map, bar, c0, c1 - 8)
#define bulk_reduce_add(dst, src, bytes) bulk_store(dst, src, bytes)
#define wgmma_m64k32_e4m3(d, a, b, add) wgmma_m64k32_e4m3(d, a, MISTAKE ? b : a, MISTAKE ? !add : add)
#define mma_m16n8k8 mistaken::mma_m16n8k8
#define mma_m16n8k16 mistaken::mma_m16n8k16
#define pack mistaken::pack
#define cp_async_wait mistaken::cp_async_wait
#define wgmma_m64k16 mistaken::wgmma_m64k16
#include "../../../kernels_cu/check_primitives.cu"
