"""Integers, floats, bits, comparisons and moves."""

from __future__ import annotations

from tests.simulator.ptx.instructions import instruction
from tests.simulator.ptx.reader import Instruction, Unknown
from tests.simulator.ptx.writer import Writer, bits_of, c_type

_INTEGER = "([sub](?:8|16|32|64))"
_FLOAT = "(f32|f64)"
_ANY = "([sub](?:8|16|32|64)|f32|f64)"
_OPERATORS = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^"}


def _unsigned(t: str) -> str:
    """why: integers wrap around, and signed ones of C++ may not."""
    return f"u{bits_of(t)}"


# ---- integers


@instruction(f"(add|sub|and|or|xor).{_INTEGER}")
def integer_binary(w: Writer, i: Instruction, op: str, t: str) -> None:
    d, *x = i.operands
    a, b = w.values(x, _unsigned(t))
    w.set(d, _unsigned(t), f"(u{bits_of(t)})({a} {_OPERATORS[op]} {b})")


@instruction("(mul|mad).(lo|hi|wide).([su])(16|32|64)")
def multiply(w: Writer, i: Instruction, op: str, part: str, sign: str, width: str) -> None:
    """The lower or the upper half of the product, or all of it; mad adds to that."""
    d, a, b, *c = i.operands
    bits, t = int(width), sign + width
    if part == "lo":
        result = f"u{bits}"  # why 32: 16-bit factors would be promoted to int, and overflow
        x, y = w.values((a, b), result)
        product = f"(u{bits})((u{max(bits, 32)}){x} * {y})"
    else:
        x, y = w.values((a, b), t)
        double = f"{sign}{2 * bits}" if bits < 64 else {"s": "__int128", "u": "unsigned __int128"}[sign]
        product = f"({double}){x} * ({double}){y}"
        result = t
        if part == "hi":
            product = f"({c_type(t)})(({product}) >> {bits})"
        elif bits < 64:
            result = f"{sign}{2 * bits}"
        else:
            raise Unknown("128 bits")
    if op == "mad":
        (addend,) = w.values(c, _unsigned(result))
        result = _unsigned(result)
        product = f"({result})(({result})({product}) + {addend})"
    w.set(d, result, product)


@instruction("(div|rem).([su](?:16|32|64))")
def divide(w: Writer, i: Instruction, op: str, t: str) -> None:
    d, *x = i.operands
    w.set(d, t, f"{'quotient' if op == 'div' else 'remainder'}<{c_type(t)}>({', '.join(w.values(x, t))})")


@instruction(f"(neg|not|abs).{_INTEGER}")
def integer_unary(w: Writer, i: Instruction, op: str, t: str) -> None:
    d, a = i.operands
    if op == "abs":
        x = w.value(a, t)
        w.set(d, t, f"({c_type(t)})({x} < 0 ? 0 - ({_unsigned(t)}){x} : ({_unsigned(t)}){x})")
    else:
        w.set(
            d, _unsigned(t), f"({_unsigned(t)})({'0 -' if op == 'neg' else '~'} {w.value(a, _unsigned(t))})"
        )


@instruction("(min|max).([su](?:16|32|64))")
def integer_extreme(w: Writer, i: Instruction, op: str, t: str) -> None:
    d, *x = i.operands
    w.set(d, t, f"{'least' if op == 'min' else 'most'}<{c_type(t)}>({', '.join(w.values(x, t))})")


# ---- bits


@instruction(f"(shl|shr).{_INTEGER}")
def shift(w: Writer, i: Instruction, op: str, t: str) -> None:
    d, a, n = i.operands
    w.set(d, t, f"{op}<{c_type(t)}>({w.value(a, t)}, {w.value(n, 'u32')})")


@instruction("shf.(l|r).(wrap|clamp).b32")
def funnel_shift(w: Writer, i: Instruction, direction: str, beyond: str) -> None:
    d, a, b, n = i.operands
    count = w.value(n, "u32")
    count = f"{count} & 31" if beyond == "wrap" else f"least<u32>({count}, 32)"
    name = {"l": "funnel_left", "r": "funnel_right"}[direction]
    w.set(d, "b32", f"{name}({w.value(a, 'b32')}, {w.value(b, 'b32')}, {count})")


@instruction("bfi.(b32|b64)")
def bit_field_insert(w: Writer, i: Instruction, t: str) -> None:
    d, a, b, *place = i.operands
    w.set(d, t, f"insert<{c_type(t)}>({', '.join([*w.values((a, b), t), *w.values(place, 'u32')])})")


@instruction("bfe.([us](?:32|64))")
def bit_field_extract(w: Writer, i: Instruction, t: str) -> None:
    d, a, *place = i.operands
    w.set(d, t, f"extract<{c_type(t)}>({', '.join([w.value(a, t), *w.values(place, 'u32')])})")


