"""cold: import, first call and second call in a fresh process, also of peers that compile at first use."""

from __future__ import annotations

import json
import subprocess
import sys

from ..machine import cpu_share, fresh, timing
from ..measure.session import Session, Settings, progress
from ..work import Case

CASE = Case(1, 8, 1024, 64, "float32")
STEPS = ("import", "first call", "second call")

# Each prints the seconds of the three steps. Making the inputs initialises CUDA on a GPU, so that the first
# call does not include the creation of the context.
_FRAME = """
import json, time
import numpy as np
def clock(call):
    start = time.perf_counter(); result = call(); done(result)
    return time.perf_counter() - start
x = np.random.default_rng(0).standard_normal({shape!r}).astype(np.float32)
start = time.perf_counter()
{imports}
imported = time.perf_counter() - start
{body}
q = put(x); k = put(x[:, ::-1]); v = put(-x)
print(json.dumps([imported, clock(call), clock(call)]))
"""
_TORCH_CPU = "put = lambda x: torch.from_numpy(x.copy()); done = lambda o: None"
_TORCH_GPU = (
    "put = lambda x: torch.from_numpy(x.copy()).cuda().half(); done = lambda o: torch.cuda.synchronize()"
)
_PROGRAMS = {
    ("cupy_flash", "cpu"): (
        "import cupy_flash",
        "put = np.array; done = lambda o: None\ncall = lambda: cupy_flash.attention(q, k, v)",
    ),
    ("cupy_flash", "gpu"): (
        "import cupy, cupy_flash",
        """put = lambda x: cupy.asarray(x, 'float16'); done = lambda o: cupy.cuda.Device().synchronize()
call = lambda: cupy_flash.attention(q, k, v)""",
    ),
    ("cupy_flash without CuPy", "gpu"): (
        "import os, torch, cupy_flash; os.environ['CUPY_FLASH_DRIVER'] = 'cuda'",
        f"{_TORCH_GPU}\ncall = lambda: cupy_flash.attention(q, k, v)",
    ),
    ("torch", "cpu"): (
        "import torch",
        f"{_TORCH_CPU}\ncall = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v)",
    ),
    ("torch", "gpu"): (
        "import torch",
        f"{_TORCH_GPU}\ncall = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v)",
    ),
    ("torch flex", "gpu"): (
        "import torch; from torch.nn.attention.flex_attention import flex_attention",
        f"{_TORCH_GPU}\nflex = torch.compile(flex_attention)\ncall = lambda: flex(q, k, v)",
    ),
    **{
        ("jax", place): (
            "import jax",
            f"""put = lambda x: jax.numpy.asarray(x.swapaxes(1, 2), '{dtype}')
done = jax.block_until_ready; attend = jax.jit(jax.nn.dot_product_attention)
call = lambda: attend(q, k, v)""",
        )
        for place, dtype in (("cpu", "float32"), ("gpu", "float16"))
    },
}


def _seconds(imports: str, body: str) -> list[float] | str:
    """The three durations of one process, or why there are none."""
    code = _FRAME.format(shape=CASE.shapes()["q"], imports=imports, body=body)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=fresh.environment(),
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "took more than 3 minutes"
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["it failed without a word"])[-1]
    seconds: list[float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def run(settings: Settings) -> None:
    session = Session("cold", settings)
    case = CASE._replace(dtype="float16") if session.place.name == "gpu" else CASE
    programs = [
        (name, program) for (name, where), program in _PROGRAMS.items() if where == session.place.name
    ]
    for name, (imports, body) in progress(programs, "cold"):
        if session.out_of_time():
            return
        runs: list[list[tuple[float, float]]] = []
        for _ in range(5 if settings.quick else 15):
            before = cpu_share.sample()
            seconds = _seconds(imports, body)
            if isinstance(seconds, str):
                session.skipped(name, f"is left out: {seconds}")
                break
            theirs = cpu_share.of_others(before, cpu_share.sample())
            runs.append([(step, theirs) for step in seconds])
        else:
            times = [timing.kept(list(step)) for step in zip(*runs, strict=True)]
            session.say(
                f"{name:24}" + "".join(f" {step} {took}," for step, took in zip(STEPS, times, strict=True))
            )
            session.append(
                session.row(case, name, detail=step, **took.row())
                for step, took in zip(STEPS, times, strict=True)
            )
