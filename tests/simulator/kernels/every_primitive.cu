// Every primitive once, as far as the architecture has it: compiled by NVRTC for all of them, never run.
#include "prim.cuh"

struct Params {
    TensorMap map;
    const __half* x;
    float* y;
    double* z;
    int* counter;
};
struct alignas(1024) SharedStorage {
    uint32_t words[1024];
    uint64_t bar;
};

CF_DEVICE void everywhere(const Params& p, SharedStorage& s, uint32_t a) {
    bar_sync(1, 128);
    bar_arrive(2, 128);
    pin_schedule(a);
    p.y[0] = ex2(p.y[1]) * rcp(p.y[2]);
    p.z[0] = ex2(p.z[1]);
    p.y[3] = float(pack<__half>(p.y[4], p.y[5]) ^ pack<__nv_bfloat16>(p.y[6], p.y[7]));
    p.y[4] = float(permute_bytes(__float_as_uint(p.y[5]), a, 0x5140));
    const float one = ld_shared<float>(a);
    const float2 two = ld_shared<float2>(a);
    const float4 four = ld_shared<float4>(a);
    st_shared(a + 16, one);
    st_shared(a + 32, two);
    st_shared(a + 48, four);
    st_global(p.y + 5, ld_global(p.y + 6) + ld_global_nc(p.y + 7));
    atomicAdd(p.y, 1.f);
    atomicAdd(p.z, 1.0);
    atomicMax(p.counter, 1);
    if (__syncthreads_or(threadIdx.x > 5))
        p.y[8] = __shfl_xor_sync(~0u, one, 1) + __shfl_down_sync(~0u, one, 1);
}

#if __CUDA_ARCH__ >= 700
CF_DEVICE void volta(const Params& p) {
    uint32_t* turns = reinterpret_cast<uint32_t*>(p.counter);
    semaphore_wait(turns, take_ticket(turns + 1));
    semaphore_release(turns);
}
#endif

#if __CUDA_ARCH__ >= 750
CF_DEVICE void turing(const Params& p, uint32_t a) {
    uint32_t r1[1], r2[2], r4[4];
    float d[4] = {};
    ldmatrix_x1(r1, a), ldmatrix_x2(r2, a), ldmatrix_x4(r4, a);
    mma_m16n8k8<__half>(d, r2, r1[0] ^ r4[0] ^ r4[1] ^ r4[2] ^ r4[3]);
    ldmatrix_x1_trans(r1, a), ldmatrix_x2_trans(r2, a), ldmatrix_x4_trans(r4, a);
    mma_m16n8k8<__half>(d, r2, r1[0] ^ r4[0] ^ r4[1] ^ r4[2] ^ r4[3]);
    p.y[9] = d[0] + d[1] + d[2] + d[3];
}
#endif

#if __CUDA_ARCH__ >= 800
CF_DEVICE void ampere(const Params& p, uint32_t a) {
    cp_async4(a, p.x), cp_async16(a + 32, p.x, threadIdx.x > 3),
        cp_async4_part(a + 48, p.x, threadIdx.x % 5), cp_async16_part(a + 64, p.x, threadIdx.x % 17);
    cp_async_commit();
    cp_async_wait<1>();
    cp_async_wait<0>();
    uint32_t r2[2], r4[4];
    ldmatrix_x2(r2, a), ldmatrix_x4(r4, a);
    float d[4] = {};
    mma_m16n8k8<__nv_bfloat16>(d, r2, r4[0]);
    mma_m16n8k16<__half>(d, r4, r2[0], r2[1]);
    mma_m16n8k16<__nv_bfloat16>(d, r4, r2[0], r2[1]);
    r4[0] = to_tf32(d[0]);
    mma_m16n8k8_tf32(d, r4, r2[0], r2[1]);
    mma_m8n8k4_f64(p.z[2], p.z[3], p.z[4], p.z[5]);
#if __CUDA_ARCH__ >= 890
    mma_m16n8k32_e4m3(d, r4, r2[0], r2[1]);
    d[0] += pack_e4m3(d[1], d[2]);
#endif
#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH__ >= 1200
    mma_m16n8k32_e4m3_scaled<3, 1>(d, r4, r2[0], r2[1], a, r4[0]);
#endif
    p.y[10] = d[0] + d[1] + d[2] + d[3];
}
#endif

