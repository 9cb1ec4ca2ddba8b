// Tiles of a cache whose numbers are elements in shared memory, as they came or widened: the products of a warp. It has
// the members of IntegerTiles and E2m1Tiles, so that a kernel need not ask what the cache holds.
// Design note: docs/kernels/decode.md.
#pragma once
#include "cache/slots.cuh"
#include "tile/mma.cuh"
#include "tile/online_softmax.cuh"

// Of elements there are no scales or zeros beside the tiles.
struct NoUnits {
    enum : int { kBytes = 0 };

    CF_DEVICE NoUnits(const Units&, int32_t, int32_t) {}
    CF_DEVICE static void load(const Units&, int32_t, int32_t, int32_t, int32_t, int32_t) {}
    CF_DEVICE static void store(uint32_t, int32_t) {}
    CF_DEVICE static bool drops_factor(int32_t) { return false; }
};

template <class Math, class T> struct ElementTiles {
    enum : int { kKeptBytes = 0 };
    using KeyUnits = NoUnits;
    using ValueUnits = NoUnits;

    template <class RowsA> CF_DEVICE ElementTiles(RowsA, uint32_t) {}
    template <class RowsA>
    CF_DEVICE static void multiply_by_rows(float (&d)[1][2][4], const RowsA& a, uint32_t tile, uint32_t) {
        ::multiply_by_rows<Math, T>(d, a, tile);
    }
    template <int kN>
    CF_DEVICE static void multiply_by_columns(float (&d)[1][kN][4], const float (&a)[1][2][4], uint32_t tile,
                                              uint32_t) {
        ::multiply_by_columns<Math, T>(d, a, tile);
    }
    template <int kN> CF_DEVICE static void finalize(float (&)[1][kN][4], const NoUnits&, int32_t) {}
};

// The scores of a step become P, and O follows the maxima of its rows.
template <class Math, class T, class Softmax, int kN>
CF_DEVICE void softmax_rescale_o(ElementTiles<Math, T>&, Softmax& softmax, float (&rS)[1][2][4],
                                 float (&rO)[1][kN][4], const NoUnits&, int32_t) {
    softmax.softmax_rescale_o(rS, rO, kLog2e);
}
