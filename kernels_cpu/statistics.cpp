// Statistics of the weights of attention, recomputed from LSE tile by tile.
//
// The tags are those of cupy_flash/cpu/statistics.py:
//   [S.2]  LSE as given, else from a pass over the keys (lse.h)
//   [S.1]  for some panels of rows of one head, for each block of keys, for each panel that sees one of them
//   [S.3]      log P = S - LSE
//   [S.4]      key_sum_j += colsum(P), key_max_j = max(key_max_j, colmax(P))
//   [S.5]      entropy_i -= rowsum(P log P)
//   [S.6]      top_i = the largest of top_i and P
//
// Jobs:    (sequence, query head, part of its rows). Each has key sums of its own, and a second round of jobs adds
//          them up in their order; how many parts there are follows from the rows of the sequence alone, so that bits do
//          not depend on threads, nor on other sequences. why one head: its lanes are summed up.
// Scratch: kPanels panels at a time, one tile, a vector of sums for each key of a block, K of a block if it has to be
//          copied. Beside it two reals a key for each part.
#include "lse.h"
#include "statistics.h"

namespace {

constexpr int64_t kKeys = kSpanKeys;              // of a block
constexpr int64_t kPanels = 1024;                 // rows of them, at a time
constexpr int64_t kMostParts = 8, kRows = 512;    // of a head; of a part, at least

struct Parts {
    Statistics& f;
    int64_t most;    // of the longest sequence
    char* sums;      // (batch, heads_q, most) of KeyStatistics; null if nobody wants them

    static int64_t of_rows(int64_t rows) { return ::most(1, least(kMostParts, rows / kRows)); }
};

// What the keys of a head receive from some of its rows.
template <class Real>
struct KeyStatistics {
    Real *sum, *largest;
    static int64_t reals(const Call& p) { return 2 * up(p.seqlen_k, W<Real>); }
    KeyStatistics(const Parts& t, int64_t head, int64_t part) {
        const Call& p = t.f.call;
        sum = reinterpret_cast<Real*>(t.sums) + (head * t.most + part) * reals(p);
        largest = sum + reals(p) / 2;
    }
};

// The keys with the largest weights for the rows of a panel, kept in the results in descending order.
template <class Real>
struct TopKeys {
    const Statistics& f;
    LaneOffsets<Real> weights, keys;
    Real* of(int64_t l, int64_t place) const {
        return static_cast<Real*>(f.top_weights.data) + weights.of[l] + place * f.top_weights.column;
    }
    int32_t* key(int64_t l, int64_t place) const {
        return static_cast<int32_t*>(f.top_keys.data) + keys.of[l] + place * f.top_keys.column;
    }
    // Inserts a weight above the least of lane l, behind equal ones; returns the new least.
    __attribute__((noinline)) Real insert(int64_t l, Real weight, int64_t j) const {
        int64_t place = f.places - 1;
        for (; place > 0 && *of(l, place - 1) < weight; --place)
            *of(l, place) = *of(l, place - 1), *key(l, place) = *key(l, place - 1);
        *of(l, place) = weight, *key(l, place) = int32_t(j);
        return *of(l, f.places - 1);
    }
};

// A panel of rows, as entries of products, and what is known of them so far.
template <class Real>
struct RowsOf {
    Panel<Real> x;
    PanelLse<Real> lse;
    Real log_unit[kPanel<Real>], entropy[kPanel<Real>];
    Real least[kPanel<Real>];     // that a weight has to exceed to be listed
    I<Real> queries[kVectors];    // all bits of the lanes that are queries

    RowsOf(const Statistics& f, const Sequence& s, const Panel<Real>& panel) : x(panel) {
        lse.read(f.call, s, x);
        for (int64_t l = 0; l < kPanel<Real>; ++l) {
            log_unit[l] = lse.unit[l] == 1 ? Real(0) : Real(log(lse.unit[l]));
            entropy[l] = 0, least[l] = f.top_keys.data ? Real(0) : kInfinity<Real>;
            queries[l / W<Real>][l % W<Real>] = l < x.lanes ? -1 : 0;
        }
    }

