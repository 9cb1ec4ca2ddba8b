"""The lint of SASS: what it reads, and that it finds registers overwritten under a product anywhere."""

import dataclasses
import functools
import shutil
from itertools import pairwise, product
from pathlib import Path

import pytest

from bench.model.doubles import ISSUED
from bench.model.stretches import LEAST, WAITING
from cupy_flash.cubins import build, nvrtc, sass, sources
from cupy_flash.cubins.compile import compile_variant
from cupy_flash.cubins.sass import Listing
from cupy_flash.plan import families
from tests.cpu.stub_kernels import Stubs, requires_nvrtc, stub
from tests.paths import ROOT

needs_nvdisasm = pytest.mark.skipif(
    sass.disassembler() is None, reason=f"nvdisasm is not installed: pip install {sass.REQUIREMENT}"
)
# Of 64 x 16 outputs: 8 accumulators from R24 on, A in R8 to R11.
PRODUCT = "HGMMA.64x16x16.F32 R24, R8, gdesc[UR4], R24, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"


def listing(*lines: str) -> Listing:
    """A listing of these instructions and labels, as nvdisasm prints them."""
    address, text = 0, []
    for line in lines:
        if line.startswith(".L"):
            text.append(line)
        else:
            text.append(f"        /*{address:04x}*/                   {line} ;")
            address += 16
    return Listing.of("\n".join(text))


def test_what_ptxas_12_9_made_of_a_legal_kernel_is_found():
    found = sass.overwritten(Listing.of((Path(__file__).parent / "sass/overwritten.sass").read_text()))
    assert len(found) == 8
    assert found[0].startswith(
        "0x560 LDG.E.CONSTANT R88, desc[UR8][R4.64] writes R88 while the product at 0x720"
    )


