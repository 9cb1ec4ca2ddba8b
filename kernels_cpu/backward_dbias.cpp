// The gradient of the bias: dS, summed over whatever axes the bias is broadcast along.
//
// The weights are computed once more, so that each element of dbias is summed by one job, always in one order, in
// full precision and without memory of its own; the tags are those of backward.cpp.
//
// Jobs:    (batch, head of dbias, panel of its rows): all panels if it has one row for all queries.
// Scratch: one panel, its tiles, and the sums of one block of keys.
#include "gradient.h"

namespace {

constexpr int64_t kKeys = kSpanKeys;

struct Dbias {
    Call& p;
    int64_t batch, heads, rows, columns;    // of dbias: 1 where it is a sum
    int64_t panels;                         // jobs of a head
};

template <class Real>
void dbias_job(void* what, int64_t number) {
    constexpr int64_t panel = kPanel<Real>, w = W<Real>;
    const Dbias& f = *static_cast<Dbias*>(what);
    Call& p = f.p;
    int64_t place = number % f.panels, h = number / f.panels % f.heads, b = number / f.panels / f.heads;
    Real *space, *k_space, *v_space, *row, *total;
    GradientTiles<Real> tiles;
    pool::Scratch scratch(p, [&](pool::Scratch& x) {
        x.take(space, GradientPanel<Real>::reals(p)), x.take(row, up(p.head_dim_v, w));
        x.take(k_space, kKeys * p.head_dim), x.take(v_space, kKeys * p.head_dim_v);
        x.take(total, kKeys * panel);
        tiles.take(x, p, kKeys);
    });
    if (!scratch) return;
    const Tensor& t = p.dbias;
    int64_t step = kKeys;
    auto clear = [&] { memset(total, 0, size_t(kKeys * panel) * sizeof(Real)); };
    clear();
    // With one column for all keys the sums of all blocks go to the first.
    for (int64_t j0 = 0; j0 < p.seqlen_k; j0 += step) {
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
                    score.spans.trim(x, &from, &to);
                    if (from >= to) continue;
                    const GradientPanel<Real> g(p, s, score, x, space, row);    // [A2.4]
                    const Real* k = keys.rows(from, to - from, k_space, &k_step);
                    const Real* v = values.rows(from, to - from, v_space, &v_step);
                    if (!tiles.compute(p, score, g, from, to - from, k, k_step, v, v_step, true)) continue;
                    for (int64_t i = 0; i < (to - from) * panel; i += w) {
                        Real* sum = total + (f.columns == 1 ? i % panel : (from - j0) * panel + i);
                        store(sum, load(sum) + load(tiles.ds + i));
                    }
                }
            }
        bool last_block = j0 + step >= p.seqlen_k;
        if (f.columns == 1 && !last_block) continue;
        int64_t written = f.columns == 1 ? 1 : least(step, p.seqlen_k - j0),
                at = b * t.batch + h * t.head + j0 * t.column;
        if (f.columns == 1) at = b * t.batch + h * t.head;
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
    }
}

template <class Real>
void dbias(Call& p) {
    const int64_t* shape = p.dbias_shape;
    Dbias f{p, shape[0], shape[1], shape[2], shape[3], shape[2] == 1 ? 1 : blocks_of(shape[2], kPanel<Real>)};
    pool::run(p, dbias_job<Real>, &f, f.batch * f.heads * f.panels);
}

}    // namespace

__attribute__((visibility("default"))) int32_t cupy_flash_backward_dbias(Call* p) {
    const SpanTable spans(*p);
    if (p->wide) dbias<double>(*p);
    else dbias<float>(*p);
    return p->state;
}
