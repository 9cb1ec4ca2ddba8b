"""A decoder with a KV cache in pages, in NumPy: prompts of unequal length, one token at a time.

Its weights are random, so what it writes means nothing; that it is the same with the cache and without is
the point.

Run: ``python examples/kv_cache_decoder.py [--tokens 20]``
"""

import argparse

import numpy as np

import cupy_flash

WIDTH, HEADS, KEY_HEADS, FEATURES, VOCABULARY, PAGE = 64, 4, 2, 16, 50, 16
ANGLES = np.arange(1024)[:, None] * 1000.0 ** -np.linspace(0, 1, FEATURES // 2)
ROTARY = cupy_flash.Rotary(np.cos(ANGLES).astype(np.float32), np.sin(ANGLES).astype(np.float32))


class Decoder:
    """Layers of attention and a squared-ReLU network.

    Parameters
    ----------
    batch : int
    room : int
        Tokens that each sequence may have, a multiple of PAGE.
    """

    def __init__(self, batch: int, room: int, layers: int = 2) -> None:
        rng = np.random.default_rng(0)

        def weights(*shape: int) -> np.ndarray:
            return rng.standard_normal((layers, *shape), np.float32) * shape[0] ** -0.5

        self.table, self.head = rng.standard_normal((2, VOCABULARY, WIDTH), np.float32)
        self.qkv = weights(WIDTH, (HEADS + 2 * KEY_HEADS) * FEATURES)
        self.out = weights(HEADS * FEATURES, WIDTH)
        self.up, self.down = weights(WIDTH, 4 * WIDTH), weights(4 * WIDTH, WIDTH)
        # Pages of all sequences in one array, handed out in any order.
        pages = batch * room // PAGE
        self.pages = np.zeros((layers, 2, pages, PAGE, KEY_HEADS, FEATURES), np.float32)
        self.block_table = rng.permutation(pages).reshape(batch, -1).astype(np.int32)

    def scores(self, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Of the next token, after the last of (batch, new) that follow `lengths` tokens in the cache."""
        x = self.table[tokens]
        batch, new, _ = x.shape
        for qkv, out, up, down, (k_pages, v_pages) in zip(
            self.qkv, self.out, self.up, self.down, self.pages, strict=True
        ):
            heads = (norm(x) @ qkv).reshape(batch, new, -1, FEATURES)
            q, k, v = np.split(heads, (HEADS, HEADS + KEY_HEADS), axis=2)
            # Rotates q and k by position, stores k and v behind what is there, attends: one call.
            o = cupy_flash.attention_with_kv_cache(
                q, k_pages, v_pages, cache_seqlens=lengths, block_table=self.block_table,
                k=k, v=v, causal=True, layout="bshd", rotary=ROTARY,
            )  # fmt: skip
            x = x + o.reshape(batch, new, -1) @ out
            x = x + np.maximum(norm(x) @ up, 0) ** 2 @ down
        return norm(x[:, -1]) @ self.head.T


def norm(x: np.ndarray) -> np.ndarray:
    """Rows of mean square 1."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def main(argv: list[str] | None = None) -> bool:
    """Write after three prompts; whether it is what the same model writes without a cache."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=20)
    options = parser.parse_args(argv)

    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, VOCABULARY, length) for length in (3, 17, 40)]
    room = -(-(40 + options.tokens) // PAGE) * PAGE
    model = Decoder(len(prompts), room)
    # Each prompt by itself into the cache: `lengths` of the others keeps their pages as they are.
    written = [list(prompt) for prompt in prompts]
    lengths = np.zeros(len(prompts), np.int32)
    for number, prompt in enumerate(prompts):
        alone = Decoder(len(prompts), room)
        alone.pages, alone.block_table = model.pages, model.block_table[number : number + 1]
        first = alone.scores(prompt[None], np.zeros(1, np.int32))
        written[number].append(int(first.argmax()))
        lengths[number] = len(prompt)
    for _ in range(options.tokens - 1):  # then all of them together, a token each
        last = np.array([[text[-1]] for text in written])
        for text, best in zip(written, model.scores(last, lengths).argmax(-1), strict=True):
            text.append(int(best))
        lengths += 1

    same = True
    for prompt, text in zip(prompts, written, strict=True):
        whole = np.array(prompt)
        for _ in range(options.tokens):  # a new cache for every token is none
            best = Decoder(1, room).scores(whole[None], np.zeros(1, np.int32)).argmax()
            whole = np.append(whole, best)
        same &= whole.tolist() == [int(token) for token in text]
        print(f"{len(prompt):2} tokens, then {[int(token) for token in text[len(prompt) :]]}")
    print("the same without a cache:", same)
    return same


if __name__ == "__main__":
    main()
