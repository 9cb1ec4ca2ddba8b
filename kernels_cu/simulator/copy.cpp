// Checked accesses of one thread, and cp.async.
#include "../include/prim.cuh"
#include "core.h"

namespace sim {

void mark_written(const unsigned char* p, size_t bytes) {
    Thread& t = me();
    for (size_t g = size_t(p - shared) / 16; g < (size_t(p - shared) + bytes + 15) / 16; g++) {
        int& writer = block.dirty[g];
        if (writer != t.id + 1) t.unfenced.push_back(uint32_t(g));
        writer = t.id + 1;
    }
}
void check_clean(const unsigned char* p, size_t bytes, const char* what, Site site) {
    for (size_t g = size_t(p - shared) / 16; g < (size_t(p - shared) + bytes + 15) / 16; g++)
        if (block.dirty[g])
            fail("%s at %s:%d reads shared address %zu, which thread %d wrote without fence.proxy.async",
                 what, site.file, site.line, g * 16, block.dirty[g] - 1);
}

void check_global(const void* p, size_t align, Site site) {
    if (reinterpret_cast<uintptr_t>(p) % align)
        fail("global address %p is not aligned to %zu at %s:%d", p, align, site.file, site.line);
}

void load_shared(void* x, uint32_t addr, size_t bytes, Site site) {
    auto* p = at(addr, bytes, bytes, site);
    reads(p, bytes);
    count_access(Access::shared_load, addr, int(bytes), site);
    memcpy(x, p, bytes);
}
void store_shared(uint32_t addr, const void* x, size_t bytes, Site site) {
    auto* p = at(addr, bytes, bytes, site);
    writes(p, bytes);
    count_access(Access::shared_store, addr, int(bytes), site);
    memcpy(p, x, bytes);
    mark_written(p, bytes);
}
void load_global(void* x, const void* p, size_t bytes, Site site) {
    check_global(p, bytes, site);
    count_access(Access::global_load, reinterpret_cast<uintptr_t>(p), int(bytes), site);
    reads(p, bytes);
    memcpy(x, p, bytes);
}
void store_global(void* p, const void* x, size_t bytes, Site site) {
    check_global(p, bytes, site);
    count_access(Access::global_store, reinterpret_cast<uintptr_t>(p), int(bytes), site);
    writes(p, bytes);
    memcpy(p, x, bytes);
}

void cp_async(uint32_t dst, const void* src, int bytes, int wanted, Site site) {
    if (wanted < 0 || wanted > bytes)
        fail("cp.async of %d bytes of %d at %s:%d", wanted, bytes, site.file, site.line);
    const auto size = size_t(bytes);
    auto* to = at(dst, size, size, site);
    Thread& t = me();
    if (reinterpret_cast<uintptr_t>(src) % size)
        fail("cp.async from misaligned address %p at %s:%d", src, site.file, site.line);
    count_access(Access::copy_store, dst, bytes, site);
    if (wanted) count_access(Access::global_load, reinterpret_cast<uintptr_t>(src), wanted, site);
    as_agent(t.agent, &t.copies, [&] {
        writes(to, size);
        if (wanted) reads(src, size_t(wanted));
    });
    t.copies.add(issue([=] { memset(to, 0xff, size); },
                       [=] {
                           memcpy(to, src, size_t(wanted));
                           memset(to + wanted, 0, size_t(bytes - wanted));
                       }));
}

}    // namespace sim
