// The params of a repeated call; cupy_flash/cpu/core/repeat.py writes them, and a test compares.
#pragma once
#include "call.h"

struct Object;    // of Python

// Functions of Python that its stable ABI has.
// why addresses: a library that is linked to one Python would serve no other.
struct Python {
    Object *none, *yes, *tuple;    // None, True and the type of tuples
    void (*retain)(Object*);
    void (*release)(Object*);
    Object* (*type_of)(Object*);
    int (*compare)(Object*, Object*, int how);
    Object* (*item)(Object* tuple, intptr_t at);    // borrowed, as an item of a tuple always is
    intptr_t (*length)(Object* tuple);
    const char* (*bytes)(Object*);
    long long (*integer)(Object*);
    Object* (*call)(Object* function, Object* arguments);
    Object* (*call_with)(Object* function, ...);    // up to a null
    void (*forget_error)();
    void* (*release_lock)();
    void (*take_lock)(void*);
};

// A builtin function, as Python describes one.
struct Method {
    const char* name;
    Object* (*run)(Object* self, Object* const* given, intptr_t count);
    int32_t flags;
    const char* text;
};

// A tensor in memory, as DLPack describes one.
struct View {
    char* data;
    int32_t device, device_number;
    int32_t axes;
    uint8_t kind, bits;
    uint16_t lanes;
    const int64_t *shape, *strides;
    uint64_t offset;    // in bytes
};

struct Repeat {
    int32_t (*view_of)(Object* tensor, View*);    // of the tensors' library; 0 if it succeeds
    int32_t (*entry)(Call*);
    int64_t elements;                                  // of q
    int64_t least_keys, most_keys, most_keys_alone;    // that may be repeated; that one thread computes
    int32_t batch, head, row, column;                  // axes of k and v; below 0 for none
    int32_t offset_per_key;
    int32_t rank;    // of k and v
    Call call;       // without addresses
};

extern "C" {
// The function that repeats a call, for PyCFunction_NewEx.
EXPORTED Method* cupy_flash_repeat(const Python*);
}
