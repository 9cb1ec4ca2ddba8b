"""What passes compute again from LSE: weights, what dropout keeps of them, and the rows of gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import tiles
from .scores import Scores, rows_of

Array = np.ndarray[Any, Any]


def finite_lse(lse: Array) -> Array:
    """Return LSE, 0 where a row sees no key: there it is -inf, and weights are exp(-inf - 0) = 0."""
    return np.where(np.isneginf(lse), 0, lse)


def gradient_rows(x: dict[str, Array], at: tuple[Any, ...], acc: np.dtype[Any]) -> tuple[Array, Array]:
    """Return dO (batch, key heads, rows, head_dim_v) at an index, and [A2.4] delta, shaped as LSE."""
    do = rows_of(x["do"][at], acc)
    delta = np.einsum("...d,...d->...", do, rows_of(x["o"][at], acc)).reshape(x["lse"][at].shape)
    if "dlse" in x:
        delta -= x["dlse"][at]
    return do, delta


def weights_again(
    scores: Scores,
    box: tiles.Box,
    block: tiles.Block,
    q: Array,
    k: Array,
    lse: Array,
    visible: Array | None,
    bare: Array | None = None,
) -> tuple[Array, Array | None]:
    """Return P = exp(S - LSE) of a tile (batch, key heads, rows, keys), and tanh of its capped scores.

    q is scaled by `Scores.query_scale`; k and visible are those of the tile; lse is (..., rows, 1), finite;
    bare as of `Scores.finish`.
    """
    s = q @ k.swapaxes(-1, -2)
    grouped = scores.grouped(s, block)
    capped = None if scores.problem.softcap is None else np.empty_like(s)
    tanh = None if capped is None else scores.grouped(capped, block)
    scores.finish(grouped, box, block, visible, tanh, bare)
    scores.hide_scores(grouped, block, visible)
    s -= lse
    np.exp(s, out=s)
    if capped is not None:
        np.copyto(capped, 0, where=s == 0)  # of hidden keys k, and so this, may be NaN
    return s, capped


def drop(scores: Scores, weights: Array, block: tiles.Block, keep: Array | None) -> None:
    """Take what dropout does not keep of a tile to 0, in place; keep is None without dropout."""
    if keep is not None:
        grouped = scores.grouped(weights, block)
        grouped *= keep
