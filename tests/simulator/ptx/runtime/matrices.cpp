// Matrix loads and stores, products of a warp and of a warpgroup.
#include "library.h"

namespace ptx {

template <int n, bool transposed> void load_matrices(u32 (&r)[n], u64 address, Site site) {
    const char* name = transposed ? "ldmatrix.trans" : "ldmatrix";
    const sim::Call inside = call(site);
    sim::ldmatrix(r, n, transposed, u32(address), inside, name);
}
template <int n, bool transposed> void store_matrices(u64 address, const u32 (&r)[n], Site site) {
    const char* name = transposed ? "stmatrix.trans" : "stmatrix";
    const sim::Call inside = call(site);
    sim::stmatrix(u32(address), r, n, transposed, inside, name);
}
#define FOR(n, transposed)                                                                                   \
    template void load_matrices<n, transposed>(u32(&)[n], u64, Site);                                        \
    template void store_matrices<n, transposed>(u64, const u32(&)[n], Site);
FOR(1, false)
FOR(2, false) FOR(4, false) FOR(1, true) FOR(2, true) FOR(4, true)
#undef FOR

#define PRODUCT(kind, D, n_a, n_b, function, ...)                                                            \
    template <> void multiply<Product::kind>(D(&d)[4], const u32(&a)[n_a], const u32(&b)[n_b], Site site) {  \
        function(d, a, __VA_ARGS__, call(site));                                                             \
    }
    PRODUCT(m16n8k8_f16, float, 2, 1, mma_m16n8k8<__half>, b[0]) PRODUCT(m16n8k8_bf16, float, 2, 1,
                                                                         mma_m16n8k8<__nv_bfloat16>, b[0])
        PRODUCT(m16n8k16_f16, float, 4, 2, mma_m16n8k16<__half>, b[0], b[1])
            PRODUCT(m16n8k16_bf16, float, 4, 2, mma_m16n8k16<__nv_bfloat16>, b[0], b[1])
                PRODUCT(m16n8k8_tf32, float, 4, 2, mma_m16n8k8_tf32, b[0], b[1])
                    PRODUCT(m16n8k32_e4m3, float, 4, 2, mma_m16n8k32_e4m3, b[0], b[1])
#undef PRODUCT
                            void multiply_scaled(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2],
                                                 ScalesOfProduct s, Site site) {
    const sim::Call inside = call(site);
    sim::mma_scaled(d, a, b, {s.a, s.b, s.byte_a, s.thread_a, s.byte_b, s.thread_b}, inside);
}
void multiply(double (&d)[2], const double (&a)[1], const double (&b)[1],
                                          Site site) {
    mma_m8n8k4_f64(d[0], d[1], a[0], b[0], call(site));
}
void multiply(double (&d)[4], const double (&a)[4], const double (&b)[2], Site site) {
    mma_m16n8k8_f64(d, a, b[0], b[1], call(site));
}

                            void warpgroup_product(float* d, const u32* a, u64 descriptor_a, u64 descriptor_b,
                                                   bool accumulate, Element element, int n, bool transposed_a,
                                                   bool transposed_b, Site site) {
    const auto format = sim::Format(int(element));    // layout: both list f16, bf16, tf32, e4m3
    static_assert(int(sim::Format::e4m3) == int(Element::e4m3) &&
                  int(sim::Format::tf32) == int(Element::tf32));
    const sim::Call inside = call(site);
    sim::wgmma({d, a, descriptor_a, descriptor_b, accumulate, format, n, transposed_a, transposed_b}, inside);
}
void warpgroup_fence(Site site) { wgmma_fence(call(site)); }
void warpgroup_commit(Site site) { wgmma_commit(call(site)); }
void warpgroup_wait(int newest, Site site) {
    const sim::Call inside = call(site);
    sim::wgmma_wait(newest, inside);
}

}    // namespace ptx
