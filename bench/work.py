"""The problems that are timed, with their work: FLOP, bytes and errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

import cupy_flash
from cupy_flash import testing
from cupy_flash.call.masks import Band
from cupy_flash.call.work import flops
from cupy_flash.plan.choose import choose

ITEM = {"float8_e4m3fn": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
FLOAT8, RESULT_OF_FLOAT8 = "float8_e4m3fn", "bfloat16"
PASSES = ("forward", "backward", "forward+backward")


def drawn(shapes: Mapping[str, tuple[int, ...]], dtype: str, seed: int) -> dict[str, np.ndarray]:
    """Random arrays on the host."""
    draw = np.random.default_rng(seed)
    if dtype in ("bfloat16", FLOAT8):
        import ml_dtypes

        kind: Any = getattr(ml_dtypes, dtype)
    else:
        kind = np.dtype(dtype)
    return {name: draw.standard_normal(shape, np.float32).astype(kind) for name, shape in shapes.items()}


class Case(NamedTuple):
    """One problem; None for heads_k and seqlen_k means equal to heads and seqlen.

    Causal queries are aligned to the end of the keys (align="bottom_right").
    """

    batch: int
    heads: int
    seqlen: int
    head_dim: int
    dtype: str = "float32"
    causal: bool = False
    passes: str = "forward"
    heads_k: int | None = None
    seqlen_k: int | None = None

    @property
    def keys(self) -> int:
        return self.seqlen if self.seqlen_k is None else self.seqlen_k

    @property
    def key_heads(self) -> int:
        return self.heads if self.heads_k is None else self.heads_k

    def __str__(self) -> str:
        heads = f"H{self.heads}" if self.heads_k is None else f"H{self.heads}/{self.heads_k}"
        length = f"S{self.seqlen}" if self.seqlen_k is None else f"S{self.seqlen}/{self.seqlen_k}"
        band = " causal" if self.causal else ""
        return f"B{self.batch} {heads} {length} D{self.head_dim} {self.dtype}{band} {self.passes}"

    def shapes(self) -> dict[str, tuple[int, int, int, int]]:
        """Shapes of the inputs, as (batch, heads, sequence, features)."""
        q = (self.batch, self.heads, self.seqlen, self.head_dim)
        k = (self.batch, self.key_heads, self.keys, self.head_dim)
        return {"q": q, "k": k, "v": k, "do": q}

    def constants(self) -> dict[str, np.ndarray]:
        """Inputs that are not random."""
        return {}

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `cupy_flash.attention`."""
        if not self.causal:
            return {}
        return {"causal": True, "align": "bottom_right" if self.seqlen != self.keys else None}

    def reduced(self) -> Case:
        """The same problem, small enough for FP64: one batch, one head of k and v, at most 512 long."""
        return self._replace(
            batch=1,
            heads=self.heads // self.key_heads,
            heads_k=None if self.heads_k is None else 1,
            seqlen=min(self.seqlen, 512),
            seqlen_k=None if self.seqlen_k is None else min(self.seqlen_k, 512),
        )

    def inputs(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Random q, k, v and do on the host.

        why random: with zeros a GPU draws less power and clocks higher, 12 % in matrix products.
        """
        return drawn(self.shapes(), self.dtype, seed) | self.constants()

    def pairs(self) -> int:
        """Visible (query, key) pairs of one head."""
        offset = self.keys - self.seqlen
        return Band(offset, None, 0 if self.causal else None).pairs(self.seqlen, self.keys)

    def flops(self) -> float:
        """FLOP of the matrix products: 4 per pair and feature in a forward pass.

        As counted in the papers (Dao, arXiv:2307.08691, section 4), but with the exact number of causal pairs
        instead of half of all. Softmax is not counted.
        """
        pairs, d = self.batch * self.heads * self.pairs(), self.head_dim
        return float(sum(flops(one, pairs, d, d) for one in self.passes.split("+")))

    def traffic(self) -> float:
        """Least memory traffic in bytes: every operand and result once."""
        item, sizes = ITEM[self.dtype], {name: float(np.prod(s)) for name, s in self.shapes().items()}
        result = ITEM[RESULT_OF_FLOAT8] if self.dtype == FLOAT8 else item
        # q k v in, o out
        forward = item * (sizes["q"] + sizes["k"] + sizes["v"]) + result * sizes["q"]
        backward = item * (4 * sizes["q"] + 4 * sizes["k"])  # q k v o do in, dq dk dv out
        jvp = item * (4 * sizes["q"] + 4 * sizes["k"])  # q k v o and tangents of q k v in, of o out
        # q k v o do, the tangents of q k v o in, dq dk dv out
        hvp = item * (6 * sizes["q"] + 6 * sizes["k"])
        part = {
            "forward": forward,
            "backward": backward,
            "forward+backward": forward + backward,
            "jvp": jvp,
            "hvp": hvp,
        }
        return part[self.passes]

    def score_bytes(self) -> int:
        """Bytes of one S x S matrix in float32; methods other than flash attention store several."""
        return 4 * self.batch * self.heads * self.seqlen * self.keys

    def verdicts(
        self, results: Mapping[str, Any], host: Mapping[str, np.ndarray], precision: str | None
    ) -> list[testing.Verdict]:
        """Compare each result with FP64 and its error budget."""
        q, k, v, do = (host[name] for name in ("q", "k", "v", "do"))
        if self.dtype == FLOAT8:  # weights are rounded to float8, too
            precision = "e4m3"
        return testing.error_budget(results, q, k, v, do=do, precision=precision, **self.options())

    def plan(self, arch: str, softcap: float | None = None) -> Any:
        """The plan of this case on an architecture."""
        problem = cupy_flash.memory_report(
            self.batch, self.heads, self.seqlen, self.head_dim, heads_k=self.key_heads, seqlen_k=self.keys,
            dtype=RESULT_OF_FLOAT8 if self.dtype == FLOAT8 else self.dtype, causal=self.causal,
            align=self.options().get("align"), backward=self.passes == "backward",
        ).problem  # fmt: skip
        if self.dtype == FLOAT8:
            problem = problem._replace(dtype=FLOAT8, of_float8=RESULT_OF_FLOAT8)
        if self.passes in ("jvp", "hvp"):
            problem = problem._replace(direction=self.passes)
        return choose(problem._replace(softcap=softcap), arch)


class Named:
    """A case with an additional option, such as a function or a mask; it has the interface of `Case`.

    Parameters
    ----------
    name : str
        Name of the option, the column `detail` of its rows.
    case : Case
    """

    def __init__(self, name: str, case: Case) -> None:
        self.name, self.case = name, case
        self.passes, self.dtype = case.passes, case.dtype

    def _asdict(self) -> dict[str, Any]:
        return self.case._asdict() | {"detail": self.name}

    def __str__(self) -> str:
        return f"{self.name} {self.case}"

    def constants(self) -> dict[str, np.ndarray]:
        return self.case.constants()

    def options(self) -> dict[str, Any]:
        return self.case.options()

    def inputs(self, seed: int = 0) -> dict[str, np.ndarray]:
        return drawn(self.case.shapes(), self.dtype, seed) | self.constants()

    def reduced(self) -> Named:
        return type(self)(self.name, self.case.reduced())

    def flops(self) -> float:
        return self.case.flops()

    def traffic(self) -> float:
        return self.case.traffic()

    def score_bytes(self) -> int:
        return self.case.score_bytes()

    def verdicts(
        self, results: Mapping[str, Any], host: Mapping[str, np.ndarray], precision: str | None
    ) -> list[testing.Verdict]:
        q, k, v, do = (host[name] for name in ("q", "k", "v", "do"))
        return testing.error_budget(results, q, k, v, do=do, precision=precision, **self.options())
