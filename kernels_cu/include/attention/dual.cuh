// A dual number, a value and its derivative: the argument of a score function in C whose derivative by the score is needed.
#pragma once
#include "base.cuh"

// why a namespace: that of the text, in which a name means what the text may call, of numbers and of these.
namespace score_text {

template <class Real> struct Dual;
template <class Real> struct PlainOf {
    using Number = Real;
};
template <class Real> struct PlainOf<Dual<Real>> {
    using Number = typename PlainOf<Real>::Number;
};

// Of Dual<Real> the second derivative is the slope of the slope.
template <class Real> struct Dual {
    using Number = typename PlainOf<Real>::Number;
    Real value, slope;

    Dual() = default;
    CF_DEVICE Dual(Number number) : value(number), slope(0) {}
    CF_DEVICE Dual(Real number, Real by_score) : value(number), slope(by_score) {}

    CF_DEVICE Dual operator-() const { return {-value, -slope}; }
    CF_DEVICE friend Dual operator+(Dual a, Dual b) { return {a.value + b.value, a.slope + b.slope}; }
    CF_DEVICE friend Dual operator-(Dual a, Dual b) { return {a.value - b.value, a.slope - b.slope}; }
    CF_DEVICE friend Dual operator*(Dual a, Dual b) {
        return {a.value * b.value, a.slope * b.value + a.value * b.slope};
    }
    CF_DEVICE friend Dual operator/(Dual a, Dual b) {
        const Real y = a.value / b.value;
        return {y, (a.slope - y * b.slope) / b.value};
    }
    // why overloads for numbers: as a Dual a number has slope 0, and 0 times infinity would be NaN.
    CF_DEVICE friend Dual operator+(Dual a, Number b) { return {a.value + b, a.slope}; }
    CF_DEVICE friend Dual operator+(Number a, Dual b) { return {a + b.value, b.slope}; }
    CF_DEVICE friend Dual operator-(Dual a, Number b) { return {a.value - b, a.slope}; }
    CF_DEVICE friend Dual operator-(Number a, Dual b) { return {a - b.value, -b.slope}; }
    CF_DEVICE friend Dual operator*(Dual a, Number b) { return {a.value * b, a.slope * b}; }
    CF_DEVICE friend Dual operator*(Number a, Dual b) { return {a * b.value, a * b.slope}; }
    CF_DEVICE friend Dual operator/(Dual a, Number b) { return {a.value / b, a.slope / b}; }
    CF_DEVICE friend Dual operator/(Number a, Dual b) {
        const Real y = a / b.value;
        return {y, -y * b.slope / b.value};
    }
    CF_DEVICE Dual& operator+=(Dual b) { return *this = *this + b; }
    CF_DEVICE Dual& operator-=(Dual b) { return *this = *this - b; }
    CF_DEVICE Dual& operator*=(Dual b) { return *this = *this * b; }
    CF_DEVICE Dual& operator/=(Dual b) { return *this = *this / b; }

    CF_DEVICE friend bool operator<(Dual a, Dual b) { return a.value < b.value; }
    CF_DEVICE friend bool operator<=(Dual a, Dual b) { return a.value <= b.value; }
    CF_DEVICE friend bool operator>(Dual a, Dual b) { return a.value > b.value; }
    CF_DEVICE friend bool operator>=(Dual a, Dual b) { return a.value >= b.value; }
    CF_DEVICE friend bool operator==(Dual a, Dual b) { return a.value == b.value; }
    CF_DEVICE friend bool operator!=(Dual a, Dual b) { return a.value != b.value; }
};

}    // namespace score_text
