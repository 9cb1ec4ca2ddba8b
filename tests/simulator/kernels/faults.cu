// What a GPU forgives, does wrong in silence or hangs on, one mode each: the simulator has to name it.
#include "prim.cuh"

struct Params {
    float* out;    // (128)
    int32_t mode;
};
struct alignas(1024) SharedStorage {
    float x[256];
    uint64_t bar;
};

CF_DEVICE int endless(volatile int* p) {
    while (*p >= 0) *p = *p / 2;
    return *p;
}
CF_DEVICE float deep(int n, volatile float* x) {
    volatile float frame[256];
    frame[n % 256] = *x;
    return n < 0 ? 0.f : deep(n + 1, x) + frame[0];
}

CF_DEVICE void bulk_faults(const Params& p, SharedStorage& s, int t) {
    switch (p.mode) {
        case 20: mbar_wait(s.bar, 0); break;    // not initialised
        case 21:                                // initialised, not fenced
            if (t == 0)
                mbar_init(s.bar, 1), mbar_arrive_expect_tx(s.bar, 256), bulk_load(s.x, p.out, 256, s.bar);
            break;
        case 22:    // nobody waits for the copy
            if (t == 0)
                mbar_init(s.bar, 1), mbar_init_fence(), mbar_arrive_expect_tx(s.bar, 256),
                    bulk_load(s.x, p.out, 256, s.bar);
            break;
        case 23:    // more arrivals than the barrier expects
            if (t == 0)
                mbar_init(s.bar, 2), mbar_arrive_expect_tx(s.bar, 16), mbar_arrive(s.bar), mbar_arrive(s.bar);
            break;
        case 24:    // fewer
            if (t == 0) mbar_init(s.bar, 2), mbar_arrive(s.bar), mbar_wait(s.bar, 0);
            break;
        case 25:
            st_shared(smem_addr(&s.x[t]), 1.f), __syncthreads();    // no fence between the proxies
            if (t == 0) bulk_store(p.out, s.x, 256), tma_store_commit(), tma_store_wait_read<0>();
            break;
        case 26:
            if (t == 0) bulk_store(p.out, s.x, 256), tma_store_commit();
            break;    // leaves while the copy reads
        case 27:
            if (t == 0) bulk_store(p.out, s.x, 250);
            break;
        case 28: s.x[3 * t % 256] = 1, mbar_wait(s.bar, 0); break;
    }
}

CF_DEVICE void body(const Params& p) {
    auto& s = shared_memory<SharedStorage>();
    const int t = threadIdx.x;
    volatile int one = 1, zero = 0;
    float sum = 0;
    switch (p.mode) {
        case 1:
            if (t < 96) bar_sync(2, 128);
            break;    // never full
        case 2:       // lanes meet in different instructions
            if (t % 32 < 16) sum = __shfl_xor_sync(~0u, 1.f, 1);
            else sum = __shfl_xor_sync(~0u, 1.f, 2);
            break;
        case 3: bar_sync(3, t < 64 ? 64 : 128); break;    // counts disagree
        case 4:
            if (t % 32 != 5) sum = __shfl_xor_sync(~0u, float(t), 1);
            break;                                             // a lane is missing
        case 5: s.x[t] = float(t), sum = s.x[t ^ 1]; break;    // no barrier in between
        case 6:
            if (t < 64) return;
            __syncthreads();
            break;    // after an exit
        case 7:
            if (t == 77) sum = p.out[int64_t(1) << 40];
            break;    // far out of bounds
        case 8:
            if (t == 3) sum = float(endless(const_cast<int*>(&one)));
            break;
        case 9:
            if (t == 5) sum = float(t / zero);
            break;
        case 10:
            if (t == 9) sum = deep(0, const_cast<float*>(&p.out[0]));
            break;    // stack
        case 11:
            cp_async16(smem_addr(&s.x[t]), p.out), cp_async_commit(), cp_async_wait<0>();
            break;                                                                    // misaligned
        case 12: sum = ld_shared<float>(smem_addr(&s.x[0]) + 4096 + 4 * t); break;    // past the end
        case 13: cp_async4(smem_addr(&s.x[t]), p.out); break;    // leaves while it arrives
        case 14: sum = s.x[t]; break;                            // never written
        case 15: {
            float r[4];
            if (t > 1000) r[1] = 1;
            sum = r[t % 4];
            break;
        }                                                          // never written, in registers
        case 16: sum = __shfl_xor_sync(0xffffu, 1.f, 1); break;    // a part of the warp
        case 17:
            if (t < 32) __syncwarp();
            else __syncthreads();
            __syncthreads();
            break;    // two of one kind, one of another
        case 18: {
            uint32_t r[4];
            ldmatrix_x4(r, smem_addr(s.x) + 8);
            sum = float(r[0]);
            break;
        }    // rows of 16 bytes
        default: bulk_faults(p, s, t);
    }
    p.out[t] = sum;
}
CF_KERNEL(Params, 128, 1, body)
