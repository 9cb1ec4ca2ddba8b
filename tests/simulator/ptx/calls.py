"""Calls of the public API that between them run every kernel in every dtype: a table for each target."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

import cupy_flash
from cupy_flash.check import check
from cupy_flash.check.primitives import of_driver
from cupy_flash.device import simulator
from cupy_flash.parallel import partial
from cupy_flash.plan import families
from cupy_flash.plan.catalog import architecture
from cupy_flash.plan.families import decode, f16x3, f64, flash, fp8, hopper, simple
from cupy_flash.testing import reference_with_kv_cache
from cupy_flash.testing.kv_cache import rotate
from tests import float8_cases, kv_cases
from tests.block_cases import BlockCase
from tests.cases import Case, numpy_dtype
from tests.checks import Device, check_backward, check_forward, only, run_both
from tests.cpu import test_second_order
from tests.float8_cases import Float8Case
from tests.function_cases import FunctionCase
from tests.kv_cases import KvCase
from tests.public import cached
from tests.simulator import (
    test_flash_hessian,
    test_flash_tangent,
    test_functions,
    test_int4,
    test_nvfp4,
)
from tests.span_cases import SpanCase
from tests.statistic_checks import check_statistics

__all__ = ["Call", "Kernel", "calls", "kernels_of"]

Kernel = tuple[str, str, str]  # source, step, dtype
_NUMPY = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64",
          "ieee32": "float32", "ieee64": "float64"}  # fmt: skip
# Caches of 4-bit codes, and what compares them.
CODES: dict[str, Callable[[Any, Any], None]] = {"int4": test_int4.check, "nvfp4": test_nvfp4.check}


class Call(NamedTuple):
    """A call that is compared with FP64, and exactly the kernels that it runs."""

    name: str
    run: Callable[[], None]
    kernels: frozenset[Kernel]


def kernels_of(target: str) -> frozenset[Kernel]:
    """Everything that is compiled for the GPUs of a target, but for head dims, tiles and kinds of mask."""
    targets = architecture(target).targets
    every = {(v.source, v.step, v.dtype) for each in targets for v in families.variants(each)}
    return frozenset(every | {x for dtype in _function_dtypes(target) for x in _of_arguments(dtype)})


def calls(target: str) -> Iterator[Call]:
    """The table of a target."""
    for dtype in ("f16", "bf16", "f32", "f64"):
        yield _simple(dtype)
        yield _second_order(dtype)
        yield _statistics(dtype)
    for dtype in ("ieee32", "ieee64"):
        yield _same_bits(dtype)
    for dtype in _function_dtypes(target):
        yield _function(dtype)
    turing = target == "sm_75"
    for dtype in ("f16",) if turing else ("f16", "bf16", "f32"):
        yield _flash(dtype)
        yield _deterministic(dtype)
        if not turing:
            yield _tangent(dtype)
            yield _hessian(dtype)
            if dtype != "f32":
                yield _wide_gradients(dtype)
        yield _chunks(dtype)
        for stored in ("same",) if dtype == "f32" else ("same", "int8", "e4m3"):
            yield _decode(dtype, stored)
            if dtype != "f32" and not turing:
                yield _decode_wide(dtype, stored)
        yield _in_order(dtype)
        if dtype != "f32" and not turing:
            yield _latents(dtype, "same")
            yield _latents(dtype, "int8" if dtype == "f16" else "e4m3")
        if dtype != "f32":
            yield from (_decode_codes(dtype, kind) for kind in CODES)
    for dtype in ("f16",) if turing else ("f16", "bf16"):
        yield _wide(dtype, flash, "flash_forward_wide.cu", 512 if turing else 576)
    if not turing:
        yield _tf32()
    if any(f64.variants(architecture(target))):
        yield _doubles()
    for dtype in ("f16", "bf16", "f32", "f64"):
        computed = dtype == "f64" or (turing and dtype != "f16")
        forward = "simple_forward.cu" if computed else "flash_forward.cu"
        for stored in ("same", "int8", "e4m3") if dtype in ("f32", "f64") else ("same",):
            yield _gathered(dtype, stored, forward)
        yield from (_gathered_codes(dtype, forward, kind) for kind in CODES)
    if target == "sm_80":  # its kernels ask for no architecture, and what stores floats for no dtype
        yield _gathered_on_read()
        passes = {("simple_backward.cu", step) for step in ("delta", "dq", "dkv")}
        yield _parts(simple, {("simple_forward.cu", "")}, passes)
        passes = {("flash_backward.cu", step) for step in ("delta", "dqkv", "dq")}
        yield _parts(flash, {("flash_forward.cu", "")}, passes)
    if target == "sm_90a":
        passes = {("flash_backward.cu", step) for step in ("delta", "dq_convert")}
        yield _parts(hopper, {("flash_forward_sm90.cu", "")}, passes | {("flash_backward_sm90.cu", "")})
        for dtype in ("f16", "bf16"):
            yield _hopper(dtype)
            yield _hopper_in_turns(dtype)
            yield _hopper_wide(dtype)
            yield _hopper_wide_parts(dtype)
            yield _wide(dtype, hopper, "flash_forward_wide_sm90.cu", 576)
            yield _hopper_spans(dtype)
            yield _hopper_latents(dtype)
        yield _float8(hopper, "flash_forward_fp8_sm90.cu")
        yield _halves()
    if "fp8" in architecture(target).families:
        yield _float8(fp8, "flash_forward_fp8.cu")
    yield _primitives()


def _primitives() -> Call:
    """Those that `cupy-flash check` compares, of the target."""

    def run() -> None:
        found = check(cases=of_driver(simulator, 0), with_speed=False)
        assert {x.state for x in found.outcomes} == {"right"}, found.screen()

    return Call("primitives", run, frozenset({("check_primitives.cu", "", "f32")}))


# Tiles that end inside; a group of heads; rows that see few keys.
def _case(dtype: str, head_dims: tuple[int, int], **features: object) -> Case:
    return Case(
        dtype=_NUMPY[dtype], batch=1, heads=(2, 1), lengths=(70, 75), head_dims=head_dims, style="aligned",
        causal=True, align="bottom_right", **features,  # type: ignore[arg-type]
    )  # fmt: skip


def _device(precision: str = "tf32x3") -> Device:
    return Device("simulator", np, float32_precision=precision)


def _both_ways(family: families.Family, case: Case, device: Device) -> Callable[[], None]:
    def run() -> None:
        with only(family):
            check_forward(case, device)
            check_backward(case, device)

    return run


def _hopper_wide_parts(dtype: str) -> Call:
    """O of a part as float32, by the variants for wide heads that store it; rounded it is that of a call."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1, 75, 256)).astype(numpy_dtype(_NUMPY[dtype]))

    def run() -> None:
        with only(hopper):
            floats, _ = partial.attention(q, k, v, causal=True)
            o = cupy_flash.attention(q, k, v, causal=True)
        np.testing.assert_array_equal(floats.astype(o.dtype), o)
        assert np.mean(floats != o.astype(np.float32)) > 0.5, "they are rounded"

    steps = {("flash_forward_sm90.cu", step, dtype) for step in ("", "floats")}
    return Call(f"hopper-wide-parts-{dtype}", run, frozenset(steps))


