"""torch on virtual GPUs: its pool and its streams are stand-ins here; no test leaves a context behind."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.virtual_gpu.alone import gpu


@pytest.fixture(autouse=True)
def torch_on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    real = torch.empty

    def empty(*shape: Any, dtype: Any = None, device: Any = None, **others: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return real(*shape, dtype=dtype, device=device, **others)
        return gpu.allocated(shape, dtype, torch.device(device).index)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(
        torch.cuda, "current_stream",
        lambda device: types.SimpleNamespace(cuda_stream=gpu.streams.get(device, 0)),
    )  # fmt: skip
    yield
    gpu.streams.clear()
