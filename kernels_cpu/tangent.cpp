// J on the CPU: the tangents of O and LSE in some directions, from O and LSE, or together with them.
//
// A dot is a derivative; the tags are those of cupy_flash/cpu/jvp.py:
//   [J.1]  a job owns some panels of rows Q_i of one key head, and up to kDirections directions
//          for each block of keys that the band reaches, and each panel
//   [J.2]      P = e^(S - LSE); together with O and LSE by [A1.9] and [A1.10] of forward.cpp, where all sums follow
//              the maximum, and [A1.12] divides all of them
//   [J.3]      dotS^T = g' (K_j dotQ_i^T + dotK_j Q_i^T) + dotbias
//   [J.4]      mean += rowsum(P dotS)
//   [J.5]      dotO_i^T += V_j^T dropout(P dotS)^T + dotV_j^T dropout(P)^T
//   [J.6]  mean += p_sink dotsink
//   [J.7]  dotO_i -= mean O_i, dotLSE_i = mean
//
// Cost:    five products where the forward pass has two, one e^x a weight as there, no maximum and no rescaling.
//          Together six, where both passes have seven.
// Jobs:    as in forward.cpp, for each kDirections directions.
// Scratch: Q^T of the panels (together O^T too), and of each direction its dotQ^T and dotO^T; tiles; rows of a block
//          that are copied.
#include "second_order.h"
#include "softmax.h"

