"""Tells torch.compile which modules it is not to read; imported when it first meets a function of theirs."""

from __future__ import annotations

from typing import Any

from torch._dynamo import trace_rules

__all__ = ["stop"]

# Everything but what cupy_flash.torch and those above it need while they are compiled.
for _name in (
    "api", "blocks", "call.adopt", "call.arrays", "call.blocks", "call.cache_kinds", "call.cache_problem",
    "call.cache_sizes", "call.cache_values", "call.functions", "call.masks", "call.offsets",
    "call.operands", "call.outputs", "call.problem", "call.spans", "cpu", "device", "functions", "kv_cache",
    "merge", "naive", "plan", "prepare", "program", "ready", "report", "ring", "second_order", "spans",
    "torch.functions", "varlen", "with_jvp",
):  # fmt: skip
    trace_rules.add(f"cupy_flash.{_name}")


def stop(function: Any, args: Any, kwargs: Any) -> Any:
    """Call a function; torch.compile breaks the program here."""
    return function(*args, **kwargs)


stop._torchdynamo_disable = True  # type: ignore[attr-defined]
stop._torchdynamo_disable_msg = "cupy_flash.torch has functions for compiled programs"  # type: ignore[attr-defined]
