"""locate: which file runs on which GPU, in which order places are asked, and what is never trusted."""

import hashlib
import importlib
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from cupy_flash import CubinNotFoundError, trust
from cupy_flash.cubins import locate, sources
from cupy_flash.version import ABI_VERSION, __version__
from tests.cpu.stub_kernels import Stubs, stub
from tests.paths import ROOT

VARIANT = stub()


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    """Neither this user's cache nor their environment takes part."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(locate.OVERRIDE, raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Stubs(tmp_path / "checkout" / "kernels", monkeypatch)


def store(root, cuda=12, target="sm_80", data=b"\x7fELF code", **changes):
    """A folder of one cubin with its manifest, as the build leaves it."""
    folder = root / f"cuda{cuda}" / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{VARIANT.name}.cubin").write_bytes(data)
    entry = {
        "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data), "registers": 40, "spill_bytes": 0,
        "stack_bytes": 0, "shared_bytes": 512, "source": sources.digest(VARIANT, target, cuda),
    }  # fmt: skip
    manifest = {
        "format": locate.FORMAT, "version": __version__, "abi": ABI_VERSION, "cuda": cuda, "target": target,
        "compiler": "NVRTC 12.9", "cubins": {VARIANT.name: entry},
    }  # fmt: skip
    (folder / locate.MANIFEST).write_text(json.dumps({**manifest, **changes}))
    return folder


def private(root):
    locate.make_private(root)
    return root


@pytest.fixture
def cache():
    return private(locate.user_cache())


def package(tmp_path, monkeypatch, name="cupy_flash_cuda12x"):
    """An installed data package; importing it would fail."""
    folder = tmp_path / "site" / name
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path / "site")
    return folder / "_cubins"


# ---------------------------------------------------------------------------------------------- which file


@pytest.mark.parametrize(
    ("arch", "built", "chosen"),
    [
        ("sm_80", ["sm_80"], "sm_80"),
        ("sm_86", ["sm_80"], "sm_80"),
        ("sm_89", ["sm_80", "sm_86"], "sm_86"),
        ("sm_89", ["sm_80", "sm_86", "sm_89"], "sm_89"),
        ("sm_75", ["sm_70"], "sm_70"),
        ("sm_90", ["sm_90", "sm_90a"], "sm_90a"),
        ("sm_90a", ["sm_90a"], "sm_90a"),
        ("sm_103", ["sm_100", "sm_100a"], "sm_100"),
        ("sm_121", ["sm_120"], "sm_120"),
        # an `f` target runs on all later minors of its major
        ("sm_120", ["sm_120", "sm_120f"], "sm_120f"),
        ("sm_121", ["sm_120", "sm_120f"], "sm_120f"),
        ("sm_120", ["sm_121f"], None),
        # never a higher minor, another major, or another architecture's `a` target
        ("sm_80", ["sm_86"], None),
        ("sm_86", ["sm_75", "sm_70", "sm_90"], None),
        ("sm_120", ["sm_100", "sm_90a"], None),
        ("sm_103", ["sm_100a"], None),
    ],
)
def test_which_target_runs(cache, arch, built, chosen):
    for target in built:
        store(cache, target=target)
    if chosen is None:
        with pytest.raises(CubinNotFoundError, match=f"no cubin of {VARIANT.name} for {arch}"):
            locate.locate(VARIANT, arch)
    else:
        assert locate.locate(VARIANT, arch).target == chosen


@pytest.mark.parametrize(
    ("driver", "built", "chosen"),
    [
        (12040, [12], "cuda12"),
        (12040, [12, 13], "cuda12"),
        (13000, [12, 13], "cuda13"),
        (13000, [12], "cuda12"),
        (None, [13], "cuda13"),
        (12040, [13], None),
        (11080, [12, 13], None),
    ],
)
def test_which_set_runs(cache, driver, built, chosen):
    for cuda in built:
        store(cache, cuda)
    if chosen is None:
        with pytest.raises(CubinNotFoundError, match=rf"driver +CUDA {driver // 1000}\.\d+, which loads no"):
            locate.locate(VARIANT, "sm_80", driver)
    else:
        assert locate.locate(VARIANT, "sm_80", driver).set == chosen


def test_what_is_returned(cache):
    folder = store(cache)
    found = locate.locate(VARIANT, "sm_86", 12040)
    path = folder / f"{VARIANT.name}.cubin"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert found == (path, digest, 40, 0, 512, "cuda12", "user cache", "sm_80")


# ---------------------------------------------------------------------------------------------- which place


def test_the_order_of_places(tmp_path, monkeypatch, cache):
    data = package(tmp_path, monkeypatch)
    store(data, target="sm_86")
    assert locate.locate(VARIANT, "sm_86").origin == "cupy-flash-cuda12x"
    # An earlier place wins even with a lower target: it was put there on purpose.
    store(cache, target="sm_80")
    assert locate.locate(VARIANT, "sm_86").origin == "user cache"
    store(tmp_path / "mine")
    monkeypatch.setenv(locate.OVERRIDE, str(tmp_path / "mine"))
    with pytest.warns(RuntimeWarning, match="CUPY_FLASH_CUBIN_DIR is set, and hides user cache"):
        assert locate.locate(VARIANT, "sm_86").origin == locate.OVERRIDE


def test_an_override_that_hides_nothing_says_nothing(tmp_path, monkeypatch):
    store(tmp_path / "mine")
    monkeypatch.setenv(locate.OVERRIDE, str(tmp_path / "mine"))
    assert locate.locate(VARIANT, "sm_80").origin == locate.OVERRIDE


def test_an_override_serves_beside_a_place_that_cannot_be_used(tmp_path, monkeypatch):
    store(tmp_path / "mine")
    store(package(tmp_path, monkeypatch), version="0.0.9")
    monkeypatch.setenv(locate.OVERRIDE, str(tmp_path / "mine"))
    assert locate.locate(VARIANT, "sm_80").origin == locate.OVERRIDE


def test_both_data_packages(tmp_path, monkeypatch):
    store(package(tmp_path, monkeypatch), 12)
    store(package(tmp_path, monkeypatch, "cupy_flash_cuda13x"), 13)
    assert locate.locate(VARIANT, "sm_80", 12080).origin == "cupy-flash-cuda12x"
    assert locate.locate(VARIANT, "sm_80", 13000).origin == "cupy-flash-cuda13x"
    assert not {"cupy_flash_cuda12x", "cupy_flash_cuda13x"} & set(sys.modules)


@pytest.mark.parametrize("name", ["cupy_flash_cuda12x", "cupy_flash_cuda13x"])
def test_a_folder_that_only_has_the_name_of_a_package_is_not_one(name, tmp_path, monkeypatch):
    """Without an __init__.py it is a namespace package, in the current directory too."""
    data = package(tmp_path, monkeypatch, name)
    store(data, cuda=int(name[15:17]))
    assert locate.locate(VARIANT, "sm_80").origin == name.replace("_", "-")
    (data.parent / "__init__.py").unlink()
    importlib.invalidate_caches()
    refused("no cubin of")


def test_our_own_come_before_those_of_packages(tmp_path, monkeypatch):
    store(package(tmp_path, monkeypatch))
    own = tmp_path / "own" / "cupy_flash"
    own.mkdir(parents=True)
    monkeypatch.setattr(trust, "__file__", str(own / "trust.py"))
    store(own / "_cubins")
    assert locate.locate(VARIANT, "sm_80").origin == "cupy-flash"


def test_nothing_found_says_where_it_looked(tmp_path, monkeypatch, cache):
    store(cache, target="sm_75")
    package(tmp_path, monkeypatch)
    with pytest.raises(CubinNotFoundError) as caught:
        locate.locate(VARIANT, "sm_80", 12040)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"no cubin of {VARIANT.name} for sm_80."
    assert lines[1].split() == ["user", "cache", "sm_75", "in", str(cache)]
    assert lines[2].startswith("  cupy-flash          no cubins in ")
    assert lines[3].startswith("  cupy-flash-cuda12x  no cubins in ")
    assert lines[-1].startswith(
        f"Try: pip install cupy-flash-cuda12x=={__version__} (until {__version__} is published: "
    )
    assert lines[-1].startswith("Try: ")
    assert lines[-1].endswith("python -m cupy_flash build --arch sm_80")
    monkeypatch.setattr(sources, "folder", lambda: ROOT / "kernels_cu")
    with pytest.raises(
        CubinNotFoundError, match=r"\n  checkout [\s\S]*Try: scripts/build_cubins.py --arch sm_80,"
    ):
        locate.locate(VARIANT, "sm_80", 12040)


# ---------------------------------------------------------------------------------------------- trust


def refused(match, arch="sm_80"):
    with pytest.raises(CubinNotFoundError, match=match) as caught:
        locate.locate(VARIANT, arch)
    text = str(caught.value)
    assert text.splitlines()[-1].startswith("Try: ")
    return text


def test_a_truncated_file(cache):
    path = store(cache) / f"{VARIANT.name}.cubin"
    path.write_bytes(path.read_bytes()[:-3])
    text = refused("it has 6 of 9 bytes")
    assert str(path) in text
    assert text.endswith("Try: python -m cupy_flash build --cuda 12 --arch sm_80")


def test_a_flipped_bit(cache):
    path = store(cache) / f"{VARIANT.name}.cubin"
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)
    assert str(path) in refused("its SHA-256 is [0-9a-f]{16}..., not [0-9a-f]{16}...")


def test_a_missing_file(cache):
    (store(cache) / f"{VARIANT.name}.cubin").unlink()
    refused("cannot be used: No such file")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": 99}',
        '{"cubins": 1}',
        '{"cubins": {"x": {}}}',
        '{"cubins": {"x": 1}}',
        "\x00",
    ],
)
def test_a_foreign_manifest(cache, text):
    path = store(cache) / locate.MANIFEST
    path.write_text(text)
    os.utime(path, ns=(1, 1))
    assert str(path) in refused("is not a manifest of cubins")


@pytest.mark.parametrize("field", sorted(locate._FIELDS))
def test_a_manifest_that_lacks_a_field(cache, field):
    path = store(cache) / locate.MANIFEST
    held = json.loads(path.read_text())
    del held["cubins"][VARIANT.name][field]
    path.write_text(json.dumps(held))
    os.utime(path, ns=(1, 1))
    refused(f"is not a manifest of cubins: .*{VARIANT.name} lacks {field}")


def test_a_manifest_of_another_folder(cache):
    folder = store(cache)
    folder.rename(folder.with_name("sm_86"))
    refused("it does not describe its folder", "sm_86")


@pytest.mark.parametrize("changes", [{"version": "0.0.9"}, {"abi": ABI_VERSION + 1}])
def test_another_version(tmp_path, monkeypatch, changes):
    store(package(tmp_path, monkeypatch), **changes)
    text = refused(rf"of cupy_flash {changes.get('version', __version__)} \(ABI \d+\); this is {__version__}")
    assert f"Try: pip install --force-reinstall cupy-flash-cuda12x=={__version__} (until" in text


def test_sources_that_changed_since(tmp_path, monkeypatch, cache):
    store(cache)
    Stubs(tmp_path / "edited", monkeypatch).write("good.cu", "// another kernel")
    refused("its sources have changed since")


def test_sources_are_a_file_and_what_it_includes(tmp_path):
    """Directly or not, beside the file that includes it or in the folder of includes; each one once."""
    texts = {
        "a.cu": '#include "b.cuh"\n  # include "deep/c.cuh"\n#include "other.cuh"\n#include <d.cuh>\n',
        "include/b.cuh": '#include "deep/c.cuh"\n',
        "include/d.cuh": "",
        "include/deep/c.cuh": '#include "../b.cuh"\n#include "e.cuh"\n',
        "include/deep/e.cuh": "",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = sources.closure(tmp_path / "a.cu", tmp_path / "include")
    assert found == [tmp_path / name for name in texts if name != "include/d.cuh"]


posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX rights")


@posix
@pytest.mark.parametrize(
    "part",
    [".", "cuda12", "cuda12/sm_80", "cuda12/sm_80/manifest.json", f"cuda12/sm_80/{VARIANT.name}.cubin", ".."],
)
def test_a_cache_that_others_may_write_to(cache, part):
    store(cache)
    path = (cache / part).resolve()
    path.chmod(path.stat().st_mode | 0o020)
    text = refused(f"{path}, in the cubin cache, can be written to by other users")
    assert text.endswith(f"Try: chmod -R go-w {cache.parent}")


@posix
@pytest.mark.parametrize("above", range(1, 4))
@pytest.mark.parametrize("write", [0o020, 0o002, 0o1002])
def test_a_folder_over_the_cache_that_others_may_write_to(cache, tmp_path, above, write):
    """They could put another cache in its place. A sticky folder is as good only where it is root's."""
    store(cache)
    path = cache.parents[above]
    assert path.is_relative_to(tmp_path)
    path.chmod(path.stat().st_mode | write)
    if write & 0o1000 and path.stat().st_uid == 0:
        assert locate.locate(VARIANT, "sm_80").origin == "user cache"
    else:
        text = refused(f"{path}, on the way to the cubin cache, can be written to by other users")
        assert f"Try: chmod go-w {path}, or" in text


