// Barriers, votes and shuffles.
#include "library.h"

namespace ptx {

u32 lane() { return u32(sim::me().id % 32); }
void barrier(int id, int threads, bool waits, Site site) { sim::barrier(id, threads, waits, place(site)); }
void block_barrier(Site site) { __syncthreads(call(site)); }
u32 barrier_vote(bool predicate, Site site) { return u32(sim::barrier_vote(predicate, place(site))); }
u32 block_size() { return u32(sim::block.size); }
void warp_barrier(u32 mask, Site site) { __syncwarp(mask, call(site)); }
u32 ballot(u32 mask, bool predicate, Site site) { return __ballot_sync(mask, predicate, call(site)); }

Shuffled shuffle(Shuffle mode, u32 a, u32 b, u32 c, u32 mask, Site site) {
    const sim::Call inside = call(site);
    sim::full_mask(mask, "shfl.sync", inside);
    struct Args {
        u32 a, b, c;
        Shuffled result;
    } args{a, b, c, {}};
    // Segments, and the last lane (of up: the first) that a source may be, as the PTX ISA has them.
    sim::collective<32>(args, inside, "shfl.sync", [mode](auto& all) {
        for (int lane = 0; lane < 32; lane++) {
            auto& x = *all[lane];
            const int distance = int(x.b & 31), clamp = int(x.c & 31), segment = int(x.c >> 8 & 31);
            const int first = lane & segment, bound = first | (clamp & ~segment);
            const int from = mode == Shuffle::up     ? lane - distance
                             : mode == Shuffle::down ? lane + distance
                             : mode == Shuffle::bfly ? lane ^ distance
                                                     : first | (distance & ~segment);
            const bool valid = mode == Shuffle::up ? from >= bound : from <= bound;
            x.result = {all[valid ? from : lane]->a, valid};
        }
    });
    sim::count(&sim::Cost::shuffles, sim::me().id % 32 == 0);
    return args.result;
}
bool elect(Site site) { return elect_one(call(site)); }
void set_registers(Site site) { sim::set_registers(place(site)); }
void pause() { sim::maybe_preempt(); }
void trap(Site site) { sim::fail("trap at %s:%d", site.file, site.line); }

}    // namespace ptx