def _parts(family: families.Family, forward: set[tuple[str, str]], backward: set[tuple[str, str]]) -> Call:
    """Results of parts, left as floats: rounded they are those of a call of its own."""
    rng = np.random.default_rng(0)
    q, k, v, do = (
        rng.standard_normal((1, heads, rows, 64)).astype(np.float16)
        for heads, rows in ((2, 70), (1, 75), (1, 75), (2, 70))
    )
    options: dict[str, Any] = {"causal": True, "align": "bottom_right", "reproducible": "run"}

    def run() -> None:
        with only(family):
            o, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
            whole = cupy_flash.attention_backward(do, q, k, v, o, lse, **options)
            part = partial.attention_backward(do, q, k, v, o, lse, **options)
            pairs = [(partial.attention(q, k, v, **options)[0], o)]
            pairs += [(getattr(part, name), getattr(whole, name)) for name in ("dq", "dk", "dv")]
        for floats, rounded in pairs:
            assert floats.dtype == np.float32
            np.testing.assert_array_equal(floats.astype(np.float16), rounded)
            assert np.mean(floats != rounded) > 0.5, "they are rounded"

    kernels = frozenset((*kernel, "f16") for kernel in forward | backward)
    return Call(f"{family.NAME}-parts-f16", run, kernels)


