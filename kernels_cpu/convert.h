// Elements in memory, of any dtype and stride, and the reals that are computed with.
#pragma once
#include "call.h"
#include "lanes.h"
#if defined(__F16C__)
#include <immintrin.h>
#endif

// Of an element; a byte of two codes is one.
inline int64_t bytes_of(Type type) {
    return type == kF64 ? 8 : type == kF32 ? 4 : type == kF16 || type == kBf16 ? 2 : 1;
}

INLINE float from_bits(uint32_t b) {
    float f;
    memcpy(&f, &b, 4);
    return f;
}
INLINE uint32_t to_bits(float f) {
    uint32_t b;
    memcpy(&b, &f, 4);
    return b;
}
INLINE float from_bf16(uint16_t x) { return from_bits(uint32_t(x) << 16); }
INLINE uint16_t to_bf16(float f) {
    uint32_t b = to_bits(f), is_nan = (b & 0x7fffffff) > 0x7f800000;
    uint32_t rounded = (b + 0x7fff + ((b >> 16) & 1)) >> 16;    // to nearest, ties to even
    return uint16_t(is_nan ? (b >> 16) | 0x40 : rounded);
}
INLINE float from_f16(uint16_t x) {
    _Float16 h;
    memcpy(&h, &x, 2);
    return float(h);
}
INLINE uint16_t to_f16(float f) {
    _Float16 h = _Float16(f);
    uint16_t x;
    memcpy(&x, &h, 2);
    return x;
}
// float8_e4m3fn: no infinities, 0x7f is NaN.
INLINE float from_e4m3(uint8_t x) {
    uint32_t b = x & 0x7f;
    float small = float(int32_t(b)) * (1 / 512.f);    // subnormal, below 2^-6
    float f = b < 8 ? small : from_bits((b << 20) + (120u << 23));
    f = b == 0x7f ? from_bits(0x7fc00000) : f;
    return from_bits(to_bits(f) | uint32_t(x & 0x80) << 24);
}
// All of them. why: one at a time, a look is less than the arithmetic.
struct E4m3Numbers {
    float of[256] = {};
    constexpr E4m3Numbers() {
        for (int b = 0; b < 256; ++b) {
            float size = float(b % 8 + (b & 0x78 ? 8 : 0)) / 512;
            for (int exponent = b / 8 % 16; exponent > 1; --exponent) size *= 2;
            if (b % 128 == 127) size = __builtin_nanf("");
            of[b] = b & 0x80 ? -size : size;
        }
    }
};
inline constexpr E4m3Numbers kE4m3Numbers;
INLINE uint8_t to_e4m3(float f) {
    uint32_t b = to_bits(f), sign = b >> 24 & 0x80;
    float a = from_bits(b & 0x7fffffff);
    if (!(a <= 448)) return uint8_t(sign | (a > 448 ? 0x7e : 0x7f));
    if (a < 1 / 64.f) return uint8_t(sign | uint32_t(a * 512 + 8388608.f - 8388608.f));
    b = to_bits(a);
    return uint8_t(sign | (((b + 0x7ffff + ((b >> 20) & 1)) >> 20) - (120u << 3)));
}

template <class From>
INLINE From element(const void* s, int64_t at) {
    From x;
    memcpy(&x, static_cast<const char*>(s) + at * int64_t(sizeof(From)), sizeof(From));
    return x;
}

// Loads and stores a vector of bfloat16 or int8: the same numbers as one at a time.
typedef uint16_t Bf16s __attribute__((vector_size(kVectorBytes / 2)));
typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
INLINE V<float> load_bf16(const void* s, int64_t at) {
    Bf16s x;
    memcpy(&x, static_cast<const uint16_t*>(s) + at, sizeof x);
    return (V<float>)(__builtin_convertvector(x, Words) << 16);
}
INLINE V<float> load_int8(const void* s, int64_t at) {
    typedef int8_t Bytes __attribute__((vector_size(kVectorBytes / 4)));
    Bytes x;
    memcpy(&x, static_cast<const int8_t*>(s) + at, sizeof x);
    return __builtin_convertvector(__builtin_convertvector(x, I<float>), V<float>);
}
INLINE void store_bf16(void* d, int64_t at, V<float> f) {
    Words b = (Words)f, is_nan = (Words)((b & 0x7fffffff) > 0x7f800000);
    b = (is_nan & (b | 0x400000)) | (~is_nan & (b + 0x7fff + ((b >> 16) & 1)));
    Bf16s x = __builtin_convertvector(b >> 16, Bf16s);
    memcpy(static_cast<uint16_t*>(d) + at, &x, sizeof x);
}

