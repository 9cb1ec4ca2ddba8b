"""Every instruction against NumPy, with fragments and tiles laid out as CuTe says: bodies of the tests.

They run on the simulator (tests/simulator/test_primitives.py) and on a GPU (tests/gpu/test_primitives.py).
Comparisons are exact, but for the approximations of exp2 and 1 / x. `layouts.json` in tests/simulator/oracle
is the output of `layouts.cpp`, which asks CUTLASS's headers; where those are installed, a test runs it again.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import NamedTuple, Protocol

import ml_dtypes
import numpy as np
import pytest

from tests.simulator.units import aligned

CUTE = {
    name: np.array(places)
    for name, places in json.loads(
        (Path(__file__).parent / "simulator/oracle/layouts.json").read_text()
    ).items()
}
FORMATS = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32,
           "e4m3": ml_dtypes.float8_e4m3fn}  # fmt: skip
# Of the functions of same_bits.cuh, in double and float, by where they are evaluated.
SAME_BITS = [
    [194024007, 1825938333],
    [940220944, 3040875093],
    [3457409235, 3576053670],
    [804702535, 3785551405],
]


class Map(NamedTuple):
    """A field of params that is the tensor map of an array; extents with the contiguous axis first."""

    array: np.ndarray
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int


class Machine(Protocol):
    """What the kernels of tests/simulator/kernels run on."""

    def launch(self, name: str, threads: int, shared: int, /, blocks: int = 1, **fields: object) -> None:
        """Run a kernel on these params; arrays are read and written in place."""


def integers(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


# ---- a thread and a warp


def test_warp(machine: Machine) -> None:
    x = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    out = np.zeros((24, 64), np.float32)
    counter = np.zeros(2, np.int32)
    machine.launch("warp", 64, 256, x=x, out=out, counter=counter)
    lane, halves = np.arange(64) % 32, x.reshape(2, 32)
    spread = np.repeat
    expected = [
        spread(halves[:, 5], 32),
        halves[:, np.arange(32) ^ 9].ravel(),
        np.where(lane < 3, x, np.roll(x, 3)),
        np.where(lane >= 28, x, np.roll(x, -4)),
        x[np.arange(64) ^ 1],
        spread((halves > 0).sum(1), 32),
        spread([0, 1], 32),
        spread([1, 0], 32),
        np.full(64, (x > 0).sum()),
        np.ones(64),
        np.zeros(64),
        np.exp2(x),
        1 / x,
        None,
        x.astype(ml_dtypes.bfloat16).astype(np.float32),
        x.astype(np.float16).view(np.uint16).astype(np.float32),
        None,
        x[np.arange(64) ^ 1],
        np.concatenate([np.zeros(32), 2 * x[:32]]),
        None,
        np.ones(64),
        x,
        x[np.arange(64) ^ 2] + x,
        0x87 | np.arange(64) << 8 | 0x65 << 16,
    ]
    approximate = (11, 12)  # ex2 and rcp: within 2 units in the last place, and 2**-22
    for column, wanted in enumerate(expected):
        if column in approximate:
            np.testing.assert_allclose(out[column], wanted, rtol=3e-7, atol=3e-7, err_msg=f"column {column}")
        elif wanted is not None:
            np.testing.assert_array_equal(out[column], wanted, err_msg=f"column {column}")
    # tf32: 10 bits of mantissa, ties away from zero
    scale = np.exp2(np.floor(np.log2(np.abs(x))) - 10)
    np.testing.assert_array_equal(out[13], np.sign(x) * np.floor(np.abs(x) / scale + 0.5) * scale)
    eights = [v.astype(ml_dtypes.float8_e4m3fn).view(np.uint8).astype(int) for v in (x, -x)]
    np.testing.assert_array_equal(out[16].astype(int), eights[0] | eights[1] << 8)
    assert counter.tolist() == [64, 63]
    # elect.sync: one lane of each warp, whichever
    assert sorted(out[19].reshape(2, 32)[0]) == sorted(out[19].reshape(2, 32)[1]) == [0.0] * 31 + [1.0]


@pytest.mark.parametrize("places", range(4))
def test_functions_of_the_same_bits(machine: Machine, places: int) -> None:
    """e^x, tanh and log to two units in the last place, and the very bits wherever they are computed."""
    x = np.linspace(-1, 1, 1024) * (0.03, 1.4, 20, 700)[places]
    edges = [0, -0.0, 1, -1, 88.7, -87.3, -103.9, 709.7, -745, -1e300, 1e300, np.inf, -np.inf, np.nan]
    x[: len(edges)] = edges
    doubles, floats = np.full((3, 1024), 7.0), np.full((3, 1024), 7, np.float32)
    machine.launch("same_bits", 1024, 0, x=x, of_double=doubles, of_float=floats)
    for found, wide in ((doubles, np.longdouble), (floats, np.float64)):
        with np.errstate(over="ignore", divide="ignore"):
            y = x.astype(found.dtype).astype(wide)
            log = np.where(np.abs(y) > 0, np.log(np.abs(y)), found[2])  # of 0 nothing is promised
            wanted = np.stack([np.exp(y), np.tanh(y), log])
            rounded = wanted.astype(found.dtype)
        finite = np.isfinite(rounded)
        np.testing.assert_array_equal(found[~finite], rounded[~finite])
        error = np.abs(found[finite] - wanted[finite]) / np.spacing(np.abs(rounded[finite]))
        assert error.max() < 2.5
    assert (doubles[0, 0], doubles[1, 0], floats[0, 0], floats[1, 0]) == (1, 0, 1, 0)
    known = [np.nan_to_num(a, nan=2.5).tobytes() for a in (doubles, floats)]
    assert [zlib.crc32(a) for a in known] == SAME_BITS[places]


def test_copies(machine: Machine) -> None:
    """Parts of a copy come as zeros, and so does what is not valid."""
    given = aligned((1280,), np.uint8)
    given[...] = np.random.default_rng(9).integers(1, 256, given.shape)
    out = np.zeros(320, np.uint32)
    machine.launch("copies", 32, 1280, **{"from": given, "to": out})
    t = np.arange(32)
    sizes = [(16, np.where(t <= 16, t, 32 - t)), (4, t % 5), (4, 4 * (t % 2)), (16, 16 * (t % 4 > 0))]
    found, first = out.view(np.uint8), 0
    for width, exist in sizes:
        place = slice(first, first + 32 * width)
        wanted = np.where(np.arange(width) < exist[:, None], given[place].reshape(32, width), 0)
        np.testing.assert_array_equal(found[place].reshape(32, width), wanted, err_msg=f"{width} bytes")
        first += 32 * width


def test_matrices(machine: Machine) -> None:
    rng = np.random.default_rng(1)
    matrices = rng.integers(0, 1 << 16, (4, 8, 8), dtype=np.uint16)
    registers = rng.integers(0, 1 << 16, (32, 4, 2), dtype=np.uint16)
    given = np.concatenate([matrices.ravel(), registers.ravel()]).view(np.uint32)
    out = np.zeros((12, 128), np.uint32)
    machine.launch("matrices", 32, 7 * 512, **{"in": given, "out": out})
    loaded = out[:6].reshape(6, 32, 4)
    stored = out[6:].view(np.uint16).reshape(6, 4, 8, 8)
    for form in range(6):
        n, transposed = (1, 2, 4)[form % 3], form >= 3
        for j in range(4):
            matrix = matrices[j].T if transposed else matrices[j]
            wanted = np.ascontiguousarray(matrix).view(np.uint32).ravel() if j < n else 0
            np.testing.assert_array_equal(loaded[form, :, j], wanted)
            left = registers[:, j].reshape(8, 8) if j < n else np.zeros((8, 8))
            np.testing.assert_array_equal(stored[form, j], left.T if transposed else left)


# ---- products


def fragment(layout: str, matrix: np.ndarray, threads: int, registers: int) -> np.ndarray:
    """The elements of `matrix` in the registers of each thread, in the order of CuTe's layout."""
    places = CUTE[layout].reshape(threads, -1)
    elements = matrix.T.ravel()[places]  # CuTe counts down the columns
    words = np.ascontiguousarray(elements).view(np.uint32)
    filled = np.zeros((threads, registers), np.uint32)
    filled[:, : words.shape[1]] = words
    return filled


