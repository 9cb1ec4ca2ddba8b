// Queries by panels: a panel has kPanel lanes, each the query of one head of the group that shares a key head.
//
// layout: row r of a key head is query r / group of head r % group, so that grouped heads fill panels even where
// queries are few. Columns are (feature or key) x kPanel, rows are as in memory.
#pragma once
#include "convert.h"

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
constexpr int64_t blocks_of(int64_t n, int64_t block) { return (n + block - 1) / block; }
constexpr int64_t up(int64_t n, int64_t block) { return blocks_of(n, block) * block; }

// Whether a key head has so few rows, below three quarters of a panel of AVX2, that decode.cpp is faster. Of what belongs
// to pairs, it only knows masks and biases.
inline bool few_rows(const Call& p) {
    bool others = p.spans.data || p.blocks.table || p.function || p.dropout_threshold;
    return p.seqlen_q * (p.heads_q / p.heads_k) < 12 && !others;
}

// Keys that a sequence brings to its cache.
inline int64_t new_keys(const Call& p, int64_t b) {
    return p.starts_new ? p.starts_new[b + 1] - p.starts_new[b] : p.appended;
}

// One sequence of the batch, and where its rows begin.
struct Sequence {
    int64_t batch, first_q, first_k, queries, keys, unseen, offset;    // unseen: keys before those that count
    __attribute__((noinline)) Sequence(const Call& p, int64_t b)    // why: every job has one, and size counts
        : batch(b), first_q(0), first_k(0), queries(p.seqlen_q), keys(p.seqlen_k), unseen(0) {
        if (p.starts_q) first_q = p.starts_q[b], queries = p.starts_q[b + 1] - first_q;
        if (p.starts_k) first_k = p.starts_k[b], keys = p.starts_k[b + 1] - first_k;
        if (p.used_q) queries = p.used_q[b];
        if (p.used_k) keys = least(least(most(p.used_k[b * p.used_step], 0), keys) + new_keys(p, b), keys);
        if (p.leftpad) unseen = most(p.leftpad[b], 0);
        offset = p.offset + (p.offset_from_end ? keys - queries : 0);
    }
};

template <class Real>
struct LaneOffsets {
    int64_t of[kPanel<Real>];    // in elements
};

// A panel of queries: the head and query of each lane, and the keys that it sees.
template <class Real>
struct Panel {
    static constexpr int kLanes = kPanel<Real>;
    int64_t lanes;    // that are queries; the others are not written
    int32_t query[kLanes], head[kLanes];
    int32_t head_low, head_high;
    I<Real> first[kVectors], last[kVectors];    // keys that a lane sees, inclusive
    I<Real> second_first[kVectors],
        second_last[kVectors];    // and, of two intervals, those of the second one
    bool two;                     // whether there are two
    int64_t begin, end;           // keys that any lane sees
    int64_t all_from, all_to;     // keys that all lanes see

    // Rows r0 to r1 of heads first_head, first_head + 1, ...; one head at a time if group is 1.
    __attribute__((noinline))    // why: as of Sequence
    Panel(const Call& p, const Sequence& s, int64_t first_head, int64_t group, int64_t r0, int64_t r1) {
        lanes = least(r1 - r0, kLanes);
        int64_t i = r0 / group, member = r0 - i * group;
        head_low = head_high = int32_t(first_head + member), two = false;
        for (int64_t l = 0; l < kLanes; ++l) {
            query[l] = int32_t(i), head[l] = int32_t(first_head + member);
            int64_t at = i + s.offset;
            // why no other limits: of a panel so far from the keys `begin` and `end` leave none.
            first[l / W<Real>][l % W<Real>] = Int<Real>(most(at - p.left, s.unseen));
            last[l / W<Real>][l % W<Real>] = Int<Real>(least(at + p.right, s.keys));
            head_low = head[l] < head_low ? head[l] : head_low,
            head_high = head[l] > head_high ? head[l] : head_high;
            if (l + 1 < lanes && ++member == group) member = 0, ++i;    // lanes behind the last one repeat it
        }
        int64_t low = query[0] + s.offset, high = query[lanes - 1] + s.offset;
        begin = most(s.unseen, low - p.left), end = least(s.keys, high + p.right + 1);
        all_from = most(s.unseen, high - p.left), all_to = least(s.keys, low + p.right + 1);
        if (p.spans.data && p.spans.by_query) meet_spans(p, s);
    }
    uint32_t mask() const { return uint32_t((uint64_t(1) << lanes) - 1); }    // of the lanes that are queries
    bool cut(int64_t from, int64_t to) const { return from < all_from || to > all_to; }
    // Where the rows of all lanes begin in a tensor of queries, or of pairs, which has no first row.
    LaneOffsets<Real> in(const Tensor& t, const Sequence& s) const { return in(t, s, s.first_q, 0); }
    LaneOffsets<Real> in_pairs(const Tensor& t, const Sequence& s, int64_t key) const {
        return in(t, s, 0, key);
    }