// Halves in memory, which `load` makes vectors of floats of.
struct F16 {
    uint16_t bits;
};
struct Bf16 {
    uint16_t bits;
};
INLINE V<float> load(const Bf16* p) { return load_bf16(p, 0); }
#if defined(__F16C__)
constexpr bool kConvertsF16 = true;    // by vectors
INLINE V<float> load(const F16* p) {
#if defined(__AVX512F__)
    // why a mask: GCC warns of the header's form without one.
    return (V<float>)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#else
    return (V<float>)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#endif
}
#else
constexpr bool kConvertsF16 = false;
#endif

template <class Real, class From, class Convert>
INLINE void widen_by(Real* d, const void* s, int64_t at, int64_t n, int64_t step, Convert convert) {
    if (step == 1)
        for (int64_t i = 0; i < n; ++i) d[i] = Real(convert(element<From>(s, at + i)));
    else
        for (int64_t i = 0; i < n; ++i) d[i] = Real(convert(element<From>(s, at + i * step)));
}
template <class To, class Real, class Convert>
INLINE void narrow_by(void* d, int64_t at, const Real* s, int64_t n, int64_t step, Convert convert) {
    for (int64_t i = 0; i < n; ++i) {
        To x = convert(s[i]);
        memcpy(static_cast<char*>(d) + (at + i * step) * int64_t(sizeof(To)), &x, sizeof(To));
    }
}

// n elements from the one at `at` on, `step` apart, as floats.
inline __attribute__((noinline)) void widen(float* d, const void* s, int64_t at, int64_t n, int64_t step,
                                            Type type) {
    int64_t i = 0;
    switch (type) {
        case kF32:
            if (step == 1) memcpy(d, static_cast<const float*>(s) + at, size_t(n) * 4);
            else widen_by<float, float>(d, s, at, n, step, [](float x) { return x; });
            break;
        case kF64: widen_by<float, double>(d, s, at, n, step, [](double x) { return x; }); break;
        case kF16:
#if defined(__F16C__)
            // why by hand: compilers convert one at a time.
            for (; step == 1 && i + 8 <= n; i += 8) {
                const uint16_t* from = static_cast<const uint16_t*>(s) + at + i;
                _mm256_storeu_ps(d + i,
                                 _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
            }
#endif
            widen_by<float, uint16_t>(d + i, s, at + i * step, n - i, step, from_f16);
            break;
        case kBf16:
            for (; step == 1 && i + W<float> <= n; i += W<float>) store(d + i, load_bf16(s, at + i));
            widen_by<float, uint16_t>(d + i, s, at + i * step, n - i, step, from_bf16);
            break;
        case kE4m3: widen_by<float, uint8_t>(d, s, at, n, step, from_e4m3); break;
        case kInt8:
            for (; step == 1 && i + W<float> <= n; i += W<float>) store(d + i, load_int8(s, at + i));
            widen_by<float, int8_t>(d + i, s, at + i * step, n - i, step, [](int8_t x) { return x; });
            break;
        case kBool: widen_by<float, uint8_t>(d, s, at, n, step, [](uint8_t x) { return x != 0; }); break;
        case kCodes: break;    // its rows are widen_codes'
    }
}

// The other way, rounded to nearest; to 8 bits, cut to what they hold.
inline __attribute__((noinline)) void narrow(void* d, int64_t at, const float* s, int64_t n, int64_t step,
                                             Type type) {
    int64_t i = 0;
    switch (type) {
        case kF32:
            if (step == 1) memcpy(static_cast<float*>(d) + at, s, size_t(n) * 4);
            else narrow_by<float>(d, at, s, n, step, [](float x) { return x; });
            break;
        case kF64: narrow_by<double>(d, at, s, n, step, [](float x) { return double(x); }); break;
        case kF16:
#if defined(__F16C__)
            for (; step == 1 && i + 8 <= n; i += 8) {
                uint16_t* to = static_cast<uint16_t*>(d) + at + i;
                _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(_mm256_loadu_ps(s + i), 0));
            }
#endif
            narrow_by<uint16_t>(d, at + i * step, s + i, n - i, step, to_f16);
            break;
        case kBf16:
            for (; step == 1 && i + W<float> <= n; i += W<float>) store_bf16(d, at + i, load(s + i));
            narrow_by<uint16_t>(d, at + i * step, s + i, n - i, step, to_bf16);
            break;
        case kE4m3: narrow_by<uint8_t>(d, at, s, n, step, to_e4m3); break;
        case kInt8:
            narrow_by<int8_t>(d, at, s, n, step, [](float x) {
                // why so: no comparison holds of a NaN, which becomes 0; as an integer it would be anything.
                return int8_t(__builtin_rintf(x > -127 ? x < 127 ? x : 127 : x < 0 ? -127 : 0));
            });
            break;
        case kBool:
        case kCodes: break;    // nothing writes booleans, and narrow_codes writes these
    }
}