def _halves() -> Call:
    """Floats by three products of halves; lengths that are too short to pay here."""

    def run() -> None:
        for variant in f16x3.variants():
            if variant.products:
                case = _case("f32", (variant.head_dim, variant.head_dim_v), sinks=True)
                backward = variant.kernel.startswith("flash_backward")
                with mock.patch.object(f16x3, "FEWEST_ROWS", 0), only(hopper):
                    (check_backward if backward else check_forward)(case, _device())

    kernels = {("flash_split_f16.cu", step, "f16x3") for step in ("", "of_gradients")}
    kernels |= {(f"flash_{way}_f16x3_sm90.cu", "", "f16x3") for way in ("forward", "backward")}
    kernels |= {("flash_backward.cu", step, "f32") for step in ("delta", "dq_convert")}
    kernels |= {("simple_backward.cu", "dsinks", "f32")}
    return Call("hopper-f32", run, frozenset(kernels))


def _doubles() -> Call:
    """Float64 on tensor cores, every class."""
    kernels = {("flash_forward_f64.cu", "", "f64")}
    kernels |= {("flash_backward_f64.cu", step, "f64") for step in ("dkv", "dq")}
    kernels |= {("simple_backward.cu", step, "f64") for step in ("delta", "dsinks")}

    def run() -> None:
        with only(flash):
            check_forward(_case("f64", (128, 128), sinks=True), _device())
        _both_ways(flash, _case("f64", (64, 40), sinks=True), _device())()

    return Call("tensor-cores-f64", run, frozenset(kernels))


def _products(dtype: str) -> str:
    """What products of inputs of a dtype are computed in on tensor cores."""
    return "tf32x3" if dtype == "f32" else dtype


def _simple(dtype: str) -> Call:
    steps = ("delta", "dq", "dkv", "dbias", "dsinks")
    kernels = {("simple_forward.cu", "", dtype), *(("simple_backward.cu", step, dtype) for step in steps)}
    case = _case(dtype, (40, 24), bias="bhqk", sinks=True)
    return Call(f"simple-{dtype}", _both_ways(simple, case, _device("ieee")), frozenset(kernels))


def _same_bits(dtype: str) -> Call:
    kernels = {(v.source, v.step, dtype) for v in families.variants("sm_80") if v.dtype == dtype}
    case, device = _case(dtype, (40, 24), bias="bhqk", sinks=True), _device("ieee")

    def run() -> None:
        with only(simple):
            check_forward(case, device, reproducible="device")
            check_backward(case, device, reproducible="device")

    return Call(f"same-bits-{dtype}", run, frozenset(kernels))


def _function_dtypes(target: str) -> tuple[str, ...]:
    """A score function is compiled everywhere, and once for each dtype."""
    return ("f16", "bf16", "f32", "f64") if target == "sm_80" else ("f16",)


def _of_arguments(dtype: str) -> set[Kernel]:
    return {("simple_backward_args.cu", step, dtype) for step in ("sum", "reduce")}


def _function(dtype: str) -> Call:
    """The C of a score function, and the gradients of its arguments; float16 on tensor cores."""
    kernels = _of_arguments(dtype)
    if dtype == "f16":
        kernels |= {("flash_forward.cu", "", dtype)}
        kernels |= {("flash_backward.cu", step, dtype) for step in ("delta", "dqkv", "dq_convert")}
    else:
        kernels |= {("simple_forward.cu", "", dtype)}
        kernels |= {("simple_backward.cu", step, dtype) for step in ("delta", "dq", "dkv")}

    def run() -> None:
        with only(flash if dtype == "f16" else simple):
            test_functions.check_both_ways(FunctionCase("relative", _case(dtype, (40, 24))))

    return Call(f"function-{dtype}", run, frozenset(kernels))


def _second_order(dtype: str) -> Call:
    steps = ("delta_dot", "dq_dot", "dkv_dot", "dbias_dot", "dsinks_dot")
    kernels = {("simple_tangent.cu", "", dtype), *(("simple_hessian.cu", step, dtype) for step in steps)}
    case = _case(dtype, (40, 24), bias="bhqk", sinks=True)

    def run() -> None:
        with only(simple):
            test_second_order.check(case, _device("ieee"))

    return Call(f"second-order-{dtype}", run, frozenset(kernels))


def _statistics(dtype: str) -> Call:
    kernels = {("simple_statistics.cu", step, dtype) for step in ("by_key", "by_query")}
    case = _case(dtype, (40, 24), bias="bhqk", sinks=True)

    def run() -> None:
        with only(simple):
            check_statistics(case, _device("ieee"))

    return Call(f"statistics-{dtype}", run, frozenset(kernels | {("simple_forward.cu", "", dtype)}))


