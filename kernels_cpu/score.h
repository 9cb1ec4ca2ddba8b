// From products to scores, softcap, bias, ALiBi, then what mask, band, spans and blocks hide; and which weights dropout keeps.
#pragma once
#include "blocks.h"
#include "function.h"
#include "panel.h"
#include "operand.h"
#include "spans.h"
#include <math.h>

// Philox 4x32-10 (Salmon and others, SC 2011); its counter is the place of four weights, so that every pass keeps
// the same ones. Lanes are queries.
template <int lanes>
struct Philox {
    uint32_t word[4][lanes];
    Philox(uint64_t seed, uint32_t group, const int32_t* query, const int32_t* head, uint32_t batch) {
        uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
        for (int l = 0; l < lanes; ++l)
            word[0][l] = group, word[1][l] = uint32_t(query[l]), word[2][l] = uint32_t(head[l]),
            word[3][l] = batch;
        for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9, k1 += 0xBB67AE85)
            for (int l = 0; l < lanes; ++l) {
                uint64_t a = uint64_t(0xD2511F53) * word[0][l], b = uint64_t(0xCD9E8D57) * word[2][l];
                word[0][l] = uint32_t(b >> 32) ^ word[1][l] ^ k0, word[1][l] = uint32_t(b);
                word[2][l] = uint32_t(a >> 32) ^ word[3][l] ^ k1, word[3][l] = uint32_t(a);
            }
    }
};

// What turns tiles (keys x kPanel) of one key head's products into scores.
template <class Real>
struct Score {
    static constexpr int w = W<Real>, panel = kPanel<Real>;
    Call& p;
    const Sequence& s;
    Tensor mask;      // that of the call, or the sequence's own part of one that holds them in a row
    Real q_factor;    // of q before the product: scale, softcap's division, units of 8-bit q and k
    Real slope[panel];
    KeySpans<Real> spans;
    KeyBlocks<Real> blocks;

    __attribute__((noinline))    // why: as of Sequence
    Score(Call& call, const Sequence& sequence, int64_t head_k)
        : p(call), s(sequence), mask(call.mask), spans{call, sequence}, blocks{call, sequence} {
        if (p.starts_mask)
            mask.data = static_cast<char*>(mask.data) + p.starts_mask[s.batch], mask.row = s.keys;
        double factor = p.softcap > 0 ? p.scale / p.softcap : p.scale;
        const Tensor* units[] = {&p.q_scale, &p.k_scale};
        for (const Tensor* t : units)
            if (t->data) factor *= element<Real>(t->data, s.batch * t->batch + head_k * t->head);
        q_factor = Real(factor);
    }

    // The factor of q before a product. 1, and `scale` multiplies the products instead, where q times its factor would be
    // rounded to bfloat16 once more; a power of 2 rounds nothing.
    Real factor_of_q(bool rounds) const {
        bool exact = !rounds || (to_bits(float(q_factor)) & 0x7fffff) == 0;
        return exact ? q_factor : Real(1);
    }
    void scale(Real* products, int64_t count, bool rounds) const {
        if (!rounds || factor_of_q(rounds) == q_factor) return;
        for (int64_t i = 0; i < count; i += w) store(products + i, load(products + i) * splat(q_factor));
    }
    // The same; or nothing, if all that may happen to scores is that some become -inf: their factor is returned. why: a pass
    // over them costs up to a tenth of a call, a factor in their softmax nothing.
    Real scale_or_leave(Real* products, int64_t count, bool rounds) const {
        if (!rounds || factor_of_q(rounds) == q_factor) return 1;
        bool changed =
            p.softcap > 0 || p.bias.data || p.alibi_slopes.data || (p.function && !p.function->hides);
        if (!changed && q_factor > 0) return q_factor;    // why > 0: else -inf would not stay
        scale(products, count, rounds);
        return 1;
    }

    // Whether any query of a panel sees any key of the block of kSpanKeys that key j begins.
    bool reach(const Panel<Real>& x, int64_t j) const {
        return spans.reach(x, j) && blocks.reach(x, j, least(j + kSpanKeys, s.keys));
    }
    // Cuts the keys of a tile to those between the first and the last that a query of the panel may see.
    void trim(const Panel<Real>& x, int64_t* from, int64_t* to) const {
        spans.trim(x, from, to), blocks.trim(x, from, to);
    }

