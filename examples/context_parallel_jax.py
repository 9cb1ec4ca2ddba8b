"""Context parallelism in JAX: devices hold a quarter of each sequence, and a model attends over all of it.

The model learns to name, at each place, the token that the sequence began with, which only the first device
has. Its first gradients are compared with those of one device.

Run: ``python examples/context_parallel_jax.py [--steps 60]``

On a CPU it makes four devices of one.
"""

import argparse
import functools
import os
from collections.abc import Callable

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")  # before JAX is imported

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import cupy_flash.jax
from cupy_flash.parallel import positions

TOKENS, WIDTH, HEADS = 8, 32, 4
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def made(length: int, key: jax.Array) -> dict[str, jax.Array]:
    """Weights of one layer."""
    shapes = {
        "tokens": (TOKENS, WIDTH), "places": (length, WIDTH), "qkv": (WIDTH, 3 * WIDTH),
        "out": (WIDTH, WIDTH), "logits": (WIDTH, TOKENS),
    }  # fmt: skip
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(key, shape) * (1.0 if name in ("tokens", "places") else shape[0] ** -0.5)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def loss_of(
    weights: dict[str, jax.Array], tokens: jax.Array, places: jax.Array, labels: jax.Array, attend: Attend
) -> jax.Array:
    """The mean over rows at these places: all but attention is of each row by itself."""
    x = weights["tokens"][tokens] + weights["places"][places]
    q, k, v = jnp.split((x @ weights["qkv"]).reshape(*x.shape[:2], 3 * HEADS, -1), 3, axis=2)
    x = x + attend(q, k, v).reshape(x.shape) @ weights["out"]
    likelihood = jax.nn.log_softmax(x @ weights["logits"])
    return -jnp.take_along_axis(likelihood, labels[..., None], -1).mean()


def main(argv: list[str] | None = None) -> tuple[float, list[float]]:
    """Train; how far gradients are from those of one device, and the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--length", type=int, default=64)
    options = parser.parse_args(argv)

    # A causal part is a stretch from the front and one from the back: the same work for every device.
    devices, length = jax.devices(), options.length
    order = np.concatenate([positions(r, len(devices), length, causal=True) for r in range(len(devices))])
    mesh = jax.sharding.Mesh(np.array(devices), ("rows",))
    rows, everywhere = PartitionSpec(None, "rows"), PartitionSpec()
    ring = functools.partial(cupy_flash.jax.ring_attention, axis_name="rows", causal=True, layout="bshd")

    def of_part(
        weights: dict[str, jax.Array], tokens: jax.Array, places: jax.Array, labels: jax.Array
    ) -> jax.Array:
        return jax.lax.pmean(loss_of(weights, tokens, places, labels, ring), "rows")

    of_all = jax.shard_map(of_part, mesh=mesh, in_specs=(everywhere, rows, rows, rows), out_specs=everywhere)
    compute = jax.jit(jax.value_and_grad(of_all))
    weights = made(length, jax.random.key(0))
    places = jnp.arange(length)[None]
    losses, error = [], 0.0
    for number in range(options.steps):
        tokens = jax.random.randint(jax.random.key(number + 1), (8, length), 0, TOKENS)
        labels = jnp.broadcast_to(tokens[:, :1], tokens.shape)
        loss, slope = compute(weights, tokens[:, order], places[:, order], labels[:, order])
        if number == 0:
            one = functools.partial(cupy_flash.jax.attention, causal=True, layout="bshd")
            wanted = jax.grad(loss_of)(weights, tokens, places, labels, one)
            error = max(float(abs(slope[name] - wanted[name]).max()) for name in weights)
            print(f"{len(devices)} devices; gradients differ from those of one by {error:.1e} at most")
        weights = jax.tree.map(lambda w, s: w - 0.3 * s, weights, slope)
        losses.append(float(loss))
        if number % 20 == 19:
            print(f"step {number + 1:3}: loss {loss:.4f}")
    return error, losses


if __name__ == "__main__":
    main()
