// Attention forward on plain multiply-adds: any element type, head dim, strides and architecture. The
// algorithm to read, the kernel of last resort, and the cross-check of every faster one.
// Design note: docs/kernels/simple.md.
//
// Source: A1 = FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 1. Erratum: its line 10 prints an inverse
// on diag(e^(m_old - m_new)) that must not be there (Dao-AILab/flash-attention issue 991).
//   [A1.4]  a block owns the rows Q_i of one head                              (lines 3 and 4)
//   [A1.5]  O = 0, row_sum = 0, row_max = -inf
//   [A1.6]  for each tile of keys that the band of the query tile, its spans and blocks reach
//   [A1.8]  S = score(Q_i K_j^T), -inf where a pair is outside the band or masked
//   [A1.9]  row_max rises; P = e^(S - row_max); row_sum = e^(old_max - row_max) row_sum + rowsum(P)
//   [A1.10] O = e^(old_max - row_max) O + dropout(P) V_j
//   [A1.12] O = O / row_sum, 0 in a row without keys
//   [A1.13] LSE = row_max + log(row_sum), -inf in a row without keys           (lines 13 to 15)
//
// Grid:   x = (batch * heads_q + head) * m_tiles + tile, m_tiles = ceil(seqlen_q / kBlockM), the last tile
//         first because a causal mask gives it the most keys. Packed: seqlen_q is the longest; blocks past
//         the end of their sequence return.
// Block:  256 threads.
// Shared: Simt::Storage of kBlockM x kBlockN: operands (16 KiB or a little more), then P. Tiles and bytes by
//         head dim class:
//                                   64              128              256              512
//         f16, bf16, f32    64x64   35840    64x64   35840    64x64   35840    32x64   25088
//         f64               64x32   33792    64x32   33792    32x32   25088    16x32   20736
//
// Every product is a multiply-add in Acc (float, double for f64), P included. Not here: 16-byte global loads,
// asynchronous copies.
#include "attention/dropout.cuh"
#include "attention/mask.cuh"
#include "attention/softmax.cuh"
#include "simple/config.cuh"

constexpr int kBlockM = CF_BLOCK_M, kBlockN = CF_BLOCK_N;
using Tiles = Simt<Acc, kBlockM, kBlockN, kHeadDim>;

CF_DEVICE void simple_forward(const ForwardParams& p) {
    constexpr int kRows = Tiles::kRows, kColumns = Tiles::kColumns;
    auto& s = storage_of_pass<Tiles::Storage>();

    // [A1.4]
    const int32_t m_tiles = cdiv(p.shape.seqlen_q, kBlockM);
    const TileCoord work = tile_coord(blockIdx.x, m_tiles, p.shape.heads_q);
    const Sequence sequence = sequence_of(p.shape, work.batch);
    const int32_t head = work.head, kv_head = head / (p.shape.heads_q / p.shape.heads_k);
    const int32_t m_first = (m_tiles - 1 - work.tile) * kBlockM;
    if (m_first >= sequence.seqlen_q) return;

    const Band band(p.score, sequence);
    const HeadScore<Acc> score(p.score, sequence, head);
    const Dropout dropout(p.score, work.batch, head);
    const GlobalRows<Element> gQ{head_rows<Element>(p.q, work.batch, head, sequence.first_q + m_first),
                                 p.q.row, p.q.column, sequence.seqlen_q - m_first, p.shape.head_dim};
    const GlobalRows<Element> gK{head_rows<Element>(p.k, work.batch, kv_head, sequence.first_k), p.k.row,
                                 p.k.column, sequence.seqlen_k, p.shape.head_dim};
    const GlobalRows<Element> gV{head_rows<Element>(p.v, work.batch, kv_head, sequence.first_k), p.v.row,
                                 p.v.column, sequence.seqlen_k, p.shape.head_dim_v};

    // [A1.5]
    Acc rO[kRows][Tiles::kWideColumns] = {};
    RowSoftmax<Acc> softmax[kRows];

    // [A1.6]
    const Range keys = band.keys_of(m_first, m_first + kBlockM);
    for (int32_t n_first = keys.first / kBlockN * kBlockN; n_first < keys.end; n_first += kBlockN) {
        if (!score.reach(m_first, m_first + kBlockM, n_first, n_first + kBlockN)) continue;
        Acc rS[kRows][kColumns];
        Tiles::dot_rows(rS, gQ, gK.from(n_first), s);

        // [A1.8]
#pragma unroll 1
        for (int r = 0; r < kRows; ++r, Tiles::rotate_rows(rS)) {
            const int32_t query = m_first + Tiles::own_row(r);
            const Range row_keys = band.keys_of(query);
            CF_UNROLL
            for (int c = 0; c < kColumns; ++c) {
                const int32_t key = n_first + Tiles::other_row(c);
                const bool kept = contains(row_keys, key);
                rS[0][c] = kept ? score.score(score.apply_softcap(rS[0][c]), query, key) : -Acc(kInfinity);
            }
        }

        // [A1.9]
        CF_UNROLL
        for (int r = 0; r < kRows; ++r) {
            Acc tile_max = rS[r][0];
            CF_UNROLL
            for (int c = 1; c < kColumns; ++c) tile_max = larger(tile_max, rS[r][c]);
            const Acc rescale = softmax[r].update_max(max_over_lanes<kLanes>(tile_max));
            CF_UNROLL
            for (int c = 0; c < kColumns; ++c) rS[r][c] = softmax[r].exp_and_sum(rS[r][c]);
            Tiles::scale_row(rO, r, rescale);
        }

        // [A1.10]
        if (dropout.active()) {
#pragma unroll 1
            for (int r = 0; r < kRows; ++r, Tiles::rotate_rows(rS)) {
                const int32_t query = m_first + Tiles::own_row(r);
                CF_UNROLL
                for (int c = 0; c < kColumns; ++c)
                    if (!dropout.keeps(query, n_first + Tiles::other_row(c))) rS[0][c] = 0;
            }
        }
        // why: no barrier before this write: dot_rows had one after the last read of the weights.
        Tiles::put_weights(rS, s);
        Tiles::add_weighted_rows(rO, gV.from(n_first), s);
    }

    // [A1.12]
    const Acc sink =
        p.score.sinks ? static_cast<const Acc*>(p.score.sinks)[head * p.score.sinks_head] : -Acc(kInfinity);
    Acc lse[kRows];
    CF_UNROLL
    for (int r = 0; r < kRows; ++r) {
        const FinalRow<Acc> row = softmax[r].template finalize<kLanes>(sink);
        Tiles::scale_row(rO, r, row.normaliser);
        lse[r] = row.lse;
    }
    const Acc kept_scale = dropout.active() ? static_cast<Acc>(p.score.dropout_scale) : 1;
    store_result<Tiles>(p.float_o, rO, kept_scale, p.o, work, sequence.first_q + m_first,
                        sequence.seqlen_q - m_first, p.shape.head_dim_v);

    // [A1.13]
    if (p.lse.data && Tiles::lane() == 0) {
        Acc* gLse = head_rows<Acc>(p.lse, work.batch, head, sequence.first_q);
        CF_UNROLL
        for (int r = 0; r < kRows; ++r) {
            const int32_t query = m_first + Tiles::own_row(r);
            if (query < sequence.seqlen_q) gLse[query * p.lse.row] = lse[r];
        }
    }
}

CF_KERNEL(ForwardParams, kThreads, 1, simple_forward)
