// Forward mode: J, the tangents of O and LSE in a direction, on mma.sync tensor cores, sm_80 to sm_120.
// Design note: docs/kernels/derivatives.md.
//
// A dot is a derivative; the tags are those of cupy_flash/cpu/jvp.py:
//   [J.1]  a block owns the rows Q_i of one head, a warp 16 of them; for each block of keys that the band of the
//          query tile reaches, from the last to the first
//   [J.2]      P = e^(score(Q_i K_j^T) - LSE)
//   [J.3]      dotS = d cap (dotQ_i K_j^T + Q_i dotK_j^T) + dotbias
//   [J.4]      mean += rowsum(P * dotS)
//   [J.5]      dotO += dropout(P * dotS) V_j + dropout(P) dotV_j
//   [J.6]  mean += e^(sink - LSE) dotsink
//   [J.7]  dotO -= mean * O, dotLSE = mean
// Products of a tangent that is null are left out, and its tiles are not read. No running maximum: LSE is given.
//
// Grid:   as of flash_forward.cu: x = ceil(seqlen_q / kBlockM) * heads_q * batch in the order of
//         lpt_query_tile. Packed: seqlen_q is the longest; blocks past the end of their sequence return.
// Block:  kWarps warps, each with 16 rows of its own from Q K^T to the end.
// Shared: Q (dotO is staged in it) and dotQ, kBlockM x kHeadDim elements each; then two slots, of K and dotK or
//         of V and dotV, 2 kBlockN x kHeadDim elements each.
//
// Assumes: last axes of all tensors contiguous; seqlens below 2^30; row strides below 2^31 bytes; scale > 0 unless
//         kMask is any; v and dotV finite. o and lse are the forward pass's.
//
// Cost:   five products where the forward pass has two, in twice its bytes. A thread holds S, dotS and dotO, 128 sums
//         at 64 keys and head dim 128, so that a warp has 16 rows only. With tangents of both, each of Q, dotQ, K,
//         dotK, V and dotV is read from shared memory once.
#include "attention/softmax.cuh"
#include "tile/epilogue.cuh"
#include "tile/ring.cuh"
#include "tile/score_tile.cuh"
#include "tile/tile_pair.cuh"

// ---- Config
#if !defined(CF_ELEMENT)
#define CF_ELEMENT __half
#define CF_PRODUCTS 1
#define CF_HEAD_DIM 64
#define CF_HEAD_DIM_V 64
#define CF_MASK band
#define CF_BLOCK_M 128
#define CF_BLOCK_N 64
#define CF_THREADS 256
#define CF_SHARED_BYTES 65536
#endif
// What a score can meet, as in flash_forward.cu.
enum class Mask { band, any };
using Element = CF_ELEMENT;
constexpr bool kAny = Mask::CF_MASK == Mask::any;
constexpr int kHeadDim = CF_HEAD_DIM;       // the largest head dim of q and k
constexpr int kHeadDimV = CF_HEAD_DIM_V;    // the largest head dim of v and o
constexpr int kBlockM = CF_BLOCK_M, kBlockN = CF_BLOCK_N, kThreads = CF_THREADS;
constexpr int kN = kBlockN / 8, kNV = kHeadDimV / 8;
constexpr uint32_t kL2SectionBytes = 16 << 20;    // of K, V and their tangents that should stay in L2
static_assert(kBlockM == kThreads / 2, "a warp owns 16 rows");
static_assert(kHeadDimV <= kHeadDim, "dotO leaves through the tile of Q");

using Product = Math<Element, CF_PRODUCTS, false>;
using QTile = Tile<Element, kBlockM, kHeadDim>;
using KTile = Tile<Element, kBlockN, kHeadDim>;
using VTile = Tile<Element, kBlockN, kHeadDimV>;
using Ring = KeyValueRing<TilePair<KTile>, TilePair<VTile>, kThreads, 2, false>;
using Scores = float[1][kN][4];

struct SharedStorage {
    QTile q, q_dot;
    Ring::Storage keys;
};
static_assert(sizeof(SharedStorage) == CF_SHARED_BYTES,
              "the catalog and the kernel disagree on shared memory");

template <class Act> CF_DEVICE void each(Act act) {
    CF_UNROLL
    for (int n = 0; n < kN; n++) {
        CF_UNROLL
        for (int e = 0; e < 4; e++) act(n, e);
    }
}

