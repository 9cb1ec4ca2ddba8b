"""What translated PTX does not model: the registers of warpgroups. The SASS tells."""

from __future__ import annotations

from pathlib import Path

import pytest

from cupy_flash.cubins import nvrtc, sass, sources
from cupy_flash.cubins.compile import Resources
from cupy_flash.plan import families
from tests.simulator.ptx.conftest import need

SPECIALISED = {v.source: v for v in families.variants("sm_90a") if v.products and v.dtype in ("f16", "e4m3")}


@pytest.mark.slow
@pytest.mark.skipif(
    sass.disassembler() is None, reason=f"nvdisasm is not installed: pip install {sass.REQUIREMENT}"
)
@pytest.mark.parametrize("source", SPECIALISED)
def test_warpgroups_take_what_they_need(source: str, tmp_path: Path) -> None:
    """Every build looks, too; here mutants do."""
    need(13)
    variant = SPECIALISED[source]
    path = sources.folder() / source
    options = [*sources.options(variant, "sm_90a"), f"-I{path.parent}", f"-I{path.parent / 'include'}"]
    cubin, log = nvrtc.Compiler(13).compile(path.read_text(), path.name, options)
    (tmp_path / "kernel.cubin").write_bytes(cubin)
    listing = sass.disassemble(tmp_path / "kernel.cubin")
    assert any(i.name == "USETMAXREG" for i in listing.instructions)
    assert not sass.register_faults(listing, Resources.of(log).registers, variant.threads // 128)
