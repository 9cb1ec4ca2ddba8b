// Attention backward on mma.sync tensor cores, sm_75 to sm_120: dQ, dK and dV. CF_PASS names the pass of a compilation.
// Design note: docs/kernels/backward.md.
//
// Source: A2 = FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 2. Its loop over key blocks (line 3) is
// the grid.
//   [A2.4]  delta = rowsum(dO * O) - dLSE                                   (pass delta; the paper's 4)
//   [A2.6]  a block owns the keys K_j, V_j of one head; dK = 0, dV = 0                (lines 6 and 7)
//   [A2.8]  for each query head that reads them, for each tile of queries that the band lets see one of them
//   [A2.10] S = score(Q_i K_j^T)
//   [A2.11] P = e^(S - LSE), 0 where a pair is outside the band or masked
//   [A2.12] dV = dV + dropout(P)^T dO_i
//   [A2.13] dP = dropout(dO_i V_j^T)
//   [A2.14] dS = P * (dP - delta), times what softcap makes of a gradient
//   [A2.15] dQ_i = dQ_i + dS K_j, in FP32 in global memory, 0 at first; pass dq_convert rounds it
//   [A2.16] dK = dK + dS^T Q_i
// Two ways to the same gradients:
//   delta, dqkv, dq_convert    five products per tile; dQ by atomic additions, in another order every run
//   delta, dqkv, dq            seven products, the same bits every run; without an accumulator dqkv leaves
//                              [A2.15] out, dq owns queries and goes over keys
//
// Grid:   along x. delta, dq_convert, dq: (batch * heads_q + head) * ceil(seqlen_q / kBlockM) + tile; dqkv,
//         (batch * heads_k + head) * ceil(seqlen_k / kBlockN) + tile. Packed: seqlens are the longest; blocks
//         past the end of their sequence return.
// Block:  dqkv: for each product the warps divide its result anew, see row_groups: what passes between
//         products (P, dS) goes through shared memory. dq: a warp has rows of S and dP from Q K^T to the end,
//         and of dQ, or a part of its columns.
// Shared: dqkv: K, V (at the end dK, dV), the slots of Q and dO, of LSE and delta, P, dS; or K and no V, which each warp has in
//         registers as far as it reads it. dq: Q (dQ is staged in it), dO, two slots of V or K.
//
// Assumes: last axes of q, k, v, o, dO, dQ, dK, dV contiguous; seqlens below 2^30; row strides below 2^31
// bytes; scale > 0 unless kAny; q, k, v and dO finite. lse is the forward pass's.
// Not here: dbias (flash_backward_dbias.cu); dsinks, which reads delta (simple_backward.cu).
#include "attention/softmax.cuh"
#include "backward/gradient.cuh"
#include "backward/gradient_epilogue.cuh"
#include "backward/query_ring.cuh"
#include "tile/ring.cuh"

// ---- Config
#if !defined(CF_ELEMENT)
#define CF_ELEMENT __half
#define CF_PRODUCTS 1
#define CF_TURING 0
#define CF_HEAD_DIM 64
#define CF_HEAD_DIM_V 64
#define CF_MASK band
#define CF_PASS dqkv
#define CF_BLOCK_M 64
#define CF_BLOCK_N 128
#define CF_THREADS 256
#define CF_SLOTS 2
#define CF_V_IN_REGISTERS 0
#define CF_SHARED_BYTES 98304
#endif
#if !defined(CF_STORES_FLOATS)
#define CF_STORES_FLOATS 1    // 0: dqkv cannot store float32 gradients of 16-bit inputs
#endif
enum class Mask { band, any };
using Element = CF_ELEMENT;
constexpr bool kAny = Mask::CF_MASK == Mask::any;
constexpr bool kTuring = CF_TURING;    // no cp.async, no m16n8k16
enum : int {                           // why not variables: as in tile.cuh
    kHeadDim = CF_HEAD_DIM,            // the largest head dim of q and k
    kHeadDimV = CF_HEAD_DIM_V,         // the largest head dim of v and o
    kThreads = CF_THREADS,
    kWarps = kThreads / 32,
    kVInRegisters = CF_V_IN_REGISTERS    // pass dqkv: a warp holds the rows of V that it reads
};
constexpr Slots kSlots = Slots(CF_SLOTS);
static_assert((kSlots == Slots::registers) == kTuring, "tiles wait in registers where there is no cp.async");
static_assert(CF_BLOCK_M % 16 == 0 && CF_BLOCK_N % 16 == 0, "queries and keys come in blocks of 16");

