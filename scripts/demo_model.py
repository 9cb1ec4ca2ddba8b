"""A character-level transformer in plain array code, its gradients written out by hand.

The same code runs on NumPy and on CuPy. Every step returns its result and a function that maps the gradient
of that result to the gradient of its input; the backward pass calls these functions in reverse order.
Attention is `cupy_flash.attention` and `cupy_flash.attention_backward`: no array is length x length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_flash import attention, attention_backward

Array = Any  # numpy.ndarray or cupy.ndarray
Back = Callable[[Array], Array]
Cache = list[tuple[Array, Array]]  # keys and values of the text so far, per layer

# Queries are at the positions of the last keys, which matters with a cache.
ATTENTION: dict[str, Any] = {"causal": True, "align": "bottom_right", "layout": "bshd"}


@dataclass(frozen=True)
class Sizes:
    """Sizes of a transformer; width / heads, the head dim, has to be even."""

    vocabulary: int
    context: int = 256
    layers: int = 2
    heads: int = 4
    width: int = 128

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Name and shape of every weight."""
        width = self.width
        shapes = {"character": (self.vocabulary, width), "predecessor": (self.vocabulary, width)}
        for layer in range(self.layers):
            shapes[f"qkv{layer}"] = (width, 3 * width)
            shapes[f"mix{layer}"] = (width, width)
            shapes[f"up{layer}"] = (width, 4 * width)
            shapes[f"down{layer}"] = (4 * width, width)
        return shapes


