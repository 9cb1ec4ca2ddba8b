// Vectors of the target's width, in GCC's and Clang's vector extensions: one text for every ISA.
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define RARE __attribute__((cold, noinline))    // once a call or a head, or for new keys only: size counts

// why two texts: attributes do not see the parameters of a template.
template <class Real>
struct Lanes;
template <>
struct Lanes<float> {
    typedef float V __attribute__((vector_size(kVectorBytes)));
    typedef float Anywhere __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
    typedef int32_t Int;
    typedef int32_t I __attribute__((vector_size(kVectorBytes)));
    typedef uint32_t U __attribute__((vector_size(kVectorBytes)));
};
template <>
struct Lanes<double> {
    typedef double V __attribute__((vector_size(kVectorBytes)));
    typedef double Anywhere __attribute__((vector_size(kVectorBytes), aligned(8), may_alias));
    typedef int64_t Int;
    typedef int64_t I __attribute__((vector_size(kVectorBytes)));
    typedef uint64_t U __attribute__((vector_size(kVectorBytes)));
};
template <class Real>
using V = typename Lanes<Real>::V;    // a vector of reals
template <class Real>
using I = typename Lanes<Real>::I;    // integers of the same width
// For sums of bits: those of a NaN may carry beyond a sign.
template <class Real>
using U = typename Lanes<Real>::U;
template <class Real>
using Int = typename Lanes<Real>::Int;
template <class Real>
constexpr int W = kVectorBytes / sizeof(Real);    // lanes
constexpr int kVectors = 2;
template <class Real>
constexpr int kPanel = kVectors * W<Real>;    // lanes of a panel, which are queries: 32 floats with AVX-512
template <class Real>
constexpr Real kInfinity = __builtin_inff();

template <class Real>
INLINE V<Real> load(const Real* p) {
    return *reinterpret_cast<const typename Lanes<Real>::Anywhere*>(p);
}
template <class Real>
INLINE void store(Real* p, V<Real> x) {
    *reinterpret_cast<typename Lanes<Real>::Anywhere*>(p) = x;
}
template <class Real>
INLINE V<Real> splat(Real x) {
    return x - V<Real>{};    // why not V{} + x: that is another number for -0, and so an addition
}
template <class Real>
INLINE V<Real> zero() {
    return V<Real>{};
}
#if defined(__AVX512F__)
// A product that is rounded before anything is added to it.
INLINE V<float> not_fused(V<float> product) {
    asm("" : "+v"(product));
    return product;
}
#endif
// The bigger one of each lane; b where a is NaN.
template <class Vector>
INLINE Vector bigger(Vector a, Vector b) {
    return a > b ? a : b;
}
#if defined(__AVX__) && !defined(__AVX512F__)
// why: where one is a constant, GCC makes two instructions of that.
INLINE V<float> bigger(V<float> a, V<float> b) { return (V<float>)_mm256_max_ps((__m256)a, (__m256)b); }
#endif
template <int n>
struct Constant {
    static constexpr int value = n;
};
template <class Vector>
INLINE bool any(Vector x) {
    auto r = x[0];
    for (unsigned l = 1; l < sizeof(x) / sizeof(x[0]); ++l) r |= x[l];
    return r != 0;
}
// Whether any bit of a vector of integers is set, in as few instructions as there are.
template <class Vector>
INLINE bool any_bit(Vector x) {
#if defined(__AVX512F__)
    return _mm512_test_epi64_mask((__m512i)x, (__m512i)x) != 0;
#elif defined(__AVX__)
    return !_mm256_testz_si256((__m256i)x, (__m256i)x);
#else
    typedef int64_t Words __attribute__((vector_size(kVectorBytes)));
    Words y = (Words)x;
    return (y[0] | y[1]) != 0;
#endif
}
template <class Vector>
INLINE auto sum(Vector x) {
    auto r = x[0];
    for (unsigned l = 1; l < sizeof(x) / sizeof(x[0]); ++l) r += x[l];
    return r;
}

