// Attention over a KV cache on the CPU: few queries, many keys, every key and value read once, at the speed of memory.
//
// Source: Flash-Decoding (Dao and others, 2023).
//   [D1]  append.h: rotate and store the new keys and values, rotate the queries
//   [D2]  for each sequence, key head and chunk of its keys, at once for all rows: queries of the heads that share it
//   [D3]      for each block of keys: S = score(Q K^T); row_max rises; P = e^(S - row_max); O += P V
//   [D4]  O and LSE of a row from those of the chunks, from left to right
//
// For S lanes are keys: W rows of K at a time are transposed in registers. For O lanes are features, in the order of V in
// memory. Where rows fill panels, forward.cpp computes instead, with lanes along queries. Where they do not, and only a mask or
// a bias is per pair, forward.cpp calls this. Blocks, chunks and orders of sums are the same in both, and so are the bits.
//
// Jobs:    (sequence, key head, chunk of the keys).
// Scratch: Q, O and a block of scores, of mask and of bias; a few keys and a block of values if they have to be copied.
//          Values of 16 bits seldom have: they are converted as they are read.
#include "append.h"
#include "chunk.h"
#include "score.h"
#include "softmax.h"

namespace {

constexpr int64_t kBlock = kSpanKeys;         // keys; a multiple of the lanes of any vector
constexpr int64_t kAhead = 32;                // keys of K that are prefetched before they are read; likewise
constexpr int64_t kAloneBytes = 256 << 10;    // keys and values of one thread: 25 us

// Elements from a row of scores to the next: whole panels, as `along` makes pairs of them.
template <class Real>
constexpr int64_t kRowOfScores = up(kBlock, kPanel<Real>);

// What a chunk of keys leaves of the rows of a key head.
template <class Real>
struct Partial {
    Real *row_max, *row_sum;    // (rows)
    Real* o;                    // (rows, up(head_dim_v, W))
};

struct Decode {
    Call& p;
    int64_t chunks;           // of the longest sequence
    char* partials;           // (unit, chunk)
    int64_t partial_bytes;    // of one

    template <class Real>
    Partial<Real> partial(int64_t number, int64_t rows) const {
        Real* x = reinterpret_cast<Real*>(partials + number * partial_bytes);
        return {x, x + rows, x + 2 * rows};
    }
};

// Rows to prefetch between the products. why not all at once: the core would stall until most lines have arrived.
struct Ahead {
    const char* row;
    int64_t step, size;    // bytes: of a row, of an element

