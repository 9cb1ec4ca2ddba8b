"""Calls that the core repeats by itself: any other call, and any failure, is left to Python."""

import ctypes
import shutil
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

import cupy_flash
from cupy_flash.api import adopted
from cupy_flash.call.given import Options
from cupy_flash.cpu.core import family, params, repeat
from cupy_flash.cpu.core.repeat import Condition, Way
from cupy_flash.dispatch.memo import prepared

pytestmark = pytest.mark.usefixtures("core")

SHAPE = (2, 4, 9, 8)
OPTIONS = (None, 0.5, True, "bhsd", 300, (5, None, 700))


class View(ctypes.Structure):
    """The start of DLPack's description of a tensor."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("device", ctypes.c_int32), ("device_number", ctypes.c_int32),
        ("axes", ctypes.c_int32), ("type", ctypes.c_int32), ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p), ("offset", ctypes.c_uint64),
    )  # fmt: skip


def describe(array, to):
    """An array as one that begins 16 bytes behind its memory; without elements it has none."""
    if not isinstance(array, np.ndarray):
        return -1
    shape = array.ctypes.shape_as(ctypes.c_int64)
    strides = (ctypes.c_int64 * array.ndim)(*[x // array.itemsize for x in array.strides])
    describe.kept.append((shape, strides))
    at = ctypes.addressof(shape), ctypes.addressof(strides) if describe.gives_strides else None
    to[0] = View(ADDRESS(array) - 16, 1, 0, array.ndim, 32 << 8, *at, 16)
    return 0


describe.kept, describe.gives_strides = [], True


def address(array):
    return array.ctypes.data


ADDRESS = address
VIEW_OF = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(View))(describe)


def empty(*layout):
    """An array that begins at a multiple of 64 bytes."""
    room = np.full(int(np.prod(layout)) + 16, np.nan, np.float32)
    start = -room.ctypes.data % 64 // 4
    return room[start : start + int(np.prod(layout))].reshape(layout)


def arrays(seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(3):
        x = empty(*SHAPE)
        x[:] = rng.standard_normal(SHAPE)
        made.append(x)
    return made


def repeating(*, core=None, **changes):
    """The builtin function of a call, some of its way changed."""
    qkv = arrays()
    strides = tuple(x // 4 for x in qkv[0].strides)
    way = Way(
        ctypes.cast(VIEW_OF, ctypes.c_void_p).value, "bhsd", (SHAPE,) * 3, strides, False, False, None,
        np.ndarray, qkv[0].dtype, OPTIONS, lambda *_: True, (), empty, SHAPE, lambda _: 0,
    )  # fmt: skip
    call = prepared("forward", adopted(**dict(zip("qkv", qkv, strict=True))), Options(), False)
    if core is not None:
        return repeat.repeating(core(call._backend.core), "numpy", way._replace(**changes))
    return call.repeating("numpy", way._replace(**changes))


@pytest.mark.parametrize("seed", range(3))
def test_it_has_the_bits_of_the_whole_way(seed):
    qkv = arrays(seed)
    np.testing.assert_array_equal(repeating()(*qkv, *OPTIONS), cupy_flash.attention(*qkv))


def test_equal_options_of_the_same_type_are_the_same():
    again = repeating()
    options = (None, float("0.5"), True, "".join(["bh", "sd"]), int("300"), (5, None, int("700")))
    assert all(x is not y for x, y in zip(options[1::2], OPTIONS[1::2], strict=True))
    assert again(*arrays(), *options) is not None


class Other(np.ndarray):
    pass


class Raising:
    def __eq__(self, other):
        raise RuntimeError("compared")

    __hash__ = None


def moved(x, by):
    room = np.zeros(x.size + 16, x.dtype)
    start = -room.ctypes.data % 64 // 4 + by // 4
    return room[start : start + x.size].reshape(x.shape)


def aligned_like(x):
    made = empty(*x.shape)
    made[...] = x
    return made


def one(at, change):
    """The arrays and options with one of them changed."""

    def given():
        every = [*arrays(), *OPTIONS]
        every[at] = change(every[at]) if callable(change) else change
        return every

    return given


CALLS = {
    "one option less": lambda: [*arrays(), *OPTIONS[:-1]],
    "one option more": lambda: [*arrays(), *OPTIONS, None],
    "no option": arrays,
    "nothing": list,
    "an option that was None": one(3, 0.0),
    "another value": one(4, 0.25),
    "not a number": one(4, float("nan")),
    "another type that is equal": one(5, 1),
    "another word": one(6, "bshd"),
    "another large number": one(7, 301),
    "another pair": one(8, (5, 5, 700)),
    "a shorter pair": one(8, (5, None)),
    "a longer pair": one(8, (5, None, 700, None)),
    "a pair of another type": one(8, (5.0, None, 700)),
    "a list": one(8, [5, None, 700]),
    "an option that cannot be compared": one(5, Raising()),
    **{f"a subclass as {name}": one(at, lambda x: x.view(Other)) for at, name in enumerate("qkv")},
    **{f"no array as {name}": one(at, None) for at, name in enumerate("qkv")},
    **{f"one row less of {name}": one(at, lambda x: x[:, :, 1:]) for at, name in enumerate("qkv")},
    **{f"twice the rows of {name}": one(at, lambda x: np.repeat(x, 2, 2)) for at, name in enumerate("qkv")},
    **{f"{name} between boundaries": one(at, lambda x: moved(x, 8)) for at, name in enumerate("qkv")},
    **{f"another dtype of {name}": one(at, lambda x: x.view(np.int32)) for at, name in enumerate("qkv")},
    **{f"other axes of {name}": one(at, lambda x: x.reshape(4, 2, 9, 8)) for at, name in enumerate("qkv")},
    "other strides of q": one(0, lambda x: aligned_like(x.transpose(0, 1, 3, 2)).transpose(0, 1, 3, 2)),
    "no queries": one(0, lambda x: x[:, :, :0]),
    "no keys": lambda: [x[:, :, :0] if at in (1, 2) else x for at, x in enumerate([*arrays(), *OPTIONS])],
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_any_other_call_is_left_to_python(name):
    again = repeating()
    assert again(*CALLS[name]()) is None
    assert again(*arrays(), *OPTIONS) is not None


def raising(*_):
    raise RuntimeError("asked")


ELSE = {
    "other kinds": {"are_alike": lambda *_: False},
    "kinds that are not compared": {"are_alike": lambda *_: 1},
    "an error of the comparison": {"are_alike": raising},
    "a condition": {"conditions": (Condition(int, (), 0), Condition(int, ("1",), 2))},
    "a condition's type": {"conditions": (Condition(int, (), False),)},
    "an error of a condition": {"conditions": (Condition(raising, (), None),)},
    "an error about memory": {"elements_before": raising},
    "no memory": {"allocate": raising},
    "a result that is no array": {"allocate": lambda *_: ()},
    "no memory for tiles": {"core": lambda core: core._replace(entries=(NO_MEMORY,))},
}
NO_MEMORY = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(lambda _: 2)


def described(core=lambda core: core, **changes):
    """The builtin function of a call that computes nothing, and the params of its calls."""
    calls = []

    @ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)
    def entry(call):
        memory = (ctypes.c_char * params.CALL.itemsize).from_address(call)
        calls.append(np.frombuffer(bytes(memory), params.CALL)[0])
        return 0

    calls.append(entry)  # it has to live as long
    again = repeating(core=lambda one: core(one)._replace(entries=(entry,)), **changes)
    return again, calls


def strides_of(x):
    return tuple(n // x.itemsize for n in x.strides)


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "hsd", "shd", "sd"])
@pytest.mark.parametrize("keys", [1, 8, 9, 10, 300])
@pytest.mark.parametrize("view_of", [VIEW_OF, None])
def test_any_number_of_keys_and_any_strides(layout, keys, view_of):
    sizes = {"b": 2, "h": 4, "s": 9, "d": 8}
    q, sizes["s"] = empty(*[sizes[axis] for axis in layout]), keys
    shape = [sizes[axis] for axis in layout]
    v = empty(*shape)
    again, calls = described(
        layout="bshd" if "sh" in layout else "bhsd", any_keys=True, shapes=(q.shape,) * 3,
        strides=strides_of(q), view_of=view_of and ctypes.cast(view_of, ctypes.c_void_p).value,
        elements_before=None, result=q.shape,
    )  # fmt: skip
    k = empty(*[2 * n for n in shape])[tuple(map(slice, shape))]
    assert again(q, k, v, *OPTIONS) is not None
    call = calls[-1]
    assert call["seqlen_k"] == keys
    for name, x in (("k", k), ("v", v)):
        assert call[name]["data"] == x.ctypes.data
        for axis, field in zip("bhsd", ("batch", "head", "row", "column"), strict=True):
            at = layout.find(axis)
            expected = x.strides[at] // 4 if at >= 0 and x.shape[at] > 1 else 0
            assert call[name][field] == expected, (name, field)
    assert call["q"]["data"] == q.ctypes.data


def of_keys(keys, keys_of_v=None):
    made = [empty(2, 4, 9, 8), empty(2, 4, keys, 8), empty(2, 4, keys if keys_of_v is None else keys_of_v, 8)]
    return *made, *OPTIONS


def test_the_last_query_stays_at_the_last_key():
    for from_end in (False, True):
        again, calls = described(any_keys=True, from_end=from_end)
        for keys in (1, 9, 20):
            assert again(*of_keys(keys)) is not None
            assert calls[-1]["offset"] == (keys - 9) * from_end


def test_lengths_that_have_to_be_equal_stay_so():
    again, _ = described(any_keys=False)
    assert [again(*of_keys(keys)) is not None for keys in (8, 9, 10)] == [False, True, False]


def test_keys_and_values_are_as_many():
    again, _ = described(any_keys=True)
    assert again(*of_keys(10, 11)) is None
    assert again(*of_keys(10, 10)) is not None
    assert again(*of_keys(0)) is None


def test_another_rank_is_left_to_python():
    again, _ = described(any_keys=True)
    q, k, v, *_ = of_keys(9)
    assert again(q, k[0], v, *OPTIONS) is None
    assert again(q, k, v[None], *OPTIONS) is None
    assert again(q, empty(2, 4, 9), empty(2, 4, 9), *OPTIONS) is None


ODD = {
    "half a stride": lambda x: np.lib.stride_tricks.as_strided(x, strides=(1152, 288, 32, 2)),
    "five axes": lambda x: x[None],
    "an array that says nothing": lambda _: None,
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("at", range(3))
def test_numpy_arrays_that_cannot_be_described_are_left_to_python(name, at):
    again, _ = described(view_of=None, elements_before=None)
    given = arrays()
    assert again(*given, *OPTIONS) is not None
    given[at] = ODD[name](given[at])
    assert again(*given, *OPTIONS) is None


def test_arrays_without_strides_are_left_to_python(monkeypatch):
    again, _ = described(any_keys=True)
    given = of_keys(9)
    monkeypatch.setattr(describe, "gives_strides", False)
    assert again(*given) is None


def test_short_calls_have_one_thread_and_long_ones_are_left_to_python(monkeypatch):
    monkeypatch.setattr(repeat, "allowed", lambda _: 3)
    monkeypatch.setattr(repeat, "team", lambda _, count: 1000 + count)
    per_key = family.SMALL_FLOPS / 20  # 20 keys are the first that several threads compute
    again, calls = described(lambda core: core._replace(work=9 * per_key), any_keys=True)
    for keys, threads in ((1, 1), (19, 1), (20, 3), (21, 3)):
        assert again(*of_keys(keys)) is not None
        assert (calls[-1]["threads"], calls[-1]["parallel"]) == (threads, 1003 if threads > 1 else 0)
    per_key = family.LONG_FLOPS / 20
    again, _ = described(lambda core: core._replace(work=9 * per_key), any_keys=True)
    assert [again(*of_keys(keys)) is not None for keys in (19, 20, 21)] == [True, True, False]


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("before", [0, 48])
def test_memory_that_was_freed_is_left_to_python(at, before, monkeypatch):
    """The address of an array behind others is then their size."""
    given = arrays()
    again = repeating(elements_before=lambda x: before if x is given[at] else 0)
    assert again(*given, *OPTIONS) is not None
    monkeypatch.setitem(globals(), "ADDRESS", lambda x: before * 4 if x is given[at] else address(x))
    assert again(*given, *OPTIONS) is None


def test_an_option_that_fails_to_compare_is_another_one():
    again = repeating(options=(Raising(),))
    assert again(*arrays(), Raising()) is None


@pytest.mark.parametrize("name", ELSE)
def test_whatever_has_changed_or_fails_is_left_to_python(name):
    assert repeating(**ELSE[name])(*arrays(), *OPTIONS) is None


def test_conditions_that_hold_are_no_obstacle():
    held = Condition.now(int, "700"), Condition.now(len, (1, 2)), Condition.now({}.get, "missing")
    assert held[0] == (int, ("700",), 700)
    assert repeating(conditions=held)(*arrays(), *OPTIONS) is not None


def test_the_arrays_are_compared_in_their_order():
    seen = []
    qkv = arrays()
    repeating(are_alike=lambda *given: seen.append(given) or True)(*qkv, *OPTIONS)
    assert len(seen) == 1
    assert all(x is y for x, y in zip(seen[0], qkv, strict=True))


def test_no_reference_is_lost_or_kept():
    class Word(str):
        __slots__ = ()

    def of(word):
        return word

    word, kinds = Word("bhsd"), Word("kinds")
    again = repeating(
        options=(word,), conditions=(Condition(of, (kinds,), kinds), Condition(of, (1 << 70,), 1 << 70))
    )
    qkv = arrays()
    watched = [*qkv, word, kinds, Word, np.ndarray, of, again, int]

    def counts():
        return [sys.getrefcount(x) for x in watched]

    again(*qkv, word), again(*qkv, "bhsd"), again(*qkv, Word("bhsd"))
    before = counts()
    for _ in range(100):
        assert again(*qkv, word) is not None
        assert again(*qkv, Word("bhsd")) is not None
        assert again(*qkv, "bhsd") is None
        assert again(*qkv[:2], None, word) is None
        assert sys.getrefcount(again(*qkv, word)) <= 2
    assert np.abs(np.subtract(counts(), before)).max() <= 2


class Described:
    """A result whose memory cannot be described."""


FAILS = {
    "no memory for tiles": (empty, {"core": lambda core: core._replace(entries=(NO_MEMORY,))}),
    "a result that is no array": (lambda *_: Described(), {}),
}


@pytest.mark.parametrize("name", FAILS)
def test_a_result_is_released_after_a_failure(name):
    make, changes = FAILS[name]
    made = []

    def allocate(*layout):
        o = make(*layout)
        made.append(weakref.ref(o))
        return o

    assert repeating(allocate=allocate, **changes)(*arrays(), *OPTIONS) is None
    assert [x() for x in made] == [None]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="None has no reference count from Python 3.12 on")
def test_none_is_returned_with_a_reference():
    again = repeating()
    before = sys.getrefcount(None)
    for _ in range(1000):
        assert again() is None
    assert abs(sys.getrefcount(None) - before) < 100


def test_it_outlives_what_made_it():
    again = repeating()
    del again
    threads = [threading.Thread(target=repeating(), args=(*arrays(), *OPTIONS)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


WAITS = """
#include <unistd.h>
extern "C" int begun = 0, let_go = 0;
extern "C" int wait_for_it(void*) {
    __atomic_store_n(&begun, 1, __ATOMIC_RELEASE);
    for (int i = 0; i < 20000; ++i) {
        if (__atomic_load_n(&let_go, __ATOMIC_ACQUIRE)) return 0;
        usleep(500);
    }
    return 1;
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_other_threads_run_meanwhile(tmp_path: Path):
    (tmp_path / "waits.cpp").write_text(WAITS)
    command = ["g++", "-shared", "-fPIC", "waits.cpp", "-o", "waits.so"]
    subprocess.run(command, cwd=tmp_path, check=True)
    library = ctypes.CDLL(str(tmp_path / "waits.so"))
    again = repeating(core=lambda core: core._replace(entries=(library.wait_for_it,)))
    results = []
    thread = threading.Thread(target=lambda: results.append(again(*arrays(), *OPTIONS)))
    thread.start()
    begun, let_go = (ctypes.c_int.in_dll(library, name) for name in ("begun", "let_go"))
    while thread.is_alive() and not begun.value:
        thread.join(0.001)
    let_go.value = 1
    thread.join()
    assert results[0] is not None


def test_other_calls_have_no_such_function(monkeypatch):
    assert repeating(core=lambda core: core._replace(entries=core.entries * 2)) is None
    assert repeating(core=lambda core: core._replace(function=object())) is None
    assert repeating(core=lambda core: core._replace(work=2e10)) is None
    monkeypatch.setenv("CUPY_FLASH_CPU", "numpy")
    assert repeating() is None


def test_another_python_has_no_such_function(monkeypatch):
    monkeypatch.setitem(repeat.PYTHON, "call", "PyObject_OfNoPython")
    repeat._method.cache_clear()
    try:
        assert repeating() is None
    finally:
        repeat._method.cache_clear()
