// A query head in the backward pass and in second order: its rows, and the gradients of a pair.
// Design note: docs/kernels/simple.md.
#pragma once
#include "attention/dropout.cuh"
#include "attention/mask.cuh"
#include "attention/softmax.cuh"
#include "simple/simt.cuh"

// One query head of one sequence: its rows in every array, and what happens to its scores.
template <class Element> struct GradientHead {
    using Acc = Accumulator<Element>;
    Sequence sequence;
    Band band;
    HeadScore<Acc> score;
    Dropout dropout;
    GlobalRows<Element> gQ, gK, gV, gO, gDO;
    const Acc *gLse, *gDelta;
    int64_t lse_row, delta_row;
    Acc dropout_scale;

    CF_DEVICE GradientHead(const BackwardParams& p, int32_t batch, int32_t head)
        : sequence(sequence_of(p.shape, batch)), band(p.score, sequence), score(p.score, sequence, head),
          dropout(p.score, batch, head), lse_row(p.lse.row), delta_row(p.delta.row),
          dropout_scale(static_cast<Acc>(p.score.dropout_scale)) {
        const int32_t kv_head = head / (p.shape.heads_q / p.shape.heads_k);
        gQ = rows(p.q, head, sequence.first_q, sequence.seqlen_q, p.shape.head_dim);
        gK = rows(p.k, kv_head, sequence.first_k, sequence.seqlen_k, p.shape.head_dim);
        gV = rows(p.v, kv_head, sequence.first_k, sequence.seqlen_k, p.shape.head_dim_v);
        gO = rows(p.o, head, sequence.first_q, sequence.seqlen_q, p.shape.head_dim_v);
        gDO = rows(p.d_o, head, sequence.first_q, sequence.seqlen_q, p.shape.head_dim_v);
        gLse = head_rows<Acc>(p.lse, batch, head, sequence.first_q);
        gDelta = head_rows<Acc>(p.delta, batch, head, sequence.first_q);
    }
    CF_DEVICE GlobalRows<Element> rows(const Tensor& t, int32_t head, int64_t first, int32_t count,
                                       int32_t columns) const {
        return {head_rows<Element>(t, sequence.batch, head, first), t.row, t.column, count, columns};
    }

    // The dot product of a row of dO with a row of O or of an array of its shape, by a warp.
    CF_DEVICE Acc row_dot(const GlobalRows<Element>& other, int32_t query) const {
        Acc sum = 0;
        for (int32_t column = threadIdx.x % 32; column < other.columns; column += 32)
            sum = multiply_add(gDO.at(query, column), other.at(query, column), sum);
        return sum_over_lanes<32>(sum);
    }

    // P of a pair of a query and a key, the factor of dropout on it, and the score after softcap alone.
    struct Weight {
        Acc whole, kept, capped;
    };
    CF_DEVICE Weight weight(Acc product, int32_t query, int32_t key) const {
        if (!contains(band.keys_of(query), key)) return {0, 0, 0};
        const Acc capped = score.apply_softcap(product);
        const Acc masked = score.score(capped, query, key);
        if (masked == -Acc(kInfinity)) return {0, 0, 0};
        const Acc kept = !dropout.active() ? 1 : dropout.keeps(query, key) ? dropout_scale : 0;
        return {natural_exp(masked - lse(query)), kept, capped};
    }
    // Of a row; infinite, for weights of 0, where it sees no key.
    CF_DEVICE Acc lse(int32_t query) const {
        const Acc given = gLse[query * lse_row];
        return given == -Acc(kInfinity) ? Acc(kInfinity) : given;
    }
    // The share of a sink in a row.
    CF_DEVICE Acc sink_weight(int32_t head, int32_t query) const {
        const Acc sink = static_cast<const Acc*>(score.rule.sinks)[head * score.rule.sinks_head];
        return natural_exp(sink - lse(query));
    }

    // The weight and the gradients of one pair.
    struct Pair {
        Acc weight;       // dropout(P)
        Acc d_score;      // of the score, after softcap and bias
        Acc d_product;    // of scale * q.k
    };
    CF_DEVICE Pair pair(Acc product, Acc d_weight, int32_t query, int32_t key) const {
        // [A2.11]
        const Weight w = weight(product, query, key);
        // why: 0 * (dP - delta) is not 0 when what was masked is infinite or NaN.
        if (w.whole == 0) return {0, 0, 0};
        // [A2.14]
        const Acc d_score = w.whole * (d_weight * w.kept - gDelta[query * delta_row]);
        Acc d_capped = d_score;
        if constexpr (kHasFunction) d_capped *= score.function.slope(w.capped, query, key);
        return {w.whole * w.kept, d_score, d_capped * score.softcap_slope(w.capped)};
    }

    // Adds the gradients of a tile of scores.
    template <class Tiles>
    CF_DEVICE void add_d_scores(typename Tiles::Product& sum, int32_t m_first, int32_t n_first,
                                typename Tiles::Storage& s) const {
        // [A2.10] [A2.13]
        typename Tiles::Product rS, rDP;
        Tiles::dot_rows(rS, gQ.from(m_first), gK.from(n_first), s);
        Tiles::dot_rows(rDP, gDO.from(m_first), gV.from(n_first), s);
#pragma unroll 1
        for (int r = 0; r < Tiles::kRows; ++r) {
            const int32_t query = m_first + Tiles::own_row(r);
            CF_UNROLL
            for (int c = 0; c < Tiles::kColumns; ++c)
                sum[0][c] += pair(rS[0][c], rDP[0][c], query, n_first + Tiles::other_row(c)).d_score;
            Tiles::rotate_rows(rS), Tiles::rotate_rows(rDP), Tiles::rotate_rows(sum);
        }
    }
    // What a row takes off the gradient of the sink.
    CF_DEVICE Acc d_sink(int32_t head, int32_t query) const {
        return sink_weight(head, query) * gDelta[query * delta_row];
    }
};
