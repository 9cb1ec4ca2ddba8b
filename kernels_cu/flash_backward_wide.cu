// Attention backward on mma.sync tensor cores for head dims above 256, sm_80 to sm_120: warps share columns.
// CF_PASS names the pass of a compilation.
//
// Source: A2 = FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 2; pass dq exchanges its loops.
//   [A2.6]  pass dkv: a block owns the keys K_j, V_j of one head; dK = 0, dV = 0              (lines 6 and 7)
//   [A2.8]  for each query head that reads them, for each tile of queries that the band lets see one of them;
//           pass dq: a block owns queries Q_i, dO_i of one head; for each tile of keys of which one sees one
//   [A2.10] S = Q_i K_j^T
//   [A2.11] P = e^(scale S - LSE), 0 where a pair is outside the band
//   [A2.12] dV = dV + P^T dO_i                                              (dkv)
//   [A2.13] dP = dO_i V_j^T
//   [A2.14] dS = P * (dP - delta)
//   [A2.15] dQ_i = dQ_i + dS K_j                                            (dq)
//   [A2.16] dK = dK + dS^T Q_i                                              (dkv)
// [A2.4] is pass delta of flash_backward.cu. No atomics: the same bits every run.
//
// Grid:   along x. dkv: (batch * heads_k + head) * ceil(seqlen_k / kBlockN) + tile; dq:
//         (batch * heads_q + head) * ceil(seqlen_q / kBlockM) + tile, its tiles from the last to the first:
//         under a causal mask the last see the most keys. Packed: seqlens are the longest; blocks past the
//         end of their sequence return.
// Block:  8 warps. Warp w has columns kColumns w .. of Q, K, V, dO and of the gradients. It copies and
//         multiplies these only, so that its S and dP are parts of sums over all warps. Parts meet in shared
//         memory, each thread finishes one pair of neighbours of S and dP, and P and dS come back.
// Shared: of each warp, two stages of what it streams; in the same place, before them what it holds in
//         registers, and after them its gradients; parts of S and dP; P (dkv), dS; LSE and delta (dkv).
//
// Assumes: last axes of q, k, v, dO, dQ, dK, dV contiguous; seqlens below 2^30; row strides below 2^31 bytes;
// q, k, v and dO finite. lse is the forward pass's, delta pass delta's.
// Not here: mask, bias, softcap, ALiBi, dropout (simple_backward.cu).
#include "backward/gradient.cuh"
#include "tile/epilogue.cuh"

// ---- Config
#if !defined(CF_ELEMENT)
#define CF_ELEMENT __half
#define CF_HEAD_DIM 512
#define CF_HEAD_DIM_V 512
#define CF_MASK band
#define CF_PASS dkv
#define CF_BLOCK_M 16
#define CF_BLOCK_N 32
#define CF_THREADS 256
#define CF_SHARED_BYTES 100608
#endif
enum class Mask { band, any };
using Element = CF_ELEMENT;
using Product = Math<Element, 1, false>;
enum : int {
    kThreads = CF_THREADS,
    kWarps = kThreads / 32,
    kColumns = CF_HEAD_DIM / kWarps,    // of a warp
    kSteps = kColumns / 16,
    kWidth = 64,    // of a warp's tiles. why not kColumns: rows of whole banks need no second swizzle
    kStages = 2
};
static_assert(Mask::CF_MASK == Mask::band && CF_HEAD_DIM == CF_HEAD_DIM_V && kColumns <= kWidth &&
              kColumns % 16 == 0);

template <int kRows> using OwnTile = Tile<Element, kRows, kWidth>;
// Two matrices that a warp streams, and two that it has read before, or writes after.
template <int kStreamed, int kHeld>
union WarpStorage {
    struct {
        OwnTile<kStreamed> first[kStages], second[kStages];
    };
    OwnTile<kHeld> held[2];
};

// What the warps have of S and dP, kM x kN blocks of 16 x 8: each half of the rows of a block is a warp's to
// finish.
// why opaque: addresses are computed anew, and hold no registers in between.
template <int kM, int kN>
struct Parts {
    static_assert(kM * kN * 2 == kWarps, "a thread finishes one pair");
    float2 pairs[2][kWarps][kWarps][32];    // of S, of dP; by whose part it is, and by who adds

