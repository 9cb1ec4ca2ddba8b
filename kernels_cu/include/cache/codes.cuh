// Caches of 4-bit codes in groups of features: of integers, feature f of a key is scale[f / group] * code +
// zero[f / group]; of NVFP4, scale[f / 16] * E2M1.
//
// layout: a byte is two codes, feature 2i its lower half. A span is 32 features, 16 bytes: those of a span have one
// scale and one zero, for groups are 32, 64 or 128, or two scales of E2M1: a word of shared memory in either case,
// its lower half the scale or that of features 0 to 15. Codes become 16-bit elements in registers, as operands of
// a product; they never lie in shared memory as such, whose bandwidth would be what decode waits for.
//   K, whose rows are columns of B: a lane (g, t) gets word t of the span of key g. Nibbles j of its two
//   halves are features 8t + j and 8t + 4 + j, a register of B; two steps of depth 16 take the four.
//   V, whose rows are k of B: transposed, a lane gets 16 bits g of the span of keys 2t and 2t + 1. Nibble j
//   is feature 4g + j of both keys, b0 or b1 of n8 product j.
// So features change places, in Q (read_for_codes) and in O (store_for_codes).
#pragma once
#include "cache/slots.cuh"
#include "cache/stored.cuh"
#include "tile/mma.cuh"

constexpr int kSpan = 32;

// Constants of a kind that stay in registers through the loop. why from shared memory: a constant that ptxas knows it
// makes anew for every operation, at another instruction each.
template <Stored kStored> struct Kept {};
template <> struct Kept<Stored::int4> {
    uint32_t at_1024 = 0x64006400u, at_64 = 0x54005400u;
};

// What codes of a kind are, two at a time: nibble j of both halves of a register, as a pair of elements in units of
// kUnit. Made of the words of units of the key that both are of, or of two keys.
template <Stored kStored, class Element> struct Nibbles;

// scale * code + zero, rounded once.
//
// why: a code or'ed into the mantissa of 1024 or, four bits higher, of 64 is that number plus the code; what is
// taken off is exact. f16: three operations for two elements and half a shift. bf16: no sum of bf16 holds the
// scale's 11 bits, so floats multiply.
template <class Element> struct Nibbles<Stored::int4, Element> {
    uint32_t scale, zero;

    CF_DEVICE static Nibbles of_key(uint32_t word) {
        return {permute_bytes(word, 0, 0x1010), permute_bytes(word, 0, 0x3232)};
    }
    CF_DEVICE static Nibbles of_keys(uint2 words) {
        return {permute_bytes(words.x, words.y, 0x5410), permute_bytes(words.x, words.y, 0x7632)};
    }
    CF_DEVICE uint32_t at(uint32_t x, int j, const Kept<Stored::int4>& kept) const {
        const uint32_t of = j < 2 ? x : x >> 8;
        const uint32_t bits = j % 2 ? (of & 0x00f000f0u) | kept.at_64 : (of & 0x000f000fu) | kept.at_1024;
        const __half2 offset = __float2half2_rn(j % 2 ? 64.0f : 1024.0f);
        const __half2 code = __hsub2(reinterpret_cast<const __half2&>(bits), offset);
        const __half2 scales = reinterpret_cast<const __half2&>(scale);
        const __half2 zeros = reinterpret_cast<const __half2&>(zero);
        if constexpr (kSame<Element, __half>) {
            const __half2 value = __hfma2(scales, code, zeros);
            return reinterpret_cast<const uint32_t&>(value);
        } else {
            const float2 c = __half22float2(code), s = __half22float2(scales), z = __half22float2(zeros);
            return pack<Element>(fmaf(s.x, c.x, z.x), fmaf(s.y, c.y, z.y));
        }
    }
};

