// The scheduler of a block: which thread runs next, barriers, waits, and when asynchronous operations
// complete.
#include <algorithm>
#include "core.h"
#include "cost.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace sim {

constexpr size_t kStackBytes = 256 * 1024;

Block block;
alignas(4096) unsigned char shared[kSharedBytes];
static uint64_t seed = 1;

void set_seed(uint64_t s) { seed = s * 0x9e3779b97f4a7c15ull + 1; }
uint32_t draw(uint32_t n) {    // xorshift
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    return uint32_t((seed >> 11) % n);
}

void Queue::add(std::unique_ptr<Operation> operation) {
    if (operation) entries.push_back({open_group, std::move(operation)});
}
bool Queue::done(size_t newest_left) const {
    return entries.empty() || entries.front().group + newest_left >= open_group;
}
bool Queue::idle() const { return entries.empty(); }
void Queue::clear() { entries.clear(), open_group = 0; }
void Queue::complete(size_t newest_left) {
    while (!done(newest_left)) {
        auto operation = std::move(entries.front().operation);
        entries.pop_front();
        operation->run();
    }
}
void Queue::complete_all() {
    while (!entries.empty()) {
        auto operation = std::move(entries.front().operation);
        entries.pop_front();
        operation->run();
    }
}

void set_ready(Thread& t) {
    t.key = nullptr;
    block.ready[t.id / 32] |= 1u << t.id % 32;
    block.warps |= 1u << t.id / 32;
}

void show_thread(int id) {
    auto x = unsigned(id);
    blockIdx = block.index;
    threadIdx = {x % blockDim.x, x / blockDim.x % blockDim.y, x / blockDim.x / blockDim.y};
}

SIM_NEVER_RETURNS static void resume(Thread& next, bool last = false) {
    Thread& from = me();
    if (&next == &from) return;
    block.running = &next;
    show_thread(next.id);
    switch_context(from, next, last);
}

void wake(const void* key) {
    for (int i = 0; i < block.size; i++)
        if (block.threads[i].key == key) set_ready(block.threads[i]);
}

static void complete_in_flight(size_t index) {
    auto operation = std::move(block.in_flight[index]);
    block.in_flight.erase(block.in_flight.begin() + std::ptrdiff_t(index));
    operation->run();
}

// Called when no thread can run: completes something that a thread waits for, so that every operation is as
// late as it can be. False when that helps nobody.
static bool progress() {
    int n = block.size, start = block.policy == Policy::random ? int(draw(uint32_t(n))) : 0;
    for (int i = 0; i < n; i++) {
        Thread& t = block.threads[(start + i) % n];
        if (t.done || !t.key) continue;
        if (t.queue) {
            t.queue->complete(t.left);
            wake(t.queue);
            return true;
        }
        for (size_t j = block.in_flight.size(); j-- > 0;)    // newest first is the least expected order
            if (block.in_flight[j]->signals == t.key) {
                complete_in_flight(j);
                return true;
            }
    }
    return false;
}

void suspend_block(BlockState state) {
    block.state = state;
    switch_context(me(), block.launcher);
}

// Called when no thread of the block can run. False if none waits for another block, or no other block can run.
static bool run_other_blocks() {
    Thread *first = block.threads, *end = first + block.size;
    auto waits = [](const Thread& t) { return t.waits_for_block && t.key; };
    if (std::none_of(first, end, waits)) return false;
    suspend_block(BlockState::waiting);
    if (block.state == BlockState::waiting) return false;
    for (Thread* t = first; t != end; t++)
        if (waits(*t)) set_ready(*t);    // it tests its condition again
    return true;
}