@pytest.mark.parametrize(
    ("kind", "shape", "element", "depth"),
    [
        (0, "m16n8k8", "f16", 8),
        (1, "m16n8k8", "bf16", 8),
        (2, "m16n8k16", "f16", 16),
        (3, "m16n8k16", "bf16", 16),
        (4, "m16n8k8 tf32", "tf32", 8),
        (5, "m16n8k32 e4m3", "e4m3", 32),
    ],
)
def test_mma(machine: Machine, kind: int, shape: str, element: str, depth: int) -> None:
    a, b, c = integers((16, depth), 1), integers((8, depth), 2), integers((16, 8), 3)
    check_mma(machine, kind, shape, element, a, b, c)


@pytest.mark.parametrize(("kind", "byte", "thread"), [(0, 0, 0), (1, 2, 1)])
def test_mma_of_scaled(machine: Machine, kind: int, byte: int, thread: int) -> None:
    """Another power of two for each row and column, and NaN for one row; other bytes and lanes hold NaN."""
    a, b, c = integers((16, 32), 1), integers((8, 32), 2), integers((16, 8), 3)
    rng, shape = np.random.default_rng(4), "m16n8k32 e4m3"
    scales, held = {}, {}
    for name, extent, lanes in (("a", 16, 2), ("b", 8, 1)):
        exponents = rng.integers(-8, 9, extent)
        bytes_ = np.full((32, 4), 255, np.uint8)
        count = np.arange(32) % 4 // lanes == thread
        bytes_[count, byte] = 127 + exponents[CUTE[f"m16n8k32 e4m3 scale of {name}"][count]]
        scales[name], held[f"scale_{name}"] = np.exp2(exponents), bytes_.view(np.uint32).ravel()
    lane_of_row_9 = 4 * 1 + 2 * thread + 1
    held["scale_a"].view(np.uint8)[4 * lane_of_row_9 + byte] = 255
    scales["a"][9] = np.nan
    places = CUTE[f"{shape} c"].reshape(32, 4)
    d = c.T.ravel()[places].astype(np.float32)
    machine.launch(
        "products_scaled", 32, 0,
        a=fragment(f"{shape} a", a.astype(FORMATS["e4m3"]), 32, 4),
        b=fragment(f"{shape} b", b.astype(FORMATS["e4m3"]), 32, 2),
        **held, d=d, kind=kind,
    )  # fmt: skip
    wanted = (a * scales["a"][:, None]) @ (b * scales["b"][:, None]).T + c
    np.testing.assert_array_equal(d, wanted.T.ravel()[places])