    CF_DEVICE void put(int which, const float (&d)[kM][kN][4]) {
        const int thread = static_cast<int>(opaque(threadIdx.x)), warp = thread / 32, lane = thread % 32;
        const uint32_t to = smem_addr(&pairs[which][warp][0][lane]);
        CF_UNROLL
        for (int i = 0; i < kWarps; i++) {
            const float(&block)[4] = d[i / 2 / kN][i / 2 % kN];
            st_shared(to + i * 32 * 8, float2{block[i % 2 * 2], block[i % 2 * 2 + 1]});
        }
    }
    // why in this order: it is the same every run.
    CF_DEVICE float2 sum(int which) const {
        const int thread = static_cast<int>(opaque(threadIdx.x)), warp = thread / 32, lane = thread % 32;
        const uint32_t from = smem_addr(&pairs[which][0][warp][lane]);
        float2 total = ld_shared<float2>(from);
        CF_UNROLL
        for (int w = 1; w < kWarps; w++) {
            const float2 x = ld_shared<float2>(from + w * kWarps * 32 * 8);
            total.x += x.x, total.y += x.y;
        }
        return total;
    }
};

// The pair that this thread finishes: row 16 m + 8 half + g, columns 8 n + 2 t and the next.
template <int kN>
struct OwnPair {
    int m, n, half, row, column;

    CF_DEVICE OwnPair() {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        m = warp / 2 / kN, n = warp / 2 % kN, half = warp % 2;
        row = 16 * m + 8 * half + lane / 4, column = 8 * n + lane % 4 * 2;
    }
};

// Of a product q k^T, in the exponent of 2.
CF_DEVICE float unit_of(const Score& score) { return static_cast<float>(score.scale * 1.4426950408889634); }

// [A2.11] Of a pair whose first key is this one.
// why no test of the row: one without keys, whose LSE is -inf, is outside the band; of those past the end Q,
// dO, LSE and delta are 0, and so is what they add.
CF_DEVICE float2 weigh(float2 score, float unit_log2, float lse, const NarrowBand& band, int32_t query,
                       int32_t key) {
    const int32_t first = band.first_key(query) - key, end = band.end_key(query) - key;
    const float left = ex2(fmaf(score.x, unit_log2, -lse * kLog2e));
    const float right = ex2(fmaf(score.y, unit_log2, -lse * kLog2e));
    return float2{first <= 0 && end > 0 ? left : 0, first <= 1 && end > 1 ? right : 0};
}
// [A2.14]
CF_DEVICE float2 differentiate(float2 weight, float2 dp, float delta) {
    return float2{weight.x * (dp.x - delta), weight.y * (dp.y - delta)};
}

// This warp's columns of rows of a head, `rows` of which exist.
template <class Of>
CF_DEVICE GlobalRows<Of> own_rows(const Tensor& t, int32_t batch, int32_t head, int64_t first, int32_t rows,
                                  int32_t columns) {
    const int32_t column = kColumns * (threadIdx.x / 32);
    return GlobalRows<Of>(head_rows<Of>(t, batch, head, first) + column, t.row, rows,
                          smaller<int32_t>(columns - column, kColumns));
}

// A warp starts the copy of its rows into a tile; what does not exist becomes zeros. Then commit, wait.
template <class T>
CF_DEVICE void copy_own(const T& tile, const GlobalRows<const Element>& from) {
    const int lane = threadIdx.x % 32, chunk = lane % 8, width = from.alignment();
    const int bytes = larger(0, smaller(16, (from.columns - 8 * chunk) * 2));
    const uint32_t to = smem_addr(tile.data);
    const auto bytes_of = [&](int row) { return row < from.rows ? bytes : 0; };
    if (width == 16) {
        CF_UNROLL
        for (int row = lane / 8; row < T::kRows; row += 4)
            cp_async16_part(to + T::offset(row, chunk), from.row(row) + 8 * chunk, bytes_of(row));
    } else {
        using Loader = TileLoader<T, 64>;
#pragma unroll 1
        for (int row = lane / 8; row < T::kRows; row += 4)
            Loader::copy_chunk(to + T::offset(row, chunk), from.row(row) + 8 * chunk, bytes_of(row), width);
    }
}

// Accumulators of a warp's columns, times a factor, to its rows, through a tile of its own.
template <int kM>
CF_DEVICE void store_own(const GlobalRows<Element>& to, const float (&d)[kM][kColumns / 8][4], float factor,
                         const OwnTile<16 * kM>& tile) {
    const AccumulatorWriter<OwnTile<16 * kM>> writer(smem_addr(tile.data), 0, 0);
    CF_UNROLL
    for (int m = 0; m < kM; m++) {
        CF_UNROLL
        for (int n = 0; n < kColumns / 8; n++) {
            CF_UNROLL
            for (int half = 0; half < 2; half++)
                writer.store(d[m][n][2 * half] * factor, d[m][n][2 * half + 1] * factor, m, n, half, 0);
        }
    }
    // sync: every lane's part of the rows is in shared memory before other lanes read it.
    __syncwarp();
    copy_staged_rows<OwnTile<16 * kM>>(smem_addr(tile.data), to);
}

