// H on the CPU: the derivatives of dQ, dK, dV and of the gradient of the sinks in some directions.
//
// A dot is a derivative; dO and dLSE are held fixed. The tags are those of cupy_flash/cpu/hvp.py:
//   [H.1]  dotdelta = rowsum(dO dotO); mean = dotLSE
//          for some panels of rows, for each block of keys, for each panel that sees one of them
//   [H.2]      P = e^(S - LSE), dotS as in tangent.cpp, dP = dropout(V_j dO_i^T) - delta, dotdP = dropout(dotV_j dO_i^T)
//   [H.3]      dotP = P (dotS - mean)                     dotdV_j += dropout(dotP)^T dO_i
//   [H.4]      dS = P dP
//   [H.5]      dotdS = dotP dP + P (dotdP - dotdelta)
//   [H.6]      through softcap: dotdS = g' dotdS + g'' dS dotT, dS = g' dS
//   [H.7]      dotdQ_i^T += K_j^T dotdS^T + dotK_j^T dS^T
//   [H.8]      dotdK_j += dotdS^T Q_i + dS^T dotQ_i
//
// Cost:    ten products where the backward pass has five, one e^x a weight as there.
// Jobs:    as in backward.cpp, of up to kDirections directions at a time, one such group after the other.
// Scratch: as in backward.cpp, and for each direction dotQ and dotdQ of the panels, dotdK and dotdV of all keys.
#include "hessian.h"
#include "key_sums.h"

