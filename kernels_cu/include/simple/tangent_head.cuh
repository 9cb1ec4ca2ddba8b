// A query head in a direction: rows of the tangents, and how scores move.
// Design note: docs/kernels/derivatives.md.
#pragma once
#include "simple/gradient_head.cuh"

template <class Element> struct TangentHead : GradientHead<Element> {
    using Head = GradientHead<Element>;
    using Acc = Accumulator<Element>;
    const SecondOrderParams& p;
    GlobalRows<Element> gQDot, gKDot, gVDot, gODot;
    const Acc *gMean, *gDeltaDot;
    int64_t bias_dot_first;

    CF_DEVICE TangentHead(const SecondOrderParams& params, int32_t batch, int32_t head)
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
    CF_DEVICE void product_tangents(typename Tiles::Product& tangent, int32_t m_first, int32_t n_first,
                                    typename Tiles::Storage& s) const {
        Tiles::clear(tangent);
        if (p.q_dot.data) add_dots<Tiles, own_keys>(tangent, gQDot.from(m_first), this->gK.from(n_first), s);
        if (p.k_dot.data) add_dots<Tiles, own_keys>(tangent, this->gQ.from(m_first), gKDot.from(n_first), s);
    }
    template <class Tiles, bool own_keys>
    CF_DEVICE static void add_dots(typename Tiles::Product& product, const GlobalRows<Element>& of_queries,
                                   const GlobalRows<Element>& of_keys, typename Tiles::Storage& s) {
        Tiles::add_dot_rows(product, own_keys ? of_keys : of_queries, own_keys ? of_queries : of_keys, s);
    }

    // The derivatives of the score function where it gets this.
    CF_DEVICE ScoreDerivatives<Acc> derivatives(Acc capped, int32_t query, int32_t key) const {
        if constexpr (kHasFunction) return this->score.function.derivatives(capped, query, key);
        else return {1, 0};
    }
    // The tangent of a score, whose capped value and tangent of q.k these are; slope: of the function.
    CF_DEVICE Acc score_tangent(Acc capped, Acc slope, Acc tangent, int32_t query, int32_t key) const {
        const Acc score = slope * this->score.softcap_slope(capped) * this->score.scale * tangent;
        if (!p.bias_dot.data) return score;
        const int64_t index = bias_dot_first + query * p.bias_dot.row + key * p.bias_dot.column;
        return score + load_bias<Acc>(p.bias_dot.data, index, p.call.score.bias_type);
    }

    // ---- of hvp

    // The derivatives of a pair's gradients, and the gradient of its product.
    struct Second {
        Acc weight;       // of dropout(P)
        Acc d_score;      // of the gradient of the score
        Acc d_product;    // of the gradient of scale * q.k
        Acc of_first;     // that gradient itself
    };
    CF_DEVICE Second second(Acc product, Acc tangent, Acc d_weight, Acc d_weight_dot, int32_t query,
                            int32_t key) const {
        const auto w = this->weight(product, query, key);
        if (w.whole == 0) return {0, 0, 0, 0};
        const ScoreDerivatives<Acc> function = derivatives(w.capped, query, key);
        // [H.3] [H.4] [H.5]
        const Acc score_dot = score_tangent(w.capped, function.slope, tangent, query, key);
        const Acc weight = w.whole * (score_dot - gMean[query * p.lse_dot.row]);
        const Acc d_whole = d_weight * w.kept - this->gDelta[query * this->delta_row];
        const Acc change = d_weight_dot * w.kept - gDeltaDot[query * p.delta_dot.row];
        const Acc d_score = weight * d_whole + w.whole * change;
        // [H.6] through the function, whose input has the tangent g' scale tangent, then through g
        const Acc slope = this->score.softcap_slope(w.capped);
        Acc of_first = w.whole * d_whole, d_product = d_score;
        if constexpr (kHasFunction) {
            d_product *= function.slope;
            d_product += function.curvature * slope * this->score.scale * tangent * of_first;
            of_first *= function.slope;
        }
        // of g(T): g'' dotT = -2 tanh g' dotT / softcap
        of_first *= slope, d_product *= slope;
        if (this->score.softcap != 0)
            d_product -= 2 * w.capped * of_first * this->score.scale * tangent /
                         (this->score.softcap * this->score.softcap);
        return {weight * w.kept, d_score, d_product, of_first};
    }

    // Those of a tile whose own rows are queries, or keys.
    template <class Tiles> struct SecondTiles {
        typename Tiles::Product weight, d_score, d_product, of_first;
    };
    template <class Tiles, bool own_keys>
    CF_DEVICE void second_tiles(SecondTiles<Tiles>& t, int32_t m_first, int32_t n_first,
                                typename Tiles::Storage& s) const {
        // [H.2] layout: at first the tiles hold the products q.k, do.v, those that move them.
        Tiles::clear(t.weight), Tiles::clear(t.d_score), Tiles::clear(t.of_first);
        add_dots<Tiles, own_keys>(t.weight, this->gQ.from(m_first), this->gK.from(n_first), s);
        add_dots<Tiles, own_keys>(t.d_score, this->gDO.from(m_first), this->gV.from(n_first), s);
        product_tangents<Tiles, own_keys>(t.d_product, m_first, n_first, s);
        if (p.v_dot.data)
            add_dots<Tiles, own_keys>(t.of_first, this->gDO.from(m_first), gVDot.from(n_first), s);
#pragma unroll 1
        for (int r = 0; r < Tiles::kRows; ++r) {
            const int own = Tiles::own_row(r);
            CF_UNROLL
            for (int c = 0; c < Tiles::kColumns; ++c) {
                const int other = Tiles::other_row(c);
                const int32_t query = m_first + (own_keys ? other : own);
                const int32_t key = n_first + (own_keys ? own : other);
                const Second x =
                    second(t.weight[0][c], t.d_product[0][c], t.d_score[0][c], t.of_first[0][c], query, key);
                t.weight[0][c] = x.weight, t.d_score[0][c] = x.d_score;
                t.d_product[0][c] = x.d_product, t.of_first[0][c] = x.of_first;
            }
            Tiles::rotate_rows(t.weight), Tiles::rotate_rows(t.d_score);
            Tiles::rotate_rows(t.d_product), Tiles::rotate_rows(t.of_first);
        }
    }

    // As of GradientHead, the derivatives.
    template <class Tiles>
    CF_DEVICE void add_d_scores(typename Tiles::Product& sum, int32_t m_first, int32_t n_first,
                                typename Tiles::Storage& s) const {
        SecondTiles<Tiles> t;
        second_tiles<Tiles, false>(t, m_first, n_first, s);
        CF_UNROLL
        for (int r = 0; r < Tiles::kRows; ++r) {
            CF_UNROLL
            for (int c = 0; c < Tiles::kColumns; ++c) sum[r][c] += t.d_score[r][c];
        }
    }
    CF_DEVICE Acc d_sink(int32_t head, int32_t query) const {
        const auto* dots = static_cast<const Acc*>(p.sinks_dot);
        const Acc sink_dot = dots ? dots[head * p.sinks_dot_head] : 0;
        const Acc tangent = (sink_dot - gMean[query * p.lse_dot.row]) * this->gDelta[query * this->delta_row];
        return this->sink_weight(head, query) * (tangent + gDeltaDot[query * p.delta_dot.row]);
    }
};