using Product = Math<Element, CF_PRODUCTS, kTuring>;
template <int kRows> using KeyTile = Tile<Element, kRows, kHeadDim>;       // of Q, K, dQ, dK
template <int kRows> using ValueTile = Tile<Element, kRows, kHeadDimV>;    // of V, dO, dV
// Pass dqkv: exponentials run under the products of dP, dS under those of dV, additions to dQ under those of dK.
// why not everywhere: Turing has no cp.async, and products of floats leave no registers for it.
constexpr bool kUnderProducts = !kTuring && !Product::kFloat;
// why not dS of wide heads with all options: it spills.
constexpr bool kDSUnderDV = kUnderProducts && !(kAny && kHeadDim >= 128);
static_assert(!kUnderProducts || kSlots == Slots::two, "only that way is built");
// What runs beside products here, if anything does.
template <class Work>
CF_DEVICE auto beside(Work work) {
    if constexpr (kUnderProducts) return work;
    else return NoWork();
}
template <int kBlockM> using Sums = GradientSums<kBlockM, kHeadDim, kThreads>;

// why: the passes are templates so that only that of this compilation is instantiated, with tiles for it.
template <class Storage>
CF_DEVICE Storage& storage_of_pass() {
    static_assert(sizeof(Storage) == CF_SHARED_BYTES, "the catalog and the kernel disagree on shared memory");
    return shared_memory<Storage>();
}

// The tiles that stay or stream through dqkv.
template <class KTile, class VTile, class Queries, bool kVInRegisters>
struct KeyStorage {
    KTile k;
    VTile v;
    Queries queries;
};
// layout: V comes before K and dV leaves after dK, through the same place.
template <class KTile, class VTile, class Queries>
struct KeyStorage<KTile, VTile, Queries, true> {
    union {
        KTile k;
        VTile v;
    };
    Queries queries;
};

// dK or dV of a block's keys: what a warp has of it.
// layout: rows are keys. kRowGroups groups of warps share out the rows, the warps of each the columns.
template <int kBlockN, int kColumns>
struct KeyGradient {
    enum : int { kRowGroups = row_groups(kBlockN, kColumns, kWarps), kColumnGroups = kWarps / kRowGroups };
    const int warp;    // why not from threadIdx.x: two kernels would spill
    float sums[kBlockN / kRowGroups / 16][kColumns / kColumnGroups / 8][4] = {};

    CF_DEVICE int row_group() const { return warp % kRowGroups; }
    CF_DEVICE int column_group() const { return warp / kRowGroups; }

    // Adds weights^T rows, both tiles of queries in shared memory; beside: as of multiply.
    template <class WeightTile, class RowTile, class Beside>
    CF_DEVICE void add(uint32_t weights, uint32_t rows, Beside beside) {
        multiply<Product, WeightTile::kRows / Product::kDepth>(
            sums, ColumnsAsA<WeightTile, kRowGroups>(weights, row_group()),
            ColumnsAsB<RowTile, kColumnGroups>(rows, column_group()), beside);
    }
    template <class T> CF_DEVICE void stage(T& tile, float factor) const {
        stage_gradient<T, kRowGroups, kColumnGroups>(smem_addr(tile.data), sums, factor, row_group(),
                                                     column_group());
    }
    template <class T> CF_DEVICE void store_floats(const GlobalRows<float>& to, uint32_t staging,
                                                   float factor) const {
        store_float_gradient<T, kThreads, kRowGroups, kColumnGroups>(to, staging, sums, factor, row_group(),
                                                                     column_group());
    }
};

