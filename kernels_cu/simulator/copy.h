// The host side of prim/copy.cuh, and what the asynchronous proxy may see of ordinary stores.
#pragma once

namespace sim {

SIM_API void mark_written(const unsigned char* p, size_t bytes);
// For the asynchronous proxy, before it reads.
SIM_API void check_clean(const unsigned char* p, size_t bytes, const char* what, Site site);
SIM_API void check_global(const void* p, size_t align, Site site);

SIM_API void load_shared(void* x, uint32_t addr, size_t bytes, Site site);
SIM_API void store_shared(uint32_t addr, const void* x, size_t bytes, Site site);
SIM_API void load_global(void* x, const void* p, size_t bytes, Site site);
SIM_API void store_global(void* p, const void* x, size_t bytes, Site site);
// Copies `wanted` of `bytes`, the rest becomes zero.
SIM_API void cp_async(uint32_t dst, const void* src, int bytes, int wanted, Site site);

}    // namespace sim

template <class T> T ld_shared(uint32_t addr, SIM_SITE) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
    T x;
    sim::load_shared(&x, addr, sizeof x, site);
    return x;
}
template <class T> void st_shared(uint32_t addr, T x, SIM_SITE) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
    sim::store_shared(addr, &x, sizeof x, site);
}
template <class T> T ld_global(const T* p, SIM_SITE) {
    T x;
    sim::load_global(&x, p, sizeof x, site);
    return x;
}
template <class T> T ld_global_nc(const T* p, SIM_SITE) { return ld_global(p, site); }
template <class T> void st_global(T* p, T x, SIM_SITE) { sim::store_global(p, &x, sizeof x, site); }

inline void cp_async4(uint32_t dst, const void* src, bool valid = true, SIM_SITE) {
    sim::cp_async(dst, src, 4, valid ? 4 : 0, site);
}
inline void cp_async16(uint32_t dst, const void* src, bool valid = true, SIM_SITE) {
    sim::cp_async(dst, src, 16, valid ? 16 : 0, site);
}
inline void cp_async4_part(uint32_t dst, const void* src, int bytes, SIM_SITE) {
    sim::cp_async(dst, src, 4, bytes, site);
}
inline void cp_async16_part(uint32_t dst, const void* src, int bytes, SIM_SITE) {
    sim::cp_async(dst, src, 16, bytes, site);
}
inline void cp_async_commit(SIM_SITE) { sim::me().copies.open_group++; }
template <int kNewest> void cp_async_wait(SIM_SITE) {
    sim::wait(sim::me().copies, kNewest, site, "cp.async.wait_group $a");
}