// scale * E2M1, exact.
//
// why: a sign, two bits of exponent and one of mantissa moved to their places in a half (a bfloat16) are the value
// times 2^-14 (2^-126), 0.5 included. A half holds 2^-14 times every product with a scale, whose last bit is
// 2^-10; a bfloat16 holds it by a scale times 2^118.
template <class Element> struct Nibbles<Stored::nvfp4, Element> {
    static constexpr bool kHalf = kSame<Element, __half>;
    uint32_t scale;

    CF_DEVICE static Nibbles of_key(uint32_t word) {
        return {permute_bytes(word, 0, threadIdx.x % 4 < 2 ? 0x1010 : 0x3232)};
    }
    CF_DEVICE static Nibbles of_keys(uint2 words) {
        return {permute_bytes(words.x, words.y, threadIdx.x % 32 < 16 ? 0x5410 : 0x7632)};
    }
    CF_DEVICE uint32_t at(uint32_t x, int j, const Kept<Stored::nvfp4>&) const {
        if constexpr (kHalf) {
            // why every other nibble: then those beside it are 0 wherever the mask looks.
            const uint32_t of = x & (j % 2 ? 0xf0f0f0f0u : 0x0f0f0f0fu);
            const uint32_t sizes = j < 3 ? of << (9 - 4 * j) : of >> 3;
            const uint32_t bits = (of << (12 - 4 * j) | sizes) & 0x8e008e00u;
            const __half2 value =
                __hmul2(reinterpret_cast<const __half2&>(bits), reinterpret_cast<const __half2&>(scale));
            return reinterpret_cast<const uint32_t&>(value);
        } else {
            // why a product: sign and size go to places of their own, in one operation.
            const uint32_t of = (j < 2 ? x : x >> 8) & (j % 2 ? 0x00f000f0u : 0x000f000fu);
            const uint32_t bits = of * (j % 2 ? 0x104u : 0x1040u) & 0x81c081c0u;
            const __nv_bfloat162 value = __hmul2(reinterpret_cast<const __nv_bfloat162&>(bits),
                                                 reinterpret_cast<const __nv_bfloat162&>(scale));
            return reinterpret_cast<const uint32_t&>(value);
        }
    }
    // Of two stored scales, the lower in the lower byte, a word of units.
    CF_DEVICE static uint32_t word(uint32_t bytes) {
        const uint32_t bits = widen2<Stored::e4m3, Element>(bytes, false);
        if constexpr (kHalf) {
            const __half2 value = __hmul2(reinterpret_cast<const __half2&>(bits), __float2half2_rn(256.0f));
            return reinterpret_cast<const uint32_t&>(value);
        } else {
            const __nv_bfloat162 value =
                __hmul2(reinterpret_cast<const __nv_bfloat162&>(bits), __float2bfloat162_rn(0x1p118f));
            return reinterpret_cast<const uint32_t&>(value);
        }
    }
};

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

// Units of a step on their way to shared memory; of K, or of V. Words lie as [span][key].
//
// why registers: a row may have one scale, 1 or 2 bytes, and cp.async copies 4 that are aligned. They are asked for
// with the codes of their step, and stored when the next step's are asked for.
// layout: lane l has key l % 16 of spans l / 16 + 2i.
template <Stored kStored, class Element, int kSpans> struct UnitLoader {
    static constexpr bool kIntegers = kStored == Stored::int4;
    using Unit = typename Select<kIntegers, uint16_t, uint8_t>::Type;
    // Whether addresses wait in registers. why not of 8 spans: sm_120 has none to spare.
    static constexpr bool kReady = kSpans < 8;
    enum : int { kPairs = kSpans / 2 };
    int64_t first;    // address of the scale of this lane's key in row 0 of slot 0
    Unit lower[kPairs], upper[kPairs];

    CF_DEVICE UnitLoader(const Units& units, int32_t head) { first = kReady ? of_head(units, head) : 0; }
    CF_DEVICE static int64_t of_head(const Units& units, int32_t head) {
        const int32_t key = threadIdx.x % 16, span = threadIdx.x % 32 / 16;
        return reinterpret_cast<int64_t>(units.scale) +
               int64_t(sizeof(Unit)) * (head * units.head + key * units.row + (kIntegers ? 0 : 2 * span));
    }
    CF_DEVICE void load(const Units& units, int32_t slot, int32_t head, int32_t row, int32_t rows,
                        int32_t columns) {
        const int32_t key = threadIdx.x % 16, span = threadIdx.x % 32 / 16;
        const int64_t at = (kReady ? first : of_head(units, head)) +
                           int64_t(sizeof(Unit)) * (slot * units.slot + row * units.row);
        // From a lower half to its upper half.
        const int64_t second =
            kIntegers ? reinterpret_cast<int64_t>(units.zero) - reinterpret_cast<int64_t>(units.scale) : 1;
        CF_UNROLL
        for (int i = 0; i < kPairs; i++) {
            const int32_t feature = (span + 2 * i) * kSpan;
            const bool exists = key < rows && feature < columns;
            const int64_t from = at + (kIntegers ? int64_t(sizeof(Unit)) * (feature >> units.group_bits) : 4 * i);
            const bool both = exists && (kIntegers || feature + kSpan / 2 < columns);
            lower[i] = exists ? ld_global_nc(reinterpret_cast<const Unit*>(from)) : 0;
            upper[i] = both ? ld_global_nc(reinterpret_cast<const Unit*>(from + second)) : 0;
        }
    }
    CF_DEVICE void store(uint32_t to) const {
        CF_UNROLL
        for (int i = 0; i < kPairs; i++) {
            const uint32_t both = uint32_t(lower[i]) | uint32_t(upper[i]) << 8 * sizeof(Unit);
            uint32_t word = both;
            if constexpr (!kIntegers) word = Nibbles<kStored, Element>::word(both);
            st_shared(to + 4 * (threadIdx.x % 32 + 32 * i), word);
        }
    }
};