// ---- e^x and tanh

template <class Real>
struct Exponential;
template <>
struct Exponential<float> {
    static constexpr float kMagic =
        12582912.f;    // 1.5 * 2^23: the last bits of a sum are the nearest integer
    static constexpr int kMantissa = 23, kLowest = -127, kHighest = 128;
    // 2^f on [-1/2, 1/2] to 9e-8 of itself, fitted; Taylor terms that tanh takes
    static constexpr float kFast[] = {
        1.f, 6.931469776e-1f, 2.402224208e-1f, 5.550733744e-2f, 9.671512661e-3f, 1.32647269e-3f};
    static constexpr int kTerms = 8;
};
template <>
struct Exponential<double> {                               // Taylor: ln(2)^k / k!
    static constexpr double kMagic = 6755399441055744.;    // 1.5 * 2^52
    static constexpr int kMantissa = 52, kLowest = -1023, kHighest = 1024;
    static constexpr double kFast[] = {1.,
                                       0.69314718055994531,
                                       0.24022650695910071,
                                       0.055504108664821580,
                                       0.0096181291076284772,
                                       0.0013333558146428443,
                                       1.5403530393381610e-4,
                                       1.5252733804059840e-5,
                                       1.3215486790144307e-6,
                                       1.0178086009239699e-7,
                                       7.0549116208011233e-9,
                                       4.4455382718708116e-10,
                                       2.5678435993488202e-11,
                                       1.3691488853904124e-12};
    static constexpr int kTerms = 13;
};
constexpr double kLog2e = 1.4426950408889634, kLn2 = 0.6931471805599453;

// x = n + f: the nearest integer, in the low bits of what is returned, and the rest.
template <class Real>
INLINE V<Real> split(V<Real> x, V<Real>* f) {
    const V<Real> magic = splat<Real>(Exponential<Real>::kMagic);
    V<Real> t = x + magic;
    *f = x - (t - magic);
    return t;
}

