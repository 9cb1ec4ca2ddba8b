"""Mutants: each synchronising call of a kernel deleted in turn must make one of its tests fail, and so must
each mistake of tests/simulator/mistakes.py, and of tests/simulator/ptx/mutants.py in the PTX of the
primitives.

``python -m tests.simulator.mutate`` runs the mutants of all kernels and writes ``mutants.tsv``;
``python -m tests.simulator.mutate flash_forward`` those of one. A call whose deletion nothing notices is
either a hole in the tests or is listed in `EQUIVALENT` with the reason why it changes nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cupy_flash.cubins import sources
from tests.simulator import mistakes
from tests.simulator.mistakes import Mistake
from tests.simulator.ptx.mutants import EDITS, TESTS

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("mutants.tsv")
UNITS = "tests/simulator/kernels"
HEADERS = ROOT / "kernels_cu/include"


@dataclass(frozen=True)
class Subject:
    """A kernel, the pytest arguments that select a few quick tests of it, and mistakes that it may have."""

    source: str
    tests: tuple[str, ...]
    mistakes: tuple[Mistake, ...] = ()


SUBJECTS = {
    "ampere_forward": Subject(
        f"{UNITS}/ampere_forward.cu",
        ("tests/simulator/test_reports.py", "-k", "test_whole_kernel and ampere"),
    ),
    "hopper_forward": Subject(
        f"{UNITS}/hopper_forward.cu",
        ("tests/simulator/test_reports.py", "-k", "test_whole_kernel and hopper"),
    ),
    "check_primitives": Subject(
        "kernels_cu/check_primitives.cu",
        ("tests/simulator/test_check_primitives.py", "-k", "is_right"),
    ),
    "simple_forward": Subject(
        "kernels_cu/simple_forward.cu",
        ("tests/simulator/test_simple_forward.py", "-k", "test_lengths"),
    ),
    "simple_backward": Subject(
        "kernels_cu/simple_backward.cu",
        ("tests/simulator/test_simple_backward.py", "-k", "test_lengths or dbias_of or bands_that_miss"),
    ),
    "simple_backward_args": Subject(
        "kernels_cu/simple_backward_args.cu",
        ("tests/simulator/test_functions.py", "-k", "read_in_every_way and 3"),
    ),
    "simple_tangent": Subject(
        "kernels_cu/simple_tangent.cu",
        ("tests/simulator/test_simple_second_order.py", "-k", "test_mistakes and jvp"),
        mistakes.SIMPLE_TANGENT,
    ),
    "simple_statistics": Subject(
        "kernels_cu/simple_statistics.cu",
        ("tests/simulator/test_simple_statistics.py", "-k", "test_schedules or of_nan"),
        mistakes.SIMPLE_STATISTICS,
    ),
    "simple_hessian": Subject(
        "kernels_cu/simple_hessian.cu",
        ("tests/simulator/test_simple_second_order.py", "-k", "test_mistakes and hvp"),
        mistakes.SIMPLE_HESSIAN,
    ),
    "flash_tangent": Subject(
        "kernels_cu/flash_tangent.cu",
        ("tests/simulator/test_flash_tangent.py", "-k", "test_mistakes"),
        mistakes.FLASH_TANGENT,
    ),
    "flash_hessian": Subject(
        "kernels_cu/flash_hessian.cu",
        ("tests/simulator/test_flash_hessian.py", "-k", "test_mistakes"),
        mistakes.FLASH_HESSIAN,
    ),
    "flash_forward": Subject(
        "kernels_cu/flash_forward.cu",
        (
            "tests/simulator/test_flash_forward.py",
            "-k",
            "test_band and (d192x128_band_128x32 or d256_band_64x16)",
        ),
    ),
    "flash_forward_sm90": Subject(
        "kernels_cu/flash_forward_sm90.cu",
        (
            "tests/simulator/test_hopper_attention.py",
            "tests/simulator/test_reproducible.py",
            "-k",
            (
                "several_tiles or (test_packed and options0 and by_head and not schedules) or "
                "(unseen and (causal-random or 192/128-late or (not_multiplied and d64))) or "
                "(neighbours_maximum and sm_90a)"
            ),
        ),
        mistakes.FLASH_FORWARD_SM90,
    ),
    "flash_forward_wide": Subject(
        "kernels_cu/flash_forward_wide.cu",
        ("tests/simulator/test_flash_wide.py", "-k", "test_mistakes and (sm_8 or sm_75)"),
        mistakes.FLASH_FORWARD_WIDE,
    ),
    "flash_forward_wide_sm90": Subject(
        "kernels_cu/flash_forward_wide_sm90.cu",
        ("tests/simulator/test_flash_wide.py", "-k", "test_mistakes and sm_90a"),
        mistakes.FLASH_FORWARD_WIDE_SM90,
    ),
    "flash_forward_f64": Subject(
        "kernels_cu/flash_forward_f64.cu",
        ("tests/simulator/test_flash_f64.py", "-k", "test_mistakes"),
        mistakes.FLASH_FORWARD_F64,
    ),
    "flash_backward_f64": Subject(
        "kernels_cu/flash_backward_f64.cu",
        ("tests/simulator/test_flash_backward_f64.py", "-k", "(test_mistakes or sees_nothing) and sm_80"),
        mistakes.FLASH_BACKWARD_F64,
    ),
    "flash_reach": Subject(
        "kernels_cu/flash_reach.cu",
        (
            "tests/simulator/test_hopper_spans.py",
            "-k",
            "(any_form and late) or many_words or neither or any_numbers",
        ),
        mistakes.FLASH_REACH,
    ),
    "kept_pairs": Subject(
        f"{UNITS}/kept_pairs.cu",
        ("tests/simulator/test_hopper_spans.py", "-k", "words_of"),
        mistakes.KEPT_PAIRS,
    ),
    "flash_forward_fp8": Subject(
        "kernels_cu/flash_forward_fp8.cu",
        (
            "tests/simulator/test_flash_fp8.py",
            "-k",
            "in_use or without_keys or (test_cost and (d64_band or d128_band)) or (budget and 91 and random)",
        ),
        mistakes.FLASH_FORWARD_FP8,
    ),
    "flash_forward_fp8_sm90": Subject(
        "kernels_cu/flash_forward_fp8_sm90.cu",
        (
            "tests/simulator/test_hopper_fp8.py",
            "-k",
            "several_tiles or keys_in_use or (test_packed and (options0 or options3) and not schedules)",
        ),
        mistakes.FLASH_FORWARD_FP8_SM90,
    ),
    "flash_forward_f16x3_sm90": Subject(
        "kernels_cu/flash_forward_f16x3_sm90.cu",
        (
            "tests/simulator/test_hopper_f16x3.py",
            "-k",
            "rows_without_keys or from_block_to_block or test_cost or keys_in_use",
        ),
    ),
    "flash_backward_f16x3_sm90": Subject(
        "kernels_cu/flash_backward_f16x3_sm90.cu",
        ("tests/simulator/test_hopper_f16x3_backward.py", "-k", "mistakes or from_tile_to_tile or many_keys"),
        mistakes.FLASH_BACKWARD_F16X3,
    ),
    "flash_split_f16": Subject(
        "kernels_cu/flash_split_f16.cu",
        ("tests/simulator/test_hopper_f16x3.py", "-k", "from_block_to_block or test_cost"),
    ),
    "flash_decode": Subject(
        "kernels_cu/flash_decode.cu",
        (
            "tests/simulator/test_flash_decode.py",
            "-k",
            "test_classes and (f16_d128 or e4m3_d128 or turing_f16 or turing_e4m3 or int8_d256)",
        ),
    ),
    "flash_decode_wide": Subject(
        "kernels_cu/flash_decode_wide.cu",
        (
            "tests/simulator/test_flash_latent.py",
            "tests/simulator/test_flash_decode_wide.py",
            "-k",
            (
                "cases[few] or cases[more] or cases[many] or cases[odd_pages] or cases[parts] or cases[int8] "
                "or cases[d264_v40] or (hostile and not e4m3) or trees_of_drafts[few]"
            ),
        ),
        mistakes.FLASH_DECODE_WIDE,
    ),
    "flash_decode_latent_sm90": Subject(
        "kernels_cu/flash_decode_latent_sm90.cu",
        (
            "tests/simulator/test_decode_latent_sm90.py",
            "-k",
            "cases[odd_rows] or cases[parts] or behind_the_last or (hostile and 2147483647)",
        ),
        mistakes.FLASH_DECODE_LATENT_SM90,
    ),
    "flash_decode_in_order": Subject(
        "kernels_cu/flash_decode_in_order.cu",
        (
            "tests/simulator/test_decode_in_order.py",
            "-k",
            ("(test_classes and (f16_d64 or turing_d64)) or (the_bits and d64_window) or hostile"),
        ),
        mistakes.FLASH_DECODE_IN_ORDER,
    ),
    "flash_combine": Subject(
        "kernels_cu/flash_combine.cu",
        ("tests/simulator/test_flash_decode.py", "-k", "test_classes and parts_f16"),
    ),
    "flash_backward": Subject(
        "kernels_cu/flash_backward.cu",
        (
            "tests/simulator/test_flash_backward.py",
            "tests/simulator/test_partial.py",
            "-k",
            (
                "(test_band and "
                "(f16_d64_band_64x128_2 or 32x32_1 or d32_band_64x128_0 or d256 or deterministic)) or "
                "(float_shares and sm_80 and dq)"
            ),
        ),
    ),
    "flash_backward_dbias": Subject(
        "kernels_cu/flash_backward_dbias.cu",
        ("tests/simulator/test_tensor_core_attention.py", "-k", "dbias_of_several and hq1"),
    ),
    "flash_backward_sm90": Subject(
        "kernels_cu/flash_backward_sm90.cu",
        (
            "tests/simulator/test_hopper_backward.py",
            "-k",
            "(not schedules and (test_kinds or (test_packed and options0))) or (wave2 and not window)",
        ),
        mistakes.FLASH_BACKWARD_SM90,
    ),
    "flash_backward_wide": Subject(
        "kernels_cu/flash_backward_wide.cu",
        (
            "tests/simulator/test_flash_backward_wide.py",
            "-k",
            "test_kinds and not schedules",
        ),
        mistakes.FLASH_BACKWARD_WIDE,
    ),
    "flash_backward_wide_sm90": Subject(
        "kernels_cu/flash_backward_wide_sm90.cu",
        (
            "tests/simulator/test_hopper_backward.py",
            "-k",
            "((256 and test_kinds) or (test_packed and options3)) and not schedules",
        ),
    ),
    "flash_backward_wide_dq_sm90": Subject(
        "kernels_cu/flash_backward_wide_dq_sm90.cu",
        (
            "tests/simulator/test_hopper_backward.py",
            "-k",
            "((256 and test_kinds) or (test_packed and options3)) and not schedules",
        ),
    ),
}

# Mistakes in the PTX of the primitives, each with its own of these tests, which name their schedules.
DEVICE_HALF = "device_half"
SUBJECTS[DEVICE_HALF] = Subject(
    "kernels_cu/include/prim.cuh", (*TESTS, "-k", " or ".join(sorted({f"({edit.tests})" for edit in EDITS})))
)

# (file, call, which of these in the file, counted from 1): why its deletion changes nothing
EQUIVALENT: dict[tuple[str, str, int], str] = {
    (
        "flash_forward_f16x3_sm90.cu",
        "__syncwarp()",
        1,
    ): "the wait for products, a collective of the warpgroup, comes before",
    (
        "flash_forward_f16x3_sm90.cu",
        "__syncwarp()",
        3,
    ): "the products of the tile before are a collective between a read and the next write",
    ("check_primitives.cu", "__syncwarp()", 1): "ldmatrix, a collective, reads for all lanes at once",
    **{
        (
            "check_primitives.cu",
            "__syncthreads()",
            number,
        ): "the product, a collective of all threads, comes before it reads"
        for number in (3, 4)
    },
    ("check_primitives.cu", "__syncwarp()", 2): "stmatrix, a collective, writes for all lanes at once",
    (
        "flash_forward.cu",
        "__syncthreads()",
        2,
    ): "a limit not yet written reads as -1 here, so every block is masked; a race to ThreadSanitizer",
    (
        "simple/simt.cuh",
        "__syncthreads()",
        4,
    ): "simple_statistics adds no weighted rows, and reads LSE alone of the forward pass, which does",
    ("flash_tangent.cu", "cp_async_wait<0>()", 1): "the last groups of copies are empty",
    ("flash_hessian.cu", "cp_async_wait<0>()", 1): "the last groups of copies are empty",
    ("tile/ring.cuh", "__syncthreads()", 1): "no tile of this kernel waits in registers",
    ("backward/query_ring.cuh", "__syncthreads()", 1): "no tile of this kernel waits in registers",
    ("flash_backward_f64.cu", "cp_async_wait<0>()", 1): "the last groups of copies are empty",
    **{
        ("backward/query_ring.cuh", call, number): "this kernel has two slots of both, filled at once"
        for call, number in (
            ("__syncthreads()", 3),
            ("cp_async_commit()", 2),
            ("cp_async_wait<0>()", 2),
            ("__syncthreads()", 4),
            ("cp_async_commit()", 3),
        )
    },
    (
        "flash_forward_sm90.cu",
        "bar_sync(kSkipped + warpgroup, 128)",
        1,
    ): "no schedule stops a warp at a block until its slot has another one",
    **{
        (
            "flash_backward_wide.cu",
            "__syncwarp()",
            number,
        ): "ldmatrix, a collective, reads for all lanes at once"
        for number in range(1, 5)
    },
    (
        "flash_forward_wide_sm90.cu",
        "bar_sync(kVCleared + warpgroup, 128)",
        1,
    ): "the product, a collective of the warpgroup, comes before it reads",
    ("flash_forward_wide_sm90.cu", "__syncwarp()", 1): "elect_one, a collective, comes before the copy reads",
    (
        "flash_forward_wide_sm90.cu",
        "__syncwarp()",
        2,
    ): "no schedule stops a warp between a load and an arrival",
    (
        "flash_decode_latent_sm90.cu",
        "bar_sync(kQLoaded, kConsumers)",
        1,
    ): "every schedule writes all of Q before the first keys have come; a race to ThreadSanitizer",
    (
        "flash_decode_latent_sm90.cu",
        "bar_sync(kVCleared + warpgroup, 128)",
        1,
    ): "the product, a collective of the warpgroup, comes before it reads",
    (
        "flash_forward_wide_sm90.cu",
        "bar_sync(kPEmpty, 256)",
        3,
    ): "nobody waits any more; it leaves no arrival behind at the end",
    (
        "flash_backward.cu",
        "__syncwarp()",
        2,
    ): "it only keeps the compiler from moving loads across",
    (
        "hopper/warp_scheduler_barrier.cuh",
        "bar_sync(kWarpScheduler + warpgroup, 256)",
        1,
    ): "turns are for speed, they carry no data",
    ("hopper/epilogue.cuh", "__syncwarp()", 2): "no schedule stops a warp between a load and an arrival",
    ("hopper/epilogue.cuh", "__syncwarp()", 3): "the next part is written by stmatrix, a collective",
    **{
        (f"hopper/{file}.cuh", call, 1): "flash_forward_fp8_sm90 has no thread that schedules"
        for file, call in (
            ("tile_scheduler", "mbar_wait(s.work_ring.empty[0], at.phase ^ 1)"),
            ("tile_scheduler", "mbar_arrive(s.work_ring.full[0])"),
            ("producer", "mbar_wait(s.work_ring.full[0], K::WorkRing::at(tiles).phase)"),
            ("producer", "mbar_arrive(s.work_ring.empty[0])"),
        )
    },
    (
        "flash_forward_fp8_sm90.cu",
        "__syncwarp()",
        1,
    ): "no schedule stops a warp between a load and an arrival",
    (
        "flash_forward_fp8_sm90.cu",
        "__syncwarp()",
        2,
    ): "no schedule stops a warp between stores and an arrival",
    ("ampere_forward.cu", "cp_async_wait<0>()", 1): "the last group of copies is empty",
    ("flash_backward.cu", "cp_async_wait<0>()", 2): "the last groups of copies are empty",
    ("flash_backward.cu", "__syncwarp()", 1): "it only keeps the compiler from moving loads across",
    ("tile/mma.cuh", "__syncwarp()", 1): "it only keeps the compiler from moving loads across",
    # Beside these, ldmatrix and shuffles of the whole warp stand between writes and reads of other lanes, and
    # in the simulator a collective orders them; on a GPU only the barrier makes memory visible.
    ("flash_decode_in_order.cu", "__syncwarp()", 1): "ldmatrix, a collective, reads the keys first",
    ("flash_decode.cu", "__syncwarp()", 1): "the products of the step before end with collectives",
    ("cache/stored.cuh", "__syncwarp()", 1): (
        "ldmatrix, a collective, reads the widened tiles; flash_decode_wide does not call it"
    ),
    ("hopper/epilogue.cuh", "__syncwarp()", 1): "elect_one, a collective, comes before the copy reads",
    ("tile/epilogue.cuh", "__syncwarp()", 1): (
        "flash_forward has just passed a barrier of the block; other callers stage more than once"
    ),
    ("tile/epilogue.cuh", "__syncwarp()", 2): "rows of flash_forward_fp8 are staged by value_products.cuh",
    (
        "flash_backward_sm90.cu",
        "wgmma_wait<0>()",
        1,
    ): "the wait for dP waits for dV, too; this one frees registers",
    ("flash_backward_sm90.cu", "wgmma_fence()", 6): "that of dQ comes after the last write to operands of dK",
    # A warp of helpers is never late here, nor a lane behind its warp; ThreadSanitizer reports these three.
    ("hopper/backward.cuh", "__syncwarp()", 1): "no schedule stops a warp between stores and an arrival",
    ("flash_backward_sm90.cu", "__syncwarp()", 1): "no schedule stops a warp between stores and an arrival",
    ("hopper/backward.cuh", "fence_proxy_async_global()", 1): "global memory has one order in the simulator",
    (
        "hopper/backward.cuh",
        "mbar_wait(s.dq_full, step.at.stage)",
        1,
    ): "flash_backward_wide_sm90 sums no dQ, flash_backward_f16x3_sm90 has a helper of its own",
    (
        "hopper/backward.cuh",
        "semaphore_wait(p.call.dq_turns + number, turn)",
        1,
    ): "flash_backward_wide_sm90 sums no dQ, flash_backward_f16x3_sm90 has a helper of its own",
    (
        "hopper/backward.cuh",
        "tma_store_commit()",
        1,
    ): "flash_backward_wide_sm90 sums no dQ, flash_backward_f16x3_sm90 has a helper of its own",
    (
        "hopper/backward.cuh",
        "tma_store_wait_read<0>()",
        1,
    ): "flash_backward_wide_sm90 sums no dQ, flash_backward_f16x3_sm90 has a helper of its own",
    (
        "hopper/backward.cuh",
        "mbar_arrive(s.dq_empty)",
        1,
    ): "flash_backward_wide_sm90 sums no dQ, flash_backward_f16x3_sm90 has a helper of its own",
    (
        "hopper/backward.cuh",
        "tma_store_wait<0>()",
        1,
    ): "flash_backward_wide_sm90 sums no dQ, flash_backward_f16x3_sm90 has a helper of its own",
    (
        "hopper/backward.cuh",
        "semaphore_release(p.call.dq_turns + number)",
        1,
    ): "flash_backward_wide_sm90 sums no dQ, flash_backward_f16x3_sm90 has a helper of its own",
    (
        "hopper/backward.cuh",
        "__syncthreads()",
        1,
    ): "flash_backward_wide_sm90 and flash_backward_f16x3_sm90 have no turns, and their blocks no numbers",
    (
        "hopper/backward.cuh",
        "mbar_wait(s.do_ring.empty[stage ^ 1], phase ^ stage ^ 1)",
        1,
    ): "flash_backward_wide_sm90 and flash_backward_f16x3_sm90 subtract nothing by products",
    (
        "hopper/query_terms.cuh",
        "fence_proxy_async()",
        1,
    ): "flash_backward_wide_sm90 and flash_backward_f16x3_sm90 subtract nothing by products",
    ("flash_backward_sm90.cu", "mbar_wait(s.statistics[stage], step.at.phase)", 2): (
        "loads of LSE take no time, so it is there before Q is"
    ),
    ("flash_backward_wide_sm90.cu", "mbar_wait(s.statistics[stage], step.at.phase)", 1): (
        "loads of LSE take no time, so it is there before Q is"
    ),
    (
        "flash_backward_wide_sm90.cu",
        "wgmma_commit()",
        2,
    ): "dV joins the group of dK, and both are waited for at once",
    (
        "flash_backward_wide_sm90.cu",
        "wgmma_fence()",
        3,
    ): "that of dV comes after the last use of registers of dK",
    (
        "flash_backward_wide_dq_sm90.cu",
        "wgmma_fence()",
        2,
    ): "that of S comes after the last use of registers of dP",
    ("flash_backward_f16x3_sm90.cu", "mbar_wait(s.statistics[stage], step.at.phase)", 1): (
        "loads of LSE take no time, so it is there before Q is"
    ),
    ("flash_backward_f16x3_sm90.cu", "bar_sync(kOwnDS + warpgroup, 128)", 2): (
        "the next product waits for the whole warpgroup in the simulator, on a GPU for a warp"
    ),
    ("flash_backward_f16x3_sm90.cu", "__syncwarp()", 1): (
        "no schedule stops a warp between stores and an arrival"
    ),
    ("hopper/backward.cuh", "mbar_arrive_expect_tx(s.keys_full, KTile::kBytes + VTile::kBytes)", 1): (
        "flash_backward_f16x3_sm90 has a helper of its own"
    ),
    ("hopper/backward.cuh", "mbar_init_fence()", 1): ("flash_backward_f16x3_sm90 has a start of its own"),
    ("hopper/backward.cuh", "__syncthreads()", 2): ("flash_backward_f16x3_sm90 has a start of its own"),
    ("hopper/consumers.cuh", "fence_proxy_async()", 1): (
        "flash_backward_f16x3_sm90 clears nothing: rows that do not exist are zeros"
    ),
    ("hopper/consumers.cuh", "bar_sync(kCleared, kConsumerThreads)", 1): (
        "flash_backward_f16x3_sm90 clears nothing: rows that do not exist are zeros"
    ),
}

_NAMES = (
    "__syncthreads", "__syncwarp", "bar_sync", "bar_arrive",
    "cp_async_commit", "cp_async_wait",
    "mbar_init_fence", "mbar_wait", "mbar_arrive", "mbar_arrive_expect_tx",
    "fence_proxy_async", "tma_store_commit", "tma_store_wait_read", "tma_store_wait",
    "wgmma_fence", "wgmma_commit", "wgmma_wait", "fence_proxy_async_global",
    "semaphore_wait", "semaphore_release",
)  # fmt: skip
_ARGUMENTS = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_PLANTED = re.compile(r"#if defined\(FAULT_\w+\)\n.*?#(?:else|endif)", re.DOTALL)
_CALL = re.compile(rf"\b(?:{'|'.join(_NAMES)})(?:<[^;<>]*>)?{_ARGUMENTS}")


class Mutant(NamedTuple):
    """A file with one call deleted, or one mistake made; `tests`: for pytest's -k, of its subject's."""

    file: Path
    call: str
    number: int
    line: int
    text: str
    tests: str = ""

    @property
    def name(self) -> str:
        """Of the file; a header's with its room."""
        header = self.file.is_relative_to(HEADERS)
        return self.file.relative_to(HEADERS).as_posix() if header else self.file.name

    @property
    def key(self) -> tuple[str, str, int]:
        return self.name, self.call, self.number


