"""Tell torch.compile which modules not to trace; `opaque` imports this when dynamo first needs it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from types import CodeType, ModuleType

from torch._dynamo import trace_rules
from torch._dynamo.eval_frame import skip_code

from ..namespace import PACKAGE

# All modules except those that cupy_flash.torch and the modules above it need while they are compiled.
UNREAD = (
    "api", "blocks", "call.adopt.jax", "call.adopt.numpy_cupy", "call.adopt.protocols", "call.arrays",
    "call.cache.describe", "call.cache.kinds", "call.cache.sizes", "call.cache.values", "call.describe",
    "call.functions", "call.masks", "call.offsets", "call.operands", "call.outputs", "call.problem",
    "call.spans", "cpu", "derivatives.second_order", "derivatives.with_jvp", "device", "dispatch",
    "functions", "kv_cache",
    "naive", "parallel.agreement", "parallel.parts", "parallel.ring", "plan", "program.c_text",
    "program.derivative", "program.errors", "program.graph", "program.machine", "program.operations",
    "program.ranges", "program.tape", "program.template", "program.trace", "report", "spans", "statistics",
    "torch.functions", "varlen",
)  # fmt: skip
for _name in UNREAD:
    trace_rules.add(f"{PACKAGE}.{_name}")


def _codes(module: ModuleType) -> Iterator[CodeType]:
    """The code objects of the functions and methods that a module defines, nested ones included."""
    every = [x for x in vars(module).values() if getattr(x, "__module__", "") == module.__name__]
    every += [x for one in every if inspect.isclass(one) for x in vars(one).values()]
    every = [getattr(x, "__func__", x) for x in every]  # of class methods
    codes = [inspect.unwrap(x).__code__ for x in every if inspect.isfunction(x)]
    for code in codes:
        codes += [x for x in code.co_consts if inspect.iscode(x)]
        yield code


# why: compiled code inlines some functions of these modules, but dynamo must not compile them on their own.
for _name in (
    "call.adopt", "call.adopt.torch", "call.blocks", "call.head_scale", "config", "merge",
    "program.function",
):  # fmt: skip
    for _code in _codes(import_module(f"{PACKAGE}.{_name}")):
        skip_code(_code)