#if defined(__AMX_BF16__)
// e^x = 2^t: one instruction takes floor(t) away, one multiplies by 2^floor(t). why only here: beside products of
// floats it gains nothing, beside those of AMX up to 7 %.
INLINE V<float> scaled_exp(V<float> x) {
    // 2^f on [0, 1) to 8e-8 of itself, fitted
    constexpr float fast[] = {
        1.f, 6.931513117e-1f, 2.401644466e-1f, 5.579992974e-2f, 9.017007156e-3f, 1.867140335e-3f};
    constexpr __mmask16 all = 0xffff;    // why: without a mask GCC warns of its own headers
    V<float> t = x * splat<float>(float(kLog2e)), p = splat<float>(fast[5]);
    V<float> f = (V<float>)_mm512_maskz_reduce_ps(all, (__m512)t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    UNROLL for (int i = 4; i >= 0; --i) p = p * f + splat<float>(fast[i]);
    return (V<float>)_mm512_maskz_scalef_ps(all, (__m512)p, (__m512)t);
}
#endif

// e^x; exactly 0 where it is no normal number, but by scaled_exp. With `any_sign` infinite above the largest number, else
// x <= 0.
template <class Real, bool any_sign = false>
INLINE V<Real> exp_(V<Real> x) {
    using E = Exponential<Real>;
#if defined(__AMX_BF16__)
    if constexpr (sizeof(Real) == 4) return scaled_exp(x);
#endif
    constexpr int terms = sizeof(E::kFast) / sizeof(Real);
    // why not split(x log2 e): fused, the sums need no product.
    const V<Real> magic = splat<Real>(E::kMagic), log2e = splat<Real>(Real(kLog2e));
    V<Real> t = x * log2e + magic, f = x * log2e - (t - magic), p = splat<Real>(E::kFast[terms - 1]);
    UNROLL for (int i = terms - 2; i >= 0; --i) p = p * f + splat<Real>(E::kFast[i]);
    V<Real> y = (V<Real>)((U<Real>)p + ((U<Real>)t << E::kMantissa));
    if (any_sign) y = x > splat<Real>(Real(kLn2 * E::kHighest)) ? splat<Real>(kInfinity<Real>) : y;
    return x < splat<Real>(Real(kLn2 * (E::kLowest + 1))) ? zero<Real>() : y;
}

// tanh x = e / (e + 2) with e = e^(2 |x|) - 1 = 2^n (2^f - 1) + (2^n - 1), exact where x is small.
template <class Real>
INLINE V<Real> tanh_(V<Real> x) {
    using E = Exponential<Real>;
    V<Real> a = x < zero<Real>() ? -x : x;
    a = a * splat<Real>(Real(2 * kLog2e));
    const V<Real> large = splat<Real>(64);    // from where on the result is 1
    a = a > large ? large : a;
    V<Real> f, t = split<Real>(a, &f);
    V<Real> p = splat<Real>(0);
    UNROLL for (int i = E::kTerms; i >= 1; --i) p = p * f + splat<Real>(Real(Exponential<double>::kFast[i]));
    p = p * f;
    V<Real> power = (V<Real>)((U<Real>)splat<Real>(1) + ((U<Real>)t << E::kMantissa));
    V<Real> e = power * p + (power - splat<Real>(1));
    V<Real> y = e / (e + splat<Real>(2));
    return x < zero<Real>() ? -y : y;
}

// ---- transposition

template <int... i>
struct Sequence_ {};
template <int n, int... i>
struct Count : Count<n - 1, n - 1, i...> {};
template <int... i>
struct Count<0, i...> {
    typedef Sequence_<i...> type;
};
// Lanes of a and b interleaved, within each 16 bytes: of those of their first halves, or of the second.
template <bool second, class Vector, int... i>
INLINE Vector zip(Vector a, Vector b, Sequence_<i...>) {
    constexpr int w = sizeof...(i), lane = 16 * w / sizeof(Vector), from = second * lane / 2;
    return __builtin_shufflevector(a, b, (i / lane * lane + from + i % lane / 2 + i % 2 * w)...);
}
// 16 bytes at a time: those with an even number in a, then in b; or those with an odd one.
template <bool odd, class Vector, int... i>
INLINE Vector unzip(Vector a, Vector b, Sequence_<i...>) {
    constexpr int w = sizeof...(i), lane = 16 * w / sizeof(Vector);
    return __builtin_shufflevector(a, b, ((i / lane * 2 + odd) * lane + i % lane)...);
}

// W rows of W reals become columns, in registers: first within 16 bytes, then 16 bytes at a time. why: instructions
// that move single reals over all of a vector are slow, or two.
template <class Real>
INLINE void transpose(V<Real>* r) {
    constexpr int w = W<Real>, lane = 16 / sizeof(Real);
    typedef typename Count<w>::type All;
    V<Real> t[w];
    UNROLL for (int step = 1; step < lane; step *= 2) {
        UNROLL for (int i = 0; i < w; ++i) t[i] = r[i];
        UNROLL for (int i = 0; i < w; i += lane) UNROLL for (int j = 0; j < lane / 2; ++j) {
            r[i + 2 * j] = zip<false>(t[i + j], t[i + j + lane / 2], All());
            r[i + 2 * j + 1] = zip<true>(t[i + j], t[i + j + lane / 2], All());
        }
    }
    UNROLL for (int step = lane; step < w; step *= 2) {
        UNROLL for (int i = 0; i < w; ++i) t[i] = r[i];
        UNROLL for (int i = 0; i < w / 2; i += lane) UNROLL for (int j = 0; j < lane; ++j) {
            r[i + j] = unzip<false>(t[2 * i + j], t[2 * i + lane + j], All());
            r[i + j + w / 2] = unzip<true>(t[2 * i + j], t[2 * i + lane + j], All());
        }
    }
}
