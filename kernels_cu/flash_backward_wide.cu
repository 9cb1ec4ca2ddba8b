// Attention backward on mma.sync tensor cores for head dims above 256, sm_80 to sm_120: warps share columns.
// CF_PASS names the pass of a compilation.
// Design note: docs/kernels/wide.md.
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
    OwnTile<kStreamed> streamed[kStages][2];
    OwnTile<kHeld> held[2];

    // Where a matrix of a step lies.
    CF_DEVICE uint32_t at(int32_t step, int which) const {
        return smem_addr(streamed[step % kStages][which].data);
    }
};

// What the warps have of S and dP, kM x kN blocks of 16 x 8: each half of the rows of a block is a warp's to
// finish.
// why opaque: addresses are computed again, and hold no registers in between.
template <int kM, int kN>
struct Parts {
    static_assert(kM * kN * 2 == kWarps, "a thread finishes one pair");
    float2 pairs[2][kWarps][kWarps]
                [32];    // of S, of dP; by the warp whose part it is, and the warp that adds

    // [A2.10] [A2.13] This warp's, of its columns of A and B.
    template <class A, class B>
    CF_DEVICE void put(int which, const A& a, const B& b) {
        float d[kM][kN][4] = {};
        multiply<Product, kSteps>(d, a, b);
        const int thread = static_cast<int>(opaque(threadIdx.x)), warp = thread / 32, lane = thread % 32;
        const uint32_t to = smem_addr(&pairs[which][warp][0][lane]);
        CF_UNROLL
        for (int i = 0; i < kWarps; i++) {
            const float (&block)[4] = d[i / 2 / kN][i / 2 % kN];
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

// P and dS of a pair.
struct PairGradient {
    float2 p, ds;
};
// Of the pair that this thread finishes, whose first key is this one.
// why no test of the row: one without keys, whose LSE is -inf, is outside the band; of those past the end Q,
// dO, LSE and delta are 0, and so is what they add.
CF_DEVICE PairGradient finish(float2 score, float2 dp, float unit_log2, float lse, float delta,
                              const NarrowBand& band, int32_t query, int32_t key) {
    // [A2.11]
    const int32_t first = band.first_key(query) - key, end = band.end_key(query) - key;
    const float left = ex2(fmaf(score.x, unit_log2, -lse * kLog2e));
    const float right = ex2(fmaf(score.y, unit_log2, -lse * kLog2e));
    const float2 p{first <= 0 && end > 0 ? left : 0, first <= 1 && end > 1 ? right : 0};
    // [A2.14]
    return {p, {p.x * (dp.x - delta), p.y * (dp.y - delta)}};
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

// Matrices whose rows are copied together, Q and dO or K and V: S is of the first ones, dP of the second.
struct Side {
    const Tensor &first, &second;
    int32_t columns, columns_v;

    CF_DEVICE static Side queries(const BackwardParams& p) {
        return {p.q, p.d_o, p.shape.head_dim, p.shape.head_dim_v};
    }
    CF_DEVICE static Side keys(const BackwardParams& p) {
        return {p.k, p.v, p.shape.head_dim, p.shape.head_dim_v};
    }
    // Rows of a head from `row` on, of which `rows` exist, into two tiles of this warp.
    template <class T>
    CF_DEVICE void copy(T (&to)[2], int32_t batch, int32_t head, int64_t row, int32_t rows) const {
        copy_own(to[0], own_rows<const Element>(first, batch, head, row, rows, columns));
        copy_own(to[1], own_rows<const Element>(second, batch, head, row, rows, columns_v));
    }
};

// The rows that a block owns, whose copies have been started, to registers: as A or as B of every product.
template <class Operand, class T, class Registers>
CF_DEVICE void hold(Registers& first, Registers& second, const T (&held)[2]) {
    cp_async_commit();
    cp_async_wait<0>();
    // sync: the lanes' copies are visible to the warp.
    __syncwarp();
    first.fill(Operand(smem_addr(held[0].data), 0));
    second.fill(Operand(smem_addr(held[1].data), 0));
    // sync: the warp has read both, over which what it streams is laid.
    __syncwarp();
}

// [A2.8] Steps first .. end - 1 of a pass, each over one tile of what is streamed:
//   copy(step)         starts the warp's copies, a step ahead
//   make_parts(step)   multiplies the warp's columns: parts of S and dP
//   finish_pair(step)  adds what all warps have of a pair, and stores its P and dS
//   add(step)          adds products of P and dS to the warp's gradients
template <class Copy, class MakeParts, class FinishPair, class Add>
CF_DEVICE void for_each_step(int32_t first, int32_t end, Copy copy, MakeParts make_parts,
                             FinishPair finish_pair, Add add) {
    const auto start = [&](int32_t step) {
        if (step < end) copy(step);
        cp_async_commit();
    };
    start(first);
#pragma unroll 1
    for (int32_t step = first; step < end; step++) {
        cp_async_wait<0>();
        // sync: the lanes' copies are visible to the warp, which is done with the step before.
        __syncwarp();
        start(step + 1);
        make_parts(step);
        // sync: the parts of all warps are visible, and so is what single warps copied for all; all have read P
        // and dS of the step before.
        __syncthreads();
        finish_pair(step);
        // sync: P and dS are complete; all have read the parts.
        __syncthreads();
        add(step);
    }
    // sync: the warp has read what it streamed, in whose memory its gradients are staged.
    __syncwarp();
}

// Accumulators of a warp's columns, times a factor, to its rows, through a tile of its own.
template <int kM>
CF_DEVICE void store_own(const BackwardParams& p, const Tensor& to, int32_t batch, int32_t head,
                         int64_t first, int32_t rows, int32_t columns, const float (&d)[kM][kColumns / 8][4],
                         float factor, const OwnTile<16 * kM>& tile) {
    const int32_t column = kColumns * (threadIdx.x / 32);
    float factors[kM][2];
    CF_UNROLL
    for (int m = 0; m < kM; m++) factors[m][0] = factors[m][1] = factor;
    store_warp_rows<Product, kM, kColumns / 8, OwnTile<16 * kM>>(
        d, factors,
        rows_of_result<Element>(to, batch, head, first, rows, smaller<int32_t>(columns, column + kColumns),
                                column, p.float_gradients),
        smem_addr(tile.data), p.float_gradients);
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
        WeightTile p, ds;                   // neighbours
        float rows[kStages][2][kBlockM];    // LSE, delta; of rows past the end 0
    };
    Storage& s = storage_of_pass<Storage>();

    // [A2.6]
    const TileCoord work = tile_coord(blockIdx.x, cdiv(p.shape.seqlen_k, kBlockN), p.shape.heads_k);
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
    RegisterRowsAsB<kN, kSteps> rK, rV;
    Side::keys(p).copy(own.held, work.batch, work.head, sequence.first_k + n_first,
                       sequence.seqlen_k - n_first);
    hold<RowsAsB<KeyTile>>(rK, rV, own.held);

    float rDK[kM][kColumns / 8][4] = {}, rDV[kM][kColumns / 8][4] = {};
    const OwnPair<kN> pair;
    const uint32_t sP = smem_addr(s.p.data), sDS = sP + WeightTile::kBytes;
    const AccumulatorWriter<WeightTile> to_p(sP, 0, 0);
    const auto copy = [&](int32_t step) {
        const int32_t head = first_head + step / tiles, m_first = (first_tile + step % tiles) * kBlockM;
        Side::queries(p).copy(own.streamed[step % kStages], work.batch, head, sequence.first_q + m_first,
                              sequence.seqlen_q - m_first);
        if (threadIdx.x < 2 * kBlockM) {
            const int which = threadIdx.x / kBlockM, row = threadIdx.x % kBlockM;
            const Rows& of = which ? p.delta : p.lse;
            cp_async4(smem_addr(&s.rows[step % kStages][which][row]),
                      head_rows<float>(of, work.batch, head, sequence.first_q + m_first + row),
                      m_first + row < sequence.seqlen_q);
        }
    };
    const auto make_parts = [&](int32_t step) {
        s.parts.put(0, RowsAsA<QueryTile>(own.at(step, 0), 0), rK);
        s.parts.put(1, RowsAsA<QueryTile>(own.at(step, 1), 0), rV);
    };
    const auto finish_pair = [&](int32_t step) {
        const int32_t query = (first_tile + step % tiles) * kBlockM + pair.row;
        const float2 score = s.parts.sum(0), dp = s.parts.sum(1);
        const uint32_t of_row = smem_addr(&s.rows[step % kStages][0][pair.row]);
        const float lse = ld_shared<float>(of_row), delta = ld_shared<float>(of_row + 4 * kBlockM);
        const PairGradient done =
            finish(score, dp, unit_log2, lse, delta, narrow, query, n_first + pair.column);
        to_p.store(done.p.x, done.p.y, 0, pair.n, pair.half, 0);
        to_p.store(done.ds.x, done.ds.y, 0, pair.n, pair.half, WeightTile::kBytes);
    };
    const auto add = [&](int32_t step) {
        // [A2.12] [A2.16]
        multiply<Product, 1>(rDV, ColumnsAsA<WeightTile, 1>(sP, 0),
                             ColumnsAsB<QueryTile, 1>(own.at(step, 1), 0));
        multiply<Product, 1>(rDK, ColumnsAsA<WeightTile, 1>(sDS, 0),
                             ColumnsAsB<QueryTile, 1>(own.at(step, 0), 0));
    };
    for_each_step(0, steps, copy, make_parts, finish_pair, add);

    // why again: these numbers then need no registers in the loop.
    const TileCoord at = tile_coord(opaque(blockIdx.x), cdiv(p.shape.seqlen_k, kBlockN), p.shape.heads_k);
    const Sequence of_keys = sequence_of(p.shape, at.batch);
    const int32_t row = at.tile * kBlockN, rows = of_keys.rows_k - row;
    const auto store = [&](const Tensor& to, int32_t columns, const auto& x, float factor, const auto& tile) {
        store_own(p, to, at.batch, at.head, of_keys.first_k + row, rows, columns, x, factor, tile);
    };
    store(p.dk, p.shape.head_dim, rDK, scale, own.held[0]);
    store(p.dv, p.shape.head_dim_v, rDV, 1.0f, own.held[1]);
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
    const TileCoord work = tile_coord(blockIdx.x, all_tiles, p.shape.heads_q);
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
    RegisterRows<kM, kSteps> rQ, rDO;
    Side::queries(p).copy(own.held, work.batch, work.head, sequence.first_q + m_first,
                          sequence.seqlen_q - m_first);
    hold<RowsAsA<QueryTile>>(rQ, rDO, own.held);

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
    const auto copy = [&](int32_t tile) {
        const int32_t row = tile * kBlockN;
        Side::keys(p).copy(own.streamed[tile % kStages], work.batch, kv_head, sequence.first_k + row,
                           sequence.seqlen_k - row);
    };
    const auto make_parts = [&](int32_t tile) {
        s.parts.put(0, rQ, RowsAsB<KeyTile>(own.at(tile, 0), 0));
        s.parts.put(1, rDO, RowsAsB<KeyTile>(own.at(tile, 1), 0));
    };
    const auto finish_pair = [&](int32_t tile) {
        const float2 dp = s.parts.sum(1), score = s.parts.sum(0);
        const int32_t key = tile * kBlockN + pair.column;
        const PairGradient done = finish(score, dp, unit_log2, lse, delta, narrow, query, key);
        to_ds.store(done.ds.x, done.ds.y, pair.m, pair.n, pair.half, 0);
    };
    const auto add = [&](int32_t tile) {
        // [A2.15]
        multiply<Product, 1>(rDQ, RowsAsA<WeightTile>(sDS, 0), ColumnsAsB<KeyTile, 1>(own.at(tile, 0), 0));
    };
    for_each_step(first_tile, end_tile, copy, make_parts, finish_pair, add);

    store_own(p, p.dq, work.batch, work.head, sequence.first_q + m_first, sequence.seqlen_q - m_first,
              p.shape.head_dim, rDQ, scale, own.held[0]);
}

CF_KERNEL(BackwardParams, kThreads, 1, (CF_PASS<CF_BLOCK_M, CF_BLOCK_N>))