def _deletions(file: Path) -> Iterator[Mutant]:
    text = file.read_text()
    planted = [match.span() for match in _PLANTED.finditer(text)]
    seen: dict[str, int] = {}
    for match in _CALL.finditer(text):
        before = text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
        after = text[match.end() :].lstrip()
        if "//" in before or not after.startswith((";", ",")):
            continue  # a comment, or a declaration
        if any(start < match.start() < end for start, end in planted):
            continue
        call = match[0]
        seen[call] = seen.get(call, 0) + 1
        changed = text[: match.start()] + "((void)0)" + text[match.end() :]
        yield Mutant(file, call, seen[call], text.count("\n", 0, match.start()) + 1, changed)


def _edits() -> Iterator[Mutant]:
    for edit in EDITS:
        file = HEADERS / edit.file
        text = file.read_text()
        if text.count(edit.old) == 0:
            raise RuntimeError(f"{edit.file} has changed, and nothing is left of the mistake {edit.name!r}")
        line = text.count("\n", 0, text.index(edit.old)) + 1
        yield Mutant(file, edit.name, 1, line, text.replace(edit.old, edit.new), edit.tests)


def _made(mistakes_: tuple[Mistake, ...]) -> Iterator[Mutant]:
    for mistake in mistakes_:
        file = ROOT / "kernels_cu" / mistake.file
        text = file.read_text()
        if text.count(mistake.old) != 1:
            raise RuntimeError(f"{mistake.file} has changed: {mistake.name!r} is not one place of it")
        line = text.count("\n", 0, text.index(mistake.old)) + 1
        yield Mutant(file, mistake.name, 1, line, text.replace(mistake.old, mistake.new))


