// LSE for the passes that recompute the weights, P = e^(S - LSE).
//
// LSE is one real, which keeps log(row_sum) to half an ulp of LSE, and P has that as its relative error: at 1e9 in float32
// nothing of log(row_sum) is left, and each of n equal weights would be 1 and not 1/n. So the sums of a row whose LSE is
// far from 0 are recomputed, from its scores as this pass computes them, and its LSE becomes two numbers: the maximum, and
// `unit` = 1 / row_sum. All weights are e^(S - LSE) unit; in any other row unit is 1, which changes no bit.
#pragma once
#include "pool.h"
#include "score.h"

// why 1024: up to there the relative error of P is at most 2^-14 in float32, 2^-43 in float64; scores of models are lower.
template <class Real>
bool far_from_0(Real lse) {
    Real size = lse < 0 ? -lse : lse;
    return size > 1024 && size < kInfinity<Real>;
}

// Whether a row's LSE cannot be far from 0, by the LSE or by the row's maximum, which is at most 34 below it (2^36 keys), or
// infinite where no key is seen. why: triples leave all other rows to floats, whose scores are those that are recomputed.
template <class Real>
bool surely_near_0(Real top) {
    Real size = top < 0 ? -top : top;
    return size < 1024 - 34 || size == kInfinity<Real>;
}

// LSE of the lanes of a panel: infinite, for weights of 0, in a lane that is no query or sees no key.
template <class Real>
struct PanelLse {
    Real lse[kPanel<Real>], unit[kPanel<Real>];

    __attribute__((noinline)) void read(const Call& p, const Sequence& s, const Panel<Real>& x) {
        const LaneOffsets<Real> at = x.in(p.lse, s);
        for (int64_t l = 0; l < kPanel<Real>; ++l) {
            Real given = l < x.lanes ? static_cast<const Real*>(p.lse.data)[at.of[l]] : -kInfinity<Real>;
            lse[l] = given == -kInfinity<Real> ? kInfinity<Real> : given;
            unit[l] = l < x.lanes && p.lse_unit ? static_cast<const Real*>(p.lse_unit)[at.of[l]] : Real(1);
        }
    }
    // The weight of the sink of a lane.
    double of_sink(double sink, int64_t l) const { return exp(sink - lse[l]) * unit[l]; }
};

// The relative difference by which an LSE far from 0 may exceed the one of these keys, and still be recomputed from them.
template <class Real>
constexpr double kSameLse = sizeof(Real) == 4 ? 0x1p-21 : 0x1p-50;

// Within its scope the LSE of a call is a copy, with units, if any LSE is far from 0 or the call has none.
template <class Entry>
class RecomputedLse {
    using Real = RealOf<Entry>;

  public:
    RARE explicit RecomputedLse(Call& call, bool second_order = false, double same = kSameLse<Real>)
        : p_(call), given_(call.lse), own_(nullptr), same_(same), unknown_(!call.lse.data) {
        // why: the forward pass of bfloat16 may have been of pairs, where these are of reals.
        other_sums_ = kDepth<Entry> == 1 && p_.q.type == kBf16 && (second_order || p_.dbias.data != nullptr);
        int64_t batch = p_.starts_q ? 1 : p_.batch, rows = p_.starts_q ? p_.starts_q[p_.batch] : p_.seqlen_q;
        int64_t count = batch * p_.heads_q * rows;
        const auto from = [&](int64_t i) {
            int64_t row = i % rows, head = i / rows % p_.heads_q, b = i / rows / p_.heads_q;
            return static_cast<const Real*>(
                given_.data)[b * given_.batch + head * given_.head + row * given_.row];
        };
        bool any = unknown_;
        for (int64_t i = 0; i < count && !any; ++i) any = far_from_0(from(i));
        if (!any) return;
        own_ = static_cast<Real*>(allocate_aligned(64, size_t(2 * count) * sizeof(Real)));
        if (!own_) {
            p_.state = kNoMemory;
            return;
        }
        for (int64_t i = 0; i < count; ++i) own_[i] = unknown_ ? Real(0) : from(i), own_[count + i] = 1;
        p_.lse.data = own_, p_.lse_unit = own_ + count;
        p_.lse.batch = p_.starts_q ? 0 : p_.heads_q * rows, p_.lse.head = rows, p_.lse.row = 1;
        panels_ = blocks_of(p_.seqlen_q * (p_.heads_q / p_.heads_k), kPanel<Real>);
        int64_t jobs = p_.batch * p_.heads_k * panels_;
        // why twice: without LSE this is the first half of the call, for who looks on.
        if (unknown_) __atomic_store_n(&p_.jobs, 2 * jobs, __ATOMIC_RELAXED);
        pool::run(p_, job, this, jobs);
        // why: who looks on counts the jobs of the pass itself.
        __atomic_store_n(&p_.jobs, 0, __ATOMIC_RELAXED), __atomic_store_n(&p_.done, 0, __ATOMIC_RELAXED);
    }
    RARE ~RecomputedLse() { free_aligned(own_), p_.lse = given_, p_.lse_unit = nullptr; }
    RecomputedLse(const RecomputedLse&) = delete;