    // Arrays that finish() needs, of one tile each.
    static int64_t tiles(const Call& p) { return (p.bias.data != nullptr) + (p.mask.data != nullptr); }

    // Whether a mask, or a function that does no more than hide, says which pairs are seen.
    static bool masked(const Call& p) { return p.mask.data || (p.function && p.function->hides); }

    // Reads the mask of a tile; returns whether it leaves anything. A function gets a tile of zeros, and its space.
    bool read_mask(const Panel<Real>& x, int64_t from, int64_t keys, Real* seen, Real* zeros = nullptr,
                   Real* of_function = nullptr) const {
        if (!masked(p)) return true;
        if (p.mask.data) {
            read_pairs(mask, x, from, keys, seen);
            if (!any_seen(keys, seen)) return false;
        }
        if (!p.function || !p.function->hides) return true;
        // why before the products: of a tile in which nobody sees anything there are none.
        const V<Real> one = splat<Real>(1), none = zero<Real>();
        for (int64_t i = 0; i < keys * panel; i += w) store(zeros + i, none);
        call_function(x, from, keys, zeros, nullptr, p.mask.data ? seen : nullptr, of_function);
        for (int64_t i = 0; i < keys * panel; i += w)
            store(seen + i, load(zeros + i) != none ? none : p.mask.data ? load(seen + i) : one);
        return any_seen(keys, seen);
    }

    // Products become scores, in place; capped, if given, gets tanh of softcap, which gradients take.
    void finish(const Panel<Real>& x, int64_t from, int64_t keys, Real* tile, const Real* seen, Real* bias,
                Real* capped = nullptr, Real* of_function = nullptr) const {
        if (p.softcap > 0)
            for (int64_t i = 0; i < keys * panel; i += w) {
                V<Real> t = tanh_<Real>(load(tile + i));
                store(tile + i, t * splat<Real>(Real(p.softcap)));
                if (capped) store(capped + i, t == t ? t : zero<Real>());    // of hidden keys k may be NaN
            }
        if (!masked(p)) seen = nullptr;
        if (p.function && !p.function->hides) call_function(x, from, keys, tile, nullptr, seen, of_function);
        if (p.bias.data) {
            read_pairs(p.bias, x, from, keys, bias);
            // Lanes that are no queries have no bias. why: sums over lanes take their dS, and k may be NaN.
            for (int64_t k = 0; p.d_o.data && k < keys; ++k)
                for (int64_t l = x.lanes; l < panel; ++l) bias[k * panel + l] = -kInfinity<Real>;
            // why not the sum of both: a bias of -inf hides, whatever the score of a k that nobody sees.
            for (int64_t i = 0; i < keys * panel; i += w) {
                V<Real> y = load(bias + i);
                store(tile + i, y == splat<Real>(-kInfinity<Real>) ? y : load(tile + i) + y);
            }
        }
        if (p.alibi_slopes.data) add_alibi(x, from, keys, tile);
        hide_unseen(x, from, keys, tile, seen);
    }

    // A function makes others of the scores of a tile; with ds, the gradient of what it made becomes theirs.
    void call_function(const Panel<Real>& x, int64_t from, int64_t keys, Real* tile, Real* ds,
                       const Real* seen, Real* space, double* sums = nullptr) const {
        p.function->run({this, &x, tile, ds, seen, space, sums, from, keys});
    }

    // Pairs that mask (as it was read; or null), band, spans and blocks hide become -inf.
    void hide_unseen(const Panel<Real>& x, int64_t from, int64_t keys, Real* tile, const Real* seen) const {
        if (seen)
            for (int64_t i = 0; i < keys * panel; i += w)
                store(tile + i,
                      load(seen + i) == zero<Real>() ? splat<Real>(-kInfinity<Real>) : load(tile + i));
        if (x.cut(from, from + keys)) hide(x, from, keys, tile);
        spans.hide(x, from, keys, tile);
        blocks.hide(x, from, keys, tile);
    }

