"""Train a small transformer on Python's own sources with cupy_flash, and show the cost of its attention.

It runs on NumPy, or on CuPy if there is a GPU. scripts/demo installs, compiles and runs this.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from demo_model import ATTENTION, AdamW, Array, Sizes, Transformer
from threadpoolctl import threadpool_limits
from tqdm import tqdm

from cupy_flash import UnsupportedError, attention, attention_backward, memory_report
from cupy_flash.device import driver
from cupy_flash.testing import error_budget

BATCH = 4
SEED = 0
SHORTEST = 2500  # characters of held-out text
PROMPTS = ("\n\ndef ", "\n\nclass ", "\n\nimport ")
ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "build" / "demo.png"
NEXT = (
    ("more of the same, on a text of yours", "scripts/demo --steps 5000 --text FILE"),
    (
        "what would run on a GPU, without one",
        ".venv/bin/python -m cupy_flash explain --causal --arch sm_90a",
    ),
    ("whole programs in torch, JAX and NumPy", ".venv/bin/python examples/long_text.py"),
)


class Corpus(NamedTuple):
    """Text as numbers.

    Attributes
    ----------
    alphabet : str
        Character of each number; the last one replaces all rare characters.
    train, held_out : array of int32
        Texts as numbers of characters.
    """

    alphabet: str
    train: Array
    held_out: Array

    @classmethod
    def of(cls, train: str, held_out: str) -> Corpus:
        """Number the characters that occur at least 20 times in the training text."""
        codes, counts = np.unique(_codes(train), return_counts=True)
        known = codes[counts >= 20]
        alphabet = "".join(map(chr, known)) + "\ufffd"
        return cls(alphabet, _numbers(_codes(train), known), _numbers(_codes(held_out), known))

    def number(self, text: str) -> Array:
        """Numbers of the characters of a text."""
        return _numbers(_codes(text), _codes(self.alphabet[:-1]))

    def text(self, numbers: Array) -> str:
        """Undo `number`."""
        return "".join(self.alphabet[n] for n in numbers.tolist())

    def unigram_bits(self) -> float:
        """Entropy per character of the held-out text: the lowest loss of any unigram model."""
        p = np.bincount(self.held_out) / len(self.held_out)
        return float(-(p[p > 0] * np.log2(p[p > 0])).sum())


def _codes(text: str) -> Array:
    return np.frombuffer(text.encode("utf-32-le", "replace"), np.uint32)


def _numbers(codes: Array, known: Array) -> Array:
    found = np.searchsorted(known, codes).clip(max=len(known) - 1)
    return np.where(known[found] == codes, found, len(known)).astype(np.int32)


def python_sources() -> tuple[str, str]:
    """Python's licence and standard library as training text, every tenth module held out."""
    library = Path(sysconfig.get_path("stdlib"))
    modules = sorted(library.glob("*.py"))
    held_out = modules[5::10]
    train = [library / "LICENSE.txt", *(module for module in modules if module not in held_out)]
    return _joined(train), _joined(held_out)


def _joined(files: list[Path]) -> str:
    return "\n\n".join(file.read_text("utf-8", "replace") for file in files if file.is_file())


def one_file(path: Path) -> tuple[str, str]:
    """The first nine tenths of a file as training text, the rest held out."""
    text = path.read_text("utf-8", "replace")
    return text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]


def array_library(device: str) -> Any:
    """Cupy if it can use a GPU, else numpy; "cpu" and "gpu" select one of them."""
    if device != "cpu":
        try:
            driver.devices()
            import cupy

            return cupy
        except UnsupportedError:
            if device == "gpu":
                raise
    return np


def train(model: Transformer, text: Array, steps: int) -> Iterator[float]:
    """Train on random windows of the text; yield the loss of each step in bits per character."""
    xp, length = model.xp, model.sizes.context
    random = np.random.default_rng(SEED)
    text, window = xp.asarray(text), xp.arange(length + 2)
    optimizer = AdamW(model, steps)
    for _ in range(steps):
        starts = xp.asarray(random.integers(0, len(text) - length - 1, BATCH))
        rows = text[starts[:, None] + window]
        loss, back = model.loss(rows[:, :-1], rows[:, 2:])
        back()
        optimizer.step()
        yield loss / float(np.log(2))


