// mbarriers, the fence between the proxies, and the copies of the tensor memory accelerator.
#include "library.h"

namespace ptx {

static uint64_t& mbarrier_at(u64 address, Site site) {
    return *reinterpret_cast<uint64_t*>(shared_at(address, 8, 8, site));
}
void mbarrier_init(u64 address, int count, Site site) {
    sim::mbar_init(mbarrier_at(address, site), count, call(site));
}
void mbarrier_init_fence() { sim::mbar_fence(); }
void mbarrier_arrive(u64 address, int arrivals, int bytes, Site site) {
    sim::mbar_arrive(mbarrier_at(address, site), arrivals, bytes, call(site));
}
// Says no once before it waits, as a GPU may at any time: who does not ask again goes on too early.
bool mbarrier_try_wait(u64 address, int parity, Site site) {
    static const void* refused[sim::kMaxThreads];
    uint64_t& bar = mbarrier_at(address, site);
    const void*& mine = refused[sim::me().id];
    const bool initialised = bar & 3,
               ended = (bar >> 2 & 1) != unsigned(parity);    // layout: Mbar of bulk.cpp
    if (initialised && !ended && mine != &bar) {
        mine = &bar;
        return false;
    }
    mine = nullptr;
    sim::mbar_wait(bar, parity, call(site));
    return true;
}
void proxy_fence() { sim::fence_proxy_async(); }

static const TensorMap& map_at(u64 address, Site site) {
    if (address % 64)
        sim::fail("tensor map at %llx, not aligned to 64, at %s:%d", static_cast<unsigned long long>(address),
                  site.file, site.line);
    return *reinterpret_cast<const TensorMap*>(address);
}
static sim::Coordinates coordinates_of(const Box& box) {
    sim::Coordinates c{box.rank, {}};
    for (int i = 0; i < 5; i++) c.at[i] = box.at[i];
    return c;
}
void prefetch_map(u64 map, Site site) { tma_prefetch(map_at(map, site)); }
void load_box(u64 to, Box from, u64 mbarrier, Site site) {
    sim::tma_load(shared_at(to, 16, 16, site), map_at(from.map, site), mbarrier_at(mbarrier, site),
                  coordinates_of(from), call(site));
}
void store_box(Box to, u64 from, Site site) {
    sim::tma_store(map_at(to.map, site), shared_at(from, 16, 16, site), coordinates_of(to), call(site));
}
void bulk_load(u64 to, u64 from, int bytes, u64 mbarrier, Site site) {
    sim::bulk_load(shared_at(to, 16, 16, site), reinterpret_cast<const void*>(from), bytes,
                   mbarrier_at(mbarrier, site), call(site));
}
void bulk_store(u64 to, u64 from, int bytes, bool add, Site site) {
    sim::bulk_store(reinterpret_cast<void*>(to), shared_at(from, 16, 16, site), bytes, add, call(site));
}
void bulk_commit() { tma_store_commit(); }
void bulk_wait(int newest, bool read_only, Site site) {
    sim::Thread& t = sim::me();
    const sim::Call inside = call(site);
    sim::wait(t.stores, size_t(newest), inside, "bulk wait_group.read $a");
    if (read_only) return;
    t.additions.open_group = t.stores.open_group;
    sim::wait(t.additions, size_t(newest), inside, "bulk wait_group $a");
}

}    // namespace ptx
