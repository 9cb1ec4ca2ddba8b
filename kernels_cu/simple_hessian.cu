// Second order: H, the derivatives of the gradients in a direction, on plain multiply-adds, in separate passes that need no atomics
// and repeat bit for bit: any element type, head dim, strides and architecture. CF_PASS names the pass that a
// compilation makes: delta_dot, then dq_dot, dkv_dot, dbias_dot and dsinks_dot in any order.
// Design note: docs/kernels/derivatives.md.
//
// A dot is a derivative; dO and dLSE are held fixed. The tags are those of cupy_flash/cpu/hvp.py:
//   [H.1]  delta = rowsum(dO * O) - dLSE, dotdelta = rowsum(dO * dotO)         (pass delta_dot)
//          a block owns a tile: rows of dotdQ, of dotdK and dotdV, or a tile of dotdbias; for each tile that meets it
//   [H.2]      P = e^(score(S) - LSE), dotS as in simple_tangent.cu, dP = dropout(dO V^T) - delta, dotdP
//   [H.3]      dotP = P * (dotS - mean)                     dotdV += dropout(dotP)^T dO
//   [H.4]      dS = P * dP
//   [H.5]      dotdS = dotP * dP + P * (dotdP - dotdelta)   dotdbias is its sum
//   [H.6]      through the score function, then softcap: dotdS = g' dotdS + g'' dS dotT, dS = g' dS, with T what it got
//   [H.7]      dotdQ += scale (dotdS K + dS dotK)
//   [H.8]      dotdK += scale (dotdS^T Q + dS^T dotQ)
//   [H.9]  dotdsinks = -sum of e^(sink - LSE) ((dotsink - mean) delta + dotdelta)   (pass dsinks_dot)
// Products of a tangent that is null are left out: of 15 in all, 7 in dq_dot and 8 in dkv_dot.
//
// Grid, block and shared memory: as of the passes of simple_backward.cu that they differentiate.
//
// Cost:   15 products where the backward pass has 7, in as many bytes each; four score tiles in registers where it
//         has two, 64 floats a thread at 64 x 64.
#include "simple/config.cuh"
#include "simple/tangent_head.cuh"
#include "simple/score_sums.cuh"

#if !defined(CF_PASS)
#define CF_PASS dq_dot
#endif
using Head = TangentHead<Element>;

// ---- delta_dot: one warp per row at a time.
template <int kBlockM, int kBlockN> CF_DEVICE void delta_dot(const SecondOrderParams& p) {
    const Shape& shape = p.call.shape;
    const TileCoord work = tile_coord(blockIdx.x, cdiv(shape.seqlen_q, kBlockM), shape.heads_q);
    const Head head(p, work.batch, work.head);
    const int64_t first = head.sequence.first_q;
    Acc* gDelta = head_rows<Acc>(p.call.delta, work.batch, work.head, first);
    Acc* gDeltaDot = head_rows<Acc>(p.delta_dot, work.batch, work.head, first);
    const int32_t m_first = work.tile * kBlockM;
    const int32_t m_end = smaller(m_first + kBlockM, head.sequence.seqlen_q);

    // [H.1]
    for (int32_t query = m_first + threadIdx.x / 32; query < m_end; query += kThreads / 32) {
        Acc sum = head.row_dot(head.gO, query), tangent = head.row_dot(head.gODot, query);
        if (p.call.dlse.data)
            sum -= head_rows<Acc>(p.call.dlse, work.batch, work.head, first)[query * p.call.dlse.row];
        if (threadIdx.x % 32 == 0)
            gDelta[query * p.call.delta.row] = sum, gDeltaDot[query * p.delta_dot.row] = tangent;
    }
}

