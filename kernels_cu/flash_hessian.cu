// Second order: H, the derivatives of dQ, dK and dV in a direction, on mma.sync tensor cores, sm_80 to sm_120, in two passes
// that need no atomics and repeat bit for bit. CF_PASS names the pass of a compilation.
// Design note: docs/kernels/derivatives.md.
//
// A dot is a derivative; dO and dLSE are held fixed. The tags are those of cupy_flash/cpu/hvp.py; [H.1], delta and
// dotdelta, is the pass delta_dot of simple_hessian.cu, which comes first:
//          a block owns rows of dotdQ, or of dotdK and dotdV, a warp 16 of them; for each tile that meets them
//   [H.2]      P = e^(score(S) - LSE), dotS as in flash_tangent.cu, dP = dO V^T - delta, dotdP
//   [H.3]      dotP = P * (dotS - mean)                     dotdV += dotP^T dO
//   [H.4]      dS = P * dP
//   [H.5]      dotdS = dotP * dP + P * (dotdP - dotdelta)
//   [H.6]      through softcap: dotdS = g' dotdS + g'' dS dotT, dS = g' dS
//   [H.7]      dotdQ += scale (dotdS K + dS dotK)           (pass dq_dot)
//   [H.8]      dotdK += scale (dotdS^T Q + dS^T dotQ)       (pass dkv_dot)
// Products of a tangent that is null are left out, and its tiles are not read: of 15 in all, 7 in dq_dot and 8 in
// dkv_dot.
//
// Grid:   along x. dq_dot: ceil(seqlen_q / kBlockM) * heads_q * batch in the order of lpt_query_tile; dkv_dot:
//         ceil(seqlen_k / kBlockN) * heads_k * batch in that of lpt_key_tile. Packed: seqlens are the longest;
//         blocks past the end of their sequence return.
// Block:  dq_dot: a warp has 16 rows of queries, of S and of dotdQ. dkv_dot: 16 rows of keys, of S^T and of dotdK
//         and dotdV, so that what multiplies dO, Q and dotQ is A as it stands in registers.
// Shared: dq_dot: Q (dotdQ is staged in it), dotQ, dO; two slots, of V and dotV or of K and dotK. dkv_dot: K
//         and dotK, V and dotV (dotdK and dotdV are staged in K and V); two slots of Q, dotQ, dO and their rows.
//
// Assumes: last axes of all tensors contiguous; seqlens below 2^30; row strides below 2^31 bytes; q, k, v, dO
//         and tangents finite. o, lse, dotO and dotLSE are those of the forward pass and of flash_tangent.
// Not here: mask, bias, spans, dropout; the gradients of sinks, which read delta (simple_hessian.cu).
//
// Cost:   15 products where the deterministic backward pass has 7, in as many bytes each. A thread holds 64 or, of
//         keys, 128 sums at head dim 128; and S, dotS, dP and dotdP: 64 more at 32 keys of dq_dot, 32 at 16 queries
//         of dkv_dot.
#include "backward/tangent_queries.cuh"
#include "tile/epilogue.cuh"
#include "tile/ring.cuh"

// ---- Config
#if !defined(CF_ELEMENT)
#define CF_ELEMENT __half
#define CF_PRODUCTS 1
#define CF_HEAD_DIM 64
#define CF_HEAD_DIM_V 64
#define CF_PASS dq_dot
#define CF_BLOCK_M 128
#define CF_BLOCK_N 32
#define CF_THREADS 256
#define CF_SHARED_BYTES 65536
#endif
using Element = CF_ELEMENT;
constexpr int kHeadDim = CF_HEAD_DIM;       // the largest head dim of q and k
constexpr int kHeadDimV = CF_HEAD_DIM_V;    // the largest head dim of v and o
constexpr int kThreads = CF_THREADS;
// Of what the blocks of one head share, K and V or Q and dO and their tangents, that should stay in L2.
constexpr uint32_t kSectionElements = (16 << 20) / uint32_t(2 * sizeof(Element));

using Product = Math<Element, CF_PRODUCTS, false>;
template <int kRows> using KeyTile = Tile<Element, kRows, kHeadDim>;
template <int kRows> using ValueTile = Tile<Element, kRows, kHeadDimV>;

template <class Storage> CF_DEVICE Storage& storage_of_pass() {
    static_assert(sizeof(Storage) == CF_SHARED_BYTES, "the catalog and the kernel disagree on shared memory");
    return shared_memory<Storage>();
}

// Of a tile of scores and of its tangent, one after the other: kM times kN of both.
template <int kM, int kN, int kBoth> CF_DEVICE float (&parted(float (&both)[kBoth][4])) [kM][kN][4] {
    static_assert(kM * kN <= kBoth);
    return reinterpret_cast<float (&)[kM][kN][4]>(both);
}

