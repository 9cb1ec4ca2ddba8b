"""A gradient penalty in torch: a critic that tells two sets of sequences apart, held to slopes of 1.

Its loss has the gradient of the critic with respect to its input (``create_graph=True``), so that the
gradient of the loss is a second derivative through attention. I. Gulrajani et al., "Improved Training of
Wasserstein GANs", arXiv:1704.00028, equation 3.

Run: ``python examples/gradient_penalty_torch.py [--steps 100]``
"""

import argparse

import torch
from torch import nn

import cupy_flash.torch

LENGTH, WIDTH = 12, 16


class Critic(nn.Module):
    """A score of a sequence, by one block of attention."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.enter = nn.Linear(1, WIDTH)
        self.position = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.score = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, LENGTH) to (batch,)."""
        h = self.enter(x[..., None]) + self.position
        q, k, v = self.qkv(h).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        h = h + self.out(cupy_flash.torch.attention(q, k, v, causal=True).transpose(1, 2).flatten(2))
        return self.score(h).mean(dim=1)[:, 0]


def slopes(critic: Critic, x: torch.Tensor) -> torch.Tensor:
    """The length of the critic's gradient at each input, itself differentiable."""
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return gradient.norm(dim=1)


def main(argv: list[str] | None = None) -> tuple[float, float]:
    """Train; how far apart the scores of the two sets are, and the mean slope between them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=64)
    given = parser.parse_args(argv)

    torch.manual_seed(0)
    critic = Critic()
    optimizer = torch.optim.Adam(critic.parameters(), lr=3e-3)
    for step in range(given.steps):
        # Sums of steps, and the same without memory.
        real = torch.randn(given.batch, LENGTH).cumsum(dim=1) / LENGTH**0.5
        fake = torch.randn(given.batch, LENGTH)
        mix = torch.rand(given.batch, 1)
        slope = slopes(critic, mix * real + (1 - mix) * fake)
        apart = critic(real).mean() - critic(fake).mean()
        loss = 10 * (slope - 1).square().mean() - apart
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:4}  apart {apart.item():.3f}  slope {slope.mean().item():.3f}")
    return apart.item(), slope.mean().item()


if __name__ == "__main__":
    main()
