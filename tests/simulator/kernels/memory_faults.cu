// Memory errors that give right results on the schedule at hand, or none at all: only a sanitizer sees them.
// One mode each.
#include "prim.cuh"

struct Params {
    float* out;    // (256)
    int32_t mode;
};
struct alignas(1024) SharedStorage {
    float x[128], y[128];
    uint64_t bar;
};

CF_DEVICE void body(const Params& p) {
    auto& s = shared_memory<SharedStorage>();
    const int t = threadIdx.x;
    volatile int beyond = 140;
    switch (p.mode) {
        case 1: p.out[256 + t] = 1; break;    // past the end of an array
        case 2: s.x[beyond] = 1; break;       // past the end of a member of the struct
        case 3: {
            float r[4];
            for (int i = 0; i < 4; i++) r[i] = 0;
            p.out[t] = r[(beyond + t) % 8];
            break;
        }    // of a register array
        case 4: p.out[t] = float(1 << beyond); break;
        case 5: p.out[t] = ld_global(p.out + 256 + t); break;    // a primitive past the end
        case 6:
            s.x[t] = float(t);
            p.out[t] = s.x[t < 64 ? t + 32 : 0];
            break;                                      // reads what another warp writes
        case 7: p.out[0] = float(t); break;             // all threads write the same place
        case 8: p.out[t] = float(blockIdx.x); break;    // so do all blocks
        case 9: atomicAdd(&p.out[t], 1.f); break;       // which is allowed like this
        case 10:                                        // overwritten while the copy may still read it
            if (t == 0) {
                s.x[0] = 1;
                fence_proxy_async();
                bulk_store(p.out, s.x, 16);
                s.x[1] = 2;    // why a statement: what a primitive's call does not report lasts until its end
                tma_store_commit();
                tma_store_wait_read<0>();
            }
            break;
        case 11:    // read without waiting for the copy
            cp_async4(smem_addr(&s.x[t]), p.out + t), cp_async_commit();
            p.out[128 + t] = s.x[t];
            cp_async_wait<0>();
            break;
        case 12:
            s.x[t] = float(t);
            __syncthreads();
            p.out[t + 128 * blockIdx.x] = s.x[127 - t];
            break;    // right
        case 13:
            s.x[t] = float(t);
            __syncwarp();
            p.out[t + 128 * blockIdx.x] = s.x[t ^ 31];
            break;    // right
        case 14:
            if (t < 32) s.x[t] = 1, bar_arrive(1, 64);
            else if (t < 64) bar_sync(1, 64), p.out[t] = s.x[t - 32];
            break;    // right
        case 15:      // blocks that are eight apart write the same place
            if (blockIdx.x % 8 == 0) p.out[t] = float(blockIdx.x);
            break;
        default: break;
    }
}
CF_KERNEL(Params, 128, 1, body)
