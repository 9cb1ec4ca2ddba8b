// What the lanes of a warp do together, and numbers that blocks take.
#include "../include/prim.cuh"
#include "core.h"

namespace sim {

void full_mask(unsigned mask, const char* name, Site site) {
    if (mask != ~0u) fail("%s of a part of a warp at %s:%d", name, site.file, site.line);
}
void syncwarp(Site site) {
    Nothing none;
    auto* order = &block.meetings[me().id / 32];
    release(order);
    collective<32>(none, site, "__syncwarp", [](auto&) {});
    acquire(order);
}
unsigned ballot(bool predicate, Site site) {
    struct Args {
        bool in;
        unsigned out;
    } args{predicate, 0};
    collective<32>(args, site, "__ballot_sync", [](auto& all) {
        unsigned votes = 0;
        for (int i = 0; i < 32; i++) votes |= unsigned(all[i]->in) << i;
        for (auto* x : all) x->out = votes;
    });
    return args.out;
}
void set_registers(Site site) {
    Nothing none;
    collective<128>(none, site, "setmaxnreg", [](auto&) {});
}
bool elect(Site site) {
    Nothing none;
    collective<32>(none, site, "elect.sync", [](auto&) {});
    return me().id % 32 == 0;
}
void exchange(const void* in, void* out, size_t bytes, int x, Site site, const char* name,
              int (*from)(int lane, int x)) {
    struct Args {
        const void* in;
        void* out;
        int x;
    } args{in, out, x};
    collective<32>(args, site, name, [&](auto& all) {
        for (int i = 0; i < 32; i++) {
            const int source = from(i, all[i]->x);
            memcpy(all[i]->out, all[source < 0 || source > 31 ? i : source]->in, bytes);
        }
    });
    count(&Cost::shuffles, me().id % 32 == 0);
}
uint32_t take_ticket(uint32_t* numbers, Site site) {
    check_global(numbers, sizeof *numbers, site);
    const uint32_t number = atomicAdd(numbers, 1u);
    maybe_yield_block();
    return number;
}

}    // namespace sim
