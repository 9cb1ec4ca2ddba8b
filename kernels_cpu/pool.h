// Threads that take numbered jobs in turn: helpers of our own, which spin for 30 us after the last job, then sleep;
// or those of an OpenMP that is in the process (run_in_team). Who does a job changes no bit of its result.
//
// One call at a time has them; another one meanwhile computes alone, in its own thread. A forked child starts with
// none.
#pragma once
#include "call.h"
#include <pthread.h>
#include <sched.h>
#include <time.h>

namespace pool {

typedef void (*Job)(void* what, int64_t number);

constexpr int64_t kSpinNs = 30000;
constexpr size_t kKeptBytes = 8 << 20;    // of scratch, by each thread

struct Pool {
    pthread_mutex_t calling = PTHREAD_MUTEX_INITIALIZER;    // who has the threads
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;       // what follows
    pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
    int size = 0;            // helpers that were started
    Call* call = nullptr;    // what is being computed; null if it takes no more helpers
    Job job = nullptr;
    void* what = nullptr;
    int64_t count = 0;
    int wanted = 0;        // helpers that may still join
    unsigned epoch = 0;    // calls so far
    int inside = 0;        // helpers that have joined and not left
    int64_t next = 0;      // the first number that nobody has taken
    int rest = 0;          // calls that helpers compute, because a team was late
};
inline constinit Pool shared;

inline bool stopped(const Call& call) { return __atomic_load_n(&call.state, __ATOMIC_RELAXED) != kFine; }

inline void pause_() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}
inline int64_t now_ns() {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

inline void do_job(Call& call, Job job, void* what, int64_t number) {
    job(what, number);
    __atomic_fetch_add(&call.done, 1, __ATOMIC_RELAXED);
}

inline void take_jobs(Call& call, Job job, void* what, int64_t count) {
    DefaultFloats floats;
    while (!stopped(call)) {
        int64_t number = __atomic_fetch_add(&shared.next, 1, __ATOMIC_RELAXED);
        if (number >= count) return;
        do_job(call, job, what, number);
    }
}

inline void* serve(void*) {
    unsigned seen = 0;
    for (;;) {
        int64_t until = now_ns() + kSpinNs;
        while (__atomic_load_n(&shared.epoch, __ATOMIC_RELAXED) == seen && now_ns() < until)
            for (int i = 0; i < 16; ++i) pause_();
        pthread_mutex_lock(&shared.lock);
        while (shared.epoch == seen) pthread_cond_wait(&shared.wake, &shared.lock);
        seen = shared.epoch;
        Call* call = shared.wanted > 0 ? shared.call : nullptr;
        Job job = shared.job;
        void* what = shared.what;
        int64_t count = shared.count;
        if (call) --shared.wanted, __atomic_fetch_add(&shared.inside, 1, __ATOMIC_RELAXED);
        pthread_mutex_unlock(&shared.lock);
        if (!call) continue;
        take_jobs(*call, job, what, count);
        // sync: what the jobs wrote is seen by the caller, who waits for inside == 0; after this nothing of the
        // call is touched.
        __atomic_fetch_sub(&shared.inside, 1, __ATOMIC_RELEASE);
    }
    return nullptr;
}

// why: a lock may be held, in the parent, by a thread that the child does not have.
inline void forget() { shared = Pool(); }
inline void register_forget() { pthread_atfork(nullptr, nullptr, forget); }

inline void run_alone(Call& call, Job job, void* what, int64_t count) {
    DefaultFloats floats;
    for (int64_t i = 0; i < count && !stopped(call); ++i) do_job(call, job, what, i);
}

inline void run_with_helpers(Call& call, Job job, void* what, int64_t count, int64_t threads) {
    for (; shared.size < threads - 1; ++shared.size) {
        pthread_t thread;
        if (pthread_create(&thread, nullptr, serve, nullptr)) break;    // fewer will do
        pthread_detach(thread);
    }
    pthread_mutex_lock(&shared.lock);
    shared.call = &call, shared.job = job, shared.what = what, shared.count = count;
    shared.wanted = int(threads - 1);
    __atomic_store_n(&shared.epoch, shared.epoch + 1, __ATOMIC_RELAXED);
    pthread_cond_broadcast(&shared.wake);
    pthread_mutex_unlock(&shared.lock);
    take_jobs(call, job, what, count);
    // sync: a helper that has not joined by now finds nobody who wants it.
    pthread_mutex_lock(&shared.lock);
    shared.call = nullptr;
    pthread_mutex_unlock(&shared.lock);
    for (int spins = 0; __atomic_load_n(&shared.inside, __ATOMIC_ACQUIRE); ++spins)
        if (spins < 2000) pause_();
        else sched_yield();    // its core may be taken by another process
}

// ---- the team of an OpenMP

typedef void (*Parallel)(void (*)(void*), void*, unsigned threads, unsigned flags);

constexpr int64_t kLateNs = 200000;
constexpr int kRest = 32;    // calls

struct Team {
    Call& call;
    Job job;
    void* what;
    int64_t count;
    pthread_t caller;
    int threads, came;    // threads requested; threads that have begun
    bool late;            // whether a thread had not begun when the caller found no more jobs
    int64_t ended;        // when the caller found none
};

inline void serve_team(void* of) {
    Team& t = *static_cast<Team*>(of);
    __atomic_fetch_add(&t.came, 1, __ATOMIC_RELAXED);
    take_jobs(t.call, t.job, t.what, t.count);
    if (!pthread_equal(pthread_self(), t.caller)) return;
    t.late = __atomic_load_n(&t.came, __ATOMIC_RELAXED) < t.threads;
    if (t.late) t.ended = now_ns();
}

// why: after a loop of its own an OpenMP's threads spin for milliseconds, on the cores that helpers would need.
// They wait for each other at the end, so one that has lost its core to another program delays the call; helpers,
// for whom nobody waits before they have joined, then compute the next calls.
inline void run_in_team(Call& call, Job job, void* what, int64_t count) {
    Team team{call, job, what, count, pthread_self(), call.threads, 0, false, 0};
    reinterpret_cast<Parallel>(call.parallel)(serve_team, &team, unsigned(call.threads), 0);
    if (team.late && now_ns() - team.ended > kLateNs) shared.rest = kRest;
}

// Every number below count once, in order, by whoever is free, unless the call is stopped.
inline void run(Call& call, Job job, void* what, int64_t count) {
    if (!call.jobs) __atomic_store_n(&call.jobs, count, __ATOMIC_RELAXED);
    int64_t threads = call.threads < count ? call.threads : count;
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, register_forget);
    if (threads <= 1 || pthread_mutex_trylock(&shared.calling)) return run_alone(call, job, what, count);
    __atomic_store_n(&shared.next, 0, __ATOMIC_RELAXED);
    if (call.parallel && !shared.rest) run_in_team(call, job, what, count);
    else {
        if (shared.rest) --shared.rest;
        run_with_helpers(call, job, what, count, threads);
    }
    pthread_mutex_unlock(&shared.calling);
}