@pytest.mark.parametrize("small", ["a", "b"])
@pytest.mark.parametrize(("kind", "shape", "depth"), [(0, "m16n8k8", 8), (2, "m16n8k16", 16)])
def test_mma_of_subnormal_halves(machine: Machine, kind: int, shape: str, depth: int, small: str) -> None:
    """Codes of 4 bits are the lowest bits of halves; they are multiplied as exactly as any number."""
    a, b, c = integers((16, depth), 1), integers((8, depth), 2), integers((16, 8), 3)
    codes = np.random.default_rng(4).integers(0, 16, (a if small == "a" else b).shape) * 2.0**-24
    check_mma(machine, kind, shape, "f16", *((codes, b) if small == "a" else (a, codes)), c * 2.0**-24)


@pytest.mark.parametrize(("kind", "shape", "m", "depth"), [(0, "m8n8k4", 8, 4), (1, "m16n8k8", 16, 8)])
def test_mma_of_doubles(machine: Machine, kind: int, shape: str, m: int, depth: int) -> None:
    """Sums of integers of up to 51 bits: an accumulator that kept fewer would round them."""
    a, b, c = (integers(s, n).astype(np.float64) for n, s in enumerate(((m, depth), (8, depth), (m, 8)), 1))
    a, c = a * 2.0**24 + 1, c * 2.0**48 + 3
    b = b * 2.0**22 + 1
    held = {"a": np.zeros((32, 4)), "b": np.zeros((32, 2)), "d": np.full((32, 4), 7.0)}
    for name, matrix in (("a", a), ("b", b), ("d", c)):
        places = CUTE[f"{shape} f64 {'c' if name == 'd' else name}"].reshape(32, -1)
        held[name][:, : places.shape[1]] = matrix.T.ravel()[places]
    machine.launch("products_f64", 32, 0, **held, kind=kind)
    places = CUTE[f"{shape} f64 c"].reshape(32, -1)
    wanted = (a.astype(int) @ b.astype(int).T + c.astype(int)).astype(np.float64)
    np.testing.assert_array_equal(held["d"][:, : places.shape[1]], wanted.T.ravel()[places])
    assert (held["d"][:, places.shape[1] :] == 7).all()