@instruction("prmt.b32")
def permute_bytes(w: Writer, i: Instruction) -> None:
    d, *x = i.operands
    w.set(d, "b32", f"permute({', '.join(w.values(x, 'b32'))})")


@instruction("lop3.b32")
def logic_of_three(w: Writer, i: Instruction) -> None:
    d, *x, table = i.operands
    w.set(d, "b32", f"look_up({', '.join(w.values(x, 'b32'))}, {int(table, 0)})")


@instruction("popc.b(32|64)")
def population_count(w: Writer, i: Instruction, width: str) -> None:
    d, a = i.operands
    w.set(d, "u32", f"(u32)__builtin_popcountll({w.value(a, f'u{width}')})")


@instruction("clz.b(32|64)")
def count_leading_zeros(w: Writer, i: Instruction, width: str) -> None:
    d, a = i.operands
    w.set(d, "u32", f"leading_zeros<u{width}>({w.value(a, f'u{width}')})")


@instruction("brev.b32")
def bit_reverse(w: Writer, i: Instruction) -> None:
    d, a = i.operands
    w.set(d, "b32", f"reversed({w.value(a, 'b32')})")


# ---- floats


@instruction(f"(add|sub|mul)(?:.rn)?.{_FLOAT}")
def float_binary(w: Writer, i: Instruction, op: str, t: str) -> None:
    d, *x = i.operands
    a, b = w.values(x, t)
    w.set(d, t, f"{a} {_OPERATORS[op]} {b}")


@instruction(f"fma.rn.{_FLOAT}")
def fused_multiply_add(w: Writer, i: Instruction, t: str) -> None:
    d, *x = i.operands
    w.set(d, t, f"std::fma({', '.join(w.values(x, t))})")


@instruction(f"div.(?:rn|full|approx)(?:.ftz)?.{_FLOAT}")
def float_divide(w: Writer, i: Instruction, t: str) -> None:
    d, *x = i.operands
    a, b = w.values(x, t)
    w.set(d, t, f"{a} / {b}")


@instruction(f"(neg|abs).{_FLOAT}")
def float_unary(w: Writer, i: Instruction, op: str, t: str) -> None:
    d, a = i.operands
    w.set(d, t, f"-{w.value(a, t)}" if op == "neg" else f"std::fabs({w.value(a, t)})")


@instruction(f"(min|max).{_FLOAT}")
def float_extreme(w: Writer, i: Instruction, op: str, t: str) -> None:
    d, *x = i.operands
    w.set(d, t, f"{'lesser' if op == 'min' else 'greater'}<{c_type(t)}>({', '.join(w.values(x, t))})")


@instruction(f"copysign.{_FLOAT}")
def copy_sign(w: Writer, i: Instruction, t: str) -> None:
    d, sign, magnitude = i.operands
    w.set(d, t, f"std::copysign({w.value(magnitude, t)}, {w.value(sign, t)})")


@instruction(f"testp.(infinite|finite|notanumber).{_FLOAT}")
def test_property(w: Writer, i: Instruction, what: str, t: str) -> None:
    d, a = i.operands
    call = {"infinite": "std::isinf", "finite": "std::isfinite", "notanumber": "std::isnan"}[what]
    w.set(d, "pred", f"{call}({w.value(a, t)})")


# The approximations are exact here: what a GPU rounds differently is for its own tests.
_FUNCTIONS = {
    "ex2": "std::exp2({})", "lg2": "std::log2({})", "sqrt": "std::sqrt({})", "rsqrt": "1 / std::sqrt({})",
    "sin": "std::sin({})", "cos": "std::cos({})", "rcp": "1 / {}",
}  # fmt: skip


@instruction("ex2.approx.ftz.f32")
def exp2_flushed(w: Writer, i: Instruction) -> None:
    d, a = i.operands
    w.set(d, "f32", f"ex2_ftz({w.value(a, 'f32')})")


@instruction("rcp.approx.ftz.f64")
def reciprocal_start(w: Writer, i: Instruction) -> None:
    """The start of Newton's method: the upper 20 bits of the mantissa."""
    d, a = i.operands
    exact = f"bit_cast<u64>(1 / {w.value(a, 'f64')})"
    w.set(d, "f64", f"bit_cast<double>({exact} & 0xffffffff00000000ull)")


@instruction(
    "ex2.approx.f32|(?:lg2|sin|cos).approx(?:.ftz)?.f32|(?:sqrt|rsqrt|rcp).(?:approx|rn)(?:.ftz)?.f32"
)
def special_function(w: Writer, i: Instruction) -> None:
    d, a = i.operands
    w.set(d, "f32", _FUNCTIONS[i.opcode.split(".")[0]].format(w.value(a, "f32")))


@instruction("(sqrt|rcp).rn.f64")
def special_function_of_double(w: Writer, i: Instruction, name: str) -> None:
    d, a = i.operands
    w.set(d, "f64", _FUNCTIONS[name].format(w.value(a, "f64")))


