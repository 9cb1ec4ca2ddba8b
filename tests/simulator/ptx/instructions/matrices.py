"""ldmatrix and stmatrix, products of a warp (mma) and of a warpgroup (wgmma)."""

from __future__ import annotations

from tests.simulator.ptx.instructions import instruction
from tests.simulator.ptx.reader import Instruction, Unknown
from tests.simulator.ptx.writer import Writer


def _true(found: str | None) -> str:
    return "true" if found else "false"


@instruction("ldmatrix.sync.aligned.m8n8.x([124])(.trans)?.shared(?:::cta)?.b16")
def load_matrices(w: Writer, i: Instruction, n: str, transposed: str | None) -> None:
    d, a = i.operands
    w.emit(f"{{ u32 r[{n}]; load_matrices<{n}, {_true(transposed)}>(r, {w.address(a)}, {w.site});")
    for k, member in enumerate(w.vector(d, int(n))):
        w.set(member, "b32", f"r[{k}]")
    w.emit("}")


@instruction("stmatrix.sync.aligned.m8n8.x([124])(.trans)?.shared(?:::cta)?.b16")
def store_matrices(w: Writer, i: Instruction, n: str, transposed: str | None) -> None:
    a, d = i.operands
    members = ", ".join(w.values(w.vector(d, int(n)), "b32"))
    call = f"store_matrices<{n}, {_true(transposed)}>"
    w.emit(f"{{ const u32 r[{n}] = {{{members}}}; {call}({w.address(a)}, r, {w.site}); }}")


# shape and element: registers of a and of b
_PRODUCTS = {
    "m16n8k8.f16": (2, 1),
    "m16n8k8.bf16": (2, 1),
    "m16n8k16.f16": (4, 2),
    "m16n8k16.bf16": (4, 2),
    "m16n8k8.tf32": (4, 2),
    "m16n8k32.e4m3": (4, 2),
}


@instruction("mma.sync.aligned.(m16n8k\\d+).row.col.f32.(\\w+).(\\w+).f32")
def warp_product(w: Writer, i: Instruction, shape: str, element: str, element_b: str) -> None:
    n_a, n_b = _PRODUCTS[f"{shape}.{element}"]
    if element != element_b:
        raise Unknown("mixed types")
    d, a, b, c = (w.vector(x, n) for x, n in zip(i.operands, (4, n_a, n_b, 4), strict=True))
    lists = [", ".join(w.values(c, "f32")), ", ".join(w.values(a, "b32")), ", ".join(w.values(b, "b32"))]
    w.emit(f"{{ float d[4] = {{{lists[0]}}}; const u32 a[{n_a}] = {{{lists[1]}}}, b[{n_b}] = {{{lists[2]}}};")
    w.emit(f"multiply<Product::{shape}_{element}>(d, a, b, {w.site});")
    for k, member in enumerate(d):
        w.set(member, "f32", f"d[{k}]")
    w.emit("}")


@instruction(
    "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0"
)
def scaled_product(w: Writer, i: Instruction) -> None:
    """d, a, b, c; then of a and of b a register with scales, its byte and the lanes of a quad that count."""
    d, a, b, c = (w.vector(x, n) for x, n in zip(i.operands[:4], (4, 4, 2, 4), strict=True))
    scale_a, chosen_a, scale_b, chosen_b = i.operands[4:]
    chosen = [int(x) for vector in (chosen_a, chosen_b) for x in w.vector(vector, 2)]
    if not all(0 <= x <= most for x, most in zip(chosen, (3, 1, 3, 3), strict=True)):
        raise Unknown(f"bytes and lanes {chosen}")
    lists = [", ".join(w.values(c, "f32")), ", ".join(w.values(a, "b32")), ", ".join(w.values(b, "b32"))]
    w.emit(f"{{ float d[4] = {{{lists[0]}}}; const u32 a[4] = {{{lists[1]}}}, b[2] = {{{lists[2]}}};")
    scales = [w.value(scale_a, "b32"), w.value(scale_b, "b32"), *map(str, chosen)]
    w.emit(f"multiply_scaled(d, a, b, {{{', '.join(scales)}}}, {w.site});")
    for k, member in enumerate(d):
        w.set(member, "f32", f"d[{k}]")
    w.emit("}")


