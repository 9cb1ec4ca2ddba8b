// A query head in a direction: rows of the tangents, and how scores move.
#pragma once
#include "simple/gradient_head.cuh"

template <class Element> struct MovedHead : GradientHead<Element> {
    using Head = GradientHead<Element>;
    using Acc = Accumulator<Element>;
    const SecondOrderParams& p;
    GlobalRows<Element> gQDot, gKDot, gVDot, gODot;
    const Acc *gMean, *gDeltaDot;
    int64_t bias_dot_first;

    CF_DEVICE MovedHead(const SecondOrderParams& params, int32_t batch, int32_t head)
        : Head(params.call, batch, head), p(params),
          bias_dot_first(batch * p.bias_dot.batch + head * p.bias_dot.head) {
        const Shape& shape = p.call.shape;
        const Sequence& sequence = this->sequence;
        const int32_t kv_head = head / (shape.heads_q / shape.heads_k);
        gQDot = this->rows(p.q_dot, head, sequence.first_q, sequence.seqlen_q, shape.head_dim);
        gKDot = this->rows(p.k_dot, kv_head, sequence.first_k, sequence.seqlen_k, shape.head_dim);
        gVDot = this->rows(p.v_dot, kv_head, sequence.first_k, sequence.seqlen_k, shape.head_dim_v);
        gODot = this->rows(p.o_dot, head, sequence.first_q, sequence.seqlen_q, shape.head_dim_v);
        gMean = head_rows<Acc>(p.lse_dot, batch, head, sequence.first_q);
        gDeltaDot = head_rows<Acc>(p.delta_dot, batch, head, sequence.first_q);
    }

    // Tangents of q.k, of a tile whose own rows are queries, or keys.
    template <class Tiles, bool own_keys>
    CF_DEVICE void move_products(typename Tiles::Product& moved, int32_t m_first, int32_t n_first,
                                 typename Tiles::Storage& s) const {
        Tiles::clear(moved);
        if (p.q_dot.data) add_dots<Tiles, own_keys>(moved, gQDot.from(m_first), this->gK.from(n_first), s);
        if (p.k_dot.data) add_dots<Tiles, own_keys>(moved, this->gQ.from(m_first), gKDot.from(n_first), s);
    }
    template <class Tiles, bool own_keys>
    CF_DEVICE static void add_dots(typename Tiles::Product& product, const GlobalRows<Element>& of_queries,
                                   const GlobalRows<Element>& of_keys, typename Tiles::Storage& s) {
        Tiles::add_dot_rows(product, own_keys ? of_keys : of_queries, own_keys ? of_queries : of_keys, s);
    }

    // The tangent of a score, whose capped value and tangent of q.k these are.
    CF_DEVICE Acc move_score(Acc capped, Acc moved, int32_t query, int32_t key) const {
        const Acc score = this->score.cap_slope(capped) * this->score.scale * moved;
        if (!p.bias_dot.data) return score;
        const int64_t index = bias_dot_first + query * p.bias_dot.row + key * p.bias_dot.column;
        return score + load_bias<Acc>(p.bias_dot.data, index, p.call.score.bias_type);
    }
};
