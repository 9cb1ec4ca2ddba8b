"""What arithmetic instructions mean, against Python's integers, fractions and NumPy: a second opinion.

One kernel has a row for each: it loads 64-bit operands, executes, and stores 64 bits. Expectations are
written after the PTX ISA's prose, not after the runtime. test_primitives has what moves data and waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from cupy_flash.device import simulator
from tests.simulator.ptx import toolchain
from tests.simulator.units import SIMULATED, Unit, pack

pytestmark = SIMULATED


class Row(NamedTuple):
    """An instruction on registers of these types, and its meaning on what `as_python` makes of them."""

    opcode: str
    types: str  # of the result and of the operands
    means: Callable[..., Any]
    suffix: str = ""  # operands that are constants


def signed(x: int, bits: int) -> int:
    return (x ^ 1 << bits - 1) - (1 << bits - 1)


def as_python(bits: int, t: str) -> Any:
    """The low bits of an operand as a number."""
    width = int(t.lstrip("busf"))
    bits &= (1 << width) - 1
    if t[0] == "f":
        return np.array([bits], f"u{width // 8}").view(f"f{width // 8}")[0]
    return signed(bits, width) if t[0] == "s" else bits


def as_bits(x: Any, t: str) -> int:
    width = int(t.lstrip("busf"))
    if t[0] == "f":
        return int(np.array([x], f"f{width // 8}").view(f"u{width // 8}")[0])
    return int(x) % (1 << width)


def bits_of(x: Any) -> int:
    return as_bits(x, f"f{x.itemsize * 8}")


def truncated(a: int, b: int) -> int:
    return int(Fraction(a, b))


def byte_of(a: int, b: int, name: int) -> int:
    byte = (b << 32 | a) >> 8 * (name & 7) & 255
    return (255 if byte & 128 else 0) if name & 8 else byte


def field(x: int, position: int, length: int, width: int) -> str:
    """The binary digits of a field, the lowest first; beyond the end there are none."""
    digits = f"{x % (1 << width):0{width}b}"[::-1]
    return digits[position : position + length]


def bfe(a: int, position: int, length: int, width: int, is_signed: bool) -> int:
    position, length = position & 255, length & 255
    if length == 0:
        return 0
    digits = f"{a % (1 << width):0{width}b}"[::-1]
    sign = digits[min(position + length - 1, width - 1)] if is_signed else "0"
    taken = digits[position : position + length].ljust(min(length, width), sign)
    return int(taken.ljust(width, sign)[::-1], 2)


def bfi(a: int, b: int, position: int, length: int, width: int) -> int:
    position, length = position & 255, length & 255
    to = list(f"{b:0{width}b}"[::-1])
    for k, digit in enumerate(f"{a:0{width}b}"[::-1][:length]):
        if position + k < width:
            to[position + k] = digit
    return int("".join(to)[::-1], 2)


def lesser(a: Any, b: Any) -> Any:
    if np.isnan(a) or np.isnan(b):
        return b if np.isnan(a) else a
    return min((a, b), key=lambda x: (x, not np.signbit(x)))


def whole(x: Any, t: str, rounding: Callable[[Any], Any]) -> int:
    """A float to an integer: NaN is 0, what is outside is the nearest."""
    width = int(t[1:])
    low, high = (-(1 << width - 1), (1 << width - 1) - 1) if t[0] == "s" else (0, (1 << width) - 1)
    if np.isnan(x):
        return 0
    return high if x == np.inf else low if x == -np.inf else min(max(int(rounding(x)), low), high)


def fma(a: Any, b: Any, c: Any) -> Any:
    if not all(map(np.isfinite, (a, b, c))):
        return np.float32(np.float64(a) * np.float64(b) + np.float64(c))
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    return rounded(exact) if exact else np.float32(a * b + c)


def rounded(exact: Fraction) -> Any:
    """To the nearest float32, ties to even."""
    near = np.float32(float(exact))
    around = [near, np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf))]
    finite = [x for x in around if np.isfinite(x)]
    if not np.isfinite(near):
        return near
    return min(finite, key=lambda x: (abs(Fraction(float(x)) - exact), bits_of(x) & 1))


def half(x: Any, kind: Any) -> int:
    if np.isnan(x):
        return 0x7FFF  # the canonical one
    return int(np.asarray(x).astype(kind).view(np.uint16))


E4M3 = ml_dtypes.float8_e4m3fn


def e4m3(x: Any) -> int:
    clipped = np.clip(x, -448, 448) if not np.isnan(x) else x
    return int(np.asarray(clipped, np.float32).astype(E4M3).view(np.uint8))


ROWS = [
    Row("add.s64", "u64 u64 u64", lambda a, b: a + b),
    Row("sub.s32", "u32 u32 u32", lambda a, b: a - b),
    Row("mul.lo.s32", "u32 s32 s32", lambda a, b: a * b),
    Row("mul.lo.s64", "u64 s64 s64", lambda a, b: a * b),
    Row("mul.hi.s32", "u32 s32 s32", lambda a, b: a * b >> 32),
    Row("mul.hi.u32", "u32 u32 u32", lambda a, b: a * b >> 32),
    Row("mul.hi.u64", "u64 u64 u64", lambda a, b: a * b >> 64),
    Row("mul.wide.s32", "u64 s32 s32", lambda a, b: a * b),
    Row("mul.wide.u32", "u64 u32 u32", lambda a, b: a * b),
    Row("mul.wide.u16", "u32 u16 u16", lambda a, b: a * b),
    Row("mad.lo.s32", "u32 s32 s32 s32", lambda a, b, c: a * b + c),
    Row("mad.wide.s32", "u64 s32 s32 s64", lambda a, b, c: a * b + c),
    Row("div.s32", "s32 s32 s32", lambda a, b: truncated(a, b or 1)),
    Row("rem.s32", "s32 s32 s32", lambda a, b: a - (b or 1) * truncated(a, b or 1)),
    Row("div.u64", "u64 u64 u64", lambda a, b: a // (b or 1)),
    Row("neg.s32", "s32 s32", lambda a: -a),
    Row("abs.s64", "s64 s64", abs),
    Row("not.b32", "u32 u32", lambda a: ~a),
    Row("min.s32", "s32 s32 s32", min),
    Row("max.u64", "u64 u64 u64", max),
    Row("xor.b64", "u64 u64 u64", lambda a, b: a ^ b),
    Row("shl.b32", "u32 u32 u32", lambda a, n: a << n if n < 32 else 0),
    Row("shr.u64", "u64 u64 u32", lambda a, n: a >> n if n < 64 else 0),
    Row("shr.s32", "s32 s32 u32", lambda a, n: a >> min(n, 31)),
    Row("shf.l.wrap.b32", "u32 u32 u32 u32", lambda a, b, n: ((b << 32 | a) << (n & 31)) >> 32),
    Row("shf.r.clamp.b32", "u32 u32 u32 u32", lambda a, b, n: (b << 32 | a) >> min(n, 32)),
    Row("bfe.u32", "u32 u32 u32 u32", lambda a, p, n: bfe(a, p, n, 32, is_signed=False)),
    Row("bfe.s32", "u32 u32 u32 u32", lambda a, p, n: bfe(a, p, n, 32, is_signed=True)),
    Row("bfi.b32", "u32 u32 u32 u32 u32", lambda a, b, p, n: bfi(a, b, p, n, 32)),
    Row("bfi.b64", "u64 u64 u64 u32 u32", lambda a, b, p, n: bfi(a, b, p, n, 64)),
    Row("prmt.b32", "u32 u32 u32 u32",
        lambda a, b, c: sum(byte_of(a, b, c >> 4 * i & 15) << 8 * i for i in range(4))),
    Row("lop3.b32", "u32 u32 u32 u32",  # the table of (a & b) ^ ~c
        lambda a, b, c: a & b ^ ~c, f", {(0xF0 & 0xCC ^ ~0xAA) & 0xFF}"),
    Row("popc.b64", "u32 u64", lambda a: a.bit_count()),
    Row("clz.b32", "u32 u32", lambda a: 32 - a.bit_length()),
    Row("brev.b32", "u32 u32", lambda a: int(f"{a:032b}"[::-1], 2)),
    Row("cvt.s32.s8", "s32 s8", lambda a: a),
    Row("cvt.u16.u32", "u16 u32", lambda a: a),
    Row("cvt.sat.s8.s32", "s8 s32", lambda a: min(max(a, -128), 127)),
    Row("cvt.rzi.s32.f32", "s32 f32", lambda a: whole(a, "s32", np.trunc)),
    Row("cvt.rni.s64.f64", "s64 f64", lambda a: whole(a, "s64", round)),
    Row("cvt.rmi.u32.f32", "u32 f32", lambda a: whole(a, "u32", math.floor)),
    Row("cvt.rn.f32.s64", "f32 s64", np.float32),
    Row("cvt.rn.f32.f64", "f32 f64", np.float32),
    Row("cvt.rni.f32.f32", "f32 f32", np.rint),
    Row("cvt.rn.f16x2.f32", "u32 f32 f32", lambda a, b: half(a, np.float16) << 16 | half(b, np.float16)),
    Row("cvt.rn.bf16x2.f32", "u32 f32 f32",
        lambda a, b: half(a, ml_dtypes.bfloat16) << 16 | half(b, ml_dtypes.bfloat16)),
    Row("cvt.rn.satfinite.e4m3x2.f32", "u16 f32 f32", lambda a, b: e4m3(a) << 8 | e4m3(b)),
    Row("add.f32", "f32 f32 f32", lambda a, b: a + b),
    Row("mul.f64", "f64 f64 f64", lambda a, b: a * b),
    Row("fma.rn.f32", "f32 f32 f32 f32", fma),
    Row("div.rn.f32", "f32 f32 f32", lambda a, b: a / b),
    Row("min.f32", "f32 f32 f32", lesser),
    Row("max.f64", "f64 f64 f64", lambda a, b: -lesser(-a, -b)),
    Row("copysign.f32", "f32 f32 f32", lambda a, b: np.copysign(b, a)),
    Row("abs.f32", "f32 f32", abs),
]  # fmt: skip


def comparison(opcode: str, t: str, means: Callable[[Any, Any], bool]) -> Row:
    return Row(f"setp.{opcode}.{t}", f"pred {t} {t}", means)


ROWS += [
    comparison("lt", "s32", lambda a, b: a < b),
    comparison("hi", "u32", lambda a, b: a > b),
    comparison("ne", "f32", lambda a, b: not np.isnan(a) and not np.isnan(b) and a != b),
    comparison("neu", "f32", lambda a, b: np.isnan(a) or np.isnan(b) or a != b),
    comparison("geu", "f64", lambda a, b: not a < b),
    comparison("ge", "f64", lambda a, b: a >= b),
    comparison("num", "f32", lambda a, b: not np.isnan(a) and not np.isnan(b)),
]

FLOATS = (
    0.0,
    -0.0,
    1.0,
    -1.5,
    2.5,
    3.5,
    -0.4,
    447.0,
    465.0,
    1e9,
    -3e9,
    1e20,
    7e-3,
    6e-8,
    math.inf,
    -math.inf,
    math.nan,
)
COUNTS = (0, 1, 5, 8, 31, 32, 33, 63, 64, 200, 300)


def operand(t: str, rng: np.random.Generator, place: int) -> int:
    """A value of a type as 64 bits: corners, and anything."""
    width = int(t.lstrip("busf"))
    if t[0] == "f":
        value = FLOATS[rng.integers(len(FLOATS))] if rng.random() < 0.6 else rng.standard_normal() * 100
        return as_bits(np.dtype(f"f{width // 8}").type(value), t)
    corners = [0, 1, 2, (1 << width) - 1, 1 << width - 1, (1 << width - 1) - 1, *(COUNTS if place else ())]
    return int(corners[rng.integers(len(corners))] if rng.random() < 0.6 else rng.integers(1 << 63)) % (
        1 << width
    )


REGISTER = {8: "rs", 16: "rs", 32: "r", 64: "rd"}


def kernel() -> str:
    """A thread per try: operands at [0] + 8 * (thread * 4 * rows + 4 * row + k), results at [8]."""
    stride = 32 * len(ROWS)
    lines = [
        "ld.param.u64 %rd1, [k_param_0];", "ld.param.u64 %rd2, [k_param_0+8];", "mov.u32 %r1, %tid.x;",
        f"mad.wide.u32 %rd1, %r1, {stride}, %rd1;", f"mad.wide.u32 %rd2, %r1, {8 * len(ROWS)}, %rd2;",
    ]  # fmt: skip
    for number, row in enumerate(ROWS):
        result, *types = row.types.split()
        registers = []
        for k, t in enumerate(types):
            width = int(t.lstrip("busf"))
            name = f"%{'fd' if t == 'f64' else 'f' if t == 'f32' else REGISTER[width]}{10 + k}"
            lines.append(f"ld.global.{t} {name}, [%rd1+{32 * number + 8 * k}];")
            registers.append(name)
        if row.opcode.startswith(
            ("div.s", "rem.s", "div.u")
        ):  # a GPU's result of a division by zero is not defined
            prefix = types[1]
            lines += [
                f"setp.eq.{prefix} %p1, {registers[1]}, 0;",
                f"selp.{prefix} {registers[1]}, 1, {registers[1]}, %p1;",
            ]
        width = 0 if result == "pred" else int(result.lstrip("busf"))
        to = {"pred": "%p2", "f32": "%f20", "f64": "%fd20"}.get(result) or f"%{REGISTER[width]}20"
        lines.append(f"{row.opcode} {to}, {', '.join(registers)}{row.suffix};")
        if result == "pred":
            lines += ["selp.u64 %rd20, 1, 0, %p2;", f"st.global.u64 [%rd2+{8 * number}], %rd20;"]
        else:
            lines.append(f"st.global.{'f' if result[0] == 'f' else 'u'}{width} [%rd2+{8 * number}], {to};")
    names = {"pred": "p", "b16": "rs", "b32": "r", "b64": "rd", "f32": "f", "f64": "fd"}
    registers = [f".reg .{t} %{name}<30>;" for t, name in names.items()]
    body = "\n".join([*registers, *lines, "ret;"])
    return f".visible .entry k(\n.param .align 8 .b8 k_param_0[16]\n)\n.maxntid 1024\n{{\n{body}\n}}\n"


@pytest.fixture(scope="module")
def results() -> tuple[np.ndarray, np.ndarray]:
    """Operands (try, row, 4) and results (try, row), as 64 bits."""
    rng, tries = np.random.default_rng(1), 512
    given = np.zeros((tries, len(ROWS), 4), np.uint64)
    for number, row in enumerate(ROWS):
        for k, t in enumerate(row.types.split()[1:]):
            given[:, number, k] = [operand(t, rng, k) for _ in range(tries)]
    found = np.zeros((tries, len(ROWS)), np.uint64)
    variant = Unit("arithmetic.ptx", ("CF_ENTRY=k",))
    built = simulator.Kernel(variant, toolchain.library(kernel(), "arithmetic.ptx"))
    built.launch((1, 1, 1), (tries, 1, 1), 0, pack(given=given, found=found).tobytes())
    return given, found


@pytest.mark.parametrize("number", range(len(ROWS)), ids=[row.opcode for row in ROWS])
def test_means(number: int, results: tuple[np.ndarray, np.ndarray]) -> None:
    result, *types = ROWS[number].types.split()
    width = 1 if result == "pred" else int(result.lstrip("busf"))
    for operands, bits in zip(results[0][:, number].tolist(), results[1][:, number].tolist(), strict=True):
        values = [as_python(x, t) for x, t in zip(operands, types, strict=False)]
        with np.errstate(all="ignore"):
            wanted = ROWS[number].means(*values)
        found = as_python(bits, result) if result[0] == "f" else bits % (1 << width)
        if result[0] == "f":
            same = (np.isnan(wanted) and np.isnan(found)) or as_bits(wanted, result) == as_bits(found, result)
        else:
            same = int(wanted) % (1 << width) == found
        assert same, f"{ROWS[number].opcode} of {values}: {found}, not {wanted}"