    // Scores of keys from `from` on; sums and largest have a vector a key.
    void count(const Statistics& f, const Sequence& s, const Real* scores, int64_t from, int64_t keys,
               Real* sums, Real* largest) {
        constexpr int64_t w = W<Real>, panel = kPanel<Real>;
        const TopKeys<Real> top{f, x.in(f.top_weights, s), x.in(f.top_keys, s)};
        V<Real> of_tile[kVectors] = {};
        for (int64_t key = 0; key < keys; ++key) {
            V<Real> total = load(sums + key * w), most_of = load(largest + key * w);
            UNROLL for (int j = 0; j < kVectors; ++j) {
                V<Real> log_p = load(scores + key * panel + j * w) - load(lse.lse + j * w);    // [S.3]
                V<Real> p = exp_<Real, true>(log_p) * load(lse.unit + j * w);
                // why: k may be NaN where nobody sees it, and only queries have a mask and a bias.
                p = queries[j] ? p : zero<Real>();
                total += p, most_of = bigger(p, most_of);    // [S.4]
                log_p += load(log_unit + j * w);
                of_tile[j] += p == zero<Real>() ? p : p * log_p;    // [S.5]
                I<Real> listed = p > load(least + j * w);           // [S.6]
                if (any_bit(listed))
                    for (int64_t l = 0; l < w; ++l)
                        if (listed[l]) least[j * w + l] = top.insert(j * w + l, p[l], from + key);
            }
            store(sums + key * w, total), store(largest + key * w, most_of);
        }
        for (int64_t j = 0; j < kVectors; ++j) store(entropy + j * w, load(entropy + j * w) - of_tile[j]);
    }
};

template <class Real>
void statistics_job(void* what, int64_t number) {
    constexpr int64_t panel = kPanel<Real>, w = W<Real>;
    const Parts& t = *static_cast<Parts*>(what);
    const Statistics& f = t.f;
    Call& p = t.f.call;
    // Those that see most keys first.
    int64_t part = t.most - 1 - number % t.most, bh = number / t.most, head = bh % p.heads_q;
    const Sequence s(p, bh / p.heads_q);
    int64_t parts = Parts::of_rows(s.queries), share = up(blocks_of(s.queries, parts), panel);
    if (part >= parts) return;
    int64_t row0 = least(s.queries, part * share), row1 = least(s.queries, row0 + share), d = p.head_dim;
    int64_t at_once = least(kPanels, up(most(row1 - row0, 1), panel)) / panel,
            head_k = head / (p.heads_q / p.heads_k);
    const Keys<Real> keys{p, p.k, s, head_k, d};
    Real *q, *tile, *seen, *bias, *k_space, *sums, *largest;
    RowsOf<Real>* rows;
    pool::Scratch scratch(p, [&](pool::Scratch& x) {
        x.allocate(q, at_once * panel * d), x.allocate(tile, kKeys * panel + p.function_reals);
        x.allocate(seen, Score<Real>::masked(p) ? kKeys * panel : 0),
            x.allocate(bias, p.bias.data ? kKeys * panel : 0);
        x.allocate(k_space, keys.in_place() ? 0 : kKeys * d);
        x.allocate(sums, kKeys * w), x.allocate(largest, kKeys * w), x.allocate(rows, at_once);
    });
    if (!scratch) return;
    const Score<Real> score(p, s, head_k);
    const KeyStatistics<Real> of_keys(t, bh, part);
    if (t.sums) memset(of_keys.sum, 0, size_t(KeyStatistics<Real>::reals(p)) * sizeof(Real));

    for (int64_t r0 = row0; r0 < row1; r0 += at_once * panel) {    // [S.1]
        int64_t count = blocks_of(least(row1, r0 + at_once * panel) - r0, panel), begin = s.keys, end = 0;
        for (int64_t n = 0; n < count; ++n) {
            const Panel<Real> x(p, s, head, 1, r0 + n * panel, row1);
            read_panel(q + n * panel * d, p.q, x.lanes, x.in(p.q, s), d, score.q_factor);
            rows[n] = RowsOf<Real>(f, s, x);
            if (x.begin < x.end) begin = least(begin, x.begin), end = most(end, x.end);
        }
        for (int64_t j0 = begin / kKeys * kKeys; j0 < end && !pool::stopped(p); j0 += kKeys) {
            bool reached = false;
            for (int64_t n = 0; n < count && !reached; ++n) reached = score.reach(rows[n].x, j0);
            if (!reached) continue;
            int64_t from_block = most(j0, begin), to_block = least(j0 + kKeys, end), k_step;
            const Real* k = keys.rows(from_block, to_block - from_block, k_space, &k_step);
            memset(sums, 0, kKeys * w * sizeof(Real)), memset(largest, 0, kKeys * w * sizeof(Real));
            for (int64_t n = 0; n < count; ++n) {
                const Panel<Real>& x = rows[n].x;
                int64_t from = most(j0, x.begin), to = least(j0 + kKeys, x.end);
                score.trim(x, &from, &to);
                int64_t m = to - from;
                if (m <= 0 || !score.read_mask(x, from, m, seen, tile, tile + kKeys * panel)) continue;
                product<Along::depth>(k + (from - from_block) * k_step, k_step, q + n * panel * d, tile, m, d,
                                      false);
                score.finish(x, from, m, tile, seen, bias, nullptr, tile + kKeys * panel);
                rows[n].count(f, s, tile, from, m, sums + (from - j0) * w, largest + (from - j0) * w);
            }
            for (int64_t j = from_block; j < to_block && t.sums; ++j) {
                V<Real> most_of = load(largest + (j - j0) * w);
                of_keys.sum[j] += sum(load(sums + (j - j0) * w));
                for (int64_t l = 0; l < w; ++l)
                    of_keys.largest[j] = most_of[l] > of_keys.largest[j] ? most_of[l] : of_keys.largest[j];
            }
        }
        for (int64_t n = 0; n < count && f.entropy.data; ++n) {
            const LaneOffsets<Real> at = rows[n].x.in(f.entropy, s);
            for (int64_t l = 0; l < rows[n].x.lanes; ++l)
                static_cast<Real*>(f.entropy.data)[at.of[l]] = rows[n].entropy[l];
        }
    }
}

// Adds up what the parts of a head have counted.
template <class Real>
void add_job(void* what, int64_t number) {
    const Parts& t = *static_cast<Parts*>(what);
    const Call& p = t.f.call;
    int64_t head = number % p.heads_q;
    const Sequence s(p, number / p.heads_q);
    int64_t parts = Parts::of_rows(s.queries);
    const auto write = [&](const Tensor& to, int64_t j, Real x) {
        if (to.data)
            static_cast<Real*>(to.data)[s.batch * to.batch + head * to.head + (s.first_k + j) * to.row] = x;
    };
    for (int64_t j = 0; j < s.keys; ++j) {
        Real total = 0, largest = 0;
        for (int64_t n = 0; n < parts; ++n) {
            const KeyStatistics<Real> part(t, number, n);
            total += part.sum[j], largest = part.largest[j] > largest ? part.largest[j] : largest;
        }
        write(t.f.key_sum, j, total);
        // why: a maximum passes NaN over, a sum does not.
        write(t.f.key_max, j, total == total ? largest : total);
    }
}

template <class Real>
RARE void statistics(Statistics& f) {
    Call& p = f.call;
    bool first = p.lse.data;
    // [S.2] why not second order's rule: here LSE of more keys counts. Of pairs its last bits are others; as NumPy has it.
    const RecomputedLse<Real> recomputed(p, false, p.q.type == kBf16 ? 0x1p-17 : kSameLse<Real>);
    Parts t{f, Parts::of_rows(p.seqlen_q), nullptr};
    int64_t heads = p.batch * p.heads_q, jobs = heads * t.most;
    bool wanted = (f.key_sum.data || f.key_max.data) && p.seqlen_k;
    // The pass over the keys before it was the first half.
    if (!first)
        __atomic_store_n(&p.done, jobs, __ATOMIC_RELAXED),
            __atomic_store_n(&p.jobs, 2 * jobs, __ATOMIC_RELAXED);
    if (wanted)
        t.sums = static_cast<char*>(
            allocate_aligned(64, size_t(heads * t.most * KeyStatistics<Real>::reals(p)) * sizeof(Real)));
    if (wanted && !t.sums) p.state = kNoMemory;
    pool::run(p, statistics_job<Real>, &t, jobs);
    if (wanted) pool::run(p, add_job<Real>, &t, heads);
    free_aligned(t.sums);
}

}    // namespace

int32_t cupy_flash_statistics(Statistics* f) {
    const SpanTable spans(f->call);
    if (f->call.wide) statistics<double>(*f);
    else statistics<float>(*f);
    return f->call.state;
}