class Transformer:
    """Pre-norm blocks of causal attention with rotary positions and of a squared-ReLU network.

    A text is an array of character numbers, (batch, 1 + length): its first column is only seen as the
    predecessor of the second. Activations are (batch * length, features).

    Parameters
    ----------
    xp : module
        numpy or cupy.
    sizes : Sizes
    seed : int
        Seed of the initial weights.
    dtype : str
        "float32", or "float64" to check gradients.

    Attributes
    ----------
    weights, gradients : dict of str to array
        By the names of `Sizes.shapes`.
    """

    def __init__(self, xp: Any, sizes: Sizes, seed: int = 0, dtype: str = "float32") -> None:
        self.xp, self.sizes, self.dtype = xp, sizes, dtype
        random = np.random.default_rng(seed)
        self.weights: dict[str, Array] = {
            name: xp.asarray(random.normal(0, sizes.width**-0.5, shape), dtype)
            for name, shape in sizes.shapes().items()
        }
        self.gradients: dict[str, Array] = {}
        pairs = sizes.width // sizes.heads // 2
        angles = np.arange(sizes.context)[:, None, None] * 1000.0 ** -np.linspace(0, 1, pairs)
        self.cosine, self.sine = xp.asarray(np.cos(angles), dtype), xp.asarray(np.sin(angles), dtype)

    def loss(self, text: Array, targets: Array) -> tuple[float, Callable[[], None]]:
        """Mean of -log p(target) in nats, and a function that computes its gradients."""
        logits, back_logits = self.logits(text)
        p, wanted = softmax(logits), self._one_hot(targets)
        loss = -float(self.xp.log((p * wanted).sum(axis=-1)).mean())
        return loss, lambda: back_logits((p - wanted) / len(p))

    def logits(self, text: Array, cache: Cache | None = None) -> tuple[Array, Callable[[Array], None]]:
        """Logits of each next character, (batch * length, vocabulary). With a cache, text continues it."""
        batch, backs = len(text), []
        x, back_embed = self.embed(text)
        for layer in range(self.sizes.layers):
            change, back = self.attend(x, layer, batch, cache)
            x = x + change
            backs.append(back)
            change, back = self.think(x, layer)
            x = x + change
            backs.append(back)
        x, back_normal = normal(x)
        table = self.weights["character"]  # tied weights: the embedding is also the output layer

        def back_all(dlogits: Array) -> None:
            dx = back_normal(dlogits @ table)
            for back in reversed(backs):
                dx = dx + back(dx)
            back_embed(dx)
            self.gradients["character"] += dlogits.T @ x

        return x @ table.T, back_all

    def embed(self, text: Array) -> tuple[Array, Callable[[Array], None]]:
        """Add the embeddings of each character and of its predecessor."""
        here, before = text[:, 1:].ravel(), text[:, :-1].ravel()

        def back(dx: Array) -> None:
            self.gradients["character"] = self._one_hot(here).T @ dx
            self.gradients["predecessor"] = self._one_hot(before).T @ dx

        return self.weights["character"][here] + self.weights["predecessor"][before], back

    def attend(self, x: Array, layer: int, batch: int, cache: Cache | None = None) -> tuple[Array, Back]:
        """The attention block of a layer."""
        (q, k, v), back_heads = self.heads(x, layer, batch, cache)
        o, lse = attention(q, k, v, return_lse=True, **ATTENTION)
        change, back_mix = self._linear(o.reshape(x.shape), f"mix{layer}")

        def back(dchange: Array) -> Array:
            do = back_mix(dchange).reshape(o.shape)
            return back_heads(attention_backward(do, q, k, v, o, lse, reproducible="run", **ATTENTION)[:3])

        return change, back

    def heads(
        self, x: Array, layer: int, batch: int, cache: Cache | None = None
    ) -> tuple[tuple[Array, Array, Array], Back]:
        """Queries, keys and values of a layer, (batch, length, heads, features) each."""
        sizes, xp = self.sizes, self.xp
        x, back_normal = normal(x)
        x, back_qkv = self._linear(x, f"qkv{layer}")
        x = x.reshape(batch, -1, 3, sizes.heads, sizes.width // sizes.heads)
        past = cache[layer][0].shape[1] if cache else 0
        q, back_q = self._place(x[:, :, 0], past)
        k, back_k = self._place(x[:, :, 1], past)
        v = x[:, :, 2]
        if cache:
            old_k, old_v = cache[layer]
            k, v = cache[layer] = xp.concatenate([old_k, k], axis=1), xp.concatenate([old_v, v], axis=1)

        def back(gradients: tuple[Array, Array, Array]) -> Array:
            dq, dk, dv = gradients
            dx = xp.stack([back_q(dq), back_k(dk), dv], axis=2)
            return back_normal(back_qkv(dx.reshape(-1, 3 * sizes.width)))

        return (q, k, v), back

    def think(self, x: Array, layer: int) -> tuple[Array, Back]:
        """The feed-forward block of a layer."""
        x, back_normal = normal(x)
        x, back_up = self._linear(x, f"up{layer}")
        positive = x * (x > 0)
        change, back_down = self._linear(positive * positive, f"down{layer}")
        return change, lambda dchange: back_normal(back_up(2 * positive * back_down(dchange)))

    def _linear(self, x: Array, name: str) -> tuple[Array, Back]:
        weight = self.weights[name]

        def back(dy: Array) -> Array:
            self.gradients[name] = x.T @ dy
            return dy @ weight.T

        return x @ weight, back

    def _place(self, x: Array, past: int) -> tuple[Array, Back]:
        """Normalise heads, then rotate pairs of their features by angles that grow with the position."""
        cosine, sine = (table[past : past + x.shape[1]] for table in (self.cosine, self.sine))

        def rotate(x: Array, sine: Array) -> Array:
            a, b = self.xp.split(x, 2, axis=-1)
            return self.xp.concatenate([a * cosine - b * sine, a * sine + b * cosine], axis=-1)

        x, back_normal = normal(x)
        return rotate(x, sine), lambda dx: back_normal(rotate(dx, -sine))

    def _one_hot(self, text: Array) -> Array:
        return (text.reshape(-1, 1) == self.xp.arange(self.sizes.vocabulary)).astype(self.dtype)

    def continued(self, text: Array, count: int, temperature: float = 0.7, seed: int = 0) -> Array:
        """The text with `count` more characters, each drawn from the model given all before it."""
        xp, sizes = self.xp, self.sizes
        random = np.random.default_rng(seed)
        nothing = xp.zeros((len(text), 0, sizes.heads, sizes.width // sizes.heads), self.dtype)
        cache: Cache = [(nothing, nothing)] * sizes.layers
        unseen = text
        for _ in range(count):
            logits = self.logits(unseen, cache)[0].reshape(len(text), -1, sizes.vocabulary)[:, -1]
            # why: the argmax of logits plus Gumbel noise is a sample from their softmax.
            noise = xp.asarray(random.gumbel(size=logits.shape))
            drawn = (logits / temperature + noise).argmax(axis=-1).astype(text.dtype)
            text = xp.concatenate([text, drawn[:, None]], axis=1)
            unseen = text[:, -2:]
        return text


def normal(x: Array) -> tuple[Array, Back]:
    """Scale rows to a mean square of 1."""
    scale = ((x * x).mean(axis=-1, keepdims=True) + 1e-6) ** -0.5
    y = x * scale
    return y, lambda dy: scale * (dy - y * (dy * y).mean(axis=-1, keepdims=True))


def softmax(x: Array) -> Array:
    """Turn rows of scores into probabilities."""
    weights = np.exp(x - x.max(axis=-1, keepdims=True))  # on a CuPy array this is cupy.exp
    return weights / weights.sum(axis=-1, keepdims=True)


class AdamW:
    """Adam with decoupled weight decay; the rate warms up, then falls to zero as a cosine.

    References
    ----------
    .. [1] I. Loshchilov, F. Hutter, "Decoupled weight decay regularization", arXiv:1711.05101.
    """

    def __init__(self, model: Transformer, steps: int, rate: float = 4e-3, decay: float = 0.1) -> None:
        self.model, self.steps, self.rate, self.decay = model, steps, rate, decay
        self.taken = 0
        self.mean = {name: 0 * weight for name, weight in model.weights.items()}
        self.square = {name: 0 * weight for name, weight in model.weights.items()}

    def step(self) -> None:
        """Update the weights."""
        self.taken = t = self.taken + 1
        warm = min(1.0, t / (1 + self.steps // 10))
        rate = self.rate * warm * (1 + float(np.cos(np.pi * t / self.steps))) / 2
        fast, slow = 0.9, 0.98
        for name, gradient in self.model.gradients.items():
            mean, square, weight = self.mean[name], self.square[name], self.model.weights[name]
            mean += (1 - fast) * (gradient - mean)
            square += (1 - slow) * (gradient * gradient - square)
            direction = mean / (1 - fast**t) / ((square / (1 - slow**t)) ** 0.5 + 1e-8)
            weight -= rate * (direction + self.decay * weight)
