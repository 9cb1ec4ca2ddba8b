// cuda*: capture of streams into graphs, and their replay.
#include "runtime.h"
#include <pthread.h>
using namespace gpu;

API cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
    LOCK;
    Stream* s = find(handle);
    if (!s || s == device().legacy) return answer(cudaErrorStreamCaptureUnsupported);
    if (s->capture) return answer(cudaErrorIllegalState);
    auto* g = new Graph;
    g->mode = mode;
    g->thread = (unsigned long)pthread_self();
    g->streams = {s};
    s->capture = g;
    s->origin = true;
    captures.push_back(g);
    return cudaSuccess;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* out) {
    LOCK;
    Stream* s = find(handle);
    if (!s || !s->capture || !s->origin) return answer(cudaErrorIllegalState);
    Graph* g = s->capture;
    for (auto* one : g->streams) one->capture = nullptr;
    s->origin = false;
    std::erase(captures, g);
    *out = g->invalid ? nullptr : reinterpret_cast<cudaGraph_t>(g);
    return answer(g->invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess);
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* out) {
    LOCK;
    Stream* s = find(handle);
    if (!s) return answer(cudaErrorInvalidResourceHandle);
    if (s == device().legacy)
        for (auto* other : device().streams)
            if (other->blocking && other->capture) return answer(cudaErrorStreamCaptureImplicit);
    *out = !s->capture           ? cudaStreamCaptureStatusNone
           : s->capture->invalid ? cudaStreamCaptureStatusInvalidated
                                 : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}
API cudaError_t cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long) {
    LOCK;
    *out = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
    return cudaSuccess;
}
API cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t handle) {
    LOCK;
    Stream* s = find(handle);
    if (!s) return answer(cudaErrorInvalidResourceHandle);
    const auto* g = reinterpret_cast<const Graph*>(exec);
    return answer(enqueue(s, [g] {
        for (const auto& work : g->work) work();
    }));
}
API cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
// why nothing: a replay that still has to run holds its graph.
API cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