def check_mma(
    machine: Machine, kind: int, shape: str, element: str, a: np.ndarray, b: np.ndarray, c: np.ndarray
) -> None:
    places = CUTE[f"{shape} c"].reshape(32, 4)
    d = c.T.ravel()[places].astype(np.float32)
    machine.launch(
        "products", 32, 0,
        a=fragment(f"{shape} a", a.astype(FORMATS[element]), 32, 4),
        b=fragment(f"{shape} b", b.astype(FORMATS[element]), 32, 2),
        d=d, kind=kind,
    )  # fmt: skip
    np.testing.assert_array_equal(d, (a @ b.T + c).T.ravel()[places])


def accumulator_places(n: int) -> np.ndarray:
    """Row and column of d[i] of each thread of a warpgroup, as prim/wgmma.cuh states it."""
    t, i = np.arange(128)[:, None], np.arange(n // 2)
    row = t // 32 * 16 + t % 32 // 4 + 8 * (i // 2 % 2)
    return row + 64 * (8 * (i // 4) + t % 4 * 2 + i % 2)


@pytest.mark.parametrize("n", [24, 40])
def test_accumulators_of_wgmma(n: int) -> None:
    np.testing.assert_array_equal(accumulator_places(n).ravel(), CUTE[f"m64n{n} c"])


def tile(
    matrix: np.ndarray, swizzle: int, contiguous_mn: bool, apart: int = 1
) -> tuple[np.ndarray, int, int]:
    """Bytes of shared memory that hold a matrix (rows, depth), with leading and stride of its descriptor.

    Along m or n patterns may lie `apart`, others between them.
    """
    size = matrix.dtype.itemsize
    if swizzle == 16:  # none: the first 16 bytes of all rows, then the second
        memory = np.zeros(32768, np.uint8)
        chunks = np.ascontiguousarray(matrix).view(np.uint8).reshape(len(matrix), 2, 16)
        memory[: chunks.size] = chunks.swapaxes(0, 1).ravel()
        return memory, 16 * len(matrix), 128
    width = swizzle // 2  # in 16-bit elements
    name = f"{'mn' if contiguous_mn else 'k'} {swizzle}"
    shape = (2 * width, 16) if contiguous_mn else (16, width)
    places = CUTE[name].reshape(shape)
    memory = np.zeros(32768, np.uint8)
    halves = np.ascontiguousarray(matrix).view(np.uint8).reshape(*matrix.shape, size)
    if contiguous_mn:
        period, leading, stride = 2 * width, int(places[width, 0]), int(places[0, 8])
        for (i, k), place in np.ndenumerate(places[:, : matrix.shape[1]]):
            for first in range(0, matrix.shape[0] - i, period):
                # CuTe orders patterns along m or n first within its tile; ours follow tile by tile.
                start = first // period * 16 * period * 2 + place + (apart - 1) * leading * (i >= width)
                memory[start : start + 2] = halves[first + i, k]
        assert matrix.shape[0] <= period
        return memory, apart * leading, stride
    for i in range(matrix.shape[0]):
        for k in range(matrix.shape[1]):
            byte = k * size
            start = places[i % 16, byte // 2] + byte % 2 + i // 16 * 16 * swizzle
            memory[start : start + size] = halves[i, k]
    return memory, 0, int(places[8, 0])


def run_wgmma(
    machine: Machine,
    n: int,
    element: str,
    a_from: str,
    trans_b: bool,
    swizzle: int,
    step: int,
    add: bool,
    apart: int = 1,
) -> None:
    kind = FORMATS[element]
    size = np.dtype(kind).itemsize
    depth, per_row = 32 // size, max(swizzle, 32) // size
    b_rows = min(n, swizzle) if trans_b else n  # of an MN-major tile: two patterns
    a, b = integers((64, per_row), 1), integers((b_rows, depth if trans_b else per_row), 2)
    c = integers((64, n), 3)
    used = slice(depth * step, depth * (step + 1))
    names = {"f16": "m64k16 a", "bf16": "m64k16 a", "e4m3": "m64k32 e4m3 a"}
    registers = fragment(names[element], a[:, used].astype(kind), 128, 4)
    if a_from == "mn":
        a_tile, a_leading, a_stride = tile(a[:, used].astype(kind), 64, True)
        a_start, a_swizzle = 0, 64
    else:
        a_tile, a_leading, a_stride = tile(a.astype(kind), swizzle, False)
        a_start, a_swizzle = 32 * step, swizzle
    b_tile, b_leading, b_stride = tile(b.astype(kind), swizzle, trans_b, apart)
    places = accumulator_places(n)
    d = np.ascontiguousarray(c.T.ravel()[places])
    machine.launch(
        "warpgroup_products", 128, 65536,
        registers=registers, a=a_tile.view(np.uint32), b=b_tile.view(np.uint32), d=d,
        n=n, format=list(FORMATS).index(element), from_registers=int(a_from == "registers"),
        trans_a=int(a_from == "mn"), trans_b=int(trans_b), accumulate=int(add),
        a_start=a_start, a_leading=a_leading, a_stride=a_stride, a_swizzle=a_swizzle,
        b_start=0 if trans_b else 32 * step, b_leading=b_leading, b_stride=b_stride, b_swizzle=swizzle,
    )  # fmt: skip
    wanted = a[:, used] @ (b if trans_b else b[:, used]).T + c * add
    np.testing.assert_array_equal(d, wanted.T.ravel()[places])


@pytest.mark.parametrize("element", ["f16", "bf16", "e4m3"])
@pytest.mark.parametrize("a_from", ["tile", "registers"])
@pytest.mark.parametrize(
    ("n", "swizzle", "step"), [(8, 128, 3), (40, 64, 1), (24, 32, 0), (256, 128, 2), (40, 16, 0)]
)
def test_wgmma(machine: Machine, n: int, element: str, a_from: str, swizzle: int, step: int) -> None:
    if n * swizzle > 32768 or 64 * swizzle > 32768:
        pytest.fail("the tile does not fit the kernel's shared memory")
    run_wgmma(machine, n, element, a_from, False, swizzle, step, add=step != 1)


@pytest.mark.parametrize("element", ["f16", "bf16"])
@pytest.mark.parametrize("a_from", ["tile", "registers", "mn"])
@pytest.mark.parametrize(("n", "swizzle"), [(128, 128), (40, 64), (24, 32)])
def test_wgmma_transposed_b(machine: Machine, n: int, element: str, a_from: str, swizzle: int) -> None:
    run_wgmma(machine, n, element, a_from, True, swizzle, 0, add=True)


@pytest.mark.parametrize("a_from", ["registers", "mn"])
def test_wgmma_of_every_other_block(machine: Machine, a_from: str) -> None:
    """Half of dQ's columns at head dim 192: the leading distance skips blocks of the other warpgroup."""
    run_wgmma(machine, 40, "f16", a_from, True, 64, 0, add=True, apart=4)


# ---- bulk copies


def swizzled(address: np.ndarray, swizzle: int) -> np.ndarray:
    return address ^ (address >> 7 & swizzle // 16 - 1) << 4 if swizzle else address


# Corners that a GPU takes: the first coordinate a multiple of 16 bytes, none of a store negative.
BOXES = [
    ("float16", (64, 150), (64, 8), (8, -2), 0),
    ("float16", (64, 150), (64, 8), (-8, 2), 0),
    ("float16", (64, 150), (64, 8), (8, 146), 0),
    ("float16", (64, 10, 5, 3), (64, 8, 2, 1), (0, 6, 4, 2), 128),
    ("bfloat16", (64, 10, 5, 3), (32, 8, 2, 1), (-8, -3, -1, 1), 64),
    ("bfloat16", (64, 10, 5, 3), (32, 8, 2, 1), (40, 7, 4, 1), 64),
    ("float32", (48, 9, 7), (8, 16, 3), (44, 2, 5), 32),
    ("uint8", (128, 20, 3, 2, 2), (128, 8, 2, 1, 2), (0, 15, 2, 1, 1), 128),
    ("float32", (40, 9), (40, 4), (-4, 7), 0),
    ("float32", (40, 9), (40, 4), (36, 7), 0),
    # A box larger than the tensor, and one that begins beyond it: head dims below their class.
    ("float16", (40, 5), (64, 8), (0, 0), 128),
    ("float16", (40, 5), (64, 8), (64, 0), 128),
]  # fmt: skip
# The same of rows (query, head of a group): axes in memory are batch, row, group, head of it, columns, and of
# four heads three exist; and one axis of length 1 whose stride means nothing.
GROUPED_BOXES = [
    ("float16", (64, 3, 10, 2, 2), (64, 4, 8, 1, 1), (0, 0, 6, 1, 1), 128),
    ("bfloat16", (40, 3, 10, 2, 1), (32, 4, 4, 1, 1), (32, 0, 4, 1, 0), 64),
    ("float16", (64, 80, 3, 2, 1), (64, 16, 1, 1, 1), (0, 64, 2, 1, 0), 128),
]


ORDERED_BOXES = [(*case, tuple(range(len(case[1])))) for case in BOXES] + [
    (*case, (0, 2, 1, 3, 4)) for case in GROUPED_BOXES
]


def copy_box(machine: Machine, tensor: Map, corner: tuple[int, ...], memory: np.ndarray, store: bool) -> None:
    """Load the box at `corner` into `memory`, as shared memory has it, or store it from there."""
    machine.launch(
        "boxes", 64, 17 * 1024, map=tensor, bytes=memory, linear=np.zeros(192, np.float32),
        mode=int(store), rank=len(corner), box_bytes=int(np.prod(tensor.box)) * tensor.array.itemsize,
        **{f"c{i}": c for i, c in enumerate((*corner, 0, 0, 0)[:5])},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("store", "dtype", "shape", "box", "corner", "swizzle", "order"),
    [(False, *case) for case in ORDERED_BOXES]
    + [(True, *case) for case in ORDERED_BOXES if min(case[3]) >= 0],
)
def test_boxes(
    machine: Machine, store: bool, dtype: str, shape, box, corner, swizzle: int, order: tuple[int, ...]
) -> None:
    """order: of the axes in memory, outermost first."""
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    rng = np.random.default_rng(5)
    memory_of_tensor = aligned(tuple(shape[::-1][axis] for axis in order), kind)
    tensor = memory_of_tensor.transpose(np.argsort(order))
    tensor[...] = rng.integers(0, 100, tensor.shape)
    bytes_apart = [16 if n == 1 else s for n, s in zip(tensor.shape, tensor.strides, strict=True)]
    described = Map(memory_of_tensor, dtype, shape, tuple(bytes_apart[-2::-1]), box, swizzle)
    count = int(np.prod(box))
    where = swizzled(np.arange(count) * kind.itemsize, swizzle)
    memory = np.zeros(16384, np.uint8)
    content = rng.integers(0, 100, box[::-1]).astype(kind)
    cells = memory[: count * kind.itemsize].view(kind)
    if store:
        cells[where // kind.itemsize] = content.ravel()
    ranges = [np.arange(n) + c for n, c in zip(box[::-1], corner[::-1], strict=True)]
    index = np.meshgrid(*ranges, indexing="ij")
    inside = np.all([(i >= 0) & (i < n) for i, n in zip(index, tensor.shape, strict=False)], axis=0)
    wanted = tensor.copy()
    before = tensor.copy()
    copy_box(machine, described, corner, memory, store)
    if store:
        wanted[tuple(i[inside] for i in index)] = content[inside]
        np.testing.assert_array_equal(tensor.view(np.uint8), wanted.view(np.uint8))
    else:
        loaded = np.zeros(box[::-1], kind)
        loaded[inside] = before[tuple(i[inside] for i in index)]
        np.testing.assert_array_equal(
            cells[where // kind.itemsize].astype(float), loaded.ravel().astype(float)
        )


def test_bulk_copies(machine: Machine) -> None:
    linear = aligned((192,), np.float32)
    linear[:64] = np.arange(64)
    linear[64:] = 100
    empty = bytes(128)
    machine.launch("boxes", 64, 17 * 1024, map=empty, bytes=np.zeros(4, np.uint32), linear=linear, mode=2,
           rank=0, box_bytes=0, c0=0, c1=0, c2=0, c3=0, c4=0)  # fmt: skip
    np.testing.assert_array_equal(linear[64:128], 100 + 2 * np.arange(64))
    np.testing.assert_array_equal(linear[128:], np.arange(64))


# ---- blocks that take turns


def test_turns(machine: Machine) -> None:
    blocks = 40
    x = aligned((blocks, 4), np.float32)
    x[...] = np.random.default_rng(7).standard_normal(x.shape) * 1000 ** np.arange(4)
    counters = [np.zeros(1, np.uint32) for _ in range(3)]
    sums = aligned((4,), np.float32)
    numbers, turns, chain = counters
    machine.launch("turns", 1, 16, blocks, numbers=numbers, turns=turns, chain=chain, sums=sums, x=x)
    expected, wanted = np.zeros(4, np.float32), 0
    for number in range(blocks):
        expected += x[number]
        wanted = (3 * wanted + number) % 2**32
    np.testing.assert_array_equal(sums, expected)
    assert (numbers[0], turns[0], chain[0]) == (blocks, blocks, wanted)
