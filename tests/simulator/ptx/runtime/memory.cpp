// Loads, stores, atomics and cp.async. Every store to shared memory, a plain one of C++ too, is seen by the check for a
// missing fence.proxy.async.
#include "library.h"

namespace ptx {

unsigned char* shared_at(u64 address, size_t bytes, size_t align, Site site) {
    if (address >> 32)
        sim::fail("%llx is no shared address at %s:%d", static_cast<unsigned long long>(address), site.file,
                  site.line);
    return sim::at(u32(address), bytes, align, place(site));
}

namespace {

unsigned char* memory_at(Space space, u64 address, size_t bytes, Site site) {
    if (space == Space::shared) return shared_at(address, bytes, bytes, site);
    if (address % bytes)
        sim::fail("address %llx is not aligned to %zu at %s:%d", static_cast<unsigned long long>(address),
                  bytes, site.file, site.line);
    return reinterpret_cast<unsigned char*>(address);
}
void count(const unsigned char* p, size_t bytes, sim::Access shared, sim::Access global, Site site) {
    const bool inside = in_shared(p);
    sim::count_access(inside ? shared : global, inside ? u64(p - sim::shared) : u64(p), int(bytes),
                      place(site));
}
void written(unsigned char* p, size_t bytes) {
    sim::writes(p, bytes);
    if (in_shared(p)) sim::mark_written(p, bytes);
}

}    // namespace

template <class T> T load(Space space, u64 address, Site site) {
    auto* p = memory_at(space, address, sizeof(T), site);
    sim::reads(p, sizeof(T));
    count(p, sizeof(T), sim::Access::shared_load, sim::Access::global_load, site);
    T x;
    memcpy(&x, p, sizeof x);
    return x;
}
template <class T> void store(Space space, u64 address, T x, Site site) {
    auto* p = memory_at(space, address, sizeof(T), site);
    memcpy(p, &x, sizeof x);
    written(p, sizeof(T));
    count(p, sizeof(T), sim::Access::shared_store, sim::Access::global_store, site);
}
#define FOR(T)                                                                                               \
    template T load<T>(Space, u64, Site);                                                                    \
    template void store<T>(Space, u64, T, Site);
#define FOR_VECTORS(T)                                                                                       \
    FOR(T) using T##x2 = Vector<T, 2>;                                                                       \
    using T##x4 = Vector<T, 4>;                                                                              \
    FOR(T##x2) FOR(T##x4)
FOR_VECTORS(u8)
FOR_VECTORS(u16)
FOR_VECTORS(u32)
FOR_VECTORS(u64)
#undef FOR_VECTORS
#undef FOR

u64 generic_of_shared(u64 offset) { return u64(sim::shared) + offset; }
u64 shared_of_generic(u64 address) { return address - u64(sim::shared); }

// ---- atomics

template <class T> T* atomic_at(Space space, u64 address, Site site) {
    auto* p = memory_at(space, address, sizeof(T), site);
    if (in_shared(p)) sim::mark_written(p, sizeof(T));
    return reinterpret_cast<T*>(p);
}
template <class T> T atomic_add(Space space, u64 address, T x, Site site) {
    T* p = atomic_at<T>(space, address, site);
    const T before = atomicAdd(p, x);
    // why: prim/semaphore.cuh takes the numbers of blocks so
    if (std::is_same_v<T, u32> && !in_shared(p)) sim::maybe_yield_block();
    return before;
}
template <class T> T atomic_max(Space space, u64 address, T x, Site site) {
    return atomicMax(atomic_at<T>(space, address, site), x);
}
template <class T> T atomic_min(Space space, u64 address, T x, Site site) {
    return atomicMin(atomic_at<T>(space, address, site), x);
}
template <class T> T atomic_exchange(Space space, u64 address, T x, Site site) {
    return atomicExch(atomic_at<T>(space, address, site), x);
}
#define FOR_INTEGER(T)                                                                                       \
    template T atomic_max<T>(Space, u64, T, Site);                                                           \
    template T atomic_min<T>(Space, u64, T, Site);                                                           \
    template T atomic_exchange<T>(Space, u64, T, Site);                                                      \
    template T atomic_add<T>(Space, u64, T, Site);
FOR_INTEGER(u32)
FOR_INTEGER(s32)
FOR_INTEGER(u64)
#undef FOR_INTEGER
template float atomic_add<float>(Space, u64, float, Site);
template double atomic_add<double>(Space, u64, double, Site);

void release_turn(u64 address, Site site) { sim::semaphore_release(reinterpret_cast<u32*>(address), place(site)); }
void poll(Site site) {
    sim::Thread& t = sim::me();
    t.waits_for_block = true;
    sim::wait(&t, place(site), "polling what another block writes");
    t.waits_for_block = false;
}

// ---- cp.async

void copy_async(u64 to, u64 from, int bytes, int wanted, Site site) {
    const u32 dst = u32(shared_at(to, size_t(bytes), size_t(bytes), site) - sim::shared);
    const void* src = reinterpret_cast<const void*>(from);
    sim::cp_async(dst, src, bytes, wanted, place(site));
}
void copy_async_commit() { sim::me().copies.open_group++; }
void copy_async_wait(int newest, Site site) {
    sim::wait(sim::me().copies, size_t(newest), place(site), "cp.async.wait_group $a");
}

}    // namespace ptx