// Whoever runs next. Stays in the warp as long as it can, so warps drift apart as far as barriers allow.
Thread& next_thread() {
    Block& b = block;
    if (time_is_up()) fail("still running after the time limit of %d s of processor time", time_limit());
    while (!b.warps)
        if (!progress() && !run_other_blocks()) fail("deadlock: no thread can run and nothing is in flight");
    int warp = b.running->id / 32;
    if (!b.ready[warp]) {
        if (b.policy == Policy::random) {
            if (!b.in_flight.empty() && draw(4) == 0) complete_in_flight(draw(uint32_t(b.in_flight.size())));
            int k = int(draw(uint32_t(__builtin_popcount(b.warps))));
            uint32_t mask = b.warps;
            while (k--) mask &= mask - 1;
            warp = __builtin_ctz(mask);
        } else warp = b.policy == Policy::late ? __builtin_ctz(b.warps) : 31 - __builtin_clz(b.warps);
    }
    int lane = __builtin_ctz(b.ready[warp]);
    if (!(b.ready[warp] &= b.ready[warp] - 1)) b.warps &= ~(1u << warp);
    return b.threads[warp * 32 + lane];
}

void wait(const void* key, Site site, const char* what, int a, int b) {
    Thread& t = me();
    t.key = key, t.what = what, t.a = a, t.b = b, t.site = site;
    resume(next_thread());
}

void wait(Queue& queue, size_t newest_left, Site site, const char* what) {
    Thread& t = me();
    while (!queue.done(newest_left)) {
        t.queue = &queue;
        t.left = newest_left;
        wait(&queue, site, what, int(newest_left));
        t.queue = nullptr;
    }
    acquire(&queue);    // coarse: also of groups that are still in flight
}

void maybe_preempt() {
    if (block.policy != Policy::random || draw(4)) return;
    Thread& t = me();
    set_ready(t);
    resume(next_thread());
}

void meet(int lanes, void* args, Site site, const char* name, void (*work)(void* how, void** all),
          void* how) {
    Thread& t = me();
    Meeting& m = lanes == 32 ? block.meetings[t.id / 32] : block.groups[t.id / 128].meeting;
    if (m.arrived == 0) m.name = name, m.site = site;
    else if (strcmp(m.name, name) || m.site.line != site.line || strcmp(m.site.file, site.file))
        fail("diverged: %s at %s:%d meets %s at %s:%d", name, site.file, site.line, m.name, m.site.file,
             m.site.line);
    t.args = args;
    if (++m.arrived < lanes) {
        wait(&m, site, name);
        return;
    }
    m.arrived = 0;
    int first = t.id / lanes * lanes;
    void* all[128];
    for (int i = 0; i < lanes; i++) all[i] = block.threads[first + i].args;
    work(how, all);
    for (int i = 0; i < lanes; i++)
        if (first + i != t.id) set_ready(block.threads[first + i]);
    maybe_preempt();
}

unsigned char* at(uint32_t addr, size_t bytes, size_t align, Site site) {
    if (addr % align)
        fail("shared address %u is not aligned to %zu at %s:%d", addr, align, site.file, site.line);
    if (addr + bytes > block.shared_bytes)
        fail("shared address %u + %zu is past the end (%zu) at %s:%d", addr, bytes, block.shared_bytes,
             site.file, site.line);
    return shared + addr;
}

void barrier(int id, int count, bool blocks, Site site) {
    if (id < 0 || id > 15) fail("barrier %d at %s:%d: there are 16", id, site.file, site.line);
    Barrier& b = block.barriers[id];
    if (count <= 0 || count > block.size || (count % 32 && count != block.size))
        fail("barrier %d of %d threads at %s:%d", id, count, site.file, site.line);
    if (b.arrived && b.expected != count)
        fail("barrier %d: %d threads here, %d elsewhere (%s:%d)", id, count, b.expected, site.file,
             site.line);
    b.expected = count;
    sim::count(&Cost::barriers, 1);
    const char* order = &b.order[b.phase & 1];
    release(order);
    if (++b.arrived == count) {
        b.arrived = 0;
        b.phase++;
        wake(&b);
        if (block.policy == Policy::random) maybe_preempt();
    } else if (blocks) wait(&b, site, "barrier $a of $b", id, count);
    if (blocks) acquire(order);
}