// Where units lie of the steps in a warp's ring: of K, then of V. Nothing where there are none.
template <bool kCodes, int kStages, int kSpans> struct UnitRing {
    enum : int { kUnitBytes = 4 * kSpans * kStepKeys };
    alignas(128) uint32_t units[kStages][2][kSpans * kStepKeys];

    CF_DEVICE uint32_t units_of(int stage) const { return smem_addr(units[0][0]) + stage * 2 * kUnitBytes; }
};
template <int kStages, int kSpans> struct UnitRing<false, kStages, kSpans> {
    enum : int { kUnitBytes = 0 };
    CF_DEVICE static uint32_t units_of(int) { return 0; }
};

// A chunk of a row of Q in the order of features that multiply_by_coded_rows wants: chunk 4 c + 2 s + h of a
// row holds, in its elements 2t and 2t + 1, features 8t + 2s + h and 4 more of span c.
template <class Element> CF_DEVICE uint4 read_for_codes(const Element* row, int chunk, int columns) {
    alignas(16) Element part[8];
    const int first = chunk / 4 * kSpan + chunk % 4;
    CF_UNROLL
    for (int i = 0; i < 8; i++) part[i] = first < columns ? ld_global_nc(row + first + 4 * i) : Element(0.0f);
    return reinterpret_cast<const uint4&>(part);
}

// d += A B^T over the whole row of a tile of codes: S = Q K^T; as multiply_by_rows.
template <class Math, Stored kStored, class Codes, class RowsA>
CF_DEVICE void multiply_by_coded_rows(float (&d)[1][2][4], RowsA a, uint32_t codes, uint32_t units,
                                      const Kept<kStored>& kept) {
    using Pairs = Nibbles<kStored, typename Math::Element>;
    const BlockReader<Codes, Order::chunks_first> b(codes);
    const uint32_t unit = units + threadIdx.x % 32 / 4 * 4;    // of key g
    CF_UNROLL
    for (int block = 0; block < Codes::kPitch / 32; block++) {
        uint32_t words[4];    // spans 2 block and 2 block + 1 of keys 0 to 7, then of 8 to 15
        b.load(words, 0, block);
        CF_UNROLL
        for (int i = 0; i < 2; i++) {
            const int span = 2 * block + i;
            uint32_t value[2][4];
            CF_UNROLL
            for (int n = 0; n < 2; n++) {
                const auto of = Pairs::of_key(ld_shared<uint32_t>(unit + span * 4 * kStepKeys + n * 32));
                CF_UNROLL
                for (int j = 0; j < 4; j++) value[n][j] = of.at(words[2 * n + i], j, kept);
            }
            CF_UNROLL
            for (int s = 0; s < 2; s++) {
                uint32_t a_block[4];
                a.load(a_block, 0, 2 * span + s);
                const auto a_step = Math::prepare(a_block);
                const typename Math::Fragment b_step = {
                    {{value[0][2 * s], value[0][2 * s + 1], value[1][2 * s], value[1][2 * s + 1]}}};
                Math::multiply(d[0][0], a_step, b_step, 0);
                Math::multiply(d[0][1], a_step, b_step, 1);
            }
        }
    }
}

