// What block.cpp, launch.cpp and report.cpp share and no kernel sees.
#pragma once
#include <cuda_fp16.h>
#include <vector_functions.h>
#include "../include/base.cuh"
#include "block.h"

namespace sim {

void set_seed(uint64_t seed);
void show_thread(int id);    // sets threadIdx
Thread& next_thread();
void start_launch();
void take_fibers();    // ThreadSanitizer's, of a block's threads
void start_thread(Thread& t);

void clear_report();
void report(const char* text);    // for failures outside a thread
int time_limit();                 // seconds of processor time for a launch
bool time_is_up();

// While it lives, a crash or an endless loop in a kernel ends the launch with a report instead of the
// process.
struct Guard {
    Guard();
    ~Guard();
    Guard(const Guard&) = delete;
};

void end_of_block();    // closes the counts

}    // namespace sim
