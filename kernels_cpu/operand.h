// Keys and values as products read them: in place, or copied block by block.
#pragma once
#include "product.h"

// Keys or values as a product reads them, from key j on.
template <class Entry, class Real = RealOf<Entry>>
struct Operand {
    const Keys<Real>& keys;
    static constexpr bool kPairs = kDepth<Entry> > 1, kTransposed = kPairs && kTiles;

    // Whether each row of bfloat16 can be read as pairs of features in place.
    bool are_pairs() const {
        const Tensor& t = keys.t;
        return t.type == kBf16 && t.column == 1 && keys.width % 2 == 0 && t.row % 2 == 0 &&
               !keys.rotated_on_read;
    }
    // The same, and rows are one stride apart.
    bool rows_are_pairs() const { return are_pairs() && !keys.p.pages; }
    int64_t wide() const { return kPairs ? up(keys.width, kPanel<Real>) : keys.width; }    // of a row
    // Reals of space that `rows`, or `columns`, need for this number of keys.
    int64_t space_of_rows(int64_t count) const {
        return (kPairs ? rows_are_pairs() : keys.in_place()) ? 0 : count * wide();
    }
    int64_t space_of_columns(int64_t count) const {
        if constexpr (kTransposed) return transposed_space(count) + space_of_rows(count);
        return kPairs ? count * up(keys.width, W<Real>) : keys.in_place() ? 0 : count * keys.width;
    }
    int64_t space_of_finite_columns(int64_t count) const {
        return kTransposed ? transposed_space(count) : count * up(keys.width, W<Real>);
    }
    // The depth is features: row i is key j + i.
    const Entry* rows(int64_t j, int64_t count, Real* space, int64_t* step) const {
        if constexpr (!kPairs) return keys.rows(j, count, space, step);
        else {
            if (rows_are_pairs()) {
                *step = keys.t.row / 2;
                return reinterpret_cast<const Entry*>(static_cast<const uint16_t*>(keys.t.data) + keys.at(j));
            }
            keys.rows(j, count, space, step, wide());
            for (int64_t i = 0; i < count; ++i)
                memset(space + i * *step + keys.width, 0, size_t(*step - keys.width) * sizeof(Real));
            return along<Entry>(space, count, *step);
        }
    }
    // What `product_of_keys` takes: row i is key j + i, or two of them, or a feature.
    const Entry* columns(int64_t j, int64_t count, Real* space, int64_t* step) const {
        if constexpr (kTransposed) {
            const Entry* from = rows(j, count, space + transposed_space(count), step);
            return transposed(from, count, space, step);
        }
        if constexpr (kPairs && !kTiles)
            if (rows_are_pairs() && keys.width % W<Real> == 0) return pairs_down(j, count, space, step);
        const Real* rows = keys.rows(j, count, space, step, kPairs ? up(keys.width, W<Real>) : 0);
        return down<Entry>(space, rows, count, keys.width, *step);
    }
    // The same of K for its product with dS; rows of reals are those that `rows` gave.
    const Entry* finite_columns(const Entry* given, int64_t j, int64_t count, Real* space,
                                int64_t* step) const {
        if constexpr (!kPairs) return finite_rows(given, count, keys.width, step, space);
        else if constexpr (kTransposed) {
            const Entry* columns = transposed(given, count, space, step);
            make_finite(reinterpret_cast<Entry*>(space), transposed_space(count));
            return columns;
        } else {
            keys.rows(j, count, space, step, up(keys.width, W<Real>));
            finite_rows<Real>(space, count, keys.width, step, space);
            return down<Entry>(space, space, count, keys.width, *step);
        }
    }

  private:
    // Rows of bfloat16 as pairs along the keys, without becoming reals: half of what would be stored, and stored once.
    const Entry* pairs_down(int64_t j, int64_t count, Real* space, int64_t* step) const {
        const int64_t row = keys.t.row;
        const Bf16* from = static_cast<const Bf16*>(keys.t.data) + keys.at(j);
        Entry* to = reinterpret_cast<Entry*>(space);
        *step = keys.width;
        for (; count >= 2; count -= 2, from += 2 * row, to += *step)
            for (int64_t c = 0; c < *step; c += W<Real>) store(to + c, load_row<Entry>(from + c, row, 0));
        for (int64_t c = 0; count && c < *step; c += W<Real>) {
            Bf16 last[2 * W<Real>] = {};    // and none behind it
            memcpy(last, from + c, sizeof last / 2);
            store(to + c, load_row<Entry>(last, W<Real>, 0));
        }
        return reinterpret_cast<const Entry*>(space);
    }
    int64_t transposed_step(int64_t count) const { return up(count, 2 * kTile) / 2; }
    int64_t transposed_space(int64_t count) const { return up(keys.width, 2) * transposed_step(count); }
    // Of rows *step apart, which becomes that of the result.
    const Entry* transposed(const Entry* rows, int64_t count, Real* space, int64_t* step) const {
        Entry* to = reinterpret_cast<Entry*>(space);
        transpose_pairs(rows, *step, count, keys.width, to, transposed_step(count));
        *step = transposed_step(count);
        return to;
    }
};

// A product whose depth is keys, of what `columns` gave from its key `first` on.
template <int n = kVectors, class Entry, class Real>
INLINE void product_of_keys(const Entry* columns, int64_t step, int64_t first, const Entry* b, Real* c,
                            int64_t rows, int64_t keys, bool add) {
    constexpr int64_t depth = kDepth<Entry>;
    first /= depth, keys = blocks_of(keys, depth);
    if constexpr (Operand<Entry>::kTransposed)
        product<Along::depth, n>(columns + first, step, b, c, rows, keys, add);
    else product<Along::rows, n>(columns + first * step, step, b, c, rows, keys, add);
}
