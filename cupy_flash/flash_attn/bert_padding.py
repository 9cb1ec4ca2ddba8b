"""Conversion between padded and packed sequences, with the names of flash-attn's ``bert_padding``."""

from __future__ import annotations

from typing import TypeAlias

import torch

__all__ = [
    "index_first_axis",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]

Tensor: TypeAlias = torch.Tensor


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """Select rows of a tensor, with gradients.

    Parameters
    ----------
    x : Tensor, shape (rows, ...)
    indices : Tensor of int64, shape (n,)

    Returns
    -------
    Tensor, shape (n, ...)
    """
    return x.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Write rows into a tensor of zeros, with gradients.

    Parameters
    ----------
    values : Tensor, shape (n, ...)
    indices : Tensor of int64, shape (n,)
        Row of the result for each row of values, without repetitions.
    first_axis_dim : int
        Number of rows of the result.

    Returns
    -------
    Tensor, shape (first_axis_dim, ...)
    """
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_copy(0, indices, values)


def _offsets(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack padded sequences.

    Parameters
    ----------
    hidden_states : Tensor, shape (batch, seqlen, ...)
    attention_mask : Tensor of bool or int, shape (batch, seqlen)
        1 for a token, 0 for padding.
    unused_mask : Tensor of bool or int, shape (batch, seqlen), optional
        1 for a row that is kept but not used.

    Returns
    -------
    hidden_states : Tensor, shape (rows, ...)
    indices : Tensor of int64, shape (rows,)
        Indices of the packed rows among the batch * seqlen padded ones.
    cu_seqlens : Tensor of int32, shape (batch + 1,)
    max_seqlen : int
        Read back from the device.
    seqused : Tensor of int32, shape (batch,)
        Tokens of each sequence, without unused rows.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    used = attention_mask.sum(-1, dtype=torch.int32)
    return rows, indices, _offsets(lengths), int(lengths.max()), used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Pack padded sequences, several of which are concatenated in each row of the batch.

    Parameters
    ----------
    hidden_states : Tensor, shape (batch, seqlen, ...)
    attention_mask_in_length : Tensor of int, shape (batch, seqlen)
        Lengths of the sequences of each row, followed by zeros.

    Returns
    -------
    hidden_states, indices, cu_seqlens, max_seqlen
        As in `unpad_input`; cu_seqlens has sequences + 1 entries.
    """
    seqlen = attention_mask_in_length.shape[-1]
    used = attention_mask_in_length.sum(-1, keepdim=True)
    kept = torch.arange(seqlen, device=used.device) < used
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    indices = kept.flatten().nonzero().flatten()
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, _offsets(lengths), int(lengths.max())


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Undo `unpad_input`; padding becomes zeros.

    Parameters
    ----------
    hidden_states : Tensor, shape (rows, ...)
    indices : Tensor of int64, shape (rows,)
        From `unpad_input`.
    batch, seqlen : int

    Returns
    -------
    Tensor, shape (batch, seqlen, ...)
    """
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.view(batch, seqlen, *rows.shape[1:])