    // Prefetches the cache line that begins at feature c, if one does, of some rows. why inline: a call would save all
    // vector registers.
    __attribute__((always_inline)) void prefetch(int64_t c, int rows) const {
        if (row && c * size % 64 == 0)
            _Pragma("GCC unroll 1") for (int y = 0; y < rows; ++y)
                __builtin_prefetch(row + y * step + c * size, 0, 2);
    }
};

// s[row][key] of a vector of keys and m rows. Sums go over features in order, as those of `tile` do.
// Rows of q are `wide` apart, reals or the pairs that those became in place.
template <class Entry, int m, class Real = RealOf<Entry>>
INLINE void dots(const Entry* q, int64_t wide, const Entry* k, int64_t step, Real* s, const Ahead& first,
                 const Ahead& second) {
    constexpr int w = W<Entry>;
    V<Real> x[m];
    UNROLL for (int r = 0; r < m; ++r) x[r] = V<Real>{};
    for (int64_t c = 0; c < wide / kDepth<Entry>; c += w) {
        V<Entry> keys[w];
        UNROLL for (int y = 0; y < w; ++y) keys[y] = load(k + y * step + c);
        transpose<Entry>(keys);
        UNROLL for (int i = 0; i < w; ++i) UNROLL for (int r = 0; r < m; ++r) x[r] =
            add_products<Entry>(x[r], splat_at(q + r * wide + c + i), keys[i]);
        first.prefetch(c * kDepth<Entry>, w), second.prefetch(c * kDepth<Entry>, w);
    }
    UNROLL for (int r = 0; r < m; ++r) store(s + r * kRowOfScores<Real>, x[r]);
}

template <class Entry, class Real = RealOf<Entry>>
INLINE void scores_of(const Entry* q, int64_t rows, int64_t wide, const Entry* k, int64_t step, Real* s,
                      Ahead keys, Ahead values) {
    const Ahead none = {};
    bool both = rows < 8;
    for (; rows >= 4; rows -= 4, q += 4 * wide, s += 4 * kRowOfScores<Real>) {
        dots<Entry, 4>(q, wide, k, step, s, keys, both ? values : none);
        keys = both ? none : values, values = none;
    }
    for (; rows > 0; --rows, q += wide, s += kRowOfScores<Real>) {
        dots<Entry, 1>(q, wide, k, step, s, keys, values);
        keys = values = none;
    }
}

// O (rows, features) += S (rows, keys) V, features n vectors at a time; keys are entries.
template <class Entry, int n, class Value, class Real = RealOf<Entry>>
INLINE void values_of(const Entry* s, const Value* v, int64_t step, Real* o, int64_t wide, int64_t rows,
                      int64_t keys) {
    constexpr int64_t of_s = kRowOfScores<Real>;
    constexpr int narrow_n = n * 4 > 2 * kRows ? 2 : n;    // accumulators of 4 rows that registers hold
    for (; rows >= 4; rows -= 4, s += 4 * of_s, o += 4 * wide)
        UNROLL for (int c = 0; c < n; c += narrow_n) tile<Entry, 4, narrow_n, Along::depth>(
            s, of_s, v + c * W<Real>, step, o + c * W<Real>, wide, keys, true);
    for (; rows > 0; --rows, s += of_s, o += wide)
        tile<Entry, 1, n, Along::depth>(s, of_s, v, step, o, wide, keys, true);
}

// Whether values of a dtype are converted as they are read.
template <class Real>
bool converts_values(Type type) {
    return sizeof(Real) == sizeof(float) && (type == kBf16 || (kConvertsF16 && type == kF16));
}
// Whether V, of floats, is read row by row, without prefetches: the hardware prefetches consecutive rows faster.
// why two rows of O at most: registers hold the sums of no more whole rows.
constexpr int kWholeRow = 8;    // vectors
template <class Real>
constexpr bool in_order(int64_t rows, int64_t wide) {
    return W<Real> == 16 && rows <= 2 && wide == kWholeRow * W<Real>;
}
// The same as values_of of all features; of halves that become floats, `wide` is a multiple of four vectors.
template <class Entry, class Value, class Real = RealOf<Entry>>
__attribute__((noinline)) void add_values(const Entry* s, const Value* v, int64_t step, Real* o, int64_t wide,
                                          int64_t rows, int64_t keys) {
    constexpr int w = W<Real>;
    constexpr int64_t of_s = kRowOfScores<Real>;
    if constexpr (sizeof(Value) == sizeof(float) && W<Real> == 16)
        if (in_order<Real>(rows, wide)) {
            if (rows == 2) tile<Entry, 2, kWholeRow, Along::depth>(s, of_s, v, step, o, wide, keys, true);
            else tile<Entry, 1, kWholeRow, Along::depth>(s, of_s, v, step, o, wide, keys, true);
            return;
        }
    int64_t c = 0;
    for (; c + 4 * w <= wide; c += 4 * w) values_of<Entry, 4>(s, v + c, step, o + c, wide, rows, keys);
    if constexpr (sizeof(Value) == sizeof(Real) || kDepth<Entry> > 1)
        for (; c < wide; c += w) values_of<Entry, 1>(s, v + c, step, o + c, wide, rows, keys);
}

// ---- [D2]

// The rows of a key head over a chunk of its keys.
template <class Entry>
struct KeyChunk {
    using Real = RealOf<Entry>;
    static constexpr int64_t w = W<Real>, depth = kDepth<Entry>, of_scores = kRowOfScores<Real>;
    static constexpr bool pairs = depth > 1;
    Call& p;
    const Sequence& s;
    const int64_t head_k, begin, end;    // keys that any row may see
    const Partial<Real> sums;
    const int64_t group = p.heads_q / p.heads_k, rows = s.queries * group, d = p.head_dim, dv = p.head_dim_v;
    const int64_t wide = up(d, w* depth), wide_v = up(dv, w), element_bytes = bytes_of(p.k.type);
    Keys<Real> keys{p, p.k, s, head_k, d, p.rotate_cache != 0};
    const Keys<Real> values{p, p.v, s, head_k, dv};
    const Score<Real> score{p, s, head_k};
    // A vector of keys may cross pages that are no multiple of it, a pair odd ones; below it, runs are not worth their
    // start.
    const bool crosses = p.pages && p.page % w, short_pages = p.pages && (p.page < w || p.page % depth);
    const bool k_in_place = pairs ? Operand<Entry>{keys}.are_pairs() : keys.as_they_are();
    const bool k_copied = !k_in_place || d % (w * depth) || crosses;
    const bool halves = p.v.column == 1 && converts_values<Real>(p.v.type) && (pairs || dv % (4 * w) == 0);
    const bool v_copied = !(halves || (!pairs && values.as_they_are())) || dv % w || short_pages;
    Real *q = nullptr, *scores = nullptr, *k_space = nullptr, *v_space = nullptr, *slopes = nullptr,
         *seen = nullptr, *bias = nullptr;    // mask and bias of a row and a block

