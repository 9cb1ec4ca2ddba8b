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