def _flash(dtype: str) -> Call:
    products = _products(dtype)
    kernels = {
        ("flash_forward.cu", "", products), ("flash_backward.cu", "delta", dtype),
        ("flash_backward.cu", "dqkv", products), ("flash_backward.cu", "dq_convert", dtype),
        ("flash_backward_dbias.cu", "", products), ("simple_backward.cu", "dsinks", dtype),
    }  # fmt: skip
    case = _case(dtype, (40, 24), bias="bhqk", sinks=True)
    return Call(f"flash-{dtype}", _both_ways(flash, case, _device()), frozenset(kernels))


def _tangent(dtype: str) -> Call:
    case = _case(dtype, (40, 24), bias="bhqk", sinks=True)

    def run() -> None:
        with only(flash):
            test_flash_tangent.check(case, _device())

    return Call(f"tangent-{dtype}", run, frozenset({("flash_tangent.cu", "", _products(dtype))}))


def _hessian(dtype: str) -> Call:
    case = _case(dtype, (40, 24), softcap=3.0, alibi="h", sinks=True)
    kernels = {("flash_hessian.cu", step, _products(dtype)) for step in ("dq_dot", "dkv_dot")}
    kernels |= {("simple_hessian.cu", step, dtype) for step in ("delta_dot", "dsinks_dot")}

    def run() -> None:
        with only(flash):
            test_flash_hessian.check(case, _device())

    return Call(f"hessian-{dtype}", run, frozenset(kernels))


def _chunks(dtype: str) -> Call:
    """Chunks of 64 keys: a block's each, and all of them one's."""
    kernels = {("flash_forward.cu", "", _products(dtype)), ("flash_combine_chunks.cu", "", dtype)}

    def run() -> None:
        with mock.patch.object(flash, "CHUNK_KEYS", 64):
            for most_bytes in (0, flash.MOST_PARTS_BYTES):
                with mock.patch.object(flash, "MOST_PARTS_BYTES", most_bytes), only(flash):
                    check_forward(_case(dtype, (40, 24), sinks=True), _device(), reproducible="batch")

    return Call(f"flash-chunks-{dtype}", run, frozenset(kernels))


def _deterministic(dtype: str) -> Call:
    products = _products(dtype)
    kernels = {("flash_backward.cu", step, products) for step in ("dqkv", "dq")}

    def run() -> None:
        with only(flash):
            check_backward(_case(dtype, (64, 64)), _device(), reproducible="run")

    return Call(
        f"flash-deterministic-{dtype}", run, frozenset({*kernels, ("flash_backward.cu", "delta", dtype)})
    )


def _wide_gradients(dtype: str) -> Call:
    kernels = {("flash_backward.cu", "delta", dtype)}
    kernels |= {("flash_backward_wide.cu", step, dtype) for step in ("dkv", "dq")}

    def run() -> None:
        with only(flash):
            check_backward(_case(dtype, (512, 512)), _device())
            check_backward(replace(_case(dtype, (321, 384)), style="padded"), _device())

    return Call(f"flash-wide-{dtype}", run, frozenset(kernels))


def _tf32() -> Call:
    def run() -> None:
        with only(flash):
            check_forward(_case("f32", (64, 64)), _device("tf32"), precision="tf32")

    return Call("flash-tf32", run, frozenset({("flash_forward.cu", "", "tf32")}))


def _wide(dtype: str, family: families.Family, source: str, widest: int) -> Call:
    """Forward of head dims above 256: two tiles, keys of which the last block is cut, one class of two."""
    mask = "b11k" if family is flash else None

    def run() -> None:
        with only(family):
            check_forward(replace(_case(dtype, (512, 488), sinks=True), lengths=(70, 150)), _device())
            check_forward(_case(dtype, (widest, 512), mask=mask), _device())
            if family is flash:
                check_forward(_case(dtype, (widest, 512), softcap=3.0, alibi="h"), _device())

    return Call(f"{family.NAME}-forward-wide-{dtype}", run, frozenset({(source, "", dtype)}))


def _hopper(dtype: str) -> Call:
    kernels = {
        ("flash_forward_sm90.cu", "", dtype), ("flash_backward.cu", "delta", dtype),
        ("flash_backward_sm90.cu", "", dtype), ("flash_backward.cu", "dq_convert", dtype),
    }  # fmt: skip
    return Call(f"hopper-{dtype}", _both_ways(hopper, _case(dtype, (128, 72)), _device()), frozenset(kernels))


