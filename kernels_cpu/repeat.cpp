// A call of torch that repeats an earlier one: compared with it, given memory and computed, without Python's bytecode.
//
// why: after a linear layer the caches hold its weights, and to fetch what Python executes for a call of 64 queries takes
// longer than to compute it.
#include "repeat.h"
#include <string.h>

namespace {

constexpr int kEqual = 2;                // Py_EQ
constexpr int32_t kPositional = 0x80;    // METH_FASTCALL
constexpr uintptr_t kAlignment = 16;

Python python;

// An object that is released when its scope ends; null after an error.
struct Owned {
    Object* object;
    explicit Owned(Object* x) : object(x) {}
    ~Owned() {
        if (object) python.release(object);
    }
    Owned(const Owned&) = delete;
};

// why types: 1 == True, but they are different options.
bool are_same(Object* a, Object* b) {
    if (a == b) return true;
    const Owned of_a(python.type_of(a)), of_b(python.type_of(b));
    return of_a.object == of_b.object && python.compare(a, b, kEqual) == 1;
}

// The address of a tensor's memory; null if it has none, or another alignment or number of elements than the earlier one.
char* address_of(const Repeat& repeat, int at, Object* tensor, Object* elements_before) {
    View view;
    if (repeat.view_of(tensor, &view)) return nullptr;
    int64_t elements = 1;
    for (int32_t i = 0; i < view.axes; ++i) elements *= view.shape[i];
    char* data = view.data + view.offset;
    if (elements != repeat.elements[at] || uintptr_t(data) % kAlignment) return nullptr;
    // why: in a storage that was resized to 0, a tensor that is not its first has an address above 0.
    const Owned before(python.call_with(elements_before, tensor, nullptr));
    return before.object && uintptr_t(data) != uintptr_t(python.integer(before.object)) * view.bits / 8
               ? data
               : nullptr;
}

// The result; null if this call is another one, or if anything fails, with or without an error.
Object* repeated(Object* self, Object* const* given, intptr_t count) {
    const auto part = [self](intptr_t at) { return python.item(self, at); };
    Object *type = part(1), *options = part(2), *are_alike = part(3), *conditions = part(4),
           *allocate = part(5), *layout = part(6), *elements_before = part(7);
    const Repeat& repeat = *reinterpret_cast<const Repeat*>(python.bytes(part(0)));
    Call call = repeat.call;
    Tensor* const tensors[] = {&call.q, &call.k, &call.v};

    if (count != 3 + python.length(options)) return nullptr;
    for (intptr_t i = 3; i < count; ++i)
        if (!are_same(given[i], python.item(options, i - 3))) return nullptr;
    for (int i = 0; i < 3; ++i) {
        // why first: what else is handed over may fail to have memory, or have a lazy one.
        if (Owned(python.type_of(given[i])).object != type) return nullptr;
        if (!(tensors[i]->data = address_of(repeat, i, given[i], elements_before))) return nullptr;
    }
    const Owned alike(python.call_with(are_alike, given[0], given[1], given[2], nullptr));
    if (alike.object != python.yes) return nullptr;
    for (intptr_t i = 0; i < python.length(conditions); ++i) {
        Object* condition = python.item(conditions, i);
        const Owned found(python.call(python.item(condition, 0), python.item(condition, 1)));
        if (!found.object || !are_same(found.object, python.item(condition, 2))) return nullptr;
    }

    Object* o = python.call(allocate, layout);
    View view;
    if (o && !repeat.view_of(o, &view)) {
        call.o.data = view.data + view.offset;
        void* lock = python.release_lock();
        State state = State(repeat.entry(&call));
        python.take_lock(lock);
        if (state == kFine) return o;
    }
    if (o) python.release(o);
    return nullptr;
}

// None where the caller has to go the long way.
Object* run(Object* self, Object* const* given, intptr_t count) {
    if (Object* o = repeated(self, given, count)) return o;
    python.forget_error();
    python.retain(python.none);
    return python.none;
}

Method method = {"repeat", run, kPositional, nullptr};

}    // namespace

Method* cupy_flash_repeat(const Python* given) {
    python = *given;
    return &method;
}
