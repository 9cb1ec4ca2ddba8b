// Code that both passes of second order share: the call with its directions, recomputed weights, tangents of scores.
#pragma once
#include "lse.h"

// An array of each direction, the next one `step` elements behind. Without data if the call has none.
struct Directed {
    Tensor first;
    int64_t step;
};

// The params of the entries of second order; cupy_flash/cpu/core/params.py writes them, and a test compares.
struct SecondOrder {
    Call call;
    Directed q_dot, k_dot, v_dot, bias_dot,
        sinks_dot;                         // tangents, like their arrays; one that is absent is 0
    Directed o_dot, lse_dot;               // of jvp; hvp reads them
    Directed dq, dk, dv, dbias, dsinks;    // of hvp
    int64_t directions;
};

extern "C" {
// Each returns the state of the call when it is done.
EXPORTED int32_t cupy_flash_jvp(SecondOrder*);
EXPORTED int32_t cupy_flash_forward_jvp(SecondOrder*);    // o and lse are results, too
EXPORTED int32_t cupy_flash_hvp(SecondOrder*);
EXPORTED int32_t cupy_flash_hvp_dbias(SecondOrder*);
}

constexpr int64_t kDirections =
    4;    // of a job, at most: they share the weights, and scratch does not grow with them

// The arrays of one direction, and the tangents of the keys that a job is working on.
template <class Real>
struct Direction {
    static constexpr int w = W<Real>, panel = kPanel<Real>;
    Tensor q, k, v, bias, sinks, o, lse, dq, dk, dv, dbias, dsinks;
    const Real *k_rows, *v_rows;    // tangents of the current keys
    int64_t k_step, v_step;

    __attribute__((noinline))    // why: every pass has some, and size counts
    Direction(const SecondOrder& f, int64_t n)
        : q(nth(f.q_dot, n)), k(nth(f.k_dot, n)), v(nth(f.v_dot, n)), bias(nth(f.bias_dot, n)),
          sinks(nth(f.sinks_dot, n)), o(nth(f.o_dot, n)), lse(nth(f.lse_dot, n)), dq(nth(f.dq, n)),
          dk(nth(f.dk, n)), dv(nth(f.dv, n)), dbias(nth(f.dbias, n)), dsinks(nth(f.dsinks, n)),
          k_rows(nullptr), v_rows(nullptr), k_step(0), v_step(0) {}

    static Tensor nth(const Directed& x, int64_t n) {
        constexpr int64_t bytes[] = {4, 2, 2, 8, 1, 1, 1};
        Tensor t = x.first;
        if (t.data) t.data = static_cast<char*>(t.data) + n * x.step * bytes[t.type];
        return t;
    }
    // Makes keys the current ones; space has room for a row of K and one of V for each.
    __attribute__((noinline)) void set_keys(const Call& p, const Sequence& s, int64_t head, int64_t from,
                                            int64_t count, Real* space) {
        if (k.data) k_rows = Keys<Real>{p, k, s, head, p.head_dim}.rows(from, count, space, &k_step);
        space += count * p.head_dim;
        if (v.data) v_rows = Keys<Real>{p, v, s, head, p.head_dim_v}.rows(from, count, space, &v_step);
    }
    // Whether scores have tangents.
    bool has_score_tangent() const { return q.data || k.data || bias.data; }