def _hopper_in_turns(dtype: str) -> Call:
    """Tiles of queries that no block of keys adds to, that one stores and that another adds to."""
    kernels = {
        ("flash_backward.cu", "delta", dtype), ("flash_backward_sm90.cu", "", dtype),
        ("flash_backward.cu", "dq_convert", dtype),
    }  # fmt: skip
    case = replace(_case(dtype, (64, 64)), lengths=(320, 150))

    def run() -> None:
        with only(hopper):
            check_backward(case, _device(), reproducible="run")

    return Call(f"hopper-in-turns-{dtype}", run, frozenset(kernels))


def _hopper_wide(dtype: str) -> Call:
    kernels = {
        *((f"flash_backward_wide_{of}.cu", "", dtype) for of in ("sm90", "dq_sm90")),
        ("flash_backward.cu", "delta", dtype),
    }

    def run() -> None:
        with only(hopper):
            check_backward(_case(dtype, (256, 256)), _device())

    return Call(f"hopper-wide-{dtype}", run, frozenset(kernels))


def _hopper_spans(dtype: str) -> Call:
    """Two intervals of keys for each query, of queries for each key, and blocks, each with parts of tiles."""
    case = Case(
        dtype=_NUMPY[dtype], batch=1, heads=(2, 1), lengths=(150, 230), head_dims=(128, 72), style="aligned"
    )
    cases = (SpanCase(case, True, 2), SpanCase(case, False, 2, "h"), BlockCase(case, (16, 32)))

    def run() -> None:
        with only(hopper):
            for each in cases:
                run_both(each, _device())  # type: ignore[arg-type]

    steps = (
        ("flash_backward.cu", "delta"),
        ("flash_backward_sm90.cu", ""),
        ("flash_backward.cu", "dq_convert"),
    )
    kernels = {("flash_forward_sm90.cu", "", dtype), *((*step, dtype) for step in steps)}
    kernels |= {("flash_reach.cu", step, "f16") for step in ("", "of_keys")}
    return Call(f"hopper-spans-{dtype}", run, frozenset(kernels))


def _float8(family: families.Family, source: str) -> Call:
    def run() -> None:
        with only(family):
            float8_cases.check(Float8Case(heads=(2, 1), lengths=(70, 140), batch=1), "e4m3")

    return Call(f"{family.NAME}-e4m3", run, frozenset({(source, "", "e4m3")}))


def _step(stored: str) -> str:
    return "" if stored == "same" else stored


def _decode(dtype: str, stored: str) -> Call:
    step, products = _step(stored), _products(dtype)
    kernels = {
        ("flash_append.cu", step, dtype),
        ("flash_decode.cu", step, products),
        ("flash_combine.cu", "", dtype),
    }
    case = KvCase(dtype=_NUMPY[dtype], stored=stored, new=1, rotary=32, splits=2)
    return Call(f"decode-{dtype}-{stored}", lambda: kv_cases.check(case, _device()), frozenset(kernels))


def _decode_wide(dtype: str, stored: str) -> Call:
    """Decode of head dims above 256: a few rows, whose keys are in two parts."""
    step = _step(stored)
    kernels = {("flash_append.cu", step, dtype), ("flash_decode_wide.cu", step, dtype),
               ("flash_combine.cu", "", dtype)}  # fmt: skip
    case = KvCase(
        dtype=_NUMPY[dtype], stored=stored, head_dims=(512, 392), heads=(8, 2), lengths=(37, 300), room=320,
        kind="paged", new=1, rotary=32, splits=2,
    )  # fmt: skip
    return Call(f"decode-wide-{dtype}-{stored}", lambda: kv_cases.check(case, _device()), frozenset(kernels))


def _latents(dtype: str, stored: str) -> Call:
    """Latents: a few rows of one new latent, whose keys are in two parts."""
    step = _step(stored)
    kernels = {("flash_append.cu", step, dtype), ("flash_decode_wide.cu", step, dtype),
               ("flash_combine.cu", "", dtype)}  # fmt: skip
    case = KvCase(
        dtype=_NUMPY[dtype], stored=stored, latent=True, head_dims=(576, 512), heads=(4, 1),
        lengths=(37, 300), room=320, kind="paged", new=1, splits=2, rotary=64, last=True, interleaved=True,
    )  # fmt: skip
    return Call(f"latents-{dtype}-{stored}", lambda: kv_cases.check(case, _device()), frozenset(kernels))