    void lay_out(pool::Scratch& x) {
        x.allocate(q, rows * wide), x.allocate(scores, rows * of_scores), x.allocate(slopes, rows);
        x.allocate(k_space, w * wide), x.allocate(v_space, v_copied ? kBlock * wide_v : pairs ? wide_v : 0);
        x.allocate(seen, p.mask.data ? kBlock : 0), x.allocate(bias, p.bias.data ? kBlock : 0);
        x.allocate(keys.cos_row, p.rotary / 2), x.allocate(keys.sin_row, p.rotary / 2);
    }

    // What a mask or bias has for row r and the keys of a block from one to another.
    void read_pairs(const Tensor& t, int64_t r, int64_t block, int64_t from, int64_t to, Real* x) const {
        if (!t.data) return;
        int64_t head = head_k * group + r % group, n = least(to, s.keys - block) - from;
        widen(x + from, t.data,
              s.batch * t.batch + head * t.head + r / group * t.row + (block + from) * t.column, n, t.column,
              t.type);
    }

    // Q times its factor, as entries.
    const Entry* read_queries() {
        const Real factor = score.factor_of_q(kRounds<Entry>);
        const Tensor& t = p.alibi_slopes;
        memset(q, 0, size_t(rows * wide) * sizeof(Real)), memset(k_space, 0, size_t(w * wide) * sizeof(Real));
        if (v_copied || pairs) memset(v_space, 0, size_t((v_copied ? kBlock : 1) * wide_v) * sizeof(Real));
        for (int64_t r = 0; r < rows; ++r) {
            int64_t head = head_k * group + r % group, row = s.first_q + r / group;
            widen(q + r * wide, p.q.data, s.batch * p.q.batch + head * p.q.head + row * p.q.row, d,
                  p.q.column, p.q.type);
            for (int64_t c = 0; c < wide; c += w) store(q + r * wide + c, load(q + r * wide + c) * factor);
            slopes[r] = t.data ? element<Real>(t.data, s.batch * t.batch + head * t.head) : 0;
        }
        return along<Entry>(q, rows, wide);
    }

