"""trust: the folders that compiled files are loaded from, and the simulator's cache, held to the same."""

import importlib
import os
import re
import sys
from pathlib import Path

import pytest

from cupy_flash import trust
from cupy_flash.device import host_build
from cupy_flash.version import __version__
from tests.paths import ROOT

posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX rights")


@pytest.fixture
def deep(tmp_path):
    path = tmp_path / "one" / "two" / "file"
    trust.make_folder(path.parent)
    path.touch(mode=0o600)
    return path


@posix
def test_what_is_made_is_private_whatever_the_umask(tmp_path):
    old = os.umask(0)
    try:
        trust.make_folder(tmp_path / "one" / "two")
    finally:
        os.umask(old)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("one", "one/two")] == [0o700, 0o700]
    trust.make_folder(tmp_path / "one" / "two")  # again


@posix
def test_the_way_to_a_file_of_ones_own(deep):
    """Whose temporary folder is in /tmp, which everybody may write to."""
    assert trust.exposed(deep) is None
    assert trust.exposed(deep.with_name("not made yet")) is None


@posix
@pytest.mark.parametrize("bits", [0o020, 0o002])
@pytest.mark.parametrize("part", ["file", ".", ".."])
def test_what_others_may_write_to(deep, part, bits):
    path = (deep.parent / part).resolve()
    path.chmod(path.stat().st_mode | bits)
    assert trust.exposed(deep) == (path, "can be written to by other users")


@posix
def test_a_file_is_never_sticky(deep):
    deep.chmod(0o1666)
    assert trust.exposed(deep) == (deep, "can be written to by other users")


@posix
def test_files_beside_it(deep):
    other = deep.with_name("other")
    other.touch(mode=0o600)
    assert trust.exposed(deep, [other]) is None
    other.chmod(0o666)
    assert trust.exposed(deep, [other]) == (other, "can be written to by other users")


@posix
@pytest.mark.parametrize("part", ["file", ".", "link"])
def test_what_belongs_to_another_user(deep, part, monkeypatch):
    """A link, too: in a sticky folder it could be anybody's."""
    (deep.parent / "link").symlink_to("file")
    path = deep.parent / part
    asked = deep.with_name("link") if part == "link" else deep
    if os.getuid() == 0:
        os.chown(path, 12345, 12345, follow_symlinks=False)
        assert trust.exposed(asked) == (deep.parent / part, "belongs to another user")
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        assert trust.exposed(asked)[1] == "belongs to another user"


@posix
@pytest.mark.parametrize("link", ["../elsewhere/two", "{tmp}/elsewhere/two"])
def test_links_are_followed_one_by_one(tmp_path, deep, link):
    (tmp_path / "one").rename(tmp_path / "elsewhere")
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "two").symlink_to(link.format(tmp=tmp_path))
    assert trust.exposed(deep) is None
    (tmp_path / "elsewhere").chmod(0o777)
    step, reason = trust.exposed(deep)
    assert (step.resolve(), reason) == (tmp_path / "elsewhere", "can be written to by other users")


@posix
@pytest.mark.parametrize("relative", ["cache", "~/cache", ""])
def test_a_relative_cache_is_that_of_the_home(tmp_path, monkeypatch, relative):
    """Another folder would be found after os.chdir; nor does a shell expand what Docker's ENV has set."""
    monkeypatch.setenv("XDG_CACHE_HOME", relative)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert trust.user_cache() == tmp_path / ".cache" / "cupy_flash"


@posix
@pytest.mark.parametrize("home", [None, "relative"])
def test_without_a_home_the_folder_of_the_process_does_not_matter(monkeypatch, home):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: Path(home) if home else Path("~unknown!").expanduser())
    monkeypatch.setattr(os, "getcwd", lambda: pytest.fail("it may be gone"))
    assert trust.user_cache() == Path("/.cache/cupy_flash")


def test_a_package_is_a_folder_with_an_init(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    assert trust.package_folder("cupy-flash-example") is None
    (tmp_path / "cupy_flash_example").mkdir()
    importlib.invalidate_caches()
    assert trust.package_folder("cupy-flash-example") is None
    (tmp_path / "cupy_flash_example" / "__init__.py").write_text("raise RuntimeError('imported')")
    importlib.invalidate_caches()
    assert trust.package_folder("cupy-flash-example") == tmp_path / "cupy_flash_example"
    (tmp_path / "cupy_flash_module.py").touch()
    importlib.invalidate_caches()
    assert trust.package_folder("cupy-flash-module") is None


def test_hints_name_packages_of_a_release_with_what_to_do_until_it_is_published():
    """Which is said in one place."""
    hint = trust.how_to_install("cupy-flash-cpu")
    until = f"until {__version__} is published: pip install . in a checkout"
    assert hint == f"pip install cupy-flash-cpu=={__version__} ({until})"
    assert "--force-reinstall cupy-flash-cpu" in trust.how_to_install("cupy-flash-cpu", again=True)
    folders = (ROOT / "cupy_flash", ROOT / "scripts")
    files = [path for folder in folders for path in folder.rglob("*.py") if path.name != "trust.py"]
    assert len(files) > 100
    said = [path.name for path in files if re.search(r"pip install [^\n]*cupy-flash", path.read_text())]
    assert said == []


# ------------------------------------------------------------------------------------ the simulator's cache


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return host_build.cache_folder()


@posix
@pytest.mark.parametrize("part", [".", "..", "../.."])
def test_a_simulator_cache_that_others_may_write_to(cache, part):
    path = (cache / part).resolve()
    path.chmod(0o777)
    with pytest.raises(
        host_build.SimulatorUnavailable, match=f"{path}, on the way to the .*\nTry: chmod go-w"
    ):
        host_build.cache_folder()


@posix
def test_a_simulator_library_that_others_may_write_to(cache, monkeypatch, tmp_path):
    """It is as another process compiled it, and is loaded without a look at what it holds."""
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo 1 || cp "$1" "$3"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    host_build._compiler.cache_clear()
    source = tmp_path / "source"
    source.touch()
    old = os.umask(0)
    try:
        built = host_build.compile_library("kernel", [str(source)], [source])
        assert host_build.compile_library("kernel", [str(source)], [source]) == built
        built.chmod(0o777)
        with pytest.raises(host_build.SimulatorUnavailable, match=f"{Path(built).name}, on the way"):
            host_build.compile_library("kernel", [str(source)], [source])
    finally:
        os.umask(old)
        host_build._compiler.cache_clear()
