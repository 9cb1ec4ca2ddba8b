// The host side of prim/bulk.cuh.
#pragma once

namespace sim {

SIM_API void mbar_init(uint64_t& bar, int count, Site site);
SIM_API void mbar_fence();
SIM_API void mbar_arrive(uint64_t& bar, int arrivals, int bytes, Site site);
SIM_API void mbar_wait(uint64_t& bar, int parity, Site site);
SIM_API void fence_proxy_async();

struct Coordinates {
    int rank;
    int at[5];
};
SIM_API void tma_load(void* dst, const TensorMap& map, uint64_t& bar, Coordinates c, Site site);
SIM_API void tma_store(const TensorMap& map, const void* src, Coordinates c, Site site);
SIM_API void bulk_load(void* dst, const void* src, int bytes, uint64_t& bar, Site site);
SIM_API void bulk_store(void* dst, const void* src, int bytes, bool add, Site site);

}    // namespace sim

inline void mbar_init(uint64_t& bar, int count, SIM_SITE) { sim::mbar_init(bar, count, site); }
inline void mbar_init_fence(SIM_SITE) { sim::mbar_fence(); }
inline void mbar_arrive(uint64_t& bar, SIM_SITE) { sim::mbar_arrive(bar, 1, 0, site); }
inline void mbar_arrive_expect_tx(uint64_t& bar, int bytes, SIM_SITE) {
    sim::mbar_arrive(bar, 1, bytes, site);
}
inline void mbar_wait(uint64_t& bar, int parity, SIM_SITE) { sim::mbar_wait(bar, parity, site); }
inline void fence_proxy_async(SIM_SITE) { sim::fence_proxy_async(); }
inline void fence_proxy_async_global() {}

inline void tma_prefetch(const TensorMap&) {}
inline void tma_load(void* dst, const TensorMap& map, uint64_t& bar, int c0, int c1, SIM_SITE) {
    sim::tma_load(dst, map, bar, {2, {c0, c1}}, site);
}
inline void tma_load(void* dst, const TensorMap& map, uint64_t& bar, int c0, int c1, int c2, SIM_SITE) {
    sim::tma_load(dst, map, bar, {3, {c0, c1, c2}}, site);
}
inline void tma_load(void* dst, const TensorMap& map, uint64_t& bar, int c0, int c1, int c2, int c3,
                     SIM_SITE) {
    sim::tma_load(dst, map, bar, {4, {c0, c1, c2, c3}}, site);
}
inline void tma_load(void* dst, const TensorMap& map, uint64_t& bar, int c0, int c1, int c2, int c3, int c4,
                     SIM_SITE) {
    sim::tma_load(dst, map, bar, {5, {c0, c1, c2, c3, c4}}, site);
}
inline void tma_store(const TensorMap& map, const void* src, int c0, int c1, SIM_SITE) {
    sim::tma_store(map, src, {2, {c0, c1}}, site);
}
inline void tma_store(const TensorMap& map, const void* src, int c0, int c1, int c2, SIM_SITE) {
    sim::tma_store(map, src, {3, {c0, c1, c2}}, site);
}
inline void tma_store(const TensorMap& map, const void* src, int c0, int c1, int c2, int c3, SIM_SITE) {
    sim::tma_store(map, src, {4, {c0, c1, c2, c3}}, site);
}
inline void tma_store(const TensorMap& map, const void* src, int c0, int c1, int c2, int c3, int c4,
                      SIM_SITE) {
    sim::tma_store(map, src, {5, {c0, c1, c2, c3, c4}}, site);
}
inline void bulk_load(void* dst, const void* src, int bytes, uint64_t& bar, SIM_SITE) {
    sim::bulk_load(dst, src, bytes, bar, site);
}
inline void bulk_store(void* dst, const void* src, int bytes, SIM_SITE) {
    sim::bulk_store(dst, src, bytes, false, site);
}
inline void bulk_reduce_add(float* dst, const void* src, int bytes, SIM_SITE) {
    sim::bulk_store(dst, src, bytes, true, site);
}
inline void tma_store_commit(SIM_SITE) { sim::me().stores.open_group++; }
template <int kNewest> void tma_store_wait_read(SIM_SITE) {
    sim::wait(sim::me().stores, kNewest, site, "bulk wait_group.read $a");
}
template <int kNewest> void tma_store_wait(SIM_SITE) {
    sim::wait(sim::me().stores, kNewest, site, "bulk wait_group $a");
    sim::me().additions.open_group = sim::me().stores.open_group;
    sim::wait(sim::me().additions, kNewest, site, "bulk wait_group $a");
}
