// cuda*: streams and events.
#include "runtime.h"
#include <algorithm>
#include <chrono>
using namespace gpu;

namespace {
std::vector<Event*> events;

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
cudaError_t make(cudaStream_t* out, unsigned flags, int priority) {
    LOCK;
    bound = true;
    auto* s = new Stream{current, !(flags & cudaStreamNonBlocking), flags, priority};
    device().streams.push_back(s);
    *out = reinterpret_cast<cudaStream_t>(s);
    return cudaSuccess;
}
// Whether everything up to a point is done. why one more operation: those who ask again and again see an end.
cudaError_t query(Stream* s, uint64_t number) {
    if (s->done >= number) return cudaSuccess;
    drain(s, s->done + 1);
    return s->done >= number ? answer(failed) : cudaErrorNotReady;
}
}    // namespace

namespace gpu {
Event* find(cudaEvent_t handle) {
    auto it = std::find(events.begin(), events.end(), reinterpret_cast<Event*>(handle));
    return it == events.end() ? nullptr : *it;
}
}    // namespace gpu

// ---- streams

API cudaError_t cudaStreamCreate(cudaStream_t* out) { return make(out, 0, 0); }
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) { return make(out, flags, 0); }
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int priority) {
    return make(out, flags, priority);
}
API cudaError_t cudaStreamGetFlags(cudaStream_t s, unsigned* flags) {
    LOCK;
    if (!find(s)) return answer(cudaErrorInvalidResourceHandle);
    *flags = find(s)->flags;
    return cudaSuccess;
}
API cudaError_t cudaStreamGetPriority(cudaStream_t s, int* priority) {
    LOCK;
    if (!find(s)) return answer(cudaErrorInvalidResourceHandle);
    *priority = find(s)->priority;
    return cudaSuccess;
}
API cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    LOCK;
    Stream* s = find(handle);
    if (!s || s == devices()[size_t(s->device)].legacy) return answer(cudaErrorInvalidResourceHandle);
    drain(s, s->issued);
    forget(s);
    for (auto* event : events)
        if (event->at.stream == s) event->recorded = false;
    delete s;
    return cudaSuccess;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    LOCK;
    Stream* s = find(handle);
    if (!s) return answer(cudaErrorInvalidResourceHandle);
    if (s->capture) {
        s->capture->invalid = true;
        return answer(cudaErrorStreamCaptureUnsupported);
    }
    if (s == device().legacy)    // it waits for the blocking streams, too
        if (int error = enqueue(s, {})) return answer(error);
    drain(s, s->issued);
    return answer(failed);
}
API cudaError_t cudaStreamQuery(cudaStream_t handle) {
    LOCK;
    Stream* s = find(handle);
    if (!s) return answer(cudaErrorInvalidResourceHandle);
    return query(s, s->issued);
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned) {
    LOCK;
    Stream* s = find(stream);
    Event* e = find(handle);
    if (!s || !e) return answer(cudaErrorInvalidResourceHandle);
    if (!e->recorded) return cudaSuccess;
    if (e->capture) {    // the stream joins the capture
        if (std::find(captures.begin(), captures.end(), e->capture) == captures.end())
            return answer(cudaErrorCapturedEvent);
        if (s->capture && s->capture != e->capture) return answer(cudaErrorStreamCaptureMerge);
        if (!s->capture) {
            s->capture = e->capture;
            e->capture->streams.push_back(s);
        }
        return cudaSuccess;
    }
    if (s->capture) {
        s->capture->invalid = true;
        return answer(cudaErrorStreamCaptureIsolation);
    }
    return answer(enqueue(s, {}, {e->at}));
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t f, void* data) {
    LOCK;
    Stream* s = find(handle);
    if (!s) return answer(cudaErrorInvalidResourceHandle);
    return answer(enqueue(s, [=] { f(data); }));
}

// ---- events

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned) {
    LOCK;
    bound = true;
    events.push_back(new Event);
    *out = reinterpret_cast<cudaEvent_t>(events.back());
    return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t handle) {
    LOCK;
    std::erase(events, reinterpret_cast<Event*>(handle));    // but not deleted: a queue may hold it
    return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
    LOCK;
    Stream* s = find(stream);
    Event* e = find(handle);
    if (!s || !e) return answer(cudaErrorInvalidResourceHandle);
    e->recorded = true;
    e->capture = s->capture;
    if (s->capture) return cudaSuccess;
    const int error = enqueue(s, [e] { e->seconds = now(); });
    e->at = {s, s->issued};
    return answer(error);
}
API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    LOCK;
    Event* e = find(handle);
    if (!e) return answer(cudaErrorInvalidResourceHandle);
    if (e->capture) return answer(cudaErrorCapturedEvent);
    if (e->recorded) drain(e->at.stream, e->at.number);
    return answer(failed);
}
API cudaError_t cudaEventQuery(cudaEvent_t handle) {
    LOCK;
    Event* e = find(handle);
    if (!e) return answer(cudaErrorInvalidResourceHandle);
    if (e->capture) return answer(cudaErrorCapturedEvent);
    return e->recorded ? query(e->at.stream, e->at.number) : cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
    LOCK;
    *milliseconds = float(1e3 * (find(to)->seconds - find(from)->seconds));    // of the host
    return cudaSuccess;
}
