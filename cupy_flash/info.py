"""info: versions, GPUs, cubins, and what would run here; every problem with a command that fixes it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

from .call.problem import Problem
from .cpu import choose as choose_on_cpu
from .cpu.core.isa import why_floats
from .cpu.core.locate import load
from .cpu.core.sources import AMX, BFLOAT16, multiplies
from .cpu.threads import available_cores
from .cubins import locate
from .device import choice, driver, tensor_map
from .device.gpu import version_text
from .errors import CubinNotFoundError, InvalidArgumentsError, UnsupportedError
from .plan.choose import choose
from .version import __version__

__all__ = ["facts", "info_text"]

_LIBRARIES = ("numpy", "ml_dtypes", "torch", "jax", *driver.CUPYS)

# A common call, for the line that shows what would run here.
_TYPICAL = Problem("forward", "float16", None, 1, 8, 8, 4096, 4096, 128, 128, 128**-0.5, right=0)


def facts() -> dict[str, Any]:
    """The facts that `info_text` shows, as plain values.

    Returns
    -------
    dict
        versions, gpus, drivers (what runs kernels, by library of the arrays), cubins, unreadable (places that
        may have others), runs (one entry per device that can run attention), problems (each with what is
        wrong and a command that fixes it).
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
    override = os.environ.get(locate.OVERRIDE)
    unreadable = {found.origin: found for found in locate.unreadable()}
    hidden = unreadable.get(locate.OVERRIDE)
    if override and (hidden or not Path(override).is_dir()):
        why = f"cannot be read: {hidden.why}" if hidden else "is no folder"
        problems.append(f"{locate.OVERRIDE} is {override!r}, which {why}.\nTry: unset {locate.OVERRIDE}")
    runs = [{"on": f"cpu, {available_cores()} cores", "with": _on_cpu(problems)}]
    gpus: list[dict[str, Any]] = []
    cupys = driver.installed_cupys()
    if len(cupys) > 1:
        problems.append(
            f"{' and '.join(cupys)} are both installed and overwrite each other.\n"
            f"Try: pip uninstall {' '.join(cupys)}, then install one of them again"
        )
    of_gpu = choice.gpu_driver("torch")
    try:
        devices, version = of_gpu.devices(), of_gpu.driver_version()
        versions["driver"] = f"CUDA {version_text(version)}"
    except UnsupportedError as error:
        devices, version = (), 0
        # why: a missing driver is a problem only if something that needs it is installed.
        if driver.is_installed() or of_gpu is driver:
            problems.append(str(error))
    for device in devices:
        gpus.append(device._asdict())
        try:
            variant = choose(_TYPICAL, device.arch, device.multiprocessors).launches[0].variant
            cubin = locate.locate(variant, device.arch, version)
            runs.append(
                {"on": f"cuda:{device.ordinal}", "with": f"{variant.name} ({cubin.set}, {cubin.origin})"}
            )
        except (UnsupportedError, CubinNotFoundError) as error:
            problems.append(f"cuda:{device.ordinal}: {error}")
    return {
        "versions": versions,
        "gpus": gpus,
        "drivers": _drivers(),
        "cubins": [{**found._asdict(), "path": str(found.path)} for found in sets],
        "unreadable": [{**found._asdict(), "path": str(found.path)} for found in unreadable.values()],
        "runs": runs,
        "problems": problems,
    }


def _drivers() -> list[dict[str, str]]:
    """The driver that loads and launches kernels, by library of the arrays, with the reason."""
    why = choice.why_without_cupy()
    if not why:
        return [{"of": "CuPy, torch and JAX arrays", "with": "CuPy", "why": ""}]
    others = "not installed, which only CuPy arrays need" if "not installed" in why else "CuPy"
    return [
        {"of": "torch and JAX arrays", "with": tensor_map.LIBRARY, "why": why},
        {"of": "CuPy arrays", "with": others, "why": ""},
    ]


def _on_cpu(problems: list[str]) -> str:
    """The implementation on the CPU, and if that is not the compiled core, the reason."""
    try:
        simulator = choice.host_driver()
        if simulator is not None:
            return f"the kernels of {simulator.arch(0)}, simulated ({choice.VARIABLE})"
        found = choose_on_cpu.core()
        if not isinstance(found, str):
            load(found[1])
    except (InvalidArgumentsError, CubinNotFoundError) as error:
        problems.append(f"cpu: {error}")
        return "nothing, until the problem below is solved"
    if isinstance(found, str):
        return f"tiled NumPy; not the compiled core: {found}"
    isa, library = found
    size, products = f"{library.bytes / 1e3:.0f} KB", ""
    if multiplies(isa, BFLOAT16):
        by = choose_on_cpu.products_of_bfloat16(isa)
        ways = {BFLOAT16: "in pairs", AMX: "by AMX, as are long prompts of float32"}
        way = ways[by.part] if by else f"as floats ({why_floats(choose_on_cpu.override()) or 'no library'})"
        products = f", bfloat16 multiplied {way}"
    return f"the compiled core for {isa.title} ({size}, {library.origin}){products}, else tiled NumPy"


def info_text(as_json: bool = False) -> str:
    """A text that shows what is installed, what would run, and what is wrong.

    Parameters
    ----------
    as_json : bool
        Return the same facts as JSON.

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
    for row in found["drivers"] if found["gpus"] else ():
        because = f" ({row['why']})" if row["why"] else ""
        lines.append(f"driver    of {row['of']}: {row['with']}{because}")
    if not found["gpus"]:
        why = "" if driver.is_installed() else ": no NVIDIA driver is installed"
        lines.append(f"gpu       none that can be used{why}")
    for row in found["cubins"]:
        state = "damaged" if row["problem"] else "verified"
        lines.append(
            f"cubins    {row['set']} {row['target']}: {row['kernels']} in {row['bytes'] / 2**20:.1f} MiB, "
            f"{state}, {row['origin']} ({row['path']})"
        )
    for row in found["unreadable"]:
        lines.append(f"cubins    {row['origin']} cannot be read: {row['why']} ({row['path']})")
    lines += [] if found["cubins"] or found["unreadable"] else ["cubins    none installed"]
    lines += [f"runs      on {row['on']}: {row['with']}" for row in found["runs"]]
    for problem in found["problems"]:
        first, *rest = problem.splitlines()
        lines += [f"problem   {first}", *(f"          {line.strip()}" for line in rest)]
    return "\n".join(lines)
