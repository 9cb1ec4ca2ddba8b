// Arithmetic of the PTX ISA that C++ has not, or has with undefined corners.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace ptx {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using s8 = int8_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;

template <class To, class From> To bit_cast(From x) { return __builtin_bit_cast(To, x); }
template <class T> constexpr u32 kBits = sizeof(T) * 8;

// ---- integers

// By the width or more: everything is shifted out.
template <class T> T shl(T a, u32 n) { return n >= kBits<T> ? T(0) : T(a << n); }
template <class T> T shr(T a, u32 n) { return n >= kBits<T> ? T(a < 0 ? -1 : 0) : T(a >> n); }
template <class T> T least(T a, T b) { return a < b ? a : b; }
template <class T> T most(T a, T b) { return a > b ? a : b; }
// By -1 the lowest number stays itself, where x86 traps. By zero: all ones, as on a GPU, which does not trap
// either; why not a report: NVVM divides ahead of loops that do not run. The sources report it.
template <class T> T quotient(T a, T b) {
    if (b == 0) return T(~T(0));
    return std::numeric_limits<T>::is_signed && b == T(-1) ? T(0 - u64(a)) : T(a / b);
}
template <class T> T remainder(T a, T b) {
    if (b == 0) return T(~T(0));
    return std::numeric_limits<T>::is_signed && b == T(-1) ? T(0) : T(a % b);
}
// The upper word of b:a shifted left, the lower one of it shifted right; n is at most 32.
inline u32 funnel_left(u32 a, u32 b, u32 n) { return u32((u64(b) << 32 | a) << n >> 32); }
inline u32 funnel_right(u32 a, u32 b, u32 n) { return u32((u64(b) << 32 | a) >> n); }
// b with `length` bits from `position` on replaced by the lowest of a.
template <class T> T insert(T a, T b, u32 position, u32 length) {
    position &= 255, length &= 255;
    if (position >= kBits<T>) return b;
    const T mask = shl<T>(length >= kBits<T> ? T(~T(0)) : T((T(1) << length) - 1), position);
    return T((b & ~mask) | (T(a << position) & mask));
}
// `length` bits of a from `position` on; above them zeros, or of a signed type the last bit that there is.
template <class T> T extract(T a, u32 position, u32 length) {
    position &= 255, length &= 255;
    if (length == 0) return 0;
    const u32 last = position + length > kBits<T> ? kBits<T> - 1 : position + length - 1;
    const bool sign = std::numeric_limits<T>::is_signed && (u64(a) >> last & 1);
    T x = 0;
    for (u32 i = 0; i < kBits<T>; i++) {
        const bool bit = i < length && position + i < kBits<T> ? u64(a) >> (position + i) & 1 : sign;
        x = T(x | T(bit) << i);
    }
    return x;
}
// Byte i of the result is what nibble i of the selector names of b:a; its top bit spreads the sign of the byte.
inline u32 permute(u32 a, u32 b, u32 selector) {
    const u64 bytes = u64(b) << 32 | a;
    u32 d = 0;
    for (int i = 0; i < 4; i++) {
        const u32 name = selector >> 4 * i & 15;
        u32 byte = u32(bytes >> (name & 7) * 8 & 255);
        if (name & 8) byte = byte & 128 ? 255 : 0;
        d |= byte << 8 * i;
    }
    return d;
}
// Bit 4 a + 2 b + c of the table, for each bit.
inline u32 look_up(u32 a, u32 b, u32 c, u32 table) {
    u32 d = 0;
    for (int i = 0; i < 8; i++)
        if (table >> i & 1) d |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    return d;
}
template <class T> u32 leading_zeros(T x) {
    return x == 0 ? kBits<T> : u32(__builtin_clzll(x)) - (64 - kBits<T>);
}
inline u32 reversed(u32 x) {
    u32 y = 0;
    for (int i = 0; i < 32; i++) y |= (x >> i & 1) << (31 - i);
    return y;
}

// ---- floats

// The other one if one is NaN; -0 is less than +0.
template <class T> T lesser(T a, T b) {
    if (a != a) return b;
    if (b != b) return a;
    return a == b ? (std::signbit(a) ? a : b) : a < b ? a : b;
}
template <class T> T greater(T a, T b) {
    if (a != a) return b;
    if (b != b) return a;
    return a == b ? (std::signbit(a) ? b : a) : a > b ? a : b;
}
// To 0 .. 1; NaN is 0.
template <class T> bool unordered(T a, T b) { return a != a || b != b; }
// NaN becomes 0, what is too large or too small the nearest that there is.
template <class T, class X> T to_integer(X x) {
    using limits = std::numeric_limits<T>;
    if (x != x) return 0;
    if (x >= std::ldexp(X(1), limits::digits)) return limits::max();
    return x <= X(limits::min()) ? limits::min() : T(x);
}
template <class T> T saturated(s64 x) {
    using limits = std::numeric_limits<T>;
    return x < s64(limits::min()) ? limits::min() : x > s64(limits::max()) ? limits::max() : T(x);
}

// ---- two 16-bit values in a register
inline u32 pair(u16 high, u16 low) { return u32(high) << 16 | low; }
inline u16 high_half(u32 x) { return u16(x >> 16); }
inline u16 low_half(u32 x) { return u16(x); }

}    // namespace ptx
