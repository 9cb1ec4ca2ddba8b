// Device memory is host memory that the host cannot touch, but while an operation runs.
#include "gpu.h"
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <sys/mman.h>

namespace gpu {

namespace {
constexpr size_t kGranule = 512;    // of addresses, as cudaMalloc gives them
constexpr size_t kPage = 4096;
constexpr int kPoison = 0xff;    // NaN in every format

struct Managed {
    size_t bytes;
    int device;
};
std::map<char*, size_t> pinned;
std::map<char*, Managed> managed;

void allow(Device& d, int rights) { mprotect(d.base, d.bytes, rights); }

// The entry of a map from addresses to ranges that an address is in.
template <class Map, class Bytes>
auto range_of(Map& ranges, const void* p, Bytes bytes_of) {
    const auto* address = static_cast<const char*>(p);
    auto it = ranges.upper_bound(const_cast<char*>(address));
    if (it == ranges.begin()) return ranges.end();
    --it;
    return address < it->first + bytes_of(it->second) ? it : ranges.end();
}
size_t as_is(size_t bytes) { return bytes; }
}    // namespace

Opened::Opened(Device& d) {
    for (auto& other : devices())
        if (&other == &d || d.peers[size_t(other.ordinal)]) {
            held.push_back(&other);
            if (!other.open++) allow(other, PROT_READ | PROT_WRITE);
        }
}
Opened::~Opened() {
    for (Device* d : held)
        if (!--d->open) allow(*d, PROT_NONE);
}

char* allocate(Device& d, size_t bytes) {
    bytes = bytes ? (bytes + kGranule - 1) / kGranule * kGranule : kGranule;
    for (auto it = d.free.begin(); it != d.free.end(); ++it) {
        if (it->second < bytes) continue;
        char* p = it->first;
        const size_t rest = it->second - bytes;
        d.free.erase(it);
        if (rest) d.free[p + bytes] = rest;
        d.taken[p] = bytes;
        d.used += bytes;
        Opened opened(d);
        memset(p, kPoison, bytes);
        return p;
    }
    return nullptr;
}
bool release(void* pointer) {
    Device* d = owner(pointer);
    auto* p = static_cast<char*>(pointer);
    if (!d || !d->taken.count(p)) return false;
    size_t bytes = d->taken[p];
    d->used -= bytes;
    d->taken.erase(p);
    {
        Opened opened(*d);
        memset(p, kPoison, bytes);
    }
    auto next = d->free.lower_bound(p);
    if (next != d->free.end() && next->first == p + bytes) {
        bytes += next->second;
        next = d->free.erase(next);
    }
    if (next != d->free.begin()) {
        auto before = std::prev(next);
        if (before->first + before->second == p) {
            before->second += bytes;
            return true;
        }
    }
    d->free[p] = bytes;
    return true;
}
Device* owner(const void* p) {
    for (auto& d : devices())
        if (p >= d.base && p < d.base + d.bytes) return &d;
    return nullptr;
}
size_t extent(const void* p, char** base) {
    Device* d = owner(p);
    if (!d) return 0;
    auto it = range_of(d->taken, p, as_is);
    if (it == d->taken.end()) return 0;
    *base = it->first;
    return it->second;
}
bool whole(const void* p, size_t bytes) {
    char* base;
    if (!owner(p) || !bytes) return true;
    const size_t n = extent(p, &base);
    return n && static_cast<const char*>(p) + bytes <= base + n;
}

void pin(void* p, size_t bytes) { pinned[static_cast<char*>(p)] = bytes; }
void unpin(void* p) { pinned.erase(static_cast<char*>(p)); }
bool is_pinned(const void* p) { return range_of(pinned, p, as_is) != pinned.end(); }

char* allocate_managed(size_t bytes, int device) {
    bytes = (bytes + kPage) / kPage * kPage;
    auto* p = static_cast<char*>(aligned_alloc(kPage, bytes));
    memset(p, kPoison, bytes);
    managed[p] = {bytes, device};
    return p;
}
bool release_managed(void* p) {
    if (!managed.erase(static_cast<char*>(p))) return false;
    free(p);
    return true;
}
int managed_by(const void* p) {
    auto it = range_of(managed, p, [](const Managed& m) { return m.bytes; });
    return it == managed.end() ? -1 : it->second.device;
}

}    // namespace gpu
