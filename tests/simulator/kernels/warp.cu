// One block of 64 threads through the primitives of a thread and of a warp; each writes one column of `out`
// (columns x 64).
#include "prim.cuh"

struct Params {
    const float* x;    // (64)
    float* out;
    int* counter;
};
struct SharedStorage {
    float exchange[64];
};

CF_DEVICE void body(const Params& p) {
    auto& s = shared_memory<SharedStorage>();
    const int t = threadIdx.x, lane = t % 32;
    const float x = p.x[t];
    int column = 0;
    auto put = [&](float y) { p.out[64 * column++ + t] = y; };
    put(__shfl_sync(~0u, x, 5));
    put(__shfl_xor_sync(~0u, x, 9));
    put(__shfl_up_sync(~0u, x, 3));
    put(__shfl_down_sync(~0u, x, 4));
    put(float(__shfl_xor_sync(~0u, double(x), 1)));
    put(float(__popc(__ballot_sync(~0u, x > 0))));
    put(float(__any_sync(~0u, lane == 7 && t > 32)));
    put(float(__all_sync(~0u, t < 32)));
    put(float(__syncthreads_count(x > 0)));
    put(float(__syncthreads_or(t == 63)));
    put(float(__syncthreads_and(t != 63)));
    put(ex2(x));
    put(rcp(x));
    put(__uint_as_float(to_tf32(x)));
    put(__uint_as_float(pack<__nv_bfloat16>(0.f, x)));
    put(float(pack<__half>(x, 0.f)));
    put(float(pack_e4m3(x, -x)));
    s.exchange[t] = x;
    __syncwarp();
    put(s.exchange[t ^ 1]);
    __syncwarp();
    // Half of the block hands over to the other: bar_arrive does not wait, bar_sync does.
    if (t < 32) {
        s.exchange[t] = 2 * x;
        bar_arrive(1, 64);
        put(0);
    } else {
        bar_sync(1, 64);
        put(s.exchange[t - 32]);
    }
    // In some lanes what never happens in a kernel.
    pin_schedule(t % 5 ? t : 0x7fc12345u);
    put(float(elect_one()));
    atomicAdd(p.counter, 1);
    put(float(atomicMax(p.counter + 1, t) < 64));
    __syncthreads();
    const uint32_t mine = smem_addr(&s.exchange[t]);
    st_shared(mine, x);
    put(ld_shared<float>(mine));
    put(ld_global(p.x + (t ^ 2)) + ld_global_nc(p.x + t));
    // 24 bits: byte 3 of y, byte 0 of x, byte 2 of y.
    put(float(permute_bytes(t, 0x87654321u, 0x4607) & 0xffffffu));
}
CF_KERNEL(Params, 64, 1, body)