CF_DEVICE void flash_tangent(const SecondOrderParams& params) {
    const BackwardParams& p = params.call;
    SharedStorage& s = shared_memory<SharedStorage>();

    // [J.1]
    const int32_t m_tiles = cdiv(p.shape.seqlen_q, kBlockM);
    const TileCoord work = lpt_query_tile(blockIdx.x, m_tiles, p.shape, p.shape.heads_q,
                                          kL2SectionBytes / uint32_t(2 * sizeof(Element)));
    const Sequence sequence = sequence_of(p.shape, work.batch);
    const int32_t kv_head = work.head / (p.shape.heads_q / p.shape.heads_k);
    const int32_t m_first = work.tile * kBlockM, m_end = smaller(m_first + kBlockM, sequence.seqlen_q);
    if (m_first >= sequence.seqlen_q) return;
    const int32_t warp_row = threadIdx.x / 32 * 16, row = m_first + warp_row + threadIdx.x % 32 / 4;
    const int64_t first_q = sequence.first_q + m_first;

    // Blocks of keys [first, end) hold a key for a query of the tile; in [whole.first, whole.end) every pair counts.
    const Band band(p.score, sequence);
    Range keys = band.keys_of(m_first, m_end);
    if constexpr (kAny) keys = HeadSpans(p.score, sequence, work.head).narrowed(keys, m_first, m_end, true);
    const int32_t first = keys.first / kBlockN, end = cdiv(keys.end, kBlockN);
    const Range whole{cdiv(band.first_key(m_end - 1), kBlockN), band.end_key(m_first) / kBlockN};

    // why: rows without keys have an LSE of -inf, rows past the end none; +inf gives both P = 0.
    const float* gLse = head_rows<float>(p.lse, work.batch, work.head, sequence.first_q);
    float lse_log2[2], mean[2] = {0, 0}, rODot[1][kNV][4] = {};
    CF_UNROLL
    for (int half = 0; half < 2; half++) {
        const int32_t query = row + 8 * half;
        const float lse = query < sequence.seqlen_q ? ld_global(gLse + query * p.lse.row) : kInfinity;
        lse_log2[half] = lse == -kInfinity ? kInfinity : lse * kLog2e;
    }

    if (first < end) {
        const auto queries = [&](const Tensor& t) {
            return GlobalRows<Element>(head_rows<Element>(t, work.batch, work.head, first_q), t.row,
                                       m_end - m_first, p.shape.head_dim);
        };
        const auto of_keys = [&](const Tensor& t, const Tensor& dot, int32_t columns) {
            const auto rows = [&](const Tensor& of) {
                return GlobalRows<Element>(head_rows<Element>(of, work.batch, kv_head, sequence.first_k),
                                           of.row, sequence.seqlen_k, columns);
            };
            return RowsPair<Element>{rows(t), rows(dot.data ? dot : t), dot.data != nullptr};
        };
        const bool has_q_dot = params.q_dot.data, has_k_dot = params.k_dot.data,
                   has_v_dot = params.v_dot.data;
        const bool has_score_dot = has_q_dot || has_k_dot || params.bias_dot.data;
        load_tile<kThreads, false>(queries(p.q), s.q);
        if (has_q_dot) load_tile<kThreads, false>(queries(params.q_dot), s.q_dot);
        Ring ring(of_keys(p.k, params.k_dot, p.shape.head_dim),
                  of_keys(p.v, params.v_dot, p.shape.head_dim_v), s.keys);
        const auto place = [&](int32_t step) { return first + step; };
        ring.begin(end - 1 - first, place);

        const TileScore<Product> score(p.score, sequence, work.head);
        const Dropout dropout(p.score, work.batch, work.head);
        const NarrowBand narrow_band(band);
        const float scale = static_cast<float>(p.score.scale), unit_log2 = kAny ? kLog2e : scale * kLog2e;
        const SharedRows<Product, QTile> q_rows(smem_addr(s.q.data), warp_row),
            q_dot_rows(smem_addr(s.q_dot.data), warp_row);
#pragma unroll 1
        for (int32_t tile = end - 1; tile >= first; tile--) {
            Scores rS = {}, rDot = {};
            const uint32_t sK = ring.template next<Stream::key>(tile - first, place);
            bool reached = true;
            if constexpr (kAny)
                reached = score.reach(m_first, m_first + kBlockM, tile * kBlockN, tile * kBlockN + kBlockN);
            if (reached && has_q_dot && has_k_dot) {
                multiply_rows_with_tangent<Product, KTile>(rS, rDot, q_rows, q_dot_rows, sK);
            } else if (reached) {
                multiply_by_rows<Product, KTile>(rS, q_rows, sK);
                if (has_q_dot) multiply_by_rows<Product, KTile>(rDot, q_dot_rows, sK);
                if (has_k_dot) multiply_by_rows<Product, KTile>(rDot, q_rows, sK + KTile::kBytes);
            }
            const uint32_t sV = ring.template next<Stream::value>(tile - first, place);
            if (!reached) continue;

            const Positions<false> at(m_first + warp_row, tile * kBlockN);
            if constexpr (kAny) {
                score.apply_softcap(rS);
                each([&](int n, int e) { rDot[0][n][e] *= scale * score.head.softcap_slope(rS[0][n][e]); });
                if (params.bias_dot.data)
                    score.add_bias(rDot, at, params.bias_dot,
                                   work.batch * params.bias_dot.batch + work.head * params.bias_dot.head);
                score.apply_score_mod(rS, at);
                score.apply_mask(rS, at);
            }
            if (!contains(whole, tile)) mask_band(rS, at, narrow_band);
            each([&](int n, int e) {
                // [J.2]
                const float weight = ex2(fmaf(rS[0][n][e], unit_log2, -lse_log2[e / 2]));
                // [J.3] [J.4] why: 0 times what a masked key holds need not be 0.
                const float tangent = kAny ? rDot[0][n][e] : scale * rDot[0][n][e];
                rS[0][n][e] = weight, rDot[0][n][e] = weight == 0 ? 0.0f : weight * tangent;
                mean[e / 2] += rDot[0][n][e];
            });
            if constexpr (kAny)
                if (dropout.active()) {
                    drop_weights(rS, at, dropout);
                    each([&](int n, int e) { rDot[0][n][e] = rS[0][n][e] == 0 ? 0.0f : rDot[0][n][e]; });
                }
            // [J.5]
            if (has_score_dot) multiply_by_columns<Product, VTile>(rODot, rDot, sV);
            if (has_v_dot) multiply_by_columns<Product, VTile>(rODot, rS, sV + VTile::kBytes);
        }
        // sync: no copy may be under way when the block ends (the last groups are empty, but the counter is
        // the thread's).
        cp_async_wait<0>();
    }

    const float sink = p.score.sinks && params.sinks_dot
                           ? static_cast<const float*>(p.score.sinks)[work.head * p.score.sinks_head]
                           : -kInfinity;
    const float sink_dot =
        params.sinks_dot ? static_cast<const float*>(params.sinks_dot)[work.head * params.sinks_dot_head]
                         : 0.0f;
    const float kept = p.score.dropout_threshold ? static_cast<float>(p.score.dropout_scale) : 1.0f;
    float* gMean = head_rows<float>(params.lse_dot, work.batch, work.head, sequence.first_q);
    const Element* gO = head_rows<Element>(p.o, work.batch, work.head, sequence.first_q);
    CF_UNROLL
    for (int half = 0; half < 2; half++) {
        const int32_t query = row + 8 * half;
        // [J.6] why the test: of a row without keys, -inf - inf may not reach the sum.
        float of_row = sum_over_lanes<4>(mean[half]);
        if (sink != -kInfinity) of_row += ex2(fmaf(sink, kLog2e, -lse_log2[half])) * sink_dot;
        if (query >= sequence.seqlen_q) continue;
        // [J.7]
        if (threadIdx.x % 4 == 0) st_global(gMean + query * params.lse_dot.row, of_row);
        const Element* o = gO + query * p.o.row;
        CF_UNROLL
        for (int n = 0; n < kNV; n++) {
            CF_UNROLL
            for (int i = 0; i < 2; i++) {
                const int column = output_column<Product>(n, i);
                if (column >= p.shape.head_dim_v) continue;
                float& x = rODot[0][n][2 * half + i];
                x = x * kept - of_row * widen(o[column]);
            }
        }
    }
    const float factor[1][2] = {{1.0f, 1.0f}};
    Element* o_dot = head_rows<Element>(params.o_dot, work.batch, work.head, first_q + warp_row);
    const GlobalRows<Element> gODot{o_dot, params.o_dot.row, m_end - m_first - warp_row, p.shape.head_dim_v};
    store_warp_rows<Product>(rODot, factor, gODot, smem_addr(s.q.data) + warp_row * QTile::kPitch);
}

CF_KERNEL(SecondOrderParams, kThreads, 1, flash_tangent)