// d += A B over the 16 rows of a tile of codes, with A the accumulator of an earlier product: O += P V; as
// multiply_by_columns.
template <class Math, Stored kStored, class Codes, int kN>
CF_DEVICE void multiply_by_coded_columns(float (&d)[1][kN][4], const float (&a)[1][2][4], uint32_t codes,
                                         uint32_t units,
                                         const Kept<kStored>& kept) {
    using Pairs = Nibbles<kStored, typename Math::Element>;
    const BlockReader<Codes, Order::rows_first> b(codes);
    const auto a_step = Math::from_accumulator(a[0], 0);
    const uint32_t unit = units + threadIdx.x % 4 * 8;    // of keys 2t and 2t + 1
    CF_UNROLL
    for (int block = 0; block < Codes::kPitch / 32; block++) {
        uint32_t words[4];    // of span 2 block keys 0 to 7 and 8 to 15, then of 2 block + 1
        ldmatrix_x4_trans(words, b.address(0, block));
        CF_UNROLL
        for (int i = 0; i < 2; i++) {
            const int span = 2 * block + i;
            uint32_t value[2][4];
            CF_UNROLL
            for (int half = 0; half < 2; half++) {
                const auto of = Pairs::of_keys(ld_shared<uint2>(unit + span * 4 * kStepKeys + half * 32));
                CF_UNROLL
                for (int j = 0; j < 4; j++) value[half][j] = of.at(words[2 * i + half], j, kept);
            }
            CF_UNROLL
            for (int j = 0; j < 4; j++) {
                const typename Math::Fragment b_step = {{{value[0][j], value[1][j], 0, 0}}};
                Math::multiply(d[0][4 * span + j], a_step, b_step, 0);
            }
        }
    }
}

// One of the two rows of a thread of such a product, into floats in the order of features; `half` is which.
template <int kN> CF_DEVICE void store_for_codes(uint32_t row, const float (&d)[kN][4], int half) {
    CF_UNROLL
    for (int span = 0; span < kN / 4; span++) {
        CF_UNROLL
        for (int i = 0; i < 2; i++) {
            const int e = 2 * half + i, feature = span * kSpan + threadIdx.x % 4 * 8 + 4 * i;
            st_shared(row + 4 * feature, float4{d[4 * span][e], d[4 * span + 1][e], d[4 * span + 2][e],
                                                d[4 * span + 3][e]});
        }
    }
}

// ---- appending: a row by one warp, which is whole; at(f) is feature f

// Integers: code 0 is the lowest feature of a group, 15 the highest, by scale and zero as they are stored.
template <class Acc, class Feature>
CF_DEVICE void store_integers(uint8_t* codes, int64_t column, const Units& units, int64_t first, int32_t columns,
                              Feature at) {
    const int32_t lane = threadIdx.x % 32;
    const int32_t group = 1 << units.group_bits;
    for (int32_t begin = 0; begin < columns; begin += group) {
        Acc low = at(begin + lane), high = low;
        for (int32_t i = kSpan; i < group; i += kSpan) {
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
        for (int32_t i = 0; i < group; i += kSpan) {
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
    for (int32_t begin = 0; begin < columns; begin += kSpan) {
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
    uint8_t* codes = static_cast<uint8_t*>(cache.data) + slot * cache.batch + head * cache.head +
                     row * cache.row;
    const int64_t first = slot * units.slot + head * units.head + row * units.row;
    if constexpr (kStored == Stored::nvfp4) store_e2m1<Acc>(codes, cache.column, units, first, columns, at);
    else store_integers<Acc>(codes, cache.column, units, first, columns, at);
}
