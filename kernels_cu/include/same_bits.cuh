// e^x, log x, tanh x and a * b + c of operations that IEEE 754 rounds to nearest: sums, products, quotients and fused
// multiply-adds, in the order written here. So a GPU of any architecture and a CPU get the same bits, except those of
// NaN, which has several representations.
// Design note: docs/kernels/simple.md.
//
// Files that include this are compiled without contraction (--fmad=false, -ffp-contract=off): a product and a sum are
// fused only where the source says so.
#pragma once
#include "base.cuh"

CF_DEVICE float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
CF_DEVICE double multiply_add(double a, double b, double c) { return fma(a, b, c); }

// How a type is stored, and the constants of its functions.
template <class T> struct Format;
template <> struct Format<float> {
    using Bits = int32_t;
    enum : int { kFraction = 23, kBias = 127, kTerms = 7 };
    CF_DEVICE static constexpr float least() { return -105; }    // below, e^x is 0
    CF_DEVICE static constexpr float most() { return 90; }       // above, it is infinite
    CF_DEVICE static constexpr float shift() { return 12582912.0f; }
    CF_DEVICE static constexpr float ln2_rest() { return -1.904654299957768e-9f; }
};
template <> struct Format<double> {
    using Bits = int64_t;
    enum : int { kFraction = 52, kBias = 1023, kTerms = 13 };
    CF_DEVICE static constexpr double least() { return -746; }
    CF_DEVICE static constexpr double most() { return 711; }
    CF_DEVICE static constexpr double shift() { return 6755399441055744.0; }
    CF_DEVICE static constexpr double ln2_rest() { return 2.3190468138462996e-17; }
};
constexpr double kLn2Exactly = 0.69314718055994531, kLog2eExactly = 1.4426950408889634;

// 2^n, n within the exponents of normal numbers.
template <class T> CF_DEVICE T power_of_two(typename Format<T>::Bits n) {
    return __builtin_bit_cast(T, (n + Format<T>::kBias) << Format<T>::kFraction);
}

constexpr double factorial(int n) { return n < 2 ? 1.0 : n * factorial(n - 1); }

// 1/n! + r/(n+1)! + ... as far as the type can tell, for |r| <= ln(2) / 2.
template <int n, class T> CF_DEVICE T exponential_series(T r) {
    constexpr T kHere = static_cast<T>(1.0 / factorial(n));
    if constexpr (n == Format<T>::kTerms) return kHere;
    else return multiply_add(exponential_series<n + 1>(r), r, kHere);
}

// e^x = 2^n (1 + rest), n the integer nearest to x log2(e).
template <class T> struct Exponential {
    typename Format<T>::Bits n;
    T rest;

    CF_DEVICE explicit Exponential(T x) {
        using Bits = typename Format<T>::Bits;
        // why: the low bits of a sum with 1.5 * 2^kFraction are the nearest integer.
        const T shifted = multiply_add(x, static_cast<T>(kLog2eExactly), Format<T>::shift());
        n = __builtin_bit_cast(Bits, shifted) - __builtin_bit_cast(Bits, Format<T>::shift());
        const T whole = shifted - Format<T>::shift();
        T r = multiply_add(whole, -static_cast<T>(kLn2Exactly), x);
        r = multiply_add(whole, -Format<T>::ln2_rest(), r);
        rest = multiply_add(r * r, exponential_series<2>(r), r);
    }
};

// NaN stays NaN in all of these.
template <class T> CF_DEVICE T natural_exp(T x) {
    const Exponential<T> e(smaller(larger(x, Format<T>::least()), Format<T>::most()));
    // why two factors: 2^n may be no normal number; the first product is exact.
    return (1 + e.rest) * power_of_two<T>(e.n / 2) * power_of_two<T>(e.n - e.n / 2);
}

template <class T> CF_DEVICE T hyperbolic_tangent(T x) {
    const T most = 20;    // of more it is 1
    const T size = smaller(x < 0 ? -x : x, most);
    const Exponential<T> e(2 * size);
    // tanh x = (e^2x - 1) / (e^2x + 1), from e^2x - 1, which is as precise where it is small.
    const T power = power_of_two<T>(e.n);
    const T less_one = multiply_add(power, e.rest, power - 1);
    const T tanh = less_one / (less_one + 2);
    return x < 0 ? -tanh : tanh;
}

// 1/(2n+1) + z/(2n+3) + ..., for z <= 0.03.
template <int n> CF_DEVICE double logarithm_series(double z) {
    constexpr double kHere = 1.0 / (2 * n + 1);
    if constexpr (n == 10) return kHere;
    else return multiply_add(logarithm_series<n + 1>(z), z, kHere);
}
// Of normal numbers above 0. x = 2^n m, m of [sqrt(1/2), sqrt(2)), log m = 2 atanh((m - 1) / (m + 1)).
CF_DEVICE double natural_log(double x) {
    if (!(x < double(kInfinity))) return x;
    const int64_t bits = __builtin_bit_cast(int64_t, x);
    const int64_t n = (bits - __builtin_bit_cast(int64_t, 0.70710678118654752)) >> 52;
    const double m = __builtin_bit_cast(double, bits - n * (int64_t(1) << 52));
    const double s = (m - 1) / (m + 1), z = s * s, twice = 2 * s;
    const double log = multiply_add(twice * z, logarithm_series<1>(z), twice);
    const double whole = static_cast<double>(n);
    return multiply_add(whole, kLn2Exactly, multiply_add(whole, Format<double>::ln2_rest(), log));
}
// why: one of each row, so that doubles cost nothing.
CF_DEVICE float natural_log(float x) { return static_cast<float>(natural_log(static_cast<double>(x))); }