// Scaled, through shared memory to global memory.
template <int kBlockN, class Storage>
CF_DEVICE void store_key_gradients(const BackwardParams& p, Storage& s, const TileCoord& work,
                                   const Sequence& sequence, const KeyGradient<kBlockN, kHeadDim>& dk,
                                   const KeyGradient<kBlockN, kHeadDimV>& dv) {
    const float scale = static_cast<float>(p.score.scale),
                kept = p.score.dropout_threshold ? static_cast<float>(p.score.dropout_scale) : 1.0f;
    const int32_t n_first = work.tile * kBlockN, rows = sequence.rows_k - n_first;
    const int64_t row = sequence.first_k + n_first;
    if constexpr (!Product::kFloat && CF_STORES_FLOATS) {
        if (p.float_gradients) {
            // why all of shared memory: floats take twice the place of K.
            constexpr int kRows =
                sizeof(Storage) < sizeof(Tile<float, kBlockN, kHeadDim>) ? kBlockN / 2 : kBlockN;
            using FloatTile = Tile<float, kRows, kHeadDim>;
            static_assert(sizeof(Storage) >= sizeof(FloatTile) && kHeadDim >= kHeadDimV);
            dk.template store_floats<FloatTile>(
                rows_of<float>(p.dk, work.batch, work.head, row, rows, p.shape.head_dim), smem_addr(&s),
                scale);
            dv.template store_floats<FloatTile>(
                rows_of<float>(p.dv, work.batch, work.head, row, rows, p.shape.head_dim_v), smem_addr(&s),
                kept);
            return;
        }
    }
    dk.stage(s.k, scale);
    if constexpr (!kVInRegisters) dv.stage(s.v, kept);
    // sync: the staged tile is complete before any thread stores it.
    __syncthreads();
    store_tile<KeyTile<kBlockN>, kThreads>(
        rows_of<Element>(p.dk, work.batch, work.head, row, rows, p.shape.head_dim), smem_addr(s.k.data));
    if constexpr (kVInRegisters) {
        // sync: dK has left, over which dV is laid.
        __syncthreads();
        dv.stage(s.v, kept);
        // sync: dV is complete before any thread stores it.
        __syncthreads();
    }
    store_tile<ValueTile<kBlockN>, kThreads>(
        rows_of<Element>(p.dv, work.batch, work.head, row, rows, p.shape.head_dim_v), smem_addr(s.v.data));
}

