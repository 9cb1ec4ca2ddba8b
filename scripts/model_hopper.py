#!/usr/bin/env python3
"""What the Hopper kernels were predicted to do before they were measured: busy tensor cores, balanced tiles.

Two models, both of unit costs that the kernel's SASS and the machine's published rates give; no latency of
memory, no clocks, no power. They are for comparing schedules, not for promising speed.

- `utilisation`: flash_forward_sm90, one scheduler of a multiprocessor with a warp of each consumer
  warpgroup, for some tiles one after the other. An instruction takes a cycle of issue, an exponential 8 of
  MUFU, a product its cycles in a queue for the tensor cores, Q a trip to memory.
- `efficiency`, `backward_efficiency`: tiles of a causal problem on 132 multiprocessors.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.model import rates
from cupy_flash.plan.catalog import Variant, architecture
from cupy_flash.plan.families import hopper

MUFU, SHUFFLE, WAKE, HAND_OVER = 8, 30, 100, 40  # cycles
# Instructions of a whole block of flash_forward_sm90, counted in the SASS of kind `band`
# (`sass.fewest_of_a_round`), the more of NVRTC 12.9 and 13.5. tests/cpu/test_sass.py holds them.
WHOLE_BLOCK = {
    (64, 64): 379,
    (96, 96): 359,
    (128, 128): 399,
    (192, 128): 423,
    (192, 192): 390,
    (256, 256): 333,
}
LOOP = 84  # of 8 bits: instructions beside the softmax: products, descriptors, barriers
# Of a tile: instructions before its first product and beside O at its end; cycles in which O leaves through
# the memory of Q, and in which the next Q comes (0.6 us).
BEGIN, END, LEAVE, COME = 150, 60, 300, 1000

# One step of a warpgroup's program: ("issue", "f" or "m"), ("sleep", n), ("start", name, cycles),
# ("wait", names), ("take",) and ("pass",) of a turn, ("need", tile) and ("free", tile) of Q.
Step = tuple[object, ...]


def _softmax(n: int) -> list[Step]:
    """Row maxima, then exponentials and sums, of 2 rows by n columns on 4 lanes."""
    steps: list[Step] = [("issue", "f")] * (n // 2 + 4) + [("sleep", SHUFFLE)] * 2
    exponential: list[Step] = [("issue", "f"), ("issue", "m"), ("issue", "f")]
    return steps + exponential * (n // 2)


def _beside(d: int, dv: int) -> int:
    """Instructions of a whole block that are neither softmax nor rounding: what is left of those counted."""
    n = hopper._FORWARD[d, dv][0][1]
    return WHOLE_BLOCK[d, dv] - sum(step[0] == "issue" for step in _softmax(n)) - n // 4


def _program(schedule: str, d: int, dv: int, n: int, blocks: int) -> Iterator[Step]:
    """What a warpgroup does for `blocks` blocks of keys of a tile."""
    float8 = schedule.endswith("8 bits")
    softmax = _softmax(n)
    s: Step = ("start", "S", d // 16 * n // 2)
    o: Step = ("start", "O", n // 16 * dv // 2)
    rounding: list[Step] = [("issue", "f")] * (n // 4)
    rescale: list[Step] = [("issue", "f")] * (dv // 2 if schedule == "rescaled" else 0)
    loop: list[Step] = [("issue", "f")] * (LOOP if float8 else _beside(d, dv))
    if float8:
        softmax += [("issue", "m")] * 2  # of the factors on O
    if schedule.endswith("8 bits"):  # twice the rate; sums of a block are added to O
        s, o = ("start", "S", n * d // 64), ("start", "O", n * dv // 64)
        rescale = [("issue", "f")] * (dv // 2)
    if schedule == "one by one, 8 bits":  # turns around O of a block and S of the next
        parts = max(1, dv // 128)
        o = ("start", "O", n * dv // 64 // parts)
        part: list[Step] = [o, ("wait", "O"), *rescale[: dv // 2 // parts]]
        yield ("take",)
        for _ in range(blocks):
            yield from [*loop, s, ("pass",), ("wait", "S"), *softmax, *rounding, ("take",)]
            yield from part * parts
        yield ("pass",)
        return
    yield s
    yield ("wait", "S")
    # S of a block starts before O of the one before; turns around both.
    yield from [*softmax, *rounding]
    for _ in range(blocks - 1):
        yield from [("take",), *loop, s, o, ("pass",), ("wait", "S"), *softmax]
        yield from [("wait", "O"), *rounding, *rescale]
    yield from [o, ("wait", "O")]


def _tiles(schedule: str, d: int, dv: int, n: int, blocks: int, tiles: int) -> Iterator[Step]:
    """The same for tiles one after the other."""
    for tile in range(tiles):
        yield from [("need", tile), *[("issue", "f")] * BEGIN, *_program(schedule, d, dv, n, blocks)]
        yield from [
            *[("issue", "f")] * (dv // 2 + dv // 4 + dv // 16 + END),
            ("sleep", LEAVE),
            ("free", tile),
        ]


def utilisation(
    schedule: str, d: int, dv: int, tile: tuple[int, int], blocks: int, tiles: int = 1, q_stages: int = 1
) -> float:
    """Fraction of the time in which the tensor cores work.

    Parameters
    ----------
    schedule : {"overlap", "rescaled"}
        "overlap" is the kernel; "rescaled" the same if it rescaled O in every block.
    d, dv, tile
        Head dims, rows and keys.
    blocks, tiles : int
        Blocks of keys of a tile, and tiles.
    q_stages : int
        Tiles whose Q there is room for.
    """
    m, n = tile
    programs = [list(_tiles(schedule, d, dv, n, blocks, tiles)) for _ in range(m // 64)]
    at, awake = [0] * len(programs), [0] * len(programs)
    turns = [1] + [0] * (len(programs) - 1)
    done: list[dict[str, int]] = [{"S": 0, "O": 0} for _ in programs]
    freed: list[list[int]] = [[] for _ in range(tiles)]
    now = tensor_free = mufu_free = busy = first = 0
    while any(place < len(program) for place, program in zip(at, programs, strict=True)):
        issued = False
        for offset in range(len(programs)):
            w = (first + offset) % len(programs)
            while at[w] < len(programs[w]) and awake[w] <= now:
                kind, *rest = programs[w][at[w]]
                if kind == "issue":
                    if issued or (rest == ["m"] and mufu_free > now + MUFU):
                        break
                    if rest == ["m"]:
                        mufu_free = max(mufu_free, now) + MUFU
                    issued, first = True, w
                elif kind == "sleep":
                    awake[w] = now + int(str(rest[0]))
                elif kind == "start":
                    name, cycles = str(rest[0]), int(str(rest[1]))
                    tensor_free = max(tensor_free, now) + cycles
                    busy += cycles
                    done[w][name] = tensor_free + WAKE
                elif kind == "wait":
                    until = max(done[w][name] for name in str(rest[0]))
                    if until > now:
                        awake[w] = until
                        break
                elif kind == "take":
                    if not turns[w]:
                        break
                    turns[w] -= 1
                    awake[w] = now + HAND_OVER
                elif kind == "pass":
                    turns[(w + 1) % len(programs)] += 1
                elif kind == "need":
                    before = int(str(rest[0])) - q_stages
                    if before >= 0 and (len(freed[before]) < len(programs) or freed[before][-1] + COME > now):
                        break
                else:
                    freed[int(str(rest[0]))].append(now)
                at[w] += 1
                if kind == "issue":
                    break
        now += 1
    return busy / now


# ---------------------------------------------------------------------- tiles

PROCESSORS = 132
# Cycles of a block of keys, and those of a tile that nothing covers: in a block of threads for it alone, and
# in one that stays.
# why 900: what `utilisation` leaves uncovered between tiles at head dim 128, where Q has two stages.
STEP, FRESH, STAYING = 2048, 5000, 900
COUNTED = 3900  # those of a tile in a block that stays, with the instructions of a tile as counted


def efficiency(
    how: str, keys: int, heads: int, m: int = 128, n: int = 128, d: int = 128, staying: int = STAYING
) -> float:
    """Fraction of the ideal time of a causal problem, by the way in which blocks get tiles."""
    section = max(1, min(heads, (16 << 20) // (4 * d) // keys))
    order: list[int] = []
    for first in range(0, heads, section):
        for tile in reversed(range(-(-keys // m))):
            order += [tile] * min(section, heads - first)
    work = [STEP * -(-min(keys, (tile + 1) * m) // n) for tile in order]
    ends = [0] * PROCESSORS
    if how == "by number":
        for number, cycles in enumerate(work):
            ends[number % PROCESSORS] += cycles + staying
    else:
        for cycles in work:
            end = heapq.heappop(ends)
            heapq.heappush(ends, end + cycles + (staying if how == "counter" else FRESH))
    return sum(work) / PROCESSORS / max(ends)


BACKWARD_STEP = 3588  # cycles of shared memory for 80 queries and 128 keys at head dim 128


def backward_efficiency(how: str, keys: int, heads: int, m: int = 80, n: int = 128, d: int = 128) -> float:
    """The same of the backward pass, whose blocks own keys and are fresh ones."""
    section = max(1, min(heads, (16 << 20) // (4 * d) // keys)) if how == "sections" else 1
    work: list[int] = []
    for first in range(0, heads, section):
        for tile in range(-(-keys // n)):
            work += [BACKWARD_STEP * -(-(keys - tile * n) // m)] * min(section, heads - first)
    ends = [0] * PROCESSORS
    for cycles in work:
        heapq.heappush(ends, heapq.heappop(ends) + cycles + FRESH)
    return sum(work) / PROCESSORS / max(ends)


# Cycles from when a block may add to a tile of dQ to when the next one may, and those of them after which the
# place of what it adds is free. A guess: 32 KiB at 64 bytes a cycle, and three trips to L2.
TURN, TAKEN = 2500, 1000


# How blocks start, and in which direction they go over queries, where they add to a tile of dQ in turns.
STARTS = ("no turns", "first keys first", "the same, queries backwards", "last keys first", "in waves")
TURNS_OF = (
    (1024, 256),
    (2048, 16),
    (4096, 64),
    (4096, 16),
    (8192, 8),
    (16384, 8),
    (16384, 2),
    (32768, 1),
)  # keys, heads of k


def _steps(
    how: str, place: int, columns: int, rows: int, causal: bool, wave: int, m: int, n: int
) -> list[int]:
    """Tiles of queries of a head's block number `place`, in the order in which it goes over them.

    What is below 0 is the other sum of tile -1 - tile: in waves there are two, see hopper/turn_order.cuh.
    """
    number, in_wave = divmod(place, wave)
    up = causal and number % 2 == 0
    column = columns - 1 - place if how == "last keys first" else place
    if how == "in waves" and up:
        column = number * wave + min((number + 1) * wave, columns) - 1 - place
    tiles = range(column * n // m if causal else 0, rows)
    if how == "the same, queries backwards":
        return list(reversed(tiles))
    if how != "in waves" or up:
        return list(tiles)
    home = rows if causal else in_wave * rows // wave
    return [*(-1 - tile for tile in reversed(tiles) if tile < home), *reversed(range(home, rows))]


def turns_cycles(
    how: str, keys: int, heads: int, causal: bool = True, m: int = 80, n: int = 128, turn: int = TURN
) -> tuple[float, float]:
    """Cycles where blocks add to each tile of dQ in turns, in the order in which they start; the ideal first.

    Parameters
    ----------
    how : str
        One of STARTS.
    keys, heads, causal, m, n
        The problem, at head dim 128, and the tile.
    turn : int
        Cycles of a turn.
    """
    section = max(1, min(heads, (16 << 20) // (4 * 128) // keys))
    columns, rows = -(-keys // n), -(-keys // m)
    ends = [0] * PROCESSORS
    work = 0
    for first in range(0, heads, section):
        here = min(section, heads - first)
        added: list[dict[int, int]] = [{} for _ in range(here)]
        for place in range(columns):
            tiles = _steps(how, place, columns, rows, causal, PROCESSORS // section, m, n)
            for head in added:
                stored = heapq.heappop(ends) + FRESH
                free = mine = 0  # the place of dQ; this block's addition before
                for tile in tiles:
                    stored = max(stored + BACKWARD_STEP, free)
                    adds = stored if how == "no turns" else max(stored, mine, head.get(tile, 0))
                    free, mine = adds + min(TAKEN, turn), adds + turn
                    head[tile] = mine
                work += BACKWARD_STEP * len(tiles)
                heapq.heappush(ends, max(stored, mine))
    return work / PROCESSORS, max(ends)


def turns_efficiency(how: str, keys: int, heads: int, causal: bool) -> float:
    """The same fraction as above where blocks add in turns."""
    ideal, cycles = turns_cycles(how, keys, heads, causal)
    return ideal / cycles


def stores() -> None:
    """Print the rate of gradients in turns beside that of the fast way, with the passes over sums of dQ.

    The fast way writes zeros and in the end reads the sums. In turns the first block stores; in waves there
    are two sums.
    """
    for mask, causal in (("causal", True), ("all keys", False)):
        for keys, heads in TURNS_OF:
            read = 4 * 128 * keys * heads / MEMORY * CLOCK
            cells = []
            for turn in (1500, TURN, 4000):
                fast, one_order, waves = (
                    turns_cycles(how, keys, heads, causal, turn=turn)[1]
                    for how in ("no turns", "the same, queries backwards", "in waves")
                )
                both = ((fast + 2 * read) / slow for slow in (one_order + read, waves + 2 * read))
                cells.append(", ".join(f"{rate:.2f}" for rate in both))
            print(f"| {mask}, {keys} x {heads} | {' | '.join(cells)} |")


def float8() -> None:
    """Print the tables of 8-bit floats: cycles of a block of keys by unit and in the model, and of a key."""
    for variant in hopper.variants(architecture("sm_90")):
        if (variant.kernel, variant.mask) != ("flash_forward_fp8_sm90", "band"):
            continue
        (m, n), d, dv = variant.tile, variant.head_dim, variant.head_dim_v
        tensor = m * n * (d + dv) // 4096
        mufu = m // 64 * MUFU * (n // 2 + 2)
        # Q, K and V^T as operands of each warpgroup; K and V by bulk copies; V read and written again.
        shared = (m * d + m // 64 * n * (d + dv) + n * (d + dv) + 2 * n * dv) // 128
        together = tensor / utilisation("one by one, 8 bits", d, dv, variant.tile, 40)
        print(f"| {d} | {m} x {n} | {tensor} | {mufu} | {shared} | {together:.0f} |")
    for d, m, n in ((64, 192, 96), (64, 192, 128), (128, 128, 128), (128, 128, 192)):
        shares = (utilisation(f"{how}, 8 bits", d, d, (m, n), 40) for how in ("one by one", "overlap"))
        one_by_one, overlap = (m * d / 2048 / share for share in shares)
        print(f"| {d}, {m} x {n} | {one_by_one:.1f} | {overlap:.1f} |")


# The share of its limit that FlashAttention-3 reaches in the backward pass at head dim 128, as published:
# 560 to 575 of 797 TFLOP/s. What a step waits for is in no model here.
REACHED_BACKWARD = 0.72
CLOCK = 1.755e9  # under load, of an H100 or H200
_H100, _H200 = rates.known("H100"), rates.known("H200")
assert _H100 is not None
assert _H200 is not None
L2 = _H200.l2 / PROCESSORS / CLOCK  # bytes per cycle and multiprocessor; an estimate, see rates.py
MEMORY = _H100.hbm


def _forward_units(variant: Variant) -> tuple[dict[str, float], float]:
    """Cycles of a tile of queries and a block of keys, by unit; and in the model of a scheduler."""
    (m, n), d, dv = variant.tile, variant.head_dim, variant.head_dim_v
    float8 = variant.dtype == "e4m3"
    item = 1 if float8 else 2
    tensor = m * n * (d + dv) * item / 4096
    # Q, K and V as operands of each warpgroup; K and V by bulk copies; of 8 bits V read and written again.
    shared = item * (m * d + (m // 64 + 1) * n * (d + dv) + 2 * n * dv * float8) / 128
    # Every tile reads K and V for itself, or has them in common with those of its cluster.
    l2 = item * n * (d + dv) / L2 / int(dict(variant.macros).get("CF_CLUSTER", "1"))
    schedule, blocks = ("one by one, 8 bits", 40) if float8 else ("overlap", 32)
    # Of a block in the middle: the difference of two programs.
    steps = [[step[0:2] for step in _program(schedule, d, dv, n, count)] for count in (2, 3)]
    issued, exponentials = (
        m // 64 * (steps[1].count(kind) - steps[0].count(kind)) for kind in (("issue", "f"), ("issue", "m"))
    )
    units = {"tensor cores": tensor, "issue": issued + exponentials, "MUFU": MUFU * exponentials,
             "shared memory": shared, "L2": l2}  # fmt: skip
    return units, max(tensor / utilisation(schedule, d, dv, variant.tile, blocks), l2)


def _backward_units(variant: Variant) -> tuple[dict[str, float], float]:
    """The same of a step of queries and a block's keys; what is expected instead of a model."""
    (m, n), d, dv = variant.tile, variant.head_dim, variant.head_dim_v
    wide, owns_queries = "wide" in variant.kernel, "dq" in variant.kernel
    columns_of_dq = 0 if wide else d if m == 128 else max(d, 128)
    # Elements that a warpgroup's products read, as test_cost_is_the_theory counts them.
    if owns_queries:
        operands = (64 + n) * (d + dv) + n * d
    elif wide:
        operands = (64 + m) * d + 2 * m * (64 + d // 2)
    else:
        of_dq = m if m % 64 else columns_of_dq // (1 if m == 128 else 2)
        operands = (64 + 2 * m) * (d + dv) + n * (64 + of_dq)
        operands += 64 * m * (d + dv > 256)
    # P and dS written and P read, or dS written, or nothing.
    pairs = m * n * (0 if owns_queries else 3 if wide else 1)
    # LSE and delta: 16 columns of an operand, written, and read with S and with dP; or floats, where 4 bytes
    # to each lane of a warp are a cycle, whatever lanes share; or they stay in registers.
    subtracted = 16 * (not wide and variant.mask == "band" and d + dv <= 256)
    terms = subtracted * m * (2 + 4 * 2) / 128 or 4 * m * (not owns_queries)
    come = 2 * (n if owns_queries else m) * (d + dv)  # K and V, or Q and dO
    sums = 4 * m * d * (not wide)  # dQ, which goes
    shared = (4 * operands + 2 * pairs + 2 * sums + come) / 128 + terms
    depth = 2 * d + dv if owns_queries else 2 * d + 2 * dv + columns_of_dq + 2 * subtracted
    units = {"tensor cores": m * n * depth / 2048, "MUFU": m * n / 16, "shared memory": shared}
    expected = max(units.values()) / REACHED_BACKWARD
    l2 = (come + sums) / L2
    return {**units, "L2": l2}, max(expected, l2)


def predictions() -> None:
    """Print what is expected of each kernel of kind `band`, to hold measurements against.

    Then those of the forward pass in clusters of two, which are candidates of bench tune.
    """
    arch = architecture("sm_90")
    known = ("flash_forward_sm90", "flash_forward_fp8_sm90", "flash_backward_sm90",
             "flash_backward_wide_sm90", "flash_backward_wide_dq_sm90")  # fmt: skip
    every = [v for v in hopper.variants(arch) if v.mask == "band" and v.dtype != "bf16" and v.kernel in known]
    in_twos = {classes: tuple((*cell, 2) for cell in cells) for classes, cells in hopper._FORWARD.items()}
    with mock.patch.object(hopper, "_FORWARD", in_twos):
        forward = (v for v in hopper.variants(arch) if v.kernel == "flash_forward_sm90")
        every += [v for v in forward if v.mask == "band" and v.dtype == "f16" and v.head_dim >= 128]
    passes = {v.head_dim: v for v in every if v.kernel == "flash_backward_wide_dq_sm90"}
    for variant in (v for v in every if v not in passes.values()):
        backward = "backward" in variant.kernel
        units, expected = (_backward_units if backward else _forward_units)(variant)
        limit = max(units, key=lambda name: units[name])
        (m, n), d, dv = variant.tile, variant.head_dim, variant.head_dim_v
        cycles, kernel = units[limit], variant.kernel
        kernel += ", in twos" * (dict(variant.macros).get("CF_CLUSTER") == "2")
        if "wide" in variant.kernel:  # two passes are the five products: for a tile of the second
            of_queries, steps = passes[d], passes[d].tile[0] * passes[d].tile[1] / (m * n)
            others, others_expected = _backward_units(of_queries)
            slowest = max(others, key=lambda name: others[name])
            (m, n), limit, kernel = of_queries.tile, f"{limit}, then {slowest}", f"{kernel} and dq"
            cycles, expected = steps * cycles + others[slowest], steps * expected + others_expected
        flops = 2 * m * n * (3 * d + 2 * dv if backward else d + dv)
        rates = (flops * PROCESSORS * CLOCK / each / 1e12 for each in (cycles, expected))
        head_dims = f"{d}" if d == dv else f"{d}/{dv}"
        print(
            f"| {kernel} | {head_dims} | {m} x {n} | {limit} | {cycles:.0f} | {expected:.0f} | "
            f"{expected / CLOCK * 1e6:.2f} | {' | '.join(f'{rate:.0f}' for rate in rates)} |"
        )
    for words, share, least in fractions():
        print(f"| {words} | {share:.2f} | {least:.2f} |")


def fractions() -> list[tuple[str, float, float]]:
    """What kernels of kind `band` are asked for: words, what the model says, and the least that will do."""

    def units(kernel: str, d: int) -> tuple[dict[str, float], float]:
        made = (v for v in hopper.variants(architecture("sm_90")) if v.kernel == kernel)
        variant = next(v for v in made if (v.mask, v.head_dim, v.head_dim_v) == ("band", d, d))
        return (_backward_units if "backward" in kernel else _forward_units)(variant)

    wide, expected = units("flash_forward_sm90", 128)
    backward, _ = units("flash_backward_sm90", 128)
    short, long = (efficiency("counter", *shape, staying=COUNTED) for shape in ((2048, 128), (32768, 8)))
    return [
        ("forward, head dim 128: the lower of the roofs of tensor cores and L2",
         max(wide["tensor cores"], wide["L2"]) / expected, 0.95),
        ("forward, head dim 128, causal, 2048 keys: the rate of 32768", short / long, 0.80),
        # The five products of 80 queries and 128 keys; what LSE and delta add to two of them is no use.
        ("backward, head dim 128: the tensor cores' rate, at the limit",
         80 * 128 * 5 * 128 / 2048 / max(backward.values()), 0.88),
    ]  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    """Print the tables; with a number, for so many blocks of keys; with the name of one, that one."""
    named = {"float8": float8, "predictions": predictions, "stores": stores}
    if len(arguments) == 1 and arguments[0] in named:
        named[arguments[0]]()
        return
    blocks = int(arguments[0]) if arguments else 32
    schedules = ("overlap", "rescaled")
    print("tensor cores at work".ljust(34), *(schedule.rjust(len(schedule) + 2) for schedule in schedules))
    for variant in hopper.variants(architecture("sm_90")):
        if variant.kernel == "flash_forward_sm90" and (variant.dtype, variant.mask) == ("f16", "band"):
            dims = (variant.head_dim, variant.head_dim_v)
            shares = [utilisation(schedule, *dims, variant.tile, blocks) for schedule in schedules]
            print(
                variant.name.removeprefix("flash_forward_sm90_f16_").ljust(34),
                *(f"{x:{len(schedule) + 2}.2f}" for schedule, x in zip(schedules, shares, strict=True)),
            )
    print("useful work of the tensor cores, one and two stages of Q: keys 512, 1024, 2048")
    for d, tile in (
        (64, (192, 128)),
        (96, (192, 112)),
        (128, (128, 128)),
        (128, (128, 160)),
        (128, (128, 176)),
    ):
        cells = []
        for keys in (512, 1024, 2048):
            count = -(-keys // tile[1])
            useful = keys / (count * tile[1])
            both = (useful * utilisation("overlap", d, d, tile, count, 3, stages) for stages in (1, 2))
            cells.append(", ".join(f"{x:.2f}" for x in both))
        print(f"| {d}, {tile[0]} x {tile[1]} | {' | '.join(cells)} |")
    ways = ("a block per tile", "by number", "counter")
    print("causal: keys x heads".ljust(34), *(way.rjust(17) for way in ways))
    for keys, heads in ((1024, 256), (2048, 128), (8192, 32), (32768, 8)):
        print(f"{keys} x {heads}".ljust(34), *(f"{efficiency(way, keys, heads):17.2f}" for way in ways))
    orders = ("head after head", "sections")
    print("causal, backward: keys x heads of k".ljust(34), *(order.rjust(17) for order in orders))
    for keys, heads in ((1024, 256), (4096, 64), (1024, 32), (4096, 16), (8192, 8), (32768, 8)):
        fractions = (backward_efficiency(order, keys, heads) for order in orders)
        print(f"{keys} x {heads}".ljust(34), *(f"{fraction:17.2f}" for fraction in fractions))
    for mask, causal in (("causal", True), ("all keys", False)):
        print(f"{mask}, backward in turns".ljust(34), *(start.rjust(28) for start in STARTS))
        for keys, heads in TURNS_OF:
            fractions = (turns_efficiency(start, keys, heads, causal) for start in STARTS)
            print(f"{keys} x {heads}".ljust(34), *(f"{fraction:28.2f}" for fraction in fractions))


if __name__ == "__main__":
    main(sys.argv[1:])