# shape: registers of a, of b, and of c and d
_DOUBLE_PRODUCTS = {"m8n8k4": (1, 1, 2), "m16n8k8": (4, 2, 4)}


@instruction("mma.sync.aligned.(m8n8k4|m16n8k8).row.col.f64.f64.f64.f64")
def product_of_doubles(w: Writer, i: Instruction, shape: str) -> None:
    n_a, n_b, n_d = _DOUBLE_PRODUCTS[shape]
    d, a, b, c = (w.vector(x, n) for x, n in zip(i.operands, (n_d, n_a, n_b, n_d), strict=True))
    lists = [", ".join(w.values(x, "f64")) for x in (c, a, b)]
    w.emit(f"{{ double d[{n_d}] = {{{lists[0]}}};")
    w.emit(f"const double a[{n_a}] = {{{lists[1]}}}, b[{n_b}] = {{{lists[2]}}};")
    w.emit(f"multiply(d, a, b, {w.site});")
    for k, member in enumerate(d):
        w.set(member, "f64", f"d[{k}]")
    w.emit("}")


# element: how deep, and whether operands in shared memory may be transposed
_WARPGROUP_PRODUCTS = {"f16": (16, True), "bf16": (16, True), "e4m3": (32, False)}


@instruction("wgmma.mma_async.sync.aligned.m64n(\\d+)k(\\d+).f32.(f16|bf16|e4m3).(\\w+)")
def warpgroup_product(w: Writer, i: Instruction, columns: str, k: str, element: str, element_b: str) -> None:
    """d, a (descriptor or registers), descriptor of b, whether to add to d, signs, which are transposed."""
    d, a, b, accumulate, sign_a, sign_b, *transposed = i.operands
    depth, may_be = _WARPGROUP_PRODUCTS[element]
    n = int(columns)
    if (
        element != element_b
        or int(k) != depth
        or (sign_a, sign_b) != ("1", "1")
        or n % 8
        or not 8 <= n <= 256
    ):
        raise Unknown("an unknown form")
    from_registers = a[0] == "{"
    if len(transposed) != (2 - from_registers if may_be else 0) or not set(transposed) <= {"0", "1"}:
        raise Unknown(f"{len(transposed)} operands that say what is transposed")
    of_a, of_b = (*["0"] * (2 - len(transposed)), *transposed)
    accumulators = w.array(w.vector(d, n // 2), "float")
    if accumulators is None:
        raise Unknown("accumulators that overlap those of another product")
    descriptors = ["0" if from_registers else w.value(a, "u64"), w.value(b, "u64")]
    arguments = [
        accumulators, _registers_of(w, a) if from_registers else "nullptr", *descriptors,
        w.value(accumulate, "pred"), f"Element::{element}", columns, of_a, of_b, w.site,
    ]  # fmt: skip
    w.emit(f"warpgroup_product({', '.join(arguments)});")


def _registers_of(w: Writer, operand: str) -> str:
    """The array that a product reads its registers of a from; copies, if they are members of two arrays."""
    registers = w.vector(operand, 4)
    array = w.array(registers, "u32")
    if array is None:
        array = w.array_of("u32", 4)
        for k, register in enumerate(registers):
            w.emit(f"{array}[{k}] = {w.value(register, 'b32')};")
    return array


@instruction("wgmma.(fence|commit_group).sync.aligned")
def warpgroup_order(w: Writer, i: Instruction, what: str) -> None:
    w.emit(f"warpgroup_{'fence' if what == 'fence' else 'commit'}({w.site});")


@instruction("wgmma.wait_group.sync.aligned")
def warpgroup_wait(w: Writer, i: Instruction) -> None:
    (newest,) = i.operands
    w.emit(f"warpgroup_wait({int(newest)}, {w.site});")
