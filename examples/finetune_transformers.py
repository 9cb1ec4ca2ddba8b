"""Fine-tune a model of transformers with this attention under it: one line more than without.

The model is a small Llama with random weights and the data is Python's own source, so nothing is fetched; put
`from_pretrained` and your data in their place.

Run: ``python examples/finetune_transformers.py [--steps 30] [--device cuda]``
"""

import argparse
import textwrap
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import cupy_flash.transformers


def main(argv: list[str] | None = None) -> tuple[float, list[float]]:
    """Train; how far the first loss is from that of transformers' own attention, and all losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=options.context,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(options.device)
    text = torch.tensor(list(Path(textwrap.__file__).read_bytes()), device=options.device)

    def batch() -> torch.Tensor:
        starts = torch.randint(len(text) - options.context, (4, 1), device=options.device)
        return text[starts + torch.arange(options.context, device=options.device)]

    rows = batch()
    with torch.no_grad():
        theirs = model(rows, labels=rows).loss.item()
        model.set_attn_implementation(cupy_flash.transformers.register())  # the line
        ours = model(rows, labels=rows).loss.item()
    print(f"loss before training {ours:.6f}, with transformers' own attention {theirs:.6f}")

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(options.steps):
        rows = batch()
        loss = model(rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"after {options.steps} steps {losses[-1]:.3f}")
    model.eval()
    written = model.generate(text[None, :16], max_new_tokens=40, do_sample=False, pad_token_id=0)[0]
    print(repr(bytes(written.tolist()).decode("utf-8", "replace")))
    return abs(ours - theirs), losses


if __name__ == "__main__":
    main()