// why: the passes are templates so that only that of this compilation is instantiated.
template <class Storage>
CF_DEVICE Storage& storage_of_pass() {
    static_assert(sizeof(Storage) == CF_SHARED_BYTES, "the catalog and the kernel disagree on shared memory");
    return shared_memory<Storage>();
}

// ---- dkv: a block owns keys and goes over queries.
template <int kBlockM, int kBlockN>
CF_DEVICE void dkv(const BackwardParams& p) {
    static_assert(kBlockM == 16);
    constexpr int kM = kBlockN / 16, kN = kBlockN / 8;
    using QueryTile = OwnTile<kBlockM>;
    using KeyTile = OwnTile<kBlockN>;
    using WeightTile = Tile<Element, kBlockM, kBlockN>;
    struct Storage {
        WarpStorage<kBlockM, kBlockN> warps[kWarps];    // streams Q, dO; holds K, V
        Parts<1, kN> parts;
        WeightTile p, ds;    // neighbours
        float rows[kStages][2][kBlockM];    // LSE, delta; of rows past the end 0
    };
    Storage& s = storage_of_pass<Storage>();

    // [A2.6]
    const BlockWork work = work_of_block(blockIdx.x, cdiv(p.shape.seqlen_k, kBlockN), p.shape.heads_k);
    const Sequence sequence = sequence_of(p.shape, work.batch);
    const int32_t n_first = work.tile * kBlockN;
    if (n_first >= sequence.rows_k) return;
    const int32_t group = p.shape.heads_q / p.shape.heads_k, first_head = work.head * group;
    const Band band(p.score, sequence);
    const NarrowBand narrow(band);
    const Range queries = band.queries_of(n_first, n_first + kBlockN);
    const int32_t first_tile = queries.first / kBlockM, tiles = cdiv(queries.end, kBlockM) - first_tile;
    const int32_t steps = tiles * group;
    const float scale = static_cast<float>(p.score.scale), unit_log2 = unit_of(p.score);

    auto& own = s.warps[threadIdx.x / 32];
    const auto own_keys = [&](const Tensor& t, int32_t columns) {
        return own_rows<const Element>(t, work.batch, work.head, sequence.first_k + n_first,
                                       sequence.seqlen_k - n_first, columns);
    };
    RegisterRowsAsB<kN, kSteps> rK, rV;
    copy_own(own.held[0], own_keys(p.k, p.shape.head_dim));
    copy_own(own.held[1], own_keys(p.v, p.shape.head_dim_v));
    cp_async_commit();
    cp_async_wait<0>();
    // sync: the lanes' copies of K and V are visible to the warp.
    __syncwarp();
    rK.fill(RowsAsB<KeyTile>(smem_addr(own.held[0].data), 0));
    rV.fill(RowsAsB<KeyTile>(smem_addr(own.held[1].data), 0));
    // sync: the warp has read K and V, over which Q and dO are laid.
    __syncwarp();
    const auto start = [&](int32_t step) {
        if (step < steps) {
            const int32_t head = first_head + step / tiles, m_first = (first_tile + step % tiles) * kBlockM;
            const auto copy = [&](const OwnTile<kBlockM>& to, const Tensor& t, int32_t columns) {
                copy_own(to, own_rows<const Element>(t, work.batch, head, sequence.first_q + m_first,
                                                     sequence.seqlen_q - m_first, columns));
            };
            copy(own.first[step % kStages], p.q, p.shape.head_dim);
            copy(own.second[step % kStages], p.d_o, p.shape.head_dim_v);
            if (threadIdx.x < 2 * kBlockM) {
                const int which = threadIdx.x / kBlockM, row = threadIdx.x % kBlockM;
                const Rows& of = which ? p.delta : p.lse;
                cp_async4(smem_addr(&s.rows[step % kStages][which][row]),
                          head_rows<float>(of, work.batch, head, sequence.first_q + m_first + row),
                          m_first + row < sequence.seqlen_q);
            }
        }
        cp_async_commit();
    };
    start(0);

    float rDK[kM][kColumns / 8][4] = {}, rDV[kM][kColumns / 8][4] = {};
    const OwnPair<kN> pair;
    const uint32_t sP = smem_addr(s.p.data), sDS = sP + WeightTile::kBytes;
    const AccumulatorWriter<WeightTile> to_p(sP, 0, 0);
    // [A2.8]
#pragma unroll 1
    for (int32_t step = 0; step < steps; step++) {
        cp_async_wait<0>();
        // sync: the lanes' copies are visible to the warp, which is done with the step before.
        __syncwarp();
        start(step + 1);
        const uint32_t sQ = smem_addr(own.first[step % kStages].data),
                       sDO = smem_addr(own.second[step % kStages].data);
        // [A2.10] [A2.13]
        const auto put = [&](int which, uint32_t rows, const RegisterRowsAsB<kN, kSteps>& keys) {
            float part[1][kN][4] = {};
            multiply<Product, kSteps>(part, RowsAsA<QueryTile>(rows, 0), keys);
            s.parts.put(which, part);
        };
        put(0, sQ, rK);
        put(1, sDO, rV);
        // sync: the parts of all warps, LSE and delta are visible; all have read P and dS of the step before.
        __syncthreads();
        // [A2.11] [A2.14]
        const int32_t query = (first_tile + step % tiles) * kBlockM + pair.row;
        const float2 score = s.parts.sum(0), dp = s.parts.sum(1);
        const uint32_t of_row = smem_addr(&s.rows[step % kStages][0][pair.row]);
        const float lse = ld_shared<float>(of_row), delta = ld_shared<float>(of_row + 4 * kBlockM);
        const float2 weight = weigh(score, unit_log2, lse, narrow, query, n_first + pair.column);
        to_p.store(weight.x, weight.y, 0, pair.n, pair.half, 0);
        const float2 ds = differentiate(weight, dp, delta);
        to_p.store(ds.x, ds.y, 0, pair.n, pair.half, WeightTile::kBytes);
        // sync: P and dS are complete; all have read the parts.
        __syncthreads();
        // [A2.12] [A2.16]
        multiply<Product, 1>(rDV, ColumnsAsA<WeightTile, 1>(sP, 0), ColumnsAsB<QueryTile, 1>(sDO, 0));
        multiply<Product, 1>(rDK, ColumnsAsA<WeightTile, 1>(sDS, 0), ColumnsAsB<QueryTile, 1>(sQ, 0));
    }
    // sync: the warp has read Q and dO, through whose place dK and dV leave.
    __syncwarp();
    // why anew: these numbers then need no registers in the loop.
    const BlockWork at = work_of_block(opaque(blockIdx.x), cdiv(p.shape.seqlen_k, kBlockN), p.shape.heads_k);
    const Sequence of_keys = sequence_of(p.shape, at.batch);
    const auto own_gradients = [&](const Tensor& t, int32_t columns) {
        const int32_t row = at.tile * kBlockN;
        return own_rows<Element>(t, at.batch, at.head, of_keys.first_k + row, of_keys.rows_k - row, columns);
    };
    store_own(own_gradients(p.dk, p.shape.head_dim), rDK, scale, own.held[0]);
    store_own(own_gradients(p.dv, p.shape.head_dim_v), rDV, 1.0f, own.held[1]);
}