// A: the rows of a warp in a tile, and the same of the tile of its tangent, which follows.
template <class T> struct PairRows {
    static constexpr bool kInRegisters = false;
    BlockReader<T, Order::rows_first> reader;

    CF_DEVICE PairRows(uint32_t tile_address, int row_first) : reader(tile_address + row_first * T::kPitch) {}
    CF_DEVICE void load(uint32_t (&r)[4], int m, int step) const { reader.load(r, m * T::kRows, step); }
    CF_DEVICE void advance(int steps) { reader.advance(0, steps); }
};

// S and its tangent, from rows of A and dotA and a pair of tiles B and dotB.
template <class T, int kN>
CF_DEVICE void multiply_with_tangent(float (&s)[1][kN][4], float (&tangent)[1][kN][4], uint32_t a_address,
                                     int row_first, uint32_t a_dot_address, uint32_t pair_address,
                                     bool has_a_dot, bool has_b_dot) {
    using Own = Tile<Element, 16, kHeadDim>;
    const SharedRows<Product, Own> a(a_address, row_first), a_dot(a_dot_address, row_first);
    if (has_a_dot && has_b_dot) {
        multiply_rows_with_tangent<Product, T>(s, tangent, a, a_dot, pair_address);
        return;
    }
    multiply_by_rows<Product, T>(s, a, pair_address);
    if (has_a_dot) multiply_by_rows<Product, T>(tangent, a_dot, pair_address);
    if (has_b_dot) multiply_by_rows<Product, T>(tangent, a, pair_address + T::kBytes);
}

// Starts the copy of a tile and of that of its tangent, which follows.
template <class T> CF_DEVICE void load_pair(const RowsPair<Element>& from, const T& to) {
    TileLoader<TilePair<T>, kThreads>(from).start_once(smem_addr(to.data), 0);
}

