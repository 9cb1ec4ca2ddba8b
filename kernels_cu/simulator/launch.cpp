// The grid loop, and the C interface that Python calls.
#include <sys/mman.h>
#include "core.h"
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace sim {

constexpr size_t kStackBytes = 256 * 1024;

static void poison_shared(size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
    ASAN_UNPOISON_MEMORY_REGION(shared, bytes);
    ASAN_POISON_MEMORY_REGION(shared + bytes, kSharedCapacity - bytes);
#endif
#if defined(__SANITIZE_THREAD__)
    mmap(shared, (kSharedCapacity + 4095) & ~size_t(4095), PROT_READ | PROT_WRITE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
#endif
    memset(shared, 0xff, bytes);    // NaN in every format
}

static void run_block(size_t shared_bytes) {
    Block& b = block;
    b.size = b.live = int(blockDim.x * blockDim.y * blockDim.z);
    b.shared_bytes = shared_bytes;
    for (; b.made < b.size; b.made++) {
        b.threads[b.made].id = b.made;
        b.threads[b.made].make(kStackBytes);
    }
    poison_shared(shared_bytes);
    memset(b.ready, 0, sizeof b.ready);
    b.warps = 0;
    for (auto& x : b.barriers) x = {};
    for (auto& x : b.meetings) x = {};
    for (auto& x : b.groups) x.meeting = {}, x.products.clear(), x.fenced = false;
    b.in_flight.clear();
    reset_state();
    for (int i = 0; i < b.size; i++) start_thread(b.threads[i]);
    Thread start;    // stands for the launcher until the first thread runs
    start.id = b.policy == Policy::early ? b.size - 1 : 0;
    b.running = &start;
    Thread& first = next_thread();
    b.running = &first;
    show_thread(first.id);
#if defined(__SANITIZE_THREAD__)
    b.launcher.tsan = __tsan_get_current_fiber();
#endif
    switch_context(b.launcher, first);
    end_of_block();
}

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
    Quiet quiet;
    Block& b = block;
    clear_report();
    b.failed = false;
    if (!acceptable(grid, threads, shared_bytes, max_threads)) return 0;
    b.body = body;
    b.params = params;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {threads[0], threads[1], threads[2]};
    Guard guard;
    release(&b.launcher);    // blocks see what came before the launch, not each other
    for (blockIdx.z = 0; blockIdx.z < grid[2]; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < grid[1]; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < grid[0]; blockIdx.x++) {
                run_block(shared_bytes);
                if (b.failed) return 0;
            }
    acquire(&b.body);
    return 1;
}

}    // namespace sim
