"""A repository of the Hugging Face hub as scripts/build_hub.py lays it out, and the import of a variant."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

from cupy_flash.cpu.core.isa import runnable
from tests.paths import ROOT


def script() -> ModuleType:
    """scripts/build_hub.py, which publishes the CPU core of this machine alone."""
    spec = importlib.util.spec_from_file_location("build_hub", ROOT / "scripts" / "build_hub.py")
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    module.core_build = ModuleType("core_build")
    module.core_build.libraries_of = lambda platform: runnable()[:1]
    return module


def as_in_a_cache(repository: Path, to: Path) -> Path:
    """A copy as the hub's cache has it: every file is a link to a blob, whose name is its hash."""
    for number, path in enumerate(sorted(repository.rglob("*"))):
        if path.is_file():
            blob, link = to / "blobs" / str(number), to / "snapshot" / path.relative_to(repository)
            for folder in (blob.parent, link.parent):
                folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, blob)
            link.symlink_to(blob)
    return to / "snapshot"


def imported(variant: Path) -> ModuleType:
    """Import a variant under its id, as `_import_from_path` of the package kernels does."""
    name = json.loads((variant / "metadata.json").read_text(encoding="utf-8"))["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