// ---- dq_dot: a block owns queries and goes over keys, from the last to the first.
template <int kBlockM, int kBlockN> CF_DEVICE void dq_dot(const SecondOrderParams& params) {
    using QTile = KeyTile<kBlockM>;
    using DOTile = ValueTile<kBlockM>;
    using KTile = KeyTile<kBlockN>;
    using VTile = ValueTile<kBlockN>;
    // layout: the ring's first tile of a step is V's, its second K's.
    // why: K is needed once more, for dotdQ, and a tile of the ring can be read until the next one is asked for.
    using Ring = KeyValueRing<TilePair<VTile>, TilePair<KTile>, kThreads, 2, false>;
    static_assert(kBlockM == kThreads / 2, "a warp owns 16 rows");
    struct Storage {
        QTile q, q_dot;
        DOTile d_o;
        typename Ring::Storage keys;
    };
    Storage& s = storage_of_pass<Storage>();
    constexpr int kN = kBlockN / 8;

    const BackwardParams& p = params.call;
    const int32_t m_tiles = cdiv(p.shape.seqlen_q, kBlockM);
    const TileCoord work = lpt_query_tile(blockIdx.x, m_tiles, p.shape, p.shape.heads_q, kSectionElements);
    const Sequence sequence = sequence_of(p.shape, work.batch);
    const int32_t kv_head = work.head / (p.shape.heads_q / p.shape.heads_k);
    const int32_t m_first = work.tile * kBlockM, m_end = smaller(m_first + kBlockM, sequence.seqlen_q);
    if (m_first >= sequence.seqlen_q) return;
    const int32_t warp_row = threadIdx.x / 32 * 16;
    const int64_t first_q = sequence.first_q + m_first;

    // Tiles of keys [first, end) hold a key for a query of the block; in [whole.first, whole.end) every pair counts.
    const Band band(p.score, sequence);
    const Range keys = band.keys_of(m_first, m_end);
    const int32_t first = keys.first / kBlockN, end = cdiv(keys.end, kBlockN);
    const Range whole{cdiv(band.first_key(m_end - 1), kBlockN), band.end_key(m_first) / kBlockN};
    float rDQ[1][kHeadDim / 8][4] = {};

    if (first < end) {
        const bool has_q_dot = params.q_dot.data, has_k_dot = params.k_dot.data,
                   has_v_dot = params.v_dot.data;
        const auto of_keys = [&](const Tensor& t, const Tensor& dot, int32_t columns) {
            return pair_of_rows<Element>(t, dot, work.batch, kv_head, sequence.first_k, sequence.seqlen_k,
                                         columns);
        };
        load_pair<QTile>(pair_of_rows<Element>(p.q, params.q_dot, work.batch, work.head, first_q,
                                               m_end - m_first, p.shape.head_dim),
                         s.q);
        load_tile<kThreads, false>(
            tensor_rows<Element>(p.d_o, work.batch, work.head, first_q, m_end - m_first, p.shape.head_dim_v),
            s.d_o);
        Ring ring(of_keys(p.v, params.v_dot, p.shape.head_dim_v),
                  of_keys(p.k, params.k_dot, p.shape.head_dim), s.keys);
        const auto place = [&](int32_t step) { return first + step; };
        ring.begin(end - 1 - first, place);

        const SecondGradient<Product> gradient(p.score, sequence, band, work.head);
        RowNumbers rows[2];
        CF_UNROLL
        for (int half = 0; half < 2; half++) {
            const int32_t query = m_first + warp_row + 8 * half + threadIdx.x % 32 / 4;
            const bool exists = query < sequence.seqlen_q;
            const auto number = [&](const Rows& of) {
                return exists ? head_rows<float>(of, work.batch, work.head, sequence.first_q)[query * of.row]
                              : 0.0f;
            };
            rows[half] = row_numbers(number(p.lse), number(params.lse_dot), number(p.delta),
                                     number(params.delta_dot), exists);
        }
#pragma unroll 1
        for (int32_t tile = end - 1; tile >= first; tile--) {
            float rDP[2 * kN][4] = {}, rS[1][kN][4] = {}, rTangent[1][kN][4] = {};
            const uint32_t sV = ring.template next<Stream::key>(tile - first, place);
            const SharedRows<Product, DOTile> d_o(smem_addr(s.d_o.data), warp_row);
            if (has_v_dot) multiply_by_rows<Product, ValueTile<2 * kBlockN>>(parted<1, 2 * kN>(rDP), d_o, sV);
            else multiply_by_rows<Product, VTile>(parted<1, kN>(rDP), d_o, sV);
            const uint32_t sK = ring.template next<Stream::value>(tile - first, place);
            multiply_with_tangent<KTile>(rS, rTangent, smem_addr(s.q.data), warp_row, smem_addr(s.q_dot.data),
                                         sK, has_q_dot, has_k_dot);
            const Positions<false> at(m_first + warp_row, tile * kBlockN);
            const bool all = contains(whole, tile);
            CF_UNROLL
            for (int n = 0; n < kN; n++)
                gradient.compute_ds(rS[0][n], rTangent[0][n], rDP[n], rDP[kN + n], rows, at.of_column(n),
                                    all);
            // [H.7]
            if (has_k_dot)
                multiply_by_columns<Product, KeyTile<2 * kBlockN>>(rDQ, parted<1, 2 * kN>(rDP), sK);
            else multiply_by_columns<Product, KTile>(rDQ, parted<1, kN>(rDP), sK);
        }
        // sync: no copy may be under way when the block ends (the last groups are empty, but the counter is
        // the thread's).
        cp_async_wait<0>();
    }
    const float scale = static_cast<float>(p.score.scale), factor[1][2] = {{scale, scale}};
    Element* dq = head_rows<Element>(p.dq, work.batch, work.head, first_q + warp_row);
    store_warp_rows<Product>(rDQ, factor,
                             GlobalRows<Element>(dq, p.dq.row, m_end - m_first - warp_row, p.shape.head_dim),
                             smem_addr(s.q.data) + warp_row * QTile::kPitch);
}

