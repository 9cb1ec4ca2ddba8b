// Codes of int4 as operands of products. No code is converted: scales and zeros are applied to sums and to weights.
// Design note: docs/kernels/decode.md.
//
// A code in the low bits of a half is a subnormal number, code * 2^-24, which tensor cores multiply exactly. Four bits
// higher it is code * 2^-20. So a bit mask turns a register of codes into a pair of operands. With c the codes, s the scale
// and z the zero of segment G (32 features, see codes.cuh) of key j:
//   S_ij = sum over G of s_jG (q_iG . c_jG) + z_jG sum(q_iG)     the sums of q_iG are computed once, as two halves each
//   O_iG = sum over j of (p_ij s_jG) c_jG   + p_ij z_jG          the second term of all segments is one n8 product
// Products are of halves, also where Q, K and V are bfloat16:
//   Q     A row is multiplied by the power of two that makes its largest feature 2^14 or more. Features below 2^-28 of
//         the largest are lost. Features whose codes lie four bits higher are divided by 16.
//   p s   One rounding more than p alone, where elements of V would have been rounded. Scales are multiplied by
//         kScaleFactor, so that no product of consequence is subnormal: p is at most 1. From the first step with a scale
//         of 2 or more on the factor is 1, and the sums of O so far are divided by it.
//
// layout: units of a step, the scales and zeros of 16 keys. Scales of K are floats, [2 segments][2 keys][segment][key];
// scales of V halves, [2 or 4 segments][2 keys][segment][key]; zeros halves, [segment][key], where from segment 4 on the
// two halves of 8 keys change places.
#pragma once
#include "cache/codes.cuh"

constexpr float kPerCode = 0x1p24f;        // times a subnormal half: its code
constexpr float kScaleFactor = 0x1p15f;    // on scales of V, see above

// Nibbles j of both halves of a register as a pair of operands; of odd j 16 times their codes.
CF_DEVICE uint32_t pair_of_codes(uint32_t x, int j) {
    return (j < 2 ? x : x >> 8) & (j % 2 ? 0x00f000f0u : 0x000f000fu);
}

// ---- Q

// Turns a row of Q into halves, times a power of two (odd chunks: a sixteenth of it). Called by the kChunks lanes that
// have the row, a chunk each. Returns the factor on sums of its products with codes.
template <class Element, int kChunks> CF_DEVICE float scale_row_to_halves(uint4& chunk, int number) {
    Element(&part)[8] = reinterpret_cast<Element(&)[8]>(chunk);
    float highest = 0;
    CF_UNROLL
    for (int i = 0; i < 8; i++) highest = fmaxf(highest, fabsf(widen(part[i])));
    CF_UNROLL
    for (int step = 1; step < kChunks; step *= 2)
        highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, step));
    // Its exponent, so that the powers below are normal numbers.
    const uint32_t exponent = __float_as_uint(fmaxf(highest, 0x1p-107f)) >> 23;
    const float power = __uint_as_float((127 + 14 + 127 - exponent) << 23) * (number % 2 ? 0.0625f : 1.0f);
    alignas(16) __half raised[8];
    CF_UNROLL
    for (int i = 0; i < 8; i++) raised[i] = narrow<__half>(widen(part[i]) * power);
    chunk = reinterpret_cast<const uint4&>(raised);
    return __uint_as_float((exponent - 14 + 5) << 23);
}

// 2^-5 sum(q_iG) as an operand, whose products with zeros of K begin S. Column G is the sum rounded to a half, column
// 8 + G the rounding error. why a product with ones: it sums what the tensor cores will see.
template <class Math, int kSegments, class RowsA>
CF_DEVICE typename Math::Fragment sums_of_segments(RowsA a) {
    float sums[2][2] = {};
    CF_UNROLL
    for (int segment = 0; segment < kSegments; segment++) {
        float d[4] = {};
        CF_UNROLL
        for (int s = 0; s < 2; s++) {
            uint32_t block[4];
            a.load(block, 0, 2 * segment + s);
            const typename Math::Fragment ones = {{{0x3c003c00u, 0x4c004c00u, 0, 0}}};    // 1 and 16
            Math::multiply(d, Math::prepare(block), ones, 0);
        }
        if (static_cast<int>(threadIdx.x % 4) == segment / 2)
            sums[0][segment % 2] = d[0] * 0x1p-5f, sums[1][segment % 2] = d[2] * 0x1p-5f;
    }
    typename Math::Fragment f;
    CF_UNROLL
    for (int half = 0; half < 2; half++) {
        const float (&x)[2] = sums[half];
        const float upper[2] = {widen(narrow<__half>(x[0])), widen(narrow<__half>(x[1]))};
        f.part[0][half] = pack<__half>(upper[0], upper[1]);
        f.part[0][2 + half] = pack<__half>(x[0] - upper[0], x[1] - upper[1]);
    }
    return f;
}

