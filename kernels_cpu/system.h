// What Windows spells otherwise.
#pragma once
#include <stddef.h>
#include <stdlib.h>
#if defined(_WIN32)
#include <malloc.h>
#define EXPORTED __declspec(dllexport)
#else
#define EXPORTED __attribute__((visibility("default")))
#endif

// Memory whose address is a multiple of 64 or 4096; null if there is none. free_aligned gives it back.
inline void* allocate_aligned(size_t multiple, size_t bytes) {
#if defined(_WIN32)
    return _aligned_malloc(bytes, multiple);
#else
    void* data;
    return posix_memalign(&data, multiple, bytes) ? nullptr : data;
#endif
}
inline void free_aligned(void* data) {
#if defined(_WIN32)
    _aligned_free(data);
#else
    free(data);
#endif
}
