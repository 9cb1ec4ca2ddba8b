"""Score functions compiled when it is asked for: what is made, where it is found, what is said without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import cupy_flash
from cupy_flash import CubinNotFoundError, InvalidArgumentsError
from cupy_flash.__main__ import main
from cupy_flash.api import adopted
from cupy_flash.call.describe import describe
from cupy_flash.call.given import split
from cupy_flash.cubins import locate, nvrtc, on_demand, sass, sources, user_cache
from cupy_flash.cubins.build import BuildFailed
from cupy_flash.cubins.compile import compile_variant
from cupy_flash.device import choice
from cupy_flash.plan import families
from cupy_flash.plan.catalog import SHORT
from cupy_flash.plan.choose import choose
from cupy_flash.plan.families import flash, simple
from cupy_flash.program.c_text import header
from cupy_flash.program.graph import Argument, Graph
from tests.function_cases import ALIBI, MADE

ALIBI_GRAPH = ALIBI.traced((Argument("float32", 1),))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(locate.OVERRIDE, raising=False)
    return tmp_path / "cache"


def of(function: Graph, dtype: str, head_dim: int, target: str = "sm_80") -> dict[str, Any]:
    return {v.kernel: v for v in families.of_function(function, dtype, head_dim, target)}


def test_names_are_of_the_function() -> None:
    plain = {v.name for v in families.variants("sm_80")}
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        for variant in families.of_function(ALIBI_GRAPH, dtype, 64, "sm_80"):
            assert variant.name.endswith(ALIBI_GRAPH.digest[:12])
            of_the_tables = variant.name.rpartition("_")[0] in plain
            assert of_the_tables == (variant.params != "ArgumentParams"), "whose gradients nobody else has"
            assert variant.defines()["CF_FUNCTION"] == "1"
    other = MADE["softcap"][0].traced(())
    (one,), (two,) = (
        {sources.digest(of(f, "float64", 64)["simple_forward"], "sm_80", 12)} for f in (ALIBI_GRAPH, other)
    )
    assert one != two


def test_every_kernel_of_a_plan_is_one_that_build_makes() -> None:
    for arch in ("sm_61", "sm_75", "sm_80", "sm_86", "sm_90a", "sm_120"):
        for dtype in (np.float16, np.float32, np.float64):
            for head_dim in (40, 64, 128, 192, 256):
                q = np.ones((1, 1, 8, head_dim), dtype)
                slopes = np.ones(1, np.float32)
                frozen = cupy_flash.score(ALIBI.function)
                graph = frozen.traced((Argument("float32", 1),))
                made = families.of_function(graph, np.dtype(dtype).name, head_dim, arch)
                for direction in ("forward", "backward"):
                    for reproducible in (None, "run"):
                        text = cupy_flash.explain(
                            q, q, q, arch=arch, direction=direction, reproducible=reproducible,
                            score=frozen(slopes), bias=np.ones((8, 8), dtype),
                        )  # fmt: skip
                        named = {x.split()[1] for x in text.splitlines() if x.startswith("kernel")}
                        own = {name for name in named if name.endswith(graph.digest[:12])}
                        assert own <= {v.name for v in made}
                        assert own


@pytest.mark.parametrize("arch", ["sm_61", "sm_80", "sm_90a", "sm_120"])
def test_second_order_is_made_on_request(arch: str) -> None:
    """Of every dtype, by the simple kernels; and not otherwise."""
    for dtype, head_dim in (("float16", 64), ("bfloat16", 128), ("float32", 40), ("float64", 256)):
        q = np.ones((1, 1, 8, head_dim), np.float16 if dtype == "bfloat16" else dtype)
        values, options = split({"score": ALIBI(np.ones(1, np.float32)), "bias": np.ones((8, 8))})
        lse = np.ones((1, 1, 8), np.float64 if dtype == "float64" else np.float32)
        raw = adopted(do=q, q=q, k=q, v=q, o=q, lse=lse, **values)
        problem = describe("backward", raw, options)[0]._replace(dtype=dtype)
        made = families.of_function(ALIBI_GRAPH, dtype, head_dim, arch)
        more = families.of_function(ALIBI_GRAPH, dtype, head_dim, arch, second_order=True)
        planned = set()
        for direction in ("jvp", "hvp"):
            plan = choose(problem._replace(direction=direction, want_dbias=True, seed=0), arch)
            assert plan.family == "simple"
            planned |= {launch.variant for launch in plan.launches if launch.variant.function}
        assert planned == set(more) - set(made)


def test_a_header_is_of_the_graph() -> None:
    text = header(ALIBI_GRAPH)
    assert ALIBI_GRAPH.digest in text
    assert "element_at<Real, float>(arrays[0]" in text
    assert text.count("template <class Real>") == 4
    assert "kByQuery = false, kByKey = false" in text
    assert "kShares = 0" in header(MADE["softcap"][0].traced(()))
    odd = cupy_flash.score(lambda s, b, h, i, j: np.where(s > np.inf, s * 0.1, -(2**31) + i))
    assert "Real(kInfinity)" in header(odd.traced(()))
    assert "Real(0x1.999999999999ap-4)" in header(odd.traced(()))


def test_without_kernels_the_error_names_the_call_that_makes_them(cache: Path) -> None:
    for variant, dtype, head_dim in (
        (of(ALIBI_GRAPH, "float16", 128)["flash_forward"], "float16", 128),
        (of(ALIBI_GRAPH, "float32", 100)["flash_backward_dqkv"], "float32", 128),
        (of(ALIBI_GRAPH, "float64", 64)["simple_backward_dq"], "float64", 64),
    ):
        with pytest.raises(CubinNotFoundError) as raised:
            locate.locate(variant, "sm_86", 12080)
        hint = f'build(arguments, archs=["sm_86"], dtypes=["{dtype}"], head_dims=[{head_dim}], cuda=12)'
        assert f"Try: {hint} of the score function" in str(raised.value)
    bent = families.of_function(ALIBI_GRAPH, "float64", 64, "sm_80", second_order=True)
    with pytest.raises(
        CubinNotFoundError, match=r"head_dims=\[64\], second_order=True\) of the score function"
    ):  # by a driver that loads what either compiler makes
        locate.locate(next(v for v in bent if v.kernel == "simple_hessian_dq_dot"), "sm_86", 13000)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"archs": "sm_80"}, "archs is 'sm_80'"),
        ({"archs": ["sm_80"], "dtypes": ["float8"]}, r"dtypes is \['float8'\]"),
        ({"archs": ["sm_80"], "head_dims": [0]}, r"head_dims is \[0\]"),
        ({"archs": ["sm_80"], "head_dims": [513]}, r"head_dims is \[513\]"),
        ({"archs": []}, r"archs is \[\]"),
        ({"archs": ["sm_80"], "second_order": 1}, "second_order is 1"),
        ({"archs": ["sm_80"], "cuda": 11}, "cuda is 11"),
        ({"archs": ["sm_80"], "arguments": ()}, "takes 1 argument behind j"),
    ],
)
def test_wrong_builds_are_refused(how: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgumentsError, match=rf"{says}(?s:.*)\nTry: ."):
        ALIBI.build(**{"arguments": (np.ones(1, np.float32),), **how})


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--score nowhere:f", "there is no 'nowhere:f'"),
        ("--score tests.function_cases:MADE", "is a dict"),
        ("--score tests.function_cases:ALIBI --score-arg float32", "--score-arg is"),
    ],
)
def test_wrong_words_are_refused(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "--arch", "sm_80", *words.split()]) == 1
    error = capsys.readouterr().err
    assert says in error
    assert "Try: " in error


def test_a_process_may_allow_calls_to_compile(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at first; and then what is missing once, that kernel alone, and of functions only."""
    variant = of(ALIBI_GRAPH, "float32", 96)["flash_forward"]
    assert variant.dtype not in SHORT.values()  # tf32x3 or tf32
    plain = next(v for v in families.variants("sm_80") if v.kernel == "simple_forward")
    made: list[tuple[Any, ...]] = []

    def make(*given: Any) -> list[Path]:
        made.append(given)
        monkeypatch.setattr(locate, "locate", lambda *_: "a cubin")
        return [cache]

    monkeypatch.setattr(on_demand, "COMPILED", set())
    monkeypatch.setattr(user_cache, "kernel_into_cache", make)
    with pytest.raises(CubinNotFoundError, match="are compiled when it is asked for"):
        on_demand.locate_or_compile(variant, "sm_86", 12080)
    assert cupy_flash.set_compile_policy("allow") == "refuse"
    try:
        monkeypatch.setattr(locate, "_origins", lambda: iter([locate._Origin("test", cache, "x")]))
        with pytest.raises(CubinNotFoundError):
            on_demand.locate_or_compile(plain, "sm_86", 12080)
        assert not made
        assert on_demand.locate_or_compile(variant, "sm_86", 12080) == "a cubin"
        assert made == [(variant, "sm_86", (12,))]
        assert on_demand.locate_or_compile(variant, "sm_86", 12080) == "a cubin"
        assert len(made) == 1
        assert {cache} == on_demand.COMPILED
    finally:
        assert cupy_flash.set_compile_policy("refuse") == "allow"
    with pytest.raises(InvalidArgumentsError, match=r"policy is 'yes'(?s:.*)Try: ."):
        cupy_flash.set_compile_policy("yes")  # type: ignore[arg-type]


