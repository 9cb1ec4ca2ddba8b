"""fuzz: calls with invalid arguments, which may only return a result or raise one of our three errors."""

from __future__ import annotations

import argparse
import inspect
import operator
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

import cupy_flash
from cupy_flash import CubinNotFoundError, InvalidArgumentsError, UnsupportedError

from ..machine.memory import growth, resident
from ..measure.session import progress

OURS = (InvalidArgumentsError, UnsupportedError, CubinNotFoundError)
F = np.float32


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--one", type=int, metavar="SEED", help="run the call of one seed, and show it")


class Odd:
    """An object that is not an array, but has odd array attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __repr__(self) -> str:
        return f"Odd({', '.join(self.__dict__)})"


class Bomb:
    """An object whose every conversion fails."""

    def __bool__(self) -> bool:
        raise RuntimeError("no truth here")

    def __float__(self) -> float:
        raise TypeError("no number here")

    def __repr__(self) -> str:
        return "Bomb()"


def _read_only(x: np.ndarray) -> np.ndarray:
    x.flags.writeable = False
    return x


def _arrays(draw: random.Random) -> Any:
    """An array of random shape, dtype and strides, which may fit."""
    shape = draw.choice([
        (2, 4, 6, 8), (2, 2, 6, 8), (2, 4, 6), (4, 6, 8), (6, 8), (6, 6), (1, 1, 6, 6), (2, 4, 6, 6),
        (2, 1, 1, 6),
        (4,), (2,), (2, 4), (), (0,), (2, 4, 0, 8), (0, 4, 6, 8), (2, 0, 6, 8), (2, 4, 6, 0), (2, 4, 6, 9),
        (1, 2, 4, 6, 8), (2, 3, 6, 8), (3, 4, 6, 8), (1, 6), (6, 1), (7, 6), (12, 4, 8), (3,), (1,) * 9,
    ])  # fmt: skip
    dtype = draw.choice([
        "f4", "f4", "f4", "f2", "f8", "i4", "i8", "u1", "?", "c8", "O", "S3", "U2", "M8[s]", "m8[s]", ">f4",
        "g", np.dtype([("a", "f4")]),
    ])  # fmt: skip
    array = np.zeros(shape, dtype)
    if array.dtype.kind == "f":
        array[...] = draw.choice([0.0, 1.0, -1.0, 3e4, -np.inf, np.inf, np.nan])
    way = draw.randrange(9)
    if way == 1 and array.ndim:
        return array[..., ::-1]
    if way == 2:
        return array.T
    if way == 3:
        return np.broadcast_to(array, (2, 4, 6, 8)) if _broadcasts(array.shape) else array
    if way == 4:
        return _read_only(array)
    if way == 5 and array.ndim:
        return np.repeat(array, 2, axis=-1)[..., ::2]
    if way == 6:
        return np.ma.masked_array(array)
    if way == 7 and array.dtype.itemsize == 4 and array.dtype.kind == "f":
        raw = np.zeros(array.nbytes + 1, np.uint8)[1:]
        return raw.view(np.float32).reshape(shape)
    return array


def _broadcasts(shape: tuple[int, ...]) -> bool:
    return len(shape) <= 4 and all(n in (1, m) for n, m in zip(shape[::-1], (8, 6, 4, 2), strict=False))


def _things(draw: random.Random) -> Any:
    """A value that is not an array."""
    return draw.choice([
        None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**63, -(2**63), 10**30, 0.0, -0.0, 0.5, 1.0, 1.5, -1.0,
        1e-320, 1e308, float("nan"), float("inf"), -float("inf"), 1j, "", "bhsd", "bshd", "sbhd", "top_left",
        "bottom_right", "ieee", "tf32", "tf32x3", "x" * 300, b"bhsd", (), (1,), (1, 2), (-1, 2), (1, -1),
        (None, None), (None, 0), (0, 0), (64, 64), (16, 16), (1.5, 2), ("a", "b"), (1, 2, 3), (10**20, 0),
        [], [1, 2], [[1.0]], {}, {1: 2}, {1, 2}, object(), int, id, range(3), slice(1), Ellipsis,
        NotImplemented, Bomb(), Odd(shape=(2, 4, 6, 8)),
        Odd(__array_interface__={}), Odd(__array_interface__={"shape": "x"}),
        Odd(__cuda_array_interface__={}), Odd(__cuda_array_interface__=7),
        Odd(__dlpack__=lambda **_: None, __dlpack_device__=lambda: (1, 0)),
        Odd(__dlpack__=lambda **_: 1 / 0, __dlpack_device__=lambda: 1 / 0),
        Odd(dtype="float32", shape=None, ndim=4), np.float32(0.5), np.float64("nan"), np.int32(1),
        np.int64(-3), np.bool_(True), np.array(0.5), np.array(1), np.array([1, 2]), np.array("top_left"),
        np.datetime64(1, "s"), np.dtype("f4"), np.float32, memoryview(b"abcd"), bytearray(8),
        complex("nan"), "softmax", 1e6, 64, 128,
    ])  # fmt: skip


def _anything(draw: random.Random) -> Any:
    return _arrays(draw) if draw.random() < 0.45 else _things(draw)


# ---------------------------------------------------------------------- valid calls


def _normal(*shape: int) -> np.ndarray:
    return np.linspace(-1, 1, int(np.prod(shape)), dtype=F).reshape(shape)


Q, K = (2, 4, 6, 8), (2, 2, 6, 8)
_INPUTS = {"q": _normal(*Q), "k": _normal(*K), "v": _normal(*K)}
_BACK = {"do": _normal(*Q), **_INPUTS, "o": _normal(*Q), "lse": np.full(Q[:3], 2.0, F)}
_TANGENTS = {name: x for name, x in _BACK.items() if name != "do"}
_CUTS = np.array([0, 2, 6, 12], np.int32)
_PACKED = {"q": _normal(12, 4, 8), "k": _normal(12, 2, 8), "v": _normal(12, 2, 8)}
_OFFSETS = {"cu_seqlens_q": _CUTS, "cu_seqlens_k": _CUTS}
_ROWS = np.full((4, 12), 2.0, F)

_CACHED = {
    "q": _normal(2, 4, 1, 8),
    "k_cache": _normal(2, 2, 16, 8),
    "v_cache": _normal(2, 2, 16, 8),
    "cache_seqlens": np.array([5, 16], np.int32),
}

# By name of the function, followed by a blank and its kind of arguments, if it has several.
GOOD: dict[str, dict[str, Any]] = {
    "attention": _INPUTS,
    "attention_backward": _BACK,
    "attention_varlen": {**_PACKED, **_OFFSETS},
    "attention_varlen_backward": {"do": _PACKED["q"], **_PACKED, "o": _PACKED["q"], "lse": _ROWS, **_OFFSETS},
    "attention_with_kv_cache": _CACHED,
    "attention_with_kv_cache selected": {**_CACHED, "indices": np.array([[[2, -1]], [[0, 1]]])},
    "attention_statistics": {"q": _INPUTS["q"], "k": _INPUTS["k"], "lse": _BACK["lse"]},
    "attention_statistics packed": {"q": _PACKED["q"], "k": _PACKED["k"], "lse": _ROWS, **_OFFSETS},
    "attention_statistics over a cache": {
        "q": _CACHED["q"],
        "k": _CACHED["k_cache"],
        "cache_seqlens": _CACHED["cache_seqlens"],
    },
    "derivatives.jvp": {**_TANGENTS, "dq": _INPUTS["q"]},
    "derivatives.value_and_jvp": {**_INPUTS, "dq": _INPUTS["q"]},
    "derivatives.hvp": {**_BACK, "jvp": (_BACK["o"], _BACK["lse"]), "dq": _INPUTS["q"]},
    "derivatives.jvp packed": {
        **_PACKED,
        "o": _PACKED["q"],
        "lse": _ROWS,
        **_OFFSETS,
        "dq": _PACKED["q"],
    },
    "derivatives.value_and_jvp packed": {**_PACKED, **_OFFSETS, "dq": _PACKED["q"]},
    "derivatives.hvp packed": {
        "do": _PACKED["q"],
        **_PACKED,
        "o": _PACKED["q"],
        "lse": _ROWS,
        **_OFFSETS,
        "jvp": (_PACKED["q"], _ROWS),
        "dq": _PACKED["q"],
    },
    "merge": {"o_a": _normal(*Q), "lse_a": _BACK["lse"], "o_b": _normal(*Q), "lse_b": _BACK["lse"]},
    "naive_attention": _INPUTS,
    "explain": _INPUTS,
    "memory_report": {"batch": 1, "heads": 4, "seqlen": 64, "head_dim": 32},
    "default_config": {"head_dim": 32},
    "causal_config": {"head_dim": 32},
}
SCORE = cupy_flash.score(lambda s, b, h, i, j, x: s + x[b, h] * (i - j))
MASK = cupy_flash.mask(lambda b, h, i, j: (i >= j) | (b + h > 3))


def _mask(draw: random.Random, deep: int) -> Any:
    """A mask of a random kind, valid or made of anything, or a tuple of masks."""
    kind = draw.randrange(6 if deep else 5)
    if kind == 0:
        return draw.choice([np.ones((6, 6), bool), np.zeros((2, 1, 6, 6), bool), _anything(draw)])
    if kind == 1:
        return cupy_flash.Spans(draw.choice([np.array([[[0, 6]] * 6], "i4"), _anything(draw)]))
    if kind == 2:
        return cupy_flash.RaggedMask(draw.choice([np.ones(56, bool), _anything(draw)]))
    if kind == 3:
        made = cupy_flash.block_mask(MASK, None, None, 6, 6, block=16)
        return draw.choice([made, made._replace(table=_anything(draw)), made._replace(bits=_anything(draw))])
    if kind == 4:
        return draw.choice([MASK, MASK(_anything(draw)), SCORE])
    return tuple(_mask(draw, deep - 1) for _ in range(draw.randrange(3)))


def _quantized(draw: random.Random) -> Any:
    """A quantised cache, valid or nearly."""
    codes = draw.choice([np.ones((2, 2, 16, 8), "i1"), np.ones((2, 2, 16, 4), "u1"), _anything(draw)])
    units = (draw.choice([None, np.ones(2, F), _anything(draw)]) for _ in range(3))
    return cupy_flash.QuantizedCache(codes, *units)


# Common functions are called more often.
_OFTEN = ("attention", "attention", "attention_backward", "attention_varlen", *GOOD)
# Valid and nearly valid values by name of the argument.
_NEARLY: dict[str, Callable[[random.Random], Any]] = {
    "want": lambda draw: draw.choice(["key_sum", ("key_max", "top_k"), ["entropy"], (), "max", None, 3]),
    "top_k": lambda draw: draw.choice([1, 3, 0, -1, 2.0, True, np.int32(5), None]),
    "causal": lambda draw: draw.choice([True, False, 1, None, "yes", np.True_]),
    "window": lambda draw: draw.choice([(1, 1), (0, None), [1, 2], (3.0, 1), (-1, -1), (2**40, 0), 4]),
    "align": lambda draw: draw.choice(["top_left", "bottom_right", 3, -3, 0.0, True, 2**33, -(2**33)]),
    "layout": lambda draw: draw.choice(["bhsd", "bshd", "BHSD", "bsdh", None]),
    "precision": lambda draw: draw.choice(["ieee", "tf32", "tf32x3", "fp16", None]),
    "dropout": lambda draw: draw.choice([0, 0.5, 1.0, -0.1, 0.999999, 1e-30, float("nan")]),
    "seed": lambda draw: draw.choice([0, 1, -1, 2**64, 2**64 - 1, 1.0, None]),
    "arch": lambda draw: draw.choice(["sm_80", "sm_90a", "sm_", "sm_9000", "80", "", "sm_86", None]),
    "dtype": lambda draw: draw.choice(["float16", "bfloat16", "float", "f4", F, None]),
    "direction": lambda draw: draw.choice(["forward", "backward", "both", None]),
    "tuning": lambda draw: cupy_flash.Tuning(
        tile=draw.choice([None, None, (64, 64), (1, 1), (0, 4), (7, 3), (10**9, 10**9), (2, 2.0)]),
        splits=draw.choice([None, None, 1, 2, 64, 0, -1, 2**40, True]),
        workspace=draw.choice([None, None, _anything(draw)]),
        check=draw.choice([None, None, True, False, 1, "no"]),
    ),
    "mask": lambda draw: _mask(draw, 2),
    "score": lambda draw: draw.choice([SCORE, SCORE(_anything(draw)), MASK, SCORE.function]),
    "q": lambda draw: cupy_flash.QuantizedArray(_anything(draw), _anything(draw)),
    "k_cache": lambda draw: _quantized(draw),
    "v_cache": lambda draw: _quantized(draw),
    "rotary": lambda draw: cupy_flash.Rotary(
        draw.choice([np.ones((32, 2), F), _anything(draw)]),
        draw.choice([np.zeros((32, 2), F), _anything(draw)]),
        draw.choice([None, np.array([3, 99], "i4"), _anything(draw)]),
        draw.choice([False, True, _things(draw)]),
        draw.choice([False, True, _things(draw)]),
    ),
    "prefix": lambda draw: draw.choice(
        [(_normal(2, 3, 8), _normal(2, 3, 8)), (_normal(2, 3, 8), _anything(draw)), (_anything(draw),) * 3]
    ),
    "scale": lambda draw: draw.choice([0, 1, 1e-30, 1e30, -1, float("nan"), np.float32(0.1), "1"]),
    "block_table": lambda draw: np.array(
        draw.choice([[[0], [1]], [[1], [-1]], [[0, 1]], [[7], [2**30]], [1, 0], [0, 5], [-1, 0]]), "i4"
    ),
    "indices": lambda draw: draw.choice([np.array([[[3, -1]], [[-2, 2**40]]]), _anything(draw)]),
    "cache_seqlens": lambda draw: draw.choice([0, 16, 17, -1, np.array([3, 99], "i4")]),
    "k": lambda draw: _normal(2, 2, draw.choice([1, 3, 20]), 8),
    "kv_cache": lambda draw: draw.choice(
        [{}, {"cache_seqlens": 3}, {"tuning": cupy_flash.Tuning(splits=2), "zzz": 1}, {1: 2}]
    ),
    "seqlen": lambda draw: draw.choice([1, 2**31, 2**39, 2**41, np.int32(7), -5]),
    "softcap": lambda draw: draw.choice([0, 1, 1e-30, 1e30, -1, float("inf"), None]),
}


def function_of(name: str) -> Callable[..., Any]:
    """The function of a name of `GOOD`."""
    found: Callable[..., Any] = operator.attrgetter(name.partition(" ")[0])(cupy_flash)
    return found


def call_of(seed: int) -> tuple[Callable[..., Any], str, dict[str, Any]]:
    """The call of a seed: a valid one, with one to three arguments replaced or added."""
    draw = random.Random(seed)
    name = draw.choice(_OFTEN)
    function = function_of(name)
    # why copies: a call may write to its arrays
    arguments = {key: x.copy() if isinstance(x, np.ndarray) else x for key, x in GOOD[name].items()}
    names = list(inspect.signature(function).parameters)
    if names == ["args", "kwargs"] or "kwargs" in names:
        names = list(arguments)
    for _ in range(draw.choice((1, 1, 2, 3))):
        victim = draw.choice(names)
        near = _NEARLY.get(victim)
        arguments[victim] = near(draw) if near and draw.random() < 0.6 else _anything(draw)
    if draw.random() < 0.01 and not name.endswith("_config"):
        arguments[draw.choice(["casual", "is_causal", "attn_mask", "dropout_p", "zzz"])] = _anything(draw)
    return function, name, arguments


def outcome(seed: int) -> str:
    """Make the call of a seed; return the kind of its outcome.

    Raises
    ------
    Exception
        Any error other than our three.
    """
    function, _, arguments = call_of(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            function(**arguments)
        except OURS as error:
            text = str(error)
            assert text.strip(), "an error without a message"
            return type(error).__name__
    return "a result"


def run(chosen: argparse.Namespace) -> int:
    if chosen.one is not None:
        _, name, arguments = call_of(chosen.one)
        print(name, arguments)
        print(outcome(chosen.one))
        return 0
    counts: Counter[str] = Counter()
    failures: dict[str, tuple[int, str]] = {}
    start = time.monotonic()
    held: list[int] = []
    for seed in progress(range(chosen.seed, chosen.seed + chosen.count), "fuzz"):
        if seed % 200 == 0:
            held.append(resident())
        try:
            counts[outcome(seed)] += 1
        except Exception as error:  # why any: each is a finding
            frame = traceback.extract_tb(error.__traceback__)[-1]
            key = f"{type(error).__name__} at {frame.name}:{frame.lineno}"
            counts["something else"] += 1
            failures.setdefault(key, (seed, f"{type(error).__name__}: {error}"[:160]))
    seconds = time.monotonic() - start
    grown, found = growth(held) / 1e6, ", ".join(f"{n} {kind}" for kind, n in counts.most_common())
    print(f"fuzz: {chosen.count} calls in {seconds:.0f} s: {found}; memory grew by {grown:.1f} MB")
    for key, (seed, text) in failures.items():
        print(f"{key}: {text}\n  again: python -m bench fuzz --one {seed}", file=sys.stderr)
    return int(bool(failures))
