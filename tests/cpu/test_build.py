"""Cubins are built incrementally, deterministically and atomically, and refused when they are bad."""

import ctypes
import errno
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from fnmatch import fnmatch
from unittest import mock

import pytest

from cupy_flash import UnsupportedError, trust
from cupy_flash.__main__ import main
from cupy_flash.cubins import build, locate, nvrtc, sass, sources, user_cache
from cupy_flash.plan import families
from cupy_flash.version import ABI_VERSION, __version__
from tests.cpu.stub_kernels import Stubs, requires_nvrtc, stub
from tests.paths import ROOT

pytestmark = requires_nvrtc(12)


@pytest.fixture
def stubs(tmp_path, monkeypatch):
    return Stubs(tmp_path / "kernels", monkeypatch)


def make(out, archs=("sm_80",), **options):
    return [folder for folder, _ in build.build(12, archs, out, progress=False, **options)]


def manifest(folder):
    return json.loads((folder / locate.MANIFEST).read_text())


def check_whole(folder):
    """Every file is what the manifest says, and nothing else is there."""
    entries = manifest(folder)["cubins"]
    assert {file.name for file in folder.iterdir()} == {
        locate.MANIFEST,
        *(f"{name}.cubin" for name in entries),
    }
    for name, entry in entries.items():
        data = (folder / f"{name}.cubin").read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (entry["bytes"], entry["sha256"])
    return entries


def test_a_cubin_per_variant_and_a_manifest(stubs, tmp_path):
    (folder,) = make(tmp_path / "out")
    assert folder == tmp_path / "out" / "cuda12" / "sm_80"
    entries = check_whole(folder)
    assert set(entries) == {variant.name for variant in stubs.rows}
    for name, entry in entries.items():
        data = (folder / f"{name}.cubin").read_bytes()
        assert data.startswith(b"\x7fELF")
        assert name.encode() in data
        assert 0 < entry["registers"] < 64
        assert entry["spill_bytes"] == entry["stack_bytes"] == 0
        assert entry["shared_bytes"] == 4 * 128
    facts = {key: value for key, value in manifest(folder).items() if key != "cubins"}
    assert facts == {
        "format": locate.FORMAT, "version": __version__, "abi": ABI_VERSION, "cuda": 12, "target": "sm_80",
        "compiler": "NVRTC 12.9",
    }  # fmt: skip


def test_same_bytes_from_another_folder(stubs, tmp_path, monkeypatch):
    (one,) = make(tmp_path / "out", jobs=1)
    again = Stubs(tmp_path / "a" / "much" / "longer" / "path", monkeypatch)
    assert again.folder == sources.folder()
    (two,) = make(tmp_path / "elsewhere", jobs=2)
    assert {f.name: f.read_bytes() for f in one.iterdir()} == {f.name: f.read_bytes() for f in two.iterdir()}


def compiled(folder, action):
    """Names of the cubins that an action wrote."""
    before = {file: file.stat().st_ino for file in folder.glob("*.cubin")}
    action()
    return {file.stem for file in folder.glob("*.cubin") if file.stat().st_ino != before.get(file)}


def test_only_what_changed_is_compiled(stubs, tmp_path):
    (folder,) = make(tmp_path)
    first, second = (variant.name for variant in stubs.rows)

    def again():
        make(tmp_path)

    assert compiled(folder, again) == set()
    (folder / f"{second}.cubin").write_bytes(b"damaged")
    assert compiled(folder, again) == {second}
    (folder / f"{first}.cubin").unlink()
    assert compiled(folder, again) == {first}
    stubs.write("include/stub.cuh", "__device__ float scaled(float x) { return 2.0f * x; }\n")
    assert compiled(folder, again) == {first, second}
    stubs.write("spilling.cu", "// of no concern to others\n")
    assert compiled(folder, again) == set()
    (folder / locate.MANIFEST).write_text("no JSON")
    assert compiled(folder, again) == {first, second}
    check_whole(folder)


def test_what_the_catalog_drops_is_removed(stubs, tmp_path):
    (folder,) = make(tmp_path)
    stubs.rows = stubs.rows[:1]
    make(tmp_path)
    assert set(check_whole(folder)) == {stubs.rows[0].name}


