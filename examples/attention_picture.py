"""Attention weights as a picture: what each word of a sentence looks at, under three options.

Run: ``pip install matplotlib; python examples/attention_picture.py [--out attention.png]``
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

import cupy_flash

SENTENCE = "the cat saw the dog and the dog saw the cat and then the cat ran"
PANELS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "causal, window=(5, 0)": {"causal": True, "window": (5, 0)},
    "causal, alibi_slopes=0.5": {"causal": True, "alibi_slopes": np.array([0.5])},
}


def weights(q: np.ndarray, k: np.ndarray, **options: Any) -> np.ndarray:
    """The matrix of weights of one head, (queries, keys).

    With the unit vectors as values the result of attention is the weights themselves; a part of the rows of q
    gives those rows of a matrix that is too large to be whole.
    """
    return cupy_flash.attention(q, k, np.eye(len(k)), **options)


def main(argv: list[str] | None = None) -> Path:
    """Draw; where the picture is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("attention.png"))
    options = parser.parse_args(argv)
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    words = SENTENCE.split()
    names = sorted(set(words))
    rng = np.random.default_rng(0)
    meaning = rng.standard_normal((len(names), 32))  # a vector for each word: a word looks for itself
    x = meaning[[names.index(word) for word in words]]

    figure, panels = plt.subplots(1, len(PANELS), figsize=(4.2 * len(PANELS), 4.6), sharey=True)
    for axes, (title, band) in zip(panels, PANELS.items(), strict=True):
        axes.imshow(weights(x, x, **band), cmap="magma_r", vmin=0, vmax=1)
        axes.set_title(title, fontsize=10)
        axes.set_xticks(range(len(words)), words, rotation=90, fontsize=8)
    panels[0].set_yticks(range(len(words)), words, fontsize=8)
    panels[0].set_ylabel("a word (row) looks at earlier ones (columns)")
    figure.tight_layout()
    figure.savefig(options.out, dpi=110)
    plt.close(figure)
    print(options.out)
    return options.out


if __name__ == "__main__":
    main()
