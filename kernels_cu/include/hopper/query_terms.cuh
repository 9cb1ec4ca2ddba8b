// LSE and delta of the queries of a tile, which the helpers of the Hopper backward kernels write and consumers
// read. Either as floats that lanes read:
//   ReadTerms         kStages tiles of them. LSE as log2; +inf where P is 0: of rows past the end, and without keys.
// or as rows of an operand, which the tensor cores subtract from S and dP:
//   SubtractedTerms   one tile: S = K Q^T - LSE / scale and dP = V dO^T - delta are products one step deeper.
// why subtracted: every lane of a warp needs LSE and delta of all queries, and 4 bytes to each lane are a cycle of
// shared memory; products read them once for 64 rows, and P and dS are a subtraction shorter.
// Design note: docs/kernels/backward_sm90.md.
#pragma once
#include "hopper/warpgroup.cuh"

template <int kStages, int kQueries> struct ReadTerms {
    static constexpr int kPlaces = cdiv(kQueries, 32) * 32;    // whole warps of them
    float lse_log2[kStages][kPlaces], delta[kStages][kPlaces];

    CF_DEVICE static float unit_of_lse(float) { return kLog2e; }
    static constexpr float kWithoutKeys = kInfinity;
    CF_DEVICE void put(bool is_lse, int stage, int row, float x) {
        st_shared(smem_addr((is_lse ? lse_log2 : delta)[stage] + row), x);
    }
    CF_DEVICE uint32_t address(bool is_lse, int stage) const {
        return smem_addr((is_lse ? lse_log2 : delta)[stage]);
    }
    CF_DEVICE static void end() {}
    CF_DEVICE static void units(uint32_t (&)[1][4]) {}
    template <int n> CF_DEVICE static void subtract(float (&)[n], const uint32_t (&)[1][4], bool) {}
};

// A number x is four 16-bit numbers, x = sum of unit(i) * part(i), as exact as float, and below 2^31; parts are columns
// of the operand B, and A has the units, negative, in every row.
// layout: 16 bytes of a query, four parts and four zeros, of all queries one after the other; first LSE / scale, then
// delta, then zeros. A product is 16 columns deep, and for the last 8, which A multiplies by 0, takes the 8 queries
// after each 8. why: both terms have the same A, and the consumers no registers for two.
template <class Element_, int kQueries> struct SubtractedTerms {
    using Element = Element_;
    alignas(128) Element data[2 * kQueries + 8][8];

    CF_DEVICE static constexpr float unit(int part) {
        return part == 0 ? 32768.0f : part == 1 ? 16.0f : part == 2 ? 1.0f / 128 : 1.0f / 262144;
    }
    CF_DEVICE static float unit_of_lse(float scale) {
        const float inverse = rcp(scale);
        return fmaf(fmaf(-scale, inverse, 1.0f), inverse, inverse);
    }
    // why any finite one: the mask leaves such rows no weight, and rows past the end have no dO.
    static constexpr float kWithoutKeys = 0.0f;
    // By a warp, once, before products read what follows delta.
    CF_DEVICE void end() {
        if (threadIdx.x % 32 < 8)
            st_shared(smem_addr(data[2 * kQueries + threadIdx.x % 32]), uint4{0, 0, 0, 0});
    }
    CF_DEVICE void put(bool is_lse, int, int row, float x) {
        if (row >= kQueries) return;
        float part[4];
        CF_UNROLL
        for (int i = 0; i < 4; i++) {
            part[i] = widen(narrow<Element>(x * (1 / unit(i))));
            x = fmaf(part[i], -unit(i), x);
        }
        st_shared(smem_addr(data[(is_lse ? 0 : kQueries) + row]),
                  uint4{pack<Element>(part[0], part[1]), pack<Element>(part[2], part[3]), 0, 0});
        fence_proxy_async();
    }
    CF_DEVICE static uint32_t address(bool, int) { return 0; }    // is not read

    // The operand A. layout: lane t of four has columns 2 t and 2 t + 1 of eight, which are registers 0 and 1, and of
    // the next eight, registers 2 and 3.
    CF_DEVICE static void units(uint32_t (&a)[1][4]) {
        const int t = threadIdx.x % 4;
        const uint32_t mine = t == 0   ? pack<Element>(-unit(0), -unit(1))
                              : t == 1 ? pack<Element>(-unit(2), -unit(3))
                                       : 0;
        CF_UNROLL
        for (int i = 0; i < 4; i++) a[0][i] = opaque(i < 2 ? mine : 0);
    }
    struct Rows : Operand {
        using Element = Element_;
        static constexpr bool kTrans = false;
        static constexpr int kExtent = kQueries, kSteps = 1;
        CF_DEVICE explicit Rows(const Element (&first)[8])
            : Operand(matrix_descriptor(smem_addr(first), 128, 128, 16)) {}
        CF_DEVICE uint64_t step(int) const { return descriptor; }
    };
    // d -= LSE / scale, or delta, as one more of the products that d is made of.
    template <int n> CF_DEVICE void subtract(float (&d)[n], const uint32_t (&a)[1][4], bool is_lse) const {
        multiply(d, a, Rows(data[is_lse ? 0 : kQueries]), true);
    }
};

template <bool kSubtracted, class Element, int kStages, int kQueries> struct TermsOf {
    using Type = ReadTerms<kStages, kQueries>;
};
template <class Element, int kStages, int kQueries> struct TermsOf<true, Element, kStages, kQueries> {
    using Type = SubtractedTerms<Element, kQueries>;
};