// ---- scales and zeros

// Segments whose scales of V are read at once. why not 4 of 8: there are too few registers.
constexpr int segments_per_load(int segments) { return segments == 4 ? 4 : 2; }

// Units of a step on their way to shared memory; of K, or of V.
//
// why registers: a row may have one scale, 2 bytes, and cp.async copies 4 that are aligned. They are loaded with
// the codes of their step, and stored when the next step's are loaded.
// layout: lane l has keys 2 (l % 8) and the next of segments l / 8 + 4i. What does not exist is read as what is nearest
// to it: its codes are 0, and nothing comes of it.
template <bool kOfKeys, int kSegments> struct IntegerUnits {
    enum : int {
        kPairs = cdiv(kSegments, 4),
        kPerLoad = segments_per_load(kSegments),
        kScaleBytes = (kOfKeys ? 4 : 2) * kSegments * kStepKeys,
        kBytes = kScaleBytes + 2 * kSegments * kStepKeys
    };
    static constexpr bool kAddressesInRegisters = addresses_in_registers(kSegments);
    int64_t first;    // address of the first scale of this lane in row 0 of slot 0
    uint32_t scale[kPairs][2] = {}, zero[kPairs][2] = {};
    int32_t first_step_without_factor = 0x7fffffff;    // of scales of V
    uint32_t scale_place, zero_place;                  // of this lane, in the units of a step

    CF_DEVICE IntegerUnits(const Units& units, int32_t head, int32_t columns) {
        scale_place = opaque(place_of_scale(threadIdx.x)), zero_place = opaque(place_of_zero(threadIdx.x));
        first = kAddressesInRegisters ? of_segment(units, head, columns, 0) : 0;
    }
    CF_DEVICE static uint32_t place_of_scale(uint32_t thread) {
        const uint32_t segment = thread % 32 / 8, pair = thread % 8;
        return kOfKeys
                   ? segment / 2 * 128 + pair * 16 + segment % 2 * 8
                   : segment / kPerLoad * (32 * kPerLoad) + pair * (4 * kPerLoad) + segment % kPerLoad * 4;
    }
    CF_DEVICE static uint32_t place_of_zero(uint32_t thread) {
        return kScaleBytes + thread % 32 / 8 * 32 + thread % 8 * 4;
    }
    CF_DEVICE static int64_t of_segment(const Units& units, int32_t head, int32_t columns, int i) {
        const int32_t feature = (static_cast<int32_t>(threadIdx.x) % 32 / 8 + 4 * i) * kSegment;
        return reinterpret_cast<int64_t>(units.scale) +
               2 * (head * units.head + (smaller(feature, columns - 1) >> units.group_bits));
    }
    CF_DEVICE void load(const Units& units, int32_t slot, int32_t head, int32_t row, int32_t rows,
                        int32_t columns) {
        const int32_t own = row + static_cast<int32_t>(threadIdx.x) % 8 * 2, last = row + rows - 1;
        const int32_t row_bytes = static_cast<int32_t>(2 * units.row);
        const int64_t to_zero =
            reinterpret_cast<int64_t>(units.zero) - reinterpret_cast<int64_t>(units.scale);
        CF_UNROLL
        for (int i = 0; i < kPairs; i++) {
            const int64_t at = (kAddressesInRegisters ? first : of_segment(units, head, columns, i)) +
                               static_cast<uint32_t>(slot) * (2 * units.slot);
            CF_UNROLL
            for (int of = 0; of < 2; of++) {
                const int64_t from = mad_wide(smaller(own + of, last), row_bytes, at);
                scale[i][of] = ld_global_nc(reinterpret_cast<const uint16_t*>(from));
                zero[i][of] = ld_global_nc(reinterpret_cast<const uint16_t*>(from + to_zero));
            }
        }
    }
    // Whether sums of O have to be divided by kScaleFactor before a step.
    CF_DEVICE bool drops_factor(int32_t step) const { return step == first_step_without_factor; }
    // Of step `step`.
    CF_DEVICE void store(uint32_t to, int32_t step) {
        const int32_t lane = threadIdx.x % 32;
        const uint32_t at_scale =
            to + (kAddressesInRegisters ? scale_place : place_of_scale(opaque(threadIdx.x)));
        const uint32_t at_zero =
            to + (kAddressesInRegisters ? zero_place : place_of_zero(opaque(threadIdx.x)));
        CF_UNROLL
        for (int i = 0; i < kPairs; i++) {
            const uint32_t scales = permute_bytes(scale[i][0], scale[i][1], 0x5410);
            if constexpr (!kOfKeys) {
                // why the bit: it is set in 2 and in all that is above, infinity and NaN too.
                if (__any_sync(0xffffffffu, scales & 0x40004000u))
                    first_step_without_factor = smaller(first_step_without_factor, step);
            }
        }
        CF_UNROLL
        for (int i = 0; i < kPairs; i++) {
            const int32_t segment = lane / 8 + 4 * i;
            if (kSegments < 4 && segment >= kSegments) return;
            const uint32_t scales = permute_bytes(scale[i][0], scale[i][1], 0x5410);
            const uint32_t zeros = permute_bytes(zero[i][0], zero[i][1], 0x5410);
            const __half2 both = reinterpret_cast<const __half2&>(scales);
            if constexpr (kOfKeys) {
                const float2 wide = __half22float2(both);
                st_shared(at_scale + i * 256,
                          float2{wide.x * (kPerCode * 0x1p-5f), wide.y * (kPerCode * 0x1p-5f)});
            } else {
                const uint32_t power = step < first_step_without_factor
                                           ? 0x78007800u
                                           : 0x3c003c00u;    // two of kScaleFactor, or of 1
                const __half2 raised = __hmul2(both, reinterpret_cast<const __half2&>(power));
                st_shared(at_scale + i * 128, reinterpret_cast<const uint32_t&>(raised));
            }
            st_shared((at_zero ^ i * 16) + i * 128, zeros);
        }
    }
};

