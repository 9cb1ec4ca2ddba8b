// Block masks: which blocks of queries and keys a table marks as empty, and which pairs of partial blocks are visible.
//
// Blocks of a table and blocks of a pass have different sizes: a tile is cut to the keys between the first and the last
// group of eight that any of its queries sees, and other masked pairs are hidden one by one.
#pragma once
#include "panel.h"

// Ranges of queries and heads, those of a panel. why not the Panel: floats and doubles share this code, and the library
// stays small.
struct BlockRows {
    int32_t query_first, query_last, head_first, head_last;
};

// The row of the table for a query of a head, from the block of key 0 on.
inline const int32_t* block_row(const Blocks& t, int64_t batch, int64_t head, int64_t query) {
    return t.table + batch * t.batch + head * t.head + (query >> t.log_queries) * t.row;
}

// Which of the 8 keys from key j on a query of a row sees, a bit each; j is a multiple of 8.
inline unsigned eight_keys(const Blocks& t, const int32_t* row, int64_t query, int64_t j) {
    int64_t code = row[(j >> t.log_keys) * t.column];
    if (code < 2) return code ? 255 : 0;
    int64_t line = ((code - 2) << t.log_queries) + (query & ((1 << t.log_queries) - 1));
    return t.bits[((line << t.log_keys) + (j & ((1 << t.log_keys) - 1))) / 8];
}

// Which of the 8 keys from key j on any of the rows may see, a bit each; j is a multiple of 8.
__attribute__((noinline)) inline unsigned eight_keys(const Blocks& t, int64_t batch, BlockRows x, int64_t j) {
    unsigned seen = 0;
    for (int64_t head = x.head_first; head <= x.head_last; ++head)
        for (int64_t i = x.query_first; i <= x.query_last && seen != 255; ++i)
            seen |= eight_keys(t, block_row(t, batch, head, i), i, j);
    return seen;
}

// Cuts keys to those between the first and the last eight that any of the rows may see; without any, from >= to.
__attribute__((noinline)) inline void trim_blocks(const Blocks& t, int64_t batch, BlockRows x, int64_t* from,
                                                  int64_t* to) {
    // log2 of the keys around key j that can be skipped at once: those of an empty block, or eight; 0 if it may be seen.
    const auto unseen = [&](int64_t j) {
        bool seen = false;
        for (int64_t head = x.head_first; head <= x.head_last; ++head)
            for (int64_t m = x.query_first >> t.log_queries; m <= x.query_last >> t.log_queries; ++m)
                seen |= block_row(t, batch, head, m << t.log_queries)[(j >> t.log_keys) * t.column] != 0;
        return !seen ? t.log_keys : eight_keys(t, batch, x, j & ~int64_t(7)) ? 0 : 3;
    };
    while (*from < *to)
        if (int n = unseen(*from)) *from = ((*from >> n) + 1) << n;
        else break;
    while (*from < *to)
        if (int n = unseen(*to - 1)) *to = (*to - 1) >> n << n;
        else break;
}

// The blocks of one sequence, over panels of any heads.
template <class Real>
struct KeyBlocks {
    const Call& p;
    const Sequence& s;

    __attribute__((noinline)) void trim(const Panel<Real>& x, int64_t* from, int64_t* to) const {
        const Blocks& t = p.blocks;
        // why one head: without an axis of heads they all have its rows.
        if (t.table)
            trim_blocks(t, s.batch,
                        {x.query[0], x.query[x.lanes - 1], x.head_low, t.head ? x.head_high : x.head_low},
                        from, to);
    }
    // Whether any query of a panel sees any of the keys.
    bool reach(const Panel<Real>& x, int64_t from, int64_t to) const {
        trim(x, &from, &to);
        return from < to;
    }
    // Hides the pairs of a tile that blocks do not keep.
    __attribute__((noinline)) void hide(const Panel<Real>& x, int64_t from, int64_t keys, Real* tile) const {
        const Blocks& t = p.blocks;
        if (!t.table) return;
        for (int64_t l = 0; l < kPanel<Real>; ++l) {
            const int32_t* row = block_row(t, s.batch, x.head[l], x.query[l]);
            for (int64_t j = from & ~int64_t(7); j < from + keys; j += 8)
                for (unsigned hidden = 255 & ~eight_keys(t, row, x.query[l], j); hidden;
                     hidden &= hidden - 1) {
                    int64_t i = j + __builtin_ctz(hidden) - from;
                    if (i >= 0 && i < keys) tile[i * kPanel<Real> + l] = -kInfinity<Real>;
                }
        }
    }
};
