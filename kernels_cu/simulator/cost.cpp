// Bank conflicts and coalescing.
#include "cost.h"
#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include "core.h"

namespace sim {

Cost cost;

namespace {
using Place = std::tuple<const char*, int, Access>;
struct Instruction {
    uint64_t address[32];
    int bytes[32];
    uint32_t lanes = 0;
};
std::map<std::pair<int, Place>, std::map<uint64_t, Instruction>>
    unfinished;                                      // by warp and place, then by visit
std::map<std::pair<int, Place>, uint64_t> visits;    // by thread and place

// 32 banks of 4 bytes; words of the same bank take turns, the same word is read once.
uint64_t cycles(const std::set<uint64_t>& words) {
    int per_bank[32] = {};
    for (uint64_t w : words) per_bank[w % 32]++;
    return uint64_t(*std::max_element(per_bank, per_bank + 32));
}

void finish(Access kind, const Instruction& x) {
    bool on_global = kind == Access::global_load || kind == Access::global_store;
    if (on_global) {
        std::set<uint64_t> sectors;
        uint64_t bytes = 0;
        for (int i = 0; i < 32; i++)
            if (x.lanes >> i & 1) {
                bytes += uint64_t(x.bytes[i]);
                for (uint64_t s = x.address[i] / 32; s <= (x.address[i] + uint64_t(x.bytes[i]) - 1) / 32; s++)
                    sectors.insert(s);
            }
        bool load = kind == Access::global_load;
        (load ? cost.global_load_bytes : cost.global_store_bytes) += bytes;
        (load ? cost.global_load_sectors : cost.global_store_sectors) += sectors.size();
        return;
    }
    // An access of 8 or 16 bytes per lane is carried out for a half or a quarter of the warp at a time.
    int widest = 4;
    for (int i = 0; i < 32; i++)
        if (x.lanes >> i & 1) widest = std::max(widest, x.bytes[i]);
    int at_a_time = 32 * 4 / widest;
    uint64_t ideal = 0, actual = 0;
    for (int first = 0; first < 32; first += at_a_time) {
        std::set<uint64_t> words;
        for (int i = first; i < first + at_a_time; i++)
            if (x.lanes >> i & 1)
                for (int b = 0; b < x.bytes[i]; b += 4) words.insert((x.address[i] + uint64_t(b)) / 4);
        ideal += (words.size() + 31) / 32;
        actual += cycles(words);
    }
    auto add = [&](uint64_t& a, uint64_t& b) { a += ideal, b += actual; };
    if (kind == Access::shared_load) add(cost.shared_loads, cost.shared_load_cycles);
    else if (kind == Access::shared_store) add(cost.shared_stores, cost.shared_store_cycles);
    else add(cost.copy_stores, cost.copy_store_cycles);
}
}    // namespace

void record_access(Access kind, uint64_t address, int bytes, Site site) {
    Place place{site.file, site.line, kind};
    int id = me().id;
    uint64_t visit = visits[{id, place}]++;
    auto& open = unfinished[{id / 32, place}];
    Instruction& x = open[visit];
    x.address[id % 32] = address;
    x.bytes[id % 32] = bytes;
    x.lanes |= 1u << id % 32;
    if (x.lanes == ~0u) {
        finish(kind, x);
        open.erase(visit);
    }
}

int cycles_of_rows(const uint32_t (&addresses)[8]) {
    std::set<uint64_t> words;
    for (uint32_t a : addresses)
        for (uint32_t b = 0; b < 16; b += 4) words.insert((a + b) / 4);
    return int(cycles(words));
}

void end_of_block() {
    for (auto& [key, open] : unfinished)
        for (auto& [visit, x] : open) finish(std::get<Access>(key.second), x);
    unfinished.clear();
    visits.clear();
}

}    // namespace sim

extern "C" SIM_API void simulator_cost(uint64_t* out) {
    memcpy(out, &sim::cost, sizeof sim::cost);
    sim::cost = {};
}
