// Spans by key: the intervals of queries that see a key, tile by tile. (By query they bound the lanes of a panel, in
// panel.h, as the band does.)
//
// Tiles begin at multiples of kSpanKeys keys. Before the first job, minima and maxima of the bounds are taken for each of
// these blocks of keys. A few comparisons then say whether a tile is empty, whole or cut.
#pragma once
#include "tiles.h"
#include <stdlib.h>

constexpr int64_t kSpanKeys = kTiles ? 192 : 144;    // whole tiles of products, along keys and features

// What the keys of a block have in common in one of their intervals, none of which is empty for `all`.
struct SpanLimits {
    int32_t first, end;            // queries that any key has
    int32_t all_first, all_end;    // that all keys have
};

class SpanTable {
  public:
    __attribute__((noinline)) explicit SpanTable(Call& call) : p_(call) {
        const Spans& t = p_.spans;
        if (!t.data || t.by_query || p_.spans_at_end) return;
        int64_t batches = t.batch ? p_.batch : 1, heads = t.head ? p_.heads_q : 1;
        int64_t blocks = blocks_of(p_.seqlen_k, kSpanKeys), count = batches * heads * blocks * t.intervals;
        auto* table = static_cast<SpanLimits*>(malloc(size_t(most(count, 1)) * sizeof(SpanLimits)));
        p_.span_limits = table;
        if (!table) p_.state = kNoMemory;
        for (int64_t i = 0; table && i < count; ++i) {
            int64_t n = i % t.intervals, j0 = i / t.intervals % blocks * kSpanKeys,
                    bh = i / t.intervals / blocks;
            const int32_t* row = t.data + bh / heads * t.batch + bh % heads * t.head + 2 * n * t.column;
            SpanLimits x = {INT32_MAX, 0, 0, INT32_MAX};
            for (int64_t j = j0; j < least(j0 + kSpanKeys, p_.seqlen_k); ++j) {
                int32_t start = row[j * t.row], stop = row[j * t.row + t.column];
                bool some = start < stop;
                x.first = some && start < x.first ? start : x.first,
                x.end = some && stop > x.end ? stop : x.end;
                x.all_first = start > x.all_first ? start : x.all_first;
                x.all_end = stop < x.all_end ? stop : x.all_end;
            }
            table[i] = x;
        }
    }
    ~SpanTable() { free(p_.span_limits), p_.span_limits = nullptr; }
    SpanTable(const SpanTable&) = delete;

  private:
    Call& p_;
};

// The spans of one sequence, over panels of any heads. why noinline: the tiles of every pass and precision call
// it, and the library stays small.
template <class Real>
struct KeySpans {
    const Call& p;
    const Sequence& s;

    bool there() const { return p.spans.data && !p.spans.by_query; }
    // Whether any query of a panel sees any key of the block that j is in.
    __attribute__((noinline)) bool reach(const Panel<Real>& x, int64_t j) const {
        return !there() || any_limits(x, j, [&](const SpanLimits& y) {
            return y.first <= x.query[x.lanes - 1] && y.end > x.query[0];
        });
    }
    // Cuts the keys of a tile to those between the first and the last that a query of the panel may see.
    __attribute__((noinline)) void trim(const Panel<Real>& x, int64_t* from, int64_t* to) const {
        if (*from >= *to || !there()) return;
        if (!reach(x, *from)) {
            *to = *from;
            return;
        }
        if (whole(x, *from)) return;
        while (*from < *to && !touches(x, *from)) ++*from;
        while (*from < *to && !touches(x, *to - 1)) --*to;
    }
    // Hides the pairs of a tile that no interval keeps.
    __attribute__((noinline)) void hide(const Panel<Real>& x, int64_t from, int64_t keys, Real* tile) const {
        constexpr int w = W<Real>, panel = kPanel<Real>;
        if (!there() || whole(x, from)) return;
        I<Real> query[kVectors];
        for (int l = 0; l < panel; ++l) query[l / w][l % w] = Int<Real>(x.query[l]);
        for (int64_t k = most(first_key() - from, 0); k < keys; ++k) {
            Real* row = tile + k * panel;
            if (x.head_low == x.head_high || !p.spans.head) {
                const int32_t* at = bounds(x.head_low, from + k);
                if (all_see(x, at)) continue;
                UNROLL for (int j = 0; j < kVectors; ++j) {
                    I<Real> inside = {};
                    for (int64_t n = 0; n < 2 * p.spans.intervals; n += 2)
                        inside |= (query[j] >= Int<Real>(at[n * p.spans.column])) &
                                  (query[j] < Int<Real>(at[(n + 1) * p.spans.column]));
                    store(row + j * w, inside ? load(row + j * w) : splat<Real>(-kInfinity<Real>));
                }
            } else {
                for (int l = 0; l < panel; ++l)
                    if (!sees(bounds(x.head[l], from + k), x.query[l], x.query[l])) row[l] = -kInfinity<Real>;
            }
        }
    }

  private:
    // The key that the first spans are of; those before it all see.
    int64_t first_key() const { return p.spans_at_end ? s.offset : 0; }
    const int32_t* bounds(int64_t head, int64_t j) const {
        return p.spans.data + s.batch * p.spans.batch + head * p.spans.head + (j - first_key()) * p.spans.row;
    }
    // Whether an interval has any of the queries first to last.
    __attribute__((noinline)) bool sees(const int32_t* at, int32_t first, int32_t last) const {
        bool any = false;
        for (int64_t n = 0; n < 2 * p.spans.intervals; n += 2) {
            int32_t start = at[n * p.spans.column], stop = at[(n + 1) * p.spans.column];
            any |= (start <= last) & (stop > first) & (start < stop);
        }
        return any;
    }
    bool all_see(const Panel<Real>& x, const int32_t* at) const {
        bool all = false;
        for (int64_t n = 0; n < 2 * p.spans.intervals; n += 2)
            all |= (at[n * p.spans.column] <= x.query[0]) &
                   (at[(n + 1) * p.spans.column] > x.query[x.lanes - 1]);
        return all;
    }
    __attribute__((noinline)) bool touches(const Panel<Real>& x, int64_t j) const {
        if (j < first_key()) return true;
        for (int64_t head = x.head_low; head <= (p.spans.head ? x.head_high : x.head_low); ++head)
            if (sees(bounds(head, j), x.query[0], x.query[x.lanes - 1])) return true;
        return false;
    }
    // Whether a test holds for any interval of any head of a panel, of the block of key j; true without limits.
    template <class Test>
    bool any_limits(const Panel<Real>& x, int64_t j, Test test) const {
        const Spans& t = p.spans;
        if (!p.span_limits) return true;
        int64_t blocks = blocks_of(p.seqlen_k, kSpanKeys), b = t.batch ? s.batch : 0;
        for (int64_t head = t.head ? x.head_low : 0; head <= (t.head ? x.head_high : 0); ++head) {
            const SpanLimits* at =
                p.span_limits +
                ((b * (t.head ? p.heads_q : 1) + head) * blocks + j / kSpanKeys) * t.intervals;
            for (int64_t n = 0; n < t.intervals; ++n)
                if (test(at[n])) return true;
        }
        return false;
    }
    // Whether all queries of a panel see all keys of the block of key j, as far as its limits tell.
    __attribute__((noinline)) bool whole(const Panel<Real>& x, int64_t j) const {
        if (!p.span_limits || (p.spans.head && x.head_low != x.head_high)) return false;
        return any_limits(x, j, [&](const SpanLimits& y) {
            return y.all_first <= x.query[0] && y.all_end > x.query[x.lanes - 1];
        });
    }
};
