// The host side of prim/semaphore.cuh: blocks that wait for each other. A block that waits is suspended where it stands,
// and others run.
#pragma once

namespace sim {

SIM_API void maybe_yield_block();
SIM_API uint32_t take_ticket(uint32_t* numbers, Site site);
SIM_API void semaphore_wait(const uint32_t* turns, uint32_t turn, Site site);
SIM_API void semaphore_release(uint32_t* turns, Site site);

}    // namespace sim

inline uint32_t take_ticket(uint32_t* numbers, SIM_SITE) { return sim::take_ticket(numbers, site); }
inline void semaphore_wait(const uint32_t* turns, uint32_t turn, SIM_SITE) {
    sim::semaphore_wait(turns, turn, site);
}
inline void semaphore_release(uint32_t* turns, SIM_SITE) { sim::semaphore_release(turns, site); }
