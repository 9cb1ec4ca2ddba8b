"""Calls on NumPy arrays that the core repeats by itself: which ones, and that no other is taken for them."""

import gc
import threading
import weakref

import numpy as np
import pytest

import cupy_flash
from cupy_flash import InvalidArgumentsError, api, attention, progress
from cupy_flash.call.arrays import numpy_dtype
from cupy_flash.cpu import threads
from cupy_flash.dispatch import memo, repeat

pytestmark = pytest.mark.usefixtures("core")


@pytest.fixture(autouse=True)
def by_python(monkeypatch):
    """The calls that the core did not repeat."""
    memo.forget()
    calls = []
    real = api.run_forward
    monkeypatch.setattr(
        api, "run_forward", lambda *given, **named: (calls.append(1), real(*given, **named))[1]
    )
    yield calls
    memo.forget()


def qkv(*, rows=9, dtype="float32", seed=0, shape=(2, 4, None, 8)):
    rng = np.random.default_rng(seed)
    whole = [rows if n is None else n for n in shape]
    return [rng.standard_normal(whole).astype(numpy_dtype(dtype)) for _ in range(3)]


def whole(*given, **options):
    """The result of the whole way."""
    return attention(*given, return_lse=True, **options)[0]


SHAPES = {
    "bhsd": [(None, 8), (4, None, 8), (2, 4, None, 8)],
    "bshd": [(None, 8), (None, 4, 8), (2, None, 4, 8)],
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(("layout", "shape"), [(x, shape) for x, every in SHAPES.items() for shape in every])
def test_it_is_repeated_in_the_core(dtype, layout, shape, by_python):
    attention(*qkv(dtype=dtype, shape=shape), layout=layout)
    for seed in range(1, 4):
        by_python.clear()
        given = qkv(dtype=dtype, shape=shape, seed=seed)
        o = attention(*given, layout=layout)
        assert not by_python
        expected = whole(*given, layout=layout)
        np.testing.assert_array_equal(o, expected, strict=True)
        assert (o.strides, o.flags.writeable, o.base) == (expected.strides, True, None)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True}, {"causal": True, "align": 1}, {"scale": 0.3, "softcap": 5.0}, {"window": (3, None)},
        {"precision": "ieee"}, {"reproducible": "batch"}, {"mask": None, "bias": None}, {"seed": 3},
    ],
    ids=str,
)  # fmt: skip
def test_options_are_a_part_of_the_call(options, by_python):
    attention(*qkv())
    attention(*qkv(), **options)
    for _ in range(2):
        np.testing.assert_array_equal(attention(*qkv(seed=1), **options), whole(*qkv(seed=1), **options))
        np.testing.assert_array_equal(attention(*qkv(seed=1)), whole(*qkv(seed=1)))
    assert len(by_python) == 2 + 4


def added(name, *shape, seed=0, dtype=np.float32):
    """A mask or a bias."""
    x = np.random.default_rng(seed).standard_normal(shape).astype(dtype)
    return {name: x > -0.5 if name == "mask" else x}


SHAPES_OF_MASKS = [(9,), (9, 9), (9, 1), (4, 1, 9), (2, 1, 9, 9), (1, 4, 9, 9), (2, 4, 9, 9), (2, 1, 1, 1)]