  private:
    // Cuts the keys of the lanes to their spans. [all_from, all_to) is in the interval that leaves more keys.
    __attribute__((noinline)) void meet_spans(const Call& p, const Sequence& s) {
        const Spans& t = p.spans;
        int64_t any_from = end, any_to = begin, from[2] = {all_from, all_from}, to[2] = {all_to, all_to};
        two = t.intervals == 2;
        for (int64_t l = 0; l < kLanes; ++l) {
            const int32_t* at = t.data + s.batch * t.batch + head[l] * t.head + query[l] * t.row;
            int64_t v = l / W<Real>, e = l % W<Real>, lane_first = first[v][e], lane_last = last[v][e];
            for (int n = 0; n < t.intervals; ++n) {
                int64_t a = most(at[2 * n * t.column], lane_first);
                int64_t b = least(at[(2 * n + 1) * t.column] - 1, lane_last);
                (n ? second_first : first)[v][e] = Int<Real>(a),
                                    (n ? second_last : last)[v][e] = Int<Real>(b);
                if (a <= b) any_from = least(any_from, a), any_to = most(any_to, b + 1);
                from[n] = most(from[n], a), to[n] = least(to[n], b + 1);
            }
        }
        int n = two && to[1] - from[1] > to[0] - from[0];
        begin = most(begin, any_from), end = least(end, any_to), all_from = from[n], all_to = to[n];
    }
    LaneOffsets<Real> in(const Tensor& t, const Sequence& s, int64_t first_row, int64_t column) const {
        LaneOffsets<Real> x;
        for (int64_t l = 0; l < kLanes; ++l)
            x.of[l] =
                s.batch * t.batch + head[l] * t.head + (first_row + query[l]) * t.row + column * t.column;
        return x;
    }
};

// Whether rows of a tensor, of reals or of bfloat16, are read and written in place by vectors.
template <class Real>
bool by_vectors(const Tensor& t) {
    bool halves = sizeof(Real) == sizeof(float) && t.type == kBf16;
    return t.column == 1 && (halves || t.type == (sizeof(Real) == 4 ? kF32 : kF64));
}
template <class Real>
INLINE V<Real> load_from(const Tensor& t, int64_t at) {
    if constexpr (sizeof(Real) == sizeof(float))
        if (t.type == kBf16) return load_bf16(t.data, at);
    return load(static_cast<const Real*>(t.data) + at);
}
template <class Real>
INLINE void store_to(const Tensor& t, int64_t at, V<Real> x) {
    if constexpr (sizeof(Real) == sizeof(float))
        if (t.type == kBf16) return store_bf16(t.data, at, x);
    store(static_cast<Real*>(t.data) + at, x);
}

// Row l of a panel begins at at.of[l]; its `width` elements become columns times a factor. natural, if given, gets the
// rows too, natural_step apart, 0 behind their ends. Lanes that are no queries are 0.
template <class Real>
__attribute__((noinline)) void read_panel(Real* columns, const Tensor& t, int64_t lanes,
                                          const LaneOffsets<Real>& at, int64_t width, Real factor,
                                          Real* natural = nullptr, int64_t natural_step = 0) {
    constexpr int w = W<Real>, panel = kPanel<Real>;
    const bool in_place = by_vectors<Real>(t);
    Real space[w][w];
    for (int g = 0; g < panel; g += w) {
        if (natural)
            for (int l = 0; l < w; ++l) {
                Real* row = natural + (g + l) * natural_step;
                int64_t filled = g + l < lanes ? width : 0;
                if (filled) widen(row, t.data, at.of[g + l], width, t.column, t.type);
                memset(row + filled, 0, size_t(natural_step - filled) * sizeof(Real));
            }
        for (int64_t c = 0; c < width; c += w) {
            V<Real> x[w];
            int64_t n = least(w, width - c);
            if (natural) {
                for (int l = 0; l < w; ++l) x[l] = load(natural + (g + l) * natural_step + c);
            } else if (n == w && in_place && g + w <= lanes) {
                for (int l = 0; l < w; ++l) x[l] = load_from<Real>(t, at.of[g + l] + c);
            } else {
                memset(space, 0, sizeof space);
                for (int l = 0; l < least(w, lanes - g); ++l)
                    widen(space[l], t.data, at.of[g + l] + c * t.column, n, t.column, t.type);
                for (int l = 0; l < w; ++l) x[l] = load(space[l]);
            }
            transpose<Real>(x);
            for (int64_t i = 0; i < n; ++i) store(columns + (c + i) * panel + g, x[i] * factor);
        }
    }
}

