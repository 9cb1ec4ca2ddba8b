// Loads and stores that the simulator can see, and the asynchronous copies of sm_80.
#pragma once

// ---- shared memory by address. T has 4, 8 or 16 bytes.

template <class T> CF_DEVICE T ld_shared(uint32_t addr) {
    T x;
    if constexpr (sizeof(T) == 4) {
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(reinterpret_cast<uint32_t&>(x)) : "r"(addr) : "memory");
    } else if constexpr (sizeof(T) == 8) {
        uint2& w = reinterpret_cast<uint2&>(x);
        asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(w.x), "=r"(w.y) : "r"(addr) : "memory");
    } else {
        static_assert(sizeof(T) == 16);
        uint4& w = reinterpret_cast<uint4&>(x);
        asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
                     : "r"(addr)
                     : "memory");
    }
    return x;
}
template <class T> CF_DEVICE void st_shared(uint32_t addr, T x) {
    if constexpr (sizeof(T) == 4) {
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(addr), "r"(reinterpret_cast<uint32_t&>(x)) : "memory");
    } else if constexpr (sizeof(T) == 8) {
        uint2& w = reinterpret_cast<uint2&>(x);
        asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(addr), "r"(w.x), "r"(w.y) : "memory");
    } else {
        static_assert(sizeof(T) == 16);
        uint4& w = reinterpret_cast<uint4&>(x);
        asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(addr), "r"(w.x), "r"(w.y), "r"(w.z),
                     "r"(w.w)
                     : "memory");
    }
}

// ---- global memory. The address is aligned to the size of T.

template <class T> CF_DEVICE T ld_global(const T* p) { return *p; }
// For data that is not written while the kernel runs.
template <class T> CF_DEVICE T ld_global_nc(const T* p) { return __ldg(p); }
template <class T> CF_DEVICE void st_global(T* p, T x) { *p = x; }

// ---- cp.async (sm_80): global to shared, without registers. Not `valid`: zeros, and nothing is read.
// why: declared for every target, so that a kernel that uses them on some targets only can leave the choice
// to `if constexpr`.

CF_DEVICE void cp_async4(uint32_t dst, const void* src, bool valid = true) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst), "l"(src), "r"(valid ? 4 : 0)
                 : "memory");
}
CF_DEVICE void cp_async16(uint32_t dst, const void* src, bool valid = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(valid ? 16 : 0)
                 : "memory");
}
// The first `bytes` (0 to all) of 4 or 16, then zeros; only those are read.
CF_DEVICE void cp_async4_part(uint32_t dst, const void* src, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}
CF_DEVICE void cp_async16_part(uint32_t dst, const void* src, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}
CF_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all but the newest kNewest groups of this thread have arrived.
template <int kNewest> CF_DEVICE void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kNewest) : "memory");
}