#if __CUDA_ARCH__ >= 900
CF_DEVICE void hopper(const Params& p, SharedStorage& s, uint32_t a) {
    const uint32_t r1[1] = {a}, r2[2] = {a, a + 1}, r4[4] = {a, a + 1, a + 2, a + 3};
    if (elect_one()) {
        tma_prefetch(p.map);
        mbar_init(s.bar, 1);
        mbar_init_fence();
        mbar_arrive_expect_tx(s.bar, 16);
        mbar_arrive(s.bar);
        tma_load(s.words, p.map, s.bar, 0, 1);
        tma_load(s.words, p.map, s.bar, 0, 1, 2);
        tma_load(s.words, p.map, s.bar, 0, 1, 2, 3);
        tma_load(s.words, p.map, s.bar, 0, 1, 2, 3, 4);
        bulk_load(s.words, p.x, 64, s.bar);
    }
    mbar_wait(s.bar, 0);
    mbar_wait(s.bar, 1);
    double d[4] = {};
    mma_m16n8k8_f64(d, {p.z[6], p.z[7], p.z[8], p.z[9]}, p.z[10], p.z[11]);
    p.z[12] = d[0] + d[1] + d[2] + d[3];
    stmatrix_x1(a, r1), stmatrix_x2(a, r2), stmatrix_x4(a, r4);
    stmatrix_x1_trans(a, r1), stmatrix_x2_trans(a, r2), stmatrix_x4_trans(a, r4);
    fence_proxy_async();
    fence_proxy_async_global();
    __syncthreads();
    if (threadIdx.x == 0) {
        tma_store(p.map, s.words, 0, 1);
        tma_store(p.map, s.words, 0, 1, 2);
        tma_store(p.map, s.words, 0, 1, 2, 3);
        tma_store(p.map, s.words, 0, 1, 2, 3, 4);
        bulk_store(p.y, s.words, 64);
        bulk_reduce_add(p.y, s.words, 64);
        tma_store_commit();
        tma_store_wait_read<0>();
        tma_store_wait<0>();
    }
}
#endif

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#if !defined(PROBE_N)
#define PROBE_N 64
#endif
CF_DEVICE void warpgroup(const Params& p, SharedStorage& s) {
    const uint64_t t = matrix_descriptor(smem_addr(s.words), 0, 1024);
    const uint32_t r[4] = {1, 2, 3, threadIdx.x};
    float d[PROBE_N / 2];
    wgmma_fence_operand(d);
    wgmma_fence();
    wgmma_m64k16<__half, false, false>(d, t, t, false);
    wgmma_m64k16<__half, true, true>(d, t, t, true);
    wgmma_m64k16<__half, false>(d, r, t, true);
    wgmma_m64k16<__nv_bfloat16, false, true>(d, t, t, true);
    wgmma_m64k16<__nv_bfloat16, true>(d, r, t, true);
    wgmma_m64k32_e4m3(d, t, t, true);
    wgmma_m64k32_e4m3(d, r, t, true);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_fence_operand(d);
    for (int i = 0; i < PROBE_N / 2; i++) p.y[i * 128 + threadIdx.x] = d[i];
}
#endif

CF_DEVICE void body(const Params& p) {
    auto& s = shared_memory<SharedStorage>();
    const uint32_t a = smem_addr(&s.words[threadIdx.x * 4]);
    everywhere(p, s, a);
#if __CUDA_ARCH__ >= 700
    volta(p);
#endif
#if __CUDA_ARCH__ >= 750
    turing(p, a);
#endif
#if __CUDA_ARCH__ >= 800
    ampere(p, a);
#endif
#if __CUDA_ARCH__ >= 900
    hopper(p, s, a);
#endif
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if (threadIdx.x < 128) {
        setmaxnreg_dec<152>();
        warpgroup(p, s);
    } else {
        setmaxnreg_inc<160>();
    }
#endif
}
CF_KERNEL(Params, 256, 1, body)
