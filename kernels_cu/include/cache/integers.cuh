// Codes of int4 as operands of products: neither scale nor zero touches an element.
// Design note: docs/kernels/decode.md.
//
// A code in the low bits of a half is a subnormal number, code * 2^-24 (four bits higher, 16 times that), which tensor
// cores multiply as exactly as any other: a mask makes a pair of operands. With scale s and zero z of span G of key j
//   S_ij = sum over G of s_jG (q_iG . c_jG) + z_jG sum(q_iG)     sum(q_iG): once, in two halves, a product with all z
//   O_iG = sum over j of (p_ij s_jG) c_jG   + p_ij z_jG          the last for all spans at once, an n8 product
// Products are of halves for either element type:
//   Q     each row times the power of two that makes its largest feature 2^14 or more: its bits stay, for what is
//         below 2^-28 of the largest is nothing. Odd nibbles lie 16 times higher, so their features are divided.
//   p s   rounded once more than p, where elements of V would have been. p is at most 1, so scales below 2 are taken
//         times 2^15: then no product of consequence is subnormal. Once one of 2 or more turns up, O is divided by
//         that, and from then on they are taken as they are.
//
// layout of the units of a step: scales of K as floats [2 spans][2 keys][span][key]; zeros of K as halves [span][key],
// 8 keys changing places from span 4 on; of V scales as halves [2 or 4 spans][2 keys][span][key], and zeros as those of K.
#pragma once
#include "cache/codes.cuh"

constexpr float kCode = 0x1p24f,
                kRaised = 0x1p15f;    // 1 / what a code is a multiple of; what scales are taken times

// Of nibbles j of both halves of a register; of odd j times 16.
CF_DEVICE uint32_t pair_of_codes(uint32_t x, int j) {
    return (j < 2 ? x : x >> 8) & (j % 2 ? 0x00f000f0u : 0x000f000fu);
}

// Whether addresses wait in registers. why: the compiler computes them again in every step otherwise, ten instructions
// each of a loop that instructions are to be saved in. why not of 8 spans: there is no register to spare.
constexpr bool addresses_wait(int spans) { return spans < 8; }

// ---- Q

