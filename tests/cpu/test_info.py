"""info names what people run into, each with the command that mends it, and quickly."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import pytest

from cupy_flash import info
from cupy_flash.__main__ import main
from cupy_flash.cubins import locate
from cupy_flash.device import driver
from cupy_flash.plan import choose, families
from cupy_flash.version import ABI_VERSION, __version__
from tests.cpu.test_driver import FakeCuda, forget
from tests.paths import ROOT


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    """A machine with nothing on it: no cubins, no CuPy, no GPU."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(locate.OVERRIDE, raising=False)
    monkeypatch.setattr(locate.sources, "folder", lambda: tmp_path / "kernels")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(driver, "installed_cupys", tuple)
    forget()
    yield
    forget()


def package(tmp_path, monkeypatch, cuda=12, target="sm_80", **changes):
    """An installed data package with the kernels that info asks for."""
    name = locate.PACKAGES[cuda].replace("-", "_")
    folder = tmp_path / "site" / name / "_cubins" / f"cuda{cuda}" / target
    folder.mkdir(parents=True)
    (tmp_path / "site" / name / "__init__.py").touch()
    data = b"\x7fELF code"
    entry = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data), "registers": 40,
             "spill_bytes": 0, "shared_bytes": 512, "source": ""}  # fmt: skip
    names = [variant.name for variant in families.variants(target)]
    for variant in names:
        (folder / f"{variant}.cubin").write_bytes(data)
    manifest = {"format": locate.FORMAT, "version": __version__, "abi": ABI_VERSION, "cuda": cuda,
                "target": target, "cubins": dict.fromkeys(names, entry)}  # fmt: skip
    (folder / locate.MANIFEST).write_text(json.dumps({**manifest, **changes}))
    monkeypatch.syspath_prepend(tmp_path / "site")
    return folder


def problems():
    """What info --json lists; each with a way out."""
    found = info.facts()["problems"]
    for problem in found:
        assert problem.splitlines()[-1].strip().startswith("Try: "), problem
    return found


def one_problem():
    (problem,) = problems()
    return problem


def test_all_is_well(tmp_path, monkeypatch):
    package(tmp_path, monkeypatch)
    monkeypatch.setitem(sys.modules, "cupy", FakeCuda(count=1).module())
    found = info.facts()
    assert found["problems"] == []
    variant = choose.choose(info._TYPICAL, "sm_80", 100).launches[0].variant
    assert found["runs"][-1] == {"on": "cuda:0", "with": f"{variant.name} (cuda12, cupy-flash-cuda12x)"}
    text = info.info_text()
    assert "verified, cupy-flash-cuda12x" in text
    assert "\ngpu       cuda:0 GPU 0, sm_80, 100 multiprocessors, 1 GiB\n" in text
    assert "\ndriver    of CuPy, torch and JAX arrays: CuPy\n" in text


def test_what_the_environment_asks_for(tmp_path, monkeypatch):
    monkeypatch.setattr(driver.tensor_map, "LIBRARY", "no such library")
    monkeypatch.setenv("CUPY_FLASH_DRIVER", "simulator:sm_80")
    assert "the kernels of sm_80, simulated" in info.facts()["runs"][0]["with"]
    monkeypatch.setenv("CUPY_FLASH_DRIVER", "simulatr")
    assert "CUPY_FLASH_DRIVER is 'simulatr'" in one_problem()
    monkeypatch.delenv("CUPY_FLASH_DRIVER")
    monkeypatch.setenv("CUPY_FLASH_CPU", "numpy")
    assert info.facts()["runs"][0]["with"].startswith("tiled NumPy; not the compiled core: CUPY_FLASH_CPU")
    monkeypatch.setenv(locate.OVERRIDE, str(tmp_path))
    assert problems() == []
    monkeypatch.setenv(locate.OVERRIDE, str(tmp_path / "none"))
    assert one_problem().startswith(f"{locate.OVERRIDE} is ")


def test_a_driver_that_does_not_load(monkeypatch):
    monkeypatch.setattr(driver.tensor_map, "LIBRARY", "no such library")
    monkeypatch.setattr(driver, "is_installed", lambda: True)
    assert one_problem().startswith("the CUDA driver does not load: no such library")
    assert "\ngpu       none that can be used\n" in info.info_text()


def test_no_cupy_is_no_problem_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(driver.tensor_map, "LIBRARY", "no such library")
    assert problems() == []
    text = info.info_text()
    assert "\ngpu       none that can be used: no NVIDIA driver is installed\n" in text
    assert "\ncubins    none installed\n" in text
    assert "problem" not in text
    assert "CuPy" not in text


def test_a_cupy_that_does_not_import_is_a_problem_everywhere(tmp_path, monkeypatch):
    monkeypatch.setattr(driver.tensor_map, "LIBRARY", "no such library")
    monkeypatch.delitem(sys.modules, "cupy")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "cupy.py").write_text("raise ImportError('libcudart')")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert one_problem().startswith("CuPy (of unknown origin) does not import: libcudart")


