"""Messages speak in names that a caller can see: no text of the package has a name of its inside."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import (
    BlockMask,
    InvalidArgumentsError,
    QuantizedArray,
    QuantizedCache,
    RaggedMask,
    Rotary,
    Spans,
    Tuning,
    UnsupportedError,
)
from cupy_flash.call.options import CacheOptions, DenseOptions, declared
from cupy_flash.call.public_names import PUBLIC_NAMES, public_name
from cupy_flash.call.signature import INSTEAD
from tests.paths import ROOT

# Adapters are read where their framework is installed.
pytestmark = [pytest.mark.torch, pytest.mark.jax]

PACKAGE = ROOT / "cupy_flash"

# Modules whose strings are no messages.
NO_MESSAGES = {
    "call/progress.py": "a format of tqdm",
    "cubins/compile.py": "flags of a compiler",
    "device/host_build.py": "flags of a compiler",
    "device/simulator.py": "C++",
    "program/c_text.py": "C++",
    "program/machine.py": "operations of the interpreter with their types",
    "program/operations.py": "C++",
    "torch/call.py": "schemas of operators",
    "torch/ops.py": "schemas of operators",
    "torch/second_order.py": "schemas of operators",
}

# Whose parameters and attributes a message may name: those of cupy_flash, and of the module's own adapter.
CORE = ("", "derivatives", "functions", "quantized", "spans")
OWN = {
    "parallel/": ("parallel", "parallel.mpi"),
    "torch/": ("torch",),
    "jax/": ("jax", "jax.flax"),
    "flash_attn/": ("torch", "flash_attn", "flash_attn.modules.mha", "flash_attn.bert_padding"),
    "flash_attn_3.py": ("torch", "flash_attn", "flash_attn_3"),
    "transformers.py": ("torch", "transformers"),
    "testing/": ("testing",),
}
# Names that a message may have though no parameter is called so, and why.
ALLOWED = {
    "bottom_right": "a value of align",
    "float8_e4m3fn": "a dtype",
    "from_dlpack": "a function of every array library",
    "heads_q": "an axis, as docstrings have it",
    "kernels_cpu": "a folder of the sources",
    "kernels_cu": "a folder of the sources",
    "mask_mod": "what torch calls mask functions",
    "ml_dtypes": "a package",
    "of_torch": "the parameter of cupy_flash.torch.block_mask",
    "score_mod": "what torch calls score functions",
    "seqlen_q": "an axis, as docstrings have it",
    "top_left": "a value of align",
    # of other libraries, where a hint says what to call there
    "attn_implementation": "transformers",
    "create_block_mask": "torch",
    "create_graph": "torch",
    "device": "torch",
    "fullgraph": "torch",
    "need_weights": "torch",
    "output_attentions": "transformers",
    "register_flash_attention_impl": "torch",
    "rngs": "flax",
    "static_argnames": "jax",
}


def _modules(path: str) -> tuple[str, ...]:
    return CORE + next((names for start, names in OWN.items() if path.startswith(start)), ())


@cache
def visible(names: tuple[str, ...]) -> frozenset[str]:
    """Parameters, fields and attributes of the public functions and classes of some modules."""
    found: set[str] = set()
    for name in names:
        try:
            module = importlib.import_module("cupy_flash" + f".{name}" * bool(name))
        except ImportError:
            continue
        for public in getattr(module, "__all__", ()):
            found |= {public, *_of(getattr(module, public))}
    return frozenset(found)


def _of(thing: Any) -> Iterator[str]:
    """What a user sees of a function or class."""
    if inspect.ismodule(thing) or not callable(thing):
        return
    with contextlib.suppress(TypeError, ValueError):  # classes of C have no signature
        yield from inspect.signature(thing).parameters
    if inspect.isclass(thing):
        yield from getattr(thing, "_fields", ())
        yield from (
            (field.name for field in dataclasses.fields(thing)) if dataclasses.is_dataclass(thing) else ()
        )
        for name, member in vars(thing).items():
            if not name.startswith("_"):
                yield name
                if inspect.isfunction(member):
                    yield from inspect.signature(member).parameters


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Strings of several words but docstrings, with the line of each; \\0 stands for what is filled in."""
    parts = {id(x) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for x in node.values}
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) in parts or id(node) in alone:
            continue
        if isinstance(node, ast.JoinedStr):
            text = "".join(x.value if isinstance(x, ast.Constant) else "\0" for x in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if " " in text.strip():
            yield node.lineno, text


def without_a_way_out(path: Path) -> Iterator[int]:
    """Lines of a module that make one of our errors without its hint, the fourth argument."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", None)
        given = len(node.args) > 3 or any(word.arg == "hint" for word in node.keywords)
        if name in ("InvalidArgumentsError", "UnsupportedError", "CubinNotFoundError") and not given:
            yield node.lineno


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.stem)
def test_every_error_says_what_to_try(path: Path) -> None:
    assert not [*without_a_way_out(path)]


# What the adapters import.
FRAMEWORKS = {"torch": "torch", "flash_attn": "torch", "jax": "jax", "transformers": "transformers"}
FIELDS = (*Tuning._fields, "interleaved", "on_read", "seqlens")
# A name with an underscore, or one that something is assigned to; no attribute, and not filled in by half.
NAME = re.compile(r"(?<![\w.\0\"'/-])(?:[a-z][a-z0-9]*(?:_[a-z0-9]+)+|[a-z]\w*(?==(?!=)))(?![\w\0])")
ARCHITECTURE = re.compile(r"sm_\d+a?")
OURS = re.compile(r"cupy_flash((?:\.[A-Za-z]\w*)+)(?!\w*\0)")


def is_there(path: str) -> bool:
    """Whether cupy_flash has what a message says it has, such as ".spans.tree"."""
    thing: Any = cupy_flash
    for name in path.split(".")[1:]:
        if not hasattr(thing, name):
            try:
                importlib.import_module(f"{thing.__name__}.{name}")
            except ModuleNotFoundError as error:
                return not str(error.name).startswith("cupy_flash")  # a framework that is not installed
            except AttributeError:
                return False
        thing = getattr(thing, name)
    return True


def unknown(path: Path) -> list[str]:
    """Names of a module's texts that no user can see."""
    inside = path.relative_to(PACKAGE).as_posix()
    if inside in NO_MESSAGES:
        return []
    seen = visible(_modules(inside)) | ALLOWED.keys() | {"cupy_flash"}
    found = []
    for line, text in texts(ast.parse(path.read_text())):
        names = {x for x in NAME.findall(text) if x not in seen and not ARCHITECTURE.fullmatch(x)}
        names |= {f"cupy_flash{x}" for x in OURS.findall(text) if not is_there(x)}
        # A field of Tuning or Rotary is no option: not after "(" and "." it stands for one.
        if "Rotary(" not in text:
            names |= {x for x in FIELDS if re.search(rf"(?<![\w.(]){x}=(?!=)", text)}
        found += [f"{inside}:{line}: {name}: {text!r}" for name in sorted(names)]
    return found


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_texts_have_no_name_that_nobody_can_see(path: Path) -> None:
    for name in _modules(path.relative_to(PACKAGE).as_posix()):
        if name.split(".")[0] in FRAMEWORKS:
            pytest.importorskip(FRAMEWORKS[name.split(".")[0]])
    found = unknown(path)
    assert not found, "\n".join(["say what the caller wrote, see call/public_names.py:", *found])


def test_the_search_finds_what_it_is_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inner names and fields that stand for options are found; fields, parameters and attributes are not."""
    monkeypatch.setattr("tests.cpu.test_error_names.PACKAGE", tmp_path)
    module = tmp_path / "x.py"
    for bad in (
        "rotary_cos is short.",
        "k_zero and more",
        "splits=4 is asked for",
        "see cupy_flash.int4.quantize",
    ):
        module.write_text(f"raise ValueError({bad!r})")
        assert unknown(module), bad
    for good in ("rotary.cos is short", "cu_seqlens_q is {n}", "cupy_flash.Tuning(splits=4), or None",
                 "cupy_flash.quantized.int4 makes it", "tuning.splits=4 is asked for"):  # fmt: skip
        module.write_text(f'"""Of rotary_cos."""\nraise ValueError({good!r})')
        assert not unknown(module), good


def test_every_part_of_an_option_has_a_public_name() -> None:
    for options in (DenseOptions, CacheOptions):
        for name, option in declared(options).items():
            for part in option.parts:
                owner = re.split(r"[.\[]", public_name(part))[0]
                assert owner == name, f"{part} is part of {name}"


# ------------------------------------------------------------------------------------------------ calls


def f(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


Q, K, ROW, CACHE, NEW, TABLE = (
    f(2, 4, 8, 16),
    f(2, 2, 8, 16),
    f(2, 4, 1, 16),
    f(2, 2, 32, 16),
    f(2, 2, 1, 16),
    f(32, 8),
)
LENGTHS = np.array([3, 5], np.int32)
CODES, UNITS = np.zeros((2, 2, 32, 8), np.uint8), np.ones((2, 2, 32, 1), np.float16)
INT4 = QuantizedCache(CODES, UNITS, UNITS)
CUT = np.array([0, 8, 16], np.int32)


def of_dense(**options: Any) -> Any:
    return cupy_flash.attention(Q, K, K, **options)


def of_packed(**options: Any) -> Any:
    return cupy_flash.attention_varlen(f(16, 4, 16), f(16, 2, 16), f(16, 2, 16), CUT, CUT, **options)


def over_cache(**options: Any) -> Any:
    given = {"k_cache": CACHE, "v_cache": CACHE, "cache_seqlens": LENGTHS, **options}
    return cupy_flash.attention_with_kv_cache(ROW, given.pop("k_cache"), given.pop("v_cache"), **given)


def over_int4(**parts: Any) -> Any:
    return cupy_flash.attention_with_kv_cache(
        f(2, 4, 1, 16), INT4._replace(**parts), INT4, cache_seqlens=LENGTHS
    )


INT8 = QuantizedCache(CACHE.astype(np.int8), f(2))
SCORE = cupy_flash.score(lambda s, b, h, i, j, table: s + table[h])
BITS = np.zeros((1, 16, 2), np.uint8)
MISTAKES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "spans list": (of_dense, {"mask": Spans([1, 2])}, "mask.bounds is a list"),
    "spans dtype": (of_dense, {"mask": Spans(f(1, 8, 2))}, "mask.bounds has dtype float32"),
    "spans shape": (of_dense, {"mask": Spans(np.zeros((3, 2), np.int32))}, "mask.bounds has shape (3, 2)"),
    "blocks list": (of_dense, {"mask": BlockMask([[0]], BITS)}, "mask.table is a list"),
    "blocks dtype": (of_dense, {"mask": BlockMask(f(1, 1), BITS)}, "mask.table has dtype float32"),
    "bits dtype": (of_dense, {"mask": BlockMask(np.zeros((1, 1), np.int32), f(1, 16, 2))}, "mask.bits has"),
    "ragged": (of_packed, {"mask": RaggedMask(np.ones(9, bool))}, "mask.bits is (9,)"),
    "ragged list": (of_packed, {"mask": RaggedMask([True])}, "mask.bits is a list"),
    "mask function": (of_dense, {"mask": lambda b, h, i, j: i >= j}, "Try: mask=cupy_flash.mask(f)"),
    "argument": (of_dense, {"score": SCORE(np.ones(4, np.int16))}, "arguments[0] has dtype int16"),
    "argument list": (of_dense, {"score": SCORE([1.0])}, "arguments[0] is a list"),
    "tile": (of_dense, {"tuning": Tuning(tile=64)}, "tuning.tile is 64"),  # type: ignore[arg-type]
    "tile of a mode": (of_dense, {"tuning": Tuning(tile=(8, 8)), "reproducible": "batch"}, "tuning.tile="),
    "cos list": (over_cache, {"rotary": Rotary([1.0], TABLE)}, "rotary.cos is a list"),
    "cos dtype": (over_cache, {"rotary": Rotary(TABLE, f(32, 8).astype(int))}, "rotary.sin int64"),
    "cos alone": (over_cache, {"rotary": Rotary(TABLE, None)}, "rotary.cos is given without rotary.sin"),
    "cos short": (over_cache, {"rotary": Rotary(f(8, 8), f(8, 8))}, "rotary.cos has 8 positions"),
    "rotary seqlens": (over_cache, {"rotary": Rotary(TABLE, TABLE, f(2))}, "rotary.seqlens is (2,)"),
    "interleaved": (over_cache, {"rotary": Rotary(TABLE, TABLE, interleaved=1)}, "rotary.interleaved is 1"),  # type: ignore[arg-type]
    "last": (over_cache, {"rotary": Rotary(TABLE, TABLE, last=1)}, "rotary.last is 1"),  # type: ignore[arg-type]
    "on_read": (over_cache, {"rotary": Rotary(TABLE, TABLE, LENGTHS, on_read=True)}, "rotary.on_read is"),
    "prefix list": (over_cache, {"prefix": ([1], CACHE[0])}, "prefix[0] is a list"),
    "prefix alone": (over_cache, {"prefix": (CACHE[0], None)}, "prefix has no values"),
    "slots": (over_cache, {"block_table": np.array([0, 1])}, "block_table has dtype int64"),
    "slots shape": (over_cache, {"block_table": np.zeros(3, np.int32)}, "block_table has shape (3,)"),
    "splits": (over_cache, {"tuning": Tuning(splits=0)}, "tuning.splits is 0"),
    "check": (over_cache, {"tuning": Tuning(check=1)}, "tuning.check is 1"),  # type: ignore[arg-type]
    "workspace": (over_cache, {"tuning": Tuning(workspace=[1])}, "tuning.workspace is a list"),
    "int8 alone": (over_cache, {"k_cache": INT8.codes, "v_cache": INT8.codes}, "k_cache.scale is not given"),
    "scale list": (over_cache, {"k_cache": INT8._replace(scale=[1.0]), "v_cache": INT8}, "k_cache.scale"),
    "scale shape": (over_cache, {"k_cache": INT8, "v_cache": INT8._replace(scale=f(3))}, "v_cache.scale has"),
    "scale of float": (over_cache, {"k_cache": QuantizedCache(CACHE, f(2))}, "k_cache.scale is given"),
    "zero dtype": (over_int4, {"zero": UNITS.astype(int)}, "k_cache.scale has dtype"),
    "zero list": (over_int4, {"zero": [1.0]}, "k_cache.zero is a list"),
    "both kinds": (over_int4, {"block_scale": UNITS}, "k_cache.zero and k_cache.block_scale"),
    "leftpad": (over_cache, {"cache_leftpad": f(2)}, "cache_leftpad is (2,)"),
}  # fmt: skip
INNER = re.compile(
    rf"(?<![\w.\[])(?:{'|'.join(name for name in PUBLIC_NAMES if '_' in name)}|bound\[|mask_starts)(?!\w)"
)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_in_the_callers_words(mistake: str) -> None:
    call, options, words = MISTAKES[mistake]
    with pytest.raises((InvalidArgumentsError, UnsupportedError)) as caught:
        call(**options)
    text = str(caught.value)
    assert words in text
    assert not INNER.search(text), text
    assert not re.search(r"^ *(?:spans|blocks)\b", text, re.MULTILINE), text
    assert text.splitlines()[-1].startswith("Try: "), text


def test_float8_scales() -> None:
    with pytest.raises(InvalidArgumentsError, match=r"k\.scale is a list, not an array") as caught:
        cupy_flash.attention(Q, QuantizedArray(K, [1.0]), K)
    assert "numpy.asarray(k.scale)" in str(caught.value)


# ---------------------------------------------------------------------- options that are written otherwise


def _refused_option(call: Any, name: str) -> str:
    required = [p.name for p in inspect.signature(call).parameters.values() if p.default is p.empty]
    with pytest.raises(InvalidArgumentsError, match="has no option") as caught:
        call(**dict.fromkeys([*required, name]))
    return str(caught.value)


@pytest.mark.parametrize("name", INSTEAD)
def test_an_option_of_another_name_tells_ours(name: str) -> None:
    assert INSTEAD[name] in _refused_option(cupy_flash.attention, name)


@pytest.mark.parametrize("adapter", ["torch", "jax"])
@pytest.mark.parametrize("name", INSTEAD)
def test_adapters_tell_it_too(adapter: str, name: str) -> None:
    pytest.importorskip(adapter)
    module = importlib.import_module(f"cupy_flash.{adapter}")
    for call in (module.attention, module.attention_varlen, module.attention_with_kv_cache):
        assert INSTEAD[name] in _refused_option(call, name)
