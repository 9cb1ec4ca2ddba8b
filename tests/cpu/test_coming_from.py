"""The masks of xformers as docs/coming_from.md translates them, against the pairs that each class keeps."""

from typing import Any

import numpy as np

from cupy_flash import attention, attention_varlen, attention_with_kv_cache

RNG = np.random.default_rng(0)
Q = RNG.standard_normal((1, 7, 4, 16))  # batch, sequence, heads, features
K, V = RNG.standard_normal((2, 1, 12, 2, 16))
ROW, COLUMN = np.ogrid[:7, :12]  # queries, keys
LAST: dict[str, Any] = {"align": "bottom_right"}
ROWS = np.array([0, 3, 7], np.int32)  # two packed sequences, of 3 and 4 queries
OF_FIRST = ROW < 3
QUERY = np.where(OF_FIRST, ROW, ROW - 3)  # within its sequence


def check(o: np.ndarray, keep: np.ndarray) -> None:
    wanted = attention(Q, K, V, layout="bshd", mask=np.broadcast_to(keep, (7, 12)))
    assert np.allclose(o.reshape(wanted.shape), wanted, atol=1e-12)


def test_lower_triangular() -> None:
    def whole(**options: Any) -> np.ndarray:
        return attention(Q, K, V, layout="bshd", **options)

    behind = COLUMN - ROW - 5  # of the last query's diagonal
    check(whole(causal=True, align="top_left"), COLUMN <= ROW)
    check(whole(causal=True, **LAST), behind <= 0)
    check(whole(window=(2, 1), **LAST), (behind >= -2) & (behind <= 1))
    check(whole(window=(3, 0), **LAST), (behind > -4) & (behind <= 0))  # Local..., n = 4


def test_block_diagonal() -> None:
    """The first sequence has 5 keys, the other 7; with padding or gaps 4 and 6 of them."""
    cuts = np.array([0, 5, 12], np.int32)

    def packed(**options: Any) -> np.ndarray:
        return attention_varlen(Q[0], K[0], V[0], ROWS, cuts, **options)

    own, key = (COLUMN < 5) == OF_FIRST, np.where(COLUMN < 5, COLUMN, COLUMN - 5)
    late = key - QUERY - np.where(OF_FIRST, 2, 3)  # from the bottom right
    check(packed(), own)
    check(packed(causal=True, align="top_left"), own & (key <= QUERY))
    check(packed(causal=True, **LAST), own & (late <= 0))
    check(packed(window=(1, 0), align="top_left"), own & (key <= QUERY) & (key > QUERY - 2))  # Local, n = 2
    check(packed(window=(1, 0), **LAST), own & (late <= 0) & (late > -2))

    used = np.array([4, 6], np.int32)
    own &= key < np.where(COLUMN < 5, 4, 6)
    late += 1
    check(packed(seqused_k=used), own)
    check(packed(seqused_k=used, causal=True, **LAST), own & (late <= 0))
    check(packed(seqused_k=used, window=(1, 0), **LAST), own & (late <= 0) & (late > -2))
    check(packed(seqused_k=used, window=(2, 1), **LAST), own & (late <= 1) & (late >= -2))


def test_gappy_keys_that_begin_later() -> None:
    """Keys 2 to 5, and 7 to 10; then keys 6 to 10, and 3 to 8, as pages of one key each."""
    cuts, used = np.array([2, 7, 12], np.int32) - 2, np.array([4, 4], np.int32)
    o = attention_varlen(Q[0], K[0, 2:], V[0, 2:], ROWS, cuts, seqused_k=used)
    check(o, np.where(OF_FIRST, (COLUMN >= 2) & (COLUMN < 6), (COLUMN >= 7) & (COLUMN < 11)))

    starts, used = np.array([6, 3], np.int32), np.array([5, 6], np.int32)
    pages = {"block_table": starts[:, None] + np.arange(6, dtype=np.int32), "seqused_k": used}
    ones = [x[0][:, None] for x in (K, V)]
    own = np.where(OF_FIRST, (COLUMN >= 6) & (COLUMN < 11), (COLUMN >= 3) & (COLUMN < 9))
    late = np.where(OF_FIRST, COLUMN - 6 - ROW - 2, COLUMN - 3 - (ROW - 3) - 2)
    check(attention_varlen(Q[0], *ones, ROWS, None, **pages), own)
    check(attention_varlen(Q[0], *ones, ROWS, None, causal=True, **LAST, **pages), own & (late <= 0))


def test_paged() -> None:
    """Pages of 4 keys: of 12 in a row the first sequence has 0 to 3, the other 4 to 10, or 5 to 10."""
    pages = [x[0].reshape(3, 4, 2, 16) for x in (K, V)]
    table, used = np.array([[0, 0], [1, 2]], np.int32), np.array([4, 7], np.int32)

    def paged(**options: Any) -> np.ndarray:
        options |= {"block_table": table, "seqused_k": used, "max_seqlen_q": 4}
        return attention_varlen(Q[0], *pages, ROWS, None, **options)

    own, key = (
        np.where(OF_FIRST, COLUMN < 4, (COLUMN >= 4) & (COLUMN < 11)),
        np.where(COLUMN < 4, COLUMN, COLUMN - 4),
    )
    late = key - QUERY - np.where(OF_FIRST, 1, 3)
    check(paged(), own)
    check(paged(causal=True, **LAST), own & (late <= 0))
    check(paged(window=(1, 0), **LAST), own & (late <= 0) & (late > -2))
    gaps: dict[str, Any] = {"cu_seqlens_q": ROWS, "block_table": table, "cache_seqlens": used,
                            "cache_leftpad": np.array([0, 1], np.int32), "layout": "bshd"}  # fmt: skip
    own = own & (COLUMN != 4)
    check(attention_with_kv_cache(Q[0], *pages, **gaps), own)
    check(attention_with_kv_cache(Q[0], *pages, causal=True, **gaps), own & (late <= 0))
