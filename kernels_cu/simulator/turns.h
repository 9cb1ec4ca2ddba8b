// The host side of prim/turns.cuh: blocks that wait for each other. Such a block steps aside where it stands, and
// others go on.
#pragma once

namespace sim {

SIM_API void let_blocks_pass();
SIM_API uint32_t take_number(uint32_t* numbers, Site site);
SIM_API void wait_turn(const uint32_t* turns, uint32_t turn, Site site);
SIM_API void end_turn(uint32_t* turns, Site site);

}    // namespace sim

inline uint32_t take_number(uint32_t* numbers, SIM_SITE) { return sim::take_number(numbers, site); }
inline void wait_turn(const uint32_t* turns, uint32_t turn, SIM_SITE) { sim::wait_turn(turns, turn, site); }
inline void end_turn(uint32_t* turns, SIM_SITE) { sim::end_turn(turns, site); }
