// Attention backward on plain multiply-adds, in separate passes that need no atomics and repeat bit for bit:
// any element type, head dim, strides and architecture. CF_PASS names the pass that a compilation makes:
// delta, then dq, dkv, dbias and dsinks in any order.
// Design note: docs/kernels/simple.md.
//
// Source: A2 = FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 2, cut into one pass per gradient: a block
// accumulates what it owns in registers and recomputes the scores that it needs, where the paper adds to dQ
// in global memory (its line 15).
//   [A2.4]  delta = rowsum(dO * O) - dLSE                                      (pass delta)
//   [A2.6]  a block owns a tile: rows of dQ, of dK and dV, or a tile of dbias
//   [A2.8]  for each tile that meets it inside the band and that spans and blocks reach, in ascending order
//   [A2.10] S = Q K^T, in pass dkv its transpose
//   [A2.11] P = e^(score(S) - LSE)
//   [A2.12] dV += dropout(P)^T dO
//   [A2.13] dP = dropout(dO V^T)
//   [A2.14] dscore = P * (dP - delta); dbias is its sum; dS = dscore * d cap / dS
//   [A2.15] dQ += scale dS K
//   [A2.16] dK += scale dS^T Q
//   [A2.17] dsinks = -sum over rows of e^(sink - LSE) * delta             (pass dsinks; not in the paper)
//
// Grid:   everything along x, tiles fastest (tile_coord).
//         delta, dq   (batch * heads_q + head) * ceil(seqlen_q / kBlockM); in dq the last tile first
//         dkv         (batch * heads_k + head) * ceil(seqlen_k / kBlockN)
//         dbias       (bias_batch * bias_heads) * ceil(bias_rows / kBlockM) * ceil(bias_columns / kBlockN)
//         dsinks      heads_q
//         Packed: seqlen_q and seqlen_k are the longest; blocks past the end of their sequence return.
// Block:  256 threads.
// Shared: dq and dbias: Simt::Storage of m x n; dkv: of n x m; dsinks: 256 Acc; delta: none. Tiles and bytes
//         by head dim class; delta (64 rows), dbias and dsinks take any:
//                                   64              128              256              512
//         dq, 32-bit        64x64   35840    64x64   35840    64x64   35840    32x64   25088
//         dq, f64           64x32   33792    64x32   33792    32x32   25088    16x32   20736
//         dkv, 32-bit       64x64   35840    64x32   25088    64x32   25088    64x16   20736
//         dkv, f64          32x64   33792    32x32   25088    32x16   20736    32x16   20736
//         dbias             64x64   35840, f64 64x32 33792
//
// Assumes that lse and o are the forward pass's, and that v and do are finite even where they are masked.
#include "simple/config.cuh"
#include "simple/score_sums.cuh"

#if !defined(CF_PASS)
#define CF_PASS dq
#endif
using Head = GradientHead<Element>;

// ---- delta: one warp per row at a time.
template <int kBlockM, int kBlockN> CF_DEVICE void delta(const BackwardParams& p) {
    const TileCoord work = tile_coord(blockIdx.x, cdiv(p.shape.seqlen_q, kBlockM), p.shape.heads_q);
    const Head head(p, work.batch, work.head);
    const int32_t m_first = work.tile * kBlockM;
    const int32_t m_end = smaller(m_first + kBlockM, head.sequence.seqlen_q);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    // [A2.4]
    for (int32_t query = m_first + warp; query < m_end; query += kThreads / 32) {
        Acc sum = head.row_dot(head.gO, query);
        if (p.dlse.data)
            sum -= head_rows<Acc>(p.dlse, work.batch, work.head, head.sequence.first_q)[query * p.dlse.row];
        if (lane == 0)
            head_rows<Acc>(p.delta, work.batch, work.head, head.sequence.first_q)[query * p.delta.row] = sum;
    }
}

// ---- dq: a block owns query rows of one head and visits tiles of keys.
template <int kBlockM, int kBlockN> CF_DEVICE void dq(const BackwardParams& p) {
    using Tiles = Simt<Acc, kBlockM, kBlockN, kHeadDim>;
    auto& s = storage_of_pass<typename Tiles::Storage>();

    // [A2.6]
    const int32_t m_tiles = cdiv(p.shape.seqlen_q, kBlockM);
    const TileCoord work = tile_coord(blockIdx.x, m_tiles, p.shape.heads_q);
    const Head head(p, work.batch, work.head);
    const int32_t m_first = (m_tiles - 1 - work.tile) * kBlockM;
    if (m_first >= head.sequence.seqlen_q) return;
    Acc rDQ[Tiles::kRows][Tiles::kWideColumns] = {};

    // [A2.8]
    const Range keys = head.band.keys_of(m_first, m_first + kBlockM);
    for (int32_t n_first = keys.first / kBlockN * kBlockN; n_first < keys.end; n_first += kBlockN) {
        if (!head.score.reach(m_first, m_first + kBlockM, n_first, n_first + kBlockN)) continue;
        // [A2.10] [A2.13]
        Acc rS[Tiles::kRows][Tiles::kColumns], rDP[Tiles::kRows][Tiles::kColumns];
        Tiles::dot_rows(rS, head.gQ.from(m_first), head.gK.from(n_first), s);
        Tiles::dot_rows(rDP, head.gDO.from(m_first), head.gV.from(n_first), s);
#pragma unroll 1
        for (int r = 0; r < Tiles::kRows; ++r, Tiles::rotate_rows(rS), Tiles::rotate_rows(rDP)) {
            const int32_t query = m_first + Tiles::own_row(r);
            CF_UNROLL
            for (int c = 0; c < Tiles::kColumns; ++c)
                rS[0][c] = head.pair(rS[0][c], rDP[0][c], query, n_first + Tiles::other_row(c)).d_product;
        }

        // [A2.15]
        Tiles::put_weights(rS, s);
        Tiles::add_weighted_rows(rDQ, head.gK.from(n_first), s);
    }
    store_result<Tiles>(p.float_gradients, rDQ, head.score.scale, p.dq, work, head.sequence.first_q + m_first,
                        head.sequence.seqlen_q - m_first, p.shape.head_dim);
}