def test_no_driver(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", FakeCuda(driver_version=0).module())
    assert one_problem().startswith("there is no NVIDIA driver")


def test_two_cupys(tmp_path, monkeypatch):
    package(tmp_path, monkeypatch)
    monkeypatch.setitem(sys.modules, "cupy", FakeCuda(count=1).module())
    monkeypatch.setattr(driver, "installed_cupys", lambda: ("cupy-cuda12x", "cupy-cuda13x"))
    assert one_problem() == (
        "cupy-cuda12x and cupy-cuda13x are both installed and overwrite each other.\n"
        "Try: pip uninstall cupy-cuda12x cupy-cuda13x, then install one of them again"
    )


def test_a_cupy_of_the_wrong_major(tmp_path, monkeypatch):
    package(tmp_path, monkeypatch)
    monkeypatch.setitem(sys.modules, "cupy", FakeCuda(12080, 13000).module())
    monkeypatch.setattr(driver, "installed_cupys", lambda: ("cupy-cuda13x",))
    problem = one_problem()
    assert problem.startswith("CuPy is built for CUDA 13.0, the driver is for CUDA 12.8.")
    assert problem.endswith("Try: pip uninstall cupy-cuda13x && pip install cupy-cuda12x")


def test_a_driver_too_old_for_the_cuda_13_set(tmp_path, monkeypatch):
    package(tmp_path, monkeypatch, 13)
    monkeypatch.setitem(sys.modules, "cupy", FakeCuda(12080, count=1).module())
    problem = one_problem()
    assert "CUDA 12.8, which loads no cubins of the CUDA 13 set" in problem
    assert "Try: pip install cupy-flash-cuda12x" in problem


def test_a_gpu_without_a_cubin(tmp_path, monkeypatch):
    package(tmp_path, monkeypatch, target="sm_75")
    monkeypatch.setitem(sys.modules, "cupy", FakeCuda(count=1).module())
    problem = one_problem()
    assert problem.startswith("cuda:0: no cubin of ")
    assert problem.endswith("python -m cupy_flash build --arch sm_80")


def test_a_damaged_cubin(tmp_path, monkeypatch):
    folder = package(tmp_path, monkeypatch)
    path = next(folder.glob("*.cubin"))
    path.write_bytes(b"\x7fELF")
    broken = next(problem for problem in problems() if str(path) in problem)
    assert "it has 4 of 9 bytes" in broken
    assert f"Try: pip install --force-reinstall cupy-flash-cuda12x=={__version__} (until" in broken
    assert "damaged, cupy-flash-cuda12x" in info.info_text()


def test_kernels_of_another_version(tmp_path, monkeypatch):
    package(tmp_path, monkeypatch, version="0.0.9")
    assert any(f"of cupy_flash 0.0.9 (ABI {ABI_VERSION})" in problem for problem in problems())


def test_a_cache_that_others_may_write_to(tmp_path, monkeypatch):
    folder = locate.user_cache() / "cuda12" / "sm_80"
    folder.mkdir(parents=True)
    (folder / locate.MANIFEST).write_text("{}")
    folder.chmod(0o777)
    assert any(f"chmod -R go-w {locate.user_cache().parent}" in problem for problem in problems())


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX errors")
def test_what_cannot_be_read_is_not_called_missing(tmp_path, monkeypatch):
    """Like the home of another user, which su leaves in HOME; too long a name fails for root, too."""
    monkeypatch.setattr(driver.tensor_map, "LIBRARY", "no such library")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ("a" * 300)))
    assert problems() == []
    text = info.info_text()
    assert f"\ncubins    user cache cannot be read: File name too long ({locate.user_cache()})\n" in text
    assert "none installed" not in text
    monkeypatch.setenv(locate.OVERRIDE, str(tmp_path / ("b" * 300)))
    assert "which cannot be read: File name too long." in one_problem()


def test_json_says_the_same_as_the_text(tmp_path, monkeypatch, capsys):
    package(tmp_path, monkeypatch)
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"versions", "gpus", "drivers", "cubins", "unreadable", "runs", "problems"}
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    for row in found["cubins"]:
        assert row["path"] in text
    for problem in found["problems"]:
        assert problem.splitlines()[0] in text


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not count a child's processor time")
def test_it_takes_less_than_a_second():
    """Of processor time, which other work on the machine does not lengthen; the best of three."""
    spent = []
    for _ in range(3):
        before = os.times()
        subprocess.run(
            [sys.executable, "-m", "cupy_flash", "info"], cwd=ROOT, check=True, capture_output=True
        )
        after = os.times()
        spent.append(sum(after[2:4]) - sum(before[2:4]))
    assert min(spent) < 1.0, spent
