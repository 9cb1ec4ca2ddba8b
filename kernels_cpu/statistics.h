// The params of the entry of statistics.cpp; cupy_flash/cpu/core/params.py writes them, and a test compares.
#pragma once
#include "call.h"

// Results are of Real, and without data if the caller does not want them.
struct Statistics {
    Call call;                       // lse is null if it is not known
    Tensor key_sum, key_max;         // (batch, heads_q, key)
    Tensor entropy;                  // (batch, heads_q, row)
    Tensor top_weights, top_keys;    // (batch, heads_q, row, place); 0, and int32 of -1, before
    int64_t places;                  // of them
};

extern "C" {
// Returns the state of the call when it is done.
EXPORTED int32_t cupy_flash_statistics(Statistics*);
}
