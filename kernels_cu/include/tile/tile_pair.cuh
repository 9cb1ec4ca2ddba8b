// Tiles of an array and of its tangent, side by side: what a ring streams where both are read in one step, and the
// product that reads each once.
// Design note: docs/kernels/derivatives.md.
#pragma once
#include "tile/mma.cuh"

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
        each([&](const One& one, uint32_t of_tile) { one.start(address + of_tile, first_row); });
    }
    CF_DEVICE void start_once(uint32_t address, int first_row) const {
        each([&](const One& one, uint32_t of_tile) { one.start_once(address + of_tile, first_row); });
    }

  private:
    // why a loop: copies are long in code, and these are the same but for where they come from.
    template <class Act> CF_DEVICE void each(Act act) const {
        One one = array;
#pragma unroll 1
        for (uint32_t of_tile = 0; of_tile <= (has_tangent ? T::kBytes : 0); of_tile += T::kBytes) {
            act(one, of_tile);
            one.matrix.data = tangent.matrix.data, one.matrix.stride_bytes = tangent.matrix.stride_bytes;
        }
    }
};

// s += A B^T and tangent += dotA B^T + A dotB^T, with B and dotB a pair of tiles of 8 kN rows.
// why together: alone, each of the three products would read its A and its B. And all products by B of a step before
// those by dotB: two that add to the same sums are far from each other.
template <class Math, class TileB, int kM, int kN, class RowsA>
CF_DEVICE void multiply_rows_with_tangent(float (&s)[kM][kN][4], float (&tangent)[kM][kN][4], RowsA a,
                                          RowsA a_dot, uint32_t pair_address) {
    constexpr int kAllSteps = TileB::kPitch / 32, kSteps = steps_together<Math>(kAllSteps);
    constexpr int kPairs = kN / 2, kBlocks = kSteps * 2 * kPairs, kAhead = Math::kFloat ? 0 : 2;
    static_assert(TileB::kRows == 8 * kN && kN % 2 == 0, "one block of B makes two n8 columns");
    BlockReader<TileB, Order::chunks_first> b(pair_address);
    // layout: rows of dotB follow those of B.
    const auto load_b = [&](uint32_t (&r)[4], int i) { b.load(r, i % (2 * kPairs) * 16, i / (2 * kPairs)); };
#pragma unroll 1
    for (int done = 0; done < kAllSteps; done += kSteps) {
        uint32_t b_blocks[kBlocks][4];
        CF_UNROLL
        for (int i = 0; i < kAhead; i++) load_b(b_blocks[i], i);
        CF_UNROLL
        for (int step = 0; step < kSteps; step++) {
            typename Math::Fragment a_step[kM], a_dot_step[kM];
            CF_UNROLL
            for (int m = 0; m < kM; m++) {
                uint32_t block[4];
                a.load(block, m, step);
                a_step[m] = Math::prepare(block);
                a_dot.load(block, m, step);
                a_dot_step[m] = Math::prepare(block);
            }
            CF_UNROLL
            for (int pair = 0; pair < 2 * kPairs; pair++) {
                const int i = step * 2 * kPairs + pair;
                if (i + kAhead < kBlocks) load_b(b_blocks[i + kAhead], i + kAhead);
                const auto b_step = Math::prepare(b_blocks[i]);
                const int n = pair % kPairs * 2;
                CF_UNROLL
                for (int m = 0; m < kM; m++) {
                    CF_UNROLL
                    for (int half = 0; half < 2; half++) {
                        if (pair < kPairs) {
                            Math::multiply(s[m][n + half], a_step[m], b_step, half);
                            Math::multiply(tangent[m][n + half], a_dot_step[m], b_step, half);
                        } else {
                            Math::multiply(tangent[m][n + half], a_step[m], b_step, half);
                        }
                    }
                }
            }
        }
        a.advance(kSteps), a_dot.advance(kSteps);
        b.advance(0, kSteps);
    }
}