// ---- dqkv: a block owns keys and goes over queries.
template <int kBlockM, int kBlockN> CF_DEVICE void dqkv(const BackwardParams& p) {
    using QTile = KeyTile<kBlockM>;
    using DOTile = ValueTile<kBlockM>;
    using KTile = KeyTile<kBlockN>;
    using VTile = ValueTile<kBlockN>;
    using WeightTile = Tile<Element, kBlockM, kBlockN>;
    using Ring = typename Select<kUnderProducts, StaggeredQueryRing<QTile, DOTile, kThreads>,
                                 QueryRing<QTile, DOTile, kThreads, kSlots>>::Type;
    using SumsOfDQ = Sums<kBlockM>;
    struct Storage : KeyStorage<KTile, VTile, typename Ring::Storage, kVInRegisters> {
        WeightTile p, ds;    // neighbours
    };
    Storage& s = storage_of_pass<Storage>();

    // [A2.6]
    const TileCoord work = tile_coord(blockIdx.x, cdiv(p.shape.seqlen_k, kBlockN), p.shape.heads_k);
    const Sequence sequence = sequence_of(p.shape, work.batch);
    const int32_t n_first = work.tile * kBlockN, n_end = n_first + kBlockN;
    if (n_first >= sequence.rows_k) return;
    const int32_t group = p.shape.heads_q / p.shape.heads_k, first_head = work.head * group;

    // Tiles of queries [tiles.first, tiles.end) see a key of the block; in [whole.first, whole.end) every
    // pair counts.
    const Band band(p.score, sequence);
    const Range queries = band.queries_of(n_first, n_end);
    const Range tiles{queries.first / kBlockM, cdiv(queries.end, kBlockM)};
    const Range whole{cdiv(band.first_query(n_end - 1), kBlockM),
                      n_end <= sequence.seqlen_k ? band.end_query(n_first) / kBlockM : 0};

    // layout: the part of this warp in S and dP (rows are queries).
    constexpr int kQueryGroups = score_groups(kBlockM, kBlockN, kWarps), kKeyGroups = kWarps / kQueryGroups;
    constexpr int kM = kBlockM / kQueryGroups / 16, kN = kBlockN / kKeyGroups / 8;
    const int warp = threadIdx.x / 32, query_row = warp % kQueryGroups * 16 * kM,
              key_row = warp / kQueryGroups * 8 * kN;
    KeyGradient<kBlockN, kHeadDim> dk{warp};
    KeyGradient<kBlockN, kHeadDimV> dv{warp};

    if (tiles.first < tiles.end) {
        const auto rows_of_keys = [&](const Tensor& t, int32_t columns) {
            return rows_of<Element>(t, work.batch, work.head, sequence.first_k + n_first,
                                    sequence.seqlen_k - n_first, columns);
        };
        constexpr int kVSteps = kHeadDimV / Product::kDepth;
        RegisterRowsAsB<kN, kVInRegisters ? kVSteps : 1> rV;
        if constexpr (kVInRegisters) {
            load_tile<kThreads, kTuring>(rows_of_keys(p.v, p.shape.head_dim_v), s.v);
            if constexpr (!kTuring) {
                cp_async_commit();
                cp_async_wait<0>();
            }
            // sync: every thread has its own copies of V in shared memory, so now all of it is visible.
            __syncthreads();
            rV.fill(RowsAsB<VTile>(smem_addr(s.v.data), key_row));
            // sync: all have read V, over which K is laid.
            __syncthreads();
        }
        load_tile<kThreads, kTuring>(rows_of_keys(p.k, p.shape.head_dim), s.k);
        if constexpr (!kVInRegisters)
            load_tile<kThreads, kTuring>(rows_of_keys(p.v, p.shape.head_dim_v), s.v);
        const auto gQ = rows_of<Element>(p.q, work.batch, first_head, sequence.first_q, sequence.seqlen_q,
                                         p.shape.head_dim);
        const auto gDO = rows_of<Element>(p.d_o, work.batch, first_head, sequence.first_q, sequence.seqlen_q,
                                          p.shape.head_dim_v);
        Ring ring = [&] {
            if constexpr (kUnderProducts)
                return Ring(gQ, gDO, p, sequence, first_head, tiles, group, s.queries);
            else return Ring(gQ, gDO, p.q.head, p.d_o.head, tiles, group, s.queries);
        }();
        const uint32_t sK = smem_addr(s.k.data), sV = smem_addr(s.v.data), sP = smem_addr(s.p.data),
                       sDS = sP + WeightTile::kBytes;
        const AccumulatorWriter<WeightTile> to_p(sP, query_row, key_row / 8);

        // [A2.8]
        for (int32_t head = first_head; head < first_head + group; head++) {
            ScoreGradient<Product, kAny, kM> gradient(p, sequence, band, head);
            for (int32_t tile = tiles.first; tile < tiles.end; tile++) {
                const Positions<false> at(tile * kBlockM + query_row, n_first + key_row);
                if constexpr (!kUnderProducts) gradient.load_lse(tile * kBlockM + query_row);
                ring.next();
                if constexpr (kUnderProducts)
                    gradient.read_lse(ring.lse(query_row), tile * kBlockM + query_row);
                const uint32_t sQ = ring.q_tile(), sDO = ring.d_o_tile();

                // [A2.10] [A2.11]
                float rS[kM][kN][4] = {};
                multiply<Product, kHeadDim / Product::kDepth>(rS, RowsAsA<QTile>(sQ, query_row),
                                                              RowsAsB<KTile>(sK, key_row));
                const auto put_p = [&](float left, float right, int m, int n, int half) {
                    to_p.store(left, right, m, n, half, 0);
                };
                if constexpr (kUnderProducts && !kAny) gradient.mask(rS, at, contains(whole, tile));
                else gradient.recompute_p(rS, at, contains(whole, tile), put_p);
                const auto recompute_p = [&](Share share) {
                    if constexpr (kUnderProducts && !kAny) gradient.recompute_p(rS, share, put_p);
                };
                // why: wide heads leave no registers for fetching operands of dP while the exponentials are
                // under way.
                // sync: orders nothing that needs it, but the compiler moves no load of shared memory across.
                if constexpr (!kUnderProducts && kHeadDim >= 128) __syncwarp();

                // [A2.13]
                float rDP[kM][kN][4] = {};
                const RowsAsA<DOTile> d_o_rows(sDO, query_row);
                if constexpr (kVInRegisters)
                    multiply<Product, kVSteps>(rDP, d_o_rows, rV, beside(recompute_p));
                else
                    multiply<Product, kVSteps>(rDP, d_o_rows, RowsAsB<VTile>(sV, key_row),
                                               beside(recompute_p));

                // [A2.14]
                const auto compute_ds = [&](Share share) {
                    gradient.compute_ds(rDP, rS, share, [&](float left, float right, int m, int n, int half) {
                        to_p.store(left, right, m, n, half, WeightTile::kBytes);
                    });
                };
                // sync: as above, for delta.
                if constexpr (!kUnderProducts && kAny && kHeadDim >= 128) __syncwarp();
                if constexpr (kUnderProducts) gradient.read_delta(ring.delta(query_row));
                else gradient.load_delta(tile * kBlockM + query_row), compute_ds(Share{0, 1});
                // sync: P is complete before any warp multiplies by it (and dS, where products stand alone); all are
                // done with dS and Q of the step before.
                __syncthreads();
                if constexpr (kUnderProducts) ring.fill_q();
                if constexpr (kUnderProducts && !kDSUnderDV) compute_ds(Share{0, 1});

                const auto ds_under_dv = [&](Share share) {
                    if constexpr (kDSUnderDV) compute_ds(share);
                };

                // [A2.12]
                dv.template add<WeightTile, DOTile>(sP, sDO, beside(ds_under_dv));
                if constexpr (kUnderProducts) ring.complete();
                else ring.release_d_o();
                // [A2.15] [A2.16]
                const auto multiply_dk = [&](auto added) {
                    dk.template add<WeightTile, QTile>(sDS, sQ, added);
                };
                const auto multiply_dq = [&](auto then) {
                    float rDQ[SumsOfDQ::kM][SumsOfDQ::kN][4] = {};
                    multiply<Product, kBlockN / Product::kDepth>(
                        rDQ, RowsAsA<WeightTile>(sDS, SumsOfDQ::warp_row()),
                        ColumnsAsB<KTile, SumsOfDQ::kColumnGroups>(sK, SumsOfDQ::column_group()));
                    float* sums = SumsOfDQ::tile(p.dq_accumulator, p.shape, sequence, tile, head);
                    then([&](Share share) { SumsOfDQ::add(sums, rDQ, share); });
                };
                if constexpr (kUnderProducts) {
                    if (!p.dq_accumulator) multiply_dk(NoWork());
                    else
                        multiply_dq([&](auto add) {
                            multiply_dk([&](Share share) {
                                // why: or ptxas makes all additions at once, before the products.
                                if (share.index % 4 == 0) pin_schedule(static_cast<uint32_t>(tile));
                                add(share);
                            });
                        });
                } else {
                    if (p.dq_accumulator) multiply_dq([](auto add) { add(Share{0, 1}); });
                    multiply_dk(NoWork());
                }
            }
        }
        // sync: all are done with K and V, in whose tiles dK and dV are staged.
        __syncthreads();
    }

    store_key_gradients<kBlockN>(p, s, work, sequence, dk, dv);
}

