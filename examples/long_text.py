"""100,000 tokens on a CPU, in NumPy: causal attention with a bar, in little memory.

Run: ``pip install tqdm; python examples/long_text.py [--tokens 100000]``
"""

import argparse
import tracemalloc

import numpy as np

import cupy_flash


def main(argv: list[str] | None = None) -> tuple[float, int]:
    """Attend; the largest error of some rows against float64, and the bytes at the peak."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--features", type=int, default=64)
    options = parser.parse_args(argv)

    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, options.tokens, options.features), np.float32)
    tracemalloc.start()
    with cupy_flash.progress():
        o = cupy_flash.attention(q, k, v, causal=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    naive = cupy_flash.memory_report(1, 1, options.tokens, options.features, causal=True).naive_bytes
    print(f"{peak / 1e6:.0f} MB at the peak, the result included; its score matrix has {naive / 1e9:.3g} GB")

    errors = []
    for row in (0, options.tokens // 2, options.tokens - 1):
        seen = slice(0, row + 1)
        scores = options.features**-0.5 * k[seen].astype(float) @ q[row]
        weights = np.exp(scores - scores.max())
        errors.append(abs(o[row] - weights @ v[seen] / weights.sum()).max())
    print(f"largest error of three rows against float64: {max(errors):.1e}")
    return max(errors), peak


if __name__ == "__main__":
    main()
