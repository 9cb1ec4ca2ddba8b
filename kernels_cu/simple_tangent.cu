// Forward mode: J, the tangents of O and LSE in a direction, on plain multiply-adds: any element type, head dim, strides and
// architecture.
// Design note: docs/kernels/derivatives.md.
//
// A dot is a derivative; the tags are those of cupy_flash/cpu/jvp.py:
//   [J.1]  a block owns the rows Q_i of one head; for each tile of keys that its band reaches
//   [J.2]      P = e^(score(Q_i K_j^T) - LSE)
//   [J.3]      dotS = d function d cap (dotQ_i K_j^T + Q_i dotK_j^T) + dotbias
//   [J.4]      mean += rowsum(P * dotS)
//   [J.5]      dotO += dropout(P * dotS) V_j + dropout(P) dotV_j
//   [J.6]  mean += e^(sink - LSE) dotsink
//   [J.7]  dotO -= mean * O, dotLSE = mean
// Products of a tangent that is null are left out. No running maximum: LSE is given.
//
// Grid:   as of simple_forward.cu: x = (batch * heads_q + head) * m_tiles + tile, the last tile first. Packed:
//         seqlen_q is the longest; blocks past the end of their sequence return.
// Block:  256 threads.
// Shared: Simt::Storage of kBlockM x kBlockN, tiles and bytes as of simple_forward.cu.
//
// Cost:   five products where the forward pass has two: at 64 x 64 x 64 the same 16 KiB of operands for each, twice
//         the score tiles in registers (32 floats a thread) and one more barrier.
#include "simple/config.cuh"
#include "simple/tangent_head.cuh"

constexpr int kBlockM = CF_BLOCK_M, kBlockN = CF_BLOCK_N;
using Tiles = Simt<Acc, kBlockM, kBlockN, kHeadDim>;

CF_DEVICE void simple_tangent(const SecondOrderParams& p) {
    constexpr int kRows = Tiles::kRows, kColumns = Tiles::kColumns;
    auto& s = storage_of_pass<Tiles::Storage>();

    // [J.1]
    const Shape& shape = p.call.shape;
    const int32_t m_tiles = cdiv(shape.seqlen_q, kBlockM);
    const TileCoord work = tile_coord(blockIdx.x, m_tiles, shape.heads_q);
    const TangentHead<Element> head(p, work.batch, work.head);
    const int32_t m_first = (m_tiles - 1 - work.tile) * kBlockM;
    if (m_first >= head.sequence.seqlen_q) return;
    Acc rO[kRows][Tiles::kWideColumns] = {};
    Tiles::Product rMean = {};    // each lane's share of the rows' means, by column

    const Range keys = head.band.keys_of(m_first, m_first + kBlockM);
    for (int32_t n_first = keys.first / kBlockN * kBlockN; n_first < keys.end; n_first += kBlockN) {
        Tiles::Product rS, rTangent;
        Tiles::dot_rows(rS, head.gQ.from(m_first), head.gK.from(n_first), s);
        head.product_tangents<Tiles, false>(rTangent, m_first, n_first, s);
#pragma unroll 1
        for (int r = 0; r < kRows; ++r) {
            const int32_t query = m_first + Tiles::own_row(r);
            CF_UNROLL
            for (int c = 0; c < kColumns; ++c) {
                const int32_t key = n_first + Tiles::other_row(c);
                // [J.2]
                const auto weight = head.weight(rS[0][c], query, key);
                // [J.3]
                const Acc slope = head.derivatives(weight.capped, query, key).slope;
                const Acc tangent =
                    weight.whole == 0 ? 0
                                      : head.score_tangent(weight.capped, slope, rTangent[0][c], query, key);
                rMean[0][c] += weight.whole * tangent;    // [J.4]
                rS[0][c] = weight.whole * weight.kept;
                rTangent[0][c] = rS[0][c] * tangent;
            }
            Tiles::rotate_rows(rS), Tiles::rotate_rows(rTangent), Tiles::rotate_rows(rMean);
        }

        // [J.5] why: no barrier before the first write: dot_rows had one after the last read of the weights.
        Tiles::put_weights(rTangent, s);
        Tiles::add_weighted_rows(rO, head.gV.from(n_first), s);
        if (p.v_dot.data) {
            __syncthreads();    // sync: all have read the weights of V before those of dotV replace them
            Tiles::put_weights(rS, s);
            Tiles::add_weighted_rows(rO, head.gVDot.from(n_first), s);
        }
    }

    const GlobalRows<Element> gO = head.gO.from(m_first);
    Acc* gMean = head_rows<Acc>(p.lse_dot, work.batch, work.head, head.sequence.first_q);
    const Acc sink_dot = p.sinks_dot ? static_cast<const Acc*>(p.sinks_dot)[work.head * p.sinks_dot_head] : 0;
#pragma unroll 1
    for (int r = 0; r < kRows; ++r, Tiles::rotate_rows(rMean), Tiles::rotate_rows(rO)) {
        Acc mean = 0;
        CF_UNROLL
        for (int c = 0; c < kColumns; ++c) mean += rMean[0][c];
        mean = sum_over_lanes<kLanes>(mean);
        const int32_t query = m_first + Tiles::own_row(r);
        if (query >= head.sequence.seqlen_q) continue;
        if (p.sinks_dot) mean += head.sink_weight(work.head, query) * sink_dot;    // [J.6]
        // [J.7]
        if (Tiles::lane() == 0) gMean[query * p.lse_dot.row] = mean;
        CF_UNROLL
        for (int c = 0; c < Tiles::kWideColumns; ++c) {
            const int column = Tiles::wide_column(c);
            if (column < gO.columns) rO[0][c] -= mean * gO.at(Tiles::own_row(r), column);
        }
    }
    store_result<Tiles>(false, rO, Acc(1), p.o_dot, work, head.sequence.first_q + m_first,
                        head.sequence.seqlen_q - m_first, shape.head_dim_v);
}

CF_KERNEL(SecondOrderParams, kThreads, 1, simple_tangent)