// What a block of the passes below owns: rows of queries of one head.
template <int kBlockM>
struct QueryWork {
    int32_t batch, head, tile, m_first, rows;    // rows: of the tile that exist, 0 or less past the end
    Sequence sequence;
    CF_DEVICE explicit QueryWork(const Shape& shape) {
        const TileCoord work = tile_coord(blockIdx.x, cdiv(shape.seqlen_q, kBlockM), shape.heads_q);
        batch = work.batch, head = work.head, tile = work.tile, m_first = tile * kBlockM;
        sequence = sequence_of(shape, batch);
        rows = smaller(kBlockM, sequence.seqlen_q - m_first);
    }
    CF_DEVICE GlobalRows<Element> rows_of_tile(const Tensor& t, int32_t columns) const {
        return rows_of<Element>(t, batch, head, sequence.first_q + m_first, rows, columns);
    }
    template <class T> CF_DEVICE T* rows_of_tile(const Rows& t) const {
        return head_rows<T>(t, batch, head, sequence.first_q + m_first);
    }
};

// ---- dq: a block owns queries and goes over keys.
template <int kBlockM, int kBlockN> CF_DEVICE void dq(const BackwardParams& p) {
    using QTile = KeyTile<kBlockM>;
    using DOTile = ValueTile<kBlockM>;
    using KTile = KeyTile<kBlockN>;
    using VTile = ValueTile<kBlockN>;
    // layout: the ring's first tile of a step is V's, its second K's.
    // why: dP before S, because K is needed once more, for dQ, and a tile of the ring can be read until the
    // next one is asked for.
    using Ring = KeyValueRing<VTile, KTile, kThreads, 2, kTuring>;
    struct Storage {
        QTile q;
        DOTile d_o;
        typename Ring::Storage keys;
    };
    Storage& s = storage_of_pass<Storage>();

    const QueryWork<kBlockM> work(p.shape);
    if (work.rows <= 0) return;
    const Sequence& sequence = work.sequence;
    const int32_t kv_head = work.head / (p.shape.heads_q / p.shape.heads_k), m_end = work.m_first + work.rows;
    // layout: a warp has rows of S, dP and dQ. Where there are more warps than blocks of 16 rows, kParts of
    // them share rows, have S and dP each, and a part of the columns of dQ.
    // why: 128 sums of a thread and tiles that wait are too much for Turing.
    constexpr int kParts = larger(16 * kWarps / kBlockM, 1), kColumns = kHeadDim / kParts;
    constexpr int kWarpRows = kBlockM / kWarps * kParts, kM = kWarpRows / 16, kN = kBlockN / 8;
    static_assert(kM * 16 * kWarps == kBlockM * kParts, "a warp has whole 16-row blocks");
    static_assert(kParts == 1 || kColumns * sizeof(Element) % 128 == 0,
                  "a part is whole periods of the swizzle");
    const int warp = threadIdx.x / 32, warp_row = warp / kParts * kWarpRows;
    const int first_column = warp % kParts * kColumns;

    // Tiles of keys [first, end) hold a key for some query of the block; in [whole.first, whole.end) every
    // pair counts.
    const Band band(p.score, sequence);
    Range keys = band.keys_of(work.m_first, m_end);
    if constexpr (kAny && !kTuring)
        keys = HeadSpans(p.score, sequence, work.head).narrowed(keys, work.m_first, m_end, true);
    const int32_t first = keys.first / kBlockN, end = cdiv(keys.end, kBlockN);
    const Range whole{cdiv(band.first_key(m_end - 1), kBlockN), band.end_key(work.m_first) / kBlockN};
    float rDQ[kM][kColumns / 8][4] = {};

    if (first < end) {
        load_tile<kThreads, kTuring>(work.rows_of_tile(p.q, p.shape.head_dim), s.q);
        load_tile<kThreads, kTuring>(work.rows_of_tile(p.d_o, p.shape.head_dim_v), s.d_o);
        Ring ring(
            rows_of<Element>(p.v, work.batch, kv_head, sequence.first_k, sequence.seqlen_k,
                             p.shape.head_dim_v),
            rows_of<Element>(p.k, work.batch, kv_head, sequence.first_k, sequence.seqlen_k, p.shape.head_dim),
            s.keys);
        const auto place = [&](int32_t step) { return first + step; };
        ring.begin(end - 1 - first, place);
        ScoreGradient<Product, kAny, kM> gradient(p, sequence, band, work.head);
        gradient.load_lse(work.m_first + warp_row);
        gradient.load_delta(work.m_first + warp_row);

        // [A2.8]
        for (int32_t tile = end - 1; tile >= first; tile--) {
            // [A2.13]
            float rDP[kM][kN][4] = {}, rS[kM][kN][4] = {};
            const uint32_t sV = ring.template next<Stream::key>(tile - first, place);
            multiply<Product, kHeadDimV / Product::kDepth>(
                rDP, RowsAsA<DOTile>(smem_addr(s.d_o.data), warp_row), RowsAsB<VTile>(sV, 0));
            // [A2.10] [A2.11]
            const uint32_t sK = ring.template next<Stream::value>(tile - first, place);
            multiply<Product, kHeadDim / Product::kDepth>(rS, RowsAsA<QTile>(smem_addr(s.q.data), warp_row),
                                                          RowsAsB<KTile>(sK, 0));
            const Positions<false> at(work.m_first + warp_row, tile * kBlockN);
            gradient.recompute_p(rS, at, contains(whole, tile), [](auto...) {});
            // [A2.14] [A2.15]
            gradient.compute_ds(rDP, rS, Share{0, 1}, [](auto...) {});
            multiply_by_columns<Product, KTile>(rDQ, rDP, sK + first_column * int(sizeof(Element)));
        }
        // sync: no copy may be under way when the block ends (the last groups are empty, but the counter is
        // the thread's).
        if constexpr (!kTuring) cp_async_wait<0>();
    }
    float factor[kM][2];
    CF_UNROLL
    for (int m = 0; m < kM; m++) factor[m][0] = factor[m][1] = static_cast<float>(p.score.scale);
    const bool floats = !Product::kFloat && p.float_gradients;
    const auto gDQ =
        rows_of_result<Element>(p.dq, work.batch, work.head, work.sequence.first_q + work.m_first + warp_row,
                                work.rows - warp_row, p.shape.head_dim, first_column, floats);
    // sync: the warps that share rows are done with those of Q, through which dQ leaves.
    if constexpr (kParts > 1) __syncthreads();
    const int staged = warp_row * QTile::kPitch + first_column * kWarpRows * int(sizeof(Element));
    store_warp_rows<Product>(rDQ, factor, gDQ, smem_addr(s.q.data) + staged, floats);
}

