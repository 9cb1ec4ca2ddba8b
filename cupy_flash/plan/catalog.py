"""The table of architectures, and `Variant`, one compilation of a kernel."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ..errors import UnsupportedError
from ..program.graph import Body

__all__ = ["ARCHITECTURES", "ELEMENTS", "SAME_BITS", "SHORT", "Arch", "Variant", "architecture"]

# ---------------------------------------------------------------------------------------------- architectures


class Arch(NamedTuple):
    """One row of the architecture table."""

    capability: int  # compute capability x 10, e.g. 86
    shared_bytes: int  # largest dynamic shared memory of a block, after opting in
    multiprocessors: int  # multiprocessors of a typical GPU, for plans made without a GPU
    target: str  # compilation target, also for higher minor versions of the same major that have no row
    families: tuple[str, ...]  # kernel families that run on this architecture
    # Families compiled for `own_target`, because they need features that `target` lacks.
    own: tuple[str, ...] = ()
    own_target: str = ""  # their compilation target; "" without such families

    @property
    def name(self) -> str:
        """The name, such as sm_86."""
        return f"sm_{self.capability}"

    @property
    def targets(self) -> tuple[str, ...]:
        """The compilation targets of all its families."""
        return (self.target, self.own_target) if self.own else (self.target,)

    def target_of(self, family: str) -> str:
        """The compilation target of a family."""
        return self.own_target if family in self.own else self.target


_KB = 1024
# capability, shared memory per block, multiprocessors, target, families, families with another target, that
# target
ARCHITECTURES = (
    Arch(61, 48 * _KB, 28, "sm_61", ("simple", "cached")),
    Arch(70, 96 * _KB, 80, "sm_70", ("simple", "cached")),
    Arch(75, 64 * _KB, 40, "sm_75", ("simple", "flash", "decode", "cached")),
    Arch(80, 163 * _KB, 108, "sm_80", ("simple", "flash", "decode", "cached")),
    Arch(86, 99 * _KB, 84, "sm_86", ("simple", "flash", "decode", "cached")),
    Arch(87, 163 * _KB, 16, "sm_80", ("simple", "flash", "decode", "cached")),
    Arch(89, 99 * _KB, 128, "sm_86", ("simple", "flash", "fp8", "decode", "cached"), ("fp8",), "sm_89"),
    Arch(90, 227 * _KB, 132, "sm_90a", ("simple", "flash", "hopper", "decode", "cached")),
    Arch(100, 227 * _KB, 148, "sm_100", ("simple", "flash", "decode", "cached")),
    # why f: block-scaled mma is a family-specific feature; cubins for sm_120f run on sm_120 and sm_121
    Arch(120, 99 * _KB, 170, "sm_120", ("simple", "flash", "fp8", "decode", "cached"), ("fp8",), "sm_120f"),
)


# Lower-case words in the names of GPUs, by capability.
_CALLED = {
    61: "pascal p4 p40 1050 1060 1070 1080",
    70: "volta v100",
    75: "turing t4 2060 2070 2080",
    80: "ampere a100 a30 a800",
    86: "a2 a10 a16 a40 a4000 a5000 a6000 3050 3060 3070 3080 3090",
    87: "orin",
    89: "ada l4 l20 l40 l40s 4060 4070 4080 4090",
    90: "hopper h100 h200 h20 h800 gh200",
    100: "b100 b200 gb200",
    103: "b300 gb300",
    120: "5060 5070 5080 5090",
    121: "gb10 spark",
}


def _row(capability: int) -> Arch | None:
    """The row for a compute capability x 10; None if nothing is compiled for it."""
    major = [row for row in ARCHITECTURES if row.capability // 10 == capability // 10]
    rows = [row for row in major if row.capability <= capability]
    return rows[-1]._replace(capability=capability) if rows else None


def _suggestion(name: str) -> str:
    """The architecture that a user probably means: "sm_90" for "H100", "sm90" or "9.0"; else ""."""
    number = re.fullmatch(r"(?:sm|compute)?_?(\d{1,2})\.?(\d)[af]?", name.strip().lower())
    words = {word.removesuffix("ti") for word in re.split(r"[^a-z0-9]+", name.lower())}
    found = [capability for capability, called in _CALLED.items() if words & {*called.split()}]
    if number:
        found = [int(number[1] + number[2])]
    row = _row(found[0]) if found else None
    return row.name if row else ""


@lru_cache(maxsize=64)
def architecture(name: str) -> Arch:
    """The table row for an architecture such as "sm_86" or "sm_90a".

    A minor version without a row uses the highest row of its major below it.
    """
    digits = name.removeprefix("sm_").rstrip("af")
    row = _row(int(digits)) if digits.isdigit() else None
    if row is not None:
        return row
    known = ", ".join(row.name for row in ARCHITECTURES)
    meant = _suggestion(name)
    raise UnsupportedError(
        f"no kernel is compiled for {name!r}.",
        reasons=[f"listed: {known}, and higher minors of these majors"],
        hint=f'arch="{meant}"' if meant else "python -m cupy_flash info, or NumPy arrays, which need no GPU",
    )


# ---------------------------------------------------------------------------------------------- variants

# Names of product types in variants -> CUDA element type. tf32x3, tf32 and f16x3 are for float32 inputs;
# ieee32 and ieee64 use only operations that round alike on every architecture, in a fixed order.
ELEMENTS = {"f16": "__half", "bf16": "__nv_bfloat16", "f32": "float", "f64": "double", "tf32x3": "float",
            "tf32": "float", "f16x3": "float", "e4m3": "E4M3", "ieee32": "float",
            "ieee64": "double"}  # fmt: skip
SAME_BITS = {"float32": "ieee32", "float64": "ieee64"}
SHORT = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}


class Box(NamedTuple):
    """The tile that a kernel copies by TMA from one tensor at a time."""

    view: str  # name of the tensor in abi.cuh
    # Extents of the tile in shared memory; see hopper/swizzled_tile.cuh.
    rows: int
    columns: int
    # Whether the tensor map has an axis for the heads of a group, see `Launch.head_bits`.
    grouped: bool = False
    # {0, 64, 128}: bytes of a column block (swizzle span); 0: the widest that divides the columns.
    span: int = 0


@dataclass(frozen=True, slots=True)
class Variant:
    """One compilation of one .cu file: everything that changes registers, loops or shared memory."""

    source: str  # the .cu file
    step: str  # the pass of the algorithm, if the .cu file has several; else ""
    params: str  # the params struct, in abi.cuh
    # {"f16", "bf16", "f32", "f64", "tf32x3", "tf32", "f16x3", "e4m3", "ieee32", "ieee64"}: type of the
    # matrix products, see ELEMENTS.
    dtype: str
    # Largest supported head dims of q and k, and of v.
    head_dim: int
    head_dim_v: int
    tile: tuple[int, int]  # queries and keys per thread block
    threads: int  # threads per block
    # Dynamic shared memory; the kernel asserts that it equals the size of its storage struct.
    shared_bytes: int
    # Masks that the inner loop supports. "band": causal and window; "spans": also spans and blocks; "any":
    # also the masks and score options that the tables of the family list.
    mask: str = "any"
    macros: tuple[tuple[str, str], ...] = ()  # further macros set by the family
    # Spilled bytes that the build tolerates, by target: (("sm_86", 8),). Other targets must not spill.
    allowed_spills: tuple[tuple[str, int], ...] = ()
    # Number of wgmma instructions that the SASS must have, by shape: (("64x128x16", 32),). If not empty,
    # the build also checks that no registers are overwritten during wgmma.
    products: tuple[tuple[str, int], ...] = ()
    covered: int = 0  # number of exponentials that must overlap with wgmma of the same warpgroup
    # Limits for one iteration of an mma.sync main loop: instructions between two products, exponentials
    # among them, and barriers. All 0: not checked.
    stall_limits: tuple[int, int, int] = (0, 0, 0)
    # Tensors accessed through tensor maps, which precede the params in this order.
    boxes: tuple[Box, ...] = ()
    function: Body | None = None  # the score function that is compiled in; None without one

    @property
    def kernel(self) -> str:
        """Source and step joined, such as flash_backward_dkv."""
        stem = self.source.removesuffix(".cu")
        return f"{stem}_{self.step}" if self.step else stem

    @property
    def name(self) -> str:
        """Entry symbol, and name of cubin file, manifest key, profiler row, test id and benchmark label."""
        m, n = self.tile
        dims = f"d{self.head_dim}" + (f"v{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        function = f"_{self.function.digest[:12]}" if self.function else ""
        return f"{self.kernel}_{self.dtype}_{dims}_{self.mask}_{m}x{n}{function}"

    def allowed_spill_bytes(self, target: str) -> int:
        """The spill limit for a target; a target without a row has the limit of the row that it uses."""
        return dict(self.allowed_spills).get(architecture(target).target, 0)

    def defines(self) -> dict[str, str]:
        """The macros that compile this variant from its source."""
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
        if self.dtype in SAME_BITS.values():
            defines["CF_SAME_BITS"] = "1"
        if self.step:
            defines["CF_PASS"] = self.step
        if self.function:
            # why at least 1: an array in a C++ struct cannot be empty.
            defines["CF_FUNCTION"] = str(max(1, len(self.function.arguments)))
        return defines
