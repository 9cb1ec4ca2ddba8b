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
    Object* (*attribute)(Object*, const char* name);
    void* (*pointer)(Object* capsule, const char* name);
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

constexpr int kViewAxes = 4;

// A tensor in memory, as DLPack describes one.
struct View {
    char* data;
    int32_t device, device_number;
    int32_t axes;
    uint8_t kind, bits;
    uint16_t lanes;
    const int64_t *shape, *strides;
    uint64_t offset;               // in bytes
    int64_t own[2 * kViewAxes];    // not of DLPack: shape and strides where a library lends none
};

// NumPy's description of an array, in its attribute __array_struct__.
struct ArrayInterface {
    int two, axes;
    char kind;
    int item_bytes, flags;
    const intptr_t *shape, *byte_strides;
    char* data;
};

struct Repeat {
    int32_t (*view_of)(Object* tensor, View*);    // of the tensors' library; 0 if it succeeds
    int32_t (*entry)(Call*);
    int64_t shapes[3][kViewAxes];                      // of q, k and v; -1 for any number of keys
    int64_t strides[kViewAxes];                        // of q
    int64_t least_keys, most_keys, most_keys_alone;    // that may be repeated; that one thread computes
    int64_t added_shape[kViewAxes];                    // of a mask or bias; -1 for the number of keys
    int32_t axes[4];    // batch, head, row, column of k and v; below 0 for none
    int32_t offset_per_key;
    int32_t rank;                 // of q, k and v
    int32_t added, added_rank;    // which argument is the mask or bias, 0 if none is; its rank
    int64_t added_place;          // in the params
    Call call;                    // without addresses
};

extern "C" {
// The function that repeats a call, for PyCFunction_NewEx.
EXPORTED Method* cupy_flash_repeat(const Python*);
// Views a NumPy array of any dtype; 0 if it succeeds.
EXPORTED int32_t cupy_flash_view_of_array(Object*, View*);
}
