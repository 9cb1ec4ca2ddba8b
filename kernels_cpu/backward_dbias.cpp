// The gradient of the bias, in a pass of its own; the tags are those of backward.cpp.
#include "bias_sums.h"

namespace {

template <class Real>
struct OfBackward {
    const Call& p;
    GradientTiles<Real> tiles;
    Real *space, *row;

    template <class Scratch>
    void allocate(Scratch& x, int64_t keys) {
        x.allocate(space, GradientPanel<Real>::reals(p)), x.allocate(row, up(p.head_dim_v, W<Real>));
        tiles.allocate(x, p, keys);
    }
    const Real* compute(const Score<Real>& score, const Panel<Real>& x, int64_t from, int64_t keys,
                        const Real* k, int64_t k_step, const Real* v, int64_t v_step) {
        const GradientPanel<Real> g(p, score.s, score, x, space, row);    // [A2.4]
        const auto look = [](const Real*) {};
        return tiles.compute(p, score, g, from, keys, k, k_step, v, v_step, true, nullptr, look) ? tiles.ds
                                                                                                 : nullptr;
    }
};

template <class Real>
RARE void dbias(Call& p) {
    const RecomputedLse<Real> recomputed(p);
    sum_bias<Real>(p, OfBackward<Real>{p, {}, nullptr, nullptr}, p.dbias);
}

}    // namespace

int32_t cupy_flash_backward_dbias(Call* p) {
    const SpanTable spans(*p);
    if (p->wide) dbias<double>(*p);
    else dbias<float>(*p);
    return p->state;
}
