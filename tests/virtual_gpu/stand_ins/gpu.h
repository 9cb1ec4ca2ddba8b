// A GPU that is not there: its devices, their memory and their streams. Driver and runtime stand on these.
#pragma once
#include <cuda.h>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace gpu {

// ---- devices

// What a launch depends on.
struct Model {
    int capability, multiprocessors, shared_optin, shared_per_multiprocessor, threads_per_multiprocessor;
    const char* name;
};
struct Stream;
struct Device {
    int ordinal;
    const Model* model;
    char* base = nullptr;
    size_t bytes = 0, used = 0, pool_threshold = 0;
    std::map<char*, size_t> taken, free;
    Stream* legacy = nullptr;
    std::vector<Stream*> streams;    // all but the legacy one
    int open = 0;                    // how many `Opened` live
    std::vector<bool> peers;         // devices whose memory kernels here may touch
};

// One lock for everything: what the driver promises to several threads is that calls do not mix.
extern std::recursive_mutex lock;
using Guard = std::lock_guard<std::recursive_mutex>;
extern thread_local int current;    // device of this thread
extern thread_local bool bound;     // whether this thread has a context
// The error of a kernel that failed. As on a GPU nothing works any more after it.
extern int failed;

std::vector<Device>& devices();
// Whether this process was forked from the one that made the devices: the driver does nothing in it.
bool forked();
inline Device& device() { return devices()[size_t(current)]; }
const char* error_name(int code);
const char* error_text(int code);
// Print to stderr what was refused and why; returns the code.
__attribute__((format(printf, 2, 3))) int refuse(int code, const char* format, ...);

// ---- memory

// Memory of a device, full of NaN; nullptr if there is none left. The host cannot touch it.
char* allocate(Device& d, size_t bytes);
bool release(void* p);
// Whose memory an address is in; nullptr if it is the host's.
Device* owner(const void* p);
// Size and start of the allocation that an address is in; 0 if it is in none.
size_t extent(const void* p, char** base);
// Whether a range lies in what was allocated, if it is device memory at all.
bool whole(const void* p, size_t bytes);
// Host memory that copies need not stage.
void pin(void* p, size_t bytes);
void unpin(void* p);
bool is_pinned(const void* p);
// Memory that both sides may touch, and whose device it is.
char* allocate_managed(size_t bytes, int device);
bool release_managed(void* p);
int managed_by(const void* p);    // -1 if it is not managed

// While one of these lives the memory of a device and of its peers may be touched.
class Opened {
  public:
    explicit Opened(Device& d);
    ~Opened();
    Opened(const Opened&) = delete;

  private:
    std::vector<Device*> held;
};

// ---- streams

using Work = std::function<void()>;

// Somewhere in a stream: everything up to the operation of this number.
struct Point {
    Stream* stream;
    uint64_t number;
};
struct Operation {
    uint64_t number;
    std::vector<Point> after;    // of other streams, that have to be done before
    Work work;
};
// Work in an order that holds; launched as one operation.
struct Graph {
    std::vector<Work> work;
    std::vector<Stream*> streams;    // that take part in the capture
    int mode = 0;
    unsigned long thread = 0;
    bool invalid = false;
};
// A queue of work that runs as late as it may: when something waits for it.
struct Stream {
    int device;
    bool blocking;    // of those that the legacy stream waits for, and the other way round
    unsigned flags = 0;
    int priority = 0;
    std::deque<Operation> queue;
    uint64_t issued = 0, done = 0;
    Graph* capture = nullptr;
    bool origin = false;    // of its capture
};
struct Event {
    Point at{};
    bool recorded = false;
    Graph* capture = nullptr;    // in which it was recorded
    double seconds = 0;
};
extern std::vector<Graph*> captures;    // under way

// The stream of a handle, the legacy and the thread's own one included; nullptr if it is none.
Stream* stream_of(void* handle);
// Enqueue work that waits for points of other streams, too; or record it into the graph that the stream is
// capturing. CUresult.
int enqueue(Stream* s, Work work, std::vector<Point> after = {});
void drain(Stream* s, uint64_t number);
void drain_device(Device& d);
// Make everything that waits for a stream wait for nothing: it is going to be deleted.
void forget(Stream* s);
// What a thread lets captures forbid it: 0 is all, 2 nothing.
extern thread_local int capture_mode;
// What calls that synchronize answer while a capture forbids them: 0, or the error.
int forbidden_by_capture();

}    // namespace gpu
