// Element types, the type each one accumulates in, and the few functions of that type that attention needs.
#pragma once
#include "prim.cuh"

// An 8-bit float: 4 bits of exponent, 3 of mantissa, up to 448, no infinity. Only tensor cores compute with it.
struct E4M3 {
    uint8_t bits;
};

// float, or double for double elements.
template <class Element> struct AccumulatorOf {
    using Type = float;
};
template <> struct AccumulatorOf<double> {
    using Type = double;
};
template <class Element> using Accumulator = typename AccumulatorOf<Element>::Type;

CF_DEVICE float widen(__half x) { return __half2float(x); }
CF_DEVICE float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
CF_DEVICE float widen(float x) { return x; }
CF_DEVICE double widen(double x) { return x; }

// Round to nearest even.
template <class Element, class Acc> CF_DEVICE Element narrow(Acc x) {
    if constexpr (kSame<Element, __half>) return __float2half_rn(static_cast<float>(x));
    else if constexpr (kSame<Element, __nv_bfloat16>) return __float2bfloat16_rn(static_cast<float>(x));
    else return static_cast<Element>(x);
}

// 2^x, as ex2, by multiply-adds alone: relative error 3e-6, exact where x is a whole number, exactly 0 at -127.
// why: a multiprocessor computes 16 ex2 a cycle, and 128 multiply-adds.
// x = kTop - (kTop + 127) t, for t from 0 to 1. why t: a multiply-add that computes it can also keep it in these
// bounds, which x needs: below -127 its 2^n is none.
// 2^x = 2^n 2^f, n the integer nearest to x, f in [-1/2, 1/2], with the polynomial through 1 whose largest error
// is least.
template <int kTop> CF_DEVICE float ex2_by_polynomial(float t) {
    constexpr float kSpan = kTop + 127;
    constexpr float kMagic =
        12582912.0f + kTop;    // 1.5 * 2^23: the low bits of a sum are the nearest integer
    const float shifted = fmaf(t, -kSpan, kMagic);
    const float f = fmaf(t, -kSpan, kMagic - shifted);
    float y = fmaf(9.58257634e-3f, f, 5.59068285e-2f);
    y = fmaf(y, f, 2.40241066e-1f);
    y = fmaf(y, f, 6.93124115e-1f);
    y = fmaf(y, f, 1.0f);
    return __uint_as_float((__float_as_uint(shifted) << 23) + __float_as_uint(y));    // y's exponent + n
}

// why a macro: what every GPU and the simulator shall compute alike uses no instruction that approximates.
#if defined(CF_SAME_BITS)
#include "same_bits.cuh"
#else
// why: the hardware has 2^x, not e^x; its relative error of 2^-22 is far below the rounding of a softmax
// weight.
CF_DEVICE float natural_exp(float x) { return ex2(x * kLog2e); }
CF_DEVICE double natural_exp(double x) { return exp(x); }
CF_DEVICE float natural_log(float x) { return logf(x); }
CF_DEVICE double natural_log(double x) { return log(x); }
CF_DEVICE float hyperbolic_tangent(float x) { return tanhf(x); }
CF_DEVICE double hyperbolic_tangent(double x) { return tanh(x); }
template <class Acc> CF_DEVICE Acc multiply_add(Acc a, Acc b, Acc c) { return a * b + c; }
#endif
