"""scripts/build_hub.py: what it lays out is whole; what is not complete, or stale, is refused."""

import base64
import hashlib
import json
import shutil

import pytest

from cupy_flash.cubins import sources
from cupy_flash.plan import families
from cupy_flash.version import ABI_VERSION, __version__
from tests import hub
from tests.paths import ROOT

TARGET = "sm_75"


@pytest.fixture
def script():
    return hub.script()


@pytest.fixture
def stores(tmp_path, monkeypatch):
    """Folders as of the builds, with words in place of kernels and of the core."""
    cubins, core = tmp_path / "cubins", tmp_path / "core"
    entries = {}
    (cubins / "cuda12" / TARGET).mkdir(parents=True)
    for variant in families.names(TARGET):
        data = variant.name.encode()
        (cubins / "cuda12" / TARGET / f"{variant.name}.cubin").write_bytes(data)
        entries[variant.name] = entry(data, sources.digest(variant, TARGET, 12))
    write(cubins / "cuda12" / TARGET, "cubins", entries, ABI_VERSION)
    return cubins, core


def entry(data, source):
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), "source": source}


def write(folder, table, entries, abi):
    held = {"format": 1, "version": __version__, "abi": abi, table: entries}
    (folder / "manifest.json").write_text(json.dumps(held))


def with_core(script, core):
    """A store of the core of this machine, of one word for each library."""
    from cupy_flash.cpu.core import params
    from cupy_flash.cpu.core.isa import host, runnable
    from cupy_flash.cpu.core.sources import digest, library_name, parts

    if not runnable():
        pytest.skip("there is no CPU core for this machine")
    folder = core / host().platform
    folder.mkdir(parents=True)
    entries = {}
    for part in parts(runnable()[0]):
        name = library_name(runnable()[0], part)
        (folder / f"{name}.so").write_bytes(name.encode())
        entries[name] = entry(name.encode(), digest(runnable()[0], part))
    write(folder, "libraries", entries, params.ABI_VERSION)
    return folder


def test_a_variant_is_the_package_its_kernels_and_their_hashes(script, stores, tmp_path):
    cubins, core = stores
    libraries = with_core(script, core)
    out = tmp_path / "out"
    assert script.main(["--cubins", str(cubins), "--core", str(core), "--out", str(out)]) == 0
    for variant in ("torch-cpu", "torch-cuda"):
        folder = out / "build" / variant
        files = {x.relative_to(folder).as_posix(): x for x in folder.rglob("*") if x.is_file()}
        metadata = json.loads(files.pop("metadata.json").read_text())
        assert metadata["digest"]["algorithm"] == "sha256"
        assert metadata["digest"]["files"] == {
            name: base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
            for name, path in files.items()
        }
        backend = variant.removeprefix("torch-")
        assert metadata["id"].isidentifier()
        assert metadata["id"].startswith(f"_cupy_flash_{backend}_")
        assert metadata["backend"] == {"type": backend, **({"archs": ["7.5"]} if backend == "cuda" else {})}
        assert (metadata["name"], metadata["version"], metadata["python-depends"]) == ("cupy-flash", 1, [])
        package = {x.relative_to(ROOT / "cupy_flash").as_posix() for x in (ROOT / "cupy_flash").rglob("*.py")}
        assert {name for name in files if name.endswith(".py")} == package
        compiled = {
            name for name in files if name.startswith(("_cubins/", "_core/")) and "manifest" not in name
        }
        kernels = {f"_cubins/cuda12/{TARGET}/{x.name}.cubin" for x in families.names(TARGET)}
        wanted = {f"_core/{libraries.name}/{x.name}" for x in libraries.glob("*.so")}
        assert compiled == wanted | (kernels if backend == "cuda" else set())
        assert "_kernels/include/abi.cuh" in files
    assert (out / "README.md").read_text().startswith("---\nlibrary_name: kernels\n")


def test_another_file_is_another_name(script, stores, tmp_path):
    _, core = stores
    with_core(script, core)

    def name():
        folder = script.lay_out("torch-cpu", tmp_path, tmp_path, core)
        return json.loads((folder / "metadata.json").read_text())["id"]

    first = name()
    assert name() == first
    script.EXPORTS += "\n"
    assert name() != first


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda folder: (folder / "flash_forward_x.cubin").write_bytes(b""), None),
        (lambda folder: next(folder.glob("*.cubin")).write_bytes(b"other"), "bytes"),
        (lambda folder: shutil.rmtree(folder), "there are no cubins"),
        (lambda folder: edit(folder, lambda held: held["cubins"].popitem()), "lacks"),
        (lambda folder: edit(folder, lambda held: first(held).update(source="")), "its sources have changed"),
        (lambda folder: edit(folder, lambda held: held.update(abi=0)), "of cupy_flash"),
    ],
    ids=["a file more", "damaged", "nothing", "incomplete", "stale", "of another version"],
)
def test_what_does_not_fit_is_refused(script, stores, tmp_path, capsys, harm, said):
    cubins, core = stores
    with_core(script, core)
    harm(cubins / "cuda12" / TARGET)
    out = tmp_path / "out"
    done = script.main(
        ["--variant", "torch-cuda", "--cubins", str(cubins), "--core", str(core), "--out", str(out)]
    )
    if said is None:
        assert done == 0
        assert not list(out.rglob("flash_forward_x.cubin"))
        return
    assert done == 1
    printed = capsys.readouterr().err
    assert said in printed
    assert "Try: scripts/build_cubins.py" in printed
    assert not list(out.rglob("metadata.json"))


def test_without_a_core_nothing_is_laid_out(script, stores, tmp_path, capsys):
    cubins, core = stores
    assert script.main(["--cubins", str(cubins), "--core", str(core), "--out", str(tmp_path / "out")]) == 1
    assert "Try: scripts/build_cpu.py" in capsys.readouterr().err


def edit(folder, change):
    path = folder / "manifest.json"
    held = json.loads(path.read_text())
    change(held)
    path.write_text(json.dumps(held))


def first(held):
    return next(iter(held["cubins"].values()))


def test_architectures_are_written_as_kernels_reads_them(script):
    assert list(map(script.capability, ("sm_80", "sm_90a", "sm_100f", "sm_120"))) == [
        "8.0",
        "9.0a",
        "10.0f",
        "12.0",
    ]