RIGHT = {
    "waited for": [PRODUCT, WAIT, "MOV R8, R0", "FMUL R24, R24, R0"],
    "another register": [PRODUCT, "MOV R12, R0", "LDS.128 R4, [R1]", WAIT],
    "the older group is done": [
        PRODUCT, "HGMMA.64x16x16.F32 R40, R12, gdesc[UR4], R40, gsb0", "WARPGROUP.DEPBAR.LE gsb0, 0x1",
        "MOV R8, R0", WAIT,
    ],
    "a read": [PRODUCT, "STS [R1], R8", "ISETP.LE.AND P0, PT, R8, R9, PT", WAIT],
    "another product into the same sum": [PRODUCT, PRODUCT, WAIT, "MOV R24, R0"],
    "A in shared memory": ["HGMMA.64x16x16.F32 R24, gdesc[UR8], R24, gsb0", "MOV R8, R0", WAIT],
    "after the loop's wait": [".L_x_1:", "MOV R8, R0", PRODUCT, WAIT, "@P0 BRA `(.L_x_1)", "EXIT"],
}  # fmt: skip
WRONG = {
    "A": ([PRODUCT, "MOV R9, R0", WAIT], "R9"),
    "a predicated write": ([PRODUCT, "@!P1 MOV R9, R0", WAIT], "R9"),
    "an accumulator": ([PRODUCT, "FMUL R31, R31, R0", WAIT], "R31"),
    "a wide load": ([PRODUCT, "LDS.128 R4, [R1]", "LDS.128 R20, [R1]", "LDS.64 R30, [R1]", WAIT], "R30, R31"),
    "a matrix load": ([PRODUCT, "LDSM.16.M88.4 R5, [R1]", WAIT], "R8"),
    "8-bit operands": (
        ["QGMMA.64x16x32.F32.E4M3.E4M3 R24, R8, gdesc[UR4], R24, gsb0", "PRMT R10, R0, 0x5410, R1", WAIT],
        "R10",
    ),
    "behind a predicate": ([PRODUCT, "SHFL.BFLY PT, R11, R0, 0x1, 0x1f", WAIT], "R11"),
    "the younger group": (
        ["HGMMA.64x16x16.F32 R40, R12, gdesc[UR4], R40, gsb0", PRODUCT, "WARPGROUP.DEPBAR.LE gsb0, 0x1",
         "MOV R8, R0", WAIT],
        "R8",
    ),
    "a group still open": ([PRODUCT.replace(", gsb0", ""), "MOV R8, R0", PRODUCT, WAIT], "R8"),
    "around the loop": (
        [".L_x_1:", "MOV R8, R0", PRODUCT, "WARPGROUP.DEPBAR.LE gsb0, 0x1", "@P0 BRA `(.L_x_1)", WAIT],
        "R8",
    ),
    "on one of two ways": ([PRODUCT, "@P0 BRA `(.L_x_1)", WAIT, ".L_x_1:", "MOV R8, R0", "EXIT"], "R8"),
    "a uniform branch": (
        [PRODUCT, "BRA.U !UP0, `(.L_x_1)", WAIT, "EXIT", ".L_x_1:", "MOV R8, R0", "EXIT"],
        "R8",
    ),
    "after a reconvergence": (
        ["BSSY B0, `(.L_x_2)", PRODUCT, "@P0 BRA `(.L_x_1)", "BSYNC B0", ".L_x_1:", WAIT, "EXIT", ".L_x_2:",
         "MOV R8, R0"],
        "R8",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_right_code_passes(name):
    assert sass.overwritten(listing(*RIGHT[name])) == []


@pytest.mark.parametrize("name", WRONG)
def test_wrong_code_is_found(name):
    lines, registers = WRONG[name]
    (found,) = sass.overwritten(listing(*lines))
    assert f" writes {registers} while " in found


def test_products_that_nothing_waits_for_are_found():
    (found,) = sass.overwritten(listing(*[PRODUCT.replace("R8", f"R{8 + 4 * n}") for n in range(4)] * 3))
    assert "more than 8 groups" in found


def test_loops_and_products():
    read = listing("MOV R1, R2", ".L_x_1:", PRODUCT, WAIT, "@P0 BRA `(.L_x_1)", "EXIT")
    assert read.loops() == [(1, 3)]
    assert sass.products(read) == {"64x16x16": 1}
    assert str(read.instructions[3]) == "@P0 BRA `(.L_x_1)"


EXPONENTIAL, ARITHMETIC = "MUFU.EX2 R1, R1", "FADD R2, R2, R1"


@pytest.mark.parametrize(
    ("lines", "covered"),
    [
        ((PRODUCT, EXPONENTIAL, EXPONENTIAL, WAIT), 2),
        ((PRODUCT, EXPONENTIAL, WAIT, EXPONENTIAL), 1),
        ((EXPONENTIAL, PRODUCT, WAIT), 0),
        ((PRODUCT, PRODUCT, "WARPGROUP.DEPBAR.LE gsb0, 0x1", EXPONENTIAL, WAIT), 1),
        # On one of two ways, and only from the second round of a loop on, nothing is in flight.
        ((PRODUCT, "@P0 BRA `(.L_x_1)", WAIT, ".L_x_1:", EXPONENTIAL, WAIT), 0),
        ((PRODUCT, ".L_x_1:", EXPONENTIAL, WAIT, "@P0 BRA `(.L_x_1)", "EXIT"), 0),
    ],
)
def test_exponentials_under_products(lines, covered):
    assert sass.covered(listing(*lines)) == covered


def test_arithmetic_between_products_of_a_group():
    open_group = PRODUCT.replace(", gsb0", "")
    assert sass.scattered(listing(ARITHMETIC, open_group, PRODUCT, ARITHMETIC, PRODUCT, WAIT)) == 0
    assert sass.scattered(listing(open_group, ARITHMETIC, EXPONENTIAL, open_group, ARITHMETIC, PRODUCT)) == 3


GIVE, TAKE = "USETMAXREG.DEALLOC.CTAPOOL", "USETMAXREG.TRY_ALLOC.CTAPOOL UP0,"


@pytest.mark.parametrize(
    ("lines", "reasons"),
    [
        ((f"{GIVE} 0x18", f"{TAKE} 0xf0"), []),
        ((), []),
        (  # setmaxnreg.inc and .dec mistaken for each other
            (f"{GIVE} 0xf0", f"{TAKE} 0x18"),
            [
                "a warpgroup gives registers back and keeps 240 of 168",
                "a warpgroup takes registers and has 24, from 168",
            ],
        ),
        ((f"{GIVE} 0x18",), ["registers are only given back"]),
        ((f"{TAKE} 0xf0",), ["registers are only taken"]),
        (
            (f"{GIVE} 0x28", f"{TAKE} 0xf0"),
            ["2 warpgroups take 240 registers and one keeps 40: more than 3 times 168"],
        ),
    ],
)
def test_registers_that_warpgroups_give_back_and_take(lines, reasons):
    assert sass.register_faults(listing(*lines), registers=168, warpgroups=3) == reasons


@requires_nvrtc(12)
@needs_nvdisasm
class TestBuild:
    KERNEL = """
extern "C" __global__ void __launch_bounds__(128) CF_ENTRY(float* x, size_t a, size_t b) {
    float d[4] = {};
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (int i = 0; i < 4; i++) x[i * 128 + threadIdx.x] = d[i];
}
"""

    @pytest.fixture
    def stubs(self, tmp_path, monkeypatch):
        stubs = Stubs(tmp_path / "kernels", monkeypatch)
        stubs.write("product.cu", self.KERNEL)
        return stubs

    def test_the_products_that_a_row_asks_for_are_there(self, stubs, tmp_path):
        stubs.rows = (stub("product", products=(("64x8x16", 1),)),)
        ((folder, _),) = build.build(12, ["sm_90a"], tmp_path, progress=False)
        assert len(list(folder.glob("*.cubin"))) == 1

    def test_others_are_refused(self, stubs, tmp_path):
        stubs.rows = (stub("product", products=(("64x8x16", 2),)),)
        with pytest.raises(build.BuildFailed, match=r"products are \{'64x8x16': 1\}, its row asks for"):
            build.build(12, ["sm_90a"], tmp_path, progress=False)

    def test_overwritten_registers_are_refused(self, stubs, tmp_path, monkeypatch):
        monkeypatch.setattr(sass, "overwritten", lambda _listing: ["0x10 MOV R8, R0 writes R8"])
        stubs.rows = (stub("product", products=(("64x8x16", 1),)),)
        with pytest.raises(build.BuildFailed, match=r"product_f32_.* for sm_90a: 0x10 MOV R8, R0 writes R8"):
            build.build(12, ["sm_90a"], tmp_path, progress=False)

    def test_registers_of_warpgroups_that_do_not_add_up_are_refused(self, stubs, tmp_path, monkeypatch):
        monkeypatch.setattr(sass, "register_faults", lambda *_: ["registers are only taken"])
        stubs.rows = (stub("product", products=(("64x8x16", 1),)),)
        with pytest.raises(build.BuildFailed, match=r"product_f32_.* for sm_90a: registers are only taken"):
            build.build(12, ["sm_90a"], tmp_path, progress=False)


PIN = "@never pmevent 1;"


@functools.cache
def built(variant, cuda, target="sm_90a"):
    """A variant as compiled, which no gate refuses: taken from the store of the tree if it is there."""
    if not nvrtc.installed(cuda):
        pytest.skip(f"the NVRTC wheel of CUDA {cuda} is not installed")
    made = build.build(cuda, [target], ROOT / "build/cubins", only={variant.name}, progress=False)
    (folder,) = (folder for folder, _ in made if folder.name == target)
    return sass.disassemble(folder / f"{variant.name}.cubin")


PINNED = next(
    v for v in families.variants("sm_90a") if v.name.startswith("flash_backward_sm90_f16_d128_band")
)


FORWARD = [
    v
    for v in families.variants("sm_90a")
    if (v.kernel, v.dtype, v.mask) == ("flash_forward_sm90", "f16", "band")
]
# Instructions of a whole block, the more of NVRTC 12.9 and 13.5, as docs/kernels/forward_sm90.md has them.
WHOLE_BLOCK = {
    (64, 64): 379,
    (96, 96): 359,
    (128, 128): 399,
    (192, 128): 423,
    (192, 192): 390,
    (256, 256): 333,
}


@needs_nvdisasm
@pytest.mark.parametrize(
    ("variant", "cuda"),
    [
        (FORWARD[0], 12),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in [*product(FORWARD, (12, 13))][1:]),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_a_block_takes_the_instructions_of_the_cost_sheet(variant, cuda):
    """An instruction more is an issue slot more."""
    counted = sass.shortest_iteration(built(variant, cuda))
    assert 0 < counted <= WHOLE_BLOCK[variant.head_dim, variant.head_dim_v]


@needs_nvdisasm
@pytest.mark.parametrize("cuda", [12, pytest.param(13, marks=pytest.mark.slow)])
def test_overlap_is_lost_without_the_pin_and_refused(cuda, tmp_path, monkeypatch):
    """As it ships the backward pass comes through; once pin_schedule is empty it does not."""
    built(PINNED, cuda)
    folder = tmp_path / "kernels"
    shutil.copytree(sources.folder(), folder)
    (header,) = (path for path in folder.rglob("*.cuh") if PIN in path.read_text())
    header.write_text(header.read_text().replace(PIN, ""))
    monkeypatch.setattr(sources, "folder", lambda: folder)
    _, refused, _ = compile_variant(nvrtc.Compiler(cuda), PINNED, "sm_90a", tmp_path)
    assert any("overlap: " in reason and "exponentials run under products" in reason for reason in refused)


def test_a_turn_of_a_loop():
    """Past what is seldom asked for, a mask and a loop over ragged copies; never past products."""
    lines = [
        ".L_x_1:", PRODUCT, "@!P0 BRA `(.L_x_2)", "FMUL R1, R1, R2", "FMUL R1, R1, R2",
        ".L_x_2:", "@P1 BRA P2, `(.L_x_4)", ".L_x_3:", "LDGSTS.E.BYPASS.128.ZFILL [R1], [R2.64]",
        "@P3 BRA `(.L_x_3)", "BRA `(.L_x_5)", ".L_x_4:", "LDGSTS.E.BYPASS.128 [R1], [R2.64]",
        ".L_x_5:", "HMMA.16816.F32 R4, R8, R12, R4", "@P4 BRA `(.L_x_1)",
    ]  # fmt: skip
    read = listing(*lines)
    assert read.iteration_length(*max(read.loops(), key=lambda loop: loop[1] - loop[0])) == 6


def test_a_branch_from_behind_the_kernel_is_no_loop():
    """What is seldom stands there, and branches back: no turn stays between the two."""
    read = listing("@P0 BRA `(.L_x_2)", ".L_x_1:", MMA, "BRA `(.L_x_1)", ".L_x_2:", "BRA `(.L_x_1)")
    assert read.loops() == [(1, 3)]
    assert read.iteration_length(1, 2) == 2
    assert read.iteration_length(1, 3) == 0


def longest_turn(read):
    """Instructions of an iteration of its loop over keys."""

    def products(loop):
        return sum("MMA" in i.name for i in read.instructions[loop[0] : loop[1] + 1])

    # why not the most: what a warp does in a rare case stands behind the kernel and branches back, too.
    most = max(map(products, read.loops()))
    inner = [loop for loop in read.loops() if products(loop) > 0.7 * most]
    return read.iteration_length(*min(inner, key=lambda loop: loop[1] - loop[0]))


@pytest.mark.slow
@requires_nvrtc(12)
@needs_nvdisasm
class TestWhatTheSameBitsCost:
    """Instructions of an iteration of the loop over keys: at most 10 % more in decode, and 5 % in prompts."""

    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_decode(self, head_dim):
        named = {v.source: v for v in families.variants("sm_80")
                 if v.head_dim == head_dim and v.dtype == "f16" and not v.step
                 and v.source.startswith("flash_decode")}  # fmt: skip
        plain, same = (
            longest_turn(built(named[source], 12, "sm_80"))
            for source in ("flash_decode.cu", "flash_decode_in_order.cu")
        )
        assert 200 < plain < 400
        assert same <= 1.1 * plain

    def test_prompts(self, tmp_path):
        (chunks,) = (v for v in families.variants("sm_80") if v.name == "flash_forward_f16_d64_any_64x64")
        without = dataclasses.replace(
            chunks, macros=tuple((name, "0" if name == "CF_CHUNKS" else x) for name, x in chunks.macros)
        )
        compile_variant(nvrtc.Compiler(12), without, "sm_80", tmp_path)
        plain = longest_turn(sass.disassemble(tmp_path / f"{without.name}.cubin"))
        same = longest_turn(built(chunks, 12, "sm_80"))
        assert 400 < plain < 600
        assert same <= 1.05 * plain


@pytest.mark.slow
@requires_nvrtc(12)
@needs_nvdisasm
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_int4_asks_for_little_beside_its_bytes(dtype, target):
    """Instructions of a step of 16 keys in an iteration of the loop over keys.

    Four schedulers issue them in as many cycles of a key as an H200 needs for int8's bytes by 1.7: 466.
    """
    (variant,) = (
        v for v in families.variants(target) if v.name.startswith(f"flash_decode_int4_{dtype}_d128")
    )
    assert 400 < longest_turn(built(variant, 12, target)) <= 466


def _hopper(name):
    """The variant whose name begins so."""
    return next(v for v in families.variants("sm_90a") if v.name.startswith(name))


def _hopper_forward(classes, mask):
    return _hopper(f"flash_forward_sm90_f16_d{classes}_{mask}_")


# What a whole block of keys of kind spans may cost above one of the band: what it is has to be read.
ABOVE_THE_BAND = {"64": 1.01, "128": 1.01, "192v128": 1.01, "256": 1.01}


@pytest.mark.slow
@needs_nvdisasm
@requires_nvrtc(12)
@pytest.mark.parametrize("classes", ABOVE_THE_BAND)
def test_a_block_that_spans_leave_whole_costs_what_the_band_does(classes):
    """The shortest way around the loop, in instructions of a warp."""
    counts = [
        sass.shortest_iteration(built(_hopper_forward(classes, mask), 12)) for mask in ("band", "spans")
    ]
    assert 0 < counts[1] <= ABOVE_THE_BAND[classes] * counts[0]


# What a band hides in part costs a block of `causal=True` extra, as docs/kernels/forward_sm90.md has it.
CROSSED = {"64": 199, "128": 199, "192v128": 199, "256": 127}


@pytest.mark.slow
@needs_nvdisasm
@pytest.mark.parametrize("cuda", [12, 13])
@pytest.mark.parametrize("classes", CROSSED)
def test_causality_as_spans_costs_what_causality_does(classes, cuda):
    """All blocks of all tiles of 8192 keys, in instructions of a warp: 3 % more at most, 4 % at head dim 64.

    why 4: a whole block has 369 instructions there since all exponentials are ex2, and had 518.
    """
    read = {mask: built(_hopper_forward(classes, mask), cuda) for mask in ("band", "spans")}
    band, whole = (sass.shortest_iteration(each) for each in read.values())
    now = read["spans"].instructions

    def after(start, name, part=""):
        return next(i for i in range(start + 1, len(now)) if now[i].name == name and part in str(now[i]))

    # Behind the wait for S a branch passes a whole block by. Where queries have intervals a load comes first;
    # where keys have, a vote comes before bits change places. Then come a vote for both, and hidden scores.
    skips = after(after(0, "WARPGROUP", "gsb0, 0x1"), "BRA")
    softmax = read["spans"].target(now[skips])
    load = after(skips, "LDG")
    asked = after(skips, "VOTE", ".ALL")
    kept = after(asked, "VOTE", ".ALL")
    moved, hidden = after(asked, "SHFL"), after(kept, "FSEL", "-INF")
    assert skips < load < asked < moved < kept < hidden < softmax
    block_m, block_n = _hopper_forward(classes, "spans").tile
    again = 0
    if block_n == 128:  # a loop, of four keys of a lane
        of_key = max(i for i in range(asked) if now[i].name == "LDG" and not now[i].guard)
        again = 3 * sass.shortest_path(read["spans"], of_key, of_key)
        assert again

    def cost(*way):
        steps = [sass.shortest_path(read["spans"], *pair) for pair in pairwise((skips, *way, softmax))]
        assert all(steps)
        return sum(steps) - 1

    # Of a warp that sees all of a partial block, and of one that does not.
    forms = {
        "key": (again + cost(asked, kept), again + cost(asked, moved, kept, hidden)),
        "query": (cost(load, kept), cost(load, kept, hidden)),
    }
    keys = 8192
    total = dict.fromkeys(("band", *forms), 0)
    for first in range(0, keys, 16):  # of a warp
        tile, warpgroup = first // block_m * block_m, first // 64 * 64
        for block in range(0, min(tile + block_m, keys), block_n):
            end = block + block_n
            total["band"] += band + (CROSSED[classes] if warpgroup + 1 < end else 0)
            for form, (all_seen, some_hidden) in forms.items():
                more = 0 if tile + 1 >= end else all_seen if first + 1 >= end else some_hidden
                total[form] += whole + more
    most = 1.04 if classes == "64" else 1.03
    assert all(total[form] <= most * total["band"] for form in forms), (forms, total)


@pytest.mark.slow
@needs_nvdisasm
@pytest.mark.parametrize("cuda", [12, 13])
def test_a_tile_of_gradients_that_spans_leave_whole_costs_what_the_band_does(cuda):
    """The same of gradients, in tiles that both kinds have: of head dim 64."""
    counts = [
        sass.shortest_iteration(built(_hopper(f"flash_backward_sm90_f16_d64_{mask}_128x128"), cuda))
        for mask in ("band", "spans")
    ]
    assert 0 < counts[1] <= 1.03 * counts[0]


# Instructions of a helper from what it tells of a tile to its next wait, where keys with one interval see the
# tile in part. Its half of the tile is 8 parts of 32 x 32 pairs, or 4. A warp that waits for most of what it
# does takes some 5 cycles for each; a step has 3000.
PARTIAL_TILE = {"64": 340, "128": 280}


@pytest.mark.slow
@needs_nvdisasm
@pytest.mark.parametrize("cuda", [12, 13])
@pytest.mark.parametrize("head_dim", PARTIAL_TILE)
def test_a_partial_tile_of_gradients_is_short_for_helpers(head_dim, cuda):
    """Consumers wait for a helper whose tile takes it longer than a step takes them."""
    read = built(_hopper(f"flash_backward_sm90_f16_d{head_dim}_spans_"), cuda)

    def after(start, **fields):
        """The next instruction with such fields."""
        return next(
            index
            for index in range(start + 1, len(read.instructions))
            if all(getattr(read.instructions[index], field) == value for field, value in fields.items())
        )

    # What is transposed are words of queries. Behind it a key's bounds are loaded, and its words stored.
    transposed = after(after(0, name="SHFL", form=".BFLY"), name="STS")
    bounds = after(transposed, name="LDG", guard="")
    waits = after(bounds, name="SYNCS")
    words = [i for i in range(bounds, waits) if read.instructions[i].name == "STS"]
    told = max(i for i in range(transposed) if read.instructions[i][1:3] == ("@!P0", "STS"))
    keys, parts = 128 // 32 // 2, len(words)
    assert parts == {"64": 4, "128": 2}[head_dim]
    way = [told, *[bounds, *words] * keys, waits]
    steps = [sass.shortest_path(read, *pair) for pair in pairwise(way)]
    assert all(steps)
    assert sum(steps) <= PARTIAL_TILE[head_dim], steps


# ---------------------------------------------------------------------- mma.sync

MMA = "HMMA.16816.F32 R24, R8, R12, R24"
TILE = [
    ".L_x_1:", "LDSM.16.M88.4 R8, [R1]", MMA, MMA, "FADD R0, R1, R2", "@P1 BRA `(.L_x_2)",
    # a mask, which a whole tile passes over
    *["FSEL R0, R1, -INF, P2"] * 9,
    ".L_x_2:", "MUFU.EX2 R3, R4", "MUFU.EX2 R4, R4", MMA, "BAR.SYNC.DEFER_BLOCKING 0x0", "@P3 BRA `(.L_x_4)",
    "LDGSTS.E.BYPASS.128 [R2], [R4.64]", "LDGSTS.E.BYPASS.128 [R2], [R4.64]", "BRA `(.L_x_5)",
    # a ragged tile, one copy at a time
    ".L_x_4:", "LDGSTS.E.BYPASS.128 [R2], [R4.64]", "@P4 BRA `(.L_x_4)",
    ".L_x_5:", "MUFU.EX2 R5, R5", MMA, "@P0 BRA `(.L_x_1)", "EXIT",
]  # fmt: skip


def test_a_turn_is_that_of_a_whole_tile():
    """Round the loop: what follows the last product stands before the first."""
    iteration = sass.iteration(listing(*TILE))
    assert iteration.products == 4
    assert iteration.barriers == 1
    assert iteration.exponentials == 2
    assert iteration.stretches == (6, 4, 2, 0)
    assert iteration.instructions == 4 + 6 + 4 + 2
    assert iteration.doubles == 0


def test_a_loop_that_no_way_goes_round_has_no_turn():
    assert sass.iteration(listing(".L_x_1:", MMA, "EXIT", "@P0 BRA `(.L_x_1)", "EXIT")) is None


def test_a_turn_of_doubles():
    """A product is none of the arithmetic beside it, which a way past a mask has not all of."""
    product = "DMMA.884 R24, R8, R12, R24"
    lines = [
        ".L_x_1:", product, "DADD R0, R2, R4", "@P1 BRA `(.L_x_2)", "DMUL R0, R2, R4", ".L_x_2:", product,
        "DSETP.GT.AND P2, PT, R0, R2, PT", "DFMA R0, R2, R4, R6", "@P0 BRA `(.L_x_1)", "EXIT",
    ]  # fmt: skip
    iteration = sass.iteration(listing(*lines))
    assert iteration.products == 2
    assert iteration.doubles == 3
    assert iteration.stretches == (3, 2)


def test_a_kernel_without_products_has_no_turn():
    assert sass.iteration(listing(*(line for line in TILE if line != MMA))) is None
    assert sass.iteration(listing(MMA, "EXIT")) is None


@needs_nvdisasm
@pytest.mark.parametrize("cuda", [12, pytest.param(13, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("target", "name"), ISSUED)
def test_doubles_issue_what_the_cost_model_says(target, name, cuda):
    (variant,) = (v for v in families.variants(target) if v.name == name)
    iteration, issued = sass.iteration(built(variant, cuda, target), sass.COPIES), ISSUED[target, name]
    assert iteration.doubles == issued.doubles
    assert 0.9 * issued.instructions < iteration.instructions <= issued.instructions
    rows, (m, n) = 16, variant.tile
    assert issued.pairs == rows * min(m, n)
    products = {"": 2, "dkv": 4, "dq": 3}[variant.step]
    of_product = {"sm_80": 8 * 8 * 4, "sm_90a": 16 * 8 * 8}[target]
    assert iteration.products * of_product == products * issued.pairs * variant.head_dim


@needs_nvdisasm
@pytest.mark.parametrize("cuda", [12, pytest.param(13, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("target", "head_dim"), WAITING)
def test_what_stands_between_products_is_what_the_worst_case_says(target, head_dim, cuda):
    (variant,) = (
        v for v in families.variants(target)
        if v.name.startswith(f"flash_forward_bf16_d{head_dim}_band") and v.head_dim_v == head_dim
    )  # fmt: skip
    iteration, waiting = sass.iteration(built(variant, cuda, target), sass.COPIES), WAITING[target, head_dim]
    assert iteration.products == waiting.products
    assert sum(n for n in iteration.stretches if n > LEAST) == waiting.plain[cuda - 12]


UNDER = next(v for v in families.variants("sm_80") if v.name.startswith("flash_backward_dqkv_f16_d128_band"))
INTERLEAVED = "            interleaved(Share{i, kBlocks});\n"


@needs_nvdisasm
@pytest.mark.parametrize("cuda", [12, pytest.param(13, marks=pytest.mark.slow)])
def test_work_that_is_not_between_products_is_refused(cuda, tmp_path, monkeypatch):
    """As it ships the backward pass comes through; with exponentials and dS before products it does not."""
    built(UNDER, cuda, "sm_80")
    folder = tmp_path / "kernels"
    shutil.copytree(sources.folder(), folder)
    (header,) = (path for path in folder.rglob("*.cuh") if INTERLEAVED in path.read_text())
    text = header.read_text().replace(INTERLEAVED, "")
    whole = "        multiply_together<Math, kSteps>(d, a, b, interleaved);\n"
    assert whole in text
    header.write_text(text.replace(whole, "        interleaved(Share{0, 1});\n" + whole))
    monkeypatch.setattr(sources, "folder", lambda: folder)
    _, refused, _ = compile_variant(nvrtc.Compiler(cuda), UNDER, "sm_80", tmp_path)
    assert any("overlap: 32 exponentials from one product to the next" in reason for reason in refused)


SCALED = [v for v in families.variants("sm_120f") if v.mask == "band"]
# Clocks of a scheduler: a product of 8 bits on GeForce with scales, and what a MUFU takes.
CLOCKS, MUFU_CLOCKS = 16, 8


@needs_nvdisasm
@pytest.mark.parametrize("cuda", [12, pytest.param(13, marks=pytest.mark.slow)])
@pytest.mark.parametrize("variant", SCALED, ids=lambda v: v.name)
def test_products_with_scales_pay_even_if_nothing_runs_beside_them(variant, cuda):
    """Every product is one instruction, and twice the rate makes a whole block of keys 1.6 times as fast.

    Of a warp, whose products and other work follow each other; where they overlap it is less.
    """
    read = built(variant, cuda, "sm_120f")
    assert {i.form for i in read.instructions if "MMA" in i.name} == {".SF.16832.F32.E4M3.E4M3.E8"}
    (m, n), warps = variant.tile, variant.threads // 32
    products = m // warps // 16 * n // 8 * (variant.head_dim + variant.head_dim_v) // 32
    assert sum("MMA" in i.name for i in read.instructions) == products
    exponentials = m // warps // 16 * (n // 2 + 2)
    issued = max(read.iteration_length(*loop) for loop in read.loops())
    beside = max(issued - products, MUFU_CLOCKS * exponentials)
    assert (2 * CLOCKS * products + beside) / (CLOCKS * products + beside) >= 1.6