def test_kernels_of_every_head_dim_are_built(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `build`, and by a call that may compile; flash kernels have more classes than simple ones."""
    del cache
    compiled: set[str] = set()
    told: list[bool] = []

    def build(_cuda: int, _archs: Any, _store: Path, *, only: Any, every: Any, progress: bool) -> list[Any]:
        compiled.update({v.name for v in every("sm_80")} & {*only})
        told.append(progress)
        return []

    monkeypatch.setattr(user_cache, "build", build)
    for dtype, head_dim in (("float16", 24), ("float32", 96), ("bfloat16", 160)):
        made = {v.name: v for v in families.of_function(ALIBI_GRAPH, dtype, head_dim, "sm_80")}
        ALIBI.build((np.ones(1, np.float32),), archs=["sm_80"], dtypes=[dtype], head_dims=[head_dim])
        assert compiled == made.keys()
        compiled.clear()
    second = {"archs": ["sm_80"], "dtypes": ["float64"], "head_dims": [64], "second_order": True}
    ALIBI.build((np.ones(1, np.float32),), **second)
    assert compiled == {
        v.name for v in families.of_function(ALIBI_GRAPH, "float64", 64, "sm_80", second_order=True)
    }
    compiled.clear()
    flash_kernel = next(name for name in made if name.startswith("flash_forward"))
    user_cache.kernel_into_cache(made[flash_kernel], "sm_80", (12,))
    assert compiled == {flash_kernel}
    assert told == [True] * 4 + [False]


@pytest.mark.skipif(os.name == "nt", reason="modes of POSIX")
def test_a_cache_is_private_before_it_is_filled(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the umask; one that others may write to is not filled, but a folder that the user names is."""
    modes: list[int] = []

    def build(_cuda: int, _archs: Any, store: Path, **_: Any) -> list[Any]:
        modes.append(store.stat().st_mode & 0o777)
        return []

    def of_function(**out: Path) -> None:
        user_cache.function_into_cache(ALIBI_GRAPH, ["sm_80"], ["float32"], [64], (12,), **out)

    monkeypatch.setattr(user_cache, "build", build)
    shared = locate.functions_cache(ALIBI_GRAPH, tmp_path / "shared")
    old = os.umask(0)
    try:
        shared.mkdir(parents=True)
        user_cache.into_user_cache(["sm_80"])
        of_function()
    finally:
        os.umask(old)
    assert modes == [0o700] * 2
    of_function(out=tmp_path / "shared")
    assert modes.pop() == 0o777
    for folder in (locate.user_cache(), locate.functions_cache(ALIBI_GRAPH)):
        assert folder.is_relative_to(cache)
        folder.chmod(0o777)
    for fill in (of_function, lambda: user_cache.into_user_cache(["sm_80"])):
        with pytest.raises(CubinNotFoundError, match="in the cubin cache"):
            fill()
    assert modes == [0o700] * 2


@pytest.mark.parametrize(
    ("driver", "arch", "compilers", "cuda"),
    [(12080, "sm_86", (12, 13), 12), (12080, "sm_86", (13,), 12), (13000, "sm_86", (12, 13), 13),
     (13000, "sm_86", (12,), 12), (13000, "sm_86", (), 13), (13000, "sm_70", (12, 13), 12),
     (13000, "sm_75", (12, 13), 13), (13000, "sm_70 sm_90", (12, 13), 12),
     (None, "sm_86", (12, 13), 12), (None, "sm_86", (13,), 13), (None, "sm_70", (13,), 12)],
)  # fmt: skip
def test_what_is_built_is_what_the_driver_looks_for(
    driver: int | None, arch: str, compilers: tuple[int, ...], cuda: int,
    cache: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """For this machine's GPUs; for others, without a driver to ask, what most drivers load."""
    del cache
    made: list[tuple[int, list[str]]] = []
    here = mock.Mock(
        devices=lambda: [mock.Mock(arch=x) for x in arch.split() * 2], driver_version=lambda: driver
    )
    monkeypatch.setattr(choice, "gpu_driver", lambda _: here)
    monkeypatch.setattr(nvrtc, "installed", compilers.__contains__)
    monkeypatch.setattr(user_cache, "build", lambda cuda, archs, *_, **__: made.append((cuda, archs)) or [])
    words = ["build"] if driver else ["build", "--arch", arch]
    assert main(words) == 0
    assert main([*words, "--score", "tests.function_cases:ALIBI", "--score-arg", "float32:1"]) == 0
    ALIBI.build((np.ones(1, np.float32),), archs=None if driver else [arch])
    assert made == [(cuda, arch.split())] * 3
    assert main([*words, "--cuda", "12"]) == 0
    ALIBI.build((np.ones(1, np.float32),), archs=None if driver else [arch], cuda=12)
    assert made[3:] == [(12, arch.split())] * 2
    assert main([*words, "--cuda", "13"]) == 0  # the compiler refuses what it does not have
    assert made[5:] == [(13, arch.split())]


def test_no_call_imports_a_compiler() -> None:
    """Neither one that computes on the CPU, nor one that finds no kernel."""
    code = """
import sys
from pathlib import Path
import numpy as np, cupy_flash
from cupy_flash.cubins import locate
from cupy_flash.plan import families
q = np.ones((1, 2, 8, 64), np.float16)
alibi = cupy_flash.score(lambda s, b, h, i, j, slope: s - slope[h] * (i - j), learned="slope")
how = {"score": alibi(np.ones(2, np.float32))}
o, lse = cupy_flash.attention(q, q, q, return_lse=True, **how)
cupy_flash.attention_backward(o, q, q, q, o, lse, **how)
cupy_flash.explain(q, q, q, arch="sm_80", **how)
from cupy_flash.program.graph import Argument
graph = alibi.traced((Argument("float32", 1),))
from cupy_flash.cubins import on_demand
try:
    on_demand.locate_or_compile(families.of_function(graph, "float16", 64, "sm_80")[0], "sm_80", 12080)
except cupy_flash.CubinNotFoundError:
    maps = Path("/proc/self/maps")
    loaded = maps.read_text() if maps.exists() else ""
    print([x for x in sys.modules if x.startswith("nvidia")], "libnvrtc" in loaded)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[] False"


def relative(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any, middle: Any) -> Any:
    return s + table[h, i - j + middle]


@pytest.mark.slow
@pytest.mark.skipif(sass.disassembler() is None, reason=f"nvdisasm is not installed: {sass.REQUIREMENT}")
def test_functions_take_on_tensor_cores_what_options_take(tmp_path: Path) -> None:
    """At most 10 % of a block of keys more, as docs/score_functions.md says."""
    if not nvrtc.installed(12):
        pytest.skip("NVRTC is not installed")
    compiler, of_block = nvrtc.Compiler(12), 700
    made: dict[str, tuple[Graph, int]] = {
        "alibi": (ALIBI_GRAPH, 61),
        "softcap": (cupy_flash.score(lambda s, b, h, i, j: 20.0 * np.tanh(s / 20.0)).traced(()), 227),
        "relative": (
            cupy_flash.score(relative).traced((Argument("float32", 2), Argument("int32", 0))), 8 * 87
        ),
    }  # fmt: skip

    def loop(variant: Any) -> int:
        _, refused, _ = compile_variant(compiler, variant, "sm_80", tmp_path)
        assert not refused
        listing = sass.disassemble(tmp_path / f"{variant.name}.cubin")
        return max(end - first for first, end in listing.loops())

    plain = loop(replace(of(ALIBI_GRAPH, "float16", 64)["flash_forward"], function=None))
    for name, (graph, option) in made.items():
        added = loop(of(graph, "float16", 64)["flash_forward"]) - plain
        assert 0 < added <= option + 0.1 * of_block, (name, added)


@pytest.mark.slow
def test_what_a_call_misses_is_compiled(cache: Path) -> None:
    if not nvrtc.installed(12):
        pytest.skip("NVRTC is not installed")
    variant = of(ALIBI_GRAPH, "float64", 64)["simple_forward"]
    cupy_flash.set_compile_policy("allow")
    try:
        found = on_demand.locate_or_compile(variant, "sm_80", 12080)
    finally:
        cupy_flash.set_compile_policy("refuse")
    assert found.origin == "user cache"
    assert [path.stem for path in found.path.parent.glob("*.cubin")] == [variant.name]


@pytest.mark.slow
def test_built_found_kept_and_shipped(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not nvrtc.installed(12):
        pytest.skip("NVRTC is not installed")
    given = (np.ones(1, np.float32),)
    how: dict[str, Any] = {"archs": ["sm_80"], "dtypes": ["float64"], "cuda": 12}
    (folder,) = ALIBI.build(given, head_dims=[64], **how)
    variant, wider = (of(ALIBI_GRAPH, "float64", d)["simple_forward"] for d in (64, 128))
    found = locate.locate(variant, "sm_86", 12080)
    assert (found.origin, found.target, found.path.parent) == ("user cache", "sm_80", folder)
    with pytest.raises(CubinNotFoundError):
        locate.locate(wider, "sm_86", 12080)
    # More of the same function leaves what is there.
    words = ["--score", "tests.function_cases:ALIBI", "--score-arg", "float32:1", "--dtype", "float64"]
    assert main(["build", *words, "--arch", "sm_80", "--head-dim", "128", "--cuda", "12"]) == 0
    assert capsys.readouterr().out.strip() == str(folder)
    assert locate.locate(variant, "sm_80", 12080).sha256 == found.sha256
    assert locate.locate(wider, "sm_80", 12080)
    # What second order takes is built when it is asked for, and stays when something else is.
    second = families.of_function(ALIBI_GRAPH, "float64", 64, "sm_80", second_order=True)
    tangent = next(v for v in second if v.kernel == "simple_tangent")
    with pytest.raises(CubinNotFoundError):
        locate.locate(tangent, "sm_80", 12080)
    assert main(["build", *words, "--arch", "sm_80", "--cuda", "12", "--second-order"]) == 0
    capsys.readouterr()
    ALIBI.build(given, head_dims=[128], **how)
    assert locate.locate(tangent, "sm_80", 12080)
    # A folder may be anywhere, and holds those of several functions.
    for function, arguments in ((ALIBI, given), (MADE["softcap"][0], ())):
        function.build(arguments, out=tmp_path / "mine", head_dims=[64], **how)
    (cache / "cupy_flash").rename(tmp_path / "elsewhere")
    monkeypatch.setenv(locate.OVERRIDE, str(tmp_path / "mine"))
    assert locate.locate(variant, "sm_80", 12080).origin == locate.OVERRIDE
    # What is damaged is refused by name, with the call that mends it.
    path = locate.locate(variant, "sm_80", 12080).path
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CubinNotFoundError, match=r"cannot be used(?s:.*)build\(arguments"):
        locate.locate(variant, "sm_80", 12080)
    held = json.loads((path.parent / "manifest.json").read_text())
    assert all(name.endswith(ALIBI_GRAPH.digest[:12]) for name in held["cubins"])


def test_a_text_that_does_not_compile_is_shown_by_its_line(tmp_path: Path) -> None:
    if not nvrtc.installed(12):
        pytest.skip("NVRTC is not installed")
    wrong = cupy_flash.score("\ntemplate <class T>\nT score(T s, int b, int h, int i, int j) { return z; }")
    with pytest.raises(BuildFailed, match=r'score text\(3\): error: identifier "z" is undefined'):
        wrong.build(archs=["sm_80"], dtypes=["float64"], out=tmp_path, cuda=12)


def test_families_name_what_they_make() -> None:
    assert flash.of_function(ALIBI_GRAPH, "f64", 64, families.architecture("sm_80")) == []
    assert flash.of_function(ALIBI_GRAPH, "f16", 300, families.architecture("sm_80")) == []
    assert flash.of_function(ALIBI_GRAPH, "f16", 64, families.architecture("sm_61")) == []
    assert len(simple.of_function(ALIBI_GRAPH, "f64", 512)) == 6
    capped = MADE["softcap"][0].traced(())
    assert len(simple.of_function(capped, "f64", 512)) == 4


def test_what_is_learned_changes_no_kernel() -> None:
    """torch says in each call which arguments are; what is built serves them all."""
    kinds = (Argument("float32", 1),)
    graphs = [cupy_flash.score(ALIBI.function, learned=x).traced(kinds) for x in ((), ("slope",))]
    assert graphs[0] != graphs[1]
    texts = {header(graph) for graph in graphs}
    assert len(texts) == 1
    names = [{v.name for v in families.of_function(g, "float16", 64, "sm_80")} for g in graphs]
    assert names[0] == names[1]
    q = np.ones((1, 1, 8, 64), np.float16)
    for function, passes in ((cupy_flash.score(ALIBI.function), 0), (ALIBI, 2)):
        text = cupy_flash.explain(
            q, q, q, arch="sm_80", direction="backward", score=function(np.ones(1, np.float32))
        )
        own = {x.split()[1] for x in text.splitlines() if x.startswith("kernel")}
        assert sum("args" in name for name in own) == passes
        assert {name for name in own if ALIBI_GRAPH.digest[:12] in name} <= names[0]
