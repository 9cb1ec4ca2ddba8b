"""info: versions, GPUs, cubins and what would run here; every problem with the command that fixes it."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from typing import Any

from .call.problem import Problem
from .cpu import choose as choose_on_cpu
from .cpu.core.isa import why_floats
from .cpu.threads import available_cores
from .cubins import locate
from .device import driver
from .errors import CubinNotFoundError, InvalidArgumentsError, UnsupportedError
from .plan.choose import choose
from .version import __version__

__all__ = ["facts", "info_text"]

_LIBRARIES = ("numpy", "ml_dtypes", "torch", "jax", *driver.CUPYS)

# What people run most, for the line that says what would run here.
_TYPICAL = Problem("forward", "float16", None, 1, 8, 8, 4096, 4096, 128, 128, 128**-0.5, right=0)


def facts() -> dict[str, Any]:
    """Everything `info_text` says, as plain values.

    Returns
    -------
    dict
        versions, gpus, cubins, runs (one entry per place where attention can run), problems (each with
        what is wrong and the command that fixes it).
    """
    versions = {"cupy_flash": __version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    problems = []
    sets = locate.available(verify=True)
    problems += [found.problem for found in sets if found.problem]
    runs = [{"on": f"cpu, {available_cores()} cores", "with": _on_cpu(problems)}]
    gpus: list[dict[str, Any]] = []
    cupys = driver.installed_cupys()
    if len(cupys) > 1:
        problems.append(
            f"{' and '.join(cupys)} are both installed and overwrite each other.\n"
            f"Try: pip uninstall {' '.join(cupys)}, then install one of them again"
        )
    try:
        devices = driver.devices()
        versions["driver"] = f"CUDA {driver.driver_version() // 1000}.{driver.driver_version() % 1000 // 10}"
    except UnsupportedError as error:
        devices = ()
        # why: to lack CuPy is no problem where it has no GPU to run on.
        if driver.is_installed() or not isinstance(error.__cause__, ModuleNotFoundError):
            problems.append(str(error))
    for device in devices:
        gpus.append(device._asdict())
        try:
            variant = choose(_TYPICAL, device.arch, device.multiprocessors).launches[0].variant
            cubin = locate.locate(variant, device.arch, driver.driver_version())
            runs.append(
                {"on": f"cuda:{device.ordinal}", "with": f"{variant.name} ({cubin.set}, {cubin.origin})"}
            )
        except (UnsupportedError, CubinNotFoundError) as error:
            problems.append(f"cuda:{device.ordinal}: {error}")
    return {
        "versions": versions,
        "gpus": gpus,
        "cubins": [{**found._asdict(), "path": str(found.path)} for found in sets],
        "runs": runs,
        "problems": problems,
    }


def _on_cpu(problems: list[str]) -> str:
    """What computes on the CPU, and why not the compiled core if that does not."""
    try:
        found = choose_on_cpu.core()
    except (InvalidArgumentsError, CubinNotFoundError) as error:
        problems.append(f"cpu: {error}")
        return "nothing, until the problem below is solved"
    if isinstance(found, str):
        return f"tiled NumPy (the compiled core: {found})"
    isa, library = found
    size, products = f"{library.bytes / 1e3:.0f} KB", ""
    if choose_on_cpu.by_pairs(isa):
        why = why_floats(choose_on_cpu.override())
        products = f", bfloat16 multiplied as floats ({why})" if why else ", bfloat16 multiplied in pairs"
    return f"the compiled core for {isa.title} ({size}, {library.origin}){products}, else tiled NumPy"


def info_text(as_json: bool = False) -> str:
    """Say what is here, what would run, and what is wrong.

    Parameters
    ----------
    as_json : bool
        The same facts as JSON.

    Returns
    -------
    str
    """
    found = facts()
    if as_json:
        return json.dumps(found, indent=2)
    lines = ["versions  " + ", ".join(f"{name} {version}" for name, version in found["versions"].items())]
    for gpu in found["gpus"]:
        memory = gpu["memory_bytes"] / 2**30
        lines.append(
            f"gpu       cuda:{gpu['ordinal']} {gpu['name']}, {gpu['arch']}, "
            f"{gpu['multiprocessors']} multiprocessors, {memory:.0f} GiB"
        )
    if not found["gpus"]:
        why = "" if driver.is_installed() else ": no NVIDIA driver is installed"
        lines.append(f"gpu       none that can be used{why}")
    for row in found["cubins"]:
        state = "damaged" if row["problem"] else "verified"
        lines.append(
            f"cubins    {row['set']} {row['target']}: {row['kernels']} in {row['bytes'] / 2**20:.1f} MiB, "
            f"{state}, {row['origin']} ({row['path']})"
        )
    lines += [] if found["cubins"] else ["cubins    none installed"]
    lines += [f"runs      on {row['on']}: {row['with']}" for row in found["runs"]]
    for problem in found["problems"]:
        first, *rest = problem.splitlines()
        lines += [f"problem   {first}", *(f"          {line.strip()}" for line in rest)]
    return "\n".join(lines)