def mutants(subject: Subject) -> list[Mutant]:
    """All mutants of a kernel and of the headers that it includes, but for the primitives themselves."""
    if subject is SUBJECTS[DEVICE_HALF]:
        return list(_edits())
    primitives = [HEADERS / "prim.cuh", *(HEADERS / "prim").iterdir()]
    files = sources.closure(ROOT / subject.source, HEADERS)
    deletions = (m for file in files if file not in primitives for m in _deletions(file))
    return [*deletions, *_made(subject.mistakes)]


_SCHEDULES = ("late", "early", "random:1")
_RUN = """
import sys
from pathlib import Path
root, tree = map(Path, sys.argv[1:3])
sys.path.insert(0, str(root))
from cupy_flash.cubins import sources
sources.folder = lambda: tree / "kernels_cu"
import tests.simulator.units
tests.simulator.units.KERNELS = tree / "tests/simulator/kernels"
import pytest
sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *sys.argv[3:]]))
"""


def survives(mutant: Mutant | None, subject: Subject, policy: str, cache: Path) -> bool:
    """True if the tests pass without the call (of nothing, if there is no mutant)."""
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch)
        shutil.copytree(ROOT / "kernels_cu", tree / "kernels_cu")
        shutil.copytree(ROOT / UNITS, tree / UNITS)
        if mutant is not None:
            (tree / mutant.file.relative_to(ROOT)).write_text(mutant.text)
        selected = [*subject.tests, *(("-k", mutant.tests) if mutant and mutant.tests else ())]
        environment = {
            **os.environ,
            "CI": "",  # a mutant may leave something unused, of which g++ warns
            "CUPY_FLASH_SIMULATOR_POLICY": policy,
            "CUPY_FLASH_SIMULATOR_TIME_LIMIT": "20",
            "XDG_CACHE_HOME": str(cache),
        }
        done = subprocess.run(
            [sys.executable, "-c", _RUN, str(ROOT), str(tree), *selected],
            cwd=ROOT, env=environment, capture_output=True, text=True,
        )  # fmt: skip
    if " passed" not in done.stdout and " failed" not in done.stdout:
        raise RuntimeError(f"nothing was tested: {done.stdout}")
    if done.returncode not in (0, 1):  # neither passed nor failed: nothing was tested
        raise RuntimeError(f"pytest {done.returncode}: {done.stdout}{done.stderr}")
    if "g++ failed" in done.stdout:
        raise RuntimeError(f"the mutant does not compile: {done.stdout}")
    return done.returncode == 0