    // Weights that dropout does not keep become 0.
    void drop(const Panel<Real>& x, int64_t from, int64_t keys, Real* tile, Real* second = nullptr) const {
        for (int64_t group = from / 4; group * 4 < from + keys; ++group) {
            Philox<panel> random(p.seed, uint32_t(group), x.query, x.head, uint32_t(s.batch));
            for (int64_t j = most(group * 4, from); j < least(group * 4 + 4, from + keys); ++j) {
                Real* row = tile + (j - from) * panel;
                const uint32_t* word = random.word[j % 4];
                for (int l = 0; l < panel; ++l) row[l] = word[l] < p.dropout_threshold ? Real(0) : row[l];
                if (second)
                    for (int l = 0; l < panel; ++l) {
                        Real* y = second + (j - from) * panel + l;
                        *y = word[l] < p.dropout_threshold ? Real(0) : *y;
                    }
            }
        }
    }

  private:
    static bool any_seen(int64_t keys, const Real* seen) {
        V<Real> found = zero<Real>();
        for (int64_t i = 0; i < keys * panel; i += w) found += load(seen + i);
        return sum(found) > 0;
    }
    void read_pairs(const Tensor& t, const Panel<Real>& x, int64_t from, int64_t keys, Real* tile) const {
        read_panel(tile, t, x.lanes, x.in_pairs(t, s, from), keys, Real(1));
    }
    void add_alibi(const Panel<Real>& x, int64_t from, int64_t keys, Real* tile) const {
        const Tensor& t = p.alibi_slopes;
        for (int j = 0; j < kVectors; ++j) {
            V<Real> slopes = zero<Real>();
            I<Real> position = {};
            for (int l = 0; l < w; ++l) {
                slopes[l] = element<Real>(t.data, s.batch * t.batch + x.head[j * w + l] * t.head);
                position[l] = Int<Real>(x.query[j * w + l] + s.offset);
            }
            for (int64_t k = 0; k < keys; ++k) {
                I<Real> distance = position - Int<Real>(from + k);
                distance = distance < 0 ? -distance : distance;
                Real* row = tile + k * panel + j * w;
                store(row, load(row) - slopes * __builtin_convertvector(distance, V<Real>));
            }
        }
    }
    static void hide(const Panel<Real>& x, int64_t from, int64_t keys, Real* tile) {
        auto hide_rows = [&](int64_t begin, int64_t end) {
            for (int64_t k = begin; k < end; ++k) UNROLL for (int j = 0; j < kVectors; ++j) {
                    I<Real> at = I<Real>{} + Int<Real>(from + k);
                    Real* row = tile + k * panel + j * w;
                    auto inside = (at >= x.first[j]) & (at <= x.last[j]);
                    if (x.two) inside |= (at >= x.second_first[j]) & (at <= x.second_last[j]);
                    store(row, inside ? load(row) : splat<Real>(-kInfinity<Real>));
                }
        };
        // why two ends: between them all lanes see all keys.
        int64_t left = least(most(x.all_from - from, 0), keys);
        hide_rows(0, left), hide_rows(most(least(x.all_to - from, keys), left), keys);
    }
};

// The sum of a row's weights, e^top times `sum`, with its sink. why in double, and why not from LSE: there log(sum) may
// be less than the last bit.
struct Denominator {
    double top, sum;
};
template <class Real>
__attribute__((noinline)) Denominator denominator(const Call& p, int64_t head, Real row_max, Real row_sum) {
    double sink = p.sinks.data ? element<Real>(p.sinks.data, head * p.sinks.head) : -kInfinity<double>;
    double top = row_max > sink ? row_max : sink;
    return {top, row_sum * exp(row_max - top) + exp(sink - top)};
}

// What a row of unnormalised O is multiplied by, and its LSE if anyone asks; unit is a factor of O besides.
template <class Real>
void finish_row(const Call& p, int64_t head, Real row_max, Real row_sum, Real unit, Real* factor, Real* lse) {
    *factor = row_sum == 0 ? 0 : unit / row_sum;
    if (!p.lse.data && !p.sinks.data) return;    // a logarithm takes as long as 100 products
    *lse = row_sum == 0 ? -kInfinity<Real> : Real(row_max + log(row_sum));
    if (!p.sinks.data) return;
    const Denominator all = denominator(p, head, row_max, row_sum);
    if (row_sum != 0) *factor = Real(double(unit) * exp(row_max - all.top) / all.sum);
    *lse = Real(row_sum == 0 ? all.top : all.top + log(all.sum));    // without keys the sink, whatever it is
}