def test_only_a_pattern_keeps_the_others(stubs, tmp_path):
    first, second = stubs.rows
    (folder,) = make(tmp_path, only=f"*_d{first.head_dim}_*")
    assert set(check_whole(folder)) == {first.name}
    make(tmp_path, only=f"*_d{second.head_dim}_*")
    assert set(check_whole(folder)) == {first.name, second.name}


def test_a_spill_is_refused_unless_the_row_allows_it(stubs, tmp_path):
    good, bad = stub(), stub("spilling")
    stubs.rows = (good, bad)
    with pytest.raises(build.BuildFailed, match=rf"{bad.name} for sm_80 spills \d+ bytes .* allows 0"):
        make(tmp_path)
    folder = tmp_path / "cuda12" / "sm_80"
    assert set(check_whole(folder)) == {good.name}
    allowed = stub("spilling", allowed_spills=(("sm_75", 1), ("sm_80", 4096)))
    stubs.rows = (good, allowed)
    make(tmp_path)
    assert check_whole(folder)[bad.name]["spill_bytes"] > 0
    with pytest.raises(build.BuildFailed, match=rf"{bad.name} for sm_90a spills \d+ bytes .* allows 0"):
        make(tmp_path, ["sm_90a"])  # which is not allowed what another target is
    assert allowed.allowed_spill_bytes("sm_87") == 4096  # of no release, where it runs what sm_80 does


def test_serialised_wgmma_is_refused(stubs, tmp_path):
    stubs.rows = (stub("serialised"),)
    with pytest.raises(build.BuildFailed, match=r"serialised_f32.* for sm_90a: .*C75\d\d"):
        make(tmp_path, ["sm_90a"])
    assert check_whole(tmp_path / "cuda12" / "sm_90a") == {}


def test_a_source_that_does_not_compile_shows_the_compilers_words(stubs, tmp_path):
    stubs.rows = (stub(), stub("wrong"))
    with pytest.raises(build.BuildFailed, match=r"(?s)does not compile.*wrong\.cu\(1\): error"):
        make(tmp_path, jobs=1)
    assert set(check_whole(tmp_path / "cuda12" / "sm_80")) == {stub().name}


def test_an_interrupted_build_leaves_what_it_finished(stubs, tmp_path, monkeypatch):
    real = build.compile_variant

    def interrupted(compiler, variant, target, directory):
        if variant.head_dim == 128:
            raise KeyboardInterrupt
        return real(compiler, variant, target, directory)

    monkeypatch.setattr(build, "compile_variant", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, jobs=1)
    monkeypatch.setattr(build, "compile_variant", real)
    folder = tmp_path / "cuda12" / "sm_80"
    check_whole(folder)
    make(tmp_path)
    assert len(check_whole(folder)) == 2


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
@pytest.mark.parametrize("files", [1, 2])
def test_a_killed_build_leaves_nothing_that_is_believed(stubs, tmp_path, files):
    (folder,) = make(tmp_path)
    first, second = (variant.name for variant in stubs.rows)
    # Another process rebuilds after a change and dies between two files.
    script = textwrap.dedent(f"""
        import os, pathlib, signal, sys
        import pytest
        sys.path.insert(0, {str(ROOT)!r})
        from cupy_flash.cubins import build, compile
        from tests.cpu.stub_kernels import Stubs
        patch = pytest.MonkeyPatch()
        stubs = Stubs(pathlib.Path({str(tmp_path / "changed")!r}), patch)
        stubs.write("include/stub.cuh", "__device__ float scaled(float x) {{ return x; }}")
        write, written = build.write_atomically, []
        def dies(path, data):
            write(path, data)
            written.extend([path] * (path.suffix == ".cubin"))
            if len(written) == {files}:
                os.kill(os.getpid(), signal.SIGKILL)
        build._SAVE_SECONDS = 0
        build.write_atomically = compile.write_atomically = dies
        build.build(12, ["sm_80"], pathlib.Path({str(tmp_path)!r}), jobs=1, progress=False)
    """)
    died = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert died.returncode == -signal.SIGKILL, died.stderr
    # The manifest knows the file before the last one at most; what it knows is whole.
    listed = manifest(folder)["cubins"]
    assert set(listed) <= {first} if files == 2 else listed == {}
    for name, entry in listed.items():
        assert hashlib.sha256((folder / f"{name}.cubin").read_bytes()).hexdigest() == entry["sha256"]
    make(tmp_path)
    assert set(check_whole(folder)) == {first, second}


