// Blocks of queries and keys: which a table leaves out, and which pairs of the others their bits keep.
//
// Blocks of a table and blocks of a pass are of different sizes: a tile is cut to the keys between the first and the last
// block that any of its queries sees, and what is left is hidden pair by pair.
#pragma once
#include "panel.h"

// Queries and heads that have a table's rows in common: those of a panel. why no Panel: one code for floats and doubles,
// and the library is to stay small.
struct BlockRows {
    int32_t query_first, query_last, head_first, head_last;
};

// The row of the table that a query of a head has, from the block of key 0 on.
inline const int32_t* block_row(const Blocks& t, int64_t batch, int64_t head, int64_t query) {
    return t.table + batch * t.batch + head * t.head + (query >> t.log_queries) * t.row;
}

// Cuts keys to those between the first and the last that any of the rows may see.
__attribute__((noinline)) inline void trim_blocks(const Blocks& t, int64_t batch, BlockRows x, int64_t* from,
                                                  int64_t* to) {
    const auto seen = [&](int64_t j) {
        for (int64_t head = x.head_first; head <= x.head_last; ++head)
            for (int64_t m = x.query_first >> t.log_queries; m <= x.query_last >> t.log_queries; ++m)
                if (block_row(t, batch, head, m << t.log_queries)[(j >> t.log_keys) * t.column]) return true;
        return false;
    };
    while (*from < *to && !seen(*from)) *from = least(*to, ((*from >> t.log_keys) + 1) << t.log_keys);
    while (*from < *to && !seen(*to - 1)) *to = most(*from, (*to - 1) >> t.log_keys << t.log_keys);
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
        for (int64_t j = from, next; t.table && j < from + keys; j = next) {
            int64_t n = j >> t.log_keys, first = n << t.log_keys;
            next = least(from + keys, first + (int64_t(1) << t.log_keys));
            for (int64_t l = 0; l < kPanel<Real>; ++l) {
                int64_t code = block_row(t, s.batch, x.head[l], x.query[l])[n * t.column];
                if (code == 1) continue;
                int64_t row = ((code - 2) << t.log_queries) + (x.query[l] & ((1 << t.log_queries) - 1));
                const uint8_t* bits = t.bits + (row << t.log_keys) / 8;
                for (int64_t i = j; i < next; ++i)
                    if (!code || !(bits[(i - first) / 8] >> (i - first) % 8 & 1))
                        tile[(i - from) * kPanel<Real> + l] = -kInfinity<Real>;
            }
        }
    }
};
