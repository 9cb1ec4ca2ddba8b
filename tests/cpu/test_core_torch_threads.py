"""Calls on tensors in a CPU's memory are computed by torch's threads, and by as many as torch may take."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch", reason="its threads are tested: pip install torch")

import cupy_flash  # noqa: E402
import cupy_flash.torch as ours  # noqa: E402
from cupy_flash.cpu import threads  # noqa: E402
from cupy_flash.cpu.core.params import Params  # noqa: E402
from tests.cpu.core_calls import run  # noqa: E402

pytestmark = pytest.mark.usefixtures("core")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """How many threads each call takes, and whose."""
    seen: list[tuple[int, int]] = []
    filled = Params.filled

    def noted(self: Params, addresses: object, seed: int, count: int, parallel: int = 0) -> bytearray:
        seen.append((count, parallel))
        return filled(self, addresses, seed, count, parallel)  # type: ignore[arg-type]

    monkeypatch.setattr(Params, "filled", noted)
    return seen


@pytest.fixture
def two_threads() -> Iterator[None]:
    if threads.available_cores() < 2:
        pytest.skip("there is one core, which needs no other thread")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="where torch's OpenMP is found")
def test_threads_of_torch_compute_on_its_tensors(two_threads: None, asked: list[tuple[int, int]]) -> None:
    q = torch.randn(1, 4, 512, 32, requires_grad=True)
    o = ours.attention(q, q, q, causal=True)
    o.sum().backward()
    assert len(asked) == 2
    assert all(count == 2 and parallel for count, parallel in asked)
    x = q.detach().numpy()
    by_helpers = cupy_flash.attention(x, x, x, causal=True)
    assert not asked[-1][1], "those of NumPy's arrays are the core's own"
    assert (o.detach().numpy() == by_helpers).all()


def test_no_more_threads_than_torch_may_take(two_threads: None, asked: list[tuple[int, int]]) -> None:
    q = torch.randn(1, 4, 512, 32)
    two = ours.attention(q, q, q)
    torch.set_num_threads(1)
    one = ours.attention(q, q, q)
    assert torch.equal(one, two)
    assert [*dict.fromkeys(count for count, _ in asked)] == [2, 1]
    assert not asked[-1][1]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_explain_tells_the_threads_that_torch_lends(two_threads: None, direction: str) -> None:
    q = torch.randn(1, 4, 512, 32)
    assert "keys, on 2 threads\n" in cupy_flash.explain(q, q, q, direction=direction)
    torch.set_num_threads(1)
    assert "keys, on 1 thread\n" in cupy_flash.explain(q, q, q, direction=direction)


def test_threads_of_our_own_where_torch_has_more_than_there_are_cores(
    two_threads: None, asked: list[tuple[int, int]]
) -> None:
    """OpenMP would end its other threads, and start them again for torch."""
    torch.set_num_threads(threads.available_cores() + 1)
    q = torch.randn(1, 4, 512, 32)
    ours.attention(q, q, q)
    assert set(asked) == {(min(threads.available_cores(), threads.allowed("torch")), 0)}


def test_within_a_parallel_region_and_in_several_threads(two_threads: None) -> None:
    """Callers that overlap, each with a team of its own in torch, get the same."""
    from concurrent.futures import ThreadPoolExecutor

    q = torch.randn(1, 4, 512, 32)
    expected = ours.attention(q, q, q)

    def call(_: int) -> bool:
        torch.mm(q[0, 0], q[0, 0].T)
        return torch.equal(ours.attention(q, q, q), expected)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(40)))


FORKED = """
import multiprocessing, warnings
import torch
import cupy_flash.torch as ours
from cupy_flash.cpu import threads

warnings.simplefilter("ignore", DeprecationWarning)  # a fork of a process with threads is what is tested
torch.set_num_threads(2)
qkv = [torch.randn(1, 4, 512, 32) for _ in range(3)]
for _ in range(2):
    expected = ours.attention(*qkv).numpy()

def attend(pipe):
    same = bool((ours.attention(*qkv).numpy() == expected).all())  # torch.equal itself would wait for ever
    pipe.send((same, threads.team("torch", 2)))

context = multiprocessing.get_context("fork")
mine, theirs = context.Pipe()
child = context.Process(target=attend, args=(theirs,), daemon=True)
child.start()
assert mine.poll(60), "the child waits for threads that it does not have"
assert mine.recv() == (True, 0)
child.join(60)
assert (ours.attention(*qkv).numpy() == expected).all()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a fork beside torch's threads")
def test_a_forked_child_has_threads_of_its_own() -> None:
    run(FORKED)


@pytest.mark.skipif(
    not torch.set_flush_denormal(False), reason="torch cannot flush denormals on this processor"
)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_what_a_thread_flushes_to_zero_changes_no_bit(two_threads: None, library: str) -> None:
    """torch.set_flush_denormal is of one thread, and others compute too."""
    q, v = torch.zeros(1, 8, 512, 32), torch.full((1, 8, 512, 32), 1e-40)
    given = (q, q, v) if library == "torch" else (q.numpy(), q.numpy(), v.numpy())
    if library == "torch":
        torch.set_num_threads(1)  # so that the caller's computes it all
    torch.set_flush_denormal(True)
    try:
        o = cupy_flash.attention(*given)
        assert torch.tensor(1e-40) + 0 == 0  # the caller's thread goes on as it was
    finally:
        torch.set_flush_denormal(False)
    assert (o == v.numpy()).all() if library == "numpy" else torch.equal(o, v)
