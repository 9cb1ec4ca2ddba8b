"""choose is pure: golden plans, the rules of the catalog, and refusals."""

import re

import pytest

from cupy_flash import UnsupportedError
from cupy_flash.call.problem import Problem
from cupy_flash.cpu.core import family as cpu_core
from cupy_flash.plan import catalog, families
from cupy_flash.plan.choose import choose
from cupy_flash.plan.families import decode
from tests import kernel_tables
from tests.paths import KERNELS_CU
from tests.plan_cases import BASE, CASES, golden_path, golden_text


@pytest.mark.parametrize("case", CASES)
def test_plan_is_the_golden_one(case):
    assert golden_text(case) == golden_path(case).read_text(), "if meant: python scripts/update_golden.py"


@pytest.mark.parametrize("name", kernel_tables.CASES)
def test_options_reach_kernels_that_take_them(name):
    """A kernel that ignores an option, or adds in an order that was not promised, gives wrong numbers."""
    expected = kernel_tables.golden_path(name).read_text()
    assert kernel_tables.golden_text(name) == expected, "if meant: python scripts/update_golden.py"


@pytest.mark.parametrize("arch", [row.target for row in catalog.ARCHITECTURES])
def test_every_variant_has_its_own_name_and_fits(arch):
    built = families.variants(arch)
    names = [variant.name for variant in built]
    assert len(set(names)) == len(names)
    smallest = min(row.shared_bytes for row in catalog.ARCHITECTURES if row.target == arch)
    for variant in built:
        assert re.fullmatch(r"[a-z0-9_]+", variant.name)
        if variant.kernel.startswith("simple"):
            assert variant.shared_bytes <= min(smallest, 48 * 1024), variant.name


@pytest.mark.parametrize("arch", [row.name for row in catalog.ARCHITECTURES])
@pytest.mark.parametrize("case", CASES)
def test_what_is_planned_is_compiled_and_fits(case, arch):
    row = catalog.architecture(arch)
    if case == "decode_e4m3_d64_window" and "decode" not in row.families:
        pytest.skip("8-bit caches of 16-bit queries need the tensor cores of Turing")
    if case == "decode_e4m3_d512" and row.capability < 80:
        pytest.skip("8-bit caches of head dims above 256 need the asynchronous copies of sm_80")
    if "_latents" in case and row.capability < 80:
        pytest.skip("latents need the asynchronous copies of sm_80")
    if case == "decode_f32_d256" and row.capability < 80:
        pytest.skip("float32 is for the simple kernels here, and they do not split keys")
    if "_d576_" in case and row.capability < 80:
        pytest.skip("only the tensor cores of sm_80 have a kernel for 576 columns of q and k")
    if "_e4m3_" in case and case.startswith("forward") and not {"hopper", "fp8"} & {*row.families}:
        pytest.skip("no tensor core here multiplies 8-bit floats in a kernel of ours")
    built = {variant for target in row.targets for variant in families.variants(target)}
    for launch in choose(CASES[case], arch).launches:
        assert launch.variant in built
        assert launch.shared_bytes <= row.shared_bytes
        assert launch.grid[0] < 2**31
        assert max(launch.grid[1:]) < 2**16
        assert launch.block[0] <= 1024


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("scale", [0.0, -0.125])
def test_kernels_that_assume_a_positive_scale_get_one(scale, arch):
    """They take the maximum before they multiply: their headers say so, some for all masks but "any"."""
    served = 0
    for case in CASES.values():
        try:
            launches = choose(case._replace(scale=scale), arch).launches
        except UnsupportedError:
            continue
        served += 1
        for variant in (launch.variant for launch in launches):
            header = " ".join((KERNELS_CU / variant.source).read_text().split("#include")[0].split())
            said = re.search(r"scale > 0( // unless| unless)?", header)
            assert not said or (said[1] and variant.mask == "any"), variant.name
    assert served > 30


def test_a_higher_minor_takes_the_row_below_and_no_other_major_does():
    assert catalog.architecture("sm_88").target == catalog.architecture("sm_87").target == "sm_80"
    assert catalog.architecture("sm_89").target == "sm_86"
    assert catalog.architecture("sm_90").target == "sm_90a"
    assert catalog.architecture("sm_121").target == "sm_120"
    for unknown in ("sm_52", "sm_110", "gfx90a", "sm_"):
        with pytest.raises(UnsupportedError, match="no kernel is compiled"):
            catalog.architecture(unknown)


