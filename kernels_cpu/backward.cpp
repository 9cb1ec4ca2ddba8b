// Attention backward on the CPU: dQ, dK, dV and the gradient of the sinks, with weights recomputed from LSE.
//
// Source: A2 = FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 2, the loops in this order:
//   [A2.4]  delta = rowsum(dO O) - dLSE
//           for some panels of rows, for each block of keys, for each panel that sees one of them
//   [A2.11]     S^T = score(K_j Q_i^T); P = e^(S - LSE)
//   [A2.12]     dV_j += dropout(P)^T dO_i
//   [A2.13]     dP^T = V_j dO_i^T
//   [A2.14]     dS = P (dropout(dP) - delta)
//   [A2.15]     dQ_i^T += K_j^T dS^T
//   [A2.16]     dK_j += dS^T Q_i
//
// Jobs:    (sequence, key head, part of its rows). Each sums into a dK and dV of its own, and a second round of jobs adds
//          them up; or (sequence, key head), its parts one by one. How many parts there are depends on the problem
//          alone, so that bits do not depend on threads.
// Scratch: kPanels panels at a time, with dQ; dK and dV of all keys; K and V of a block if they have to be copied.
#include "gradient.h"
#include "key_sums.h"
#include "triples.h"

namespace {

constexpr int64_t kKeys = kSpanKeys;    // of a tile
// Whose gradients stay near while panels pass by. why fewer for triples: K is copied twice and V once, 6 bytes a number.
template <class Entry>
constexpr int64_t kBlock = __is_same(Entry, Triples) ? kKeys : 2 * kKeys;
constexpr int64_t kPanels = 1024;    // rows of them, at a time

struct Backward {
    Call& p;
    KeyParts parts;
    double* dsinks;    // (batch, heads_q, parts)
    int64_t slice;     // jobs that share sums of a function's arguments, one after the other; 0: no sums
    double& sink(const Sequence& s, int64_t head, int64_t part) const {
        return dsinks[(s.batch * p.heads_q + head) * parts.most_parts + part];
    }
    double* sums_of(int64_t job) const {
        return slice ? p.function->sums + job / slice * p.function->sums_each : nullptr;
    }
};

template <class Entry>
void add_to_sinks(const Backward& f, const Sequence& s, const GradientPanel<Entry>& g, int64_t part) {
    using Real = RealOf<Entry>;
    const Call& p = f.p;
    if (!p.sinks.data) return;
    for (int64_t l = 0; l < g.x.lanes; ++l) {
        double sink = element<Real>(p.sinks.data, g.x.head[l] * p.sinks.head);
        f.sink(s, g.x.head[l], part) -= g.lse.of_sink(sink, l) * g.delta[l];
    }
}

// What a sweep leaves for floats.
enum class Left { none, some, all };

// The scratch of a sweep.
template <class Entry>
struct Space {
    using Real = RealOf<Entry>;
    Real *panel_space, *dq, *k, *k_columns, *v, *row, *ds;
    GradientTiles<Entry> tiles;
    GradientPanel<Entry>* panels;