def train_with_bar(model: Transformer, text: Array, steps: int) -> list[float]:
    """Train with a bar that shows the running mean of the loss; return the loss of each step."""
    start, mean = time.perf_counter(), 0.0
    losses = []
    with tqdm(total=steps, unit="step", mininterval=0.5) as bar:
        for loss in train(model, text, steps):
            losses.append(loss)
            mean = 0.95 * mean + 0.05 * loss if mean else loss
            bar.set_postfix_str(f"{mean:.2f} bits/character", refresh=False)
            bar.update()
    took, characters = time.perf_counter() - start, steps * BATCH * model.sizes.context
    print(f"{characters:,} characters in {took:.0f} s, {characters / took:,.0f} a second")
    return losses


def windows(model: Transformer, text: Array, count: int) -> Array:
    """Evenly spaced windows of a text, (count, context + 2)."""
    length = model.sizes.context + 2
    starts = np.linspace(0, len(text) - length, count).astype(int)
    return model.xp.asarray(text[starts[:, None] + np.arange(length)])


def held_out_bits(model: Transformer, text: Array, count: int = 96) -> float:
    """Loss on windows that cover the held-out text evenly, in bits per character."""
    rows = windows(model, text, count)
    parts = [rows[start : start + BATCH] for start in range(0, count, BATCH)]
    return float(np.mean([model.loss(part[:, :-1], part[:, 2:])[0] for part in parts]) / np.log(2))


def attention_errors(model: Transformer, text: Array) -> Iterator[tuple[str, float, float]]:
    """Largest error of attention against FP64 on the activations of held-out text, all layers together.

    Yields the name of a result, its error, and the error of the naive method in float32.
    """
    text = windows(model, text, 2)[:, :-1]
    random = np.random.default_rng(SEED)
    precision = None if model.xp is np else "tf32x3"
    verdicts = []
    x, _ = model.embed(text)
    for layer in range(model.sizes.layers):
        (q, k, v), _ = model.heads(x, layer, len(text))
        do = model.xp.asarray(random.standard_normal(v.shape), model.dtype)
        o, lse = attention(q, k, v, return_lse=True, **ATTENTION)
        gradients = attention_backward(do, q, k, v, o, lse, **ATTENTION)._asdict()
        ours = {"o": o, "lse": lse, **gradients}
        verdicts.append(error_budget(ours, q, k, v, do=do, precision=precision, **ATTENTION))
        x = x + model.attend(x, layer, len(text))[0]
        x = x + model.think(x, layer)[0]
    for of_one_result in zip(*verdicts, strict=True):
        assert all(verdict.within for verdict in of_one_result), "outside the error budget"
        yield (
            of_one_result[0].tensor,
            max(verdict.largest for verdict in of_one_result),
            max(verdict.naive_largest for verdict in of_one_result),
        )


