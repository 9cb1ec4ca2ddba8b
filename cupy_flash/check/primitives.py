"""Primitives of a check: single GPU instructions, on inputs with results that NumPy computes exactly.

Products sum integers, so that every order of additions gives the same bits. Row t of an array belongs to
thread t of ``kernels_cu/check_primitives.cu``, which numbers the primitives in the same way.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..call.adopt import adopt
from ..device.run import Driver
from ..device.tensor_map import TensorMap
from ..dispatch.backends import driver_of
from ..errors import UnsupportedError
from ..plan.catalog import architecture
from ..plan.families import primitives
from ..testing import Verdict
from ..testing.kv_cache import E4M3, nearest
from .places import Place

__all__ = ["PRIMITIVES", "Primitive", "of_driver", "primitives_of"]

THREADS, GIVEN, FOUND = 128, 32, 32  # threads of the kernel, and words per thread of inputs and results
WARPS = 4
ROW = np.arange(THREADS)
LANE = np.arange(32)
G, T = LANE // 4, LANE % 4
# Relative error of ex2 and rcp by the PTX specification, plus the rounding of the result.
_APPROXIMATION = 2.0**-22 + 2.0**-24


@dataclass(frozen=True, eq=False)
class Numbers:
    """Inputs and expected results of a primitive. why no tuple: `Place.put` would copy its arrays."""

    # ndarray of uint32, shapes (THREADS, up to GIVEN) and (THREADS, up to FOUND): words that each thread
    # reads, and words that it must write.
    given: np.ndarray
    wanted: np.ndarray
    approximate: bool = False  # whether results are floats that may differ in their last bits


@dataclass(frozen=True, eq=False)
class Primitive:
    """One primitive, as a case of a check."""

    number: int  # its number in the kernel
    title: str  # PTX name with types
    numbers: Callable[[np.random.Generator], Numbers]  # makes `Numbers` from a random generator
    since: int = 0  # compute capability x 10 of the oldest architecture whose kernels use it
    only: tuple[int, ...] = ()  # if not empty, the only compute capabilities x 10 that have it
    kind: str = "primitive"

    def __str__(self) -> str:
        return self.title

    def inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Make the inputs; the expected results stay on the host."""
        made = self.numbers(rng)
        given = np.zeros((THREADS, GIVEN), np.uint32)
        given[:, : made.given.shape[1]] = made.given
        # why int32: every library has this dtype, but not uint32
        return {"given": given.view(np.int32), "found": np.zeros((THREADS, FOUND), np.int32),
                "numbers": made}  # fmt: skip

    def run(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Launch the kernel."""
        view, found = adopt(given["given"], "given"), adopt(given["found"], "found")
        device, driver = view.device[1], driver_of(view.device, view.library)
        assert driver is not None
        row = architecture(driver.arch(device))
        chosen = primitives.variant(row.targets[-1])
        kernel = driver.load(chosen, device)
        map_ = bytes(128)
        if primitives.capability(row.targets[-1]) == 90:
            box = ((GIVEN, THREADS), (4 * GIVEN,), (GIVEN, THREADS // 2))
            map_ = kernel.encode_tensor_map(TensorMap("int32", *box, 4 * GIVEN), view.pointer)
        # layout: as struct CheckParams of the kernel
        params = map_ + struct.pack("<QQi", view.pointer, found.pointer, self.number)
        params += bytes(-len(params) % 64)
        stream = driver.current_stream(device, view.library)
        kernel.launch((1, 1, 1), (THREADS, 1, 1), chosen.shared_bytes, params, stream)
        return {"found": given["found"]}

    def judge(
        self, host: Mapping[str, Any], results: Mapping[str, np.ndarray], place: Place
    ) -> list[Verdict]:
        """Compare with the expected results."""
        del place
        made: Numbers = host["numbers"]
        found = results["found"].view(np.uint32)[:, : made.wanted.shape[1]]
        if made.approximate:
            return [_within(found.view(np.float32), made.wanted.view(np.float32))]
        wrong = np.argwhere(found != made.wanted)
        if not len(wrong):
            return [Verdict("found", "")]
        at = tuple(wrong[0])
        return [
            Verdict("found", f"{len(wrong)} of {found.size} words are wrong, the first of thread {at[0]}, "
                    f"word {at[1]}: {found[at]:#010x} for {made.wanted[at]:#010x}")
        ]  # fmt: skip


def _within(found: np.ndarray, wanted: np.ndarray) -> Verdict:
    """Compare approximations, but zeros and infinities exactly."""
    exact = (wanted == 0) | ~np.isfinite(wanted)
    if not np.array_equal(found[exact], wanted[exact]):
        return Verdict("found", "a zero or an infinity is another number")
    error = np.abs(found[~exact].astype(float) / wanted[~exact] - 1)
    worst = np.where(np.isnan(error), np.inf, error).max()
    return Verdict("found", "", largest=float(worst), largest_allowed=_APPROXIMATION)


def primitives_of(places: Sequence[Place]) -> tuple[Primitive, ...]:
    """The primitives of the kernels of this GPU; none for a CPU, or for a GPU without kernels."""
    if not places or not places[0].on_gpu:
        return ()
    place = places[0]
    driver = driver_of(("cuda" if place.ordinal is not None else "cpu", place.ordinal or 0), place.library)
    return of_driver(driver, place.ordinal or 0)


def of_driver(driver: Driver | None, device: int) -> tuple[Primitive, ...]:
    """The primitives of the kernels of a device."""
    try:
        row = architecture("" if driver is None else driver.arch(device))
    except UnsupportedError:
        return ()
    own = primitives.capability(row.targets[-1])
    return tuple(x for x in PRIMITIVES if own >= x.since and (not x.only or own in x.only))


# ---- inputs and expected results of each primitive


def _words(*columns: np.ndarray) -> np.ndarray:
    """Concatenate columns (THREADS,) or (THREADS, n) of 4- or 8-byte items to rows of words."""
    shaped = (np.ascontiguousarray(x.reshape(THREADS, -1)) for x in columns)
    return np.concatenate([x.view(np.uint32) for x in shaped], axis=1)


def _random(rng: np.random.Generator, words: int) -> np.ndarray:
    return rng.integers(0, 2**32, (THREADS, words), dtype=np.uint32)


def _functions(rng: np.random.Generator) -> Numbers:
    x = rng.uniform(-100, 100, THREADS).astype(np.float32)
    x[:4] = 0, -np.inf, np.inf, -130  # 2**-130 is subnormal, and is flushed to 0
    y = (np.exp2(rng.uniform(-90, 90, THREADS)) * rng.choice((-1, 1), THREADS)).astype(np.float32)
    y[:2] = 0, np.inf
    with np.errstate(divide="ignore"):
        power, reciprocal = np.exp2(x.astype(float)), 1 / y.astype(float)
    power[3] = 0
    return Numbers(_words(x, y), _words(power.astype(np.float32), reciprocal.astype(np.float32)), True)


def _exchanges(rng: np.random.Generator) -> Numbers:
    x = _random(rng, 1)[:, 0]
    warps = x.reshape(WARPS, 32)
    bits = np.bitwise_or.reduce((warps >> LANE & 1) << LANE, axis=1).astype(np.uint32)
    votes = [np.uint32(ROW // 32 == 1), np.uint32(ROW // 32 != 2)]
    return Numbers(_words(x), _words(x[ROW ^ 9], x[ROW // 32 * 32 + 5], np.repeat(bits, 32), *votes))


def _integers(rng: np.random.Generator) -> Numbers:
    given, c = _random(rng, 5), rng.integers(-(2**61), 2**61, THREADS)
    given[:, 2:4] = _words(c)
    a, b = (given[:, i].view(np.int32).astype(np.int64) for i in (0, 1))
    eight = np.ascontiguousarray(given[:, :2]).view(np.uint8)
    chosen = given[:, 4:] >> np.arange(0, 16, 4, dtype=np.uint32) & 7
    return Numbers(given, _words(a * b + c, np.take_along_axis(eight, chosen.astype(int), 1)))


def _floats(rng: np.random.Generator) -> np.ndarray:
    """Pairs of float32 in the range of float16, including ties."""
    x = (rng.standard_normal((THREADS, 2)) * np.exp2(rng.integers(-20, 12, (THREADS, 2)))).astype(np.float32)
    x[::4] = rng.integers(-4096, 4096, (THREADS // 4, 2)) + 0.5
    return x


def _bfloat16(x: np.ndarray) -> np.ndarray:
    """Bits of the nearest bfloat16, ties to even."""
    bits = x.astype(np.float32).view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)


def _e4m3(x: np.ndarray) -> np.ndarray:
    """Bits of the nearest e4m3, saturated at 448."""
    sizes = nearest(np.minimum(np.abs(x.astype(float)), 448), E4M3[:127])
    return (np.searchsorted(E4M3[:127], sizes) | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def _roundings(rng: np.random.Generator) -> Numbers:
    x = _floats(rng)
    return Numbers(_words(x), _words(x.astype(np.float16), _bfloat16(x)))


def _barriers(rng: np.random.Generator) -> Numbers:
    x = _random(rng, 1)[:, 0]
    return Numbers(_words(x), _words(np.where(ROW < 64, x[ROW - 64], 0).astype(np.uint32), ~x[::-1]))


def _additions(rng: np.random.Generator) -> Numbers:
    x, y = rng.integers(-(2**15), 2**15, THREADS), _random(rng, 1)[:, 0]
    wanted = np.zeros((THREADS, 8), np.uint32)
    wanted[0, :4] = x.reshape(-1, 4).sum(0).astype(np.float32).view(np.uint32)
    wanted[0, 4:] = y.reshape(-1, 4).sum(0, dtype=np.uint32)
    return Numbers(_words(x.astype(np.float32), y), wanted)


def _matrices(rng: np.random.Generator) -> np.ndarray:
    """Four matrices of 8 x 8 halves for each warp: (warps, matrix, row, column)."""
    return rng.integers(0, 2**16, (WARPS, 4, 8, 8), dtype=np.uint16)


def _in_registers(x: np.ndarray) -> np.ndarray:
    """Matrices as in registers: word j of lane l has elements 2 (l % 4) and + 1 of row l / 4 of matrix j."""
    words = np.ascontiguousarray(x).view(np.uint32).reshape(WARPS, 4, 32)
    turned: np.ndarray = words.swapaxes(1, 2).reshape(THREADS, 4)
    return turned


def _matrix_loads(rng: np.random.Generator) -> Numbers:
    x = _matrices(rng)
    loaded = _in_registers(x)
    turned = _in_registers(x.swapaxes(2, 3))
    return Numbers(_words(x.reshape(THREADS, 8)), _words(loaded, turned, loaded[:, :2]))


def _matrix_stores(rng: np.random.Generator) -> Numbers:
    x = _matrices(rng)
    rows = [np.ascontiguousarray(y).reshape(THREADS, 8) for y in (x, x.swapaxes(2, 3))]
    return Numbers(_words(_in_registers(x)), _words(*rows))


def _copies(rng: np.random.Generator) -> Numbers:
    given = _random(rng, 10)
    taken = np.stack([np.where(ROW % 3, 16, 0), ROW % 17, np.where(ROW % 2, 4, 0), ROW % 5], axis=1)
    first, within = np.repeat((0, 1, 2, 3), (16, 16, 4, 4)), [*range(16), *range(16), *range(4), *range(4)]
    kept = np.array(within) < taken[:, first]
    return Numbers(given, np.where(kept, given.view(np.uint8), 0).astype(np.uint8).view(np.uint32))


# Element types of products: conversion from integers, and elements per word.
_WRITTEN: dict[str, tuple[Callable[[np.ndarray], np.ndarray], int]] = {
    "f16": (lambda x: x.astype(np.float16), 2),
    "bf16": (_bfloat16, 2),
    "tf32": (lambda x: x.astype(np.float32), 1),
    "e4m3": (_e4m3, 4),
}


def _operands(rng: np.random.Generator, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    return [rng.integers(-4, 5, shape) for shape in shapes]


def _of_a(a: np.ndarray, of_word: int, registers: int) -> np.ndarray:
    """Elements of a (warps, 16, k) in the registers of each thread, in the layout of prim/warp.cuh."""
    i, e = np.arange(registers)[:, None], np.arange(of_word)
    row = G[:, None, None] + 8 * (i % 2)
    k = of_word * (T[:, None, None] + 4 * (i // 2)) + e
    return a[:, row, k].reshape(THREADS, registers * of_word)


def _of_b(b: np.ndarray, of_word: int, registers: int) -> np.ndarray:
    """Elements of b (warps, 8, k), one row per column of the product, in registers as in `_of_a`."""
    i, e = np.arange(registers)[:, None], np.arange(of_word)
    k = of_word * (T[:, None, None] + 4 * i) + e
    return b[:, G[:, None, None], k].reshape(THREADS, registers * of_word)


def _of_d(d: np.ndarray) -> np.ndarray:
    """Elements of d (warps, 16, a multiple of 8 columns) in the registers of each thread."""
    i = np.arange(d.shape[2] // 2)
    return d[:, G[:, None] + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * T[:, None] + i % 2].reshape(THREADS, -1)


def _product(element: str, depth: int) -> Callable[[np.random.Generator], Numbers]:
    """mma.m16n8k<depth>: d += a b, with different operands for each warp."""
    written, of_word = _WRITTEN[element]
    registers = depth // of_word // 4  # of b

    def numbers(rng: np.random.Generator) -> Numbers:
        a, b, c = _operands(rng, (WARPS, 16, depth), (WARPS, 8, depth), (WARPS, 16, 8))
        if element != "e4m3":
            c *= 4099  # more bits than a float16 accumulator would keep
        given = np.zeros((THREADS, 10), np.uint32)
        given[:, : 2 * registers] = _words(written(_of_a(a, of_word, 2 * registers)))
        given[:, 4 : 4 + registers] = _words(written(_of_b(b, of_word, registers)))
        given[:, 6:] = _words(_of_d(c).astype(np.float32))
        return Numbers(given, _words(_of_d(a @ b.swapaxes(1, 2) + c).astype(np.float32)))

    return numbers


def _scaled_product(rng: np.random.Generator) -> Numbers:
    """mma.m16n8k32 with a power of two per row and column; unused bytes and lanes of scales hold NaN."""
    made = _product("e4m3", 32)(rng)
    a, b = (127 + rng.integers(-4, 5, (WARPS, extent)) for extent in (16, 8))
    scales = np.full((WARPS, 32, 2, 4), 255, np.uint8)
    for i in range(2):
        scales[:, i::4, 0, 0] = a[:, 8 * i : 8 * i + 8]
    scales[:, ::4, 1, 0] = b
    d, c = (_words(x).view(np.float32) for x in (made.wanted, made.given[:, 6:]))
    powers = np.exp2(_of_d(a[:, :, None] + b[:, None, :] - 254))
    given = _words(made.given, scales.reshape(THREADS, 8))
    return Numbers(given, _words(((d - c) * powers + c).astype(np.float32)))


def _to_tf32(rng: np.random.Generator) -> Numbers:
    x = _floats(rng)[:, 0].copy()
    # ties, which round away from zero: of the 13 lost bits only the highest is set
    x[::3] = (x[::3].view(np.uint32) & 0xFFFFE000 | 0x1000).view(np.float32)
    return Numbers(_words(x), _words(x.view(np.uint32) + 0x1000 & 0xFFFFE000))


def _of_many_bits(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, ...]:
    """Scale operands so that products and sums need 52 bits, and no more."""
    return a * 2**24 + 1, b * 2**20 + 1, c * 2**48 + 3


def _doubles(rng: np.random.Generator) -> Numbers:
    """mma.m16n8k8 of doubles."""
    a, b, c = _of_many_bits(*_operands(rng, (WARPS, 16, 8), (WARPS, 8, 8), (WARPS, 16, 8)))
    held = (_of_a(a, 1, 4), _of_b(b, 1, 2), _of_d(c))
    given = _words(*(x.astype(np.float64) for x in held))
    return Numbers(given, _words(_of_d(a @ b.swapaxes(1, 2) + c).astype(np.float64)))


def _small_doubles(rng: np.random.Generator) -> Numbers:
    """mma.m8n8k4 of doubles, which uses only the first elements of a, b and d."""
    a, b, c = _of_many_bits(*_operands(rng, (WARPS, 8, 4), (WARPS, 8, 4), (WARPS, 8, 8)))
    d = a @ b.swapaxes(1, 2) + c
    given = np.zeros((THREADS, 8))
    given[:, 0], given[:, 4] = a[:, G, T].reshape(-1), b[:, G, T].reshape(-1)
    row, column = G[:, None], 2 * T[:, None] + np.arange(2)
    given[:, 6:] = c[:, row, column].reshape(THREADS, 2)
    return Numbers(_words(given), _words(d[:, row, column].reshape(THREADS, 2).astype(np.float64)))


def _to_e4m3(rng: np.random.Generator) -> Numbers:
    x = (rng.standard_normal((THREADS, 2)) * np.exp2(rng.integers(-12, 10, (THREADS, 2)))).astype(np.float32)
    x[::4] = rng.choice((17, -19, 1.0625, 500, -1e9, 2.0**-10, 0.0), (THREADS // 4, 2))  # ties, and too large
    words = np.zeros(THREADS, np.uint32)
    words |= _e4m3(x[:, 0]).astype(np.uint32) | _e4m3(x[:, 1]).astype(np.uint32) << 8
    return Numbers(_words(x), _words(words))


def _tile_copies(rng: np.random.Generator) -> Numbers:
    given = _random(rng, GIVEN)
    box = np.zeros((THREADS // 2, GIVEN), np.uint32)
    box[:32] = given[96:]
    return Numbers(given, box.reshape(THREADS, -1))


def _bulk_copies(rng: np.random.Generator) -> Numbers:
    given = rng.integers(-1000, 1000, (THREADS, GIVEN)).astype(np.float32)
    wanted, rows = np.zeros((THREADS, FOUND), np.float32), THREADS // 4
    wanted[:rows], wanted[rows : 2 * rows] = given[:rows], 2 * given[rows : 2 * rows]
    return Numbers(_words(given), _words(wanted))


def _warpgroup_product(element: str) -> Callable[[np.random.Generator], Numbers]:
    """wgmma.m64n16 with tiles of 128 bytes along k."""
    written, of_word = _WRITTEN[element]

    def numbers(rng: np.random.Generator) -> Numbers:
        a, b = _operands(rng, (64, 32 * of_word), (16, 32 * of_word))
        given = _words(written(a).reshape(THREADS, -1), written(b).reshape(THREADS, -1))
        return Numbers(given, _words(_of_d((a @ b.T).reshape(WARPS, 16, 16)).astype(np.float32)))

    return numbers


def _product_of_registers(rng: np.random.Generator) -> Numbers:
    """wgmma.m64n64k16 with a in registers, and b row-major, one row per k."""
    a, b = _operands(rng, (WARPS, 16, 16), (16, 64))
    given = np.zeros((THREADS, 20), np.uint32)
    given[:, :4] = _words(_of_a(a, 2, 4).astype(np.float16))
    given[:, 16:] = _words(b.astype(np.float16).reshape(THREADS, -1))
    return Numbers(given, _words(_of_d(a @ b).astype(np.float32)))


PRIMITIVES = (
    Primitive(0, "ex2.approx, rcp.approx", _functions),
    Primitive(1, "shfl, vote", _exchanges),
    Primitive(2, "mad.wide, prmt", _integers),
    Primitive(3, "cvt to f16 and bf16", _roundings),
    Primitive(4, "bar.sync, bar.arrive", _barriers),
    Primitive(5, "atom.add", _additions),
    Primitive(6, "ldmatrix", _matrix_loads, 75),
    Primitive(7, "mma.m16n8k8 f16", _product("f16", 8), 75),
    Primitive(8, "cp.async", _copies, 80),
    Primitive(9, "mma.m16n8k16 f16", _product("f16", 16), 80),
    Primitive(10, "mma.m16n8k16 bf16", _product("bf16", 16), 80),
    Primitive(11, "cvt to tf32", _to_tf32, 80),
    Primitive(12, "mma.m16n8k8 tf32", _product("tf32", 8), 80),
    Primitive(13, "mma.m8n8k4 f64", _small_doubles, only=(80,)),
    Primitive(13, "mma.m16n8k8 f64", _doubles, only=(90,)),
    Primitive(14, "cvt to e4m3", _to_e4m3, only=(89, 90, 120)),
    Primitive(15, "mma.m16n8k32 e4m3", _product("e4m3", 32), only=(89, 120)),
    Primitive(16, "stmatrix", _matrix_stores, only=(90,)),
    Primitive(17, "cp.async.bulk.tensor, mbarrier", _tile_copies, only=(90,)),
    Primitive(18, "cp.async.bulk, cp.reduce.async.bulk", _bulk_copies, only=(90,)),
    Primitive(19, "wgmma f16", _warpgroup_product("f16"), only=(90,)),
    Primitive(20, "wgmma bf16", _warpgroup_product("bf16"), only=(90,)),
    Primitive(21, "wgmma e4m3", _warpgroup_product("e4m3"), only=(90,)),
    Primitive(22, "wgmma f16, a in registers", _product_of_registers, only=(90,)),
    Primitive(23, "mma.m16n8k32 e4m3 with scales", _scaled_product, only=(120,)),
)
