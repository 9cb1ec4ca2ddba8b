// What the primitives build on: the state of the running block, and the functions by which its threads wait.
//
// One thread block runs at a time, with one fiber per CUDA thread, on one OS thread.
// A block that waits for others is suspended, see semaphore.h.
// The .cpp files are compiled once, into the library that every simulated kernel links with. why few templates in these
// headers: each is instantiated anew in every kernel, used or not.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <utility>
#include <vector>
#include <vector_types.h>
#include "fiber.h"
#include "race.h"

#define SIM_API __attribute__((visibility("default")))

extern SIM_API uint3 threadIdx, blockIdx;
extern SIM_API dim3 blockDim, gridDim;

namespace sim {

// Where in the kernel a primitive was called.
struct Site {
    const char* file;
    int line;
};
// Inside a primitive ThreadSanitizer sees only what the primitive reports: `ignoring` lives as long as the call.
struct Call : Site {
    IgnoreAccesses ignoring;
};
#define SIM_SITE const sim::Call& site = {{__builtin_FILE(), __builtin_LINE()}, {}}

// When asynchronous operations take effect, and how far one warp may run ahead of another.
//   late:   only when no thread can run, and then only what a blocked thread waits for; the lowest warp runs until it
//           blocks
//   early:  at issue; the highest warp runs first
//   random: each operation early or late by a coin; warps and preemption at random
enum class Policy { early, late, random };

// An asynchronous copy or matrix product between its issue and its completion.
struct Operation {
    const void* signals = nullptr;    // the mbarrier that a bulk load completes on
    virtual void run() = 0;
    virtual ~Operation() = default;
};

// Operations that a thread (or warpgroup) commits and waits for in groups. Done operations leave it.
struct SIM_API Queue {
    struct Entry {
        uint64_t group;
        std::unique_ptr<Operation> operation;
    };
    std::deque<Entry> entries;
    uint64_t open_group = 0;
    void add(std::unique_ptr<Operation> operation);    // unless it is null
    bool done(size_t newest_left) const;
    bool idle() const;
    void complete(size_t newest_left);    // all but the newest committed groups
    void complete_all();
    void clear();
};

struct Thread : Context {
    int id = 0;
    bool done = false, ignoring = false;
    const void* key = nullptr;    // what it waits for; null when it can run
    const char* what = "";
    Queue* queue = nullptr;    // it waits until all but the `left` newest groups of this are complete
    size_t left = 0;
    int a = 0, b = 0;    // shown in a report
    Site site{};
    void* args = nullptr;            // of the collective operation it stands in
    void* agent = nullptr;           // ThreadSanitizer's fiber of its asynchronous copies
    Queue copies, stores;            // cp.async; bulk stores
    Queue additions;                 // bulk reductions that have read shared memory and not yet added
    bool waits_for_block = false;    // its wait is for what another block does
    std::vector<uint32_t>
        unfenced;    // granules of shared memory that it wrote since its last fence.proxy.async
};

struct Barrier {
    int expected = 0, arrived = 0;
    unsigned phase = 0;
    char order[2];    // addresses for ThreadSanitizer, one per phase
};
// The lanes of a warp or warpgroup that have arrived at a collective operation.
struct Meeting {
    int arrived = 0;
    const char* name = nullptr;
    Site site{};
};
enum class BlockState { ended, ready, waiting };    // when it is not running; waiting: for another block
struct Group {                                      // of four warps
    Meeting meeting;
    Queue products;           // wgmma
    bool fenced = false;      // its registers are ordered before its next product
    void* agent = nullptr;    // ThreadSanitizer's fiber of its products
};
// Accumulators of products in flight live here; the registers hold NaN meanwhile.
struct Shadow {
    int users = 0;
    std::vector<float> d;
};
using Shadows = std::map<float*, Shadow>;    // by the registers of the first thread

inline constexpr size_t kSharedCapacity = 232448;    // 227 KiB, the most a block may have on any GPU
inline constexpr int kMaxThreads = 1024;             // of a block
inline constexpr size_t kSharedBytes = 1 << 18;      // of the buffer that it is in

// Everything about a block but its shared memory.
// why no member may point into the object itself: a block that does not run is kept elsewhere, byte for byte.
struct Block {
    Thread threads[kMaxThreads];
    int size = 0, live = 0;    // threads; those that have not exited
    size_t shared_bytes = 0;
    uint32_t ready[kMaxThreads / 32] = {}, warps = 0;    // ready lanes of every warp; warps with any
    Barrier barriers[16];
    Meeting meetings[kMaxThreads / 32];
    Group groups[kMaxThreads / 128];
    std::vector<std::unique_ptr<Operation>> in_flight;    // bulk loads: they complete on their own
    std::unique_ptr<Shadows> shadows;
    // Which thread (plus 1) wrote a 16-byte granule of shared memory and has not called fence.proxy.async since.
    int dirty[kSharedBytes / 16] = {};
    std::vector<void*> unfenced_barriers;    // mbarriers, until mbar_init_fence
    int votes[2] = {};                       // of this and of the next __syncthreads_count
    uint3 index = {};                        // blockIdx
    BlockState state = BlockState::ended;    // when it returned to the launcher
    Context launcher;
    struct Fibers* fibers = nullptr;    // ThreadSanitizer's; null: each thread has its own
    Thread* running = nullptr;
    void (*body)(const void*) = nullptr;
    const void* params = nullptr;
    bool failed = false;
    Policy policy = Policy::late;
    bool counting = false;
};
extern SIM_API Block block;
extern SIM_API unsigned char shared[];

SIM_API uint32_t draw(uint32_t n);    // a random number below n
[[noreturn]] SIM_API void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
SIM_API void wake(const void* key);
SIM_API void wait(const void* key, Site site, const char* what, int a = 0, int b = 0);
SIM_API void wait(Queue& queue, size_t newest_left, Site site, const char* what);
SIM_API void maybe_preempt();                    // under `random` runs another warp now and then
SIM_API void suspend_block(BlockState state);    // lets other blocks run; returns when this one is resumed
SIM_API void set_ready(Thread& t);
SIM_API void barrier(int id, int count, bool blocks, Site site);
SIM_API int launch(void (*body)(const void*), const uint32_t grid[3], const uint32_t block[3],
                   uint64_t shared_bytes, const void* params, uint64_t max_threads);

inline Thread& me() { return *block.running; }
inline Group& my_group() { return block.groups[me().id / 128]; }

// Checked address of shared memory.
SIM_API unsigned char* at(uint32_t addr, size_t bytes, size_t align, Site site);

// All `lanes` threads of a warp or warpgroup meet; the last to arrive does the work for all of them, in place:
// every fiber's stack is alive meanwhile, so it reads and writes the others' registers through `args`.
SIM_API void meet(int lanes, void* args, Site site, const char* name, void (*work)(void* how, void** all),
                  void* how);
template <int kLanes, class Args, class Work> void collective(Args& args, Site site, const char* name,
                                                              Work work) {
    auto call = [](void* how, void** all) {
        (*static_cast<Work*>(how))(*reinterpret_cast<Args*(*)[kLanes]>(all));
    };
    meet(kLanes, &args, site, name, call, &work);
}
struct Nothing {};

inline bool completes_at_issue() {
    return block.policy == Policy::early || (block.policy == Policy::random && draw(3) == 0);
}

// Issues an asynchronous operation: `poison` makes its destination unusable until `run` completes it. Null if
// it is complete already. `before`: a queue whose operations execute in order, so all of them come before
// this one.
template <class Poison, class Run>
std::unique_ptr<Operation> issue(Poison poison, Run run, Queue* before = nullptr,
                                 const void* signals = nullptr) {
    struct Issued : Operation {
        Run work;
        explicit Issued(Run w) : work(w) {}
        void run() override { work(); }
    };
    if (completes_at_issue()) {
        if (before) before->complete_all();
        run();
        return nullptr;
    }
    poison();
    auto operation = std::make_unique<Issued>(run);
    operation->signals = signals;
    return operation;
}
// Runs a grid; 1 on success. The parameters are copied to where their alignment is right.
template <class Params, void (*body)(const Params&)>
int launch_kernel(const uint32_t grid[3], const uint32_t threads[3], uint64_t shared_bytes,
                  const void* params, uint64_t max_threads) {
    Params copy;
    memcpy(static_cast<void*>(&copy), params, sizeof copy);
    auto call = [](const void* p) { body(*static_cast<const Params*>(p)); };
    return launch(call, grid, threads, shared_bytes, &copy, max_threads);
}

}    // namespace sim
