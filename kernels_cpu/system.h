// What Windows spells otherwise.
#pragma once
#include <stddef.h>
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
