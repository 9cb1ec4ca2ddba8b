// A ring of stages in shared memory that one thread fills by bulk copies while warpgroups read them.
// Design note: docs/kernels/forward_sm90.md.
//
// Both sides go through the stages in the same order, each with a Cursor of its own:
//   producer, one thread                      consumer, every thread of each warpgroup
//   ring.acquire(at, bytes)                   ring.wait(at)
//   tma_load(..., ring.full[at.stage], ...)   products that read stage at.stage, wgmma_wait
//   at.advance()                              ring.release(at), at.advance()
#pragma once
#include "prim.cuh"

template <int kStages> struct StageRing {
    uint64_t full[kStages];     // one arrival of the producer, and the bytes it announced
    uint64_t empty[kStages];    // one arrival of each consumer warpgroup

    // phase: parity of the pass through the ring.
    struct Cursor {
        int stage = 0, phase = 0;
        CF_DEVICE void advance() {
            if constexpr (kStages == 2) {    // the same, in two instructions
                stage ^= 1;
                phase ^= stage ^ 1;
            } else {
                stage++;
                if (stage == kStages) stage = 0, phase ^= 1;
            }
        }
    };

    // The cursor after `number` advances.
    CF_DEVICE static Cursor at(uint32_t number) {
        return {static_cast<int>(number % kStages), static_cast<int>(number / kStages & 1)};
    }

    // By one thread; then mbar_init_fence() by it and a __syncthreads. Arrivals that fill and free a stage.
    CF_DEVICE void init(int consumers, int producers = 1) {
        CF_UNROLL
        for (int i = 0; i < kStages; i++) {
            mbar_init(full[i], producers);
            mbar_init(empty[i], consumers);
        }
    }
    // Waits until the stage may be overwritten, and announces what will be copied into it: whole boxes, also
    // where they reach out of the tensor.
    CF_DEVICE void acquire(Cursor at, int bytes) {
        // sync: every consumer has released what the pass before put here. In the first pass nothing did, and
        // the wait for the other parity of a fresh barrier passes.
        mbar_wait(empty[at.stage], at.phase ^ 1);
        // why not once the others have too: bytes that come before they are announced are counted all the same,
        // and the phase waits for this arrival.
        mbar_arrive_expect_tx(full[at.stage], bytes);
    }
    CF_DEVICE void wait(Cursor at) {
        // sync: the copies into the stage are visible to this thread and to its products.
        mbar_wait(full[at.stage], at.phase);
    }
    // After the wgmma_wait of the last product that read the stage.
    CF_DEVICE void release(Cursor at) {
        // why one thread: a product belongs to the whole warpgroup, and after wgmma_wait all of it
        // is done.
        if (threadIdx.x % 128 == 0) mbar_arrive(empty[at.stage]);
    }
};
