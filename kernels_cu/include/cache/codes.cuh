// Caches of 4-bit codes in groups of features: of integers, feature f of a key is scale[f / group] * code +
// zero[f / group]; of NVFP4, scale[f / 16] * E2M1.
// Design note: docs/kernels/decode.md.
//
// layout: a byte is two codes, feature 2i its lower half. A segment is 32 features, 16 bytes, with one scale and one zero
// (groups are of 32, 64 or 128 features), or with two scales of E2M1. Units are the scales and zeros of a step of keys.
// Codes become operands in registers (integers.cuh, e2m1.cuh). why not in shared memory: its bandwidth would bound decode.
//   K, whose rows are columns of B: a lane (g, t) gets word t of the segment of key g. Nibbles j of its two
//   halves are features 8t + j and 8t + 4 + j, a register of B; two steps of depth 16 take the four.
//   V, whose rows are k of B: transposed, a lane gets 16 bits g of the segment of keys 2t and 2t + 1. Nibble j
//   is feature 4g + j of both keys, b0 or b1 of n8 product j.
// So features change places, in Q (read_for_codes) and in O (store_for_codes).
#pragma once
#include "cache/slots.cuh"
#include "cache/stored.cuh"
#include "tile/mma.cuh"

constexpr int kSegment = 32;

// Whether lanes keep their shared memory addresses in registers. why: the compiler would compute them again in every step,
// ten instructions of a loop that is bound by issue. why not of 8 segments: there are too few registers.
constexpr bool addresses_in_registers(int segments) { return segments < 8; }

// What a feature is: one number by one thread; of E2M1 without the scale of its head.
template <Stored kStored, class Acc> struct CodedRow {
    const uint8_t* codes;
    int64_t column;    // stride of codes, in bytes
    const Units& units;
    int64_t first;

    CF_DEVICE CodedRow(const Tensor& cache, const Units& units, int32_t slot, int32_t head, int32_t row)
        : codes(static_cast<const uint8_t*>(cache.data) + slot * cache.batch + head * cache.head +
                row * cache.row),
          column(cache.column), units(units), first(slot * units.slot + head * units.head + row * units.row) {
    }
    CF_DEVICE Acc at(int32_t feature) const {
        const uint8_t two = codes[feature / 2 * column];
        const uint32_t code = feature % 2 ? two >> 4 : two & 15;
        const int64_t group = first + (feature >> units.group_bits);
        if constexpr (kStored == Stored::nvfp4)
            return Acc(widen_one<Stored::e4m3>(static_cast<const uint8_t*>(units.scale)[group])) *
                   Acc(widen_e2m1(code));
        else
            return Acc(widen(static_cast<const __half*>(units.scale)[group])) * static_cast<Acc>(code) +
                   Acc(widen(static_cast<const __half*>(units.zero)[group]));
    }
};

// A chunk of a row of Q in the order of features that multiply_by_rows wants: chunk 4 c + 2 s + h of a
// row holds, in its elements 2t and 2t + 1, features 8t + 2s + h and 4 more of segment c.
template <class Element> CF_DEVICE uint4 read_for_codes(const Element* row, int chunk, int columns) {
    alignas(16) Element part[8];
    const int first = chunk / 4 * kSegment + chunk % 4;
    CF_UNROLL
    for (int i = 0; i < 8; i++) part[i] = first < columns ? ld_global_nc(row + first + 4 * i) : Element(0.0f);
    return reinterpret_cast<const uint4&>(part);
}

// One of the two rows of a thread of such a product, into floats in the order of features; `half` is which.
template <int kN> CF_DEVICE void store_for_codes(uint32_t row, const float (&d)[kN][4], int half) {
    CF_UNROLL
    for (int segment = 0; segment < kN / 4; segment++) {
        CF_UNROLL
        for (int i = 0; i < 2; i++) {
            const int e = 2 * half + i, feature = segment * kSegment + threadIdx.x % 4 * 8 + 4 * i;
            st_shared(row + 4 * feature, float4{d[4 * segment][e], d[4 * segment + 1][e],
                                                d[4 * segment + 2][e], d[4 * segment + 3][e]});
        }
    }
}

// What a warp has beside its tiles: units of kStages steps, of K and then of V, and kKept bytes for the whole loop.
template <bool kCodes, int kStages, int kKeyBytes, int kValueBytes, int kKept> struct UnitRing {
    enum : int {
        kOfKeys = kKeyBytes,
        kUnitBytes = kKeyBytes + kValueBytes,
        kRingBytes = round_up<int>(kStages * kUnitBytes, 128) + kKept
    };
    alignas(128) uint8_t units[kRingBytes];
};
template <int kStages, int kKeyBytes, int kValueBytes, int kKept>
struct UnitRing<false, kStages, kKeyBytes, kValueBytes, kKept> {
    enum : int { kOfKeys = 0, kUnitBytes = 0, kRingBytes = 0 };
};