// ---- codes of 4 bits: feature 2i in the lower half of byte i; scale * code + zero, or scale * E2M1

INLINE float code_unit(const Tensor& t, int64_t at) {
    return t.type == kF16 ? from_f16(element<uint16_t>(t.data, at)) : element<float>(t.data, at);
}

// A code to the lowest 4 bits of each of W words.
INLINE I<float> words_of(const uint8_t* two) {
    constexpr int w = W<float>;
    typedef uint8_t Bytes __attribute__((vector_size(w / 2)));
    typedef uint64_t Pairs __attribute__((vector_size(kVectorBytes)));
    Bytes bytes;
    memcpy(&bytes, two, w / 2);
    // why 28: the upper half of a byte becomes the lowest bits of the upper one of two words
    Pairs x = __builtin_convertvector(bytes, Pairs);
    return (I<float>)(x | x << 28);
}
// E2M1 of words from 0 to 15.
INLINE V<float> from_e2m1(I<float> x) {
    // why not where exponent and mantissa would be a subnormal number: those take processors a hundred cycles
    V<float> size = (V<float>)(((x & 7) << 22) + (126 << 23)),
             below = size - 1;    // 0.5 and 0.75 for 0 and 0.5
    size -= bigger(-below, V<float>{});
    return (V<float>)((I<float>)size | (x & 8) << 28);
}
// Dequantises n features; `next` gives the values of the codes of each group.
template <class Group>
INLINE void widen_groups(float* d, const uint8_t* row, int64_t n, int64_t group, Group next) {
    constexpr int w = W<float>;
#if defined(__AVX512F__)
    I<float> each;
    for (int l = 0; l < w; ++l) each[l] = l;
#endif
    for (int64_t i = 0; i < n;) {
        const auto worth = next();
#if defined(__AVX512F__)
        const V<float> table = worth(each);    // of all 16
        const auto look = [&](I<float> x) {
            return (V<float>)_mm512_maskz_permutexvar_ps(0xffff, (__m512i)x, (__m512)table);
        };
#else
        const auto look = [&](I<float> x) { return worth(x & 15); };
#endif
        for (int64_t end = i + group; i < end; i += w) store(d + i, look(words_of(row + i / 2)));
    }
}

// n features of the row whose codes begin at `row` and whose scales and zeros are from element `scale`, `zero` on.
inline __attribute__((noinline)) void widen_codes(float* d, const uint8_t* row, int64_t n, const Codes& c,
                                                  int64_t scale, int64_t zero) {
    if (!c.zero.data)
        return widen_groups(d, row, n, c.group, [&] {
            const float by = kE4m3Numbers.of[static_cast<const uint8_t*>(c.scale.data)[scale]];
            scale += c.scale.column;
            return [by](I<float> x) { return from_e2m1(x) * splat(by); };
        });
    widen_groups(d, row, n, c.group, [&] {
        const float by = code_unit(c.scale, scale), from = code_unit(c.zero, zero);
        scale += c.scale.column, zero += c.zero.column;
        return
            [by, from](I<float> x) { return __builtin_convertvector(x, V<float>) * splat(by) + splat(from); };
    });
}