// ---- the life of a thread

// Fibers that blocks share, in sets: a new one is 0.8 MB that ThreadSanitizer clears, and 1 MB for its stack. A fiber
// keeps its clock, so a block looks as if it came after the last one of its set, and no race between these two is
// told. why several sets: blocks that follow one another differ. why the launch counts: those that share one differ
// from launch to launch. why with their stacks: what another fiber left on a stack would look like a race.
struct Fibers {
    std::vector<Context> of_thread;
    bool taken = false;
};
#if defined(__SANITIZE_THREAD__)
static Fibers sets[8];
static size_t launches, blocks_started;

static Fibers* free_set(size_t threads) {
    const size_t n = std::clamp<size_t>(1024 / threads, 4, std::size(sets));
    const size_t first = blocks_started + blocks_started / n * launches;
    blocks_started++;
    for (size_t i = 0; i < n; i++)
        if (Fibers& set = sets[(first + i) % n]; !set.taken) return &set;
    return nullptr;
}

static Context new_fiber() {
    Context fiber;
    fiber.make(kStackBytes);
    fiber.tsan = __tsan_create_fiber(__tsan_switch_to_fiber_no_sync);
    return fiber;
}

static void give_fiber(Thread& t) {
    if (t.fiber_is_own) {
        __tsan_destroy_fiber(t.tsan);
        t.free();
    }
    Context& context = t;
    if (block.fibers) {
        std::vector<Context>& of_thread = block.fibers->of_thread;
        if (size_t(t.id) == of_thread.size()) of_thread.push_back(new_fiber());
        context = of_thread[size_t(t.id)];
    } else {
        context = new_fiber();
    }
    t.fiber_is_own = !block.fibers;
}
#endif

SIM_NEVER_RETURNS static void thread_main() {
    entered(block.launcher);
    acquire(&block.launcher);
    if (!me().ignoring) ignore_accesses();    // a fiber that has run before is still ignoring
    me().ignoring = true;
    observe_accesses();
    block.body(block.params);
    ignore_accesses();
    release(&block.body);
    Thread& t = me();
    if (!t.copies.idle()) fail("exits with cp.async in flight");
    if (!t.stores.idle())
        fail("exits with bulk stores in flight: shared memory may be gone before they read it");
    t.done = true;
    block.live--;
    if (block.live == 0) {
        if (!block.in_flight.empty()) fail("the block ends with bulk loads in flight that nobody waited for");
        for (int i = 0; i < block.size; i++) block.threads[i].additions.complete_all();
        block.state = BlockState::ended;
        if (block.fibers) block.fibers->taken = false;
        switch_context(t, block.launcher, true);
    }
    resume(next_thread(), true);
    abort();
}

void start_launch() {
#if defined(__SANITIZE_THREAD__)
    launches++, blocks_started = 0;
    for (Fibers& set : sets) {
        if (block.failed) set.of_thread.clear();    // they stand where the last launch was given up
        set.taken = false;
    }
#endif
    block.failed = false;
}

void take_fibers() {
#if defined(__SANITIZE_THREAD__)
    block.fibers = free_set(size_t(block.size));
    if (block.fibers) block.fibers->taken = true;
#endif
}

void start_thread(Thread& t) {
#if defined(__SANITIZE_THREAD__)
    give_fiber(t);
    t.ignoring = false;
#else
    if (!t.stack) t.make(kStackBytes);
#endif
    t.start(thread_main, t.id);
    t.done = false, t.queue = nullptr, t.what = "not started", t.site = {"", 0}, t.a = t.b = 0;
    t.copies.clear(), t.stores.clear(), t.additions.clear(), t.unfenced.clear();
    t.waits_for_block = false;
    set_ready(t);
}

}    // namespace sim
