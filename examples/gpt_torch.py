"""A GPT in torch, on `cupy_flash.torch.attention`: learns a text byte by byte, then writes one.

Run: ``python examples/gpt_torch.py [--steps 300] [--device cuda] [--text FILE]``
"""

import argparse
import argparse as some_module  # whose source is the text to learn
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import cupy_flash.torch


class Block(nn.Module):
    """Causal attention, then a network for each position by itself."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, sequence, width) to the same."""
        batch, seqlen, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, seqlen, 3, self.heads, width // self.heads)
        q, k, v = qkv.unbind(2)  # views, (batch, sequence, heads, features): the layout "bshd" copies nothing
        o = cupy_flash.torch.attention(q, k, v, causal=True, layout="bshd")
        x = x + self.out(o.reshape(batch, seqlen, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Scores of the next byte, after each byte of a text."""

    def __init__(self, width: int, heads: int, layers: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.byte, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.RMSNorm(width)
        self.scores = nn.Linear(width, 256, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """(batch, sequence) of bytes to (batch, sequence, 256)."""
        places = torch.arange(text.shape[1], device=text.device)
        return self.scores(self.norm(self.blocks(self.byte(text) + self.position(places))))

    @torch.no_grad()
    def write(self, text: torch.Tensor, count: int) -> torch.Tensor:
        """The text with `count` more bytes, each drawn given those before it."""
        for _ in range(count):
            scores = self(text[:, -self.context :])[:, -1]
            text = torch.cat([text, torch.multinomial((scores / 0.7).softmax(-1), 1)], dim=1)
        return text


def main(argv: list[str] | None = None) -> list[float]:
    """Train, print a sample; the loss of each step, in bits per byte."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--text", type=Path, default=Path(some_module.__file__))
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    text = torch.tensor(list(options.text.read_bytes()), device=options.device)
    model = GPT(options.width, heads=4, layers=2, context=options.context).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(options.steps):
        starts = torch.randint(len(text) - options.context, (8, 1), device=options.device)
        rows = text[starts + torch.arange(options.context + 1, device=options.device)]
        loss = cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item() / 0.6931)
        if step % 50 == 49:
            print(f"step {step + 1:4}: {losses[-1]:.2f} bits a byte")
    written = model.write(text[None, :20], 200)[0]
    print(bytes(written.tolist()).decode("utf-8", "replace"))
    return losses


if __name__ == "__main__":
    main()
