"""What is compiled: architectures, variants and tiles as tables. Adding a tile is adding a row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from . import flash_tiles
from .errors import Unsupported

__all__ = ["ARCHITECTURES", "Arch", "Variant", "architecture", "variants"]

# ---------------------------------------------------------------------------------------------- architectures


class Arch(NamedTuple):
    """One row of the architecture table.

    Attributes
    ----------
    capability : int
        Compute capability x 10, e.g. 86.
    shared_bytes : int
        Most dynamic shared memory of one block, after opting in.
    multiprocessors : int
        Of a typical GPU of this kind, for plans made without one.
    target : str
        What is compiled for it, and for higher minors of the same major that have no row.
    kernels : tuple of str
        Kernel families that are compiled for it.
    """

    capability: int
    shared_bytes: int
    multiprocessors: int
    target: str
    families: tuple[str, ...]

    @property
    def name(self) -> str:
        """For people: sm_86."""
        return f"sm_{self.capability}"


_KB = 1024
# capability, shared memory of a block, multiprocessors, compiled as, families
ARCHITECTURES = (
    Arch(61, 48 * _KB, 28, "sm_61", ("simple",)),
    Arch(70, 96 * _KB, 80, "sm_70", ("simple",)),
    Arch(75, 64 * _KB, 40, "sm_75", ("simple", "flash")),
    Arch(80, 163 * _KB, 108, "sm_80", ("simple", "flash")),
    Arch(86, 99 * _KB, 84, "sm_80", ("simple", "flash")),
    Arch(87, 163 * _KB, 16, "sm_80", ("simple", "flash")),
    Arch(89, 99 * _KB, 128, "sm_89", ("simple", "flash")),
    Arch(90, 227 * _KB, 132, "sm_90a", ("simple", "flash")),
    Arch(100, 227 * _KB, 148, "sm_100", ("simple", "flash")),
    Arch(120, 99 * _KB, 170, "sm_120", ("simple", "flash")),
)


@lru_cache(maxsize=64)
def architecture(name: str) -> Arch:
    """The row for an architecture such as "sm_86" or "sm_90a".

    A higher minor of a known major takes the highest row at or below it.

    Raises
    ------
    Unsupported
        An architecture that nothing is compiled for.
    """
    digits = name.removeprefix("sm_").rstrip("af")
    if digits.isdigit():
        capability = int(digits)
        rows = [
            row
            for row in ARCHITECTURES
            if row.capability // 10 == capability // 10 and row.capability <= capability
        ]
        if rows:
            return rows[-1]._replace(capability=capability)
    known = ", ".join(row.name for row in ARCHITECTURES)
    raise Unsupported(
        f"no kernel is compiled for {name!r}.",
        reasons=[f"listed: {known}, and higher minors of these majors"],
        hint="python -m cupy_flash info, or NumPy arrays, which need no GPU",
    )


# ---------------------------------------------------------------------------------------------- variants

# What products are computed in, as variants are named; tf32x3 and tf32 are for float32 inputs.
ELEMENTS = {"f16": "__half", "bf16": "__nv_bfloat16", "f32": "float", "f64": "double", "tf32x3": "float",
            "tf32": "float"}  # fmt: skip
ITEM = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8, "tf32x3": 4, "tf32": 4}
SHORT = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}

# kernel -> (source, pass): one .cu holds the passes of one algorithm.
KERNELS = {
    "simple_forward": ("simple_forward.cu", None),
    "simple_backward_delta": ("simple_backward.cu", "delta"),
    "simple_backward_dq": ("simple_backward.cu", "dq"),
    "simple_backward_dkv": ("simple_backward.cu", "dkv"),
    "simple_backward_dbias": ("simple_backward.cu", "dbias"),
    "simple_backward_dsinks": ("simple_backward.cu", "dsinks"),
    "flash_forward": ("flash_forward.cu", None),
    "flash_backward_delta": ("flash_backward.cu", "delta"),
    "flash_backward_dqkv": ("flash_backward.cu", "dqkv"),
    "flash_backward_dq_convert": ("flash_backward.cu", "dq_convert"),
    "flash_backward_dkv": ("flash_backward.cu", "dkv"),
    "flash_backward_dq": ("flash_backward.cu", "dq"),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """One compilation of one .cu: everything that changes registers, loops or shared memory.

    Attributes
    ----------
    kernel : str
        A key of `KERNELS`.
    dtype : {"f16", "bf16", "f32", "f64", "tf32x3", "tf32"}
        What its products are computed in.
    head_dim, head_dim_v : int
        Class: the largest head dims of q and k, and of v, that it takes.
    tile : (int, int)
        Queries and keys of a block.
    threads : int
        Of a block.
    shared_bytes : int
        Dynamic shared memory; the kernel asserts that it is the size of its storage.
    mask : {"band", "any"}
        What the inner loop can apply.
    macros : tuple of (str, str)
        What else its family decides at compile time.
    allowed_spill_bytes : int
        What the build tolerates.
    """

    kernel: str
    dtype: str
    head_dim: int
    head_dim_v: int
    tile: tuple[int, int]
    threads: int
    shared_bytes: int
    mask: str = "any"
    macros: tuple[tuple[str, str], ...] = ()
    allowed_spill_bytes: int = 0

    @property
    def name(self) -> str:
        """Entry symbol, cubin file, manifest key, profiler row, test id and benchmark label."""
        m, n = self.tile
        dims = f"d{self.head_dim}" + (f"v{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        return f"{self.kernel}_{self.dtype}_{dims}_{self.mask}_{m}x{n}"

    @property
    def source(self) -> str:
        """The .cu file that it is compiled from."""
        return KERNELS[self.kernel][0]

    def defines(self) -> dict[str, str]:
        """The macros that make this variant out of its source."""
        defines = {
            "CF_ENTRY": self.name,
            "CF_ELEMENT": ELEMENTS[self.dtype],
            "CF_HEAD_DIM": str(self.head_dim),
            "CF_HEAD_DIM_V": str(self.head_dim_v),
            "CF_MASK": self.mask,
            "CF_BLOCK_M": str(self.tile[0]),
            "CF_BLOCK_N": str(self.tile[1]),
            "CF_THREADS": str(self.threads),
            "CF_SHARED_BYTES": str(self.shared_bytes),
            **dict(self.macros),
        }
        step = KERNELS[self.kernel][1]
        if step:
            defines["CF_PASS"] = step
        return defines


# ---------------------------------------------------------------------------------------------- simple family

SIMPLE_THREADS = 256
SIMPLE_HEAD_DIMS = (64, 128, 256, 512)

# (queries, keys, shared bytes) for each head dim class, for float and for double accumulators; a single entry
# serves every head dim. For any architecture and any strides; at most 48 KiB, so that nothing has to opt in.
_SIMPLE_TILES: dict[str, tuple[tuple[tuple[int, int, int], ...], tuple[tuple[int, int, int], ...]]] = {
    "simple_forward": (
        ((64, 64, 35840), (64, 64, 35840), (64, 64, 35840), (32, 64, 25088)),
        ((64, 32, 33792), (64, 32, 33792), (32, 32, 25088), (16, 32, 20736)),
    ),
    "simple_backward_delta": (((64, 1, 0),), ((64, 1, 0),)),
    "simple_backward_dq": (
        ((64, 64, 35840), (64, 64, 35840), (64, 64, 35840), (32, 64, 25088)),
        ((64, 32, 33792), (64, 32, 33792), (32, 32, 25088), (16, 32, 20736)),
    ),
    "simple_backward_dkv": (
        ((64, 64, 35840), (64, 32, 25088), (64, 32, 25088), (64, 16, 20736)),
        ((32, 64, 33792), (32, 32, 25088), (32, 16, 20736), (32, 16, 20736)),
    ),
    "simple_backward_dbias": (((64, 64, 35840),), ((64, 32, 33792),)),
    "simple_backward_dsinks": (((1, 1, 1024),), ((1, 1, 2048),)),
}


def simple(kernel: str, dtype: str, head_dim: int) -> Variant:
    """The simple kernel that takes a head dim, which is at most 512."""
    rows = _SIMPLE_TILES[kernel][dtype == "f64"]
    classes = SIMPLE_HEAD_DIMS[-len(rows) :]
    row = next(n for n, largest in enumerate(classes) if head_dim <= largest)
    m, n, shared_bytes = rows[row]
    return Variant(kernel, dtype, classes[row], classes[row], (m, n), SIMPLE_THREADS, shared_bytes)


# ---------------------------------------------------------------------------------------------- flash family


def _column(arch: Arch) -> int:
    """Column of the tile tables for an architecture."""
    if arch.capability < 80:
        return flash_tiles.TURING
    return flash_tiles.LARGE if arch.shared_bytes >= 163 * _KB else flash_tiles.MEDIUM


def flash_classes(head_dim: int, head_dim_v: int) -> tuple[int, int] | None:
    """The smallest classes that take these head dims; None if there are none."""
    fitting = ((d, v) for d, v in flash_tiles.HEAD_DIMS if head_dim <= d and head_dim_v <= v)
    return next(fitting, None)


def _flash_macros(dtype: str, arch: Arch, slots: int, min_blocks: int) -> tuple[tuple[str, str], ...]:
    return (
        ("CF_PRODUCTS", "3" if dtype == "tf32x3" else "1"),
        ("CF_TURING", str(int(arch.capability < 80))),
        ("CF_SLOTS", str(slots)),
        ("CF_MIN_BLOCKS", str(min_blocks)),
    )


def _kind(dtype: str) -> str:
    return "16-bit" if ITEM[dtype] == 2 else "tf32"


def flash_forward(dtype: str, classes: tuple[int, int], mask: str, arch: Arch) -> Variant | None:
    """The tensor-core forward kernel of these classes; None if the architecture has none."""
    if arch.capability < 80 and dtype != "f16":
        return None
    rows = flash_tiles.FORWARD[_kind(dtype), mask]
    cell = rows[flash_tiles.HEAD_DIMS.index(classes)][_column(arch)]
    if cell is None:
        return None
    elements = cell.m * classes[0] + 2 * cell.n * max(classes)
    macros = (
        *_flash_macros(dtype, arch, 2, cell.min_blocks),
        ("CF_Q_IN_REGISTERS", str(cell.q_in_registers)),
    )
    # 128 bytes: the ring of K and V begins on a line of its own.
    shared_bytes = ITEM[dtype] * elements + 128
    spills = flash_tiles.SPILLS.get((dtype, classes), 0)
    tile = (cell.m, cell.n)
    return Variant("flash_forward", dtype, *classes, tile, cell.threads, shared_bytes, mask, macros, spills)


def flash_backward(step: str, dtype: str, classes: tuple[int, int], mask: str, arch: Arch) -> Variant | None:
    """A pass of the tensor-core backward kernel; None if the architecture has none for these classes.

    Parameters
    ----------
    step : {"delta", "dqkv", "dq_convert", "dkv", "dq"}
        delta and dq_convert share tile and threads with the dqkv of the same mask.
    dtype, classes, arch
        As in `flash_forward`.
    mask : {"band", "any"}
        For float32 both are served by "any".
    """
    if arch.capability < 80 and dtype != "f16":
        return None
    kind = _kind(dtype)
    mask = "any" if kind == "tf32" else mask
    without_scores = step in ("delta", "dq_convert")
    rows = flash_tiles.BACKWARD[kind, "dqkv" if without_scores else step, mask]
    cell = rows[flash_tiles.HEAD_DIMS.index(classes)][_column(arch)]
    if cell is None:
        return None
    (m, n, threads, slots), (d, v) = cell, classes
    if without_scores:
        elements, mask = 0, "band"
    elif step == "dq":
        elements = m * (d + v) + 2 * n * max(d, v)
    else:
        slots_q, slots_do = (2 if slots else 1), (2 if slots == 2 else 1)
        elements = n * (d + v) + slots_q * m * d + slots_do * m * v + 2 * m * n
    macros = _flash_macros(dtype, arch, slots, 1)
    kernel, shared_bytes = f"flash_backward_{step}", ITEM[dtype] * elements
    spills = flash_tiles.SPILLS.get((dtype, classes), 0)
    return Variant(kernel, dtype, d, v, (m, n), threads, shared_bytes, mask, macros, spills)


# ---------------------------------------------------------------------------------------------- everything


@lru_cache(maxsize=64)
def variants(target: str) -> tuple[Variant, ...]:
    """Everything that is compiled for a target such as "sm_80" or "sm_90a"."""
    compiled_as = architecture(target).target
    rows = [row for row in ARCHITECTURES if row.target == compiled_as]
    return tuple(dict.fromkeys(variant for row in rows for variant in _variants_of(row)))


def _variants_of(arch: Arch) -> Iterator[Variant]:
    for kernel in _SIMPLE_TILES:
        for dtype in SHORT.values():
            for head_dim in SIMPLE_HEAD_DIMS:
                yield simple(kernel, dtype, head_dim)
    if "flash" in arch.families:
        dtypes = ("f16", "bf16", "tf32x3", "tf32")
        for dtype, classes, mask in product(dtypes, flash_tiles.HEAD_DIMS, ("band", "any")):
            steps = ("delta", "dqkv", "dq_convert", "dkv", "dq")
            backward = (flash_backward(step, dtype, classes, mask, arch) for step in steps)
            for variant in (flash_forward(dtype, classes, mask, arch), *backward):
                if variant is not None:
                    yield variant