def verdict(mutant: Mutant, subject: Subject, cache: Path) -> str:
    """Which schedule shows the deletion; or why none can."""
    for policy in _SCHEDULES[:1] if mutant.tests else _SCHEDULES:
        if not survives(mutant, subject, policy, cache):
            return "fails (PTX)" if mutant.tests else f"fails ({policy})"
    reason = EQUIVALENT.get(mutant.key)
    return f"equivalent: {reason}" if reason else "SURVIVES"


def table(name: str, workers: int = 2) -> list[str]:
    """Lines of the table for one kernel.

    Parameters
    ----------
    name : str
        A key of `SUBJECTS`.
    workers : int
        Mutants at a time.
    """
    subject = SUBJECTS[name]
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(workers) as pool:
        for policy in _SCHEDULES[:1] if name == DEVICE_HALF else _SCHEDULES:
            if not survives(None, subject, policy, Path(cache)):
                raise RuntimeError(f"the tests of {name} fail without any mutation ({policy})")
        found = mutants(subject)
        verdicts = pool.map(lambda m: verdict(m, subject, Path(cache)), found)
        lines = []
        for mutant, result in zip(found, verdicts, strict=True):
            lines.append("\t".join([name, mutant.name, mutant.call, str(mutant.number), result]))
            print(f"{lines[-1]}  (line {mutant.line})", flush=True)
    return lines


def main(names: list[str]) -> int:
    """Rewrite the lines of these kernels in the table; all kernels if there are none."""
    kept = TABLE.read_text().splitlines() if TABLE.exists() else []
    for name in names or list(SUBJECTS):
        fresh = table(name)
        kept = [line for line in kept if not line.startswith(f"{name}\t")] + fresh
        order = {key: i for i, key in enumerate(SUBJECTS)}
        kept.sort(key=lambda line: order.get(line.split("\t")[0], -1))
        TABLE.write_text("\n".join(kept) + "\n")
    survivors = [line for line in kept if line.endswith("SURVIVES")]
    print(f"{len(kept)} mutants, {len(survivors)} survive")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
