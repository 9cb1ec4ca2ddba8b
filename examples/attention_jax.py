"""Attention in a JAX model made with equinox: jit, grad and vmap as anywhere else.

A set of numbers, some of them marked: the model learns to give the mean of the marked ones, which is what one
layer of attention can do and a network for each number by itself cannot.

Run: ``pip install equinox; python examples/attention_jax.py [--steps 200]``
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp

import cupy_flash.jax


class Pooling(eqx.Module):
    """One query attends to all numbers."""

    embed: eqx.nn.MLP
    query: jax.Array
    value: eqx.nn.MLP
    heads: int = eqx.field(static=True)

    def __init__(self, heads: int, features: int, key: jax.Array) -> None:
        keys = jax.random.split(key, 3)
        self.heads = heads
        self.embed = eqx.nn.MLP(2, 2 * heads * features, 32, 1, key=keys[0])
        self.query = 0.1 * jax.random.normal(keys[1], (heads, 1, features))
        self.value = eqx.nn.MLP(heads * features, 1, 32, 1, key=keys[2])

    def __call__(self, numbers: jax.Array) -> jax.Array:
        """(numbers, 2) of value and mark to one value."""
        kv = jax.vmap(self.embed)(numbers).reshape(len(numbers), 2, self.heads, -1)
        k, v = jnp.moveaxis(kv, (1, 2), (0, 1))  # (heads, numbers, features) each
        o = cupy_flash.jax.attention(self.query, k, v)  # rank 3 is one batch; vmap adds the axis
        return self.value(o.ravel())[0]


def sets(key: jax.Array, count: int, length: int) -> tuple[jax.Array, jax.Array]:
    """Sets of (value, mark), and the means of what is marked."""
    values, marks = jax.random.normal(key, (count, length)), jax.random.bernoulli(key, 0.3, (count, length))
    marks = marks.at[:, 0].set(True)
    return jnp.stack([values, 1.0 * marks], axis=-1), (values * marks).sum(1) / marks.sum(1)


@eqx.filter_jit
def step(model: Pooling, velocity: Pooling, key: jax.Array) -> tuple[Pooling, Pooling, jax.Array]:
    """Gradient descent with momentum on new sets."""

    @eqx.filter_value_and_grad
    def loss_of(model: Pooling) -> jax.Array:
        numbers, means = sets(key, 32, 40)
        return ((jax.vmap(model)(numbers) - means) ** 2).mean()

    loss, slope = loss_of(model)
    velocity = jax.tree.map(lambda v, s: 0.9 * v - 0.02 * s, velocity, slope)
    return eqx.apply_updates(model, velocity), velocity, loss


def main(argv: list[str] | None = None) -> list[float]:
    """Train; the mean squared error of each step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(argv)

    model = Pooling(heads=2, features=8, key=jax.random.key(0))
    velocity = jax.tree.map(jnp.zeros_like, eqx.filter(model, eqx.is_inexact_array))
    losses = []
    for number in range(options.steps):
        model, velocity, loss = step(model, velocity, jax.random.key(number + 1))
        losses.append(float(loss))
        if number % 50 == 49:
            print(f"step {number + 1:3}: mean squared error {loss:.4f}")
    return losses


if __name__ == "__main__":
    main()
