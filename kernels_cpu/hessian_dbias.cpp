// The derivative of the gradient of the bias in some directions, one after the other, in a pass of its own; the tags are
// those of hessian.cpp.
#include "bias_sums.h"
#include "hessian.h"

namespace {

template <class Real>
struct OfHessian {
    const SecondOrder& f;
    Way<Real> way;
    HessianTiles<Real> tiles;
    Real *space, *dot_space, *key_space, *finite_space, *row;

    template <class Scratch>
    void take(Scratch& x, int64_t keys) {
        const Call& p = f.call;
        x.take(space, GradientPanel<Real>::reals(p)), x.take(dot_space, HessianPanel<Real>::reals(p));
        x.take(key_space, keys * (p.head_dim + p.head_dim_v)), x.take(finite_space, keys * p.head_dim);
        x.take(row, up(p.head_dim_v, W<Real>));
        tiles.take(x, f, keys);
    }
    const Real* compute(const Score<Real>& score, const Panel<Real>& x, int64_t from, int64_t keys,
                        const Real* k, int64_t k_step, const Real* v, int64_t v_step) {
        const Call& p = f.call;
        const GradientPanel<Real> g(p, score.s, score, x, space, row);
        const HessianPanel<Real> h(p, score.s, score, g, way, dot_space, row);    // [H.1]
        way.turn_to(p, score.s, x.head[0] / (p.heads_q / p.heads_k), from, keys, key_space);
        if (!tiles.begin(score, g, from, keys, k, k_step, v, v_step)) return nullptr;
        const Real* finite = finite_rows(k, keys, p.head_dim, &k_step, finite_space);
        tiles.turn(score, g, h, way, from, keys, 0, finite, k_step, true);
        return tiles.ds_dot;
    }
};

template <class Real>
void dbias(SecondOrder& f) {
    const LseAgain<Real> again(f.call, true);
    for (int64_t n = 0; n < f.directions && !pool::stopped(f.call); ++n) {
        const Way<Real> way(f, n);
        sum_bias<Real>(f.call, OfHessian<Real>{f, way, {}, nullptr, nullptr, nullptr, nullptr, nullptr},
                       way.dbias);
    }
}

}    // namespace

int32_t cupy_flash_hvp_dbias(SecondOrder* f) {
    const SpanTable spans(f->call);
    if (f->call.wide) dbias<double>(*f);
    else dbias<float>(*f);
    return f->call.state;
}
