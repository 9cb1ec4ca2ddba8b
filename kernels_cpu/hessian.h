// Code that both entries of H share, for a panel and some keys: dS, and its derivative in a direction.
#pragma once
#include "gradient.h"
#include "second_order.h"

// A panel of queries in one direction.
template <class Real>
struct HessianPanel {
    Real *q_columns, *q_rows, *dq;                   // dotQ, as Q in GradientPanel; the sums of dotdQ
    Real mean[kPanel<Real>], delta[kPanel<Real>];    // dotLSE, rowsum(dO dotO)

    static int64_t reals(const Call& p) { return kPanel<Real> * (2 * p.head_dim + up(p.head_dim, W<Real>)); }
    // space holds reals(p); row has room for up(head_dim_v, W).
    HessianPanel(const Call& p, const Sequence& s, const Score<Real>& score, const GradientPanel<Real>& g,
                 const Direction<Real>& direction, Real* space, Real* row) {
        constexpr int64_t w = W<Real>, lanes = kPanel<Real>;
        int64_t d = p.head_dim, dv = p.head_dim_v, wide_v = up(dv, w);
        q_columns = space, dq = q_columns + lanes * d, q_rows = dq + lanes * d;
        memset(dq, 0, size_t(lanes * d) * sizeof(Real));
        if (direction.q.data)
            read_panel(q_columns, direction.q, g.x.lanes, g.x.in(direction.q, s), d, score.q_factor, q_rows,
                       up(d, w));
        const LaneOffsets<Real> of_lse = g.x.in(direction.lse, s), of_o = g.x.in(direction.o, s);
        Real kept = p.dropout_threshold ? Real(p.dropout_scale) : Real(1);    // which g.do_rows has
        for (int64_t l = 0; l < lanes; ++l) {
            mean[l] = delta[l] = 0;
            if (l >= g.x.lanes) continue;
            mean[l] = static_cast<const Real*>(direction.lse.data)[of_lse.of[l]];
            widen(row, direction.o.data, of_o.of[l], dv, direction.o.column, direction.o.type);
            for (int64_t c = dv; c < wide_v; ++c) row[c] = 0;
            V<Real> products = zero<Real>();
            for (int64_t c = 0; c < wide_v; c += w)
                products += load(row + c) * load(g.do_rows + l * wide_v + c);
            delta[l] = sum(products) / kept;
        }
    }
};

// The tiles of a panel and some keys, each (keys x kPanel).
template <class Real>
struct HessianTiles {
    RecomputedWeights<Real> recomputed;
    Real *dp, *ds;                    // dP - delta, and dS: through softcap unless it is of the bias
    Real *p_dot, *ds_dot, *inside;    // of a direction

    template <class Scratch>
    void allocate(Scratch& scratch, const SecondOrder& f, int64_t keys) {
        int64_t n = keys * kPanel<Real>;
        recomputed.allocate(scratch, f, keys);
        scratch.allocate(dp, n), scratch.allocate(ds, n), scratch.allocate(p_dot, n),
            scratch.allocate(ds_dot, n);
        scratch.allocate(inside, f.call.softcap > 0 ? n : 0);
    }

    // [H.2] [H.4]: what directions share; false if the mask leaves nothing.
    bool begin(const Score<Real>& score, const GradientPanel<Real>& g, int64_t from, int64_t keys,
               const Real* k, int64_t k_step, const Real* v, int64_t v_step) {
        constexpr int64_t w = W<Real>, panel = kPanel<Real>;
        const Call& p = score.p;
        if (!recomputed.compute(score, g.x, g.lse, from, keys, k, k_step, g.q_columns)) return false;
        product<Along::depth>(v, v_step, g.do_columns, dp, keys, p.head_dim_v, false);
        recomputed.drop(dp, p, keys);
        for (int64_t i = 0; i < keys * panel; i += w) {
            V<Real> x = load(dp + i) - load(g.delta + i % panel);
            store(dp + i, x);
            store(ds + i, x * load(recomputed.weights + i));
        }
        if (p.softcap > 0)
            for (int64_t i = 0; i < keys * panel; i += w) {
                V<Real> t = load(recomputed.capped + i);
                store(ds + i, load(ds + i) * (splat<Real>(1) - t * t));
            }
        return true;
    }

    // [H.2] [H.3] [H.5] [H.6]: p_dot and ds_dot of keys that are `behind` the first current one of the direction; k are
    // finite_rows.
    void compute_tangents(const Score<Real>& score, const GradientPanel<Real>& g, const HessianPanel<Real>& h,
                          const Direction<Real>& direction, int64_t from, int64_t keys, int64_t behind,
                          const Real* k, int64_t k_step, bool of_bias) {
        constexpr int64_t w = W<Real>, panel = kPanel<Real>;
        const Call& p = score.p;
        bool softcap = p.softcap > 0;
        direction.score_tangents(score, g.x, from, keys, behind, k, k_step, g.q_columns, h.q_columns,
                                 recomputed.capped, inside, p_dot, recomputed.bias);
        if (direction.v.data)
            product<Along::depth>(direction.v_rows + behind * direction.v_step, direction.v_step,
                                  g.do_columns, ds_dot, keys, p.head_dim_v, false);
        else memset(ds_dot, 0, size_t(keys * panel) * sizeof(Real));
        recomputed.drop(ds_dot, p, keys);
        for (int64_t key = 0; key < keys; ++key) UNROLL for (int j = 0; j < kVectors; ++j) {
                int64_t i = key * panel + j * w;
                V<Real> weight = load(recomputed.weights + i);
                V<Real> x = weight * (load(p_dot + i) - load(h.mean + j * w));
                store(p_dot + i, x);
                store(ds_dot + i, x * load(dp + i) + weight * (load(ds_dot + i) - load(h.delta + j * w)));
            }
        if (softcap && !of_bias)
            for (int64_t i = 0; i < keys * panel; i += w) {
                V<Real> t = load(recomputed.capped + i);
                store(ds_dot + i, load(ds_dot + i) * (splat<Real>(1) - t * t) -
                                      splat<Real>(2) * t * load(ds + i) * load(inside + i));
            }
        recomputed.drop(p_dot, p, keys);
    }
};