  private:
    Call& p_;
    Tensor given_;
    Real* own_;    // all LSE, then the unit of each
    int64_t panels_;
    double same_;
    bool unknown_, other_sums_;

    // [A1.9] for a vector of lanes. why not softmax.h's: few rows are recomputed, and the library stays small.
    RARE static void add_weights(const Real* tile, int64_t keys, Real* row_max, Real* row_sum) {
        V<Real> top = load(row_max), total = load(row_sum);
        for (int64_t key = 0; key < keys; ++key) top = bigger(load(tile + key * kPanel<Real>), top);
        V<Real> finite = top == splat<Real>(-kInfinity<Real>) ? zero<Real>() : top;
        total *= exp_<Real>(load(row_max) - finite);
        for (int64_t key = 0; key < keys; ++key)
            total += exp_<Real>(load(tile + key * kPanel<Real>) - finite);
        store(row_max, top), store(row_sum, total);
    }
    // The rows of a panel, by [A1.8] and [A1.9] of forward.cpp.
    RARE static void job(void* what, int64_t number) {
        constexpr int64_t panel = kPanel<Real>, depth = kDepth<Entry>;
        const RecomputedLse& f = *static_cast<RecomputedLse*>(what);
        Call& p = f.p_;
        int64_t bh = number / f.panels_, head_k = bh % p.heads_k, group = p.heads_q / p.heads_k;
        const Sequence s(p, bh / p.heads_k);
        int64_t r0 = number % f.panels_ * panel, rows = s.queries * group, d = p.head_dim;
        if (r0 >= rows) return;
        const Panel<Real> x(p, s, head_k * group, group, r0, rows);
        const LaneOffsets<Real> at = x.in(p.lse, s);
        Real *lse = static_cast<Real*>(p.lse.data), *unit = static_cast<Real*>(p.lse_unit);
        bool any = f.unknown_;
        for (int64_t l = 0; l < x.lanes; ++l) any |= far_from_0(lse[at.of[l]]);
        if (!any) return;
        const TileShapes shapes;
        const Keys<Real> keys{p, p.k, s, head_k, d};
        const Operand<Entry> of_k{keys};
        Real *q, *tile, *seen, *bias, *k_space;
        pool::Scratch scratch(p, [&](pool::Scratch& y) {
            y.allocate(q, panel * d), y.allocate(tile, kSpanKeys * panel + p.function_reals);
            y.allocate(seen, Score<Real>::masked(p) ? kSpanKeys * panel : 0);
            y.allocate(bias, p.bias.data ? kSpanKeys * panel : 0);
            y.allocate(k_space, of_k.space_of_rows(kSpanKeys));
        });
        if (!scratch) return;
        const Score<Real> score(p, s, head_k);
        read_panel(q, p.q, x.lanes, x.in(p.q, s), d, score.factor_of_q(kRounds<Entry>));
        const Entry* q_columns = down<Entry>(q, q, d, panel, panel);
        Real row_max[panel], row_sum[panel];
        for (int64_t l = 0; l < panel; ++l) row_max[l] = -kInfinity<Real>, row_sum[l] = 0;
        for (int64_t j0 = x.begin / kSpanKeys * kSpanKeys; j0 < x.end && !pool::stopped(p); j0 += kSpanKeys) {
            int64_t from = most(j0, x.begin), to = least(j0 + kSpanKeys, x.end), k_step;
            if (!score.reach(x, j0)) continue;
            score.trim(x, &from, &to);
            int64_t m = to - from;
            if (m <= 0 || !score.read_mask(x, from, m, seen, tile, tile + kSpanKeys * panel)) continue;
            const Entry* k = of_k.rows(from, m, k_space, &k_step);
            product<Along::depth>(k, k_step, q_columns, tile, m, blocks_of(d, depth), false);
            score.scale(tile, m * panel, kRounds<Entry>);
            score.finish(x, from, m, tile, seen, bias, nullptr, tile + kSpanKeys * panel);
            for (int64_t i = 0; i < panel; i += W<Real>) add_weights(tile + i, m, row_max + i, row_sum + i);
        }
        for (int64_t l = 0; l < x.lanes; ++l) {
            Real& given = lse[at.of[l]];
            if (!f.unknown_ && !far_from_0(given)) continue;
            const Denominator all = denominator(p, x.head[l], row_max[l], row_sum[l]);
            if (f.unknown_ && row_sum[l] == 0) {
                given = -kInfinity<Real>;
                continue;
            }
            double more = given - Real(all.top + log(all.sum)), size = given < 0 ? -given : given;
            // why: if it is larger it is that of more keys, of other parts of a ring, whose weights are not known here.
            if (f.unknown_ || (f.other_sums_ ? all.sum > 0 : more <= size * f.same_))
                given = Real(all.top), unit[at.of[l]] = Real(1 / all.sum);
        }
    }
};
