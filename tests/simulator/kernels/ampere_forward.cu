// Causal flash attention forward as small as it can be with every mechanism of sm_80: cp.async in two stages,
// ldmatrix, mma.sync. D = 64, tiles of 64 x 64, 4 warps. Each FAULT_ plants one bug that the tests expect a
// report or a wrong result for.
#include "prim.cuh"

constexpr int kHeadDim = 64, kBlockM = 64, kBlockN = 64, kThreads = 128;

struct Params {
    const __half *q, *k, *v;    // (heads, seqlen, 64)
    __half* o;
    int32_t seqlen;
    float scale_log2;
};

struct SharedStorage {
    __half q[kBlockM * kHeadDim], k[2][kBlockN * kHeadDim], v[2][kBlockN * kHeadDim];
};

CF_DEVICE uint32_t offset(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }
#if defined(FAULT_SWIZZLE)
CF_DEVICE uint32_t write_offset(int row, int chunk) { return row * 128 + ((chunk ^ (row & 3)) << 4); }
#else
CF_DEVICE uint32_t write_offset(int row, int chunk) { return offset(row, chunk); }
#endif

CF_DEVICE void load_tile(__half* to, const __half* from) {
    for (int i = threadIdx.x; i < 64 * 8; i += kThreads)
        cp_async16(smem_addr(to) + write_offset(i / 8, i % 8), from + i * 8);
}

CF_DEVICE void body(const Params& p) {
    auto& s = shared_memory<SharedStorage>();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t head = int64_t(blockIdx.y) * p.seqlen * kHeadDim;
    const int first_row = blockIdx.x * kBlockM, tiles = blockIdx.x + 1;

    load_tile(s.q, p.q + head + first_row * kHeadDim);
    load_tile(s.k[0], p.k + head);
    load_tile(s.v[0], p.v + head);
    cp_async_commit();

    uint32_t q[4][4];
    float o[8][4] = {}, row_max[2] = {-kInfinity, -kInfinity}, row_sum[2] = {};
    for (int j = 0; j < tiles; j++) {
        if (j + 1 < tiles) {
            load_tile(s.k[(j + 1) & 1], p.k + head + (j + 1) * kBlockN * kHeadDim);
            load_tile(s.v[(j + 1) & 1], p.v + head + (j + 1) * kBlockN * kHeadDim);
        }
        cp_async_commit();
#if !defined(FAULT_NO_WAIT)
        cp_async_wait<1>();
#endif
        __syncthreads();
        if (j == 0)
            for (int k = 0; k < 4; k++)
                ldmatrix_x4(q[k], smem_addr(s.q) + offset(warp * 16 + lane % 16, k * 2 + lane / 16));

        float scores[8][4] = {};
        for (int k = 0; k < 4; k++)
            for (int n = 0; n < 4; n++) {
                uint32_t b[4];
                ldmatrix_x4(b, smem_addr(s.k[j & 1]) +
                                   offset(n * 16 + lane / 16 * 8 + lane % 8, k * 2 + lane / 8 % 2));
                mma_m16n8k16<__half>(scores[2 * n], q[k], b[0], b[1]);
                mma_m16n8k16<__half>(scores[2 * n + 1], q[k], b[2], b[3]);
            }

        const int row = first_row + warp * 16 + lane / 4;
        float scale[2];
        for (int h = 0; h < 2; h++) {
            float m = row_max[h];
            for (int n = 0; n < 8; n++)
                for (int e = 0; e < 2; e++) {
                    float& x = scores[n][h * 2 + e];
                    if (j * kBlockN + n * 8 + lane % 4 * 2 + e > row + h * 8) x = -kInfinity;
                    m = fmaxf(m, x);
                }
            m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, 1));
            m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, 2));
            scale[h] = ex2((row_max[h] - m) * p.scale_log2);
            row_max[h] = m;
            row_sum[h] *= scale[h];
            for (int n = 0; n < 8; n++)
                for (int e = 0; e < 2; e++) {
                    float& x = scores[n][h * 2 + e];
                    x = ex2((x - m) * p.scale_log2);
                    row_sum[h] += x;
                }
        }
        for (int n = 0; n < 8; n++)
            for (int e = 0; e < 4; e++) o[n][e] *= scale[e / 2];
        for (int k = 0; k < 4; k++) {
            uint32_t a[4] = {pack<__half>(scores[2 * k][0], scores[2 * k][1]),
                             pack<__half>(scores[2 * k][2], scores[2 * k][3]),
                             pack<__half>(scores[2 * k + 1][0], scores[2 * k + 1][1]),
                             pack<__half>(scores[2 * k + 1][2], scores[2 * k + 1][3])};
            for (int n = 0; n < 4; n++) {
                uint32_t b[4];
                ldmatrix_x4_trans(b, smem_addr(s.v[j & 1]) +
                                         offset(k * 16 + lane / 8 % 2 * 8 + lane % 8, n * 2 + lane / 16));
                mma_m16n8k16<__half>(o[2 * n], a, b[0], b[1]);
                mma_m16n8k16<__half>(o[2 * n + 1], a, b[2], b[3]);
            }
        }
#if !defined(FAULT_NO_BARRIER)
        __syncthreads();    // the next copies overwrite the buffer just read
#endif
    }
    for (int h = 0; h < 2; h++) {
        row_sum[h] += __shfl_xor_sync(0xffffffff, row_sum[h], 1);
        row_sum[h] += __shfl_xor_sync(0xffffffff, row_sum[h], 2);
        const int row = first_row + warp * 16 + lane / 4 + h * 8;
        for (int n = 0; n < 8; n++)
            st_global(reinterpret_cast<uint32_t*>(p.o + head + row * kHeadDim + n * 8 + lane % 4 * 2),
                      pack<__half>(o[n][h * 2] / row_sum[h], o[n][h * 2 + 1] / row_sum[h]));
    }
    cp_async_wait<0>();
}
CF_KERNEL(Params, kThreads, 1, body)
