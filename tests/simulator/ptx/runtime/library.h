// What the library of the runtime is made with: the simulator, and the runtime's own declarations.
#pragma once
#include "prim.cuh"
#include "ptx.h"

namespace ptx {

inline sim::Site place(Site site) { return {site.file, site.line}; }
// For primitives that take the place of their caller as their last argument.
inline sim::Call call(Site site) { return {{site.file, site.line}, {}}; }
// Checked; an address above 4 GB is one of the host that was never converted.
unsigned char* shared_at(u64 address, size_t bytes, size_t align, Site site);
inline bool in_shared(const void* p) {
    auto* byte = static_cast<const unsigned char*>(p);
    return byte >= sim::shared && byte < sim::shared + sim::kSharedBytes;
}

}    // namespace ptx
