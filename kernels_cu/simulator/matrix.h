// The host side of the matrix instructions in prim/warp.cuh.
#pragma once

namespace sim {

SIM_API void ldmatrix(uint32_t* r, int matrices, bool trans, uint32_t addr, Site site, const char* name);
SIM_API void stmatrix(uint32_t addr, const uint32_t* r, int matrices, bool trans, Site site,
                      const char* name);
// The m16n8 products, of two or four registers of `a` and half as many of `b`.
SIM_API void mma(float (&d)[4], const uint32_t* a, int a_registers, const uint32_t* b, Format format,
                 Site site, const char* name);
// Of e4m3 with a scale for each row of a and column of b, as ue8m0: the byte of the register, and the lane of two.
struct Scales {
    uint32_t a, b;
    int byte_a, thread_a, byte_b, thread_b;
};
SIM_API void mma_scaled(float (&d)[4], const uint32_t* a, const uint32_t* b, const Scales& scales, Site site);
// Of doubles, 8 halves rows and k = 4 halves: halves^2 elements of `a` a lane, halves of `b`, twice as many of `d`.
SIM_API void mma_f64(double* d, const double* a, const double* b, int halves, Site site, const char* name);

}    // namespace sim

inline void ldmatrix_x1(uint32_t (&r)[1], uint32_t addr, SIM_SITE) {
    sim::ldmatrix(r, 1, false, addr, site, "ldmatrix.x1");
}
inline void ldmatrix_x2(uint32_t (&r)[2], uint32_t addr, SIM_SITE) {
    sim::ldmatrix(r, 2, false, addr, site, "ldmatrix.x2");
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t addr, SIM_SITE) {
    sim::ldmatrix(r, 4, false, addr, site, "ldmatrix.x4");
}
inline void ldmatrix_x1_trans(uint32_t (&r)[1], uint32_t addr, SIM_SITE) {
    sim::ldmatrix(r, 1, true, addr, site, "ldmatrix.x1.trans");
}
inline void ldmatrix_x2_trans(uint32_t (&r)[2], uint32_t addr, SIM_SITE) {
    sim::ldmatrix(r, 2, true, addr, site, "ldmatrix.x2.trans");
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t addr, SIM_SITE) {
    sim::ldmatrix(r, 4, true, addr, site, "ldmatrix.x4.trans");
}
inline void stmatrix_x1(uint32_t addr, const uint32_t (&r)[1], SIM_SITE) {
    sim::stmatrix(addr, r, 1, false, site, "stmatrix.x1");
}
inline void stmatrix_x2(uint32_t addr, const uint32_t (&r)[2], SIM_SITE) {
    sim::stmatrix(addr, r, 2, false, site, "stmatrix.x2");
}
inline void stmatrix_x4(uint32_t addr, const uint32_t (&r)[4], SIM_SITE) {
    sim::stmatrix(addr, r, 4, false, site, "stmatrix.x4");
}
inline void stmatrix_x1_trans(uint32_t addr, const uint32_t (&r)[1], SIM_SITE) {
    sim::stmatrix(addr, r, 1, true, site, "stmatrix.x1.trans");
}
inline void stmatrix_x2_trans(uint32_t addr, const uint32_t (&r)[2], SIM_SITE) {
    sim::stmatrix(addr, r, 2, true, site, "stmatrix.x2.trans");
}
inline void stmatrix_x4_trans(uint32_t addr, const uint32_t (&r)[4], SIM_SITE) {
    sim::stmatrix(addr, r, 4, true, site, "stmatrix.x4.trans");
}

template <class T> void mma_m16n8k8(float (&d)[4], const uint32_t (&a)[2], uint32_t b0, SIM_SITE) {
    sim::mma(d, a, 2, &b0, sim::format_of<T>(), site, "mma.m16n8k8");
}
template <class T> void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                     SIM_SITE) {
    const uint32_t b[2] = {b0, b1};
    sim::mma(d, a, 4, b, sim::format_of<T>(), site, "mma.m16n8k16");
}
inline void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, SIM_SITE) {
    const uint32_t b[2] = {b0, b1};
    sim::mma(d, a, 4, b, sim::Format::tf32, site, "mma.m16n8k8.tf32");
}
inline void mma_m16n8k32_e4m3(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, SIM_SITE) {
    const uint32_t b[2] = {b0, b1};
    sim::mma(d, a, 4, b, sim::Format::e4m3, site, "mma.m16n8k32.e4m3");
}
template <int kByte = 0, int kThread = 0>
void mma_m16n8k32_e4m3_scaled(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                              uint32_t scale_a, uint32_t scale_b, SIM_SITE) {
    const uint32_t b[2] = {b0, b1};
    sim::mma_scaled(d, a, b, {scale_a, scale_b, kByte, kThread, kByte, kThread}, site);
}
inline void mma_m16n8k8_f64(double (&d)[4], const double (&a)[4], double b0, double b1, SIM_SITE) {
    const double b[2] = {b0, b1};
    sim::mma_f64(d, a, b, 2, site, "mma.m16n8k8.f64");
}
inline void mma_m8n8k4_f64(double& d0, double& d1, double a, double b, SIM_SITE) {
    double d[2] = {d0, d1};
    sim::mma_f64(d, &a, &b, 1, site, "mma.m8n8k4.f64");
    d0 = d[0], d1 = d[1];
}
