// Attention backward in double precision on tensor cores, sm_80 and sm_90. CF_PASS names the pass of a compilation.
// Design note: docs/kernels/float64.md.
//
// Source: A2 = FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 2; pass dq exchanges its loops.
//   [A2.6]  pass dkv: a block owns the keys K_j, V_j of one head; dK = 0, dV = 0              (lines 6 and 7)
//   [A2.8]  for each query head that reads them, for each tile of queries that the band lets see one of them;
//           pass dq: a block owns queries Q_i, dO_i of one head; for each tile of keys of which one sees one
//   [A2.10] S = scale Q_i K_j^T, in dkv its transpose
//   [A2.11] P = e^(S - LSE), 0 where a pair is outside the band
//   [A2.12] dV = dV + P^T dO_i                                              (dkv)
//   [A2.13] dP = dO_i V_j^T, in dkv its transpose
//   [A2.14] dS = P * (dP - delta)
//   [A2.15] dQ_i = dQ_i + dS K_j                                            (dq)
//   [A2.16] dK = dK + dS^T Q_i                                              (dkv)
// [A2.4] is pass delta of simple_backward.cu. No atomics: the same bits every run.
//
// Grid:   along x. dkv: (batch * heads_k + head) * ceil(seqlen_k / kBlockN) + tile; dq:
//         (batch * heads_q + head) * ceil(seqlen_q / kBlockM) + tile, its tiles from the last to the first:
//         under a causal mask the last see the most keys. Packed: seqlens are the longest; blocks past the
//         end of their sequence return.
// Block:  a warp owns 16 rows, of keys or of queries: its P and dS are operand A of the next product, and no
//         data passes between warps but what is streamed.
// Shared: the rows that the block owns; dkv: two slots each of Q and dO; dq: two slots of V or K.
//
// Assumes: last axes of q, k, v, dO, dQ, dK, dV contiguous; seqlens below 2^30; row strides below 2^31 bytes;
// q, k, v and dO finite. lse is the forward pass's, delta pass delta's.
// Not here: mask, bias, softcap, ALiBi, dropout, spans, one order of additions (simple_backward.cu).
#include "backward/gradient.cuh"
#include "backward/query_ring.cuh"
#include "tile/double_products.cuh"
#include "tile/ring.cuh"

// ---- Config
#if !defined(CF_ELEMENT)
#define CF_ELEMENT double
#define CF_HEAD_DIM 64
#define CF_HEAD_DIM_V 64
#define CF_MASK band
#define CF_PASS dkv
#define CF_BLOCK_M 16
#define CF_BLOCK_N 128
#define CF_THREADS 256
#define CF_PRODUCT_ROWS 8
#define CF_SHARED_BYTES 163840
#endif
using Element = CF_ELEMENT;
enum : int {                           // why not variables: as in tile.cuh
    kProductRows = CF_PRODUCT_ROWS,    // of an instruction
    kHeadDim = CF_HEAD_DIM,            // the largest head dim of q and k
    kHeadDimV = CF_HEAD_DIM_V,         // the largest head dim of v and o
    kThreads = CF_THREADS,
    kOwned = kThreads / 32 * 16    // rows of a block
};
static_assert(kSame<Element, double>, "the products are of doubles");

template <int kRows> using KeyTile = Tile<Element, kRows, kHeadDim>;       // of Q, K
template <int kRows> using ValueTile = Tile<Element, kRows, kHeadDimV>;    // of V, dO

// why: the passes are templates so that only that of this compilation is instantiated.
template <class Storage>
CF_DEVICE Storage& storage_of_pass() {
    static_assert(sizeof(Storage) == CF_SHARED_BYTES, "the catalog and the kernel disagree on shared memory");
    return shared_memory<Storage>();
}

// LSE and delta of queries of a head.
struct QueryNumbers {
    const double *lse_of_first, *delta_of_first;
    int64_t lse_row, delta_row;
    int32_t seqlen_q;