def _hopper_latents(dtype: str) -> Call:
    """The same of two tiles of rows, 40 heads of two drafts, in pages of 64."""
    kernels = {("flash_append.cu", "", dtype), ("flash_decode_latent_sm90.cu", "", dtype),
               ("flash_combine.cu", "", dtype)}  # fmt: skip
    case = KvCase(
        dtype=_NUMPY[dtype], latent=True, head_dims=(576, 512), heads=(40, 1), queries=2, causal=True,
        lengths=(37, 300), room=320, kind="paged", page=64, new=2, splits=2,
    )  # fmt: skip
    return Call(f"hopper-latents-{dtype}", lambda: kv_cases.check(case, _device()), frozenset(kernels))


def _in_order(dtype: str) -> Call:
    """Decode in the order of prompts, in chunks of 64 keys."""
    kernels = {("flash_append.cu", "", dtype), ("flash_decode_in_order.cu", "", _products(dtype)),
               ("flash_combine_chunks.cu", "", dtype)}  # fmt: skip
    case = KvCase(dtype=_NUMPY[dtype], kind="paged", new=1, rotary=32, window=(70, 0))

    def run() -> None:
        with mock.patch.object(flash, "CHUNK_KEYS", 64):
            kv_cases.check(case, _device(), reproducible="batch")

    return Call(f"decode-in-order-{dtype}", run, frozenset(kernels))


def _gathered(dtype: str, stored: str, forward: str) -> Call:
    """A paged cache for a forward kernel, which decode is not asked about."""
    step, simply = _step(stored), forward.startswith("simple")
    kernels = {("flash_append.cu", step, dtype), ("flash_gather.cu", step, dtype),
               (forward, "", dtype if simply else _products(dtype))}  # fmt: skip
    case = KvCase(dtype=_NUMPY[dtype], stored=stored, kind="paged", new=1, queries=9)

    def run() -> None:
        with mock.patch.object(decode, "refusals", return_value=["not in this test"]):
            kv_cases.check(case, _device("ieee" if simply else "tf32x3"))

    return Call(f"gathered-{dtype}-{stored}", run, frozenset(kernels))


def _gathered_on_read() -> Call:
    """Keys that are rotated as they are gathered, in their last features."""
    kernels = {("flash_append.cu", "", "f16"), ("flash_gather.cu", "", "f16"),
               ("flash_forward.cu", "", _products("f16"))}  # fmt: skip
    case = KvCase(head_dims=(63, 64), new=1, queries=9, rotary=30, last=True, interleaved=True)

    def run() -> None:
        made, options = case.inputs(), case.options()
        o = cached(**made, **options, rotate_cache=True)
        cos, sin = made["rotary_cos"], made["rotary_sin"]
        turned = rotate(made["k_cache"].astype(float), np.arange(case.room), cos, sin, True, True)
        exact = reference_with_kv_cache(**made | {"k_cache": turned.astype(np.float16)}, **options)
        np.testing.assert_allclose(o.astype(float), exact.o, atol=2e-3)

    return Call("gathered-on-read-f16", run, frozenset(kernels))


def _decode_codes(dtype: str, kind: str) -> Call:
    """A cache of 4-bit codes, a key head's range of it in two parts."""
    kernels = {("flash_append.cu", kind, dtype), ("flash_decode.cu", kind, dtype),
               ("flash_combine.cu", "", dtype)}  # fmt: skip
    kinds = {"dims": (64, 64), "new": 1, "dtype": _NUMPY[dtype]}
    check = CODES[kind]
    return Call(f"decode-{dtype}-{kind}", lambda: check(kinds, {"splits": 2}), frozenset(kernels))


def _gathered_codes(dtype: str, forward: str, kind: str) -> Call:
    """The same for a forward kernel: pages of 3 keys are no power of two."""
    kernels = {("flash_append.cu", kind, dtype), ("flash_gather.cu", kind, dtype),
               (forward, "", dtype if forward.startswith("simple") else _products(dtype))}  # fmt: skip
    kinds = {"queries": 3, "page": 3, "new": 1, "dtype": _NUMPY[dtype]}
    return Call(f"gathered-{dtype}-{kind}", lambda: CODES[kind](kinds, {"causal": True}), frozenset(kernels))