def test_a_refusal_lists_every_family_and_a_way_out():
    with pytest.raises(UnsupportedError) as error:
        choose(BASE._replace(head_dim=1024), "sm_90")
    text = str(error.value)
    assert text.splitlines()[0] == "no kernel fits this problem on sm_90."
    for family in families.FAMILIES:
        of_family = "head_dim" if family.NAME in catalog.architecture("sm_90").families else "is not compiled"
        assert re.search(rf"^  {family.NAME} .*{of_family}", text, re.M), text
    assert text.splitlines()[-1].startswith("Try: ")


def test_a_grid_beyond_31_bits_is_refused():
    short = BASE._replace(heads_q=1, heads_k=1, seqlen_q=1)
    with pytest.raises(UnsupportedError, match=r"simple +needs a grid of 2147483648 blocks"):
        choose(short._replace(batch=2**31), "sm_80")
    assert choose(short._replace(batch=2**31 - 1), "sm_80").launches[0].grid == (2**31 - 1, 1, 1)


def test_splits_follow_the_cost():
    """A batch that fills the GPU is not split; a single long sequence fills it in one wave of blocks."""
    long, short = CASES["decode_f16_d128_32k"], {"seqlen_k": 256}
    line = re.compile(
        r"splits +(\d+) of (\d+) steps; (\d+) thread blocks, (\d+) at once; cost ([\d.]+), unsplit ([\d.]+)"
    )

    def chosen(problem, arch):
        (note,) = choose(problem, arch).notes
        return [float(x) for x in line.fullmatch(note).groups()]

    for arch in ("sm_75", "sm_80", "sm_86", "sm_90a", "sm_120"):
        splits, _, blocks, at_once, cost, unsplit = chosen(long, arch)
        assert splits > 1
        assert 0.75 * at_once <= blocks <= at_once
        assert cost < unsplit / 4
        assert chosen(long._replace(**short), arch)[0] == 1
        assert chosen(long._replace(batch=256), arch)[0] <= 2  # a last wave that is nearly empty costs too
        asked = long._replace(cache=long.cache._replace(splits=5))
        assert chosen(asked, arch)[0] == 5


def test_cost_of_splits():
    # waves x (steps + start and end of a block) + merging
    assert decode.split_cost(1, 8, 512, 264) == 512 + 10
    assert decode.split_cost(32, 8, 512, 264) == pytest.approx(16 + 10 + 4 + 0.22 * 32)
    assert decode.split_cost(40, 8, 512, 264) == pytest.approx(2 * (13 + 10) + 4 + 0.22 * 40)


def test_a_tile_that_was_not_built_is_refused_with_those_that_were():
    with pytest.raises(UnsupportedError, match=r"tile \(17, 19\) is not built \(built: "):
        choose(BASE._replace(tile=(17, 19)), "sm_80")


class _WithNewOption(Problem):
    """A problem with an option of scores that no kernel has heard of."""

    @property
    def score_options(self):
        return super().score_options | {"shade": True}


@pytest.mark.parametrize("arch", ["sm_70", "sm_80", "sm_90", "sm_120"])
def test_a_new_option_is_refused_until_a_family_reads_it(arch):
    """A kernel that ignores an option gives wrong numbers."""
    for problem in CASES.values():
        of_core = cpu_core.refusals(_WithNewOption(*problem))
        assert "does not read shade" in of_core, problem.summary()
        with pytest.raises(UnsupportedError):
            choose.__wrapped__(_WithNewOption(*problem), arch)


# Fields of a problem that neither change scores nor weights, or that every kernel reads.
NOT_OF_SCORES = {
    "direction", "dtype", "precision", "batch", "heads_q", "heads_k", "seqlen_q", "seqlen_k", "head_dim",
    "head_dim_v", "scale", "offset", "left", "right", "offset_from_end", "learned_elements", "bias_dtype",
    "per_head", "seed", "want_lse", "want_dbias", "deterministic", "packed", "tile", "rows_q", "rows_k",
    "sequence", "in_rows", "aligned", "boxes", "cache", "of_float8", "reproducible", "used_q", "ragged_mask",
    "unrounded", "wanted",
}  # fmt: skip


def test_every_field_that_changes_scores_is_an_option_of_them():
    fields = {*Problem._fields} - NOT_OF_SCORES
    given = [BASE._replace(**{name: 1.0}, per_head=("alibi_slopes",)).unread(()) for name in fields]
    assert all(len(names) == 2 for names in given), (fields, given)