    CF_DEVICE QueryNumbers(const BackwardParams& p, const Sequence& sequence, int32_t head)
        : lse_of_first(head_rows<double>(p.lse, sequence.batch, head, sequence.first_q)),
          delta_of_first(head_rows<double>(p.delta, sequence.batch, head, sequence.first_q)),
          lse_row(p.lse.row), delta_row(p.delta.row), seqlen_q(sequence.seqlen_q) {}
    // why: a row without keys has an LSE of -inf, one past the end none; +inf gives both P = 0, with no test per
    // element.
    CF_DEVICE double lse(int32_t query) const {
        const double x = query < seqlen_q ? ld_global(lse_of_first + query * lse_row) : kInfinity;
        return x == -double(kInfinity) ? kInfinity : x;
    }
    CF_DEVICE double delta(int32_t query) const {
        return query < seqlen_q ? ld_global(delta_of_first + query * delta_row) : 0;
    }
};

// [A2.11] A product of a warp's rows becomes P. whole: every pair counts. query(n, e): of which LSE element e of column
// n is.
template <bool kKeysInRows, int kN, int kQueries, class Query>
CF_DEVICE void recompute_p(double (&s)[1][kN][4], const double (&lse)[kQueries], Query query, double scale,
                           bool whole, const Positions<kKeysInRows>& at, const NarrowBand& band) {
    CF_UNROLL
    for (int n = 0; n < kN; n++) {
        CF_UNROLL
        for (int e = 0; e < 4; e++) s[0][n][e] *= scale;
    }
    if (!whole) mask_band(s, at, band);
    CF_UNROLL
    for (int n = 0; n < kN; n++) {
        CF_UNROLL
        for (int e = 0; e < 4; e++) s[0][n][e] = natural_exp(s[0][n][e] - lse[query(n, e)]);
    }
}
// [A2.14] dp becomes dS.
template <int kN, int kQueries, class Query>
CF_DEVICE void compute_ds(double (&dp)[kN][4], const double (&p)[kN][4], const double (&delta)[kQueries],
                          Query query) {
    CF_UNROLL
    for (int n = 0; n < kN; n++) {
        CF_UNROLL
        for (int e = 0; e < 4; e++) dp[n][e] = p[n][e] * (dp[n][e] - delta[query(n, e)]);
    }
}

