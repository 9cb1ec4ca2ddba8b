// What every file of a kernel starts from: fixed-width integers, small arithmetic, and the macro that makes a
// kernel of a body. Needs no CUDA header, so that host tools can read abi.cuh with any C++ compiler.
#pragma once

#if defined(__CUDACC_RTC__)
// why: NVRTC has no <cstdint>.
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
using uintptr_t = unsigned long long;
using size_t = decltype(sizeof(0));
#else
#include <cstddef>
#include <cstdint>
#endif

#if defined(__CUDACC__)
#define CF_DEVICE __device__ __forceinline__
#define CF_UNROLL _Pragma("unroll")
#else
#define CF_DEVICE inline
#define CF_UNROLL
#endif

#define CF_CONCAT_(a, b) a##b
#define CF_CONCAT(a, b) CF_CONCAT_(a, b)

// The symbol of the kernel. A build gives the name of the variant; a file compiled alone gets this one.
#if !defined(CF_ENTRY)
#define CF_ENTRY kernel
#endif

// why: __grid_constant__ needs sm_70; before, the compiler sees for itself that the parameters are not written.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 700
#define CF_GRID_CONSTANT
#else
#define CF_GRID_CONSTANT __grid_constant__
#endif

// CF_KERNEL(Params, threads, min_blocks, body) makes the entry point CF_ENTRY, which calls
// body(const Params&) in every thread. On the host it makes simulate_<CF_ENTRY>, which runs the whole grid in
// the simulator and returns 1 on success.
#if defined(__CUDACC__)
#define CF_KERNEL(Params, kThreads, kMinBlocks, body)                                                        \
    extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)                                       \
        CF_ENTRY(const CF_GRID_CONSTANT Params p) {                                                          \
        body(p);                                                                                             \
    }
#else
#define CF_KERNEL(Params, kThreads, kMinBlocks, body)                                                        \
    extern "C" __attribute__((visibility("default"))) int CF_CONCAT(simulate_, CF_ENTRY)(                    \
        const uint32_t grid[3], const uint32_t block[3], uint64_t shared_bytes, const void* params) {        \
        return sim::launch_kernel<Params, body>(grid, block, shared_bytes, params, kThreads);                \
    }
#endif

template <class A, class B> inline constexpr bool kSame = false;
template <class A> inline constexpr bool kSame<A, A> = true;

// Select<kFirst, A, B>::Type is A or, if not kFirst, B.
template <bool kFirst, class A, class B> struct Select {
    using Type = A;
};
template <class A, class B> struct Select<false, A, B> {
    using Type = B;
};

// Quotient rounded up; both positive.
template <class T> CF_DEVICE constexpr T cdiv(T a, T b) { return (a + b - 1) / b; }
template <class T> CF_DEVICE constexpr T round_up(T a, T b) { return cdiv(a, b) * b; }
template <class T> CF_DEVICE constexpr T smaller(T a, T b) { return b < a ? b : a; }
template <class T> CF_DEVICE constexpr T larger(T a, T b) { return a < b ? b : a; }

constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);
constexpr float kLog2e = 1.4426950408889634f;

// A tensor map as the driver encodes it; its 128 bytes mean nothing to a kernel.
struct alignas(64) TensorMap {
    uint64_t opaque[16];
};