# ---- 16-bit floats, one or two in a register


@instruction("(add|sub|mul|fma)(?:.rn)?.(f16|bf16)(x2)?")
def half(w: Writer, i: Instruction, op: str, kind: str, packed: str | None) -> None:
    """Computed in double, which is rounded once: it holds every product and sum exactly enough."""
    d, *x = i.operands
    formula = "{} * {} + {}" if op == "fma" else f"{{}} {_OPERATORS[op]} {{}}"

    def result(operands: list[str]) -> str:
        return f"to_{kind}({formula.format(*(f'(double)from_{kind}({y})' for y in operands))})"

    if packed:
        both = w.values(x, "b32")
        high, low = (result([f"{part}_half({y})" for y in both]) for part in ("high", "low"))
        w.set(d, "b32", f"pair({high}, {low})")
    else:
        w.set(d, "b16", result(w.values(x, "b16")))


# ---- predicates and comparisons

_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
                "lo": "<", "ls": "<=", "hi": ">", "hs": ">="}  # fmt: skip
_LOGIC = {"and": "&&", "or": "||", "xor": "!="}


def _predicate(w: Writer, a: str) -> str:
    """A predicate, which may be written as a number."""
    return {"0": "false", "1": "true", "-1": "true"}.get(a) or w.value(a, "pred")


def _compared(w: Writer, kind: str, t: str, a: str, b: str) -> str:
    x, y = w.values((a, b), t)
    if t[0] != "f":
        if kind in ("lo", "ls", "hi", "hs") and t[0] != "u":
            raise Unknown(f"{kind} of {t}")
        return f"{x} {_COMPARISONS[kind]} {y}"
    unordered = f"unordered({x}, {y})"
    if kind in ("num", "nan"):
        return unordered if kind == "nan" else f"!{unordered}"
    if kind in _COMPARISONS:
        return f"(!{unordered} && {x} {_COMPARISONS[kind]} {y})"
    return f"({unordered} || {x} {_COMPARISONS[kind.removesuffix('u')]} {y})"


@instruction("setp.(eq|ne|lt|le|gt|ge|lo|ls|hi|hs|equ|neu|ltu|leu|gtu|geu|num|nan)"
             f"(?:.(and|or|xor))?(?:.ftz)?.{_ANY}")  # fmt: skip
def set_predicate(w: Writer, i: Instruction, kind: str, logic: str | None, t: str) -> None:
    """p|q: q has the opposite of the comparison; both are then combined with a third predicate."""
    d, a, b, *c = i.operands
    p, _, q = d.partition("|")
    other = f" {_LOGIC[logic]} {w.value(c[0], 'pred')}" if logic else ""
    w.emit(f"{{ const bool x = {_compared(w, kind, t, a, b)};")
    statements = [w.assignment(p, "pred", f"x{other}")]
    if q:
        statements.append(w.assignment(q, "pred", f"!x{other}"))
    w.emit(f"{' '.join(statements)} }}")


@instruction("(and|or|xor).pred")
def predicate_logic(w: Writer, i: Instruction, op: str) -> None:
    d, a, b = i.operands
    w.set(d, "pred", f"{_predicate(w, a)} {_LOGIC[op]} {_predicate(w, b)}")


@instruction("not.pred")
def predicate_not(w: Writer, i: Instruction) -> None:
    d, a = i.operands
    w.set(d, "pred", f"!{w.value(a, 'pred')}")


@instruction(f"selp.{_ANY}")
def select(w: Writer, i: Instruction, t: str) -> None:
    d, a, b, p = i.operands
    w.set(d, t, f"{w.value(p, 'pred')} ? {w.value(a, t)} : {w.value(b, t)}")


# ---- moves


@instruction("mov.pred")
def move_predicate(w: Writer, i: Instruction) -> None:
    d, a = i.operands
    w.set(d, "pred", _predicate(w, a))


@instruction(f"mov.{_ANY}")
def move(w: Writer, i: Instruction, t: str) -> None:
    """One register; or several into the parts of one, the first lowest; or the other way round."""
    d, a = i.operands
    if a[0] == "{":
        members = w.vector(a)
        part = bits_of(t) // len(members)
        words = [
            f"(u{bits_of(t)})(u{part}){w.value(x, f'b{part}')} << {k * part}" for k, x in enumerate(members)
        ]
        w.set(d, f"b{bits_of(t)}", f"(u{bits_of(t)})({' | '.join(words)})")
    elif d[0] == "{":
        members = w.vector(d)
        part = bits_of(t) // len(members)
        w.emit(f"{{ const u{bits_of(t)} x = {w.value(a, f'b{bits_of(t)}')};")
        for k, member in enumerate(members):
            w.set(member, f"b{part}", f"(u{part})(x >> {k * part})")
        w.emit("}")
    else:
        w.set(d, t, w.value(a, t))
