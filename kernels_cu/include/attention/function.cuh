// What the text of a score function is made of, and the text: CF_FUNCTION, the number of arrays that it reads, is
// defined where a kernel is compiled for one. cupy_flash/program/c_text.py writes score_function.cuh.
#pragma once
#include "attention/dual.cuh"
#include "element.cuh"

// The first and the second derivative of a score function by the score.
template <class Real> struct ScoreDerivatives {
    Real slope, curvature;
};

#if defined(CF_FUNCTION)
constexpr bool kHasFunction = true;

// Integers wrap, as NumPy's do.
CF_DEVICE int32_t plus(int32_t a, int32_t b) {
    return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
}
CF_DEVICE int32_t minus(int32_t a, int32_t b) {
    return static_cast<int32_t>(static_cast<uint32_t>(a) - static_cast<uint32_t>(b));
}
CF_DEVICE int32_t times(int32_t a, int32_t b) {
    return static_cast<int32_t>(static_cast<uint32_t>(a) * static_cast<uint32_t>(b));
}
CF_DEVICE float plus(float a, float b) { return a + b; }
CF_DEVICE float minus(float a, float b) { return a - b; }
CF_DEVICE float times(float a, float b) { return a * b; }
CF_DEVICE double plus(double a, double b) { return a + b; }
CF_DEVICE double minus(double a, double b) { return a - b; }
CF_DEVICE double times(double a, double b) { return a * b; }
CF_DEVICE int32_t opposite(int32_t a) { return minus(0, a); }
CF_DEVICE float opposite(float a) { return -a; }
CF_DEVICE double opposite(double a) { return -a; }

// Rounded down, the remainder with the sign of the divisor; by 0 both are 0.
CF_DEVICE int32_t floor_quotient(int32_t a, int32_t b) {
    if (b == 0) return 0;
    if (b == -1) return opposite(a);    // why: the least integer has no opposite, and dividing it would trap
    return a / b - (a % b != 0 && (a < 0) != (b < 0));
}
CF_DEVICE int32_t floor_remainder(int32_t a, int32_t b) { return minus(a, times(floor_quotient(a, b), b)); }

template <class T> CF_DEVICE T magnitude(T a) { return a < 0 ? opposite(a) : a; }
// Of two that are equal or no numbers the first.
template <class T> CF_DEVICE T least_of(T a, T b) { return b < a ? b : a; }
template <class T> CF_DEVICE T greatest_of(T a, T b) { return a < b ? b : a; }
CF_DEVICE float exponential(float x) { return expf(x); }
CF_DEVICE double exponential(double x) { return exp(x); }
// why for 16 bits: as accurate as a softcap of theirs, which has two special functions too.
CF_DEVICE float tanh_of(float x) {
    return sizeof(CF_ELEMENT) == 2 ? fmaf(-2.0f, rcp(1.0f + ex2(x * (2 * kLog2e))), 1.0f) : tanhf(x);
}
CF_DEVICE double tanh_of(double x) { return tanh(x); }
CF_DEVICE float square_root(float x) { return sqrtf(x); }
CF_DEVICE double square_root(double x) { return sqrt(x); }

template <class Value, class Stored> CF_DEVICE Value element_of(const FunctionArray& x, int64_t at) {
    const Stored element = static_cast<const Stored*>(x.data)[at];
    if constexpr (kSame<Stored, __half> || kSame<Stored, __nv_bfloat16>) return Value(widen(element));
    else return Value(element);
}
// An index; outside of its axis it is cut off.
CF_DEVICE int64_t inside(int32_t index, int64_t extent) {
    return larger<int64_t>(0, smaller<int64_t>(index, extent - 1));
}
template <class Value, class Stored, class... Index>
CF_DEVICE Value element_at(const FunctionArray& x, Index... index) {
    int64_t at = 0;
    [[maybe_unused]] int axis = 0;
    ((at += inside(index, x.extent[axis]) * x.stride[axis], ++axis), ...);
    return element_of<Value, Stored>(x, at);
}
// Which element that is, in the order of C.
template <class... Index> CF_DEVICE int32_t place_of(const FunctionArray& x, Index... index) {
    int64_t at = 0;
    [[maybe_unused]] int axis = 0;
    ((at = at * x.extent[axis] + inside(index, x.extent[axis]), ++axis), ...);
    return static_cast<int32_t>(at);
}

// What the gradient of a score adds to that of an element that the function reads: the factor on it, and where.
template <class Real> struct ArgumentShare {
    Real factor;
    int32_t place;
};

// What a text in C, which the user has given, finds: the elements of an argument, and functions by their usual names.
template <class Value, class Stored, int kAxes> struct Elements {
    const FunctionArray& array;

    template <class... Index> CF_DEVICE Value operator()(Index... index) const {
        static_assert(sizeof...(Index) == kAxes, "an argument has one index for each axis");
        return element_at<Value, Stored>(array, int32_t{index}...);
    }
};
namespace score_text {
template <class T> CF_DEVICE T exp(T x) { return exponential(x); }
template <class T> CF_DEVICE T log(T x) { return natural_log(x); }
template <class T> CF_DEVICE T tanh(T x) { return tanh_of(x); }
template <class T> CF_DEVICE T sqrt(T x) { return square_root(x); }
template <class T> CF_DEVICE T abs(T x) { return magnitude(x); }
template <class T> CF_DEVICE T min(T a, T b) { return least_of(a, b); }
template <class T> CF_DEVICE T max(T a, T b) { return greatest_of(a, b); }

template <class Real> CF_DEVICE bool is_nothing(Real x) { return x == 0; }
template <class Real> CF_DEVICE bool is_nothing(Dual<Real> x) {
    return is_nothing(x.value) && is_nothing(x.slope);
}
// why 0: what does not depend on the score has no slope, however steep the function is there.
template <class Real> CF_DEVICE Real chained(Real slope, Real by) {
    return is_nothing(slope) ? Real(0) : slope * by;
}
template <class Real> CF_DEVICE Dual<Real> exp(Dual<Real> x) {
    const Real y = exp(x.value);
    return {y, chained(x.slope, y)};
}
template <class Real> CF_DEVICE Dual<Real> log(Dual<Real> x) {
    return {log(x.value), chained(x.slope, 1 / x.value)};
}
template <class Real> CF_DEVICE Dual<Real> tanh(Dual<Real> x) {
    const Real y = tanh(x.value);
    return {y, x.slope * (1 - y * y)};
}
template <class Real> CF_DEVICE Dual<Real> sqrt(Dual<Real> x) {
    const Real y = sqrt(x.value);
    return {y, chained(x.slope, 1 / (2 * y))};
}
// At the kink it has none.
template <class Real> CF_DEVICE Dual<Real> abs(Dual<Real> x) {
    return {abs(x.value), x.value > 0 ? x.slope : x.value < 0 ? -x.slope : Real(0)};
}
}    // namespace score_text

#include <score_function.cuh>
#else
constexpr bool kHasFunction = false;
#endif
