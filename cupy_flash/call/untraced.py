"""Tells torch.compile which modules it is not to read; imported when it first meets a function of theirs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from types import CodeType, ModuleType

from torch._dynamo import trace_rules
from torch._dynamo.eval_frame import skip_code

from ..namespace import PACKAGE

# Everything but what cupy_flash.torch and those above it need while they are compiled.
UNREAD = (
    "api", "blocks", "call.adopt.jax", "call.adopt.numpy_cupy", "call.adopt.protocols", "call.arrays",
    "call.cache.describe", "call.cache.kinds", "call.cache.sizes", "call.cache.values", "call.functions",
    "call.masks", "call.offsets", "call.operands", "call.outputs", "call.problem", "call.spans", "cpu",
    "derivatives.second_order", "derivatives.with_jvp", "device", "dispatch", "functions", "kv_cache",
    "naive", "parallel", "plan", "program.c_text", "program.derivative", "program.errors", "program.graph",
    "program.machine", "program.operations", "program.ranges", "program.tape", "program.template",
    "program.trace", "report", "spans", "statistics", "torch.functions", "varlen",
)  # fmt: skip
for _name in UNREAD:
    trace_rules.add(f"{PACKAGE}.{_name}")


def _codes(module: ModuleType) -> Iterator[CodeType]:
    """The code of the functions that a module defines, and of what stands in them."""
    every = [x for x in vars(module).values() if getattr(x, "__module__", "") == module.__name__]
    every += [x for one in every if inspect.isclass(one) for x in vars(one).values()]
    codes = [inspect.unwrap(x).__code__ for x in every if inspect.isfunction(x)]
    for code in codes:
        codes += [x for x in code.co_consts if inspect.iscode(x)]
        yield code


# What they do need some functions of: those are not to begin programs of their own, and may be part of one.
for _name in ("call.adopt", "call.adopt.torch", "call.blocks", "config", "merge", "program.function"):
    for _code in _codes(import_module(f"{PACKAGE}.{_name}")):
        skip_code(_code)
