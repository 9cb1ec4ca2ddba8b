"""MeanFlow in torch: a transformer learns a flow's mean velocity, whose loss needs a tangent of the model.

The mean velocity u(z, r, t) of the times r to t obeys u = v - (t - r) du/dt, where the derivative is along
the flow: dz/dt = v, dr/dt = 0, dt/dt = 1. One pass in forward mode gives u and du/dt (`torch.func.jvp`); a
model that has learned makes a sample in one step, z - u(z, 0, 1). Z. Geng et al., "Mean Flows for One-step
Generative Modeling", arXiv:2505.13447, Algorithm 1.

Run: ``python examples/meanflow_torch.py [--steps 200]``
"""

import argparse

import torch
from torch import nn

import cupy_flash.torch

LENGTH = 16


class Velocity(nn.Module):
    """Mean velocity of a sequence of numbers, by one block of attention."""

    def __init__(self, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.enter, self.leave = nn.Linear(3, width), nn.Linear(width, 1)
        self.position = nn.Parameter(0.1 * torch.randn(LENGTH, width))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, z: torch.Tensor, r: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """(batch, LENGTH), and times (batch, 1), to (batch, LENGTH)."""
        x = self.enter(torch.stack([z, r.expand_as(z), t.expand_as(z)], dim=-1)) + self.position
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(cupy_flash.torch.attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + self.mlp(self.norm2(x))
        return self.leave(x)[..., 0]


def waves(count: int) -> torch.Tensor:
    """Data: sine waves of one frequency and any phase."""
    phase = 2 * torch.pi * torch.rand(count, 1)
    return torch.sin(torch.arange(LENGTH) * torch.pi / 4 + phase)


def loss_of(model: Velocity, data: torch.Tensor) -> torch.Tensor:
    """The loss of a step."""
    times = torch.rand(2, len(data), 1).sort(dim=0, descending=True).values
    t, r = times[0], times[1]
    noise = torch.randn_like(data)
    z, v = (1 - t) * data + t * noise, noise - data
    u, along = torch.func.jvp(model, (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))
    target = (v - (t - r) * along).detach()
    return (u - target).square().mean()


def main(argv: list[str] | None = None) -> list[float]:
    """Train; the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64)
    given = parser.parse_args(argv)

    torch.manual_seed(0)
    model = Velocity()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for step in range(given.steps):
        loss = loss_of(model, waves(given.batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 0:
            print(f"step {step:4}  loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
