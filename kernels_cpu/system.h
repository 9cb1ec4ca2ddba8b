// What Windows and processors spell otherwise.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(_WIN32)
#include <malloc.h>
#define EXPORTED __declspec(dllexport)
#else
#define EXPORTED __attribute__((visibility("default")))
#endif

// Memory whose address is a multiple of 64 or 4096; null if there is none. free_aligned gives it back.
__attribute__((noinline)) inline void* allocate_aligned(size_t multiple, size_t bytes) {
#if defined(_WIN32)
    return _aligned_malloc(bytes, multiple);
#else
    // A page of this size, where the system has any. why: the first use of a small one takes 1 us.
    constexpr size_t huge = 2 << 20;
    if (bytes >= 2 * huge) multiple = huge;
    void* data;
    if (posix_memalign(&data, multiple, bytes)) return nullptr;
#if defined(MADV_HUGEPAGE)
    if (multiple == huge) madvise(data, bytes, MADV_HUGEPAGE);
#endif
    return data;
#endif
}
inline void free_aligned(void* data) {
#if defined(_WIN32)
    _aligned_free(data);
#else
    free(data);
#endif
}

// Within its scope the thread rounds to nearest and keeps denormal numbers.
// why: the program may have changed that in one of the threads that compute a call (torch.set_flush_denormal).
struct DefaultFloats {
#if defined(__x86_64__)
    unsigned before = __builtin_ia32_stmxcsr();
    DefaultFloats() { __builtin_ia32_ldmxcsr(0x1f80); }
    ~DefaultFloats() { __builtin_ia32_ldmxcsr(before); }
#elif defined(__aarch64__)
    uint64_t before;
    DefaultFloats() { asm volatile("mrs %0, fpcr\n\tmsr fpcr, xzr" : "=r"(before)::"memory"); }
    ~DefaultFloats() { asm volatile("msr fpcr, %0" ::"r"(before) : "memory"); }
#endif
    DefaultFloats(const DefaultFloats&) = delete;
};
