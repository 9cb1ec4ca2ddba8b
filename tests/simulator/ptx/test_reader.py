"""What the reader takes and what it refuses, and that what is not known is an error with its line."""

from __future__ import annotations

import pytest

from tests.simulator.ptx.reader import (
    Instruction,
    Label,
    Local,
    Registers,
    Scope,
    Unknown,
    parts,
    read,
    source_lines,
)
from tests.simulator.ptx.translate import translate

HEAD = """.version 9.5
.target sm_90a
.address_size 64
.global .align 4 .f32 kTwo = 0f40000000;
.visible .entry one(
	.param .align 8 .b8 one_param_0[16]
)
.maxntid 64, 1, 1
{
	.reg .pred 	%p<3>;
	.reg .b32 	%r<9>;
	.local .align 8 .b8 	__local_depot0[24];
"""


def kernel(*lines: str) -> str:
    return HEAD + "".join(f"\t{line}\n" for line in lines) + "}\n"


def test_what_a_kernel_declares() -> None:
    found = read(kernel("ret;"))
    assert (found.name, found.param_bytes, found.max_threads) == ("one", 16, 64)
    assert found.globals["kTwo"].values == ("0f40000000",)
    assert found.body[:3] == [
        Registers("pred", ("%p<3>",)), Registers("b32", ("%r<9>",)), Local("__local_depot0", 8, 24),
    ]  # fmt: skip


def test_what_a_kernel_does() -> None:
    text = kernel("$L__1:", "@!%p1 bra $L__1;", "{ .reg .pred q;", "ld.shared.v2.u32 {%r1, %r2}, [%r3+16]; }")
    body = read(text).body[3:]
    assert body == [
        Label("$L__1"),
        Instruction("bra", ("$L__1",), "!%p1", 14),
        Scope(opens=True),
        Registers("pred", ("q",)),
        Instruction("ld.shared.v2.u32", ("{%r1, %r2}", "[%r3+16]"), "", 16),
        Scope(opens=False),
    ]


def test_parts_are_not_those_of_brackets() -> None:
    assert parts("{a, b}, [c, {d, e}], f") == ["{a, b}", "[c, {d, e}]", "f"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("ret;", "frobnicate.b32 %r1, %r2;"), "k.ptx:13: frobnicate.b32 is no instruction of ours"),
        (("ret;", "add.s32 %r1, %r2, %f3;"), "k.ptx:13: add.s32 %r1, %r2, %f3: %f3 is no register"),
        (("ret;", "add.s32 %r1, %r2, 4294967296;"), "k.ptx:13: .*does not fit"),
        (("ret;", "ld.global.v2.u32 {%r1}, [%r2];"), "k.ptx:13: .*1 members, not 2"),
        (("ret;", "mul.f32 %r1, %p1, %r2;"), "k.ptx:13: .*%p1 is bool"),
        (("ret;", ".func;"), "k.ptx: "),
        ((".maxntid", ".func (.b32 x) f; .maxntid"), "k.ptx: .*functions"),
        ((".b8 one_param_0[16]", ".u64 one_param_0"), "k.ptx: one takes"),
    ],
)
def test_what_is_unknown_is_refused_with_its_line(change: tuple[str, str], complaint: str) -> None:
    text = kernel("ret;")
    assert change[0] in text
    with pytest.raises(Unknown, match=complaint):
        translate(text.replace(*change), "k.ptx")


def test_every_kind_of_unknown_instruction_is_named_once() -> None:
    text = kernel("one.b32 %r1;", "two.b32 %r1;", "one.b32 %r2;")
    with pytest.raises(Unknown) as caught:
        translate(text, "k.ptx")
    assert [line.split(" is")[0] for line in str(caught.value).splitlines()] == [
        "k.ptx:13: one.b32",
        "k.ptx:14: two.b32",
    ]


def test_lines_of_the_sources() -> None:
    rows = [
        '.file 1 "/src/flash.cu"', '.file 2 "/src/include/tile/tile.cuh"', ".loc 1 20 5", "ret;",
        ".loc 2 7 1, function_name $L__info_string0, inlined_at 1 20 5", "add;", "sub;",
    ]  # fmt: skip
    text = "\n".join(rows)
    assert source_lines(text, 4) == "flash.cu:20"
    assert source_lines(text, 7) == "tile/tile.cuh:7 < flash.cu:20"
    assert source_lines("ret;", 1) == "?"
