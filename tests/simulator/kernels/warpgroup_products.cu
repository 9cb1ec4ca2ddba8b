// One wgmma of each kind, on tiles in shared memory and registers that the test fills.
#include "prim.cuh"

struct Params {
    const uint32_t* registers;    // (128 threads, 4) of a
    const uint32_t *a, *b;        // tiles, kTileBytes each
    float* d;                     // (128 threads, n / 2), read and written
    int32_t n, format, from_registers, trans_a, trans_b, accumulate;
    int32_t a_start, a_leading, a_stride, a_swizzle, b_start, b_leading, b_stride, b_swizzle;
};
constexpr int kTileBytes = 32768;
struct alignas(1024) SharedStorage {
    unsigned char a[kTileBytes], b[kTileBytes];
};

template <class T, int n> CF_DEVICE void multiply16(const Params& p, float (&d)[n], const uint32_t (&r)[4],
                                                    uint64_t a, uint64_t b) {
    const bool add = p.accumulate;
    if (p.from_registers) {
        if (p.trans_b) wgmma_m64k16<T, true>(d, r, b, add);
        else wgmma_m64k16<T, false>(d, r, b, add);
    } else if (p.trans_a) {
        if (p.trans_b) wgmma_m64k16<T, true, true>(d, a, b, add);
        else wgmma_m64k16<T, true, false>(d, a, b, add);
    } else {
        if (p.trans_b) wgmma_m64k16<T, false, true>(d, a, b, add);
        else wgmma_m64k16<T, false, false>(d, a, b, add);
    }
}

template <int n> CF_DEVICE void multiply(const Params& p, SharedStorage& s) {
    float d[n];
    uint32_t r[4];
    for (int i = 0; i < n; i++) d[i] = p.d[threadIdx.x * n + i];
    for (int i = 0; i < 4; i++) r[i] = p.registers[threadIdx.x * 4 + i];
    const uint64_t a = matrix_descriptor(smem_addr(s.a) + p.a_start, p.a_leading, p.a_stride, p.a_swizzle);
    const uint64_t b = matrix_descriptor(smem_addr(s.b) + p.b_start, p.b_leading, p.b_stride, p.b_swizzle);
    wgmma_fence_operand(d);
    wgmma_fence();
    if (p.format == 0) multiply16<__half>(p, d, r, a, b);
    else if (p.format == 1) multiply16<__nv_bfloat16>(p, d, r, a, b);
    else if (p.from_registers) wgmma_m64k32_e4m3(d, r, b, p.accumulate);
    else wgmma_m64k32_e4m3(d, a, b, p.accumulate);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_fence_operand(d);
    for (int i = 0; i < n; i++) p.d[threadIdx.x * n + i] = d[i];
}

CF_DEVICE void body(const Params& p) {
    auto& s = shared_memory<SharedStorage>();
    for (int i = threadIdx.x; i < kTileBytes / 4; i += 128) {
        st_shared(smem_addr(s.a + 4 * i), p.a[i]);
        st_shared(smem_addr(s.b + 4 * i), p.b[i]);
    }
    fence_proxy_async();
    __syncthreads();
    switch (p.n) {
        case 8: multiply<4>(p, s); break;
        case 24: multiply<12>(p, s); break;
        case 40: multiply<20>(p, s); break;
        case 128: multiply<64>(p, s); break;
        default: multiply<128>(p, s);
    }
}
CF_KERNEL(Params, 128, 1, body)