// ---- dkv: a block owns keys and goes over queries.
template <int kBlockM, int kBlockN> CF_DEVICE void dkv(const BackwardParams& p) {
    static_assert(kBlockN == kOwned);
    using QTile = KeyTile<kBlockM>;
    using DOTile = ValueTile<kBlockM>;
    using KTile = KeyTile<kBlockN>;
    using VTile = ValueTile<kBlockN>;
    using Ring = QueryRing<QTile, DOTile, kThreads, Slots::two>;
    struct Storage {
        KTile k;
        VTile v;
        typename Ring::Storage queries;
    };
    Storage& s = storage_of_pass<Storage>();

    // [A2.6]
    const TileCoord work = tile_coord(blockIdx.x, cdiv(p.shape.seqlen_k, kBlockN), p.shape.heads_k);
    const Sequence sequence = sequence_of(p.shape, work.batch);
    const int32_t n_first = work.tile * kBlockN, n_end = n_first + kBlockN;
    if (n_first >= sequence.rows_k) return;
    const int32_t group = p.shape.heads_q / p.shape.heads_k, first_head = work.head * group;
    const int row_first = static_cast<int>(threadIdx.x) / 32 * 16;
    double rDK[kHeadDim / 8][4] = {}, rDV[kHeadDimV / 8][4] = {};

    // Tiles of queries [tiles.first, tiles.end) see a key of the block; in [whole.first, whole.end) every
    // pair counts.
    const Band band(p.score, sequence);
    const Range queries = band.queries_of(n_first, n_end);
    const Range tiles{queries.first / kBlockM, cdiv(queries.end, kBlockM)};
    const Range whole{cdiv(band.first_query(n_end - 1), kBlockM),
                      n_end <= sequence.seqlen_k ? band.end_query(n_first) / kBlockM : 0};

    if (tiles.first < tiles.end) {
        const NarrowBand narrow_band(band);
        const auto rows_of_keys = [&](const Tensor& t, int32_t columns) {
            return rows_of<Element>(t, work.batch, work.head, sequence.first_k + n_first,
                                    sequence.seqlen_k - n_first, columns);
        };
        // sync: in the first group of copies of the ring, whose first `next` waits for it.
        load_tile<kThreads, false>(rows_of_keys(p.k, p.shape.head_dim), s.k);
        load_tile<kThreads, false>(rows_of_keys(p.v, p.shape.head_dim_v), s.v);
        Ring ring(rows_of<Element>(p.q, work.batch, first_head, sequence.first_q, sequence.seqlen_q,
                                   p.shape.head_dim),
                  rows_of<Element>(p.d_o, work.batch, first_head, sequence.first_q, sequence.seqlen_q,
                                   p.shape.head_dim_v),
                  p.q.head, p.d_o.head, tiles, group, s.queries);
        const DoubleRowReader<KTile> rows_of_k(smem_addr(s.k.data), row_first);
        const DoubleRowReader<VTile> rows_of_v(smem_addr(s.v.data), row_first);

        // [A2.8]
        for (int32_t head = first_head; head < first_head + group; head++) {
            const QueryNumbers of_head(p, sequence, head);
#pragma unroll 1
            for (int32_t tile = tiles.first; tile < tiles.end; tile++) {
                constexpr int kN = kBlockM / 8;
                const Positions<true> at(n_first + row_first, tile * kBlockM);
                const auto query = [](int n, int e) { return 2 * n + e % 2; };
                double numbers[2 * kN];    // of the queries of the thread's columns
                CF_UNROLL
                for (int i = 0; i < 2 * kN; i++) numbers[i] = of_head.lse(at.query(0, i / 2, i % 2));
                ring.next();
                // [A2.10]
                double rS[1][kN][4] = {}, rDP[kN][4] = {};
                multiply_by_rows<kProductRows, kHeadDim / 8>(rS[0], rows_of_k,
                                                             DoubleRowReader<QTile>(ring.q_tile()));
                recompute_p(rS, numbers, query, p.score.scale, contains(whole, tile), at, narrow_band);
                // [A2.13]
                CF_UNROLL
                for (int i = 0; i < 2 * kN; i++) numbers[i] = of_head.delta(at.query(0, i / 2, i % 2));
                multiply_by_rows<kProductRows, kHeadDimV / 8>(rDP, rows_of_v,
                                                              DoubleRowReader<DOTile>(ring.d_o_tile()));
                compute_ds(rDP, rS[0], numbers, query);
                // [A2.12] [A2.16]
                multiply_by_columns<kProductRows>(rDV, rS[0], DoubleColumnReader<DOTile>(ring.d_o_tile()));
                multiply_by_columns<kProductRows>(rDK, rDP, DoubleColumnReader<QTile>(ring.q_tile()));
            }
        }
    }

    const int64_t row = sequence.first_k + n_first + row_first;
    const int32_t rows = sequence.rows_k - n_first - row_first;
    const double scale[2] = {p.score.scale, p.score.scale}, one[2] = {1, 1};
    store_rows(rDK, scale, rows_of<Element>(p.dk, work.batch, work.head, row, rows, p.shape.head_dim));
    store_rows(rDV, one, rows_of<Element>(p.dv, work.batch, work.head, row, rows, p.shape.head_dim_v));
}

