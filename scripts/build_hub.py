#!/usr/bin/env python3
"""Lay out a repository of the Hugging Face hub, as its package `kernels` loads one: build/hub.

A variant has the library, its kernels as data, and metadata with a SHA-256 of each file: `torch-cpu` with the
CPU core, `torch-cuda` also with the cubins. Both must be compiled before. To publish, upload the
folder to a repository of type `kernel`, to its branch v1.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cupy_flash import manifest  # noqa: E402
from cupy_flash.cpu.core import build as core_build  # noqa: E402
from cupy_flash.cpu.core import params  # noqa: E402
from cupy_flash.cpu.core import sources as core_sources  # noqa: E402
from cupy_flash.cubins import locate, sources  # noqa: E402
from cupy_flash.errors import CubinNotFoundError  # noqa: E402
from cupy_flash.plan import families  # noqa: E402
from cupy_flash.version import ABI_VERSION  # noqa: E402

NAME = "cupy-flash"
VARIANTS = ("torch-cpu", "torch-cuda")
# The branch v1. why not 0, as for a beta: transformers requests version 1 of an unknown repository.
VERSION = 1

# Names that a variant exports: the library, and the functions that transformers looks for.
EXPORTS = """
from . import torch as torch
from .flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__all__ += [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "torch",
]
"""

CARD = """---
library_name: kernels
license: mit
---

# cupy_flash

Exact flash attention for torch, forward and backward, on GPUs from Turing on and on CPUs: Python, and kernels
compiled ahead of time as data. It needs torch and NumPy.

```python
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(
    ..., attn_implementation="OWNER/cupy-flash", allow_all_kernels=True
)
```

