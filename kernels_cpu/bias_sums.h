// The gradient of the bias: dS, summed over whatever axes the bias is broadcast along.
//
// The weights are computed once more. So one job sums each element of dbias, in one order, in full precision and without
// memory for partial sums. Source computes dS: allocate(scratch) takes its memory, compute(panel, ...) returns a tile, or
// null if the mask leaves nothing.
//
// Jobs:    (batch, head of dbias, panel of its rows): all panels if it has one row for all queries.
// Scratch: one panel, its tiles, and the sums of one block of keys.
#pragma once
#include "gradient.h"

constexpr int64_t kBiasKeys = kSpanKeys;    // of a tile

template <class Source>
struct BiasSums {
    Call& p;
    Source source;
    Tensor to;                              // its strides are 0 along axes of length 1
    int64_t batch, heads, rows, columns;    // of dbias: 1 where it is a sum
    int64_t panels;                         // jobs of a head
};

template <class Real, class Source>
void bias_job(void* what, int64_t number) {
    constexpr int64_t panel = kPanel<Real>, w = W<Real>;
    const BiasSums<Source>& f = *static_cast<BiasSums<Source>*>(what);
    Call& p = f.p;
    int64_t place = number % f.panels, h = number / f.panels % f.heads, b = number / f.panels / f.heads;
    Real *k_space, *v_space, *total;
    Source source = f.source;
    pool::Scratch scratch(p, [&](pool::Scratch& x) {
        x.allocate(k_space, kBiasKeys * p.head_dim), x.allocate(v_space, kBiasKeys * p.head_dim_v);
        x.allocate(total, kBiasKeys * panel);
        source.allocate(x, kBiasKeys);
    });
    if (!scratch) return;
    const Tensor& t = f.to;
    int64_t step = kBiasKeys;
    auto clear = [&] { memset(total, 0, size_t(kBiasKeys * panel) * sizeof(Real)); };
    clear();
    // With one column for all keys the sums of all blocks go to the first, which is 0 if there is no key.
    int64_t j0 = 0;
    do {
        for (int64_t b1 = f.batch == 1 ? 0 : b; b1 < (f.batch == 1 ? p.batch : b + 1); ++b1)
            for (int64_t h1 = f.heads == 1 ? 0 : h; h1 < (f.heads == 1 ? p.heads_q : h + 1); ++h1) {
                const Sequence s(p, b1);
                int64_t head_k = h1 / (p.heads_q / p.heads_k);
                const Keys<Real> keys{p, p.k, s, head_k, p.head_dim}, values{p, p.v, s, head_k, p.head_dim_v};
                const Score<Real> score(p, s, head_k);
                int64_t first = f.rows == 1 ? 0 : place * panel;
                int64_t last = f.rows == 1 ? s.queries : least(first + panel, s.queries);
                for (int64_t r = first; r < last && !pool::stopped(p); r += panel) {
                    const Panel<Real> x(p, s, h1, 1, r, last);
                    int64_t from = most(j0, x.begin), to = least(j0 + step, x.end), k_step, v_step;
                    score.trim(x, &from, &to);
                    if (from >= to) continue;
                    const Real* k = keys.rows(from, to - from, k_space, &k_step);
                    const Real* v = values.rows(from, to - from, v_space, &v_step);
                    const Real* ds = source.compute(score, x, from, to - from, k, k_step, v, v_step);
                    if (!ds) continue;
                    for (int64_t i = 0; i < (to - from) * panel; i += w) {
                        Real* sum = total + (f.columns == 1 ? i % panel : (from - j0) * panel + i);
                        store(sum, load(sum) + load(ds + i));
                    }
                }
            }
        bool last_block = j0 + step >= p.seqlen_k;
        if (f.columns == 1 && !last_block) continue;
        int64_t written = f.columns == 1 ? 1 : least(step, p.seqlen_k - j0),
                at = b * t.batch + h * t.head + j0 * t.column;
        if (f.rows == 1) {
            for (int64_t j = 0; j < written; ++j) {
                V<Real> lanes = zero<Real>();
                for (int i = 0; i < kVectors; ++i) lanes += load(total + j * panel + i * w);
                Real x = sum(lanes);
                narrow(t.data, at + j * t.column, &x, 1, 1, t.type);
            }
        } else {
            Real ones[panel];
            for (Real& x : ones) x = 1;
            LaneOffsets<Real> rows;
            for (int64_t l = 0; l < panel; ++l) rows.of[l] = at + (place * panel + l) * t.row;
            write_panel(total, ones, t, least(panel, f.rows - place * panel), rows, written);
        }
        clear();
    } while ((j0 += step) < p.seqlen_k);
}

template <class Real, class Source>
void sum_bias(Call& p, const Source& source, const Tensor& to) {
    const int64_t* shape = p.dbias_shape;
    int64_t panels = shape[2] == 1 ? 1 : blocks_of(shape[2], kPanel<Real>);
    BiasSums<Source> f{p, source, to, shape[0], shape[1], shape[2], shape[3], panels};
    pool::run(p, bias_job<Real, Source>, &f, f.batch * f.heads * f.panels);
}