// ---- delta: 8 lanes to a row.
template <int kBlockM, int kBlockN> CF_DEVICE void delta(const BackwardParams& p) {
    constexpr int kLanes = 8, kChunk = 16 / int(sizeof(Element));
    const QueryWork<kBlockM> work(p.shape);
    if (work.rows <= 0) return;
    const GlobalRows<Element> gO = work.rows_of_tile(p.o, p.shape.head_dim_v);
    const GlobalRows<Element> gDO = work.rows_of_tile(p.d_o, p.shape.head_dim_v);
    const bool aligned = gO.alignment() == 16 && gDO.alignment() == 16;
    const int32_t in_chunks = aligned ? p.shape.head_dim_v / kChunk * kChunk : 0;

    // [A2.4]
    for (int32_t row_first = 0; row_first < kBlockM; row_first += kThreads / kLanes) {
        const int32_t row = row_first + threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
        float sum = 0;
        if (row < work.rows) {
            const Element *o = gO.row(row), *d_o = gDO.row(row);
#pragma unroll 1
            for (int32_t column = lane * kChunk; column < in_chunks; column += kLanes * kChunk) {
                const uint4 o_chunk = ld_global(reinterpret_cast<const uint4*>(o + column));
                const uint4 d_o_chunk = ld_global(reinterpret_cast<const uint4*>(d_o + column));
                CF_UNROLL
                for (int i = 0; i < kChunk; i++)
                    sum += widen(reinterpret_cast<const Element*>(&o_chunk)[i]) *
                           widen(reinterpret_cast<const Element*>(&d_o_chunk)[i]);
            }
#pragma unroll 1
            for (int32_t column = in_chunks + lane; column < p.shape.head_dim_v; column += kLanes)
                sum += widen(o[column]) * widen(d_o[column]);
        }
        sum = sum_over_lanes<kLanes>(sum);
        if (row < work.rows && lane == 0) {
            if (p.dlse.data) sum -= work.template rows_of_tile<float>(p.dlse)[row * p.dlse.row];
            work.template rows_of_tile<float>(p.delta)[row * p.delta.row] = sum;
        }
    }
}

