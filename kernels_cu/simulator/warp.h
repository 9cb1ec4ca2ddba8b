// The host side of prim/warp.cuh, and the plain CUDA functions that kernels use.
#pragma once
#include <cmath>
#include <math.h>
#include <type_traits>

template <class T> T& shared_memory() {
    static_assert(sizeof(T) <= sim::kSharedCapacity);
    if (sizeof(T) > sim::block.shared_bytes)
        sim::fail("the shared memory struct has %zu bytes, the launch %zu", sizeof(T),
                  sim::block.shared_bytes);
    return *reinterpret_cast<T*>(sim::shared);
}
inline uint32_t smem_addr(const void* p) {
    auto offset = static_cast<const unsigned char*>(p) - sim::shared;
    if (offset < 0 || size_t(offset) > sim::block.shared_bytes)
        sim::fail("%p is no shared memory address", p);
    return uint32_t(offset);
}

// ---- plain CUDA: arithmetic
template <class T> constexpr T min(T a, T b) { return b < a ? b : a; }
template <class T> constexpr T max(T a, T b) { return a < b ? b : a; }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return uint32_t(uint64_t(a) * b >> 32); }
inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
    return uint64_t(static_cast<unsigned __int128>(a) * b >> 64);
}
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(uint32_t(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline uint32_t __float_as_uint(float x) { return __builtin_bit_cast(uint32_t, x); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline float __uint_as_float(uint32_t x) { return __builtin_bit_cast(float, x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.f / x; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
template <class T> inline T __ldg(const T* p) { return *p; }
// Rounded once: double holds products of halves, and sums of those that matter.
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
    const auto wide = [](__half x) { return double(__half2float(x)); };
    return {__double2half(wide(a.x) * wide(b.x) + wide(c.x)),
            __double2half(wide(a.y) * wide(b.y) + wide(c.y))};
}

// ---- plain CUDA: barriers, votes, shuffles
inline void __syncthreads(SIM_SITE) {
    if (sim::block.live < sim::block.size)
        sim::fail("__syncthreads at %s:%d after threads have exited", site.file, site.line);
    sim::barrier(0, sim::block.size, true, site);
}
namespace sim {
SIM_API int barrier_vote(bool predicate, Site site);
}    // namespace sim
inline int __syncthreads_count(int predicate, SIM_SITE) { return sim::barrier_vote(predicate, site); }
inline int __syncthreads_or(int predicate, SIM_SITE) { return sim::barrier_vote(predicate, site) != 0; }
inline int __syncthreads_and(int predicate, SIM_SITE) {
    return sim::barrier_vote(predicate, site) == sim::block.size;
}
inline void __threadfence() {}
inline void __threadfence_block() {}

namespace sim {
SIM_API void full_mask(unsigned mask, const char* name, Site site);
SIM_API void syncwarp(Site site);
SIM_API unsigned ballot(bool predicate, Site site);
SIM_API void set_registers(Site site);
SIM_API bool elect(Site site);
// from(lane, x) is the lane whose value each lane gets; its own if there is none.
SIM_API void exchange(const void* in, void* out, size_t bytes, int x, Site site, const char* name,
                      int (*from)(int lane, int x));
template <class T> T exchange(T value, int x, Site site, const char* name, int (*from)(int, int)) {
    T result = value;
    exchange(&value, &result, sizeof value, x, site, name, from);
    return result;
}
}    // namespace sim
inline void __syncwarp(unsigned mask = ~0u, SIM_SITE) {
    sim::full_mask(mask, "__syncwarp", site);
    sim::syncwarp(site);
}
template <class T> T __shfl_sync(unsigned mask, T value, int lane, int = 32, SIM_SITE) {
    sim::full_mask(mask, "__shfl_sync", site);
    return sim::exchange(value, lane, site, "__shfl_sync", [](int, int x) { return x & 31; });
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int = 32, SIM_SITE) {
    sim::full_mask(mask, "__shfl_xor_sync", site);
    return sim::exchange(value, lane_mask, site, "__shfl_xor_sync", [](int i, int x) { return i ^ x; });
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned delta, int = 32, SIM_SITE) {
    sim::full_mask(mask, "__shfl_up_sync", site);
    return sim::exchange(value, int(delta), site, "__shfl_up_sync", [](int i, int x) { return i - x; });
}
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned delta, int = 32, SIM_SITE) {
    sim::full_mask(mask, "__shfl_down_sync", site);
    return sim::exchange(value, int(delta), site, "__shfl_down_sync", [](int i, int x) { return i + x; });
}
inline unsigned __ballot_sync(unsigned mask, int predicate, SIM_SITE) {
    sim::full_mask(mask, "__ballot_sync", site);
    return sim::ballot(predicate != 0, site);
}
inline int __any_sync(unsigned mask, int predicate, SIM_SITE) {
    return __ballot_sync(mask, predicate, site) != 0;
}
inline int __all_sync(unsigned mask, int predicate, SIM_SITE) {
    return __ballot_sync(mask, predicate, site) == ~0u;
}

// ---- plain CUDA: atomics. Real ones, so that ThreadSanitizer knows them as such.
namespace sim {
template <class T, class F> T atomic(T* p, F f) {
    count(&Cost::atomics, 1);
    T old, next;
    __atomic_load(p, &old, __ATOMIC_RELAXED);
    do next = f(old);
    while (!__atomic_compare_exchange(p, &old, &next, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return old;
}
}    // namespace sim
template <class T> T atomicAdd(T* p, std::type_identity_t<T> x) {
    return sim::atomic(p, [x](T old) { return T(old + x); });
}
template <class T> T atomicMax(T* p, std::type_identity_t<T> x) {
    return sim::atomic(p, [x](T old) { return old < x ? x : old; });
}
template <class T> T atomicMin(T* p, std::type_identity_t<T> x) {
    return sim::atomic(p, [x](T old) { return x < old ? x : old; });
}
template <class T> T atomicExch(T* p, std::type_identity_t<T> x) {
    return sim::atomic(p, [x](T) { return x; });
}

// ---- special functions and conversions
inline float ex2(float x) {
    sim::count(&sim::Cost::exps, 1);
    float y = std::exp2(x);
    return y < 1.17549435e-38f ? 0.f : y;    // flushes denormal results, keeps NaN
}
inline double ex2(double x) {
    sim::count(&sim::Cost::exps, 1);
    return std::exp2(x);
}
inline float rcp(float x) { return 1.f / x; }

template <class T> uint32_t pack(float x, float y) {
    T h[2] = {T(x), T(y)};
    return __builtin_bit_cast(uint32_t, h);
}
inline uint16_t pack_e4m3(float x, float y) { return uint16_t(sim::to_e4m3(x) | sim::to_e4m3(y) << 8); }
inline int64_t mad_wide(int32_t a, int32_t b, int64_t c) { return int64_t(a) * b + c; }
inline uint32_t opaque(uint32_t x) { return x; }
inline void pin_schedule(uint32_t) {}
inline uint32_t permute_bytes(uint32_t x, uint32_t y, uint32_t selector) {
    const uint64_t bytes = uint64_t(y) << 32 | x;
    uint32_t to = 0;
    for (int i = 0; i < 4; i++) to |= uint32_t(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return to;
}
inline uint32_t to_tf32(float x) {
    return (__float_as_uint(x) + (std::isfinite(x) ? 0x1000 : 0)) & 0xffffe000;
}

// ---- what the schedule of the block, not the data, depends on
inline void bar_sync(int id, int threads, SIM_SITE) { sim::barrier(id, threads, true, site); }
inline void bar_arrive(int id, int threads, SIM_SITE) { sim::barrier(id, threads, false, site); }
inline bool elect_one(SIM_SITE) { return sim::elect(site); }
template <int kRegisters> void setmaxnreg_inc(SIM_SITE) {
    static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
    sim::set_registers(site);
}
template <int kRegisters> void setmaxnreg_dec(SIM_SITE) {
    static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
    sim::set_registers(site);
}