// ---- dkv_dot: a block owns keys and goes over the queries of all heads that read them.
template <int kBlockM, int kBlockN> CF_DEVICE void dkv_dot(const SecondOrderParams& params) {
    using QTile = KeyTile<kBlockM>;
    using DOTile = ValueTile<kBlockM>;
    using KTile = KeyTile<kBlockN>;
    using VTile = ValueTile<kBlockN>;
    using Slot = TangentQueries<QTile, DOTile>;
    static_assert(kBlockN == kThreads / 2, "a warp owns 16 rows");
    struct Storage {
        KTile k, k_dot;    // neighbours, and V as well
        VTile v, v_dot;
        Slot queries[2];
    };
    Storage& s = storage_of_pass<Storage>();
    constexpr int kN = kBlockM / 8;

    const BackwardParams& p = params.call;
    const TileCoord work =
        lpt_key_tile(blockIdx.x, cdiv(p.shape.seqlen_k, kBlockN), p.shape, kSectionElements);
    const Sequence sequence = sequence_of(p.shape, work.batch);
    const int32_t n_first = work.tile * kBlockN, n_end = n_first + kBlockN;
    if (n_first >= sequence.rows_k) return;
    const int32_t group = p.shape.heads_q / p.shape.heads_k, warp_row = threadIdx.x / 32 * 16;

    // Tiles of queries [tiles.first, tiles.end) see a key of the block; in [whole.first, whole.end) every
    // pair counts.
    const Band band(p.score, sequence);
    const Range queries = band.queries_of(n_first, n_end);
    const Range tiles{queries.first / kBlockM, cdiv(queries.end, kBlockM)};
    const Range whole{cdiv(band.first_query(n_end - 1), kBlockM),
                      n_end <= sequence.seqlen_k ? band.end_query(n_first) / kBlockM : 0};
    float rDK[1][kHeadDim / 8][4] = {}, rDV[1][kHeadDimV / 8][4] = {};

    if (tiles.first < tiles.end) {
        const bool has_q_dot = params.q_dot.data, has_k_dot = params.k_dot.data,
                   has_v_dot = params.v_dot.data;
        const auto of_keys = [&](const Tensor& t, const Tensor& dot, int32_t columns) {
            return pair_of_rows<Element>(t, dot, work.batch, work.head, sequence.first_k + n_first,
                                         sequence.seqlen_k - n_first, columns);
        };
        load_pair<KTile>(of_keys(p.k, params.k_dot, p.shape.head_dim), s.k);
        load_pair<VTile>(of_keys(p.v, params.v_dot, p.shape.head_dim_v), s.v);
        const PairRows<VTile> v_rows(smem_addr(s.v.data), warp_row);

#pragma unroll 1
        for (int32_t head = work.head * group; head < (work.head + 1) * group; head++) {
            const SecondGradient<Product> gradient(p.score, sequence, band, head);
            const TangentQueriesLoader<Slot, QTile, DOTile, kThreads> loader(params, sequence, head);
            // sync: all are done with the slots, which the next head fills.
            __syncthreads();
            loader.start(smem_addr(s.queries[0].data), tiles.first * kBlockM);
            cp_async_commit();
            uint32_t sQ = smem_addr(s.queries[0].data), sOther = smem_addr(s.queries[1].data);
#pragma unroll 1
            for (int32_t tile = tiles.first; tile < tiles.end; tile++) {
                cp_async_wait<0>();
                // sync: every thread has waited for its own copies of this slot, so now it is visible to all;
                // and all are done with the other one, which is filled next.
                __syncthreads();
                if (tile + 1 < tiles.end) {
                    loader.start(sOther, (tile + 1) * kBlockM);
                    cp_async_commit();
                }
                const uint32_t sDO = sQ + Slot::kOfDO;
                float rDP[2 * kN][4] = {}, rS[1][kN][4] = {}, rTangent[1][kN][4] = {};
                multiply_with_tangent<QTile>(rS, rTangent, smem_addr(s.k.data), warp_row,
                                             smem_addr(s.k_dot.data), sQ, has_k_dot, has_q_dot);
                if (has_v_dot) multiply_by_rows<Product, DOTile>(parted<2, kN>(rDP), v_rows, sDO);
                else multiply_by_rows<Product, DOTile>(parted<1, kN>(rDP), v_rows, sDO);
                const Positions<true> at(n_first + warp_row, tile * kBlockM);
                const bool all = contains(whole, tile);
                CF_UNROLL
                for (int n = 0; n < kN; n++) {
                    const auto there = at.of_column(n);
                    RowNumbers rows[2];
                    CF_UNROLL
                    for (int i = 0; i < 2; i++)
                        rows[i] = Slot::row_of(sQ, there.column + i - tile * kBlockM,
                                               there.column + i < sequence.seqlen_q);
                    gradient.compute_ds(rS[0][n], rTangent[0][n], rDP[n], rDP[kN + n], rows, there, all);
                }
                // [H.3] [H.8]
                multiply_by_columns<Product, DOTile>(rDV, rS, sDO);
                if (has_q_dot)
                    multiply_by_columns<Product, KeyTile<2 * kBlockM>>(rDK, parted<1, 2 * kN>(rDP), sQ);
                else multiply_by_columns<Product, QTile>(rDK, parted<1, kN>(rDP), sQ);
                const uint32_t read = sQ;
                sQ = sOther, sOther = read;
            }
        }
    }
    const auto store = [&](const Tensor& to, int32_t columns, const auto& sums, float scale,
                           uint32_t staging) {
        Element* first = head_rows<Element>(to, work.batch, work.head, sequence.first_k + n_first + warp_row);
        const GlobalRows<Element> rows(first, to.row, sequence.rows_k - n_first - warp_row, columns);
        const float factor[1][2] = {{scale, scale}};
        store_warp_rows<Product>(sums, factor, rows, staging);
    };
    store(p.dk, p.shape.head_dim, rDK, static_cast<float>(p.score.scale),
          smem_addr(s.k.data) + warp_row * KTile::kPitch);
    store(p.dv, p.shape.head_dim_v, rDV, 1.0f, smem_addr(s.v.data) + warp_row * VTile::kPitch);
}

CF_KERNEL(SecondOrderParams, kThreads, 1, (CF_PASS<CF_BLOCK_M, CF_BLOCK_N>))