// ---- scratch

struct Kept {
    char* data;
    size_t bytes;
};
inline constinit thread_local Kept kept = {nullptr, 0};
inline pthread_key_t at_exit;    // frees it when its thread ends
inline void make_key() { pthread_key_create(&at_exit, free_aligned); }

inline void keep(char* data, size_t bytes) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_key);
    free_aligned(kept.data);
    kept = {data, bytes};
    pthread_setspecific(at_exit, data);
}

// A job's memory, cut into arrays. Small ones are kept by the thread, large ones given back with the job.
class Scratch {
  public:
    // lay_out(*this) takes the arrays: once to add up their sizes, once to place them.
    template <class LayOut>
    Scratch(Call& call, LayOut lay_out) {
        lay_out(*this);
        size_t bytes = used_;
        if (bytes <= kept.bytes) base_ = kept.data;
        else base_ = static_cast<char*>(allocate_aligned(4096, bytes));
        if (base_ && base_ != kept.data) {
            if (bytes > kKeptBytes) own_ = base_;
            else keep(base_, bytes);
        }
        if (!base_) {
            __atomic_store_n(&call.state, kNoMemory, __ATOMIC_RELAXED);
            return;
        }
        used_ = 0;
        lay_out(*this);
    }
    ~Scratch() { free_aligned(own_); }
    Scratch(const Scratch&) = delete;

    template <class T>
    void allocate(T*& array, int64_t count) {
        array = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
        used_ += (size_t(count) * sizeof(T) + 63) / 64 * 64;
    }
    explicit operator bool() const { return base_; }

  private:
    char *base_ = nullptr, *own_ = nullptr;
    size_t used_ = 0;
};

}    // namespace pool