// The scores of a step become P, and O is rescaled if the maximum of a row has risen. why the test: a step over codes is
// bound by issue, not by memory, and a maximum seldom rises.
template <class Tiles, class Softmax, class ValueUnits, int kN>
CF_DEVICE void softmax_rescale_o(Tiles& tiles, Softmax& softmax, float (&rS)[1][2][4], float (&rO)[1][kN][4],
                                 const ValueUnits& v_units, int32_t step) {
    const float rescale[2] = {softmax.softmax_row(rS, 0, 0, kLog2e), softmax.softmax_row(rS, 0, 1, kLog2e)};
    const bool drop_factor = v_units.drops_factor(step);
    if (__any_sync(0xffffffffu, drop_factor || rescale[0] != 1.0f || rescale[1] != 1.0f))
        tiles.rescale_o(rO, rescale, drop_factor);
}

// ---- appending: a row by one warp, which is whole; at(f) is feature f

// Integers: code 0 is the lowest feature of a group, 15 the highest, by scale and zero as they are stored.
template <class Acc, class Feature>
CF_DEVICE void store_integers(uint8_t* codes, int64_t column, const Units& units, int64_t first,
                              int32_t columns, Feature at) {
    const int32_t lane = threadIdx.x % 32;
    const int32_t group = 1 << units.group_bits;
    for (int32_t begin = 0; begin < columns; begin += group) {
        Acc low = at(begin + lane), high = low;
        for (int32_t i = kSegment; i < group; i += kSegment) {
            const Acc x = at(begin + i + lane);
            low = x < low ? x : low, high = x > high ? x : high;
        }
        CF_UNROLL
        for (int step = 16; step > 0; step /= 2) {
            const Acc other_low = __shfl_xor_sync(0xffffffffu, low, step);
            const Acc other_high = __shfl_xor_sync(0xffffffffu, high, step);
            low = other_low < low ? other_low : low, high = other_high > high ? other_high : high;
        }
        const __half zero = narrow<__half>(low), scale = narrow<__half>((high - low) / Acc(15));
        if (lane == 0) {
            static_cast<__half*>(units.zero)[first + (begin >> units.group_bits)] = zero;
            static_cast<__half*>(units.scale)[first + (begin >> units.group_bits)] = scale;
        }
        const Acc by = Acc(widen(scale)), start = Acc(widen(zero));
        for (int32_t i = 0; i < group; i += kSegment) {
            const float x = by > 0 ? rintf(static_cast<float>((at(begin + i + lane) - start) / by)) : 0.0f;
            const uint32_t code = static_cast<uint32_t>(fminf(fmaxf(x, 0.0f), 15.0f));
            const uint32_t next = __shfl_xor_sync(0xffffffffu, code, 1);
            if (lane % 2 == 0)
                codes[(begin + i + lane) / 2 * column] = static_cast<uint8_t>(code | next << 4);
        }
    }
}

// E2M1: the largest of 16 features is 6, by the scale as it is stored. Two groups at a time.
template <class Acc, class Feature>
CF_DEVICE void store_e2m1(uint8_t* codes, int64_t column, const Units& units, int64_t first, int32_t columns,
                          Feature at) {
    const int32_t lane = threadIdx.x % 32;
    for (int32_t begin = 0; begin < columns; begin += kSegment) {
        const int32_t feature = begin + lane;
        const Acc x = feature < columns ? at(feature) : Acc(0), size = x < 0 ? -x : x;
        Acc largest = size;
        CF_UNROLL
        for (int step = 8; step > 0; step /= 2) {
            const Acc other = __shfl_xor_sync(0xffffffffu, largest, step);
            largest = other > largest ? other : largest;
        }
        const uint8_t scale = narrow_e4m3(static_cast<float>(largest / Acc(6)));
        const Acc by = Acc(widen_one<Stored::e4m3>(scale));
        const uint32_t own = by > 0 ? narrow_e2m1(static_cast<float>(size / by)) | uint32_t(x < 0) << 3 : 0u;
        const uint32_t next = __shfl_xor_sync(0xffffffffu, own, 1);
        if (feature >= columns) continue;
        if (lane % 16 == 0) static_cast<uint8_t*>(units.scale)[first + (feature >> 4)] = scale;
        if (lane % 2 == 0) codes[feature / 2 * column] = static_cast<uint8_t>(own | next << 4);
    }
}

template <Stored kStored, class Acc, class Feature>
CF_DEVICE void store_codes(const Tensor& cache, const Units& units, int32_t slot, int32_t head, int32_t row,
                           int32_t columns, Feature at) {
    uint8_t* codes =
        static_cast<uint8_t*>(cache.data) + slot * cache.batch + head * cache.head + row * cache.row;
    const int64_t first = slot * units.slot + head * units.head + row * units.row;
    if constexpr (kStored == Stored::nvfp4) store_e2m1<Acc>(codes, cache.column, units, first, columns, at);
    else store_integers<Acc>(codes, cache.column, units, first, columns, at);
}
