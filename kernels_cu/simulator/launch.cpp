// The grid loop, and the C interface that Python calls.
#include <algorithm>
#include <sys/mman.h>
#include "../include/prim.cuh"
#include "core.h"
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace sim {

// Fills the shared memory of a block with NaN.
static void poison_shared(size_t bytes) {
#if defined(__SANITIZE_THREAD__)
    mmap(shared, kSharedBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
#endif
#if defined(__SANITIZE_ADDRESS__)
    ASAN_UNPOISON_MEMORY_REGION(shared, bytes);
    ASAN_POISON_MEMORY_REGION(shared + bytes, kSharedBytes - bytes);
#endif
    memset(shared, 0xff, bytes);    // NaN in every format
}

static void start_block(uint3 index, size_t shared_bytes) {
    Block& b = block;
    blockIdx = b.index = index;
    b.size = int(blockDim.x * blockDim.y * blockDim.z);
    b.live = b.size;
    b.shared_bytes = shared_bytes;
    poison_shared(shared_bytes);
    memset(b.ready, 0, sizeof b.ready);
    b.warps = 0;
    for (auto& x : b.barriers) x = {};
    for (auto& x : b.meetings) x = {};
    for (auto& x : b.groups) x.meeting = {}, x.products.clear(), x.fenced = false;
    b.in_flight.clear();
    b.shadows = std::make_unique<Shadows>();
    memset(b.dirty, 0, (shared_bytes + 15) / 16 * sizeof b.dirty[0]);
    b.unfenced_barriers.clear();
    take_fibers();
    for (int i = 0; i < b.size; i++) {
        b.threads[i].id = i;
        start_thread(b.threads[i]);
    }
    Thread start;    // stands for the launcher until the first thread runs
    start.id = b.policy == Policy::early ? b.size - 1 : 0;
    b.running = &start;
    b.running = &next_thread();
}

// Runs the block until it ends, fails or is suspended.
static void run_block() {
    show_thread(block.running->id);
#if defined(__SANITIZE_THREAD__)
    block.launcher.tsan = __tsan_get_current_fiber();
#endif
    switch_context(block.launcher, *block.running);
}

// ---- blocks that wait for others

static uint64_t turns_ended;    // by all blocks of the launch

void maybe_yield_block() {
    if (block.policy == Policy::late || block.counting) return;
    if (block.policy == Policy::early || draw(2)) suspend_block(BlockState::ready);
}
void semaphore_wait(const uint32_t* turns, uint32_t turn, Site site) {
    check_global(turns, sizeof *turns, site);
    if (block.policy == Policy::random && !block.counting && draw(4) == 0) suspend_block(BlockState::ready);
    Thread& t = me();
    t.waits_for_block = true;
    while (__atomic_load_n(turns, __ATOMIC_RELAXED) < turn) wait(turns, site, "turn $a of blocks", int(turn));
    t.waits_for_block = false;
    acquire(turns);
}
void semaphore_release(uint32_t* turns, Site site) {
    check_global(turns, sizeof *turns, site);
    release(turns);
    __atomic_fetch_add(turns, 1, __ATOMIC_RELAXED);
    turns_ended++;
    if (block.policy == Policy::random) maybe_yield_block();
}

namespace {
// Where a suspended block is kept.
struct SuspendedBlock {
    std::unique_ptr<Block> kept = std::make_unique<Block>();
    std::vector<unsigned char> shared_memory;
    uint64_t turns_seen = 0;    // turns that had ended when it was suspended

    bool can_run() const { return kept->state == BlockState::ready || turns_seen != turns_ended; }
    // Swaps places with `block`. why pointers into a block stay valid: they point to where it runs, not to where it is kept.
    void swap_with_running() {
        const Block& b = block;
        Block& other = *kept;
        other.policy = b.policy, other.counting = b.counting, other.body = b.body, other.params = b.params;
        turns_seen = turns_ended;
        std::swap(reinterpret_cast<Bytes&>(block), reinterpret_cast<Bytes&>(other));
        std::vector<unsigned char> before(shared, shared + other.shared_bytes);
        poison_shared(b.shared_bytes);
        std::copy(shared_memory.begin(), shared_memory.end(), shared);
        shared_memory = std::move(before);
    }

  private:
    using Bytes = unsigned char[sizeof(Block)];
};

// The blocks of a launch that have started and not ended, and which of them runs next.
class ResidentBlocks {
  public:
    // why so few: then a block that waits for one that starts after it is a deadlock, as it may be on a GPU.
    bool full() const { return suspended.size() >= (block.policy == Policy::late ? 1 : 3); }
    bool none() const { return suspended.empty(); }
    // Keeps the block that has just run.
    void suspend() {
        if (spare.empty()) spare.push_back(std::make_unique<SuspendedBlock>());
        suspended.push_back(std::move(spare.back()));
        spare.pop_back();
        suspended.back()->swap_with_running();
    }
    // Makes one of them the running block; false if a new one should start instead.
    bool resume(bool may_start) {
        std::vector<size_t> able;
        for (size_t i = 0; i < suspended.size(); i++)
            if (suspended[i]->can_run()) able.push_back(i);
        if (may_start && (block.policy == Policy::early || able.empty())) return false;
        if (may_start && block.policy == Policy::random && draw(uint32_t(able.size() + 1)) == 0) return false;
        size_t chosen = 0;
        if (!able.empty())
            chosen = block.policy == Policy::random ? able[draw(uint32_t(able.size()))] : able.back();
        suspended[chosen]->swap_with_running();
        if (!able.empty()) block.state = BlockState::ready;    // else run_other_blocks returns false
        spare.push_back(std::move(suspended[chosen]));
        suspended.erase(suspended.begin() + std::ptrdiff_t(chosen));
        return true;
    }
    ~ResidentBlocks() {
        for (auto& one : suspended) spare.push_back(std::move(one));
    }

  private:
    std::vector<std::unique_ptr<SuspendedBlock>> suspended;
    static inline std::vector<std::unique_ptr<SuspendedBlock>> spare;
};
}    // namespace

static bool acceptable(const uint32_t grid[3], const uint32_t threads[3], uint64_t shared_bytes,
                       uint64_t max_threads) {
    char text[200] = "";
    uint64_t n = uint64_t(threads[0]) * threads[1] * threads[2];
    if (!grid[0] || !grid[1] || !grid[2] || grid[0] > 0x7fffffff || grid[1] > 65535 || grid[2] > 65535)
        snprintf(text, sizeof text, "a grid of %u x %u x %u blocks cannot be launched\n", grid[0], grid[1],
                 grid[2]);
    else if (!n || n > uint64_t(kMaxThreads) || n > max_threads)
        snprintf(text, sizeof text,
                 "a block of %u x %u x %u threads cannot be launched; the kernel takes up to %llu\n",
                 threads[0], threads[1], threads[2], (unsigned long long)max_threads);
    else if (shared_bytes > kSharedCapacity)
        snprintf(text, sizeof text, "%llu bytes of shared memory are more than the %zu of a block\n",
                 (unsigned long long)shared_bytes, kSharedCapacity);
    if (text[0]) report(text);
    return !text[0];
}

int launch(void (*body)(const void*), const uint32_t grid[3], const uint32_t threads[3],
           uint64_t shared_bytes, const void* params, uint64_t max_threads) {
    IgnoreAccesses ignoring;
    Block& b = block;
    clear_report();
    start_launch();
    if (!acceptable(grid, threads, shared_bytes, max_threads)) return 0;
    b.body = body;
    b.params = params;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {threads[0], threads[1], threads[2]};
    Guard guard;
    release(&b.launcher);    // blocks see what came before the launch, not each other
    turns_ended = 0;
    ResidentBlocks resident;
    const uint64_t blocks = uint64_t(grid[0]) * grid[1] * grid[2];
    for (uint64_t next = 0; next < blocks || !resident.none();) {
        const bool may_start = next < blocks && !resident.full();
        if (resident.none() || !resident.resume(may_start)) {
            const uint64_t row = next / grid[0];
            start_block({uint32_t(next % grid[0]), uint32_t(row % grid[1]), uint32_t(row / grid[1])},
                        shared_bytes);
            next++;
        }
        run_block();
        if (b.failed) return 0;
        if (b.state == BlockState::ended) end_of_block();
        else resident.suspend();
    }
    acquire(&b.body);
    return 1;
}

}    // namespace sim
