// The derivative of the gradient of the bias in some directions, one after the other, in a pass of its own; the tags are
// those of hessian.cpp.
#include "bias_sums.h"
#include "hessian.h"

namespace {

template <class Real>
struct OfHessian {
    const SecondOrder& f;
    Direction<Real> direction;
    HessianTiles<Real> tiles;
    Real *space, *dot_space, *key_space, *finite_space, *row;

    template <class Scratch>
    void allocate(Scratch& x, int64_t keys) {
        const Call& p = f.call;
        x.allocate(space, GradientPanel<Real>::reals(p)), x.allocate(dot_space, HessianPanel<Real>::reals(p));
        x.allocate(key_space, keys * (p.head_dim + p.head_dim_v)),
            x.allocate(finite_space, keys * p.head_dim);
        x.allocate(row, up(p.head_dim_v, W<Real>));
        tiles.allocate(x, f, keys);
    }
    const Real* compute(const Score<Real>& score, const Panel<Real>& x, int64_t from, int64_t keys,
                        const Real* k, int64_t k_step, const Real* v, int64_t v_step) {
        const Call& p = f.call;
        const GradientPanel<Real> g(p, score.s, score, x, space, row);
        const HessianPanel<Real> h(p, score.s, score, g, direction, dot_space, row);    // [H.1]
        direction.set_keys(p, score.s, x.head[0] / (p.heads_q / p.heads_k), from, keys, key_space);
        if (!tiles.begin(score, g, from, keys, k, k_step, v, v_step)) return nullptr;
        const Real* finite = finite_rows(k, keys, p.head_dim, &k_step, finite_space);
        tiles.compute_tangents(score, g, h, direction, from, keys, 0, finite, k_step, true);
        return tiles.ds_dot;
    }
};

template <class Real>
void dbias(SecondOrder& f) {
    const RecomputedLse<Real> recomputed(f.call, true);
    for (int64_t n = 0; n < f.directions && !pool::stopped(f.call); ++n) {
        const Direction<Real> direction(f, n);
        sum_bias<Real>(f.call, OfHessian<Real>{f, direction, {}, nullptr, nullptr, nullptr, nullptr, nullptr},
                       direction.dbias);
    }
}

}    // namespace

int32_t cupy_flash_hvp_dbias(SecondOrder* f) {
    const SpanTable spans(f->call);
    if (f->call.wide) dbias<double>(*f);
    else dbias<float>(*f);
    return f->call.state;
}
