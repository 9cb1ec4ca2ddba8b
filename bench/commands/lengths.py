"""forward and backward: speed by sequence length, head dim and dtype."""

from __future__ import annotations

from collections.abc import Iterator

from ..measure.session import Session, Settings
from ..work import FLOAT8, Case

# On a GPU the sizes of the papers: 16384 tokens in total, 2048 features over all heads.
TOKENS, FEATURES = 16384, 2048
GPU_LENGTHS = (8192, 2048, 16384, 4096, 1024, 512)
CPU_LENGTHS = (1024, 4096, 256, 2048, 512)


def on_gpu(passes: str, dtypes: tuple[str, ...], quick: bool, float8: bool = False) -> Iterator[Case]:
    """Yield cases, the most important first, as time may run out.

    With `float8` the longest ones are repeated in 8-bit floats, right after 16 bits.
    """
    first = dtypes[0]
    for length in GPU_LENGTHS[: 3 if quick else None]:
        for head_dim in (128, 64) if quick else (128, 64, 256):
            for causal in (False, True):
                case = Case(TOKENS // length, FEATURES // head_dim, length, head_dim, first, causal, passes)
                yield case
                if float8 and passes == "forward" and length >= (GPU_LENGTHS[0] if quick else 2048):
                    yield case._replace(dtype=FLOAT8)
    # One length in the other dtypes, and one with GQA.
    for dtype in dtypes[1:]:
        yield Case(4, 16, 4096, 128, dtype, True, passes)
    if not quick:
        yield Case(1, 64, 8192, 128, first, True, passes, heads_k=8)
        for causal in (False, True):  # the global layers of Gemma 4
            yield Case(TOKENS // 4096, FEATURES // 512, 4096, 512, first, causal, passes)


def on_cpu(passes: str, quick: bool) -> Iterator[Case]:
    for length in CPU_LENGTHS[::2] if quick else CPU_LENGTHS:
        if quick and length > 1024:
            continue
        for head_dim in (64,) if quick else (64, 128):
            for causal in (False, True):
                yield Case(1, 4, length, head_dim, "float32", causal, passes)
    # Other dtypes, for their errors.
    for dtype in ("float16", "bfloat16", "float64", *((FLOAT8,) if passes == "forward" else ())):
        yield Case(1, 4, 512, 64, dtype, True, passes)


def run(settings: Settings, passes: str) -> None:
    session = Session(passes, settings)
    place = session.place
    suite = on_cpu(passes, settings.quick) if place.name == "cpu" else on_gpu(
        passes, place.dtypes, settings.quick, place.float8
    )  # fmt: skip
    for case in session.cases(suite):
        session.measure(case)


def forward(settings: Settings) -> None:
    run(settings, "forward")


def backward(settings: Settings) -> None:
    run(settings, "backward")