```python
from kernels import get_kernel
cupy_flash = get_kernel("OWNER/cupy-flash", version=1, trust_remote_code=True)
cupy_flash.flash_attn_func(q, k, v, causal=True)     # by FlashAttention's names and rules
cupy_flash.torch.attention(q, k, v, causal=True)     # by its own
```
"""


class Unfit(RuntimeError):
    """The compiled files cannot be published; the message says why, with a hint."""


def library() -> Iterator[tuple[str, Path]]:
    """Yield the files of the package as in a wheel: name in the variant, and file."""
    package, kernels = ROOT / "cupy_flash", ROOT / "kernels_cu"
    for path in (*sorted(package.rglob("*.py")), package / "py.typed"):
        yield path.relative_to(package).as_posix(), path
    kinds = (".cpp", ".cu", ".cuh", ".h")
    texts = [path for path in sorted(kernels.rglob("*")) if path.suffix in kinds]
    texts += sorted(kernels.rglob("README.md"))
    for path in (*texts, kernels / "simulator" / "headers" / "nv" / "target"):
        yield f"_kernels/{path.relative_to(kernels).as_posix()}", path


def cubins(store: Path) -> Iterator[tuple[str, Path]]:
    """Yield the cubins of every target in a folder; raise Unfit for an incomplete or outdated one."""
    for folder in sorted(path.parent for path in store.glob(f"cuda1[23]/*/{locate.MANIFEST}")):
        cuda, target = int(folder.parent.name.removeprefix("cuda")), folder.name
        repair = f"scripts/build_cubins.py --cuda {cuda} --arch {target}"
        wanted = {
            f"{variant.name}.cubin": sources.digest(variant, target, cuda)
            for variant in families.names(target)
        }
        for path in whole(folder, "cubins", ".cubin", ABI_VERSION, wanted, repair):
            yield f"_cubins/{path.relative_to(store).as_posix()}", path


def core(store: Path) -> Iterator[tuple[str, Path]]:
    """Yield the libraries of every platform in a folder; raise Unfit for incomplete or outdated ones."""
    for folder in sorted(path.parent for path in store.glob(f"*/{locate.MANIFEST}")):
        repair = f"scripts/build_cpu.py --platform {folder.name}"
        wanted = {
            f"{core_sources.library_name(isa, part)}.so": core_sources.digest(isa, part)
            for isa in core_build.libraries_of(folder.name)
            for part in core_sources.parts(isa)
        }
        for path in whole(folder, "libraries", ".so", params.ABI_VERSION, wanted, repair):
            yield f"_core/{path.relative_to(store).as_posix()}", path


def whole(
    folder: Path, table: str, suffix: str, abi: int, wanted: Mapping[str, str], repair: str
) -> Iterator[Path]:
    """Yield the files of a folder, checked against its manifest; raise Unfit if one is missing or outdated.

    Parameters
    ----------
    folder : Path
    table, suffix, abi : str, str, int
        Key of the files in the manifest, suffix of the files, and version of their structs.
    wanted : mapping of str to str
        Required files, with the hash of the sources of each.
    repair : str
        The command that compiles them, for the hint.
    """
    path = folder / locate.MANIFEST
    held = manifest.read(path, table, ("bytes", "sha256", "source"))
    try:
        manifest.check_version(held, abi, f"the files in {folder}", repair)
    except CubinNotFoundError as error:
        raise Unfit(str(error)) from error
    entries: dict[str, Any] = {f"{name}{suffix}": entry for name, entry in held[table].items()}
    for name, source in wanted.items():
        if name not in entries:
            raise Unfit(f"{folder} lacks {name}.\nTry: {repair}")
        damage = manifest.damage(folder / name, entries[name])
        if damage or entries[name]["source"] != source:
            raise Unfit(f"{folder / name}: {damage or 'its sources have changed since'}.\nTry: {repair}")
        yield folder / name
    yield path


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file of a variant in base64, the format of `kernels`."""
    return {
        path.relative_to(folder).as_posix(): base64.b64encode(
            hashlib.sha256(path.read_bytes()).digest()
        ).decode()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def capability(target: str) -> str:
    """The compute capability of a target in the format of `kernels`: "9.0a" for "sm_90a"."""
    number = target.removeprefix("sm_")
    digits = number.rstrip("af")
    return f"{digits[:-1]}.{digits[-1]}{number[len(digits) :]}"


def lay_out(variant: str, out: Path, cubin_store: Path, core_store: Path) -> Path:
    """Write the folder of a variant from scratch; raise Unfit if compiled files are missing."""
    folder = out / "build" / variant
    files = {**dict(library()), **dict(core(core_store))}
    if not any(name.startswith("_core/") for name in files):
        raise Unfit(f"there is no CPU core in {core_store}.\nTry: scripts/build_cpu.py")
    backend: dict[str, Any] = {"type": variant.removeprefix("torch-")}
    if variant == "torch-cuda":
        files |= dict(cubins(cubin_store))
        targets = {name.split("/")[2] for name in files if name.startswith("_cubins/")}
        if not targets:
            raise Unfit(f"there are no cubins in {cubin_store}.\nTry: scripts/build_cubins.py --cuda 12")
        backend["archs"] = [capability(target) for target in sorted(targets, key=locate.capability)]
    shutil.rmtree(folder, ignore_errors=True)
    for name, path in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)
    with (folder / "__init__.py").open("a", encoding="utf-8") as file:
        file.write(EXPORTS)
    found = digests(folder)
    # why a hash of everything: two versions in one process need different names, also of torch operators.
    unique = hashlib.sha256(json.dumps(found).encode()).hexdigest()[:10]
    metadata = {
        "name": NAME,
        "id": f"_{NAME.replace('-', '_')}_{backend['type']}_{unique}",
        "version": VERSION,
        "license": "MIT",
        "python-depends": [],
        "backend": backend,
        "digest": {"algorithm": "sha256", "files": found},
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    return folder


def main(words: list[str] | None = None) -> int:
    """Make the requested repository; the exit status is 1 if something is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", choices=VARIANTS, action="append", help="may repeat (default: both)")
    parser.add_argument("--cubins", type=Path, default=ROOT / "build" / "cubins", metavar="DIR")
    parser.add_argument("--core", type=Path, default=ROOT / "build" / "cpu_release", metavar="DIR",
                        help="the CPU core by platform (default: build/cpu_release)")  # fmt: skip
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "hub", metavar="DIR")
    arguments = parser.parse_args(words)
    for variant in arguments.variant or VARIANTS:
        try:
            folder = lay_out(variant, arguments.out, arguments.cubins, arguments.core)
        except Unfit as error:
            print(f"error: {variant}: {error}", file=sys.stderr)
            return 1
        files = [path for path in folder.rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        print(f"{folder}: {len(files)} files, {size / 1e6:.1f} MB")
    (arguments.out / "README.md").write_text(CARD, encoding="utf-8")
    shutil.copyfile(ROOT / "LICENSE", arguments.out / "LICENSE")
    return 0


if __name__ == "__main__":
    sys.exit(main())