def test_what_is_built_and_found_is_logged(stubs, tmp_path, caplog, monkeypatch):
    caplog.set_level("DEBUG", "cupy_flash")
    (folder,) = make(tmp_path)
    names = [variant.name for variant in stubs.rows]
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == f"2 cubins to build in {folder}"
    assert sorted(line.split()[1] for line in said[1:]) == sorted(names)
    assert all(
        re.fullmatch(r"built \w+ for sm_80 in [\d.]+ s: \d+ registers, \d+ bytes", x) for x in said[1:]
    )
    caplog.clear()
    make(tmp_path)
    monkeypatch.setenv(locate.OVERRIDE, str(tmp_path))
    path = locate.locate(stubs.rows[0], "sm_86").path
    assert [record.getMessage() for record in caplog.records] == [
        f"0 cubins to build in {folder}", f"found {names[0]} for sm_86: {path}, of {locate.OVERRIDE}",
    ]  # fmt: skip


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_in_a_log_and_without_tqdm(terminal, stubs, tmp_path, monkeypatch, capsys):
    if terminal:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        monkeypatch.setitem(sys.modules, "tqdm", None)
    build.build(12, ["sm_80"], tmp_path, jobs=1)
    first, last = (variant.name for variant in stubs.rows)
    said = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf"1 of 2 cubins in \d+ s: sm_80 {first}", said[0])
    assert re.fullmatch(rf"2 of 2 cubins in \d+ s: sm_80 {last}", said[1])
    build.build(12, ["sm_80"], tmp_path, jobs=1)
    (tmp_path / "cuda12" / "sm_80" / f"{first}.cubin").unlink()
    build.build(12, ["sm_80"], tmp_path, jobs=1, progress=False)
    assert capsys.readouterr().err == "", "nothing to do, and not asked for"


def test_progress_on_a_terminal_is_a_bar(stubs, tmp_path, monkeypatch, capsys):
    pytest.importorskip("tqdm", reason="the bar is tqdm's, which is not installed")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    build.build(12, ["sm_80"], tmp_path, jobs=1)
    assert "2/2" in capsys.readouterr().err.splitlines()[-1]


def test_progress_where_there_is_no_stderr(stubs, tmp_path, monkeypatch):
    """As in programs of pythonw, which have no console: kernels are built."""
    monkeypatch.setattr(sys, "stderr", None)
    build.build(12, ["sm_80"], tmp_path, jobs=1)
    assert len(list(tmp_path.glob("cuda12/sm_80/*.cubin"))) == 2


def test_lines_of_progress_are_few(monkeypatch, capsys):
    clock = iter(range(1000))
    monkeypatch.setattr(build.time, "monotonic", lambda: float(next(clock)))
    advance = build._lines(100, True)
    for count in range(100):
        advance(f"kernel {count}")
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("1 of 100 cubins in 1 s")
    assert said[-1].startswith("100 of 100 cubins in 100 s")
    assert len(said) == 2 + 99 // build._LINE_SECONDS


def test_two_builds_at_once(stubs, tmp_path, capfd):
    failures = []

    def run():
        try:
            make(tmp_path, ["sm_80", "sm_75"])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert all(len(check_whole(tmp_path / "cuda12" / arch)) == 2 for arch in ("sm_75", "sm_80"))
    assert "waiting for another build" in capfd.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGINT")
def test_control_c_leaves_what_it_finished_and_says_so(tmp_path):
    command = [
        sys.executable, str(ROOT / "scripts" / "build_cubins.py"), "--arch", "sm_80", "--jobs", "1",
        "--only", "simple_forward_f32_*", "--out", str(tmp_path),
    ]  # fmt: skip
    folder = tmp_path / "cuda12" / "sm_80"
    # why: what a shell started in the background ignores ^C, and hands that on to its children.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        signal.signal(signal.SIGINT, before)
        while process.poll() is None and not list(folder.glob("*.cubin")):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "the same command again goes on from what is finished" in said
    assert "Traceback" not in said
    wanted = [row for row in families.variants("sm_80") if fnmatch(row.name, "simple_forward_f32_*")]
    assert 0 < len(check_whole(folder)) < len(wanted)