    // S = Q K^T of the keys from first to last of a block, and prefetches of what comes next.
    __attribute__((noinline)) void multiply_keys(const Entry* q_rows, int64_t block, int64_t first,
                                                 int64_t last) {
        // why copies: as members they would be read again after each store of scores.
        const int64_t rows = this->rows, wide = this->wide, size = element_bytes;
        const bool v_ahead_too = p.v.column == 1 && !(size == 4 && in_order<Real>(rows, wide_v)),
                   k_ahead_too = p.k.column == 1;
        const auto bytes = [size](const Keys<Real>& of, int64_t j) {
            return static_cast<const char*>(of.t.data) + of.at(j) * size;
        };
        for (int64_t j = first; j < last; j += w) {
            int64_t n = least(w, last - j), step;
            const Entry* k;
            if (k_copied || n < w || keys.hidden(j)) {
                keys.copy(j, n, k_space, wide);
                k = along<Entry>(k_space, n, wide), step = wide;
            } else {
                k = reinterpret_cast<const Entry*>(bytes(keys, j)), step = p.k.row / depth;
            }
            // V of these keys is read after the block's scores, K soon. why not both a block ahead: the
            // first block of each chunk, a quarter of it, would not be prefetched.
            int64_t later = j + kAhead;
            Ahead k_ahead{}, v_ahead{};
            if (later + w <= end && k_ahead_too && !keys.hidden(later))
                k_ahead = {bytes(keys, later), p.k.row * size, size};
            if (n == w && v_ahead_too && !values.hidden(j))
                v_ahead = {bytes(values, j), p.v.row * size, size};
            scores_of(q_rows, rows, wide, k, step, scores + (j - block), k_ahead, v_ahead);
        }
    }

    // Products of row r become scores, in place; x + y is that of key block + y. Returns the largest.
    __attribute__((always_inline)) Real finish_scores(int64_t r, int64_t block, int64_t from, int64_t to) {
        Real* x = scores + r * of_scores;
        score.scale(x + from, to - from, kRounds<Entry>);
        read_pairs(p.bias, r, block, from, to, bias), read_pairs(score.mask, r, block, from, to, seen);
        I<Real> numbers;
        UNROLL for (int l = 0; l < w; ++l) numbers[l] = l;
        const Real softcap = Real(p.softcap);
        const bool capped = p.softcap > 0, has_alibi = p.alibi_slopes.data, paged = p.pages, each = crosses;
        const int64_t position = s.offset + r / group;
        const int64_t low = most(begin, position - p.left), high = least(end, position + p.right + 1);
        V<Real> top = splat(-kInfinity<Real>);
        for (int64_t y = from; y < to; y += w) {
            int64_t j = block + y;
            V<Real> z = load(x + y);
            if (capped) z = tanh_<Real>(z) * splat(softcap);
            if (p.bias.data) {
                // why not the sum of both: see score.h.
                V<Real> added = load(bias + y);
                z = added == splat(-kInfinity<Real>) ? added : z + added;
            }
            if (has_alibi) {
                I<Real> distance = Int<Real>(position - j) - numbers;
                distance = distance < 0 ? -distance : distance;
                z -= slopes[r] * __builtin_convertvector(distance, V<Real>);
            }
            if (p.mask.data) z = load(seen + y) == zero<Real>() ? splat(-kInfinity<Real>) : z;
            if (j < low || j + w > high || each || (paged && keys.hidden(j)))
                for (int l = 0; l < w; ++l)
                    if (j + l < low || j + l >= high || hidden(j, l)) z[l] = -kInfinity<Real>;
            store(x + y, z);
            top = bigger(z, top);
        }
        Real highest = top[0];
        for (int l = 1; l < w; ++l) highest = top[l] > highest ? top[l] : highest;
        return highest;
    }

    // Scores of row r become weights; what was summed under a lower maximum is multiplied.
    __attribute__((always_inline)) void weigh(int64_t r, Real highest, int64_t from, int64_t to) {
        Real *x = scores + r * of_scores, *o = sums.o + r * wide_v, &row_max = sums.row_max[r];
        highest = risen_max<Real>(splat(row_max), splat(highest))[0];
        Real finite = highest == -kInfinity<Real> ? 0 : highest;
        if (highest != row_max) {
            Real by = exp_<Real>(splat<Real>(row_max - finite))[0];
            sums.row_sum[r] *= by, row_max = highest;
            for (int64_t c = 0; c < wide_v; c += w) store(o + c, load(o + c) * by);
        }
        for (int64_t y = from; y < to; y += w) store(x + y, exp_<Real>(load(x + y) - splat(finite)));
    }

    // P = e^(S - row_max) of all rows.
    __attribute__((noinline)) void weigh_all(int64_t block, int64_t from, int64_t to) {
        for (int64_t r = 0; r < rows; ++r) weigh(r, finish_scores(r, block, from, to), from, to);
    }