@pytest.mark.parametrize("name", ["mask", "bias"])
@pytest.mark.parametrize("shape", SHAPES_OF_MASKS, ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_with_a_mask_or_bias_it_is_repeated_in_the_core(name, shape, options, by_python):
    attention(*qkv(), **added(name, *shape), **options)
    for seed in range(1, 4):
        by_python.clear()
        given, one = qkv(seed=seed), added(name, *shape, seed=seed)
        o = attention(*given, **one, **options)
        assert not by_python
        np.testing.assert_array_equal(o, whole(*given, **one, **options))


@pytest.mark.parametrize("name", ["mask", "bias"])
def test_masks_of_any_strides_are_repeated_in_the_core(name, by_python):
    attention(*qkv(), **added(name, 2, 4, 9, 9))
    by_python.clear()
    whole_mask = added(name, 2, 8, 16, 32)[name]
    for one in (
        whole_mask[:, ::2, :9, :18:2], whole_mask[:, 3:7, 15:6:-1, :9],
        np.broadcast_to(whole_mask[:1, :1, :9, :9], (2, 4, 9, 9)), np.copy(whole_mask[:, :4, :9, :9], "F"),
    ):  # fmt: skip
        assert one.ctypes.data % 16 == 0
        by_python.clear()
        o = attention(*qkv(seed=1), **{name: one})
        assert not by_python
        np.testing.assert_array_equal(o, whole(*qkv(seed=1), **{name: one}))


@pytest.mark.parametrize("name", ["mask", "bias"])
@pytest.mark.parametrize("rows", [1, 2])
def test_masks_of_keys_that_grow_are_repeated_in_the_core(name, rows, by_python):
    q, *_ = qkv(rows=rows)
    _, k, v = qkv(rows=300)
    for shape in (300,), (rows, 300), (2, 1, 1, 300):
        every = added(name, *shape)[name]
        given = [(k[:, :, :n], v[:, :, :n]) for n in (5, 2, 6, 143, 144, 300)]
        by_python.clear()
        found = [attention(q, *kv, **{name: every[..., : kv[0].shape[2]]}) for kv in given]
        assert len(by_python) == 1
        for o, kv in zip(found, given, strict=True):
            np.testing.assert_array_equal(o, whole(q, *kv, **{name: every[..., : kv[0].shape[2]]}))


OTHER_MASKS = {
    "none": lambda _: None,
    "of other rows": lambda x: x[:, :, :8],
    "of other keys": lambda x: x[..., :8],
    "of no keys": lambda x: x[..., :0],
    "of one key": lambda x: x[..., :1],
    "of one row": lambda x: x[:, :, :1],
    "of one head": lambda x: x[:, :1],
    "of other heads": lambda x: x[:, :2],
    "of other axes": lambda x: x[0],
    "of more axes": lambda x: x[None],
    "of no axes": lambda x: x[0, 0, 0, 0],
    "of bits": lambda x: x.view(np.uint8),
    "of floats": lambda x: x.astype(np.float32),
    "of objects": lambda x: x.astype(object),
    "between boundaries": lambda x: moved(x, 4),
    "a subclass": lambda x: x.view(Subclass),
    "masked": np.ma.masked_array,
    "a list": lambda x: x.tolist(),
    "a word": lambda _: "mask",
    "a number": lambda _: 1,
    "one of two": lambda x: (x, x),
}


@pytest.mark.parametrize("name", ["mask", "bias"])
@pytest.mark.parametrize("other", OTHER_MASKS)
def test_other_masks_have_the_same_result_after_plain_ones(name, other):
    one = added(name, 2, 4, 9, 9)
    for _ in range(2):
        attention(*qkv(), **one)
    given = {name: OTHER_MASKS[other](one[name])}
    results = []
    for _ in range(2):
        try:
            results.append(attention(*qkv(), **given).tobytes())
        except Exception as error:
            results.append(f"{type(error)} {error}")
        memo.forget()
    after, alone = results
    assert after == alone


def test_a_mask_is_no_bias(by_python):
    x = np.random.default_rng(0).standard_normal((9, 9)).astype(np.float32)
    given = [{"bias": x}, {"mask": x > 0}, {}, {"mask": x > 1}]
    for _ in range(3):
        for options in given:
            np.testing.assert_array_equal(attention(*qkv(), **options), whole(*qkv(), **options))
    assert len(by_python) == 3 + 12


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "align": "bottom_right"}, {"causal": True, "align": 3}], ids=str
)
def test_keys_that_grow_are_repeated_in_the_core(options, dtype, by_python):
    q, *_ = qkv(rows=2, dtype=dtype)
    _, k, v = qkv(rows=700, dtype=dtype)
    # Slices of k begin at its address; v is transposed in memory.
    given = [(k[:, :, :n], np.copy(v[:, :, :n], "F")) for n in (5, 1, 2, 6, 7, 143, 144, 145, 600, 700)]
    found = [attention(q, *kv, **options) for kv in given]
    assert len(by_python) == 1
    for o, kv in zip(found, given, strict=True):
        np.testing.assert_array_equal(o, whole(q, *kv, **options))


