// Causal flash attention forward as small as it can be with every mechanism of sm_90: TMA, mbarriers, wgmma
// from shared memory and registers, warp specialisation, TMA store. D = 64, tiles of 64 x 64, one producer
// thread, one consumer warpgroup. Each FAULT_ plants one bug that the tests expect a report or a wrong result
// for.
#include "prim.cuh"

constexpr int kHeadDim = 64, kBlockM = 64, kBlockN = 64, kStages = 2;

struct Params {
    TensorMap q, k, v, o;    // (64, seqlen, heads), boxes of (64, 64, 1)
    float scale_log2;
};

struct alignas(1024) SharedStorage {
    __half q[kBlockM * kHeadDim], k[kStages][kBlockN * kHeadDim], v[kStages][kBlockN * kHeadDim];
    uint64_t q_full, full[kStages], empty[kStages];
};

CF_DEVICE void produce(const Params& p, SharedStorage& s, int first_row, int head, int tiles) {
    mbar_arrive_expect_tx(s.q_full, sizeof s.q);
    tma_load(s.q, p.q, s.q_full, 0, first_row, head);
    for (int j = 0; j < tiles; j++) {
        const int stage = j % kStages;
#if !defined(FAULT_NO_EMPTY_WAIT)
        mbar_wait(s.empty[stage], (j / kStages & 1) ^ 1);
#endif
#if defined(FAULT_EXPECTS_TOO_MUCH)
        mbar_arrive_expect_tx(s.full[stage], 2 * sizeof s.k[0] + 16);
#else
        mbar_arrive_expect_tx(s.full[stage], 2 * sizeof s.k[0]);
#endif
        tma_load(s.k[stage], p.k, s.full[stage], 0, j * kBlockN, head);
        tma_load(s.v[stage], p.v, s.full[stage], 0, j * kBlockN, head);
    }
}

CF_DEVICE void consume(const Params& p, SharedStorage& s, int first_row, int head, int tiles) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float o[32] = {}, row_max[2] = {-kInfinity, -kInfinity}, row_sum[2] = {};
    auto tile = [](const void* t) { return matrix_descriptor(smem_addr(t), kBlockN * 128, 1024); };
    mbar_wait(s.q_full, 0);
    for (int j = 0; j < tiles; j++) {
        const int stage = j % kStages;
#if !defined(FAULT_NO_FULL_WAIT)
        mbar_wait(s.full[stage], j / kStages & 1);
#endif
        float scores[32];
        wgmma_fence_operand(scores);
#if !defined(FAULT_NO_WGMMA_FENCE)
        wgmma_fence();
#endif
        for (int k = 0; k < 4; k++)
            wgmma_m64k16<__half, false, false>(scores, tile(s.q) + 2 * k, tile(s.k[stage]) + 2 * k, k > 0);
        wgmma_commit();
#if !defined(FAULT_NO_WGMMA_WAIT)
        wgmma_wait<0>();
#endif
        wgmma_fence_operand(scores);

        const int row = first_row + warp * 16 + lane / 4;
        float scale[2];
        for (int h = 0; h < 2; h++) {
            float m = row_max[h];
            for (int i = 0; i < 32; i++) {
                if (i / 2 % 2 != h) continue;
                if (j * kBlockN + i / 4 * 8 + lane % 4 * 2 + i % 2 > row + h * 8) scores[i] = -kInfinity;
                m = fmaxf(m, scores[i]);
            }
            m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, 1));
            m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, 2));
            scale[h] = ex2((row_max[h] - m) * p.scale_log2);
            row_max[h] = m;
            row_sum[h] *= scale[h];
            for (int i = 0; i < 32; i++) {
                if (i / 2 % 2 != h) continue;
                scores[i] = ex2((scores[i] - m) * p.scale_log2);
                row_sum[h] += scores[i];
            }
        }
        uint32_t weights[4][4];
        for (int k = 0; k < 4; k++)
            for (int i = 0; i < 4; i++)
                weights[k][i] = pack<__half>(scores[k * 8 + i * 2], scores[k * 8 + i * 2 + 1]);
        for (int i = 0; i < 32; i++) o[i] *= scale[i / 2 % 2];
        wgmma_fence_operand(o);
        wgmma_fence();
        for (int k = 0; k < 4; k++)
            wgmma_m64k16<__half, true>(o, weights[k], tile(s.v[stage]) + k * (16 * 128 >> 4), true);
        wgmma_commit();
#if defined(FAULT_EARLY_RELEASE)
        mbar_arrive(s.empty[stage]);
        wgmma_wait<0>();
#else
        wgmma_wait<0>();
        mbar_arrive(s.empty[stage]);
#endif
        wgmma_fence_operand(o);
    }
    // The result goes through the shared memory of Q, which no product reads any more.
    for (int h = 0; h < 2; h++) {
        row_sum[h] += __shfl_xor_sync(0xffffffff, row_sum[h], 1);
        row_sum[h] += __shfl_xor_sync(0xffffffff, row_sum[h], 2);
    }
    const int row = warp * 16 + lane % 16;
    for (int k = 0; k < 4; k++) {
        uint32_t r[4];
        for (int i = 0; i < 4; i++) {
            const float sum = row_sum[i % 2];
            r[i] = pack<__half>(o[k * 8 + i * 2] / sum, o[k * 8 + i * 2 + 1] / sum);
        }
        stmatrix_x4(smem_addr(s.q) + row * 128 + (((2 * k + lane / 16) ^ (row & 7)) << 4), r);
    }
#if !defined(FAULT_NO_PROXY_FENCE)
    fence_proxy_async();
#endif
#if !defined(FAULT_NO_STORE_BARRIER)
    bar_sync(1, 128);
#endif
    if (threadIdx.x == 0) {
        tma_store(p.o, s.q, 0, first_row, head);
        tma_store_commit();
#if !defined(FAULT_NO_STORE_WAIT)
        tma_store_wait_read<0>();
#endif
    }
}

CF_DEVICE void body(const Params& p) {
    auto& s = shared_memory<SharedStorage>();
    const int head = blockIdx.y, first_row = blockIdx.x * kBlockM, tiles = blockIdx.x + 1;
    if (threadIdx.x == 0) {
        mbar_init(s.q_full, 1);
        for (int i = 0; i < kStages; i++) {
            mbar_init(s.full[i], 1);
            mbar_init(s.empty[i], 128);
        }
#if !defined(FAULT_NO_INIT_FENCE)
        mbar_init_fence();
#endif
    }
#if !defined(FAULT_NO_INIT_BARRIER)
    __syncthreads();
#endif
    if (threadIdx.x >= 128) {
        setmaxnreg_dec<40>();
        if (threadIdx.x == 128) produce(p, s, first_row, head, tiles);
    } else {
        setmaxnreg_inc<208>();
        consume(p, s, first_row, head, tiles);
    }
}
CF_KERNEL(Params, 256, 1, body)