// The nearest of E2M1, ties to even mantissas: from 2 on its steps are 1, from 4 on 2, below 0.5. A NaN becomes 0.
inline RARE uint32_t to_e2m1(float x) {
    float a = x < 0 ? -x : x > 0 ? x : 0;
    float code = a < 2   ? __builtin_rintf(a * 2)
                 : a < 4 ? __builtin_rintf(a) + 2
                         : __builtin_rintf((a > 6 ? 6 : a) / 2) + 4;
    return uint32_t(code) | uint32_t(x < 0) << 3;
}
// The largest of a group is 6, by the scale as it is stored; a NaN is not counted.
inline RARE void narrow_e2m1(uint8_t* row, const float* s, int64_t n, const Codes& c, int64_t scale) {
    uint8_t* scales = static_cast<uint8_t*>(c.scale.data);
    for (int64_t i = 0; i < n; scale += c.scale.column) {
        float largest = 0;
        for (int64_t l = 0; l < c.group; ++l)
            largest = __builtin_fabsf(s[i + l]) > largest ? __builtin_fabsf(s[i + l]) : largest;
        scales[scale] = to_e4m3(largest / 6);
        float by = from_e4m3(scales[scale]);
        for (int64_t end = i + c.group; i < end; i += 2)
            row[i / 2] = by > 0 ? uint8_t(to_e2m1(s[i] / by) | to_e2m1(s[i + 1] / by) << 4) : uint8_t(0);
    }
}

// Quantises: the lowest of a group is code 0, the highest 15, by scale and zero as they are stored. A NaN counts for
// neither and becomes code 0; values that overflow zero or the span of a group are clamped.
inline RARE void narrow_codes(uint8_t* row, const float* s, int64_t n, const Codes& c, int64_t scale,
                              int64_t zero) {
    if (!c.zero.data) return narrow_e2m1(row, s, n, c, scale);
    const auto keep = [](const Tensor& t, int64_t at, float x) {
        if (t.type == kF16) static_cast<uint16_t*>(t.data)[at] = to_f16(x);
        else static_cast<float*>(t.data)[at] = x;
        return code_unit(t, at);
    };
    for (int64_t i = 0; i < n;) {
        const float limit = c.zero.type == kF16 ? 65504.f : 0x1p126f;
        float low = limit, high = -limit;
        for (int64_t l = 0; l < c.group; ++l)
            low = s[i + l] < low ? s[i + l] : low, high = s[i + l] > high ? s[i + l] : high;
        if (low > high) low = high = 0;    // all are NaN
        low = low > -limit ? low : -limit, high = high < limit ? high : limit;
        float from = keep(c.zero, zero, low), by = keep(c.scale, scale, (high - low) / 15);
        const auto code = [&](float x) {
            x = by > 0 ? (x - from) / by : 0;
            return uint8_t(__builtin_rintf(x > 0 ? x < 15 ? x : 15 : 0));
        };
        for (int64_t end = i + c.group; i < end; i += 2)
            row[i / 2] = uint8_t(code(s[i]) | code(s[i + 1]) << 4);
        scale += c.scale.column, zero += c.zero.column;
    }
}

// The same for doubles. why others by way of float: each of them is one, and results of such a dtype have no more bits.
constexpr int64_t kAtOnce = 64;
inline __attribute__((noinline)) void widen(double* d, const void* s, int64_t at, int64_t n, int64_t step,
                                            Type type) {
    if (type == kF64) return widen_by<double, double>(d, s, at, n, step, [](double x) { return x; });
    float part[kAtOnce];
    for (int64_t i = 0; i < n; i += kAtOnce) {
        int64_t count = n - i < kAtOnce ? n - i : kAtOnce;
        widen(part, s, at + i * step, count, step, type);
        for (int64_t l = 0; l < count; ++l) d[i + l] = part[l];
    }
}
inline __attribute__((noinline)) void narrow(void* d, int64_t at, const double* s, int64_t n, int64_t step,
                                             Type type) {
    if (type == kF64) return narrow_by<double>(d, at, s, n, step, [](double x) { return x; });
    float part[kAtOnce];
    for (int64_t i = 0; i < n; i += kAtOnce) {
        int64_t count = n - i < kAtOnce ? n - i : kAtOnce;
        for (int64_t l = 0; l < count; ++l) part[l] = float(s[i + l]);
        narrow(d, at + i * step, part, count, step, type);
    }
}
