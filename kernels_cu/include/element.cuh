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

// 2^x, as ex2, by multiply-adds, for x up to 127: relative error 3e-6, exactly 1 at 0, exactly 0 from -127 on;
// NaN stays NaN. why: a multiprocessor computes 16 ex2 a cycle, and 128 multiply-adds.
// 2^x = 2^n 2^f, n the integer nearest to x, f in [-1/2, 1/2], with the polynomial through 1 whose largest error
// is least.
CF_DEVICE float ex2_by_polynomial(float x) {
    constexpr float kMagic = 12582912.0f;    // 1.5 * 2^23: the low bits of a sum are the nearest integer
    x = x < -127.0f ? -127.0f : x;
    const float shifted = x + kMagic;
    const float f = x - (shifted - kMagic);
    float y = fmaf(9.58257634e-3f, f, 5.59068285e-2f);
    y = fmaf(y, f, 2.40241066e-1f);
    y = fmaf(y, f, 6.93124115e-1f);
    y = fmaf(y, f, 1.0f);
    return y * __uint_as_float((__float_as_uint(shifted) << 23) + 0x3f800000u);    // 2^n; 0 for n = -127
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