@posix
def test_a_link_to_the_cache_is_followed(cache, tmp_path, monkeypatch):
    """What counts is where it leads, too."""
    real = tmp_path / "scratch" / "mine"
    real.parent.mkdir()
    (tmp_path / "cache").rename(real)
    (tmp_path / "cache").symlink_to("scratch/mine")
    store(cache)
    assert locate.locate(VARIANT, "sm_80").origin == "user cache"
    real.parent.chmod(0o777)
    refused(f"{real.parent}, on the way to the cubin cache, can be written to by other users")


@posix
def test_a_cache_of_someone_else(cache, monkeypatch):
    store(cache)
    if os.getuid() == 0:
        os.chown(cache, 12345, 12345)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert "Try: rm -r" in refused("belongs to another user")


@posix
def test_a_folder_that_the_user_names_may_be_shared(tmp_path, monkeypatch):
    store(tmp_path)
    tmp_path.chmod(0o777)
    monkeypatch.setenv(locate.OVERRIDE, str(tmp_path))
    assert locate.locate(VARIANT, "sm_80").origin == locate.OVERRIDE


@posix
def test_the_cache_is_made_private(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new" / "cache"))
    old = os.umask(0)
    try:
        locate.make_private(locate.user_cache())
    finally:
        os.umask(old)
    assert locate.user_cache().stat().st_mode & 0o777 == 0o700
    assert locate.user_cache().parent.stat().st_mode & 0o777 == 0o700


@posix
def test_a_cache_that_cannot_be_entered_is_as_none(tmp_path, monkeypatch):
    """As below another user's home, which sudo leaves in HOME. A name too long fails for root, too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ("a" * 300)))
    with pytest.raises(CubinNotFoundError, match=r"user cache +.*/cubins/.* cannot be read: File name"):
        locate.locate(VARIANT, "sm_80")
    (found,) = locate.unreadable()
    assert (found.origin, found.why) == ("user cache", "File name too long")
    assert [found.origin for found in locate.available() if found.origin == "user cache"] == []
    folder = store(package(tmp_path, monkeypatch))
    assert locate.locate(VARIANT, "sm_80").path.parent == folder


def test_a_user_without_a_home(monkeypatch):
    """Of a number that passwd does not list, as in containers."""

    def unknown():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", unknown)
    assert locate.user_cache().is_absolute()
    with pytest.raises(CubinNotFoundError, match="no cubin of"):
        locate.locate(VARIANT, "sm_80")


def test_a_read_only_cache_is_read_and_left_alone(cache):
    folder = store(cache)
    below = [folder, *folder.iterdir(), folder.parent, cache, cache.parent]
    for path in below:
        path.chmod(path.stat().st_mode & ~0o222)
    before = {path: path.stat().st_mtime_ns for path in below}
    try:
        assert locate.locate(VARIANT, "sm_80").origin == "user cache"
        assert [found.problem for found in locate.available(verify=True) if found.path == folder] == [""]
        assert {path: path.stat().st_mtime_ns for path in below} == before
    finally:
        for path in reversed(below):
            path.chmod(path.stat().st_mode | 0o200)


# ---------------------------------------------------------------------------------------------- available


def test_available_lists_the_sound_and_the_broken(tmp_path, monkeypatch, cache):
    store(cache)
    data = package(tmp_path, monkeypatch)
    folder = store(data, target="sm_75")
    store(data, target="sm_86", version="0.0.9")
    found = {(s.origin, s.set, s.target): s for s in locate.available(verify=True)}
    sound = found["user cache", "cuda12", "sm_80"]
    assert (sound.kernels, sound.bytes, sound.problem) == (1, 9, "")
    assert "of cupy_flash 0.0.9" in found["cupy-flash-cuda12x", "cuda12", "sm_86"].problem
    assert found["cupy-flash-cuda12x", "cuda12", "sm_75"].problem == ""
    (folder / f"{VARIANT.name}.cubin").write_bytes(b"x")
    broken = next(s for s in locate.available(verify=True) if s.target == "sm_75")
    assert broken.problem.splitlines()[0].endswith("cannot be used: it has 1 of 9 bytes.")
    assert broken.problem.splitlines()[1].startswith(
        "Try: pip install --force-reinstall cupy-flash-cuda12x=="
    )


PLACES = """
import cupy_flash
from cupy_flash.cpu.core import locate as core
from cupy_flash.cubins import locate, sources
print(cupy_flash.__file__)
print(sources.folder())
for origins in (core._origins(), locate._origins()):
    print(next(x.root for x in origins if x.name == "checkout"))
"""


@posix
@pytest.mark.parametrize("linked", ["the checkout", "the package"])
def test_a_checkout_is_found_by_a_link(linked, tmp_path):
    """With its kernels and its core, whether the link leads to it or to the package in it."""
    at = tmp_path / "linked" if linked == "the checkout" else tmp_path / "site" / "cupy_flash"
    at.parent.mkdir(exist_ok=True)
    at.symlink_to(ROOT if linked == "the checkout" else ROOT / "cupy_flash")
    path = at if linked == "the checkout" else at.parent
    # why -S: an editable installation of another checkout would come before PYTHONPATH
    site = os.pathsep.join([str(path), *map(sysconfig.get_path, ("purelib", "platlib"))])
    done = subprocess.run(
        [sys.executable, "-S", "-c", PLACES], cwd=tmp_path, env={**os.environ, "PYTHONPATH": site},
        capture_output=True, text=True,
    )  # fmt: skip
    file, *found = done.stdout.splitlines()
    assert file.startswith(str(tmp_path)), done.stderr
    places = [ROOT / x for x in ("kernels_cu", "build/cpu", "build/cubins")]
    assert [Path(x).resolve() for x in found] == [x.resolve() for x in places]