    static int64_t of_dq(const Call& p) {
        return kPanel<Real> * up(p.head_dim, __is_same(Entry, Triples) ? kTile : 1);
    }
    void allocate(pool::Scratch& x, const Call& p, int64_t most_panels, const Operand<Entry>& of_k,
                  const Operand<Entry>& of_v) {
        x.allocate(panel_space, most_panels * GradientPanel<Entry>::reals(p));
        x.allocate(dq, most_panels * of_dq(p));
        constexpr int64_t block = kBlock<Entry>;
        x.allocate(k, of_k.space_of_rows(block)), x.allocate(v, of_v.space_of_rows(block));
        x.allocate(k_columns, of_k.space_of_finite_columns(block));
        x.allocate(ds, kDepth<Entry> > 1 ? Columns<Entry>::space(kKeys) : 0);
        x.allocate(row, up(p.head_dim_v, W<Real>)), x.allocate(panels, most_panels);
        tiles.allocate(x, p, kKeys);
    }
};

// A part of the rows of a key head.
template <class Real>
struct Part {
    const Sequence& s;
    const Score<Real>& score;
    int64_t head_k, number, row0, row1;
    double* sums;    // of a function's arguments
};

// Adds the share of a part, or of its rows that `which` says; what is left for floats.
template <class Entry, class Real = RealOf<Entry>>
Left sweep(const Backward& f, const Part<Real>& part, KeySums<Real>& sums, Operand<Entry>& of_k,
           Operand<Entry>& of_v, Space<Entry>& space, Share which) {
    constexpr int64_t panel = kPanel<Real>, at_once = kPanels / panel, depth = kDepth<Entry>,
                      block = kBlock<Entry>;
    constexpr bool in_three = __is_same(Entry, Triples);
    Call& p = f.p;
    const Sequence& s = part.s;
    const Score<Real>& score = part.score;
    const int64_t group = p.heads_q / p.heads_k, d = p.head_dim, dq_space = Space<Entry>::of_dq(p);
    GradientPanel<Entry>* panels = space.panels;
    bool some = false, lost = false;
    for (int64_t r0 = part.row0; r0 < part.row1; r0 += at_once * panel) {
        int64_t count = blocks_of(least(part.row1, r0 + at_once * panel) - r0, panel), begin = s.keys,
                end = 0;
        for (int64_t n = 0; n < count; ++n) {    // [A2.4]
            Panel<Real> x(p, s, part.head_k * group, group, r0 + n * panel, part.row1);
            panels[n] = GradientPanel<Entry>(
                p, s, score, x, space.panel_space + n * GradientPanel<Entry>::reals(p), space.row, which);
            add_to_sinks(f, s, panels[n], part.number);
            some |= panels[n].floats != 0;
            if (which == Share::others && !panels[n].floats) panels[n].x.end = x.begin;
            else if (x.begin < x.end) begin = least(begin, x.begin), end = most(end, x.end);
        }
        // why from a multiple of a pair: a block of pairs begins where a tile of keys does.
        begin -= begin % depth;
        memset(space.dq, 0, size_t(count * dq_space) * sizeof(Real));
        for (int64_t J0 = begin / block * block; J0 < end; J0 += block) {
            bool reached = false;
            for (int64_t n = 0; n < count && !reached; ++n)
                for (int64_t j0 = J0; j0 < least(J0 + block, end); j0 += kKeys)
                    reached |= score.reach(panels[n].x, j0);
            if (!reached) continue;
            int64_t from_block = most(J0, begin), to_block = least(J0 + block, end), k_step, v_step;
            const Entry* k_block = of_k.rows(from_block, to_block - from_block, space.k, &k_step);
            const Entry* v_block = of_v.rows(from_block, to_block - from_block, space.v, &v_step);
            int64_t column_step = k_step;
            const Entry* k_columns = of_k.finite_columns(k_block, from_block, to_block - from_block,
                                                         space.k_columns, &column_step);
            for (int64_t n = 0; n < count && !pool::stopped(p); ++n) {
                const GradientPanel<Entry>& g = panels[n];
                for (int64_t j0 = J0; j0 < to_block; j0 += kKeys) {
                    int64_t from = most(j0, g.x.begin), to = least(least(j0 + kKeys, to_block), g.x.end);
                    score.trim(g.x, &from, &to);
                    if (from >= to) continue;
                    from -= (from - from_block) % depth;
                    const Entry* k = k_block + (from - from_block) * k_step;
                    const Entry* v = v_block + (from - from_block) * v_step;
                    int64_t m = to - from;
                    const auto look = [&](const Real* scores) {
                        if constexpr (in_three)
                            lost |= (of_k.unusual_lanes(from - from_block, m, scores) |
                                     of_v.unusual_lanes(from - from_block, m, scores)) &
                                    ~g.floats & g.x.mask();
                    };
                    if (!space.tiles.compute(p, score, g, from, m, k, k_step, v, v_step, false, part.sums,
                                             look))
                        continue;
                    using Of = Lines<Entry>;
                    const Entry* ds_columns = Columns<Entry>::copied(space.ds, space.tiles.ds, m);
                    const Entry *weights = Of::of(space.tiles.weights, m, kKeys),
                                *ds = Of::of(space.tiles.ds, m, kKeys);
                    if (in_three && (lost || !weights || !ds)) return Left::all;
                    sums.begin(from);
                    product_wide<Along::depth>(weights, Of::step, g.do_rows, sums.wide_v,    // [A2.12]
                                               sums.dv + from * sums.wide_v, sums.wide_v, m, panel / depth,
                                               sums.wide_v, true);
                    product_wide<Along::depth>(ds, Of::step, g.q_rows, sums.wide,    // [A2.16]
                                               sums.dk + from * sums.wide, sums.wide, m, panel / depth,
                                               sums.wide, true);
                    product_of_keys(k_columns, column_step, from - from_block, ds_columns,
                                    space.dq + n * dq_space, d, m, true);    // [A2.15]
                }
            }
        }
        Real factor[panel];
        for (Real& x : factor) x = Real(p.scale);
        for (int64_t n = 0; n < count; ++n) {
            const Panel<Real>& x = panels[n].x;
            const Real* columns = space.dq + n * dq_space;
            if (which == Share::others)
                write_lanes(columns, factor, p.dq, panels[n].floats, x.in(p.dq, s), d);
            else write_panel(columns, factor, p.dq, x.lanes, x.in(p.dq, s), d);
        }
    }
    return some ? Left::some : Left::none;
}

template <class Entry>
void backward_job(void* what, int64_t number) {
    using Real = RealOf<Entry>;
    constexpr int64_t panel = kPanel<Real>, at_once = kPanels / panel;
    const Backward& f = *static_cast<Backward*>(what);
    Call& p = f.p;
    int64_t jobs = f.parts.jobs_of_head(), bh = number / jobs, b = bh / p.heads_k, head_k = bh % p.heads_k;
    const Sequence s(p, b);
    const TileShapes shapes;
    int64_t group = p.heads_q / p.heads_k, rows = s.queries * group;
    int64_t parts = f.parts.of_rows(rows), share = up(blocks_of(rows, parts), panel);
    int64_t part0 = f.parts.apart ? jobs - 1 - number % jobs : 0;    // those that see most keys first
    int64_t part1 = f.parts.apart ? part0 + 1 : parts;
    int64_t most_panels = least(at_once, blocks_of(most(least(rows, share), 1), panel));
    const Keys<Real> keys{p, p.k, s, head_k, p.head_dim}, values{p, p.v, s, head_k, p.head_dim_v};
    Operand<Entry> of_k{keys}, of_v{values};
    Operand<Plain<Entry>> k_of_floats{keys}, v_of_floats{values};
    KeySums<Real> sums(p, s.keys), total = sums;
    Real* own;
    Space<Entry> space;
    Space<Plain<Entry>> of_floats;
    pool::Scratch scratch(p, [&](pool::Scratch& x) {
        x.allocate(own, f.parts.apart ? 0 : least(parts, 2) * sums.reals());
        space.allocate(x, p, most_panels, of_k, of_v);
        if (!__is_same(Entry, Plain<Entry>)) of_floats.allocate(x, p, most_panels, k_of_floats, v_of_floats);
    });
    if (!scratch) return;
    const Score<Real> score(p, s, head_k);
    total.place(own);

    for (int64_t part = part0; part < part1; ++part) {
        int64_t row0 = least(rows, part * share), row1 = least(rows, row0 + share);
        const Part<Real> all{s, score, head_k, part, row0, row1, f.sums_of(number)};
        const auto begin = [&] {
            sums.place(f.parts.apart ? f.parts.of<Real>(bh, part) : own + (part ? sums.reals() : 0));
            sums.begin_none();
            for (int64_t n = 0; p.sinks.data && n < group; ++n) f.sink(s, head_k * group + n, part) = 0;
        };
        begin();
        if constexpr (__is_same(Entry, Triples)) {
            Left left = sweep<Entry>(f, all, sums, of_k, of_v, space, Share::usual);
            if (left == Left::all) begin();
            if (left != Left::none)
                sweep<float>(f, all, sums, k_of_floats, v_of_floats, of_floats,
                             left == Left::all ? Share::all : Share::others);
        } else sweep<Entry>(f, all, sums, of_k, of_v, space, Share::all);
        for (int64_t j = 0; !f.parts.apart && part && j < s.keys; j += kSpanKeys)
            if (sums.has(j)) total.begin(j), total.add(sums, j);
    }
    if (!f.parts.apart) total.write(p, s, head_k, 0, s.keys, p.dk, p.dv);
}

// The jobs of a slice. why in turn: each of its sums has its terms in one order.
template <class Entry>
void slice_job(void* what, int64_t number) {
    const Backward& f = *static_cast<Backward*>(what);
    int64_t first = number * f.slice, last = least(first + f.slice, f.parts.heads * f.parts.jobs_of_head());
    for (int64_t n = first; n < last && !pool::stopped(f.p); ++n) backward_job<Entry>(what, n);
}

// Adds up what the parts of a key head have summed, for a block of keys.
template <class Real>
void add_job(void* what, int64_t number) {
    const Backward& f = *static_cast<Backward*>(what);
    f.parts.add<Real>(number % f.parts.heads, number / f.parts.heads, f.p.dk, f.p.dv);
}

template <class Entry>
RARE void backward(Call& p) {
    using Real = RealOf<Entry>;
    const RecomputedLse<Plain<Entry>> recomputed(p);
    Backward f{p, KeyParts::of_call<Real>(p), nullptr, 0};
    int64_t parts = f.parts.most_parts, heads = f.parts.heads, jobs = heads * f.parts.jobs_of_head();
    if (p.function && p.function->sums) f.slice = blocks_of(jobs, p.function->slices);
    if (p.sinks.data)
        f.dsinks = static_cast<double*>(calloc(size_t(p.batch * p.heads_q * parts), sizeof(double)));
    if (f.parts.no_memory() || (p.sinks.data && !f.dsinks)) {
        p.state = kNoMemory;
    } else {
        pool::run(p, f.slice ? slice_job<Entry> : backward_job<Entry>, &f,
                  f.slice ? blocks_of(jobs, f.slice) : jobs);
        if (f.parts.apart) pool::run(p, add_job<Real>, &f, heads * blocks_of(p.seqlen_k, kAdded));
        for (int64_t h = 0; p.sinks.data && h < p.heads_q; ++h) {
            double total = 0;
            for (int64_t b = 0; b < p.batch; ++b)
                for (int64_t part = 0; part < parts; ++part)
                    total += f.dsinks[(b * p.heads_q + h) * parts + part];
            Real x = Real(total);
            narrow(p.dsinks.data, h * p.dsinks.head, &x, 1, 1, p.dsinks.type);
        }
    }
    free_aligned(f.parts.sums), free(f.dsinks);
}

}    // namespace

int32_t cupy_flash_backward(Call* p) {
    const SpanTable spans(*p);
#if defined(__AMX_BF16__)    // a library of its own
    if (p->k.type == kBf16) backward<Pair>(*p);
    else backward<Triples>(*p);
#elif defined(__AVX512BF16__)    // and another
    backward<Pair>(*p);
#else
    if (p->wide) backward<double>(*p);
    else backward<float>(*p);
#endif
    return p->state;
}