// ---- dkv: a block owns key rows of one head of k and v and visits query tiles of all heads that read it.
template <int kBlockM, int kBlockN> CF_DEVICE void dkv(const BackwardParams& p) {
    using Tiles = Simt<Acc, kBlockN, kBlockM, kHeadDim>;
    auto& s = storage_of_pass<typename Tiles::Storage>();

    // [A2.6]
    const TileCoord work = tile_coord(blockIdx.x, cdiv(p.shape.seqlen_k, kBlockN), p.shape.heads_k);
    const Sequence sequence = sequence_of(p.shape, work.batch);
    const int32_t n_first = work.tile * kBlockN, group = p.shape.heads_q / p.shape.heads_k;
    if (n_first >= sequence.rows_k) return;
    Acc rDK[Tiles::kRows][Tiles::kWideColumns] = {}, rDV[Tiles::kRows][Tiles::kWideColumns] = {};

    for (int32_t q_head = work.head * group; q_head < (work.head + 1) * group; ++q_head) {
        const Head head(p, work.batch, q_head);
        // [A2.8]
        const Range queries = head.band.queries_of(n_first, n_first + kBlockN);
        for (int32_t m_first = queries.first / kBlockM * kBlockM; m_first < queries.end; m_first += kBlockM) {
            if (!head.score.reach(m_first, m_first + kBlockM, n_first, n_first + kBlockN)) continue;
            // [A2.10] [A2.13] layout: own rows are keys, columns are queries.
            Acc rS[Tiles::kRows][Tiles::kColumns], rDP[Tiles::kRows][Tiles::kColumns];
            Tiles::dot_rows(rS, head.gK.from(n_first), head.gQ.from(m_first), s);
            Tiles::dot_rows(rDP, head.gV.from(n_first), head.gDO.from(m_first), s);
#pragma unroll 1
            for (int r = 0; r < Tiles::kRows; ++r, Tiles::rotate_rows(rS), Tiles::rotate_rows(rDP)) {
                const int32_t key = n_first + Tiles::own_row(r);
                CF_UNROLL
                for (int c = 0; c < Tiles::kColumns; ++c) {
                    const auto pair = head.pair(rS[0][c], rDP[0][c], m_first + Tiles::other_row(c), key);
                    rS[0][c] = pair.weight;
                    rDP[0][c] = pair.d_product;
                }
            }

            // [A2.12]
            Tiles::put_weights(rS, s);
            Tiles::add_weighted_rows(rDV, head.gDO.from(m_first), s);
            // [A2.16]
            __syncthreads();    // sync: all have read the weights of dV before those of dK replace them
            Tiles::put_weights(rDP, s);
            Tiles::add_weighted_rows(rDK, head.gQ.from(m_first), s);
        }
    }
    const int64_t row = sequence.first_k + n_first;
    const int32_t rows = sequence.rows_k - n_first;
    store_result<Tiles>(p.float_gradients, rDK, static_cast<Acc>(p.score.scale), p.dk, work, row, rows,
                        p.shape.head_dim);
    store_result<Tiles>(p.float_gradients, rDV, Acc(1), p.dv, work, row, rows, p.shape.head_dim_v);
}

// ---- dbias
template <int kBlockM, int kBlockN> CF_DEVICE void dbias(const BackwardParams& p) {
    using Tiles = Simt<Acc, kBlockM, kBlockN, 64>;
    sum_bias<Head, Tiles, kBlockM, kBlockN>(p, p, storage_of_pass<typename Tiles::Storage>());
}

// ---- dsinks: [A2.17]
template <int kBlockM, int kBlockN> CF_DEVICE void dsinks(const BackwardParams& p) {
    sum_sinks<Head>(p, p, storage_of_pass<SinkStorage<Acc>>());
}

CF_KERNEL(BackwardParams, kThreads, 1, (CF_PASS<CF_BLOCK_M, CF_BLOCK_N>))