// The other way: columns times a factor of each lane become rows.
template <class Real>
__attribute__((noinline)) void write_panel(const Real* columns, const Real* factor, const Tensor& t,
                                           int64_t lanes, const LaneOffsets<Real>& at, int64_t width) {
    constexpr int w = W<Real>, panel = kPanel<Real>;
    const bool in_place = by_vectors<Real>(t);
    Real row[w];
    for (int g = 0; g < lanes; g += w) {
        V<Real> by = load(factor + g);
        int64_t count = least(w, lanes - g);
        for (int64_t c = 0; c < width; c += w) {
            V<Real> x[w];
            int64_t n = least(w, width - c);
            // why: a row that sees no key is 0, whatever was added up with weights of 0.
            for (int i = 0; i < w; ++i) {
                V<Real> y = i < n ? load(columns + (c + i) * panel + g) : zero<Real>();
                // why + 0: keys that other rows of a panel see add 0, which turns -0 into 0.
                x[i] = by == zero<Real>() ? zero<Real>() : y * by + zero<Real>();
            }
            transpose<Real>(x);
            for (int l = 0; l < count; ++l) {
                if (in_place && n == w) {
                    store_to<Real>(t, at.of[g + l] + c, x[l]);
                    continue;
                }
                store(row, x[l]);
                narrow(t.data, at.of[g + l] + c * t.column, row, n, t.column, t.type);
            }
        }
    }
}

// The same of some lanes, one by one.
template <class Real>
RARE void write_lanes(const Real* columns, const Real* factor, const Tensor& t, uint32_t lanes,
                      const LaneOffsets<Real>& at, int64_t width) {
    constexpr int64_t w = W<Real>, panel = kPanel<Real>;
    Real row[w];
    for (int64_t l = 0; l < panel; ++l)
        for (int64_t c = 0; lanes >> l & 1 && c < width; c += w) {
            int64_t n = least(w, width - c);
            for (int64_t i = 0; i < n; ++i)
                row[i] = factor[l] == 0 ? Real(0) : columns[(c + i) * panel + l] * factor[l] + Real(0);
            narrow(t.data, at.of[l] + c * t.column, row, n, t.column, t.type);
        }
}

// Rotates features of a row by the angles of a position.
template <class Real>
__attribute__((noinline)) void rotate(const Call& p, Real* x, int64_t position, Real* cos_row,
                                      Real* sin_row) {
    int64_t half = p.rotary / 2;
    x += p.first_rotated;
    const Tensor &c = p.rotary_cos, &s = p.rotary_sin;
    position = least(most(position, 0), p.positions - 1);
    widen(cos_row, c.data, position * c.row, half, c.column, c.type);
    widen(sin_row, s.data, position * s.row, half, s.column, s.type);
    for (int64_t i = 0; i < half; ++i) {
        Real &left = x[p.interleaved ? 2 * i : i], &right = x[p.interleaved ? 2 * i + 1 : i + half];
        Real a = left, b = right;
        left = a * cos_row[i] - b * sin_row[i], right = b * cos_row[i] + a * sin_row[i];
    }
}

// Keys or values of a sequence and a head, contiguous or in the pages of a cache.
template <class Real>
struct Keys {
    const Call& p;
    const Tensor& t;
    const Sequence& s;
    int64_t head, width;
    bool rotated_on_read = false;                   // rotated when they are read
    Real *cos_row = nullptr, *sin_row = nullptr;    // space for it

    // Whether products can read the rows of a page in place.
    bool as_they_are() const {
        return !rotated_on_read && t.column == 1 && t.type == (sizeof(Real) == 4 ? kF32 : kF64);
    }
    bool in_place() const { return as_they_are() && !p.pages; }
    // The first key behind j that is in another page.
    int64_t page_end(int64_t j) const { return p.pages ? (j / p.page + 1) * p.page : INT64_MAX; }
    int64_t slot(int64_t j) const { return p.pages[s.batch * p.page_row + j / p.page * p.page_column]; }
    // Whether the page of key j is outside the cache: the key is then masked and not read.
    bool hidden(int64_t j) const { return p.pages && (slot(j) < 0 || slot(j) >= p.slots); }
    int64_t at(int64_t j) const { return at(j, t); }
    __attribute__((noinline)) int64_t at(int64_t j, const Tensor& t) const {    // why: size counts
        if (p.pages) {
            // why the bounds again: another thread may have written to the table since `hidden` read it.
            int64_t inside = most(least(slot(j), p.slots - 1), 0);
            return inside * t.batch + head * t.head + j % p.page * t.row;
        }
        return s.batch * t.batch + head * t.head + (s.first_k + j) * t.row;
    }
    const Real* address(int64_t j) const { return static_cast<const Real*>(t.data) + at(j); }

