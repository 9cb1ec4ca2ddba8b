"""What suites of forward kernels share: a small simulated GPU, which options their cases take, and checks.

The kernels keep their blocks for several tiles: Hopper's, those of float32 by halves, those of wide heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import testing
from cupy_flash.device import simulator
from cupy_flash.dispatch import memo
from cupy_flash.plan import families
from cupy_flash.plan.families import f16x3, hopper, pack_gqa
from tests.cases import PACKED_LENGTHS, Case, numpy_dtype
from tests.checks import Device
from tests.simulator.units import aligned

POLICIES = ("late", "early", "random")

TAKEN = {
    "style": ("aligned",),
    "mask": (None,),
    "bias": (None,),
    "bias_dtype": (None,),
    "dropout": (0.0,),
    "dlse": (False,),
    "heads": ((2, 2), (4, 2), (3, 1)),
}
PLAIN = {"softcap": (None,), "alibi": (None,), "scale": (None, 0.3)}
# Tiles that end inside, at and beyond an edge; one, two and more blocks of keys than there are stages.
LENGTHS = ((64, 64), (1, 1), (7, 9), (65, 176), (200, 70), (193, 257), (33, 560), (1, 129))
# Groups that fill their rows, groups that leave some empty, and tiles that begin inside a group.
GROUPS = ((4, 2), (3, 1), (8, 1), (5, 1), (12, 2), (80, 1))
FEW_LENGTHS = ((1, 129), (7, 9), (33, 300), (64, 64), (50, 177))


def small_gpu(monkeypatch: pytest.MonkeyPatch, target: str, family: families.Family) -> Iterator[Device]:
    """A simulated GPU, small so that blocks take several tiles; its plans fail instead of falling back."""
    monkeypatch.setenv("CUPY_FLASH_DRIVER", f"simulator:{target}")
    monkeypatch.setattr(simulator, "multiprocessors", lambda _device=0: 3)
    monkeypatch.setattr(families, "FAMILIES", (family,))
    memo.forget()
    yield Device(target, np)
    memo.forget()


def numbered(monkeypatch: pytest.MonkeyPatch, *, grouped: bool) -> None:
    """Make plans number the rows of tiles in one way, whatever is faster."""

    def chosen(problem: Any, tile: tuple[int, int], multiprocessors: int) -> tuple[pack_gqa.Rows, str]:
        bits = pack_gqa.bits_of(problem.heads_q // problem.heads_k) if grouped else 0
        return pack_gqa.numbered(problem, bits, tile, multiprocessors), ""

    for module in (hopper, f16x3):
        monkeypatch.setattr(module, "rows_of_tiles", chosen)
    memo.forget()


def under(number: int) -> Any:
    """A schedule for a case: they take turns."""
    return simulator.schedule(POLICIES[number % 3], seed=number)


# Shared with the sanitizers, which run it in a process of their own.
def check_packed(
    dtype: str,
    head_dim: int,
    *,
    lengths: tuple[tuple[int, ...], tuple[int, ...]] = PACKED_LENGTHS,
    poisoned: tuple[int, ...] = (0, 1),
    with_sinks: bool = True,
    precision: str | None = None,
    **options: Any,
) -> None:
    """Sequences of their own lengths among neighbours full of NaN: the even sequences, then the odd ones."""
    cu = [np.cumsum([0, *each]).astype(np.int32) for each in lengths]
    rng = np.random.default_rng(1)
    element = numpy_dtype(dtype)
    shapes = ((int(cu[0][-1]) + 3, 4, head_dim), *[(int(cu[1][-1]) + 2, 2, head_dim)] * 2)
    tensors = [rng.standard_normal(shape).astype(element) for shape in shapes]
    if with_sinks:
        options["sinks"] = rng.standard_normal(4).astype("float64" if dtype == "float64" else "float32")
    for parity in poisoned:
        nan = [x.copy() for x in tensors]
        for x, ends in zip(nan, (cu[0], cu[1], cu[1]), strict=True):
            x[ends[-1] :] = np.nan
            for n in range(parity, len(ends) - 1, 2):
                x[ends[n] : ends[n + 1]] = np.nan
        held = [testing.hostile(x, style="aligned") for x in nan]
        out = testing.dead(shapes[0], element, style="aligned")
        _, lse = cupy_flash.attention_varlen(
            *(g.view for g in held), *cu, return_lse=True, out=out.view, **options
        )
        for n in range(1 - parity, len(lengths[0]), 2):
            own = [slice(ends[n], ends[n + 1]) for ends in cu]
            q, k, v = (x[own[i]].swapaxes(0, 1)[None] for x, i in zip(tensors, (0, 1, 1), strict=True))
            part = {"o": out.view[own[0]].swapaxes(0, 1)[None], "lse": lse[:, own[0]][None]}
            if q.size:
                testing.assert_within_budget(part, q, k, v, precision=precision, **options)
        out.check_guards()
        assert (out.view[cu[0][-1] :] == testing.dead((1,), element).view).all(), "rows of no sequence"


def check_rows_without_keys(dtype: str, head_dim: int) -> None:
    """O = 0 and LSE = -inf, also for a whole tile of queries that sees no block of keys."""
    q, k, v = (aligned((1, 1, n, head_dim), dtype, 1.0) for n in (400, 40, 40))
    o, lse = cupy_flash.attention(q, k, v, window=(3, 3), align=-300, return_lse=True)
    alone = np.r_[0:297, 343:400]
    assert not o[0, 0, alone].any()
    assert np.isneginf(lse[0, 0, alone]).all()
    assert np.isfinite(lse[0, 0, 297:343]).all()


def check_masked_keys(dtype: str = "float16", **sizes: Any) -> None:
    """NaN and infinity in keys that no query sees do not reach the result."""
    inputs = Case(dtype=dtype, window=(None, 29), align="top_left", **sizes).inputs()
    reference = testing.reference_attention(*(inputs[name] for name in "qkv"), window=(None, 29), align=0)
    inputs["k"][:, :, 100:], inputs["k"][:, :, 120:] = np.nan, np.inf
    views = [testing.hostile(inputs[name], style="aligned").view for name in "qkv"]
    o = cupy_flash.attention(*views, window=(None, 29), align="top_left")
    assert np.abs(o - reference.o).max() < 2e-3


def check_key_that_is_not_a_number(
    key: int, keys: int, head_dim: int, dtype: str = "float16", **options: Any
) -> None:
    """It makes all rows NaN that see it."""
    q, k, v = (aligned((1, 1, n, head_dim), dtype, 1.0) for n in (70, keys, keys))
    k[0, 0, key] = np.nan
    o, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
    assert np.isnan(o).all()
    assert np.isnan(lse).all()


def check_large_scores(length: int, head_dim: int, factor: int) -> None:
    """Scores near the end of f16, and a row whose maximum comes with the last block."""
    q, k, v = (np.random.default_rng(n).standard_normal((1, 1, length, head_dim)) for n in range(3))
    q, k, v = (factor * q).astype(np.float16), (factor * k).astype(np.float16), v.astype(np.float16)
    k[0, 0, 0] = q[0, 0, 0]
    views = [testing.hostile(x, style="aligned").view for x in (q, k, v)]
    o, lse = cupy_flash.attention(*views, return_lse=True)
    testing.assert_within_budget({"o": o, "lse": lse}, q, k, v)
