// The host side of prim/wgmma.cuh.
#pragma once

namespace sim {

struct Wgmma {
    float* d;
    const uint32_t* a;    // registers, or null
    uint64_t desc_a, desc_b;
    bool accumulate;
    Format format;
    int n;    // columns of d
    bool trans_a, trans_b;
};
SIM_API void wgmma(Wgmma args, Site site);
SIM_API void wgmma_fence(Site site);
SIM_API void wgmma_commit(Site site);
SIM_API void wgmma_wait(int newest_left, Site site);

}    // namespace sim

inline void wgmma_fence(SIM_SITE) { sim::wgmma_fence(site); }
inline void wgmma_commit(SIM_SITE) { sim::wgmma_commit(site); }
template <int kNewest> void wgmma_wait(SIM_SITE) { sim::wgmma_wait(kNewest, site); }
template <int n> void wgmma_fence_operand(float (&)[n]) {}

template <class T, bool kTransA, bool kTransB, int n>
void wgmma_m64k16(float (&d)[n], uint64_t a, uint64_t b, bool accumulate, SIM_SITE) {
    sim::wgmma({d, nullptr, a, b, accumulate, sim::format_of<T>(), 2 * n, kTransA, kTransB}, site);
}
template <class T, bool kTransB, int n>
void wgmma_m64k16(float (&d)[n], const uint32_t (&a)[4], uint64_t b, bool accumulate, SIM_SITE) {
    sim::wgmma({d, a, 0, b, accumulate, sim::format_of<T>(), 2 * n, false, kTransB}, site);
}
template <int n> void wgmma_m64k32_e4m3(float (&d)[n], uint64_t a, uint64_t b, bool accumulate, SIM_SITE) {
    sim::wgmma({d, nullptr, a, b, accumulate, sim::Format::e4m3, 2 * n, false, false}, site);
}
template <int n> void wgmma_m64k32_e4m3(float (&d)[n], const uint32_t (&a)[4], uint64_t b, bool accumulate,
                                        SIM_SITE) {
    sim::wgmma({d, a, 0, b, accumulate, sim::Format::e4m3, 2 * n, false, false}, site);
}
