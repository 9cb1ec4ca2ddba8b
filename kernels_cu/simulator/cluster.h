// The host side of prim/cluster.cuh.
#pragma once

inline uint32_t cluster_rank() { return uint32_t(sim::me().rank); }
inline void cluster_arrive(SIM_SITE) { sim::cluster_arrive(site); }
inline void cluster_wait(SIM_SITE) { sim::cluster_wait(site); }
inline uint32_t cluster_addr(const void* p, uint32_t rank) {
    return sim::cluster_address(smem_addr(p), int(rank));
}
inline void mbar_arrive_cluster(uint32_t bar, SIM_SITE) { sim::mbar_arrive_cluster(bar, site); }
inline void mbar_wait_cluster(uint64_t& bar, int parity, SIM_SITE) { sim::mbar_wait(bar, parity, site); }
inline void tma_load_multicast(void* dst, const TensorMap& map, uint64_t& bar, uint32_t blocks, int c0,
                               int c1, int c2, int c3, SIM_SITE) {
    sim::tma_load(dst, map, bar, {4, {c0, c1, c2, c3}}, site, blocks);
}
