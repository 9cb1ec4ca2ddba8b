"""What the tests of the tensor-core kernels go through: lengths, bands, and every feature of a score."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

# (queries, keys): tiles that end inside, at and beyond an edge.
LENGTHS = ((1, 1), (7, 65), (64, 63), (127, 200), (200, 127), (129, 128))
BANDS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True, "align": "top_left"},
    {"causal": True, "align": "bottom_right"},
    {"window": (33, 5), "align": "bottom_right"},
    {"window": (20, None), "align": -13},
    {"window": (0, 0), "align": 40},
)

# Features of the kind `any`, every two of them together at least once.
FEATURES = (
    ("mask", "bias16", "alibi", "dropout"),
    ("softcap", "bias16", "sinks", "causal"),
    ("mask", "softcap", "alibi", "sinks"),
    ("mask", "causal", "scale", "bias32"),
    ("dropout", "softcap", "bias32", "scale"),
    ("dropout", "sinks", "causal", "alibi"),
    ("alibi", "scale", "bias32", "sinks"),
    ("mask", "sinks", "bias64", "dropout", "softcap", "causal", "alibi", "scale"),
)


def feature(name: str, heads: int, lengths: tuple[int, int], rng: np.random.Generator) -> dict[str, Any]:
    """The options that switch a feature on."""
    if name.startswith("bias"):
        element = {"bias16": ml_dtypes.bfloat16, "bias32": np.float32, "bias64": np.float64}[name]
        shape = {
            "bias16": (1, heads, *lengths),
            "bias32": (1, 1, 1, lengths[1]),
            "bias64": (1, heads, lengths[0], 1),
        }
        bias = rng.standard_normal(shape[name]).astype(element)
        bias[rng.random(bias.shape) < 0.1] = -np.inf
        return {"bias": bias}
    if name == "mask":
        return {"mask": rng.random((1, 1, *lengths)) < 0.6}
    if name == "causal":
        return {"causal": True, "align": "bottom_right"}
    if name == "alibi":
        return {"alibi_slopes": rng.random(heads).astype(np.float32)}
    if name == "sinks":
        return {"sinks": rng.standard_normal(heads).astype(np.float32)}
    return {
        "softcap": {"softcap": 5.0},
        "scale": {"scale": -0.1},
        "dropout": {"dropout": 0.4, "seed": 2**40 + 9},
    }[name]