// A row of Q as halves, times a power of two; of odd chunks by 16. Called by the kChunks lanes that have the row, a chunk
// each. Returns the factor for sums of its products with codes, where K's scales are as stored.
template <class Element, int kChunks> CF_DEVICE float raise_row(uint4& chunk, int number) {
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

// 2^-5 sum(q_iG) as an operand, whose products with zeros of K begin S: column G is its upper half, 8 + G what that
// leaves. why a product with ones: it sums what the tensor cores will see.
template <class Math, int kSpans, class RowsA>
CF_DEVICE typename Math::Fragment sums_of_spans(RowsA a) {
    float sums[2][2] = {};
    CF_UNROLL
    for (int span = 0; span < kSpans; span++) {
        float d[4] = {};
        CF_UNROLL
        for (int s = 0; s < 2; s++) {
            uint32_t block[4];
            a.load(block, 0, 2 * span + s);
            const typename Math::Fragment ones = {{{0x3c003c00u, 0x4c004c00u, 0, 0}}};    // 1 and 16
            Math::multiply(d, Math::prepare(block), ones, 0);
        }
        if (static_cast<int>(threadIdx.x % 4) == span / 2)
            sums[0][span % 2] = d[0] * 0x1p-5f, sums[1][span % 2] = d[2] * 0x1p-5f;
    }
    typename Math::Fragment f;
    CF_UNROLL
    for (int half = 0; half < 2; half++) {
        const float(&x)[2] = sums[half];
        const float upper[2] = {widen(narrow<__half>(x[0])), widen(narrow<__half>(x[1]))};
        f.part[0][half] = pack<__half>(upper[0], upper[1]);
        f.part[0][2 + half] = pack<__half>(x[0] - upper[0], x[1] - upper[1]);
    }
    return f;
}

// ---- scales and zeros

// Spans whose scales of V are read at once. why not four of eight: no register is to spare.
constexpr int scales_together(int spans) { return spans == 4 ? 4 : 2; }

// Units of a step on their way to shared memory; of K, or of V.
//
// why registers: a row may have one scale, 2 bytes, and cp.async copies 4 that are aligned. They are loaded with
// the codes of their step, and stored when the next step's are loaded.
// layout: lane l has keys 2 (l % 8) and the next of spans l / 8 + 4i. What does not exist is read as what is nearest
// to it: its codes are 0, and nothing comes of it.
template <bool kOfKeys, int kSpans> struct IntegerUnits {
    enum : int {
        kPairs = cdiv(kSpans, 4),
        kTogether = scales_together(kSpans),
        kScaleBytes = (kOfKeys ? 4 : 2) * kSpans * kStepKeys,
        kBytes = kScaleBytes + 2 * kSpans * kStepKeys
    };
    static constexpr bool kReady = addresses_wait(kSpans);
    int64_t first;    // address of the first scale of this lane in row 0 of slot 0
    uint32_t scale[kPairs][2] = {}, zero[kPairs][2] = {};
    int32_t plain_from = 0x7fffffff;    // the step from which on scales of V are as they are
    uint32_t scale_place, zero_place;    // of this lane, in the units of a step

    CF_DEVICE IntegerUnits(const Units& units, int32_t head, int32_t columns) {
        scale_place = opaque(place_of_scale(threadIdx.x)), zero_place = opaque(place_of_zero(threadIdx.x));
        first = kReady ? of_span(units, head, columns, 0) : 0;
    }
    CF_DEVICE static uint32_t place_of_scale(uint32_t thread) {
        const uint32_t span = thread % 32 / 8, pair = thread % 8;
        return kOfKeys ? span / 2 * 128 + pair * 16 + span % 2 * 8
                       : span / kTogether * (32 * kTogether) + pair * (4 * kTogether) + span % kTogether * 4;
    }
    CF_DEVICE static uint32_t place_of_zero(uint32_t thread) { return kScaleBytes + thread % 32 / 8 * 32 + thread % 8 * 4; }
    CF_DEVICE static int64_t of_span(const Units& units, int32_t head, int32_t columns, int i) {
        const int32_t feature = (static_cast<int32_t>(threadIdx.x) % 32 / 8 + 4 * i) * kSpan;
        return reinterpret_cast<int64_t>(units.scale) +
               2 * (head * units.head + (smaller(feature, columns - 1) >> units.group_bits));
    }
    CF_DEVICE void load(const Units& units, int32_t slot, int32_t head, int32_t row, int32_t rows,
                        int32_t columns) {
        const int32_t own = row + static_cast<int32_t>(threadIdx.x) % 8 * 2, last = row + rows - 1;
        const int32_t row_bytes = static_cast<int32_t>(2 * units.row);
        const int64_t to_zero = reinterpret_cast<int64_t>(units.zero) - reinterpret_cast<int64_t>(units.scale);
        CF_UNROLL
        for (int i = 0; i < kPairs; i++) {
            const int64_t at = (kReady ? first : of_span(units, head, columns, i)) +
                               static_cast<uint32_t>(slot) * (2 * units.slot);
            CF_UNROLL
            for (int of = 0; of < 2; of++) {
                const int64_t from = mad_wide(smaller(own + of, last), row_bytes, at);
                scale[i][of] = ld_global_nc(reinterpret_cast<const uint16_t*>(from));
                zero[i][of] = ld_global_nc(reinterpret_cast<const uint16_t*>(from + to_zero));
            }
        }
    }
    // Whether sums of values are to be lowered before a step.
    CF_DEVICE bool lowers(int32_t step) const { return step == plain_from; }
    // Of step `step`.
    CF_DEVICE void store(uint32_t to, int32_t step) {
        const int32_t lane = threadIdx.x % 32;
        const uint32_t at_scale = to + (kReady ? scale_place : place_of_scale(opaque(threadIdx.x)));
        const uint32_t at_zero = to + (kReady ? zero_place : place_of_zero(opaque(threadIdx.x)));
        CF_UNROLL
        for (int i = 0; i < kPairs; i++) {
            const uint32_t scales = permute_bytes(scale[i][0], scale[i][1], 0x5410);
            if constexpr (!kOfKeys) {
                // why the bit: it is set in 2 and in all that is above, infinity and NaN too.
                if (__any_sync(0xffffffffu, scales & 0x40004000u)) plain_from = smaller(plain_from, step);
            }
        }
        CF_UNROLL
        for (int i = 0; i < kPairs; i++) {
            const int32_t span = lane / 8 + 4 * i;
            if (kSpans < 4 && span >= kSpans) return;
            const uint32_t scales = permute_bytes(scale[i][0], scale[i][1], 0x5410);
            const uint32_t zeros = permute_bytes(zero[i][0], zero[i][1], 0x5410);
            const __half2 both = reinterpret_cast<const __half2&>(scales);
            if constexpr (kOfKeys) {
                const float2 wide = __half22float2(both);
                st_shared(at_scale + i * 256,
                          float2{wide.x * (kCode * 0x1p-5f), wide.y * (kCode * 0x1p-5f)});
            } else {
                const uint32_t power = step < plain_from ? 0x78007800u : 0x3c003c00u;    // two of kRaised, or of 1
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
    enum : int { kSpans = Codes::kPitch / 16, kTogether = scales_together(kSpans) };
    using KeyUnits = IntegerUnits<true, kSpans>;
    using ValueUnits = IntegerUnits<false, kSpans>;
    using Fragment = typename Math::Fragment;
    static constexpr bool kReady = addresses_wait(kSpans);

    BlockReader<Codes, Order::chunks_first> keys;
    BlockReader<Codes, Order::rows_first> values;
    uint32_t key_zeros, value_zeros;
    Fragment sums;                  // of spans of Q
    float zero_sums[4] = {};        // of weights and zeros: column G is span G
    // Both wait in shared memory where registers are scarce: of each lane 16 bytes, and 512 further 16 more.
    enum : int { kKeptBytes = kReady ? 0 : 1024 };
    uint32_t kept;

    // kept_address: kKeptBytes of the warp.
    template <class RowsA> CF_DEVICE IntegerTiles(RowsA q, uint32_t kept_address) : keys(0), values(0) {
        key_zeros = opaque(place_of_key_zeros(threadIdx.x)), value_zeros = opaque(place_of_value_zeros(threadIdx.x));
        sums = sums_of_spans<Math, kSpans>(q);
        kept = kept_address + threadIdx.x % 32 * 16;
        if constexpr (!kReady) st_shared(kept, reinterpret_cast<const uint4&>(sums));
        put_zero_sums();
    }
    // d += A B^T over the whole row of a tile: S = Q K^T; as multiply_by_rows.
    template <class RowsA>
    CF_DEVICE void multiply_by_rows(float (&d)[1][2][4], RowsA a, uint32_t codes, uint32_t units) const {
        const int t = threadIdx.x % 4;
        const auto b = tile_at(keys, codes);
        // Zeros of spans 2t and 2t + 1 of key g, twice, for both halves of sums; then of key 8 + g. Columns of sums
        // without a span are 0.
        uint32_t zeros[4];
        ldmatrix_x4_trans(zeros, units + (kReady ? key_zeros : place_of_key_zeros(opaque(threadIdx.x))));
        const Fragment of_zeros = Math::prepare(zeros);
        Fragment of_sums = sums;
        if constexpr (!kReady) reinterpret_cast<uint4&>(of_sums) = ld_shared<uint4>(kept);
        Math::multiply(d[0][0], of_sums, of_zeros, 0);
        Math::multiply(d[0][1], of_sums, of_zeros, 1);
        CF_UNROLL
        for (int block = 0; block < kSpans / 2; block++) {
            uint32_t words[4];    // spans 2 block and 2 block + 1 of keys 0 to 7, then of 8 to 15
            b.load(words, 0, block);
            float4 scales[2];    // of keys 8n + 2t and the next: of one span, then of the other
            CF_UNROLL
            for (int n = 0; n < 2; n++) scales[n] = ld_shared<float4>(units + block * 128 + n * 64 + t * 16);
            CF_UNROLL
            for (int i = 0; i < 2; i++) {
                float of_span[2][4] = {};
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
                        Math::multiply(of_span[n], a_step, b_step, 0);
                    }
                }
                CF_UNROLL
                for (int n = 0; n < 2; n++) {
                    const float scale[2] = {i ? scales[n].z : scales[n].x, i ? scales[n].w : scales[n].y};
                    CF_UNROLL
                    for (int e = 0; e < 4; e++) d[0][n][e] = fmaf(of_span[n][e], scale[e % 2], d[0][n][e]);
                }
            }
        }
    }
    // d += A B over the 16 rows of a tile, with A the accumulator of an earlier product: O += P V; as
    // multiply_by_columns. Codes are summed there, zeros here, until `finalize`.
    template <int kN>
    CF_DEVICE void multiply_by_columns(float (&d)[1][kN][4], const float (&a)[1][2][4], uint32_t codes,
                                       uint32_t units) {
        static_assert(kN == 4 * kSpans);
        const int t = threadIdx.x % 4;
        const auto b = tile_at(values, codes);
        const auto weights = Math::from_accumulator(a[0], 0);
        const uint32_t first = units + (kReady ? value_zeros : place_of_value_zeros(opaque(threadIdx.x)));
        const uint32_t second = kSpans == 8 ? first ^ 16 : first + 16;
        const Fragment of_zeros = {{{ld_shared<uint32_t>(first), ld_shared<uint32_t>(second), 0, 0}}};
        get_zero_sums();
        Math::multiply(zero_sums, weights, of_zeros, 0);
        put_zero_sums();
        uint32_t scales[2][kTogether];    // of keys 2t and 2t + 1, then 8 further
        CF_UNROLL
        for (int block = 0; block < kSpans / 2; block++) {
            uint32_t words[4];    // of span 2 block keys 0 to 7 and 8 to 15, then of 2 block + 1
            ldmatrix_x4_trans(words, b.address(0, block));
            CF_UNROLL
            for (int half = 0; half < (2 * block % kTogether == 0 ? 2 : 0); half++) {
                const uint32_t from = units + block * 64 + (t + 4 * half) * (4 * kTogether);
                if constexpr (kTogether == 4) reinterpret_cast<uint4&>(scales[half]) = ld_shared<uint4>(from);
                else reinterpret_cast<uint2&>(scales[half]) = ld_shared<uint2>(from);
            }
            CF_UNROLL
            for (int i = 0; i < 2; i++) {
                const int span = 2 * block + i;
                Fragment a_step;
                CF_UNROLL
                for (int r = 0; r < 4; r++) {
                    const __half2 value = __hmul2(reinterpret_cast<const __half2&>(weights.part[0][r]),
                                                  reinterpret_cast<const __half2&>(scales[r / 2][span % kTogether]));
                    a_step.part[0][r] = reinterpret_cast<const uint32_t&>(value);
                }
                CF_UNROLL
                for (int j = 0; j < 4; j++) {
                    const Fragment b_step = {
                        {{pair_of_codes(words[2 * i], j), pair_of_codes(words[2 * i + 1], j), 0, 0}}};
                    Math::multiply(d[0][4 * span + j], a_step, b_step, 0);
                }
            }
        }
    }
    // Turns columns of features into O by adding the sums of zeros.
    template <int kN> CF_DEVICE void finalize(float (&d)[1][kN][4], const ValueUnits& of, int32_t steps) {
        get_zero_sums();
        const float unit = of.plain_from < steps ? kCode : kCode / kRaised;    // of a product of scale and code
        const int quad = threadIdx.x % 32 / 4 * 4;
        CF_UNROLL
        for (int span = 0; span < kSpans; span++) {
            CF_UNROLL
            for (int half = 0; half < 2; half++) {
                const float zeros =
                    __shfl_sync(0xffffffffu, zero_sums[2 * half + span % 2], quad + span / 2);
                CF_UNROLL
                for (int j = 0; j < 4; j++) {
                    CF_UNROLL
                    for (int e = 2 * half; e < 2 * half + 2; e++) {
                        float& x = d[0][4 * span + j][e];
                        x = fmaf(x, j % 2 ? unit * 0.0625f : unit, zeros);
                    }
                }
            }
        }
    }
    // Sums follow the maxima of the thread's two rows; `lowered`: those of codes, scales that are as they are.
    template <int kN> CF_DEVICE void rescale_o(float (&d)[1][kN][4], const float (&rescale)[2], bool lowered) {
        get_zero_sums();
        CF_UNROLL
        for (int e = 0; e < 4; e++) {
            zero_sums[e] *= rescale[e / 2];
            const float factor = rescale[e / 2] * (lowered ? 1.0f / kRaised : 1.0f);
            CF_UNROLL
            for (int n = 0; n < kN; n++) d[0][n][e] *= factor;
        }
        put_zero_sums();
    }

  private:
    CF_DEVICE void get_zero_sums() {
        if constexpr (!kReady) reinterpret_cast<float4&>(zero_sums) = ld_shared<float4>(kept + 512);
    }
    CF_DEVICE void put_zero_sums() const {
        if constexpr (!kReady) st_shared(kept + 512, reinterpret_cast<const float4&>(zero_sums));
    }
    CF_DEVICE static uint32_t place_of_key_zeros(uint32_t thread) {
        return KeyUnits::kScaleBytes + thread % 8 % kSpans * 32 + (thread % 32 / 16 ^ thread / 4 % 2) * 16;
    }
    CF_DEVICE static uint32_t place_of_value_zeros(uint32_t thread) {
        const uint32_t g = thread % 32 / 4, t = thread % 4;
        return ValueUnits::kScaleBytes + g % kSpans * 32 + (kSpans == 8 ? g / 4 * 16 : 0) + t * 4;
    }
    template <class Reader> CF_DEVICE static Reader tile_at(Reader of_first, uint32_t codes) {
        if constexpr (!kReady) return Reader(codes);
        of_first.lane_address += codes;
        return of_first;
    }
};