@pytest.mark.skipif(sys.platform == "win32", reason="needs RLIMIT_FSIZE")
def test_a_disk_that_fills_up_in_the_middle_of_a_file(stubs, tmp_path):
    """The system lets files grow to 2000 bytes, which holds the manifest and half a cubin."""
    script = textwrap.dedent(f"""
        import pathlib, resource, sys
        import pytest
        sys.path.insert(0, {str(ROOT)!r})
        from cupy_flash.cubins import build
        from tests.cpu.stub_kernels import Stubs
        Stubs(pathlib.Path({str(tmp_path / "other")!r}), pytest.MonkeyPatch())
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        try:
            build.build(12, ["sm_80"], pathlib.Path({str(tmp_path)!r}), jobs=1, progress=False)
        except build.BuildFailed as error:
            print(error)
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    first, second = done.stdout.splitlines() or [done.stderr, ""]
    folder = tmp_path / "cuda12" / "sm_80"
    cubin = folder / f"{stubs.rows[0].name}.cubin"
    assert first == f"cannot write {cubin}: {os.strerror(errno.EFBIG)}."
    assert second.startswith("Try: ")
    assert check_whole(folder) == {}
    make(tmp_path)
    assert len(check_whole(folder)) == 2


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_takes_nothing(stubs, tmp_path, monkeypatch, error):
    def fails(path, data):
        raise OSError(error, os.strerror(error), str(path))

    monkeypatch.setattr(build, "write_atomically", fails)
    with pytest.raises(build.BuildFailed, match=rf"(?s)cannot write .*{os.strerror(error)}.*\nTry: "):
        make(tmp_path)


def test_a_package_without_the_sources_of_its_kernels(tmp_path, monkeypatch):
    """As one that is imported from a zip file."""
    monkeypatch.setattr(sources, "folder", lambda: tmp_path / "cupy_flash.zip" / "kernels_cu")
    with pytest.raises(UnsupportedError, match="sources of the kernels are not in"):
        make(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_are_not_for_others_to_write(stubs, tmp_path):
    old = os.umask(0)
    try:
        (folder,) = make(tmp_path / "out")
    finally:
        os.umask(old)
    for path in (folder, folder.parent, *folder.iterdir()):
        assert path.stat().st_mode & 0o022 == 0, path


def test_files_follow_the_umask_without_changing_it(tmp_path):
    """It belongs to the whole process, so that another thread would write files for all to read."""
    old = os.umask(0o077)
    try:
        with mock.patch.object(os, "umask", side_effect=AssertionError):
            build.write_atomically(tmp_path / "file", b"text")
    finally:
        os.umask(old)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


# ---------------------------------------------------------------------------------------------- compilers


def test_a_missing_compiler_is_named_with_the_command_that_mends_it(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(
        UnsupportedError, match=r"NVRTC 12\.9.*not installed.*\nTry: pip install nvidia-cuda-nvrtc-cu12=="
    ):
        build.build(12, ["sm_80"], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_on_the_path_is_no_compiler(monkeypatch, tmp_path):
    """Such as one in the current directory, which Python takes for a part of the namespace package nvidia."""
    for cuda, toolkit in nvrtc.TOOLKITS.items():
        for name in (toolkit.library, toolkit.windows_library, "nvidia/cu13/bin/nvdisasm"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch(mode=0o755)
        (tmp_path / toolkit.include).mkdir(parents=True)
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        assert not nvrtc.installed(cuda)
        with pytest.raises(UnsupportedError, match="not installed"):
            nvrtc.Compiler(cuda)
    monkeypatch.setenv("PATH", "")
    assert sass.disassembler() is None


def test_a_compiler_of_another_version_is_refused(monkeypatch, tmp_path):
    toolkit = nvrtc.TOOLKITS[12]._replace(version=(12, 4))
    monkeypatch.setitem(nvrtc.TOOLKITS, 12, toolkit)
    with pytest.raises(
        UnsupportedError, match=r"compiled by NVRTC 12\.4; .* is of version 12\.9\.\nTry: pip install"
    ):
        build.build(12, ["sm_80"], tmp_path)


def test_the_library_and_its_headers_are_looked_at_one_by_one(monkeypatch, tmp_path):
    of_library, of_headers = nvrtc.TOOLKITS[12].requirements
    found, packaged = {of_headers: tmp_path}, trust.packaged
    monkeypatch.setattr(
        trust, "packaged", lambda name, path: found[name] if name in found else packaged(name, path)
    )
    header = tmp_path / "cuda_runtime_api.h"
    for text, version in (("#define CUDART_VERSION  12040\n", "12.4"), ("", "0.0")):
        header.write_text(text)
        with pytest.raises(
            UnsupportedError, match=rf"{tmp_path} is of version {version}\.\nTry: pip install"
        ):
            nvrtc.Compiler(12)
    header.write_text("#define CUDART_VERSION 12090\n")
    assert nvrtc.Compiler(12).include == tmp_path
    with monkeypatch.context() as other:
        other.setattr(nvrtc.Compiler, "_version", lambda _: (12, 4))
        with pytest.raises(UnsupportedError, match=r"nvrtc.* is of version 12\.4\."):
            nvrtc.Compiler(12)
    for name, what in ((of_headers, "its headers are"), (of_library, "it is")):
        found[name] = None
        assert not nvrtc.installed(12)
        with pytest.raises(UnsupportedError, match=rf"12\.9, and {what} not installed\.\nTry: pip install"):
            nvrtc.Compiler(12)


def test_ptx_is_text_and_an_error_of_the_compiler_is_named():
    compiler = nvrtc.Compiler(12)
    compiler._nvrtc.nvrtcDestroyProgram = destroy = mock.Mock(wraps=compiler._nvrtc.nvrtcDestroyProgram)
    made, log = compiler.compile(
        "__global__ void f(int *x) { int unused; *x = 1; }", "f.cu", ["-arch=compute_90"], result="PTX"
    )
    assert made.rstrip().endswith(b"}")
    assert "unused" in log
    assert not log.endswith("\0")
    with pytest.raises(nvrtc.CompileError, match=r"f\.cu -arch=compute_90\n"):
        compiler.compile("no C", "f.cu", ["-arch=compute_90"])
    assert destroy.call_count == 2
    with pytest.raises(nvrtc.CompileError, match=r"nvrtcGetProgramLogSize: NVRTC_ERROR_"):
        compiler._read(ctypes.c_void_p(), "nvrtcGetProgramLogSize", "nvrtcGetProgramLog")


@requires_nvrtc(13)
def test_cuda_13_knows_no_old_gpus(stubs, tmp_path):
    with pytest.raises(
        UnsupportedError, match=r"NVRTC 13\.5 does not compile for sm_70.*\n.*sm_75.*\nTry: --cuda 12"
    ):
        build.build(13, ["sm_70"], tmp_path)
    ((folder, _),) = build.build(13, ["sm_80"], tmp_path, progress=False)
    assert manifest(folder)["compiler"] == "NVRTC 13.5"


def test_targets_of_a_release():
    assert build.targets(12)[:3] == ("sm_61", "sm_70", "sm_75")
    assert build.targets(13) == build.targets(12)[2:]
    assert {"sm_86", "sm_89", "sm_90a", "sm_120", "sm_120f"} <= {*build.targets(13)}


@pytest.mark.parametrize(
    ("arch", "targets"),
    [("sm_80", "sm_80"), ("sm_86", "sm_86"), ("sm_89", "sm_86 sm_89"), ("sm_90", "sm_90a"),
     ("sm_90a", "sm_90a"), ("sm_103", "sm_103"), ("sm_120", "sm_120 sm_120f"),
     ("sm_121", "sm_121 sm_120f")],
)  # fmt: skip
def test_native_targets(arch, targets):
    assert build.native_targets(arch) == tuple(targets.split())


# ---------------------------------------------------------------------------------------------- the cache


def test_the_users_cache_is_filled_and_found(stubs, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(locate.OVERRIDE, raising=False)
    (folder,) = user_cache.into_user_cache(["sm_86"])
    assert folder == locate.user_cache() / "cuda12" / "sm_86"
    found = locate.locate(stubs.rows[0], "sm_86", 12080)
    assert (found.origin, found.target, found.path.parent) == ("user cache", "sm_86", folder)
    # Kernels of sm_86 run on sm_89, and not on sm_80.
    assert locate.locate(stubs.rows[0], "sm_89").target == "sm_86"
    with pytest.raises(locate.CubinNotFoundError):
        locate.locate(stubs.rows[0], "sm_80")
    # It may be moved.
    (tmp_path / "cache").rename(tmp_path / "moved")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "moved"))
    assert locate.locate(stubs.rows[0], "sm_86").path.is_relative_to(tmp_path / "moved")
    stubs.write("include/stub.cuh", "__device__ float scaled(float x) { return x; }\n")
    with pytest.raises(
        locate.CubinNotFoundError, match=r"sources have changed.*\nTry: python -m cupy_flash build"
    ):
        locate.locate(stubs.rows[0], "sm_86")


def test_a_cache_that_cannot_be_made(stubs, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("in the way of a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert main(["build", "--arch", "sm_80"]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"BuildFailed: cannot write {tmp_path / 'file'}")
    assert second.startswith("Try: ")
    assert second.endswith(f"another folder, by {trust.CACHE_VARIABLE}")


def test_only_the_users_cache_is_moved_by_a_variable(stubs, tmp_path, monkeypatch):
    """A build into it that fails later names the variable too; one into a folder of the caller does not."""
    monkeypatch.setattr(build, "_compile_all", lambda *_: tmp_path.mkdir())
    monkeypatch.setenv(trust.CACHE_VARIABLE, str(tmp_path / "cache"))
    with pytest.raises(build.BuildFailed, match=rf"\nTry: .*another folder, by {trust.CACHE_VARIABLE}$"):
        user_cache.into_user_cache(["sm_86"], [12])
    with pytest.raises(build.BuildFailed, match=r"\nTry: .*another folder$"):
        make(tmp_path / "out")


# ---------------------------------------------------------------------------------------------- the script


def nvidia_smi(folder, monkeypatch, *lines):
    """A machine where nvidia-smi prints these."""
    folder.mkdir()
    tool = folder / "nvidia-smi"
    tool.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in of nvidia-smi is a shell script")
def test_native_are_the_gpus_of_this_machine(tmp_path, monkeypatch):
    nvidia_smi(tmp_path / "bin", monkeypatch, "8.6", "9.0", "8.6", "3.7", "[N/A]")
    assert build.archs_here() == ("sm_86", "sm_90")
    command = [
        sys.executable,
        str(ROOT / "scripts" / "build_cubins.py"),
        "--only",
        "*primitives*",
        "--arch",
        "native",
    ]
    command += ["--out", str(tmp_path / "out"), "--list", str(tmp_path / "list")]
    subprocess.run(command, check=True, capture_output=True)
    assert (tmp_path / "list").read_text().split() == ["cuda12/sm_86", "cuda12/sm_90a"]


@pytest.mark.parametrize("part", ["0/1", "0/2"])
def test_a_pattern_that_names_no_kernel_is_refused(part, tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "build_cubins.py"), "--arch", "sm_80", "--part", part]
    done = subprocess.run(
        [*command, "--only", "typo*", "--out", str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "no kernel for sm_80 is named like 'typo*'.\n  Try: " in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in of nvidia-smi is a shell script")
@pytest.mark.parametrize("said", ["NVIDIA-SMI has failed because it could not communicate", "3.5"])
def test_native_of_a_machine_without_a_gpu_is_nothing(said, tmp_path, monkeypatch):
    nvidia_smi(tmp_path / "bin", monkeypatch, said)
    assert build.archs_here() == ()
    command = [sys.executable, str(ROOT / "scripts" / "build_cubins.py"), "--arch", "native"]
    command += ["--out", str(tmp_path / "out"), "--list", str(tmp_path / "list")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "nvidia-smi shows no GPU" in done.stderr
    assert (tmp_path / "list").read_text() == ""
    monkeypatch.setenv("PATH", "")
    assert build.archs_here() == ()


@pytest.mark.slow
def test_the_script_and_the_real_catalog(tmp_path):
    """Both compile gates and the command line, on one real kernel for every target of the set that has it."""
    variant = next(row for row in families.variants("sm_80") if row.kernel == "simple_forward")
    command = [
        sys.executable,
        str(ROOT / "scripts" / "build_cubins.py"),
        "--cuda",
        "12",
        "--only",
        variant.name,
    ]
    command += ["--out", str(tmp_path / "out"), "--list", str(tmp_path / "list")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "list").read_text().split() == [f"cuda12/{name}" for name in build.targets(12)]
    for target in build.targets(12):
        entries = check_whole(tmp_path / "out" / "cuda12" / target)
        assert set(entries) == (set() if families.has_own_target(target) else {variant.name})
    assert f"{sum(not families.has_own_target(target) for target in build.targets(12))} cubins" in done.stdout