    // Tangents of the scores of a tile of keys, which are `behind` the first current one. With softcap `capped` is
    // tanh of what `inside` gets the tangents of; pairs has room for a tile if the bias has a tangent.
    __attribute__((noinline)) void    // why: all passes share it, and size counts
    score_tangents(const Score<Real>& score, const Panel<Real>& x, int64_t from, int64_t keys, int64_t behind,
                   const Real* key_rows, int64_t key_step, const Real* q_columns, const Real* q_dot,
                   const Real* capped, Real* inside, Real* tile, Real* pairs) const {
        const Call& p = score.p;
        if (q.data) product<Along::depth>(key_rows, key_step, q_dot, tile, keys, p.head_dim, false);
        if (k.data)
            product<Along::depth>(k_rows + behind * k_step, k_step, q_columns, tile, keys, p.head_dim,
                                  q.data != nullptr);
        if (!q.data && !k.data) memset(tile, 0, size_t(keys * panel) * sizeof(Real));
        if (p.softcap > 0)
            for (int64_t i = 0; i < keys * panel; i += w) {
                V<Real> t = load(capped + i), y = load(tile + i);
                if (inside) store(inside + i, y);
                store(tile + i, y * (splat<Real>(1) - t * t) * splat<Real>(Real(p.softcap)));
            }
        if (!bias.data) return;
        read_panel(pairs, bias, x.lanes, x.in_pairs(bias, score.s, from), keys, Real(1));
        for (int64_t i = 0; i < keys * panel; i += w) store(tile + i, load(tile + i) + load(pairs + i));
    }
};

// Tiles (keys x kPanel) with the weights of a panel, from LSE.
template <class Real>
struct RecomputedWeights {
    Real *weights, *capped;    // P, and with softcap tanh of the scores
    Real *seen, *bias, *kept;

    // What dropout does not keep becomes 0.
    __attribute__((noinline)) void drop(Real* tile, const Call& p, int64_t keys) const {
        if (!p.dropout_threshold) return;
        for (int64_t i = 0; i < keys * kPanel<Real>; i += W<Real>)
            store(tile + i, load(tile + i) * load(kept + i));
    }

    template <class Scratch>
    void allocate(Scratch& scratch, const SecondOrder& f, int64_t keys) {
        int64_t n = keys * kPanel<Real>;
        const Call& p = f.call;
        scratch.allocate(weights, n), scratch.allocate(capped, p.softcap > 0 ? n : 0);
        scratch.allocate(seen, p.mask.data ? n : 0);
        scratch.allocate(bias, p.bias.data ? n : 0);    // and then its tangents
        scratch.allocate(kept, p.dropout_threshold ? n : 0);
    }
    // The scores of a tile, where the weights go. False if the mask leaves nothing.
    __attribute__((noinline)) bool scores(const Score<Real>& score, const Panel<Real>& x, int64_t from,
                                          int64_t keys, const Real* k, int64_t k_step,
                                          const Real* q_columns) {
        if (!score.read_mask(x, from, keys, seen)) return false;
        if (score.p.dropout_threshold) {
            for (int64_t i = 0; i < keys * kPanel<Real>; ++i) kept[i] = 1;
            score.drop(x, from, keys, kept);
        }
        product<Along::depth>(k, k_step, q_columns, weights, keys, score.p.head_dim, false);
        score.finish(x, from, keys, weights, seen, bias, score.p.softcap > 0 ? capped : nullptr);
        return true;
    }
    // Scores become weights.
    __attribute__((noinline)) void weigh(const PanelLse<Real>& lse, int64_t keys) {
        constexpr int64_t w = W<Real>, panel = kPanel<Real>;
        V<Real> of_row[kVectors], unit[kVectors];
        UNROLL for (int j = 0; j < kVectors; ++j) of_row[j] = load(lse.lse + j * w),
                                                  unit[j] = load(lse.unit + j * w);
        for (int64_t key = 0; key < keys; ++key) UNROLL for (int j = 0; j < kVectors; ++j) {
                Real* at = weights + key * panel + j * w;
                store(at, exp_<Real, true>(load(at) - of_row[j]) * unit[j]);
            }
    }
    // Both.
    bool compute(const Score<Real>& score, const Panel<Real>& x, const PanelLse<Real>& lse, int64_t from,
                 int64_t keys, const Real* k, int64_t k_step, const Real* q_columns) {
        if (!scores(score, x, from, keys, k, k_step, q_columns)) return false;
        weigh(lse, keys);
        return true;
    }
};
