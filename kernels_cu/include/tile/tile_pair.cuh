// Tiles of an array and of its tangent, side by side: what a ring streams where both are read in one step.
#pragma once
#include "tile/tile.cuh"

// layout: the tile of the array, then that of its tangent.
template <class T> struct TilePair {
    enum : int { kRows = T::kRows, kBytes = 2 * T::kBytes };
};

// Rows of both. without a tangent those of the array stand for it, and are not copied.
template <class Element> struct RowsPair {
    GlobalRows<Element> array, tangent;
    bool has_tangent;
};

template <class T, int kThreads> struct TileLoader<TilePair<T>, kThreads> {
    using One = TileLoader<T, kThreads>;
    enum : int { kCopies = 2 * One::kCopies };
    One array, tangent;
    bool has_tangent;

    CF_DEVICE explicit TileLoader(const RowsPair<typename T::Element>& of)
        : array(of.array), tangent(of.tangent), has_tangent(of.has_tangent) {
        array.agree(tangent);
    }
    template <class Other> CF_DEVICE void agree(Other& other) {
        array.agree(other.array);
        tangent.agree(array);
        other.tangent.agree(array);
    }
    CF_DEVICE void start(uint32_t address, int first_row) const {
        array.start(address, first_row);
        if (has_tangent) tangent.start(address + T::kBytes, first_row);
    }
};
