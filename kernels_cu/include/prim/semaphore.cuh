// Semaphores in global memory, at which blocks take turns (sm_70): tickets in the order in which blocks start, and a count
// of the turns that have ended.
//
// A block may only wait for blocks with lower numbers: those have started, and of all that wait the one with
// the lowest number waits for no other.
#pragma once

#if __CUDA_ARCH__ >= 700

// The next number of a counter that starts at 0. By one thread of a block.
CF_DEVICE uint32_t take_ticket(uint32_t* numbers) { return atomicAdd(numbers, 1u); }
// Waits until `turn` turns have ended. Earlier writes of those threads are then visible to this one.
CF_DEVICE void semaphore_wait(const uint32_t* turns, uint32_t turn) {
    asm volatile(
        "{\n.reg .pred early;\n.reg .u32 ended;\nwait_%=:\nld.acquire.gpu.global.u32 ended, [%0];\n"
        "setp.lt.u32 early, ended, %1;\n@early bra wait_%=;\n}" ::"l"(turns),
        "r"(turn)
        : "memory");
}
CF_DEVICE void semaphore_release(uint32_t* turns) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(turns) : "memory");
}

#endif