def test_a_call_that_many_others_followed_is_repeated_in_the_core_again(by_python):
    given = [qkv(rows=rows) for rows in range(1, 31)]
    for repetition in range(3):
        for one in given:
            attention(*one)
            if repetition:
                by_python.clear()
                attention(*one)
                assert not by_python


def test_unequal_lengths_without_align_are_refused_after_equal_ones():
    q, k, v = qkv()
    for options in {"causal": True}, {"window": (2, 2)}:
        for _ in range(2):
            attention(q, k, v, **options)
        with pytest.raises(InvalidArgumentsError, match="is ambiguous"):
            attention(q, k[:, :, :-1], v[:, :, :-1], **options)


def moved(x, by):
    room = np.zeros(x.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64 + by
    made = room[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    made[...] = x
    return made


class Subclass(np.ndarray):
    pass


class Watched(np.ndarray):
    """A subclass with rules of its own."""

    def __array_finalize__(self, _):
        self.seen = True


ODD = {
    "a subclass": lambda x: x.view(Subclass),
    "a subclass that watches": lambda x: x.view(Watched),
    "a masked array": np.ma.masked_array,
    "a list": lambda x: x.tolist(),
    "nothing": lambda _: None,
    "words": lambda x: np.full(x.shape, "a"),
    "objects": lambda x: x.astype(object),
    "another dtype": lambda x: x.astype(np.float64),
    "bits": lambda x: x.view(np.int32),
    "bytes of no type": lambda x: x.view("V4"),
    "foreign byte order": lambda x: x.astype(">f4"),
    "between boundaries": lambda x: moved(x, 4),
    "between elements": lambda x: moved(x, 2),
    "backwards": lambda x: x[:, :, ::-1],
    "broadcast": lambda x: np.broadcast_to(x[:, :1], x.shape),
    "every other feature": lambda x: np.repeat(x, 2, -1)[..., ::2],
    "of heads in rows": lambda x: np.copy(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3),
    "more heads": lambda x: np.repeat(x, 2, 1),
    "fewer heads": lambda x: x[:, :2],
    "fewer axes": lambda x: x[0],
    "more axes": lambda x: x[None],
    "more features": lambda x: np.repeat(x, 2, -1),
    "no rows": lambda x: x[:, :, :0],
    "one row": lambda x: x[:, :, :1],
    "read only": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
}  # fmt: skip


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("name", ODD)
def test_odd_arrays_have_the_same_result_after_plain_ones(name, at):
    for _ in range(2):
        attention(*qkv())
    given = qkv()
    given[at] = ODD[name](given[at])
    results = []
    for _ in range(2):
        try:
            results.append(attention(*given).tobytes())
        except Exception as error:
            results.append(f"{type(error)} {error}")
        memo.forget()
    after, alone = results
    assert after == alone


@pytest.mark.parametrize("dtype", ["V2", "float16", "int16"])
def test_other_items_of_two_bytes_are_not_bfloat16(dtype):
    given = qkv(dtype="bfloat16")
    for _ in range(2):
        attention(*given)
    other = [x.view(dtype) for x in given]
    if dtype == "float16":
        np.testing.assert_array_equal(attention(*other), whole(*other))
    else:
        with pytest.raises(InvalidArgumentsError):
            attention(*other)


class Equal(float):
    __hash__ = float.__hash__

    def __eq__(self, other):
        return True


@pytest.mark.parametrize(
    "options",
    [
        {"scale": np.float32(0.5)}, {"scale": np.array(0.5)}, {"scale": np.ones(4, np.float32)},
        {"window": [2, 2]}, {"scale": Equal(0.5)},
        {"mask": np.ones((9, 9), bool), "bias": np.zeros((9, 9), np.float32)},
        {"mask": (np.ones((9, 9), bool), np.ones(9, bool))},
        {"mask": cupy_flash.Spans(np.zeros((9, 1, 2), np.int32))}, {"sinks": np.zeros(4, np.float32)},
        {"alibi_slopes": np.ones(4, np.float32)}, {"dropout": 0.5, "seed": 1},
    ],
    ids=lambda options: "-".join(f"{name} {type(x).__name__}" for name, x in options.items()),
)  # fmt: skip
def test_options_that_may_change_go_the_whole_way(options, by_python):
    for _ in range(3):
        attention(*qkv(), **options)
    assert len(by_python) == 3


def test_options_of_another_type_are_refused_after_equal_ones():
    for _ in range(2):
        attention(*qkv(), causal=True), attention(*qkv(), window=(1, 0))
    with pytest.raises(InvalidArgumentsError):
        attention(*qkv(), causal=1)
    with pytest.raises(InvalidArgumentsError):
        attention(*qkv(), window=(True, 0))


def test_out_and_lse_go_the_whole_way(by_python):
    given = qkv()
    expected = attention(*given)
    out = np.empty_like(expected)
    assert attention(*given, out=out) is out
    o, lse = attention(*given, return_lse=True)
    for found in out, o:
        np.testing.assert_array_equal(found, expected)
    assert lse.shape == (2, 4, 9)
    with pytest.raises(InvalidArgumentsError):
        attention(*given, return_lse=0)
    assert len(by_python) == 4


def test_who_watches_a_call_sees_it(by_python):
    shares = []
    with progress(shares.append):
        attention(*qkv())
    attention(*qkv()), attention(*qkv())
    with progress(shares.append):
        attention(*qkv())
    assert len(by_python) == 3


def test_it_keeps_to_the_environment(by_python, monkeypatch):
    for _ in range(2):
        attention(*qkv())
    monkeypatch.setenv("CUPY_FLASH_CPU", "numpy")
    attention(*qkv())
    assert len(by_python) == 2
    assert "NumPy" in memo.kernels()


class Blas:
    """A library with a limit of its threads."""

    internal_api, threading_layer, dynlib, limit = "test", "none", None, 2

    def get_num_threads(self):
        return self.limit

    def set_num_threads(self, limit):
        self.limit = limit


def test_it_keeps_to_the_limit_of_the_blas(by_python, monkeypatch):
    blas = Blas()
    monkeypatch.setattr(threads, "_blas", threads.BlasLimit([blas]))
    for limit in 2, 1, 3:
        blas.limit = limit
        by_python.clear()
        for _ in range(3):
            attention(*qkv(rows=200))
        assert len(by_python) == 1, "the limit is a part of the call"


def test_our_own_limit_of_the_blas_is_none_of_the_callers(by_python):
    with threads.one_blas_thread():
        for _ in range(2):
            attention(*qkv())
    assert len(by_python) == 2
    attention(*qkv()), attention(*qkv())
    assert len(by_python) == 3


def test_it_keeps_no_array():
    given = qkv()
    kept = [weakref.ref(x) for x in given]
    for _ in range(2):
        attention(*given)
    del given
    gc.collect()
    assert [x() for x in kept] == [None] * 3


def test_many_kinds_do_not_fill_memory(monkeypatch):
    monkeypatch.setattr(repeat, "_MOST_KNOWN", 10)
    for rows in range(1, 40):
        attention(*qkv(rows=rows), causal=True)
        assert len(memo.REPEATED) <= 10


def test_threads_repeat_at_once(by_python):
    given = [qkv(rows=150, seed=seed) for seed in range(4)]
    expected = [attention(*one) for one in given]
    found = [None] * 4

    def repeat_often(n):
        found[n] = [attention(*given[n]) for _ in range(50)]

    running = [threading.Thread(target=repeat_often, args=(n,)) for n in range(4)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    for o, every in zip(expected, found, strict=True):
        for x in every:
            np.testing.assert_array_equal(x, o)
    assert len(by_python) == 1