// ---- dq: a block owns queries and goes over keys.
template <int kBlockM, int kBlockN>
CF_DEVICE void dq(const BackwardParams& p) {
    static_assert(kBlockN == 16);
    constexpr int kM = kBlockM / 16, kN = kBlockN / 8;
    using QueryTile = OwnTile<kBlockM>;
    using KeyTile = OwnTile<kBlockN>;
    using WeightTile = Tile<Element, kBlockM, kBlockN>;
    struct Storage {
        WarpStorage<kBlockN, kBlockM> warps[kWarps];    // streams K, V; holds Q, dO
        Parts<kM, kN> parts;
        WeightTile ds;
    };
    Storage& s = storage_of_pass<Storage>();

    const int32_t all_tiles = cdiv(p.shape.seqlen_q, kBlockM);
    const BlockWork work = work_of_block(blockIdx.x, all_tiles, p.shape.heads_q);
    const Sequence sequence = sequence_of(p.shape, work.batch);
    const int32_t m_first = (all_tiles - 1 - work.tile) * kBlockM;
    if (m_first >= sequence.seqlen_q) return;
    const int32_t kv_head = work.head / (p.shape.heads_q / p.shape.heads_k);
    const Band band(p.score, sequence);
    const NarrowBand narrow(band);
    const Range keys = band.keys_of(m_first, m_first + kBlockM);
    const int32_t first_tile = keys.first / kBlockN, end_tile = cdiv(keys.end, kBlockN);
    const float scale = static_cast<float>(p.score.scale), unit_log2 = unit_of(p.score);

    auto& own = s.warps[threadIdx.x / 32];
    const auto own_queries = [&](const Tensor& t, int32_t columns) {
        return own_rows<const Element>(t, work.batch, work.head, sequence.first_q + m_first,
                                       sequence.seqlen_q - m_first, columns);
    };
    RegisterRows<kM, kSteps> rQ, rDO;
    copy_own(own.held[0], own_queries(p.q, p.shape.head_dim));
    copy_own(own.held[1], own_queries(p.d_o, p.shape.head_dim_v));
    cp_async_commit();
    cp_async_wait<0>();
    // sync: the lanes' copies of Q and dO are visible to the warp.
    __syncwarp();
    rQ.fill(RowsAsA<QueryTile>(smem_addr(own.held[0].data), 0));
    rDO.fill(RowsAsA<QueryTile>(smem_addr(own.held[1].data), 0));
    // sync: the warp has read Q and dO, over which K and V are laid.
    __syncwarp();
    const auto start = [&](int32_t tile) {
        if (tile < end_tile) {
            const auto copy = [&](const OwnTile<kBlockN>& to, const Tensor& t, int32_t columns) {
                const int32_t row = tile * kBlockN;
                copy_own(to, own_rows<const Element>(t, work.batch, kv_head, sequence.first_k + row,
                                                     sequence.seqlen_k - row, columns));
            };
            copy(own.first[tile % kStages], p.k, p.shape.head_dim);
            copy(own.second[tile % kStages], p.v, p.shape.head_dim_v);
        }
        cp_async_commit();
    };
    start(first_tile);

    float rDQ[kM][kColumns / 8][4] = {};
    const OwnPair<kN> pair;
    const int32_t query = m_first + pair.row;
    const auto of_row = [&](const Rows& rows) {
        const float* at = head_rows<float>(rows, work.batch, work.head, sequence.first_q + query);
        return query < sequence.seqlen_q ? ld_global(at) : 0.0f;
    };
    const float lse = of_row(p.lse), delta = of_row(p.delta);
    const uint32_t sDS = smem_addr(s.ds.data);
    const AccumulatorWriter<WeightTile> to_ds(sDS, 0, 0);
    // [A2.8]
#pragma unroll 1
    for (int32_t tile = first_tile; tile < end_tile; tile++) {
        cp_async_wait<0>();
        // sync: the lanes' copies are visible to the warp, which is done with the step before.
        __syncwarp();
        start(tile + 1);
        const uint32_t sK = smem_addr(own.first[tile % kStages].data),
                       sV = smem_addr(own.second[tile % kStages].data);
        // [A2.10] [A2.13]
        const auto put = [&](int which, const RegisterRows<kM, kSteps>& rows, uint32_t keys_of) {
            float part[kM][kN][4] = {};
            multiply<Product, kSteps>(part, rows, RowsAsB<KeyTile>(keys_of, 0));
            s.parts.put(which, part);
        };
        put(0, rQ, sK);
        put(1, rDO, sV);
        // sync: the parts of all warps are visible; all have read dS of the step before.
        __syncthreads();
        // [A2.11] [A2.14]
        const float2 dp = s.parts.sum(1);
        const int32_t key = tile * kBlockN + pair.column;
        const float2 weight = weigh(s.parts.sum(0), unit_log2, lse, narrow, query, key);
        const float2 ds = differentiate(weight, dp, delta);
        to_ds.store(ds.x, ds.y, pair.m, pair.n, pair.half, 0);
        // sync: dS is complete; all have read the parts.
        __syncthreads();
        // [A2.15]
        multiply<Product, 1>(rDQ, RowsAsA<WeightTile>(sDS, 0), ColumnsAsB<KeyTile, 1>(sK, 0));
    }
    // sync: the warp has read K, through whose place dQ leaves.
    __syncwarp();
    const auto gDQ = own_rows<Element>(p.dq, work.batch, work.head, sequence.first_q + m_first,
                                       sequence.seqlen_q - m_first, p.shape.head_dim);
    store_own(gDQ, rDQ, scale, own.held[0]);
}

CF_KERNEL(BackwardParams, kThreads, 1, (CF_PASS<CF_BLOCK_M, CF_BLOCK_N>))