    // row_sum += rowsum(P), in the order of keys. why four rows: an addition waits for the one before it.
    void sum_weights(int64_t from, int64_t to) {
        for (int64_t r = 0; r < rows; r += 4) {
            const int64_t last_row = least(r + 3, rows - 1);
            const Real* x[4];
            Real total[4];
            for (int i = 0; i < 4; ++i) {
                const int64_t row = least(r + i, last_row);
                x[i] = scores + row * of_scores, total[i] = sums.row_sum[row];
            }
            for (int64_t y = from; y < to; ++y) UNROLL for (int i = 0; i < 4; ++i) total[i] += x[i][y];
            for (int i = 0; r + i <= last_row; ++i) sums.row_sum[r + i] = total[i];
        }
    }

    // O += P V of the keys from first to last of a block, run by run of what lies in one page.
    void multiply_values(int64_t block, int64_t first, int64_t last) {
        const Entry* weights = along<Entry>(scores, rows, of_scores);
        for (int64_t j = first, stop; j < last; j = stop) {
            stop = short_pages ? last : least(last, values.page_end(j));
            if (!short_pages && values.hidden(j)) continue;
            bool alone = pairs && stop - j == 1;    // a key that has no other to be a pair with
            if (!v_copied && !alone) stop -= (stop - j) % depth;
            const auto add = [&](const auto* v, int64_t step) {
                add_values(weights + (j - block) / depth, v, step, sums.o, wide_v, rows,
                           blocks_of(stop - j, depth));
            };
            if (v_copied || alone) {
                values.copy(j, stop - j, v_space, wide_v);
                add(down<Entry>(v_space, v_space, stop - j, wide_v, wide_v), wide_v);
            } else if (!halves) {
                if constexpr (!pairs) add(values.address(j), p.v.row);
            } else if constexpr (sizeof(Real) == sizeof(float)) {
                if (p.v.type == kBf16) add(static_cast<const Bf16*>(p.v.data) + values.at(j), p.v.row);
                else if constexpr (kConvertsF16 && !pairs)
                    add(static_cast<const F16*>(p.v.data) + values.at(j), p.v.row);
            }
        }
    }

