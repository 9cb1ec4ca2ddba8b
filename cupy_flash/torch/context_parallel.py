"""Context parallelism with torch's interface: buffers are split, and torch's attention is replaced.

Names and semantics follow `torch.distributed.tensor.experimental`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from ..call.checks import flag
from ..call.options import RingOptions, defaults
from ..call.public_names import type_phrase
from ..errors import InvalidArgumentsError, UnsupportedError
from ..parallel import positions, schedules
from .inputs import check_tensors
from .leading import are_in_rows, swap_heads_and_rows
from .ring import attend, link_of

__all__ = ["context_parallel", "context_parallel_unshard"]

Tensor: TypeAlias = torch.Tensor


@contextmanager
def context_parallel(
    mesh: Any,
    *,
    buffers: Sequence[Tensor] = (),
    buffer_seq_dims: Sequence[int] = (),
    no_restore_buffers: Collection[Tensor] = (),
    schedule: Literal["ring", "alltoall", "allgather"] | None = None,
) -> Iterator[None]:
    """Split buffers and torch's scaled_dot_product_attention over a mesh, along the sequence.

    Inside this context, buffers are cut in place to the rows of this process, two ranges of the sequence as
    in `cupy_flash.parallel.positions` with causal. ``torch.nn.functional.scaled_dot_product_attention`` is
    `ring_attention` over the mesh, in all threads. A module that has imported the function keeps torch's, and
    code that multiplies queries and keys itself gets only the keys of this process.

    Parameters
    ----------
    mesh : DeviceMesh
        Of one dimension, such as ``mesh["cp"]``. All its processes enter the context and make the same calls.
    buffers : sequence of Tensor
        All tensors with a sequence axis: inputs, labels, position ids, RoPE tables. No parameters.
    buffer_seq_dims : sequence of int
        The sequence axis of each buffer. If a length is not a multiple of twice the number of processes, all
        buffers must have that length; processes then hold different numbers of rows.
    no_restore_buffers : collection of Tensor
        Buffers that stay cut when the context ends.
    schedule : {"ring", "alltoall", "allgather"}, optional
        As in `ring_attention`.

    Yields
    ------
    None

    Raises
    ------
    InvalidArgumentsError
        The mesh has several dimensions, a buffer cannot be cut, or its length differs between processes. No
        buffer is changed in this case.
    UnsupportedError
        A call inside has a mask, dropout or need_weights.

    Notes
    -----
    Query, key and value of every call inside are parts, also in cross attention. A gradient of a parameter is
    this process's share, as in data parallelism: sum or average it over the mesh. The backward pass may run
    after the context only if autograd saved no buffer. It saves labels for cross entropy and tables for
    products; torch then raises an error. Activation checkpoints recompute correctly only inside the context.
    """
    group, rank, ranks = _group_of(mesh)
    agreement = link_of(group, torch.device(mesh.device_type)).agreement
    with agreement.refusals():
        schedules.check({"schedule": schedule}, packed=False)
        lengths = [x.shape[dim] for x, dim in _pairs(buffers, buffer_seq_dims)]
        uneven: dict[str, Any] = {}
        if any(n % (2 * ranks) for n in lengths):
            uneven = {"seqlen": lengths[0], "parts": "zigzag"}
        _refuse(buffers, no_restore_buffers, {*lengths} if uneven else set(), ranks)
        whole = [x.detach() for x in buffers]
        cut = [
            x.index_select(dim, _rows(x, n, rank, ranks))
            for x, dim, n in zip(whole, buffer_seq_dims, lengths, strict=True)
        ]
    agreement.reach({"schedule": schedule, "rows of buffers": lengths})

    def instead(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        def check() -> None:
            no_mask = "attn_mask=None and is_causal=True; or ring_attention, which takes masks"
            for name, there, hint in (
                ("attn_mask", attn_mask is not None, no_mask), ("dropout_p", dropout_p, "dropout_p=0.0"),
            ):  # fmt: skip
                if there:
                    raise UnsupportedError(f"{name} is not supported inside of context_parallel.", hint=hint)
            if not flag(enable_gqa, "enable_gqa") and query.dim() > 2 and query.shape[-3] != key.shape[-3]:
                raise InvalidArgumentsError(
                    f"query has {query.shape[-3]} heads, key {key.shape[-3]}.", hint="enable_gqa=True"
                )

        qkv = query, key, value
        # Other arguments are not checked here: `attend` refuses them in all processes.
        in_rows = all(isinstance(x, torch.Tensor) and x.dim() == 4 for x in qkv) and are_in_rows(query)
        given = {"causal": is_causal, "scale": scale, "schedule": schedule, **uneven}
        every = {**defaults(RingOptions), **given, "layout": "bshd" if in_rows else "bhsd"}
        o: Tensor
        o, _ = attend(
            *(swap_heads_and_rows(*qkv) if in_rows else qkv), group, None, None, False, every, check
        )
        return o.transpose(1, 2) if in_rows else o

    try:
        for x, part in zip(buffers, cut, strict=True):
            _replace_storage(x, part)
        with _replacing_attention(instead):
            yield
    finally:
        for x, original in zip(buffers, whole, strict=True):
            if not any(x is y for y in no_restore_buffers):
                _replace_storage(x, original)


@contextmanager
def _replacing_attention(attention: Any) -> Iterator[None]:
    """Replace torch's attention by a function, and make torch's layers call it."""
    functional: Any = torch.nn.functional
    by_itself = torch.backends.mha.get_fastpath_enabled()
    before = functional.scaled_dot_product_attention, functional.multi_head_attention_forward

    def layer(*args: Any, **how: Any) -> Any:
        if how.get("need_weights", len(args) <= 15 or args[15]):
            raise UnsupportedError(
                "need_weights of MultiheadAttention is not supported inside of context_parallel.",
                hint="need_weights=False",
            )
        return before[1](*args, **how)

    try:
        functional.scaled_dot_product_attention, functional.multi_head_attention_forward = attention, layer
        torch.backends.mha.set_fastpath_enabled(False)
        yield
    finally:
        functional.scaled_dot_product_attention, functional.multi_head_attention_forward = before
        torch.backends.mha.set_fastpath_enabled(by_itself)


def context_parallel_unshard(mesh: Any, buffers: Sequence[Tensor], seq_dims: Sequence[int]) -> list[Tensor]:
    """Gather tensors that `context_parallel` has cut, or that were made inside it, in every process.

    Parameters
    ----------
    mesh : DeviceMesh
        As in `context_parallel`.
    buffers : sequence of Tensor
        Parts, of equal shape in all processes except the number of rows.
    seq_dims : sequence of int
        The sequence axis of each.

    Returns
    -------
    list of Tensor
        Without gradients.

    Raises
    ------
    InvalidArgumentsError
        As in `context_parallel`; also parts that do not fit together.
    """
    group, _, ranks = _group_of(mesh)
    link = link_of(group, torch.device(mesh.device_type))
    with link.agreement.refusals():
        pairs, terms = _pairs(buffers, seq_dims), {}
        for number, (x, dim) in enumerate(pairs):
            shape = [*x.shape[:dim], "rows", *x.shape[dim:][1:]]
            terms[f"buffers[{number}]"] = f"{x.dtype} ({', '.join(map(str, shape))})"
    link.agreement.reach(terms)
    found = []
    for x, dim in pairs:
        rows = x.new_tensor([x.shape[dim]], dtype=torch.int64)
        counts = [int(n) for n in link.all_gather(rows)]
        # why padding: all processes must send the same number of rows.
        part = x.new_zeros((*x.shape[:dim], max(counts), *x.shape[dim:][1:]))
        part.narrow(dim, 0, x.shape[dim]).copy_(x.detach())
        held = [y.narrow(dim, 0, n) for y, n in zip(link.all_gather(part), counts, strict=True)]
        order = [_rows(x, sum(counts), r, ranks) for r in range(ranks)]
        found.append(torch.cat(held, dim).index_select(dim, torch.cat(order).argsort()))
    return found


def _group_of(mesh: Any) -> tuple[Any, int, int]:
    """The process group of a mesh, the rank of this process in it, and the number of ranks."""
    if type(mesh).__name__ != "DeviceMesh":
        raise InvalidArgumentsError(
            f"mesh is {type_phrase(mesh)}, not a DeviceMesh.",
            hint="one of torch.distributed.init_device_mesh, or a slice of it",
        )
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ("cp",)
        raise InvalidArgumentsError(
            f"mesh has {mesh.ndim} dimensions, and a sequence is cut along one.",
            hint=f'a slice of it, mesh["{names[-1]}"]',
        )
    if mesh.get_coordinate() is None:
        raise InvalidArgumentsError(
            f"process {dist.get_rank()} is not in the mesh.",
            hint="the call in the processes of the mesh only",
        )
    return mesh.get_group(), mesh.get_local_rank(), mesh.size()


def _refuse(
    buffers: Sequence[Tensor], no_restore_buffers: Collection[Tensor], uneven: set[int], ranks: int
) -> None:
    """Refuse buffers that cannot be cut; `uneven` has their lengths if one is not divisible."""
    if len(uneven) > 1:
        raise InvalidArgumentsError(
            f"buffers have {' and '.join(map(str, sorted(uneven)))} rows, not all multiples of {2 * ranks}.",
            hint="buffers of one length, or padding to such multiples",
        )
    for number, x in enumerate(buffers):
        if x.requires_grad:
            raise InvalidArgumentsError(
                f"buffers[{number}] requires grad, and is changed in place.",
                hint="inputs and tables of the model; parameters stay whole in every process",
            )
        if x.is_inference() and not torch.is_inference_mode_enabled():
            raise InvalidArgumentsError(
                f"buffers[{number}] was made in inference mode, and cannot be changed outside of it.",
                hint="a clone of it; or the context inside of torch.inference_mode",
            )
    if any(not any(x is other for other in buffers) for x in no_restore_buffers):
        raise InvalidArgumentsError(
            "no_restore_buffers has a tensor that is not among buffers.", hint="the same tensors in both"
        )


def _pairs(buffers: Sequence[Tensor], seq_dims: Sequence[int]) -> list[tuple[Tensor, int]]:
    """Pairs of a tensor and its sequence axis, counted from the front."""
    if len(buffers) != len(seq_dims):
        raise InvalidArgumentsError(
            f"there are {len(buffers)} buffers, and axes of {len(seq_dims)}.", hint="an axis for each buffer"
        )
    for number, (x, dim) in enumerate(zip(buffers, seq_dims, strict=True)):
        if not isinstance(x, torch.Tensor):
            raise InvalidArgumentsError(f"buffers[{number}] is {type_phrase(x)}.", hint="a tensor")
        check_tensors((), **{f"buffers[{number}]": x})
        if not -x.dim() <= dim < x.dim():
            raise InvalidArgumentsError(
                f"buffers[{number}] has shape {tuple(x.shape)}, and no axis {dim}.",
                hint="the axis of the sequence",
            )
    return [(x, dim % x.dim()) for x, dim in zip(buffers, seq_dims, strict=True)]


def _rows(x: Tensor, length: int, rank: int, ranks: int) -> Tensor:
    """Indices of the rows that a process holds, on the device of x."""
    return torch.from_numpy(positions(rank, ranks, length, causal=True)).to(x.device)


@torch.no_grad()
def _replace_storage(x: Tensor, other: Tensor) -> None:
    """Give a tensor the shape and storage of another, in place.

    why not write into its own storage: other buffers may be views of it, as inputs and labels are often views
    of the same tokens.
    """
    x.set_(other)  # type: ignore[call-overload]