namespace {

constexpr int64_t kKeys = 144;                          // of a block, as in forward.cpp
constexpr int64_t kMostPanels = 192 / kPanel<float>;    // of a job, over its directions

struct Tangent {
    SecondOrder& f;
    int64_t panels;    // of a job
    int64_t parts;     // jobs of a key head of the longest sequence
};

// Sums of a panel in one direction, and what they begin from.
template <class Real>
struct TangentSums {
    Real *q, *o;    // dotQ^T, dotO^T
    Real mean[kPanel<Real>];
};

// [J.4] and its factor of V: tile becomes P dotS.
template <class Real>
__attribute__((noinline)) void weigh(Real* tile, const Real* weights, int64_t keys, Real* mean) {
    constexpr int64_t w = W<Real>, panel = kPanel<Real>;
    V<Real> total[kVectors];
    UNROLL for (int j = 0; j < kVectors; ++j) total[j] = load(mean + j * w);
    for (int64_t key = 0; key < keys; ++key) UNROLL for (int j = 0; j < kVectors; ++j) {
            int64_t at = key * panel + j * w;
            V<Real> x = load(tile + at) * load(weights + at);
            total[j] += x;
            store(tile + at, x);
        }
    UNROLL for (int j = 0; j < kVectors; ++j) store(mean + j * w, total[j]);
}

// [J.6] [J.7] of a panel in one direction; o: O^T.
template <class Real>
__attribute__((noinline)) void finish(const Call& p, const Sequence& s, const Panel<Real>& x,
                                      const PanelLse<Real>& lse, const Direction<Real>& direction,
                                      TangentSums<Real>& sums, const Real* o) {
    constexpr int64_t w = W<Real>, panel = kPanel<Real>;
    const LaneOffsets<Real> at = x.in(direction.lse, s);
    Real ones[panel];
    for (int64_t l = 0; l < panel; ++l) {
        ones[l] = 1;
        if (l >= x.lanes) continue;
        if (direction.sinks.data) {
            double sink = element<Real>(p.sinks.data, x.head[l] * p.sinks.head);
            if (sink != -kInfinity<double>)
                sums.mean[l] += Real(lse.of_sink(sink, l) *
                                     element<Real>(direction.sinks.data, x.head[l] * direction.sinks.head));
        }
        static_cast<Real*>(direction.lse.data)[at.of[l]] = sums.mean[l];
    }
    const V<Real> unit = splat<Real>(p.dropout_threshold ? Real(p.dropout_scale) : Real(1));
    for (int64_t i = 0; i < p.head_dim_v * panel; i += w)
        store(sums.o + i, load(sums.o + i) * unit - load(o + i) * load(sums.mean + i % panel));
    write_panel(sums.o, ones, direction.o, x.lanes, x.in(direction.o, s), p.head_dim_v);
}

// [A1.12] [A1.13] of a panel, which one job of all directions writes, and the same for its sums; o becomes O^T.
template <class Real>
void divide(const Call& p, const Sequence& s, const Panel<Real>& x, const Softmax<Real>& softmax,
            PanelLse<Real>& lse, TangentSums<Real>* sums, int64_t directions, bool written, Real* o) {
    constexpr int64_t w = W<Real>;
    const LaneOffsets<Real> at = x.in(p.lse, s);
    Real factor[kPanel<Real>], kept[kPanel<Real>];
    for (int64_t l = 0; l < kPanel<Real>; ++l) {
        Real& of_row = lse.lse[l];
        lse.unit[l] = 1;
        finish_row(p, x.head[l], softmax.row_max[l], softmax.row_sum[l], Real(1), factor + l, &of_row);
        if (written && l < x.lanes) static_cast<Real*>(p.lse.data)[at.of[l]] = of_row;
        if (p.sinks.data && far_from_0(of_row)) {    // what the sink weighs
            const Denominator all = denominator(p, x.head[l], softmax.row_max[l], softmax.row_sum[l]);
            of_row = Real(all.top), lse.unit[l] = Real(1 / all.sum);
        }
        kept[l] = p.dropout_threshold ? factor[l] * Real(p.dropout_scale) : factor[l];
    }
    V<Real> by[kVectors], by_kept[kVectors];
    UNROLL for (int j = 0; j < kVectors; ++j) by[j] = load(factor + j * w), by_kept[j] = load(kept + j * w);
    for (int64_t i = 0; i < directions; ++i) {
        scale_lanes<kVectors>(sums[i].o, p.head_dim_v, by);
        scale_lanes<kVectors>(sums[i].mean, 1, by);
    }
    if (written) write_panel(o, kept, p.o, x.lanes, x.in(p.o, s), p.head_dim_v);
    scale_lanes<kVectors>(o, p.head_dim_v, by_kept);
}

// together: O and LSE are computed, too, otherwise given.
template <class Real, bool together>
void tangent_job(void* what, int64_t number) {
    constexpr int64_t panel = kPanel<Real>;
    const Tangent& t = *static_cast<Tangent*>(what);
    const SecondOrder& f = t.f;
    Call& p = t.f.call;
    int64_t part = t.parts - 1 - number % t.parts, head = number / t.parts % (p.batch * p.heads_k),
            first = number / t.parts / (p.batch * p.heads_k) * kDirections;
    int64_t b = head / p.heads_k, head_k = head % p.heads_k;
    const Sequence s(p, b);
    int64_t group = p.heads_q / p.heads_k, rows = s.queries * group, d = p.head_dim, dv = p.head_dim_v;
    int64_t r0 = part * t.panels * panel, r1 = least(rows, r0 + t.panels * panel);
    if (r0 >= r1) return;
    int64_t count = blocks_of(r1 - r0, panel), direction_count = least(kDirections, f.directions - first);
    const Keys<Real> keys{p, p.k, s, head_k, d}, values{p, p.v, s, head_k, dv};
    Real *q, *o, *tile, *k_space, *finite_space, *v_space, *dot_spaces, *space;
    Panel<Real>* panels;
    TangentSums<Real>* sums;
    PanelLse<Real>* lse;
    Softmax<Real>* softmaxes;
    Direction<Real>* directions;
    RecomputedWeights<Real> recomputed;
    pool::Scratch scratch(p, [&](pool::Scratch& x) {
        x.allocate(q, count * panel * d), x.allocate(lse, count);
        x.allocate(o, (together ? count : 1) * panel * dv), x.allocate(softmaxes, together ? count : 0);
        x.allocate(space, direction_count * count * panel * (d + dv));
        x.allocate(tile, kKeys * panel);
        x.allocate(k_space, keys.in_place() ? 0 : kKeys * d),
            x.allocate(v_space, values.in_place() ? 0 : kKeys * dv);
        x.allocate(finite_space, kKeys * d);
        x.allocate(dot_spaces, direction_count * kKeys * (d + dv));
        x.allocate(panels, count), x.allocate(sums, direction_count * count),
            x.allocate(directions, direction_count);
        recomputed.allocate(x, f, kKeys);
    });
    if (!scratch) return;

    const Score<Real> score(p, s, head_k);
    int64_t begin = s.keys, end = 0;
    for (int64_t n = 0; n < direction_count; ++n) directions[n] = Direction<Real>(f, first + n);
    for (int64_t n = 0; n < count; ++n) {
        Panel<Real>& x = panels[n] = Panel<Real>(p, s, head_k * group, group, r0 + n * panel, r1);
        read_panel(q + n * panel * d, p.q, x.lanes, x.in(p.q, s), d, score.q_factor);
        if (together) softmaxes[n] = Softmax<Real>();
        else lse[n].read(p, s, x);
        for (int64_t i = 0; i < direction_count; ++i) {
            TangentSums<Real>& sum = sums[n * direction_count + i];
            sum.q = space, sum.o = space + panel * d, space += panel * (d + dv);
            if (directions[i].q.data)
                read_panel(sum.q, directions[i].q, x.lanes, x.in(directions[i].q, s), d, score.q_factor);
            memset(sum.o, 0, size_t(panel * dv) * sizeof(Real)), memset(sum.mean, 0, sizeof sum.mean);
        }
        if (x.begin < x.end) begin = least(begin, x.begin), end = most(end, x.end);
    }
    for (int64_t j0 = begin / kKeys * kKeys; j0 < end && !pool::stopped(p); j0 += kKeys) {    // [J.1]
        int64_t from_block = most(j0, begin), to_block = least(j0 + kKeys, end), k_step, v_step;
        const Real* k_block = keys.rows(from_block, to_block - from_block, k_space, &k_step);
        int64_t finite_step = k_step;
        const Real* finite_block = finite_rows(k_block, to_block - from_block, d, &finite_step, finite_space);
        const Real* v_block = values.rows(from_block, to_block - from_block, v_space, &v_step);
        for (int64_t i = 0; i < direction_count; ++i)
            directions[i].set_keys(p, s, head_k, from_block, to_block - from_block,
                                   dot_spaces + i * kKeys * (d + dv));
        for (int64_t n = 0; n < count; ++n) {
            const Panel<Real>& x = panels[n];
            int64_t from = most(j0, x.begin), to = least(j0 + kKeys, x.end), m = to - from;
            if (m <= 0) continue;
            int64_t behind = from - from_block;
            const Real *k = k_block + behind * k_step, *v = v_block + behind * v_step,
                       *of_q = q + n * panel * d;
            TangentSums<Real>* of_panel = sums + n * direction_count;
            Real* o_panel = o + n * panel * dv;
            if (!recomputed.scores(score, x, from, m, k, k_step, of_q)) continue;    // [J.2]
            if (together) {
                softmaxes[n].template weigh<kVectors>(recomputed.weights, m, [&](const V<Real>* by) {
                    scale_lanes<kVectors>(o_panel, dv, by);
                    for (int64_t i = 0; i < direction_count; ++i) {
                        scale_lanes<kVectors>(of_panel[i].o, dv, by);
                        scale_lanes<kVectors>(of_panel[i].mean, 1, by);
                    }
                });
            } else {
                recomputed.weigh(lse[n], m);
            }
            for (int64_t i = 0; i < direction_count; ++i) {
                if (!directions[i].has_score_tangent()) continue;
                TangentSums<Real>& sum = of_panel[i];
                directions[i].score_tangents(score, x, from, m, behind, finite_block + behind * finite_step,
                                             finite_step, of_q, sum.q, recomputed.capped,
                                             nullptr,    // [J.3]
                                             tile, recomputed.bias);
                weigh(tile, recomputed.weights, m, sum.mean);    // [J.4]
                recomputed.drop(tile, p, m);
                product<Along::rows>(v, v_step, tile, sum.o, dv, m, true);    // [J.5]
            }
            if (!together && !f.v_dot.first.data) continue;
            recomputed.drop(recomputed.weights, p, m);
            if (together) {    // [A1.10]
                product<Along::rows>(v, v_step, recomputed.weights, o_panel, dv, m, !softmaxes[n].fresh);
                softmaxes[n].fresh = false;
            }
            if (!f.v_dot.first.data) continue;
            for (int64_t i = 0; i < direction_count; ++i)
                product<Along::rows>(directions[i].v_rows + behind * directions[i].v_step,
                                     directions[i].v_step, recomputed.weights, of_panel[i].o, dv, m, true);
        }
    }
    for (int64_t n = 0; n < count; ++n) {
        const Panel<Real>& x = panels[n];
        Real* o_panel = o + (together ? n * panel * dv : 0);
        TangentSums<Real>* of_panel = sums + n * direction_count;
        if (together) {
            if (softmaxes[n].fresh) memset(o_panel, 0, size_t(panel * dv) * sizeof(Real));
            divide(p, s, x, softmaxes[n], lse[n], of_panel, direction_count, first == 0, o_panel);
        } else {
            read_panel(o_panel, p.o, x.lanes, x.in(p.o, s), dv, Real(1));
        }
        for (int64_t i = 0; i < direction_count; ++i)
            finish(p, s, x, lse[n], directions[i], of_panel[i], o_panel);
    }
}

template <class Real, bool together>
void tangent(SecondOrder& f) {
    Call& p = f.call;
    int64_t panels = blocks_of(p.seqlen_q * (p.heads_q / p.heads_k), kPanel<Real>),
            heads = p.batch * p.heads_k;
    int64_t each = most(1, kMostPanels / least(f.directions, kDirections));
    // Enough jobs that one slow core does not leave the others waiting.
    while (each > 1 && heads * blocks_of(panels, each) < 4 * p.threads) --each;
    Tangent t{f, each, blocks_of(panels, each)};
    pool::run(p, tangent_job<Real, together>, &t, heads * t.parts * blocks_of(f.directions, kDirections));
}

template <class Real>
void of_lse(SecondOrder& f) {
    const RecomputedLse<Real> recomputed(f.call, true);
    tangent<Real, false>(f);
}

}    // namespace

int32_t cupy_flash_jvp(SecondOrder* f) {
    const SpanTable spans(f->call);
    if (f->call.wide) of_lse<double>(*f);
    else of_lse<float>(*f);
    return f->call.state;
}
int32_t cupy_flash_forward_jvp(SecondOrder* f) {
    const SpanTable spans(f->call);
    if (f->call.wide) tangent<double, true>(*f);
    else tangent<float, true>(*f);
    return f->call.state;
}
