// What functions of the caller's may use beside + - * /: e^x, logarithm, quotients of integers, as exact as NumPy's.
#pragma once
#include "lanes.h"

// ln 2 in two parts, of which products of the first with small integers are exact.
template <class Real>
struct Ln2;
template <>
struct Ln2<float> {
    static constexpr float kHigh = 0.693359375f, kLow = -2.12194440e-4f;
    static constexpr int kTerms = 7, kLogTerms = 5, kBias = 127;
};
template <>
struct Ln2<double> {
    static constexpr double kHigh = 6.93147180369123816490e-01, kLow = 1.90821492927058770002e-10;
    static constexpr int kTerms = 14, kLogTerms = 12, kBias = 1023;
};

// e^x = 2^n e^f with n the nearest integer to x / ln 2: Taylor, Horner; infinite above the largest number.
template <class Real>
INLINE V<Real> exact_exp(V<Real> x) {
    using E = Exponential<Real>;
    using C = Ln2<Real>;
    V<Real> n, t = split<Real>(bigger(splat<Real>(E::kLowest), x * splat<Real>(Real(kLog2e))), &n);
    n = t - splat<Real>(E::kMagic);
    V<Real> f = x - n * splat<Real>(C::kHigh) - n * splat<Real>(C::kLow);
    V<Real> p = splat<Real>(1);
    UNROLL for (int k = C::kTerms; k >= 1; --k) p = p * (f * splat<Real>(Real(1. / k))) + splat<Real>(1);
    // why half: 2^n itself may be above the largest number where e^x is not.
    V<Real> y = (V<Real>)((U<Real>)p + (((U<Real>)t - 1) << E::kMantissa)) * splat<Real>(2);
    y = n > splat<Real>(E::kHighest) ? splat<Real>(kInfinity<Real>) : y;
    y = n <= splat<Real>(E::kLowest + 1) ? zero<Real>() : y;
    return x != x ? x : y;
}

// log x = n ln 2 + 2 atanh((m - 1) / (m + 1)) with x = 2^n m, m from the root of 1/2 to that of 2.
template <class Real>
INLINE V<Real> exact_log(V<Real> x) {
    using E = Exponential<Real>;
    using C = Ln2<Real>;
    constexpr Int<Real> one = Int<Real>(C::kBias) << E::kMantissa;
    const V<Real> least = (V<Real>)(I<Real>{} + (Int<Real>(1) << E::kMantissa));
    const V<Real> up = splat<Real>(Real(Int<Real>(1) << (E::kMantissa + 1)));
    V<Real> y = x < least ? x * up : x;    // numbers too small for an exponent of their own
    I<Real> shifted = x < least ? I<Real>{} - (E::kMantissa + 1) : I<Real>{};
    // The bits of the root of 1/2 are taken away, so that the exponent steps there.
    const V<Real> root = splat<Real>(Real(0.70710678118654752));
    I<Real> n = (I<Real>)((U<Real>)y - (U<Real>)root) >> E::kMantissa;
    V<Real> m = (V<Real>)((U<Real>)y - ((U<Real>)n << E::kMantissa));
    static_assert(one > 0);
    V<Real> s = (m - splat<Real>(1)) / (m + splat<Real>(1)), square = s * s, p = splat<Real>(0);
    UNROLL for (int k = C::kLogTerms; k >= 1; --k) p = p * square + splat<Real>(Real(2. / (2 * k + 1)));
    V<Real> by = __builtin_convertvector(n + shifted, V<Real>);
    // why in this order: near 1 s is all of it.
    V<Real> result = by * splat<Real>(C::kHigh) + (s + s + (s * (square * p) + by * splat<Real>(C::kLow)));
    result = x == splat<Real>(kInfinity<Real>) ? x : result;
    result = x == zero<Real>() ? splat<Real>(-kInfinity<Real>) : result;
    return x >= zero<Real>() ? result : splat<Real>(__builtin_nanf(""));
}

// a / b rounded down, and what is left, of the sign of b; 0 where b is 0.
template <class Real>
INLINE I<Real> floor_quotient(I<Real> a, I<Real> b, I<Real>* left) {
    V<Real> x = __builtin_convertvector(a, V<Real>), y = __builtin_convertvector(b, V<Real>);
    I<Real> q = __builtin_convertvector(x / y, I<Real>);
    if constexpr (sizeof(Real) == 4) {
        // why: beyond 22 bits a quotient of floats may be wrong by more than 1; it is 0 if only b is.
        const I<Real> far = I<Real>{} + (1 << 22);
        if (any((a > far) | (a < -far)))
            for (int l = 0; l < W<Real>; ++l) q[l] = b[l] ? int32_t(int64_t(a[l]) / b[l]) : 0;
    }
    I<Real> r = a - q * b, over = (r != 0) & ((r ^ b) < 0);
    q += over, r += over & b;    // over is -1 or 0
    I<Real> some = b != 0;
    *left = r & some;
    return q & some;
}
