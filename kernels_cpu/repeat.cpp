// A call of torch or NumPy that repeats an earlier one, over any number of keys: compared with it, given memory and
// computed, without Python's bytecode.
//
// why: after a linear layer the caches hold its weights, and to fetch what Python executes for a call of 64 queries takes
// longer than to compute it.
#include "repeat.h"

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
    if (of_a.object != of_b.object) return false;
    if (of_a.object != python.tuple) return python.compare(a, b, kEqual) == 1;
    intptr_t length = python.length(a);
    bool same = length == python.length(b);
    for (intptr_t i = 0; same && i < length; ++i) same = are_same(python.item(a, i), python.item(b, i));
    return same;
}

// Views a tensor, and tells whether it has memory at an aligned address.
bool has_memory(const Repeat& repeat, Object* tensor, Object* elements_before, View& view) {
    if (repeat.view_of(tensor, &view)) return false;
    view.data += view.offset;
    if (uintptr_t(view.data) % kAlignment) return false;
    if (elements_before == python.none) return true;
    // why: in a storage that was resized to 0, a tensor that is not its first has an address above 0.
    const Owned before(python.call_with(elements_before, tensor, nullptr));
    return before.object && uintptr_t(view.data) != uintptr_t(python.integer(before.object)) * view.bits / 8;
}

bool has_shape(const View& view, const int64_t* shape, int32_t rank) {
    if (view.axes != rank || !view.strides) return false;
    for (int32_t i = 0; i < rank; ++i)
        if (shape[i] >= 0 && view.shape[i] != shape[i]) return false;
    return true;
}

// Describes a tensor with any strides; axes that it lacks, or that have one element, are broadcast.
void describe(const View& view, const int32_t* axes, Tensor& tensor) {
    const auto stride = [&view](int32_t axis) {
        return axis < 0 || view.shape[axis] == 1 ? 0 : view.strides[axis];
    };
    tensor.data = view.data;
    tensor.batch = stride(axes[0]), tensor.head = stride(axes[1]);
    tensor.row = stride(axes[2]), tensor.column = stride(axes[3]);
}

// The params for these tensors; false if another call is needed.
bool describe(const Repeat& repeat, Object* const* tensors, Object* elements_before, Call& call) {
    View q, k, v;
    View* const views[] = {&q, &k, &v};
    for (int i = 0; i < 3; ++i) {
        if (!has_memory(repeat, tensors[i], elements_before, *views[i])) return false;
        if (!has_shape(*views[i], repeat.shapes[i], repeat.rank)) return false;
    }
    for (int32_t i = 0; i < repeat.rank; ++i)
        if (q.strides[i] != repeat.strides[i]) return false;
    const int32_t along_keys = repeat.axes[2];
    int64_t keys = k.shape[along_keys];
    if (v.shape[along_keys] != keys || keys < repeat.least_keys || keys > repeat.most_keys) return false;
    call.q.data = q.data;
    describe(k, repeat.axes, call.k), describe(v, repeat.axes, call.v);
    call.offset += repeat.offset_per_key * (keys - call.seqlen_k);
    call.seqlen_k = keys;
    if (repeat.added) {
        const int32_t last = repeat.added_rank - 1, axes[] = {last - 3, last - 2, last - 1, last};
        View view;
        if (!has_memory(repeat, tensors[repeat.added], elements_before, view)) return false;
        if (!has_shape(view, repeat.added_shape, repeat.added_rank)) return false;
        if (repeat.added_shape[last] < 0 && view.shape[last] != keys) return false;
        describe(view, axes, *reinterpret_cast<Tensor*>(reinterpret_cast<char*>(&call) + repeat.added_place));
    }
    if (keys <= repeat.most_keys_alone) call.threads = 1, call.parallel = nullptr;
    return true;
}

// The result; null if this call is another one, or if anything fails, with or without an error.
Object* repeated(Object* self, Object* const* given, intptr_t count) {
    const auto part = [self](intptr_t at) { return python.item(self, at); };
    Object *type = part(1), *dtype = part(2), *options = part(3), *are_alike = part(4), *conditions = part(5),
           *allocate = part(6), *layout = part(7), *elements_before = part(8), *dtype_of_added = part(9);
    const Repeat& repeat = *reinterpret_cast<const Repeat*>(python.bytes(part(0)));
    Call call = repeat.call;

    if (count != 3 + python.length(options)) return nullptr;
    for (intptr_t i = 3; i < count; ++i)
        if (i != repeat.added && !are_same(given[i], python.item(options, i - 3))) return nullptr;
    // why first: what else is handed over may fail to have memory, or have a lazy one.
    const auto is_array = [&](intptr_t i, Object* of) {
        return Owned(python.type_of(given[i])).object == type &&
               Owned(python.attribute(given[i], "dtype")).object == of;
    };
    for (int i = 0; i < 3; ++i)
        if (!is_array(i, dtype)) return nullptr;
    if (repeat.added && !is_array(repeat.added, dtype_of_added)) return nullptr;
    if (!describe(repeat, given, elements_before, call)) return nullptr;
    if (are_alike != python.none) {
        Object* added = repeat.added ? given[repeat.added] : nullptr;
        const Owned alike(python.call_with(are_alike, given[0], given[1], given[2], added, nullptr));
        if (alike.object != python.yes) return nullptr;
    }
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

int32_t cupy_flash_view_of_array(Object* array, View* view) {
    const Owned capsule(python.attribute(array, "__array_struct__"));
    if (!capsule.object) return -1;
    const auto* seen = static_cast<const ArrayInterface*>(python.pointer(capsule.object, nullptr));
    if (!seen || seen->axes > kViewAxes) return -1;
    int64_t *shape = view->own, *strides = view->own + kViewAxes;
    for (int i = 0; i < seen->axes; ++i) {
        shape[i] = seen->shape[i], strides[i] = seen->byte_strides[i] / seen->item_bytes;
        if (seen->byte_strides[i] % seen->item_bytes) return -1;
    }
    view->data = seen->data, view->offset = 0;
    view->axes = seen->axes, view->shape = shape, view->strides = strides;
    return 0;
}

Method* cupy_flash_repeat(const Python* given) {
    python = *given;
    return &method;
}