// ---- dq_dot: a block owns query rows of one head and visits tiles of keys.
template <int kBlockM, int kBlockN> CF_DEVICE void dq_dot(const SecondOrderParams& p) {
    using Tiles = Simt<Acc, kBlockM, kBlockN, kHeadDim>;
    auto& s = storage_of_pass<typename Tiles::Storage>();
    const Shape& shape = p.call.shape;
    const int32_t m_tiles = cdiv(shape.seqlen_q, kBlockM);
    const TileCoord work = tile_coord(blockIdx.x, m_tiles, shape.heads_q);
    const Head head(p, work.batch, work.head);
    const int32_t m_first = (m_tiles - 1 - work.tile) * kBlockM;
    if (m_first >= head.sequence.seqlen_q) return;
    Acc rDQ[Tiles::kRows][Tiles::kWideColumns] = {};

    const Range keys = head.band.keys_of(m_first, m_first + kBlockM);
    for (int32_t n_first = keys.first / kBlockN * kBlockN; n_first < keys.end; n_first += kBlockN) {
        Head::SecondTiles<Tiles> t;
        head.second_tiles<Tiles, false>(t, m_first, n_first, s);
        // [H.7]
        Tiles::put_weights(t.d_product, s);
        Tiles::add_weighted_rows(rDQ, head.gK.from(n_first), s);
        if (p.k_dot.data) {
            __syncthreads();    // sync: all have read the weights of K before those of dotK replace them
            Tiles::put_weights(t.of_first, s);
            Tiles::add_weighted_rows(rDQ, head.gKDot.from(n_first), s);
        }
    }
    store_result<Tiles>(false, rDQ, head.score.scale, p.call.dq, work, head.sequence.first_q + m_first,
                        head.sequence.seqlen_q - m_first, shape.head_dim);
}

// ---- dkv_dot: a block owns key rows of one head of k and v and visits query tiles of all heads that read it.
template <int kBlockM, int kBlockN> CF_DEVICE void dkv_dot(const SecondOrderParams& p) {
    using Tiles = Simt<Acc, kBlockN, kBlockM, kHeadDim>;
    auto& s = storage_of_pass<typename Tiles::Storage>();
    const Shape& shape = p.call.shape;
    const TileCoord work = tile_coord(blockIdx.x, cdiv(shape.seqlen_k, kBlockN), shape.heads_k);
    const Sequence sequence = sequence_of(shape, work.batch);
    const int32_t n_first = work.tile * kBlockN, group = shape.heads_q / shape.heads_k;
    if (n_first >= sequence.rows_k) return;
    Acc rDK[Tiles::kRows][Tiles::kWideColumns] = {}, rDV[Tiles::kRows][Tiles::kWideColumns] = {};

    for (int32_t q_head = work.head * group; q_head < (work.head + 1) * group; ++q_head) {
        const Head head(p, work.batch, q_head);
        const Range queries = head.band.queries_of(n_first, n_first + kBlockN);
        for (int32_t m_first = queries.first / kBlockM * kBlockM; m_first < queries.end; m_first += kBlockM) {
            Head::SecondTiles<Tiles> t;
            head.second_tiles<Tiles, true>(t, m_first, n_first, s);
            // [H.3]
            Tiles::put_weights(t.weight, s);
            Tiles::add_weighted_rows(rDV, head.gDO.from(m_first), s);
            // [H.8]
            __syncthreads();    // sync: all have read the weights of dotdV before those of dotdK replace them
            Tiles::put_weights(t.d_product, s);
            Tiles::add_weighted_rows(rDK, head.gQ.from(m_first), s);
            if (p.q_dot.data) {
                __syncthreads();    // sync: all have read the weights of Q before those of dotQ replace them
                Tiles::put_weights(t.of_first, s);
                Tiles::add_weighted_rows(rDK, head.gQDot.from(m_first), s);
            }
        }
    }
    const int64_t row = sequence.first_k + n_first;
    const int32_t rows = sequence.rows_k - n_first;
    store_result<Tiles>(false, rDK, static_cast<Acc>(p.call.score.scale), p.call.dk, work, row, rows,
                        shape.head_dim);
    store_result<Tiles>(false, rDV, Acc(1), p.call.dv, work, row, rows, shape.head_dim_v);
}

// ---- dbias_dot
template <int kBlockM, int kBlockN> CF_DEVICE void dbias_dot(const SecondOrderParams& p) {
    using Tiles = Simt<Acc, kBlockM, kBlockN, 64>;
    sum_bias<Head, Tiles, kBlockM, kBlockN>(p, p.call, storage_of_pass<typename Tiles::Storage>());
}

// ---- dsinks_dot: [H.9]
template <int kBlockM, int kBlockN> CF_DEVICE void dsinks_dot(const SecondOrderParams& p) {
    sum_sinks<Head>(p, p.call, storage_of_pass<SinkStorage<Acc>>());
}

CF_KERNEL(SecondOrderParams, kThreads, 1, (CF_PASS<CF_BLOCK_M, CF_BLOCK_N>))
