// Statistics of the weights of attention on plain multiply-adds, from LSE, without atomics and the same bits on every run:
// any element type, head dim, strides and architecture. CF_PASS names the pass that a compilation makes: by_key
// or by_query.
// Design note: docs/kernels/simple.md.
//
// The tags are those of cupy_flash/cpu/statistics.py:
//   [S.1]  a block owns the rows Q_i of one head (by_query), or keys K_j of one query head (by_key), and visits the tiles that
//          meet them inside the band and that spans and blocks reach, in ascending order
//   [S.3]      log P = score(Q_i K_j^T) - LSE_i, in pass by_key its transpose
//   [S.4]      key_sum_j += colsum(P), key_max_j = max(key_max_j, colmax(P))    (by_key)
//   [S.5]      entropy_i -= rowsum(P log P)                                     (by_query)
//
// Grid:   everything along x, tiles fastest (tile_coord).
//         by_query  (batch * heads_q + head) * ceil(seqlen_q / kBlockM), the last tile first
//         by_key    (batch * heads_q + head) * ceil(seqlen_k / kBlockN)
//         Packed: seqlen_q and seqlen_k are the longest; blocks past the end of their sequence return.
// Block:  256 threads.
// Shared: Simt::Storage of 64 x 64, any head dim: 35840 bytes; f64 64 x 32 (by_query) and 32 x 64 (by_key): 33792.
//
// Cost:   a pass has one product, and nothing of the other operands that the backward pass reads.
#include "simple/config.cuh"
#include "simple/gradient_head.cuh"

#if !defined(CF_PASS)
#define CF_PASS by_query
#endif
using Head = GradientHead<Element>;

// log P of a pair, -inf where it is hidden.
CF_DEVICE Acc log_weight(const Head& head, Acc product, int32_t query, int32_t key) {
    if (!contains(head.band.keys_of(query), key)) return -Acc(kInfinity);
    const Acc score = head.score.score(head.score.apply_softcap(product), query, key);
    return score == -Acc(kInfinity) ? score : score - head.lse(query);
}

template <int kBlockM, int kBlockN> CF_DEVICE void by_query(const StatisticsParams& p) {
    using Tiles = Simt<Acc, kBlockM, kBlockN, 64>;
    auto& s = storage_of_pass<typename Tiles::Storage>();

    // [S.1]
    const int32_t m_tiles = cdiv(p.call.shape.seqlen_q, kBlockM);
    const TileCoord work = tile_coord(blockIdx.x, m_tiles, p.call.shape.heads_q);
    const Head head(p.call, work.batch, work.head);
    const int32_t m_first = (m_tiles - 1 - work.tile) * kBlockM;
    if (m_first >= head.sequence.seqlen_q) return;
    typename Tiles::Product rEntropy = {};    // each lane's share of the rows, by column

    const Range keys = head.band.keys_of(m_first, m_first + kBlockM);
    for (int32_t n_first = keys.first / kBlockN * kBlockN; n_first < keys.end; n_first += kBlockN) {
        if (!head.score.reach(m_first, m_first + kBlockM, n_first, n_first + kBlockN)) continue;
        typename Tiles::Product rS;
        Tiles::dot_rows(rS, head.gQ.from(m_first), head.gK.from(n_first), s);
#pragma unroll 1
        for (int r = 0; r < Tiles::kRows; ++r, Tiles::rotate_rows(rS), Tiles::rotate_rows(rEntropy)) {
            const int32_t query = m_first + Tiles::own_row(r);
            CF_UNROLL
            for (int c = 0; c < Tiles::kColumns; ++c) {
                // [S.3] [S.5]
                const Acc log_p = log_weight(head, rS[0][c], query, n_first + Tiles::other_row(c));
                const Acc weight = natural_exp(log_p);
                if (weight != 0) rEntropy[0][c] -= weight * log_p;
            }
        }
    }

    Acc* gEntropy = head_rows<Acc>(p.entropy, work.batch, work.head, head.sequence.first_q);
    CF_UNROLL
    for (int r = 0; r < Tiles::kRows; ++r) {
        Acc entropy = 0;
        CF_UNROLL
        for (int c = 0; c < Tiles::kColumns; ++c) entropy += rEntropy[r][c];
        entropy = sum_over_lanes<kLanes>(entropy);
        const int32_t query = m_first + Tiles::own_row(r);
        if (Tiles::lane() == 0 && query < head.sequence.seqlen_q) gEntropy[query * p.entropy.row] = entropy;
    }
}

template <int kBlockM, int kBlockN> CF_DEVICE void by_key(const StatisticsParams& p) {
    using Tiles = Simt<Acc, kBlockN, kBlockM, 64>;
    auto& s = storage_of_pass<typename Tiles::Storage>();

    // [S.1]
    const TileCoord work = tile_coord(blockIdx.x, cdiv(p.call.shape.seqlen_k, kBlockN), p.call.shape.heads_q);
    const Head head(p.call, work.batch, work.head);
    const int32_t n_first = work.tile * kBlockN;
    if (n_first >= head.sequence.rows_k) return;
    typename Tiles::Product rSum = {}, rMax = {};    // of the queries of each lane, by column

    const Range queries = head.band.queries_of(n_first, n_first + kBlockN);
    for (int32_t m_first = queries.first / kBlockM * kBlockM; m_first < queries.end; m_first += kBlockM) {
        if (!head.score.reach(m_first, m_first + kBlockM, n_first, n_first + kBlockN)) continue;
        // layout: own rows are keys, columns are queries.
        typename Tiles::Product rS;
        Tiles::dot_rows(rS, head.gK.from(n_first), head.gQ.from(m_first), s);
#pragma unroll 1
        for (int r = 0; r < Tiles::kRows; ++r) {
            const int32_t key = n_first + Tiles::own_row(r);
            CF_UNROLL
            for (int c = 0; c < Tiles::kColumns; ++c) {
                // [S.3] [S.4]
                const Acc weight =
                    natural_exp(log_weight(head, rS[0][c], m_first + Tiles::other_row(c), key));
                rSum[0][c] += weight;
                rMax[0][c] = larger(weight, rMax[0][c]);
            }
            Tiles::rotate_rows(rS), Tiles::rotate_rows(rSum), Tiles::rotate_rows(rMax);
        }
    }

    Acc* gSum = head_rows<Acc>(p.key_sum, work.batch, work.head, head.sequence.first_k);
    Acc* gMax = head_rows<Acc>(p.key_max, work.batch, work.head, head.sequence.first_k);
    CF_UNROLL
    for (int r = 0; r < Tiles::kRows; ++r) {
        Acc sum = 0, largest = 0;
        CF_UNROLL
        for (int c = 0; c < Tiles::kColumns; ++c) sum += rSum[r][c], largest = larger(rMax[r][c], largest);
        sum = sum_over_lanes<kLanes>(sum), largest = max_over_lanes<kLanes>(largest);
        const int32_t key = n_first + Tiles::own_row(r);
        if (Tiles::lane() != 0 || key >= head.sequence.rows_k) continue;
        if (p.key_sum.data) gSum[key * p.key_sum.row] = sum;
        // why: a maximum passes NaN over, a sum does not.
        if (p.key_max.data) gMax[key * p.key_max.row] = sum == sum ? largest : sum;
    }
}

CF_KERNEL(StatisticsParams, kThreads, 1, (CF_PASS<CF_BLOCK_M, CF_BLOCK_N>))