def peak_bytes(sizes: Sizes, length: int) -> int:
    """Bytes that one head of causal attention of this length allocates on NumPy, including its result."""
    q = np.ones((length, sizes.width // sizes.heads), np.float32)
    tracemalloc.start()
    attention(q, q, q, causal=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def report(model: Transformer, corpus: Corpus, bits: float, prompts: Sequence[str]) -> None:
    """Print the losses, text sampled after each prompt, memory and errors."""
    sizes, xp = model.sizes, model.xp
    print(f"\nheld-out text: {corpus.unigram_bits():.2f} bits/character by counting (unigram entropy)")
    print(f"               {bits:.2f} bits/character by this model")

    for seed, prompt in enumerate(prompts, start=SEED):
        start = xp.asarray(corpus.number(prompt)[None])
        drawn = model.continued(start, min(220, sizes.context - len(prompt)), seed=seed)[0]
        print(f"\n--- drawn after {prompt.strip()!r}\n{corpus.text(drawn).strip()}")

    print("\n--- memory of causal attention, forward and backward, beside q, k, v, o and their gradients")
    features = sizes.width // sizes.heads
    print(f"{'':>28}{'naive':>12}{'cupy_flash':>12}")
    for name, batch, length in (("the demo", BATCH, sizes.context), ("one long text", 1, 16384)):
        memory = memory_report(batch, sizes.heads, length, features, causal=True, backward=True)
        label = f"{name}, length {length}"
        print(f"{label:>28}{memory.naive_bytes / 1e6:9.1f} MB{memory.flash_bytes / 1e6:9.2f} MB")
    if xp is np:
        print(f"one head of length 16384 allocated {peak_bytes(sizes, 16384) / 1e6:.1f} MB at its peak, "
              f"result included; its score matrix has {4 * 16384**2 / 1e6:.0f} MB")  # fmt: skip

    print("\n--- largest error against FP64 on this model's activations")
    for tensor, ours, naive in attention_errors(model, corpus.held_out):
        print(f"{tensor:>4}  {ours:.1e}   (the naive method in float32: {naive:.1e})")


def picture(path: Path, losses: Sequence[float], counting: float, held_out: float, sizes: Sizes) -> bool:
    """Plot the loss, and the cost of attention by length; return False without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
    left.plot(range(1, len(losses) + 1), losses, lw=0.5, color="#8ecae6", label="each step")
    left.axhline(counting, color="#8d99ae", ls="--", label=f"counting characters: {counting:.2f}")
    left.axhline(held_out, color="#c1121f", label=f"this model, on held-out text: {held_out:.2f}")
    left.set_xlabel("step")
    left.set_ylabel("bits per character")
    lengths = [2**n for n in range(8, 18)]
    reports = [
        memory_report(1, sizes.heads, n, sizes.width // sizes.heads, causal=True, backward=True)
        for n in lengths
    ]
    right.loglog(lengths, [r.naive_bytes / 1e6 for r in reports], color="#8d99ae", label="textbook method")
    right.loglog(lengths, [r.flash_bytes / 1e6 for r in reports], color="#c1121f", label="cupy_flash")
    right.axvline(sizes.context, color="black", lw=0.5, ls=":", label="the demo")
    right.set_xlabel("length of the text")
    right.set_ylabel("MB of a layer's attention")
    for axes in (left, right):
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True


def main() -> int:
    """Train and report; the exit status is 1 if a GPU is asked for and there is none."""
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1400, help="of training (default: %(default)s)")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    parser.add_argument("--text", type=Path, metavar="FILE", help="learn this instead of Python's sources")
    options = parser.parse_args()
    try:
        xp = array_library(options.device)
    except UnsupportedError as error:
        print(error, file=sys.stderr)
        return 1
    if options.text and not options.text.is_file():
        parser.error(f"there is no file {options.text}")
    texts = one_file(options.text) if options.text else python_sources()
    if min(map(len, texts)) < SHORTEST:
        parser.error(f"the text is too short: at least {10 * SHORTEST} characters are needed")
    corpus = Corpus.of(*texts)
    prompts = [texts[1][start : start + 8] for start in (0, 500, 1000)] if options.text else PROMPTS
    model = Transformer(xp, Sizes(len(corpus.alphabet)), SEED)
    weights = sum(weight.size for weight in model.weights.values())
    print(f"{len(corpus.train) / 1e6:.1f} million characters, {weights:,} weights, on {xp.__name__}")
    # why: these products are too small to gain much from a second thread, and on a busy machine BLAS
    # threads that wait for each other lose several times as much.
    with threadpool_limits(1):
        losses = train_with_bar(model, corpus.train, options.steps)
        bits = held_out_bits(model, corpus.held_out)
    report(model, corpus, bits, prompts)
    drawn = picture(PICTURE, losses, corpus.unigram_bits(), bits, model.sizes)
    print(
        f"\n--- a picture of it: {PICTURE}" if drawn else "\n--- for a picture of it: pip install matplotlib"
    )
    print("\n--- try next")
    for what, command in NEXT:
        print(f"{what:>40}:  {command}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