// ---- products

// Tiles of codes of 16 keys as B, for a warp. Codes is the tile as it is stored; addresses of lanes wait in registers.
template <class Math, class Codes> struct IntegerTiles {
    enum : int { kSegments = Codes::kPitch / 16, kPerLoad = segments_per_load(kSegments) };
    using KeyUnits = IntegerUnits<true, kSegments>;
    using ValueUnits = IntegerUnits<false, kSegments>;
    using Fragment = typename Math::Fragment;
    static constexpr bool kAddressesInRegisters = addresses_in_registers(kSegments);

    BlockReader<Codes, Order::chunks_first> keys;
    BlockReader<Codes, Order::rows_first> values;
    uint32_t key_zeros, value_zeros;
    Fragment sums;              // of segments of Q
    float zero_sums[4] = {};    // of weights and zeros: column G is segment G
    // Both wait in shared memory where registers are scarce: of each lane 16 bytes, and 512 further 16 more.
    enum : int { kKeptBytes = kAddressesInRegisters ? 0 : 1024 };
    uint32_t kept;

    // kept_address: kKeptBytes of the warp.
    template <class RowsA> CF_DEVICE IntegerTiles(RowsA q, uint32_t kept_address) : keys(0), values(0) {
        key_zeros = opaque(place_of_key_zeros(threadIdx.x)),
        value_zeros = opaque(place_of_value_zeros(threadIdx.x));
        sums = sums_of_segments<Math, kSegments>(q);
        kept = kept_address + threadIdx.x % 32 * 16;
        if constexpr (!kAddressesInRegisters) st_shared(kept, reinterpret_cast<const uint4&>(sums));
        put_zero_sums();
    }
    // d += A B^T over the whole row of a tile: S = Q K^T; as multiply_by_rows.
    template <class RowsA>
    CF_DEVICE void multiply_by_rows(float (&d)[1][2][4], RowsA a, uint32_t codes, uint32_t units) const {
        const int t = threadIdx.x % 4;
        const auto b = tile_at(keys, codes);
        // Zeros of segments 2t and 2t + 1 of key g, twice, for both halves of sums; then of key 8 + g. Columns of sums
        // without a segment are 0.
        uint32_t zeros[4];
        ldmatrix_x4_trans(
            zeros, units + (kAddressesInRegisters ? key_zeros : place_of_key_zeros(opaque(threadIdx.x))));
        const Fragment of_zeros = Math::prepare(zeros);
        Fragment of_sums = sums;
        if constexpr (!kAddressesInRegisters) reinterpret_cast<uint4&>(of_sums) = ld_shared<uint4>(kept);
        Math::multiply(d[0][0], of_sums, of_zeros, 0);
        Math::multiply(d[0][1], of_sums, of_zeros, 1);
        CF_UNROLL
        for (int block = 0; block < kSegments / 2; block++) {
            uint32_t words[4];    // segments 2 block and 2 block + 1 of keys 0 to 7, then of 8 to 15
            b.load(words, 0, block);
            float4 scales[2];    // of keys 8n + 2t and the next: of one segment, then of the other
            CF_UNROLL
            for (int n = 0; n < 2; n++) scales[n] = ld_shared<float4>(units + block * 128 + n * 64 + t * 16);
            CF_UNROLL
            for (int i = 0; i < 2; i++) {
                float of_segment[2][4] = {};
                CF_UNROLL
                for (int s = 0; s < 2; s++) {
                    uint32_t a_block[4];
                    a.load(a_block, 0, 2 * (2 * block + i) + s);
                    const auto a_step = Math::prepare(a_block);
                    CF_UNROLL
                    for (int n = 0; n < 2; n++) {
                        const uint32_t word = words[2 * n + i];
                        const Fragment b_step = {
                            {{pair_of_codes(word, 2 * s), pair_of_codes(word, 2 * s + 1), 0, 0}}};
                        Math::multiply(of_segment[n], a_step, b_step, 0);
                    }
                }
                CF_UNROLL
                for (int n = 0; n < 2; n++) {
                    const float scale[2] = {i ? scales[n].z : scales[n].x, i ? scales[n].w : scales[n].y};
                    CF_UNROLL
                    for (int e = 0; e < 4; e++) d[0][n][e] = fmaf(of_segment[n][e], scale[e % 2], d[0][n][e]);
                }
            }
        }
    }
    // d += A B over the 16 rows of a tile, with A the accumulator of an earlier product: O += P V; as
    // multiply_by_columns. Codes are summed there, zeros here, until `finalize`.
    template <int kN>
    CF_DEVICE void multiply_by_columns(float (&d)[1][kN][4], const float (&a)[1][2][4], uint32_t codes,
                                       uint32_t units) {
        static_assert(kN == 4 * kSegments);
        const int t = threadIdx.x % 4;
        const auto b = tile_at(values, codes);
        const auto weights = Math::from_accumulator(a[0], 0);
        const uint32_t first =
            units + (kAddressesInRegisters ? value_zeros : place_of_value_zeros(opaque(threadIdx.x)));
        const uint32_t second = kSegments == 8 ? first ^ 16 : first + 16;
        const Fragment of_zeros = {{{ld_shared<uint32_t>(first), ld_shared<uint32_t>(second), 0, 0}}};
        get_zero_sums();
        Math::multiply(zero_sums, weights, of_zeros, 0);
        put_zero_sums();
        uint32_t scales[2][kPerLoad];    // of keys 2t and 2t + 1, then 8 further
        CF_UNROLL
        for (int block = 0; block < kSegments / 2; block++) {
            uint32_t words[4];    // of segment 2 block keys 0 to 7 and 8 to 15, then of 2 block + 1
            ldmatrix_x4_trans(words, b.address(0, block));
            CF_UNROLL
            for (int half = 0; half < (2 * block % kPerLoad == 0 ? 2 : 0); half++) {
                const uint32_t from = units + block * 64 + (t + 4 * half) * (4 * kPerLoad);
                if constexpr (kPerLoad == 4) reinterpret_cast<uint4&>(scales[half]) = ld_shared<uint4>(from);
                else reinterpret_cast<uint2&>(scales[half]) = ld_shared<uint2>(from);
            }
            CF_UNROLL
            for (int i = 0; i < 2; i++) {
                const int segment = 2 * block + i;
                Fragment a_step;
                CF_UNROLL
                for (int r = 0; r < 4; r++) {
                    const __half2 value =
                        __hmul2(reinterpret_cast<const __half2&>(weights.part[0][r]),
                                reinterpret_cast<const __half2&>(scales[r / 2][segment % kPerLoad]));
                    a_step.part[0][r] = reinterpret_cast<const uint32_t&>(value);
                }
                CF_UNROLL
                for (int j = 0; j < 4; j++) {
                    const Fragment b_step = {
                        {{pair_of_codes(words[2 * i], j), pair_of_codes(words[2 * i + 1], j), 0, 0}}};
                    Math::multiply(d[0][4 * segment + j], a_step, b_step, 0);
                }
            }
        }
    }
    // Turns columns of features into O by adding the sums of zeros.
    template <int kN> CF_DEVICE void finalize(float (&d)[1][kN][4], const ValueUnits& of, int32_t steps) {
        get_zero_sums();
        const float unit = of.first_step_without_factor < steps
                               ? kPerCode
                               : kPerCode / kScaleFactor;    // of a product of scale and code
        const int quad = threadIdx.x % 32 / 4 * 4;
        CF_UNROLL
        for (int segment = 0; segment < kSegments; segment++) {
            CF_UNROLL
            for (int half = 0; half < 2; half++) {
                const float zeros =
                    __shfl_sync(0xffffffffu, zero_sums[2 * half + segment % 2], quad + segment / 2);
                CF_UNROLL
                for (int j = 0; j < 4; j++) {
                    CF_UNROLL
                    for (int e = 2 * half; e < 2 * half + 2; e++) {
                        float& x = d[0][4 * segment + j][e];
                        x = fmaf(x, j % 2 ? unit * 0.0625f : unit, zeros);
                    }
                }
            }
        }
    }
    // Rescales O and the sums of zeros after a new maximum; with drop_factor, O is also divided by kScaleFactor.
    template <int kN> CF_DEVICE void rescale_o(float (&d)[1][kN][4], const float (&rescale)[2],
                                               bool drop_factor) {
        get_zero_sums();
        CF_UNROLL
        for (int e = 0; e < 4; e++) {
            zero_sums[e] *= rescale[e / 2];
            const float factor = rescale[e / 2] * (drop_factor ? 1.0f / kScaleFactor : 1.0f);
            CF_UNROLL
            for (int n = 0; n < kN; n++) d[0][n][e] *= factor;
        }
        put_zero_sums();
    }

  private:
    CF_DEVICE void get_zero_sums() {
        if constexpr (!kAddressesInRegisters)
            reinterpret_cast<float4&>(zero_sums) = ld_shared<float4>(kept + 512);
    }
    CF_DEVICE void put_zero_sums() const {
        if constexpr (!kAddressesInRegisters)
            st_shared(kept + 512, reinterpret_cast<const float4&>(zero_sums));
    }
    CF_DEVICE static uint32_t place_of_key_zeros(uint32_t thread) {
        return KeyUnits::kScaleBytes + thread % 8 % kSegments * 32 + (thread % 32 / 16 ^ thread / 4 % 2) * 16;
    }
    CF_DEVICE static uint32_t place_of_value_zeros(uint32_t thread) {
        const uint32_t g = thread % 32 / 4, t = thread % 4;
        return ValueUnits::kScaleBytes + g % kSegments * 32 + (kSegments == 8 ? g / 4 * 16 : 0) + t * 4;
    }
    template <class Reader> CF_DEVICE static Reader tile_at(Reader of_first, uint32_t codes) {
        if constexpr (!kAddressesInRegisters) return Reader(codes);
        of_first.lane_address += codes;
        return of_first;
    }
};
