// mbarriers, tensor maps and bulk copies.
#include "../include/prim.cuh"
#include "core.h"

namespace sim {

// ---- mbarrier: the 64 bits in shared memory hold the whole state, so overwriting it or forgetting to
// initialise it shows

namespace {
struct Mbar {
    uint64_t magic : 2, phase : 1, count : 20,
        pending : 20;      // magic 1: initialised, 2: and fenced for bulk copies
    int64_t bytes : 21;    // expected and not yet come
};
static_assert(sizeof(Mbar) == 8);
constexpr int kMostBytes = (1 << 20) - 1;

Mbar& checked(unsigned char* p, Site site) {
    auto& b = reinterpret_cast<Mbar&>(*p);
    if (b.magic != 1 && b.magic != 2) fail("mbarrier not initialised, used at %s:%d", site.file, site.line);
    reads(&b, 8);
    return b;
}
Mbar& state_of(uint64_t& bar, Site site) { return checked(at(smem_addr(&bar), 8, 8, site), site); }
void end_phase_if_complete(Mbar& b) {
    if (b.pending || b.bytes) return;
    b.phase ^= 1;
    b.pending = b.count;
    wake(&b);
}
Mbar& barrier_of_load(unsigned char* p, Site site) {
    Mbar& b = checked(p, site);
    if (b.magic != 2)
        fail("bulk load at %s:%d signals an mbarrier initialised without mbar_init_fence", site.file,
             site.line);
    return b;
}
void come(Mbar& b, int bytes) {
    if (b.bytes - bytes < -kMostBytes) fail("an mbarrier got %d bytes more than it may", bytes);
    b.bytes -= bytes;
    end_phase_if_complete(b);
}
}    // namespace

void mbar_init(uint64_t& bar, int count, Site site) {
    auto& b = reinterpret_cast<Mbar&>(*at(smem_addr(&bar), 8, 8, site));
    if (count < 1 || count > kMostBytes)
        fail("mbarrier of %d arrivals at %s:%d", count, site.file, site.line);
    writes(&b, 8);
    b = {1, 0, uint64_t(count), uint64_t(count), 0};
    block.unfenced_barriers.push_back(&b);
}
void mbar_fence() {
    for (void* b : block.unfenced_barriers) static_cast<Mbar*>(b)->magic = 2;
    block.unfenced_barriers.clear();
}
static void arrive(Mbar& b, int arrivals, int bytes, Site site) {
    if (bytes < 0 || b.bytes + bytes > kMostBytes)
        fail("mbarrier expects %d more bytes at %s:%d, at most %d in all", bytes, site.file, site.line,
             kMostBytes);
    b.bytes += bytes;
    if (!arrivals) return;
    if (!b.pending) fail("more arrivals than the mbarrier expects at %s:%d", site.file, site.line);
    release(&b);
    b.pending -= uint64_t(arrivals);
    end_phase_if_complete(b);
}
void mbar_arrive(uint64_t& bar, int arrivals, int bytes, Site site) {
    arrive(state_of(bar, site), arrivals, bytes, site);
}
void mbar_wait(uint64_t& bar, int parity, Site site) {
    Mbar& b = state_of(bar, site);
    while (b.phase == unsigned(parity))
        wait(&b, site, "mbarrier at $a, parity $b", int(smem_addr(&bar)), parity);
    acquire(&b);
}

void fence_proxy_async() {
    Thread& t = me();
    for (uint32_t g : t.unfenced)
        if (block.dirty[g] == t.id + 1) block.dirty[g] = 0;
    t.unfenced.clear();
}

// ---- boxes of a tensor

namespace {
// layout: as encode_tensor_map of cupy_flash/device/simulator.py writes it into a TensorMap.
struct Map {
    unsigned char* base;
    uint8_t rank, bytes, swizzle, magic;
    uint64_t dim[5], stride[5];    // strides in bytes
    uint32_t box[5];
    size_t total() const {
        size_t n = bytes;
        for (int d = 0; d < rank; d++) n *= box[d];
        return n;
    }
};
static_assert(sizeof(Map) <= sizeof(TensorMap) && offsetof(Map, dim) == 16 && offsetof(Map, box) == 96);

Map read_map(const TensorMap& map, const Coordinates& c, Site site) {
    Map m;
    memcpy(&m, &map, sizeof m);
    if (m.magic != 0xcf)
        fail("no tensor map is at %p, used at %s:%d", static_cast<const void*>(&map), site.file, site.line);
    if (m.rank != c.rank)
        fail("tensor map of rank %d used with %d coordinates at %s:%d", m.rank, c.rank, site.file, site.line);
    return m;
}
// why: at such a corner a GPU raises an illegal instruction (an H200, driver 580.159.04, 2026-11-26). Past the
// end of the tensor a box may reach or begin, and before it one that is loaded.
void check_corner(const Map& m, const Coordinates& c, bool store, Site site) {
    const char* reason = nullptr;
    if (c.at[0] * int64_t(m.bytes) % 16) reason = "the first coordinate is not a multiple of 16 bytes";
    for (int d = 0; d < m.rank && store; d++)
        if (c.at[d] < 0) reason = "a store takes no negative coordinate";
    if (!reason) return;
    char corner[5 * 13];
    int length = 0;
    for (int d = 0; d < m.rank; d++)
        length += snprintf(corner + length, sizeof corner - size_t(length), d ? ", %d" : "%d", c.at[d]);
    fail("bulk %s at %s:%d of a box at (%s), items of %d bytes: %s", store ? "store" : "load", site.file,
         site.line, corner, m.bytes, reason);
}
// Exclusive or of address bits 4.. with bits 7..: 1, 2 or 3 bits for a swizzle of 32, 64 or 128 bytes.
uint32_t swizzled(uint32_t addr, uint32_t bits) { return addr ^ (addr >> 7 & ((1u << bits) - 1)) << 4; }

// Calls f(shared address, global pointer or null when out of bounds, bytes) for runs of up to 16 bytes of a
// box.
template <class F> void each_run(const Map& m, uint32_t addr, const Coordinates& c, F f) {
    uint32_t n[5] = {1, 1, 1, 1, 1}, i[5] = {};
    for (int d = 0; d < m.rank; d++) n[d] = m.box[d];
    uint32_t per_run = 16u / m.bytes, linear = addr;
    for (i[4] = 0; i[4] < n[4]; i[4]++)
        for (i[3] = 0; i[3] < n[3]; i[3]++)
            for (i[2] = 0; i[2] < n[2]; i[2]++)
                for (i[1] = 0; i[1] < n[1]; i[1]++) {
                    unsigned char* row = m.base;
                    for (int d = 1; d < m.rank && row; d++) {
                        int64_t x = int64_t(c.at[d]) + i[d];
                        row = x < 0 || uint64_t(x) >= m.dim[d] ? nullptr : row + uint64_t(x) * m.stride[d];
                    }
                    for (i[0] = 0; i[0] < n[0]; i[0] += per_run, linear += 16) {
                        int64_t first = int64_t(c.at[0]) + i[0], end = first + per_run;
                        auto* s = shared + swizzled(linear, m.swizzle);
                        if (row && first >= 0 && uint64_t(end) <= m.dim[0]) {
                            f(s, row + first * m.bytes, 16u);
                            continue;
                        }
                        for (int64_t x = first; x < end; x++, s += m.bytes)
                            f(s, row && x >= 0 && uint64_t(x) < m.dim[0] ? row + x * m.bytes : nullptr,
                              unsigned(m.bytes));
                    }
                }
}
unsigned char* box_in_shared(const void* p, const Map& m, Site site) {
    // The pattern of a swizzle lies on address bits, so a tile starts where it does.
    uint32_t align = m.swizzle ? 128u << m.swizzle : 128;
    return at(smem_addr(p), m.total(), align, site);
}
}    // namespace

void tma_load(void* dst, const TensorMap& map, uint64_t& bar, Coordinates c, Site site) {
    Map m = read_map(map, c, site);
    check_corner(m, c, false, site);
    auto* to = box_in_shared(dst, m, site);
    auto addr = uint32_t(to - shared);
    int bytes = int(m.total());
    count(&Cost::bulk_load_bytes, uint64_t(bytes));
    Mbar& b = barrier_of_load(at(smem_addr(&bar), 8, 8, site), site);
    as_agent(me().agent, &b, [&] {
        writes(to, size_t(bytes));
        each_run(m, addr, c, [&](unsigned char*, const unsigned char* g, unsigned n) {
            if (g) reads(g, n);
        });
    });
    auto operation = issue([=] { memset(to, 0xff, size_t(bytes)); },
                           [=, &b] {
                               each_run(m, addr, c, [](unsigned char* s, const unsigned char* g, unsigned n) {
                                   if (g) memcpy(s, g, n);
                                   else memset(s, 0, n);
                               });
                               come(b, bytes);
                           },
                           nullptr, &b);
    if (operation) block.in_flight.push_back(std::move(operation));
}

void tma_store(const TensorMap& map, const void* src, Coordinates c, Site site) {
    Map m = read_map(map, c, site);
    check_corner(m, c, true, site);
    auto* from = box_in_shared(src, m, site);
    auto addr = uint32_t(from - shared);
    Thread& t = me();
    check_clean(from, m.total(), "bulk store", site);
    count(&Cost::bulk_store_bytes, m.total());
    as_agent(t.agent, &t.stores, [&] {
        reads(from, m.total());
        each_run(m, addr, c, [&](unsigned char*, unsigned char* g, unsigned n) {
            if (g) writes(g, n);
        });
    });
    t.stores.add(issue([] {},
                       [=] {
                           each_run(m, addr, c, [](const unsigned char* s, unsigned char* g, unsigned n) {
                               if (g) memcpy(g, s, n);
                           });
                       }));
}

// ---- contiguous bytes

static void check_bulk(const void* global, int bytes, Site site) {
    if (bytes <= 0 || bytes % 16 || reinterpret_cast<uintptr_t>(global) % 16)
        fail("bulk copy of %d bytes, global address %p, at %s:%d: both must be multiples of 16", bytes,
             global, site.file, site.line);
}

void bulk_load(void* dst, const void* src, int bytes, uint64_t& bar, Site site) {
    check_bulk(src, bytes, site);
    auto* to = at(smem_addr(dst), size_t(bytes), 16, site);
    Mbar& b = barrier_of_load(at(smem_addr(&bar), 8, 8, site), site);
    count(&Cost::bulk_load_bytes, uint64_t(bytes));
    as_agent(me().agent, &b, [&] { writes(to, size_t(bytes)), reads(src, size_t(bytes)); });
    auto operation = issue([=] { memset(to, 0xff, size_t(bytes)); },
                           [=, &b] {
                               memcpy(to, src, size_t(bytes));
                               come(b, bytes);
                           },
                           nullptr, &b);
    if (operation) block.in_flight.push_back(std::move(operation));
}

void bulk_store(void* dst, const void* src, int bytes, bool add, Site site) {
    check_bulk(dst, bytes, site);
    auto* from = at(smem_addr(src), size_t(bytes), 16, site);
    Thread& t = me();
    check_clean(from, size_t(bytes), add ? "bulk reduce" : "bulk store", site);
    count(add ? &Cost::bulk_reduce_bytes : &Cost::bulk_store_bytes, uint64_t(bytes));
    as_agent(t.agent, &t.stores, [&] {
        reads(from, size_t(bytes));
        if (!add) writes(dst, size_t(bytes));
    });
    if (!add) {
        t.stores.add(issue([] {}, [=] { memcpy(dst, from, size_t(bytes)); }));
        return;
    }
    // It reads shared memory first, and adds what it has read later.
    const uint64_t group = t.stores.open_group;
    t.stores.add(issue([] {},
                       [=, &t] {
                           const auto* first = reinterpret_cast<const float*>(from);
                           std::vector<float> read(first, first + bytes / 4);
                           auto addition = issue([] {},
                                                 [=, x = std::move(read)] {
                                                     for (size_t i = 0; i < x.size(); i++)
                                                         atomic(static_cast<float*>(dst) + i,
                                                                [&](float old) { return old + x[i]; });
                                                 });
                           if (addition) t.additions.entries.push_back({group, std::move(addition)});
                       }));
}

}    // namespace sim