  private:
    // Whether the l-th key from j on is outside the cache.
    bool hidden(int64_t j, int l) const { return keys.hidden(crosses && j + l < s.keys ? j + l : j); }
};

template <class Entry>
void decode_job(void* what, int64_t number) {
    using Real = RealOf<Entry>;
    constexpr int64_t w = W<Real>;
    const Decode& f = *static_cast<Decode*>(what);
    Call& p = f.p;
    int64_t chunk = number % f.chunks, unit = number / f.chunks;
    const Sequence s(p, unit / p.heads_k);
    int64_t rows = s.queries * (p.heads_q / p.heads_k);
    const Partial<Real> sums = f.partial<Real>(number, rows);
    for (int64_t r = 0; r < rows; ++r) sums.row_max[r] = -kInfinity<Real>, sums.row_sum[r] = 0;
    memset(sums.o, 0, size_t(rows * up(p.head_dim_v, w)) * sizeof(Real));
    int64_t begin = most(most(s.unseen, s.offset - p.left), chunk * kChunkKeys);
    int64_t end = least(least(s.keys, s.offset + s.queries + p.right), (chunk + 1) * kChunkKeys);
    if (begin >= end || !rows) return;

    KeyChunk<Entry> x{p, s, unit % p.heads_k, begin, end, sums};
    pool::Scratch scratch(p, [&](pool::Scratch& space) { x.lay_out(space); });
    if (!scratch) return;
    const Entry* q = x.read_queries();
    for (int64_t block = begin / kBlock * kBlock; block < end && !pool::stopped(p);
         block += kBlock) {    // [D3]
        // why a multiple of W: then a vector of keys crosses no page that is one too.
        int64_t first = most(block, begin / w * w), last = least(block + kBlock, end);
        int64_t from = first - block, to = up(last - block, w);
        x.multiply_keys(q, block, first, last);
        x.weigh_all(block, from, to);
        x.sum_weights(from, to);
        x.multiply_values(block, first, last);
    }
}

// ---- [D4]

template <class Real>
RARE void combine_job(void* what, int64_t unit) {
    constexpr int64_t w = W<Real>;
    const Decode& f = *static_cast<Decode*>(what);
    const Call& p = f.p;
    int64_t b = unit / p.heads_k, head_k = unit % p.heads_k, group = p.heads_q / p.heads_k;
    const Sequence s(p, b);
    int64_t wide_v = up(p.head_dim_v, w), rows = s.queries * group;
    const Partial<Real> first = f.partial<Real>(unit * f.chunks, rows);
    Real unit_of = 1;
    if (p.v_scale.data)
        unit_of = element<Real>(p.v_scale.data, b * p.v_scale.batch + head_k * p.v_scale.head);
    for (int64_t r = 0; r < rows; ++r) {
        Real* o = first.o + r * wide_v;
        Rows<Real> all = {splat(first.row_max[r]), splat(first.row_sum[r])};
        for (int64_t chunk = 1; chunk < f.chunks; ++chunk) {
            const Partial<Real> x = f.partial<Real>(unit * f.chunks + chunk, rows);
            if (x.row_sum[r] == 0) continue;    // nothing seen
            merge<Real>(all, o, {splat(x.row_max[r]), splat(x.row_sum[r])}, x.o + r * wide_v, wide_v / w, w);
        }
        Real factor = 0, lse = 0;
        int64_t head = head_k * group + r % group, row = s.first_q + r / group;
        finish_row(p, head, all.row_max[0], all.row_sum[0], unit_of, &factor, &lse);
        for (int64_t c = 0; c < wide_v; c += w)
            // why + 0: keys that other rows of a panel see add 0, which turns -0 into 0; see write_panel.
            store(o + c, factor == 0 ? zero<Real>() : load(o + c) * factor + zero<Real>());
        narrow(p.o.data, b * p.o.batch + head * p.o.head + row * p.o.row, o, p.head_dim_v, p.o.column,
               p.o.type);
        if (p.lse.data)
            static_cast<Real*>(p.lse.data)[b * p.lse.batch + head * p.lse.head + row * p.lse.row] = lse;
    }
}

template <class Entry>
RARE void decode(Call& p) {
    using Real = RealOf<Entry>;
    int64_t units = p.batch * p.heads_k, rows = p.seqlen_q * (p.heads_q / p.heads_k);
    if (p.new_k.data) pool::run(p, append_job<Real>, &p, units);
    void* rotated = p.rotary ? rotate_queries<Real>(p) : nullptr;
    if (!few_rows(p)) {
        if (!pool::stopped(p)) cupy_flash_forward(&p);
        free(rotated);
        return;
    }
    int64_t most_keys = 1, all_keys = 0, bytes = (p.head_dim + p.head_dim_v) * bytes_of(p.k.type);
    for (int64_t b = 0; b < p.batch; ++b) {
        int64_t keys = Sequence(p, b).keys;
        most_keys = most(most_keys, keys), all_keys += keys;
    }
    if (all_keys * p.heads_k * bytes < kAloneBytes) p.threads = 1;    // sooner done than another one is awake
    Decode f{p, blocks_of(most_keys, kChunkKeys), nullptr,
             up(rows * (2 + up(p.head_dim_v, W<Real>)) * int64_t(sizeof(Real)), 64)};
    f.partials = static_cast<char*>(allocate_aligned(64, size_t(units * f.chunks * f.partial_bytes)));
    if (!f.partials) p.state = kNoMemory;
    if (!pool::stopped(p)) pool::run(p, decode_job<Entry>, &f, units * f.chunks);
    if (!pool::stopped(p)) pool::run(p, combine_job<Real>, &f, units);
    free_aligned(f.partials), free(rotated);
}

}    // namespace

int32_t cupy_flash_decode(Call* p) {
#if defined(__AVX512BF16__)    // a library of its own
    decode<Pair>(*p);
#else
    if (p->wide) decode<double>(*p);
    else decode<float>(*p);
#endif
    return p->state;
}
