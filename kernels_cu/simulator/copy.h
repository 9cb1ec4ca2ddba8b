// The host side of prim/copy.cuh, and what the asynchronous proxy may see of ordinary stores.
#pragma once

namespace sim {

inline void mark_written(const unsigned char* p, size_t bytes) {
    Thread& t = me();
    for (size_t g = size_t(p - shared) / 16; g < (size_t(p - shared) + bytes + 15) / 16; g++) {
        int& writer = block.dirty[g];
        if (writer != t.id + 1) t.unfenced.push_back(uint32_t(g));
        writer = t.id + 1;
    }
}
// For the asynchronous proxy, before it reads.
inline void check_clean(const unsigned char* p, size_t bytes, const char* what, Site site) {
    for (size_t g = size_t(p - shared) / 16; g < (size_t(p - shared) + bytes + 15) / 16; g++)
        if (block.dirty[g])
            fail("%s at %s:%d reads shared address %zu, which thread %d wrote without fence.proxy.async",
                 what, site.file, site.line, g * 16 % kWindow, (block.dirty[g] - 1) % block.size);
}

// Copies `wanted` of kBytes, the rest becomes zero.
template <int kBytes> void cp_async(uint32_t dst, const void* src, int wanted, Site site) {
    if (wanted < 0 || wanted > kBytes)
        fail("cp.async of %d bytes of %d at %s:%d", wanted, kBytes, site.file, site.line);
    auto* to = at(dst, kBytes, kBytes, site);
    Thread& t = me();
    if (reinterpret_cast<uintptr_t>(src) % kBytes)
        fail("cp.async from misaligned address %p at %s:%d", src, site.file, site.line);
    count_access(Access::copy_store, dst, kBytes, site);
    if (wanted) count_access(Access::global_load, reinterpret_cast<uintptr_t>(src), wanted, site);
    as_agent(t.agent, &t.copies, [&] {
        writes(to, kBytes);
        if (wanted) reads(src, size_t(wanted));
    });
    enqueue(t.copies, issue([=] { memset(to, 0xff, kBytes); },
                            [=] {
                                memcpy(to, src, size_t(wanted));
                                memset(to + wanted, 0, size_t(kBytes - wanted));
                            }));
}

template <class T> void check_global(const T* p, Site site) {
    if (reinterpret_cast<uintptr_t>(p) % sizeof(T))
        fail("global address %p is not aligned to %zu at %s:%d", p, sizeof(T), site.file, site.line);
}

}    // namespace sim

template <class T> T ld_shared(uint32_t addr, SIM_SITE) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
    auto* p = sim::at(addr, sizeof(T), sizeof(T), site);
    sim::reads(p, sizeof(T));
    sim::count_access(sim::Access::shared_load, addr, sizeof(T), site);
    T x;
    memcpy(static_cast<void*>(&x), p, sizeof x);
    return x;
}
template <class T> void st_shared(uint32_t addr, T x, SIM_SITE) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
    auto* p = sim::at(addr, sizeof(T), sizeof(T), site);
    sim::writes(p, sizeof(T));
    sim::count_access(sim::Access::shared_store, addr, sizeof(T), site);
    memcpy(p, &x, sizeof x);
    sim::mark_written(p, sizeof x);
}
template <class T> T ld_global(const T* p, SIM_SITE) {
    sim::check_global(p, site);
    sim::count_access(sim::Access::global_load, reinterpret_cast<uintptr_t>(p), sizeof(T), site);
    sim::reads(p, sizeof(T));
    T x;
    memcpy(static_cast<void*>(&x), p, sizeof x);
    return x;
}
template <class T> T ld_global_nc(const T* p, SIM_SITE) { return ld_global(p, site); }
template <class T> void st_global(T* p, T x, SIM_SITE) {
    sim::check_global(p, site);
    sim::count_access(sim::Access::global_store, reinterpret_cast<uintptr_t>(p), sizeof(T), site);
    sim::writes(p, sizeof(T));
    memcpy(static_cast<void*>(p), &x, sizeof x);
}

inline void cp_async4(uint32_t dst, const void* src, bool valid = true, SIM_SITE) {
    sim::cp_async<4>(dst, src, valid ? 4 : 0, site);
}
inline void cp_async8(uint32_t dst, const void* src, bool valid = true, SIM_SITE) {
    sim::cp_async<8>(dst, src, valid ? 8 : 0, site);
}
inline void cp_async16(uint32_t dst, const void* src, bool valid = true, SIM_SITE) {
    sim::cp_async<16>(dst, src, valid ? 16 : 0, site);
}
inline void cp_async4_part(uint32_t dst, const void* src, int bytes, SIM_SITE) {
    sim::cp_async<4>(dst, src, bytes, site);
}
inline void cp_async16_part(uint32_t dst, const void* src, int bytes, SIM_SITE) {
    sim::cp_async<16>(dst, src, bytes, site);
}
inline void cp_async_commit(SIM_SITE) { sim::me().copies.open_group++; }
template <int kNewest> void cp_async_wait(SIM_SITE) {
    sim::wait(sim::me().copies, kNewest, site, "cp.async.wait_group $a");
}