// ---- dq_convert: from the sums to dQ.
template <int kBlockM, int kBlockN> CF_DEVICE void dq_convert(const BackwardParams& p) {
    const QueryWork<kBlockM> work(p.shape);
    if (work.rows <= 0) return;
    const GlobalRows<Element> gDQ = work.rows_of_tile(p.dq, p.shape.head_dim);
    const int32_t chains = p.dq_wave == 0 ? 1 : 2;
    const int64_t first = Sums<kBlockM>::number(p.shape, work.sequence, work.tile, work.head) * chains;
    // why: where blocks take turns the first one stores, and a sum to which no block has added was never written.
    const auto exists = [&](int chain) { return !p.dq_turns || ld_global(p.dq_turns + first + chain) != 0; };
    const bool one = exists(0), other = chains == 2 && exists(1);
    const float scale = static_cast<float>(p.score.scale);

    // [A2.15] layout: 8 neighbouring threads read 8 rows of the same columns, which is 128 consecutive bytes.
#pragma unroll 1
    for (int i = threadIdx.x; i < kBlockM * kHeadDim / 8; i += kThreads) {
        const int row = i / 8 / (kHeadDim / 8) * 8 + i % 8, n8 = i / 8 % (kHeadDim / 8);
        if (row >= work.rows || 8 * n8 >= p.shape.head_dim) continue;
        float x[8] = {};
        if (one) Sums<kBlockM>::load(x, Sums<kBlockM>::tile(p.dq_accumulator, first), row, n8);
        if (other) {
            float y[8];
            Sums<kBlockM>::load(y, Sums<kBlockM>::tile(p.dq_accumulator, first + 1), row, n8);
            CF_UNROLL
            for (int e = 0; e < 8; e++) x[e] += y[e];
        }
        Element* to = gDQ.row(row);
        if (!Product::kFloat && p.float_gradients) {
            float* floats = rows_of<float>(p.dq, work.batch, work.head, work.sequence.first_q + work.m_first,
                                           work.rows, p.shape.head_dim)
                                .row(row) +
                            8 * n8;
            CF_UNROLL
            for (int e = 0; e < 8; e++)
                if (8 * n8 + e < gDQ.columns) st_global(floats + e, x[e] * scale);
            continue;
        }
        alignas(16) Element out[8];
        CF_UNROLL
        for (int e = 0; e < 8; e++) out[e] = narrow<Element>(x[e] * scale);
        CF_UNROLL
        for (int chunk = 0; chunk < 8 * int(sizeof(Element)) / 16; chunk++)
            store_chunk(to, n8 * (8 * int(sizeof(Element)) / 16) + chunk, gDQ.columns,
                        reinterpret_cast<const uint4*>(out)[chunk]);
    }
}

CF_KERNEL(BackwardParams, kThreads, 1, (CF_PASS<CF_BLOCK_M, CF_BLOCK_N>))