namespace {

constexpr int64_t kKeys = 144;       // of a block
constexpr int64_t kPanels = 1024;    // rows of them, over the directions, at a time

struct Hessian {
    SecondOrder& f;
    KeyParts parts;                    // of each direction in turn
    double* dsinks;                    // (directions at a time, batch, heads_q, parts)
    int64_t first, direction_count;    // directions at a time
    double& sink(int64_t direction, int64_t b, int64_t head, int64_t part) const {
        return dsinks[((direction * f.call.batch + b) * f.call.heads_q + head) * parts.most_parts + part];
    }
};

template <class Real>
void add_to_sinks(const Hessian& t, const Sequence& s, const GradientPanel<Real>& g,
                  const HessianPanel<Real>& h, const Direction<Real>& direction, int64_t number,
                  int64_t part) {
    const Call& p = t.f.call;
    for (int64_t l = 0; l < g.x.lanes && p.sinks.data; ++l) {
        double sink = element<Real>(p.sinks.data, g.x.head[l] * p.sinks.head), sink_dot = 0;
        if (direction.sinks.data)
            sink_dot = element<Real>(direction.sinks.data, g.x.head[l] * direction.sinks.head);
        t.sink(number, s.batch, g.x.head[l], part) -=
            g.lse.of_sink(sink, l) * ((sink_dot - h.mean[l]) * g.delta[l] + h.delta[l]);
    }
}

// [H.3] [H.7] [H.8]
template <class Real>
void add_products(const Call& p, const HessianTiles<Real>& tiles, const GradientPanel<Real>& g,
                  const HessianPanel<Real>& h, const Direction<Real>& direction, const KeySums<Real>& sums,
                  int64_t from, int64_t keys, int64_t behind, const Real* k, int64_t k_step) {
    constexpr int64_t panel = kPanel<Real>;
    Real* dk = sums.dk + from * sums.wide;
    sums.begin(from);
    product_wide<Along::depth>(tiles.p_dot, panel, g.do_rows, sums.wide_v, sums.dv + from * sums.wide_v,
                               sums.wide_v, keys, panel, sums.wide_v, true);
    product_wide<Along::depth>(tiles.ds_dot, panel, g.q_rows, sums.wide, dk, sums.wide, keys, panel,
                               sums.wide, true);
    product<Along::rows>(k, k_step, tiles.ds_dot, h.dq, p.head_dim, keys, true);
    if (direction.q.data)
        product_wide<Along::depth>(tiles.ds, panel, h.q_rows, sums.wide, dk, sums.wide, keys, panel,
                                   sums.wide, true);
    if (direction.k.data)
        product<Along::rows>(direction.k_rows + behind * direction.k_step, direction.k_step, tiles.ds, h.dq,
                             p.head_dim, keys, true);
}

template <class Real>
void hessian_job(void* what, int64_t number) {
    constexpr int64_t panel = kPanel<Real>;
    const Hessian& t = *static_cast<Hessian*>(what);
    const SecondOrder& f = t.f;
    Call& p = t.f.call;
    // why jobs: without a reproducible order, which second order refuses, several parts are always apart.
    int64_t parts = t.parts.jobs_of_head(), part = parts - 1 - number % parts, bh = number / parts;
    int64_t head_k = bh % p.heads_k, group = p.heads_q / p.heads_k, d = p.head_dim, dv = p.head_dim_v;
    const Sequence s(p, bh / p.heads_k);
    int64_t rows = s.queries * group, share = up(blocks_of(rows, parts), panel);
    int64_t row0 = least(rows, part * share), row1 = least(rows, row0 + share),
            direction_count = t.direction_count;
    int64_t at_once =
        least(most(1, kPanels / panel / direction_count), blocks_of(most(row1 - row0, 1), panel));
    const Keys<Real> keys{p, p.k, s, head_k, d}, values{p, p.v, s, head_k, dv};
    KeySums<Real> sums[kDirections] = {{p, s.keys}, {p, s.keys}, {p, s.keys}, {p, s.keys}};
    Real *own, *space, *dot_space, *k_space, *finite_space, *v_space, *key_spaces, *row;
    HessianTiles<Real> tiles;
    GradientPanel<Real>* panels;
    HessianPanel<Real>* tangents;
    Direction<Real>* directions;
    pool::Scratch scratch(p, [&](pool::Scratch& x) {
        x.allocate(own, t.parts.sums ? 0 : direction_count * sums[0].reals());
        x.allocate(space, at_once * GradientPanel<Real>::reals(p));
        x.allocate(dot_space, at_once * direction_count * HessianPanel<Real>::reals(p));
        x.allocate(k_space, keys.in_place() ? 0 : kKeys * d),
            x.allocate(v_space, values.in_place() ? 0 : kKeys * dv);
        x.allocate(finite_space, kKeys * d);
        x.allocate(key_spaces, direction_count * kKeys * (d + dv)), x.allocate(row, up(dv, W<Real>));
        x.allocate(panels, at_once), x.allocate(tangents, at_once * direction_count),
            x.allocate(directions, direction_count);
        tiles.allocate(x, f, kKeys);
    });
    if (!scratch) return;
    for (int64_t i = 0; i < direction_count; ++i) {
        directions[i] = Direction<Real>(f, t.first + i);
        sums[i].place(t.parts.sums ? t.parts.of<Real>(i * t.parts.heads + bh, part)
                                   : own + i * sums[0].reals());
        sums[i].begin_none();
    }
    const Score<Real> score(p, s, head_k);

    for (int64_t r0 = row0; r0 < row1; r0 += at_once * panel) {
        int64_t count = blocks_of(least(row1, r0 + at_once * panel) - r0, panel), begin = s.keys, end = 0;
        for (int64_t n = 0; n < count; ++n) {    // [H.1]
            const Panel<Real> x(p, s, head_k * group, group, r0 + n * panel, row1);
            const auto& g = panels[n] =
                GradientPanel<Real>(p, s, score, x, space + n * GradientPanel<Real>::reals(p), row);
            for (int64_t i = 0; i < direction_count; ++i) {
                int64_t at = n * direction_count + i;
                tangents[at] = HessianPanel<Real>(p, s, score, g, directions[i],
                                                  dot_space + at * HessianPanel<Real>::reals(p), row);
                add_to_sinks(t, s, g, tangents[at], directions[i], i, part);
            }
            if (x.begin < x.end) begin = least(begin, x.begin), end = most(end, x.end);
        }
        for (int64_t j0 = begin / kKeys * kKeys; j0 < end; j0 += kKeys) {
            int64_t from_block = most(j0, begin), to_block = least(j0 + kKeys, end), k_step, v_step;
            const Real* k_block = keys.rows(from_block, to_block - from_block, k_space, &k_step);
            int64_t finite_step = k_step;
            const Real* finite_block =
                finite_rows(k_block, to_block - from_block, d, &finite_step, finite_space);
            const Real* v_block = values.rows(from_block, to_block - from_block, v_space, &v_step);
            for (int64_t i = 0; i < direction_count; ++i)
                directions[i].set_keys(p, s, head_k, from_block, to_block - from_block,
                                       key_spaces + i * kKeys * (d + dv));
            for (int64_t n = 0; n < count && !pool::stopped(p); ++n) {
                const GradientPanel<Real>& g = panels[n];
                int64_t from = most(from_block, g.x.begin), m = least(to_block, g.x.end) - from;
                if (m <= 0) continue;
                int64_t behind = from - from_block;
                const Real *k = k_block + behind * k_step, *v = v_block + behind * v_step,
                           *finite = finite_block + behind * finite_step;
                if (!tiles.begin(score, g, from, m, k, k_step, v, v_step)) continue;
                for (int64_t i = 0; i < direction_count; ++i) {
                    const HessianPanel<Real>& h = tangents[n * direction_count + i];
                    tiles.compute_tangents(score, g, h, directions[i], from, m, behind, finite, finite_step,
                                           false);
                    add_products(p, tiles, g, h, directions[i], sums[i], from, m, behind, finite,
                                 finite_step);
                }
            }
        }
        Real factor[panel];
        for (Real& x : factor) x = Real(p.scale);
        for (int64_t at = 0; at < count * direction_count; ++at) {
            const Panel<Real>& x = panels[at / direction_count].x;
            const Tensor& dq = directions[at % direction_count].dq;
            write_panel(tangents[at].dq, factor, dq, x.lanes, x.in(dq, s), d);
        }
    }
    for (int64_t i = 0; i < direction_count && !t.parts.sums; ++i)
        sums[i].write(p, s, head_k, 0, s.keys, directions[i].dk, directions[i].dv);
}

template <class Real>
void add_job(void* what, int64_t number) {
    const Hessian& t = *static_cast<Hessian*>(what);
    int64_t direction = number % t.direction_count, head = number / t.direction_count % t.parts.heads;
    const Direction<Real> to(t.f, t.first + direction);
    t.parts.add<Real>(head, number / t.direction_count / t.parts.heads, to.dk, to.dv, direction);
}

template <class Real>
void hessian(SecondOrder& f) {
    Call& p = f.call;
    const RecomputedLse<Real> recomputed(p, true);
    int64_t most_directions = least(kDirections, f.directions);
    Hessian t{f, KeyParts::of_call<Real>(p, most_directions), nullptr, 0, 0};
    int64_t each = p.sinks.data ? p.batch * p.heads_q * t.parts.most_parts : 0;
    if (each) t.dsinks = static_cast<double*>(malloc(size_t(most_directions * each) * sizeof(double)));
    if (t.parts.no_memory() || (each && !t.dsinks)) p.state = kNoMemory;
    for (; t.first < f.directions && !pool::stopped(p); t.first += kDirections) {
        t.direction_count = least(kDirections, f.directions - t.first);
        if (each) memset(t.dsinks, 0, size_t(most_directions * each) * sizeof(double));
        pool::run(p, hessian_job<Real>, &t, t.parts.heads * t.parts.jobs_of_head());
        if (t.parts.sums)
            pool::run(p, add_job<Real>, &t,
                      t.direction_count * t.parts.heads * blocks_of(p.seqlen_k, kAdded));
        for (int64_t at = 0; each && at < t.direction_count * p.heads_q; ++at) {
            double total = 0;
            for (int64_t b = 0; b < p.batch; ++b)
                for (int64_t part = 0; part < t.parts.most_parts; ++part)
                    total += t.sink(at / p.heads_q, b, at % p.heads_q, part);
            const Tensor to = Direction<Real>::nth(f.dsinks, t.first + at / p.heads_q);
            Real x = Real(total);
            narrow(to.data, at % p.heads_q * to.head, &x, 1, 1, to.type);
        }
    }
    free_aligned(t.parts.sums), free(t.dsinks);
}

}    // namespace

int32_t cupy_flash_hvp(SecondOrder* f) {
    const SpanTable spans(f->call);
    if (f->call.wide) hessian<double>(*f);
    else hessian<float>(*f);
    return f->call.state;
}
