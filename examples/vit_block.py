"""A vision transformer's block in torch: patches of an image attend to each other, in both directions.

Learns to tell the direction of stripes in noisy images that are made on the way.

Run: ``python examples/vit_block.py [--steps 60] [--device cuda]``
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import cupy_flash
import cupy_flash.torch

SIDE, PATCH, CLASSES = 32, 8, 4


class ViT(nn.Module):
    """One block over the patches and a class token, whose result is classified."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.patches = nn.Conv2d(1, width, PATCH, stride=PATCH)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, (SIDE // PATCH) ** 2 + 1, width))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        # The options of attention as a value, and a module that applies them: dropout in training mode only.
        config = cupy_flash.default_config(width // heads).with_dropout(0.1)
        self.attention = cupy_flash.torch.FlashAttention(config)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.classes = nn.Linear(width, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(batch, 1, SIDE, SIDE) to scores, (batch, CLASSES)."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.position
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + self.mlp(self.norm2(x))
        return self.classes(x[:, 0])


def stripes(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of stripes in four directions, of any phase, under noise; and the directions."""
    direction = torch.randint(CLASSES, (count,), generator=generator)
    angle = (direction * torch.pi / CLASSES)[:, None, None]
    phase = 2 * torch.pi * torch.rand(count, 1, 1, generator=generator)
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    wave = torch.sin(0.9 * (x * angle.cos() + y * angle.sin()) + phase)
    return (wave + 0.5 * torch.randn(wave.shape, generator=generator))[:, None], direction


def main(argv: list[str] | None = None) -> float:
    """Train; the share of new images that are told rightly."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = ViT().to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(options.steps):
        images, directions = (x.to(options.device) for x in stripes(64, generator))
        loss = cross_entropy(model(images), directions)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            print(f"step {step + 1:3}: loss {loss.item():.3f}")
    model.eval()
    images, directions = (x.to(options.device) for x in stripes(256, generator))
    with torch.no_grad():
        right = (model(images).argmax(1) == directions).float().mean().item()
    print(f"{right:.0%} of new images right; by chance {1 / CLASSES:.0%}")
    return right


if __name__ == "__main__":
    main()