    // Keys from j on as reals, *step apart: in place if possible, else copied to space, hidden ones as 0.
    const Real* rows(int64_t j, int64_t count, Real* space, int64_t* step, int64_t space_step = 0) const {
        if (as_they_are() && j + count <= page_end(j) && !hidden(j)) {
            *step = t.row;
            return address(j);
        }
        *step = space_step ? space_step : width;
        Real* row = space;
        for (int64_t i = j; i < j + count;) {
            int64_t end = least(j + count, page_end(i)), from = hidden(i) ? -1 : at(i);
            for (bool absent = hidden(i); i < end; ++i, row += *step, from += t.row)
                if (absent) memset(row, 0, size_t(width) * sizeof(Real));
                else {
                    if (t.type == kCodes) read_codes(row, i);
                    else widen(row, t.data, from, width, t.column, t.type);
                    if (rotated_on_read) rotate(p, row, i, cos_row, sin_row);
                }
        }
        return space;
    }
    // The same, always copied, what is behind each row as it was.
    void copy(int64_t j, int64_t count, Real* space, int64_t step) const {
        int64_t from_step;
        const Real* from = rows(j, count, space, &from_step, step);
        for (int64_t y = 0; from != space && y < count; ++y)
            memcpy(space + y * step, from + y * from_step, size_t(width) * sizeof(Real));
    }
    // Key j of a cache of 4 bits, to and from reals, which are floats.
    const Codes& codes() const { return &t == &p.k ? p.k_codes : p.v_codes; }
    void read_codes(Real* row, int64_t j) const {
        const Codes& c = codes();
        if constexpr (sizeof(Real) == sizeof(float))
            widen_codes(row, static_cast<const uint8_t*>(t.data) + at(j), width, c, at(j, c.scale),
                        at(j, c.zero));
    }
    void write_codes(const Real* row, int64_t j) const {
        const Codes& c = codes();
        if constexpr (sizeof(Real) == sizeof(float))
            narrow_codes(static_cast<uint8_t*>(t.data) + at(j), row, width, c, at(j, c.scale), at(j, c.zero));
    }
    // Begins to bring a range into the cache.
    void fetch(int64_t from, int64_t to) const {
        constexpr int64_t size = sizeof(Real);
        if (!in_place()) return;
        const char* row = reinterpret_cast<const char*>(static_cast<const Real*>(t.data) + at(from));
        for (int64_t j = from; j < to; ++j, row += t.row * size)
            for (int64_t c = 0; c < width * size; c += 64) __builtin_prefetch(row + c, 0, 2);
    }
};

// Whether rows of `words` words, `step` apart, of floats or doubles, have numbers only: infinities and NaN have all bits of
// an exponent, to which its lowest bit adds a sign.
__attribute__((noinline)) inline bool all_finite(const void* rows, int64_t count, int64_t words, int64_t step,
                                                 bool wide) {
    constexpr int w = W<float>;
    U<float> exponent = {}, lowest = {}, found = {};
    for (int l = 0; l < w; ++l)
        if (!wide || l % 2)
            exponent[l] = wide ? 0x7ff00000 : 0x7f800000, lowest[l] = wide ? 0x00100000 : 0x00800000;
    uint32_t rest = 0;
    if (step == words) words *= count, count = 1;
    for (; count > 0; --count, rows = static_cast<const float*>(rows) + step) {
        int64_t c = 0;
        for (; c + w <= words; c += w)
            found |= ((U<float>)load(static_cast<const float*>(rows) + c) & exponent) + lowest;
        for (; c < words; ++c) rest |= (element<uint32_t>(rows, c) & exponent[c % 2]) + lowest[c % 2];
    }
    for (int l = 0; l < w; ++l) rest |= found[l];
    return rest >> 31 == 0;
}
template <class Real>
RARE void copy_finite(const Real* rows, int64_t count, int64_t width, int64_t step, Real* to,
                      int64_t to_step) {
    for (int64_t i = 0; i < count; ++i)
        for (int64_t c = 0; c < width; ++c) {
            Real x = rows[i * step + c];
            to[i * to_step + c] = x * 0 == 0 ? x : 0;
        }
}
// Rows of K, *step apart, as they multiply dS: where any of them is infinite or NaN, copies in `space` with 0 for that.
// why: dS of a hidden pair is 0, or of one whose infinite k makes a score of -inf, and 0 times NaN is not. A row that any
// other of them makes a score of has a dS of NaN itself.
template <class Real>
const Real* finite_rows(const Real* rows, int64_t count, int64_t width, int64_t* step, Real* space) {
    constexpr int64_t words = sizeof(Real) / sizeof(float);
    if (all_finite(rows, count, width * words, *step * words, words == 2)) return rows;
    int64_t to_step = rows == space ? *step : width;
    copy_finite(rows, count, width, *step, space, to_step);
    *step = to_step;
    return space;
}