// ---- dq: a block owns queries and goes over keys.
template <int kBlockM, int kBlockN> CF_DEVICE void dq(const BackwardParams& p) {
    static_assert(kBlockM == kOwned);
    using QTile = KeyTile<kBlockM>;
    using DOTile = ValueTile<kBlockM>;
    using KTile = KeyTile<kBlockN>;
    using VTile = ValueTile<kBlockN>;
    // layout: the ring's first tile of a step is V's, its second K's.
    // why: dP before S, as in flash_backward.
    using Ring = KeyValueRing<VTile, KTile, kThreads, 2, false>;
    struct Storage {
        QTile q;
        DOTile d_o;
        typename Ring::Storage keys;
    };
    Storage& s = storage_of_pass<Storage>();

    const int32_t all_tiles = cdiv(p.shape.seqlen_q, kBlockM);
    const TileCoord work = tile_coord(blockIdx.x, all_tiles, p.shape.heads_q);
    const Sequence sequence = sequence_of(p.shape, work.batch);
    const int32_t m_first = (all_tiles - 1 - work.tile) * kBlockM;
    const int32_t m_end = smaller(m_first + kBlockM, sequence.seqlen_q);
    if (m_first >= sequence.seqlen_q) return;
    const int32_t kv_head = work.head / (p.shape.heads_q / p.shape.heads_k);
    const int row_first = static_cast<int>(threadIdx.x) / 32 * 16;
    double rDQ[kHeadDim / 8][4] = {};

    // Tiles of keys [first, end) hold a key for some query of the block; in [whole.first, whole.end) every
    // pair counts.
    const Band band(p.score, sequence);
    const Range keys = band.keys_of(m_first, m_end);
    const int32_t first = keys.first / kBlockN, end = cdiv(keys.end, kBlockN);
    const Range whole{cdiv(band.first_key(m_end - 1), kBlockN), band.end_key(m_first) / kBlockN};

    const auto own_rows = [&](const Tensor& t, int32_t columns, int32_t from) {
        return rows_of<Element>(t, work.batch, work.head, sequence.first_q + m_first + from,
                                m_end - m_first - from, columns);
    };
    if (first < end) {
        const NarrowBand narrow_band(band);
        const auto rows_of_keys = [&](const Tensor& t, int32_t columns) {
            return rows_of<Element>(t, work.batch, kv_head, sequence.first_k, sequence.seqlen_k, columns);
        };
        // sync: in the first group of copies of the ring, whose first `next` waits for it.
        load_tile<kThreads, false>(own_rows(p.q, p.shape.head_dim, 0), s.q);
        load_tile<kThreads, false>(own_rows(p.d_o, p.shape.head_dim_v, 0), s.d_o);
        Ring ring(rows_of_keys(p.v, p.shape.head_dim_v), rows_of_keys(p.k, p.shape.head_dim), s.keys);
        const auto place = [&](int32_t step) { return first + step; };
        ring.begin(end - 1 - first, place);
        const auto half = [](int, int e) { return e / 2; };
        const QueryNumbers of_head(p, sequence, work.head);
        const Positions<false> rows(m_first + row_first, 0);
        const double lse[2] = {of_head.lse(rows.row), of_head.lse(rows.row + 8)};
        const double delta[2] = {of_head.delta(rows.row), of_head.delta(rows.row + 8)};
        const DoubleRowReader<QTile> rows_of_q(smem_addr(s.q.data), row_first);
        const DoubleRowReader<DOTile> rows_of_d_o(smem_addr(s.d_o.data), row_first);

        // [A2.8]
#pragma unroll 1
        for (int32_t tile = end - 1; tile >= first; tile--) {
            constexpr int kN = kBlockN / 8;
            // [A2.13]
            double rS[1][kN][4] = {}, rDP[kN][4] = {};
            const uint32_t sV = ring.template next<Stream::key>(tile - first, place);
            multiply_by_rows<kProductRows, kHeadDimV / 8>(rDP, rows_of_d_o, DoubleRowReader<VTile>(sV));
            // [A2.10]
            const uint32_t sK = ring.template next<Stream::value>(tile - first, place);
            multiply_by_rows<kProductRows, kHeadDim / 8>(rS[0], rows_of_q, DoubleRowReader<KTile>(sK));
            const Positions<false> at(m_first + row_first, tile * kBlockN);
            recompute_p(rS, lse, half, p.score.scale, contains(whole, tile), at, narrow_band);
            compute_ds(rDP, rS[0], delta, half);
            // [A2.15]
            multiply_by_columns<kProductRows>(rDQ, rDP, DoubleColumnReader<KTile>(sK));
        }
        // sync: no copy may be under way when the block ends (the last groups are empty, but the counter is
        // the thread's).
        cp_async_wait<0>();
    }
    const double scale[2] = {p.score.scale, p.score.scale};
    store_rows(rDQ, scale, own_rows(p.dq, p.shape.head_dim, row_first));
}

CF_KERNEL(BackwardParams, kThreads, 1, (CF_PASS<CF_BLOCK_M, CF_BLOCK_N>))
