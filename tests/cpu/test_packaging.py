"""What is published: names, pins and contents that agree, and wheels that are proved by installing them."""

import email
import fnmatch
import hashlib
import importlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile

import pytest
from packaging.requirements import Requirement

from cupy_flash.cpu.core import build, sources
from cupy_flash.cpu.core import locate as library
from cupy_flash.cpu.core.isa import host, runnable
from cupy_flash.cubins import build as compiled
from cupy_flash.cubins import locate, nvrtc, sass
from cupy_flash.cubins.sources import digest
from cupy_flash.errors import UnsupportedError
from cupy_flash.plan import families
from cupy_flash.plan.catalog import architecture
from cupy_flash.version import ABI_VERSION, __version__
from tests.cpu.stub_kernels import requires_nvrtc
from tests.paths import KERNELS_CU, ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CORE = tomllib.loads((ROOT / "pyproject.toml").read_text())
DEPENDENCIES = CORE["tool"]["scikit-build"]["metadata"]["dependencies"]["result"]
RELEASE = next(
    o for o in CORE["tool"]["scikit-build"]["overrides"] if o["if"].get("env") == {"CUPY_FLASH_RELEASE": True}
)
DATA = {
    cuda: tomllib.loads((ROOT / "packages" / f"cuda{cuda}x" / "pyproject.toml").read_text())
    for cuda in locate.PACKAGES
}
CPU = tomllib.loads((ROOT / "packages" / "cpu" / "pyproject.toml").read_text())


def test_every_pin_of_the_compiler_is_the_same():
    extras = CORE["project"]["optional-dependencies"]
    overrides = CORE["tool"]["scikit-build"]["overrides"]
    of_core = {
        12: CORE["tool"]["scikit-build"]["build"]["requires"],
        13: next(o for o in overrides if o["if"].get("env") == {"CUPY_FLASH_CUBINS": "^13$"})["build"][
            "requires"
        ],
    }
    for cuda, toolkit in nvrtc.TOOLKITS.items():
        pins = {*toolkit.requirements, sass.REQUIREMENT}
        extra = extras[f"compiler{cuda}"]
        assert pins <= set(extra)
        assert {*toolkit.extra_requirements} == {pin.partition(">=")[0] for pin in extra}
        assert pins <= set(of_core[cuda])
        assert pins <= set(DATA[cuda]["tool"]["scikit-build"]["build"]["requires"])


def test_a_checkout_compiles_for_the_gpus_of_the_machine():
    archs = CORE["tool"]["scikit-build"]["cmake"]["define"]["CUPY_FLASH_ARCHS"]
    assert archs == {"env": "CUPY_FLASH_ARCHS", "default": "native"}
    for data in DATA.values():  # a release has all
        assert "CUPY_FLASH_ARCHS" not in data["tool"]["scikit-build"]["cmake"]["define"]


def test_a_build_has_what_importing_the_catalog_needs():
    needed = set(DEPENDENCIES)
    assert needed <= set(CORE["tool"]["scikit-build"]["build"]["requires"])
    for data in (*DATA.values(), CPU):
        assert needed <= set(data["tool"]["scikit-build"]["build"]["requires"])


@pytest.mark.parametrize("cuda", [12, 13])
def test_a_data_package_is_the_one_that_is_looked_for(cuda):
    name, module = locate.PACKAGES[cuda], locate.PACKAGES[cuda].replace("-", "_")
    settings = DATA[cuda]["tool"]["scikit-build"]
    assert DATA[cuda]["project"]["name"] == name
    assert settings["wheel"]["packages"] == [module]
    assert settings["wheel"]["install-dir"] == module
    assert settings["cmake"]["define"]["CUPY_FLASH_CUDA"] == str(cuda)
    assert settings["metadata"]["dependencies"]["result"] == ["cupy-flash=={project[version]}"]
    cupy = CORE["project"]["optional-dependencies"][f"cuda{cuda}x"]
    assert DATA[cuda]["project"]["optional-dependencies"] == {"cupy": cupy}


def test_the_cpu_package_is_the_one_that_is_looked_for():
    settings, module = CPU["tool"]["scikit-build"], library.PACKAGE.replace("-", "_")
    assert CPU["project"]["name"] == library.PACKAGE
    assert settings["wheel"]["packages"] == [module]
    assert settings["wheel"]["install-dir"] == module
    assert settings["cmake"]["define"]["CUPY_FLASH_CUDA"] == "none"
    assert settings["metadata"]["dependencies"]["result"] == ["cupy-flash=={project[version]}"]


def test_every_platform_of_the_cpu_core_has_a_tag(build_wheels):
    """And others have a wheel without a library, so that what a marker does not know can be installed."""
    assert set(build_wheels.PLATFORM_TAGS) == {"none", *build.ZIG_TARGETS}
    for name in build.ZIG_TARGETS:
        assert build.libraries_of(name)


def test_the_page_has_a_row_for_every_platform(build_wheels):
    """With the tag of its CPU core, and for GPUs without kernels of their own those that they take."""
    text = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    rows = re.search(r"^## Platforms\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)[1].splitlines()
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows if row.startswith("|")][2:]
    assert {tag for row in rows for tag in re.findall(r"`(\w+)`", row[1])} == {
        *build_wheels.PLATFORM_TAGS.values()
    }
    taken = [row for row in rows if "which are those of" in row[3]]
    assert len(taken) == 2
    for row in taken:
        gpus, targets = (re.findall(r"sm_\d+", row[column]) for column in (0, 3))
        assert [architecture(gpu).target for gpu in gpus] == targets
    (thor,) = (row for row in rows if "sm_110" in row[0])
    assert "not supported" in thor[3]
    with pytest.raises(UnsupportedError):
        architecture("sm_110")


def test_a_release_is_built_and_proved_every_night():
    """By the commands of CONTRIBUTING.md, in their order."""
    job = (ROOT / ".github" / "workflows" / "night.yml").read_text().partition("\n  release:\n")[2]
    ran = re.findall(r"^ +- run: (scripts/.*)$", job, re.MULTILINE)
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## How to release")[2].partition("\n## ")[0]
    tests, *release = re.findall(r"^\d\. .*?`(scripts/[^`]+)`", section, re.MULTILINE)
    assert tests == "scripts/test --all"
    assert ran == release
    assert ran[0] == "scripts/build_wheels.py --fresh"


# What Python calls machines.
MACHINES = [
    ("Linux", "linux", "x86_64"), ("Linux", "linux", "aarch64"), ("Linux", "linux", "riscv64"),
    ("Darwin", "darwin", "arm64"), ("Darwin", "darwin", "x86_64"), ("FreeBSD", "freebsd14", "amd64"),
    ("Windows", "win32", "AMD64"), ("Windows", "win32", "ARM64"), ("Windows", "win32", "x86"),
]  # fmt: skip


@pytest.mark.parametrize(("system", "name", "machine"), MACHINES)
def test_a_release_asks_for_the_cpu_core_where_it_is_compiled(system, name, machine, monkeypatch):
    """And besides for what a checkout asks for."""
    result = RELEASE["metadata"]["dependencies"]["result"]
    *others, core = (one.format(project={"version": __version__}) for one in result)
    assert others == DEPENDENCIES
    core = Requirement(core)
    assert (core.name, str(core.specifier)) == (library.PACKAGE, f"=={__version__}")
    monkeypatch.setattr(sys, "platform", name)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    compiled = host.__wrapped__().platform in build.ZIG_TARGETS
    assert core.marker.evaluate({"platform_system": system, "platform_machine": machine}) == compiled


PASSED = "build/passed.txt"
OPTIONS_OF_CI = f"--write-passed={PASSED}", f"--push --without={PASSED}"


def test_ci_runs_the_commands_of_the_readme():
    """The plain one first, in a new environment: what CI alone has, a newcomer lacks."""
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    commands = [f"time scripts/test {options}" for options in OPTIONS_OF_CI]
    assert lines[-3:] == [f"rm -rf .venv {PASSED}", *commands]
    for name in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / name).read_text()
        assert "\nscripts/test  " in text
        assert "\nscripts/test --push  " in text
        assert "\nscripts/test --all  " in text


TESTS_OF_EVERY_END = """
import pytest

def test_passes(): pass
def test_fails(): assert False
def test_skips(): pytest.skip()

@pytest.fixture
def late():
    yield
    assert False

def test_errs(late): pass

@pytest.mark.torch
def test_torch(): pass

@pytest.mark.parametrize("n", [1, 2], ids=["1", "a/b.py"])
def test_n(n): assert n == 1
"""


def test_what_passed_is_not_repeated_but_for_frameworks(tmp_path):
    """In CI's second run, by its own options; what failed or was skipped in the first is repeated."""
    for folder in ("cases", "build"):
        (tmp_path / folder).mkdir()
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\ntestpaths = ["cases"]\n')
    (tmp_path / "cases" / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "cases" / "test_it.py").write_text(TESTS_OF_EVERY_END)

    def run(options):
        words = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--sample=word"]
        words += options.replace("--push", "--in-turn").split()
        found = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(words, cwd=tmp_path, env=found, capture_output=True, text=True, check=False)
        assert re.findall(r"^(\S+): \d+ s$", done.stdout, re.MULTILINE) == ["cases"]
        return {*re.findall(r"^cases/test_it.py::(\S+) [A-Z]", done.stdout, re.MULTILINE)}

    first, second = OPTIONS_OF_CI
    every = {f"test_{end}" for end in ("passes", "fails", "skips", "errs", "torch", "n[1]", "n[a/b.py]")}
    assert run(first) == every
    passed = {"test_n[1]", "test_passes", "test_torch"}
    assert (tmp_path / PASSED).read_text().split() == [f"cases/test_it.py::{name}" for name in sorted(passed)]
    assert run(second) == every - passed | {"test_torch"}
    assert run(first) == every, "the file is there already"


def test_every_address_has_one_owner():
    """The placeholder, or who the owner is: in all of them at a time."""
    files = [ROOT / name for name in ("pyproject.toml", "CITATION.cff", "SECURITY.md")]
    files += [*(ROOT / "packages").glob("*/*.*"), *(ROOT / ".github").rglob("*.yml")]
    address = re.compile(r"https://(?:raw\.githubusercontent|github)\.com/([\w.-]+)/cupy_flash\b")
    owners = {file: set(address.findall(file.read_text(encoding="utf-8"))) for file in files}
    assert len(set().union(*owners.values())) == 1, owners
    for project in (CORE, CPU, *DATA.values()):
        assert owners[ROOT / "pyproject.toml"] == {project["project"]["urls"]["Source"].split("/")[3]}
    assert not address.search((ROOT / "README.md").read_text(encoding="utf-8"))  # pyproject.toml makes them


def test_what_a_package_index_shows_has_no_relative_link():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for change in CORE["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(change["pattern"], change["replacement"], text)
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert len(links) > 20
    assert [link for link in links if not link.startswith("https://")] == []
    pictures = re.findall(
        r"^!\[[^\]]*\]\(https://raw\.githubusercontent\.com/\w+/cupy_flash/main/(.*)\)", text, re.M
    )
    assert pictures
    for picture in pictures:
        assert (ROOT / picture).suffix == ".png"
        assert (ROOT / picture).is_file()
    for path in re.findall(r"\]\(https://github\.com/\w+/cupy_flash/blob/main/([^)#]*)", text):
        assert (ROOT / path).exists(), path


def test_versions_and_licences_agree():
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    for package in (ROOT / "packages").iterdir():
        licence = package / "LICENSE"
        assert licence.read_bytes() == (ROOT / "LICENSE").read_bytes()
    pythons = [c.rpartition(" ")[2] for c in CORE["project"]["classifiers"] if ":: Python :: 3." in c]
    assert pythons
    assert CORE["project"]["requires-python"] == f">={pythons[0]}"


def test_hooks_before_a_commit_are_the_tools_of_the_extra_dev():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    pins = set(re.findall(r'additional_dependencies: \["([^"]+)"\]', hooks))
    assert pins
    assert pins <= set(CORE["project"]["optional-dependencies"]["dev"])


def test_a_public_ci_runs_the_same_command():
    steps = re.findall(
        r"^ +- run: (.*)$", (ROOT / ".github" / "workflows" / "ci.yml").read_text(), re.MULTILINE
    )
    assert steps == [".ci/run"]


def test_actions_are_pinned_by_commit():
    """A tag can be moved to other code; the comment says which one it was."""
    for file in (ROOT / ".github").rglob("*.yml"):
        for used in re.findall(r"\buses: *(.*)", file.read_text(encoding="utf-8")):
            assert re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", used), (file.name, used)


# ------------------------------------------------------------------------------------------ wheels


@pytest.fixture
def build_wheels(monkeypatch):
    """The script as a module."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("build_wheels")


def test_a_wheel_over_the_budget_is_an_error_and_the_table_adds_up(
    build_wheels, tmp_path, monkeypatch, capsys
):
    stem = f"{__version__}-py3-none-any.whl"
    for package in ("cupy_flash", "cupy_flash_cpu"):
        (tmp_path / f"{package}-{stem}").write_bytes(b"PK\5\6" + bytes(18))  # an empty archive
    latents = re.compile("flash_forward_wide_f16_d576v512_.*")
    with zipfile.ZipFile(tmp_path / f"cupy_flash_cuda13x-{stem}", "w") as archive:
        for target in ("sm_80", "sm_120"):
            one_of_each = {family: variant for variant, family in families.names(target).items()}
            flash = next(variant for variant in families.names(target) if latents.fullmatch(variant.name))
            for variant in (flash, one_of_each["simple"]):
                name = f"cupy_flash_cuda13x/_cubins/cuda13/{target}/{variant.name}.cubin"
                archive.writestr(name, bytes(300_000))
    monkeypatch.setattr(build_wheels, "build_release", lambda *_: None)
    monkeypatch.setattr(build_wheels.Packages, "build", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["build_wheels.py", "--cuda", "13", "--out", str(tmp_path)])
    assert build_wheels.main() == 0
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if "|" in line]
    cells = {row[0]: row[-1] for row in rows}
    assert rows[0] == ["MB in the wheel", "`cupy-flash`", "`cupy-flash-cuda13x`"]
    assert (cells["sm_80"], cells["sm_120"], cells["simple"]) == ("0.6", "0.6", "0.6")
    assert cells["latents"] == cells["flash"] == "0.6"
    assert (cells["**whole wheel**"], cells["cubins"]) == ("**1.2**", "4")
    monkeypatch.setattr(build_wheels.budgets, "WHEEL_BYTES", 1_000_000)
    monkeypatch.setitem(build_wheels.budgets.FAMILY_BYTES, "flash", 200_000)
    monkeypatch.setitem(build_wheels.budgets.PART_BYTES, "latents", 500_000)
    assert build_wheels.main() == 1
    told = capsys.readouterr().err.splitlines()
    assert told == [
        *(
            f"cupy-flash-cuda13x: the flash kernels of {target} take 0.30 MB, over their budget of 0.20 MB. "
            "Try: fewer variants, or another FAMILY_BYTES in scripts/budgets.py"
            for target in ("sm_80", "sm_120")
        ),
        (
            "cupy-flash-cuda13x: the kernels of latents take 0.60 MB, over their budget of 0.50 MB. "
            "Try: fewer variants, or another PART_BYTES in scripts/budgets.py"
        ),
        (
            "cupy-flash-cuda13x: it has 1.20 MB, over the budget of 1.00 MB. "
            "Try: fewer variants, or another WHEEL_BYTES in scripts/budgets.py"
        ),
    ]


def test_the_table_of_wheels_says_how_many_kernels_came_since():
    """Its megabytes are those of a release's build, which is not done for each new kernel."""
    text = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    (then,) = re.findall(r"^\| kernels \| 0 \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    now = tuple(str(sum(len(families.names(t)) for t in compiled.targets(cuda))) for cuda in (12, 13))
    said = "Kernels were added since: there are {} and {} now.".format(*now)
    assert (said in text) == (then != now), f"docs/install.md: {said if then != now else 'none were added'}"


def test_every_wheel_is_tried_and_the_last_lines_say_what_failed(build_wheels, tmp_path, monkeypatch, capsys):
    """And why, which its tools say somewhere in between, and what to do."""
    talk = """
import sys
print("-- configuring")
print("error: 2 kernels were refused:\\n  a spills\\n  b spills\\n  Try: rows for them", file=sys.stderr)
print("ninja: build stopped"); print("*** CMake build failed")
sys.exit(1)
"""
    tried = []

    def build(_, project, *__):
        tried.append(project.name)
        if project.name == "cpu":
            (tmp_path / f"cupy_flash_cpu-{__version__}-py3-none-any.whl").touch()
        else:
            build_wheels.run([sys.executable, "-c", talk])

    def build_release(_):
        build_wheels.run(
            [sys.executable, "-c", "print('1 of 2', flush=True); raise SystemExit('no network')"]
        )

    monkeypatch.setattr(build_wheels, "build_release", build_release)
    monkeypatch.setattr(build_wheels.Packages, "build", build)
    argv = ["build_wheels.py", "--cuda", "12", "--cuda", "13", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", argv)
    assert build_wheels.main() == 1
    assert tried == ["cpu", "cuda12x", "cuda13x"]
    said = capsys.readouterr()
    refused = "was not built: 2 kernels were refused: a spills b spills Try: rows for them"
    assert said.err.splitlines()[-3:] == [
        "cupy-flash was not built: no network",
        f"cupy-flash-cuda12x {refused}",
        f"cupy-flash-cuda13x {refused}",
    ]
    assert "ninja: build stopped" in said.out


def test_a_release_is_every_wheel(build_wheels, tmp_path, monkeypatch):
    built = []

    def write(package, tag):
        zipfile.ZipFile(tmp_path / f"{package}-{__version__}-{tag}.whl", "w").close()

    def build(_, project, out, settings):
        built.append((project.name, settings))
        assert out == tmp_path
        write(f"cupy_flash_{project.name}", settings.get("wheel.tags", "py3-none-any"))

    def main(*options):
        built.clear()
        monkeypatch.setattr(sys, "argv", ["build_wheels.py", "--out", str(tmp_path), *options])
        assert build_wheels.main() == 0
        return built

    monkeypatch.setattr(build_wheels, "build_release", lambda _: write("cupy_flash", "py3-none-any"))
    monkeypatch.setattr(build_wheels.Packages, "build", build)
    *cores, cuda12, cuda13 = main()
    assert (cuda12, cuda13) == (("cuda12x", {}), ("cuda13x", {}))
    for (name, settings), (target, tag) in zip(cores, build_wheels.PLATFORM_TAGS.items(), strict=True):
        assert (name, settings.pop("wheel.tags")) == ("cpu", f"py3-none-{tag}")
        if target == "none":
            assert settings["wheel.cmake"] == "false"
        else:
            assert settings == {"cmake.define.CUPY_FLASH_CPU": target}
    *_, (name, settings) = main("--cuda", "13", "--arch", "sm_80", "--arch", "sm_90a")
    assert (name, settings) == ("cuda13x", {"cmake.define.CUPY_FLASH_ARCHS": "sm_80;sm_90a"})


def test_kernels_of_every_cuda_are_tried_and_failures_come_last(build_wheels, monkeypatch, capfd, tmp_path):
    """In the form that the wheels' script looks for."""
    script = importlib.import_module("build_cubins")

    def refuse(cuda, *_, **__):
        raise script.build.BuildFailed(
            f"2 kernels for CUDA {cuda} were refused:\n  a spills\nTry: rows for them"
        )

    monkeypatch.setattr(script.build, "build", refuse)
    argv = ["build_cubins.py", "--cuda", "12", "--cuda", "13", "--arch", "sm_80", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", argv)
    assert script.main() == 1
    said = capfd.readouterr().err.splitlines()
    assert [line for line in said if line.startswith("error: ")] == [
        f"error: 2 kernels for CUDA {cuda} were refused:" for cuda in (12, 13)
    ]
    one = "2 kernels for CUDA {} were refused: a spills Try: rows for them"
    assert build_wheels.reason(said) == f"{one.format(12)} {one.format(13)}"


def test_a_wheel_is_packed_again_and_stays_the_same(build_wheels, tmp_path):
    wheel = tmp_path / "x-0-py3-none-any.whl"
    content = {"x/a.cubin": bytes(range(256)) * 500, "x/b.py": b"a = 1\n" * 1000}
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, data in content.items():
            file = zipfile.ZipInfo(name, (2026, 1, 2, 3, 4, 6))
            file.external_attr = 0o640 << 16
            archive.writestr(file, data, zipfile.ZIP_DEFLATED, 1)
    before = wheel.stat().st_size
    build_wheels.repack(wheel)
    with zipfile.ZipFile(wheel) as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == content
        assert {(x.date_time, x.external_attr >> 16) for x in archive.infolist()} == {
            ((2026, 1, 2, 3, 4, 6), 0o640)
        }
    assert wheel.stat().st_size < before
    assert [*tmp_path.iterdir()] == [wheel]


@pytest.mark.parametrize("only", ["*", "simple_*_f16_*"])
def test_parts_of_a_build_are_all_of_it(build_wheels, only, monkeypatch, tmp_path):
    """And each variant is in one of them, whatever the architecture."""
    script = importlib.import_module("build_cubins")
    asked = []
    monkeypatch.setattr(script.build, "build", lambda *_, only, **__: asked.append(only) or [])
    archs = ["--arch", "sm_75", "--arch", "sm_90"]
    common = ["build_cubins.py", *archs, "--only", only, "--out", str(tmp_path), "--part"]
    for k in range(8):
        monkeypatch.setattr(sys, "argv", [*common, f"{k}/8"])
        assert script.main() == 0
    every = {v.name for target in ("sm_75", "sm_90a") for v in families.variants(target)}
    assert sorted(name for part in asked for name in part) == sorted(fnmatch.filter(every, only))
    for wrong in ("8/8", "-1/8", "1", "1/0"):
        monkeypatch.setattr(sys, "argv", [*common, wrong])
        with pytest.raises(SystemExit):
            script.main()


def test_a_fresh_build_compiles_anew_and_the_next_one_goes_on(build_wheels, tmp_path, monkeypatch):
    """What a build that failed has compiled stays where the next one looks for it."""
    monkeypatch.setattr(build_wheels, "ROOT", tmp_path)
    cmake = (ROOT / "CMakeLists.txt").read_text()
    for folder, package, name in (
        ("build/cubins", "cupy-flash-cuda12x", ""), ("build/cpu_release", "cupy-flash-cpu", "linux-x86_64"),
    ):  # fmt: skip
        assert folder in cmake
        store = build_wheels.store_of(package, name)
        assert store == tmp_path / folder / (name or "cuda12")
        store.mkdir(parents=True)
        (store / "kept").touch()
    monkeypatch.setattr(build_wheels, "measure", lambda *_: build_wheels.Wheel("x", 0, {}, {}, 0, (0, 0)))
    monkeypatch.setattr(build_wheels, "build_release", lambda *_: None)
    monkeypatch.setattr(build_wheels.Packages, "build", lambda *_: None)
    for package in ("cupy_flash", "cupy_flash_cpu", "cupy_flash_cuda12x"):
        (tmp_path / f"{package}-{__version__}-py3-none-any.whl").touch()
    monkeypatch.setattr(sys, "argv", ["build_wheels.py", "--cuda", "12", "--out", str(tmp_path)])
    assert build_wheels.main() == 0
    assert (tmp_path / "build/cubins/cuda12/kept").exists()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--fresh"])
    assert build_wheels.main() == 0
    assert not (tmp_path / "build/cubins/cuda12").exists()
    assert (tmp_path / "build/cpu_release/linux-x86_64/kept").exists()  # it was not asked for


# What else lies in a checkout: environments, builds, outputs, what editors and debuggers leave, secrets.
STRAYS = (
    "v/pyvenv.cfg", "v/lib/python3.13/site-packages/numpy/__init__.py", "notes.txt", ".env", "core", "id_rsa",
    "cupy_flash/v/lib/python3.13/site-packages/numpy/__init__.py", "cupy_flash/core", "cupy_flash/key.pem",
    "cupy_flash/__pycache__/api.cpython-313.pyc", "cupy_flash/_core/linux-x86_64/v3.so", "cupy_flash/api.py~",
    "kernels_cu/core", "kernels_cu/a.out", "kernels_cu/.gdb_history", "kernels_cu/simulator/headers/nv/x.o",
    "kernels_cpu/forward.o", "tests/out.npz", "tests/golden/new/plan.json", "bench/results/run.log",
    "docs/build/index.html", "examples/data.bin", "examples/.ipynb_checkpoints/a.ipynb", "scripts/core",
    "packages/cpu/dist/x.whl", "packages/cpu/cupy_flash_cpu/v3.so", "packages/cuda12x/cupy_flash_cuda12x/c",
    "packages/cuda13x/cupy_flash_cuda13x/_cubins/cuda13/sm_80/x.cubin",
)  # fmt: skip

BUILD_ALL = """
import os, sys
from scikit_build_core.build import build_sdist, build_wheel
dist = sys.argv[1]
build_sdist(dist)
build_wheel(dist)
for package in ("cpu", "cuda12x", "cuda13x"):
    os.chdir(os.path.join(sys.argv[2], "packages", package))
    build_wheel(dist, {"wheel.cmake": "false"})
"""


@pytest.fixture(scope="module")
def strewn(tmp_path_factory):
    """Archives of a checkout in which more lies than belongs there, by name, and the files that git knows."""
    pytest.importorskip("scikit_build_core", reason="needs pip install scikit-build-core")
    pytest.importorskip("hatch_fancy_pypi_readme", reason="needs pip install hatch-fancy-pypi-readme")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no checkout, or no git")
    tracked = {name for name in listed.stdout.split("\0") if (ROOT / name).is_file()}
    checkout, dist = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("dist")
    for name in tracked:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    for name in STRAYS:
        assert name not in tracked
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).touch()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BUILD_ALL, dist, checkout],
        cwd=checkout, capture_output=True, text=True, env={**os.environ, "CUPY_FLASH_RELEASE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dist, tracked


def test_the_sdist_holds_what_git_knows_and_nothing_else(strewn):
    dist, tracked = strewn
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {member.name.split("/", 1)[1] for member in archive.getmembers() if member.isfile()}
    assert held == {"PKG-INFO", *(name for name in tracked if not name.startswith((".ci/", ".github/")))}


def test_wheels_hold_the_package_and_nothing_else(strewn):
    dist, tracked = strewn
    for wheel in dist.glob("*.whl"):
        package = wheel.name.partition("-")[0]
        of_wheel = {name for name in names_in(wheel) if ".dist-info/" not in name}
        if package == "cupy_flash":
            kernels = {name for name in tracked if name.startswith("kernels_cu/")}
            expected = {name for name in tracked if name.startswith("cupy_flash/")}
            expected |= {f"cupy_flash/_kernels/{name.partition('/')[2]}" for name in kernels}
        else:
            expected = {f"{package}/__init__.py"}
        assert of_wheel == expected, package
    assert len(list(dist.glob("*.whl"))) == 4


needs_build = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("build", "twine"))), reason="needs pip install build twine"
)


def run(*command, cwd=ROOT, **environment):
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


def names_in(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def requirements_of(wheel):
    """What it asks for, but for extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        asked = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist")
    return [Requirement(one) for one in asked if "extra ==" not in one]


ARCH = "sm_75"


def write_stand_ins(store, cuda):
    """A store of bytes that say that they were compiled from these sources, so that a build takes them.

    why: what is tested of a wheel is what lies in it. Compiling it would be 200 s of a processor.
    """
    folder = store / f"cuda{cuda}" / ARCH
    folder.mkdir(parents=True)
    entries = {}
    for variant in families.variants(ARCH):
        data = f"{variant.name} for {ARCH}".encode() * 100
        (folder / f"{variant.name}.cubin").write_bytes(data)
        entries[variant.name] = {
            "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data), "registers": 32, "spill_bytes": 0,
            "source": digest(variant, ARCH, cuda), "stack_bytes": 0, "shared_bytes": 0,
        }  # fmt: skip
    manifest = {
        "format": locate.FORMAT, "version": __version__, "abi": ABI_VERSION, "cuda": cuda, "target": ARCH,
        "compiler": nvrtc.TOOLKITS[cuda].compiler, "cubins": entries,
    }  # fmt: skip
    (folder / locate.MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the tree, with stand-ins for the kernels of one GPU architecture."""
    copy = tmp_path_factory.mktemp("packaging") / "checkout"
    shutil.copytree(
        ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "build", "dist", ".*_cache", "__pycache__")
    )
    for cuda in locate.PACKAGES:
        write_stand_ins(copy / "build" / "cubins", cuda)
    return copy


@pytest.fixture(scope="module")
def wheels(checkout, tmp_path_factory):
    """The sdist and the wheels, and no library of the CPU core."""
    out = tmp_path_factory.mktemp("dist")
    run("scripts/build_wheels.py", "--cuda", 12, "--cuda", 13, "--arch", ARCH, "--out", out, cwd=checkout)
    return out


@pytest.mark.slow
@pytest.mark.in_turn(4)
@needs_build
@pytest.mark.skipif(host().platform != "linux-x86_64", reason="the wheel that is built is for x86-64 Linux")
def test_the_wheel_of_the_cpu_core(tmp_path):
    """It has a platform, brings every instruction set, and is found where it is installed."""
    run("scripts/build_wheels.py", "--cpu", "linux-x86_64", "--out", tmp_path)
    core = tmp_path / f"cupy_flash-{__version__}-py3-none-any.whl"
    wheel = tmp_path / f"cupy_flash_cpu-{__version__}-py3-none-manylinux2014_x86_64.whl"
    folder = "cupy_flash_cpu/_core/linux-x86_64/"
    held = {name.removeprefix(folder) for name in names_in(wheel) if name.startswith(folder)}
    parts = ("", "_functions", "_second_order", "_statistics")
    libraries = {f"{isa}{part}.so" for isa in ("v2", "v3", "v4") for part in parts}
    assert held == {"manifest.json", "v4_amx.so", "v4_bfloat16.so", *libraries}
    assert not [name for name in names_in(core) if name.endswith(".so")]
    others = tmp_path / f"cupy_flash_cpu-{__version__}-py3-none-any.whl"
    assert not [name for name in names_in(others) if "_core" in name]
    asked = next(one for one in requirements_of(core) if one.name == library.PACKAGE)
    assert asked.marker is not None
    # What pip takes there; of musl there is none.
    for tag, taken in (("manylinux2014_x86_64", wheel), ("musllinux_1_2_x86_64", others)):
        got = tmp_path / tag
        local = ("--no-deps", "--no-index", "--find-links", tmp_path, "--only-binary=:all:")
        wanted = ("--platform", tag, "--dest", got, f"{asked.name}{asked.specifier}")
        run("-m", "pip", "download", "--quiet", *local, *wanted)
        assert [path.name for path in got.iterdir()] == [taken.name]
    run("-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path / "site", core, wheel)
    script = "from cupy_flash.cpu import choose; print(choose.core()[1].origin)"
    # why -S: an editable installation of the checkout would come before PYTHONPATH.
    path = os.pathsep.join([str(tmp_path / "site"), sysconfig.get_paths()["purelib"]])
    found = subprocess.run(
        [sys.executable, "-S", "-c", script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert found.stdout.strip() == "cupy-flash-cpu", found.stderr


@pytest.mark.slow
@pytest.mark.in_turn(8)
@needs_build
@pytest.mark.parametrize("target", ["linux-aarch64", "macos-aarch64", "windows-x86_64"])
def test_the_wheel_of_the_cpu_core_for_others(target, tmp_path):
    """It brings every library of every instruction set of its processors."""
    run("scripts/build_wheels.py", "--cpu", target, "--out", tmp_path)
    held = set().union(*(names_in(wheel) for wheel in tmp_path.glob("cupy_flash_cpu-*.whl")))
    folder = f"cupy_flash_cpu/_core/{target}/"
    isas = build.libraries_of(target)
    libraries = {f"{sources.library_name(isa, part)}.so" for isa in isas for part in sources.parts(isa)}
    wanted = {f"{folder}{name}" for name in ("manifest.json", *libraries)}
    assert {name for name in held if "/_core/" in name} == wanted


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the CPU core needs a C++ compiler")
def test_pip_install_of_a_checkout_brings_the_cpu_core(tmp_path):
    """Also as README says it for who has no GPU: what one setting changes leaves the others."""
    run("-m", "pip", "wheel", "--quiet", "--no-deps", "-w", tmp_path, ".", CUPY_FLASH_CUBINS="none")
    (wheel,) = tmp_path.iterdir()
    folder = f"cupy_flash/_core/{host().platform}/"
    held = {name.removeprefix(folder) for name in names_in(wheel) if name.startswith(folder)}
    assert {"manifest.json", f"{runnable()[0].name}.so"} <= held
    assert not [name for name in names_in(wheel) if name.endswith(".cubin")]
    # No index has what belongs to a checkout.
    assert {one.name for one in requirements_of(wheel)} == {Requirement(one).name for one in DEPENDENCIES}


@pytest.mark.slow
@needs_build
@requires_nvrtc(12)
@requires_nvrtc(13)
class TestWheels:
    def test_names_and_contents(self, wheels):
        stem = f"{__version__}-py3-none-any.whl"
        assert {path.name for path in wheels.iterdir()} == {
            f"cupy_flash-{stem}", f"cupy_flash_cpu-{stem}", f"cupy_flash_cuda12x-{stem}",
            f"cupy_flash_cuda13x-{stem}", f"cupy_flash-{__version__}.tar.gz",
        }  # fmt: skip
        core = names_in(wheels / f"cupy_flash-{stem}")
        kernels = {
            f"cupy_flash/_kernels/{file.relative_to(KERNELS_CU).as_posix()}"
            for file in KERNELS_CU.rglob("*.cu*")
        }
        assert kernels | {"cupy_flash/py.typed"} <= core
        assert not [name for name in core if name.endswith(".cubin")]
        for cuda, package in locate.PACKAGES.items():
            module = package.replace("-", "_")
            held = names_in(wheels / f"{module}-{stem}")
            folder = f"{module}/_cubins/cuda{cuda}/{ARCH}/"
            variants = {f"{folder}{variant.name}.cubin" for variant in families.variants(ARCH)}
            assert {name for name in held if name.startswith(folder)} == {*variants, f"{folder}manifest.json"}
            assert f"{module}-{__version__}.dist-info/licenses/LICENSE" in held

    def test_the_sdist_builds_all_of_them(self, wheels):
        with tarfile.open(wheels / f"cupy_flash-{__version__}.tar.gz") as archive:
            names = {name.split("/", 1)[1] for name in archive.getnames()}
        needed = {"pyproject.toml", "CMakeLists.txt", "LICENSE", "scripts/build_cubins.py", "README.md"}
        needed |= {f"packages/cuda{cuda}x/pyproject.toml" for cuda in locate.PACKAGES}
        needed |= {"scripts/build_cpu.py", "kernels_cpu/forward.cpp", "packages/cpu/pyproject.toml"}
        assert needed <= names
        assert not [name for name in names if name.startswith(("build/", ".venv/", "dist/", ".git/"))]

    def test_the_same_bytes_again(self, wheels, checkout, tmp_path):
        again = ("--cuda", 13, "--arch", ARCH, "--out", tmp_path)
        run("scripts/build_wheels.py", *again, cwd=checkout, TZ="Asia/Tokyo")
        for path in tmp_path.iterdir():
            assert path.read_bytes() == (wheels / path.name).read_bytes(), path.name

    def test_they_install_and_uninstall_in_either_order(self, wheels):
        # why one Python: every other one installs the same files, and is tested each night.
        printed = run("scripts/check_release.py", "--wheels", wheels, "--python", sys.executable)
        assert re.search(r"^4 wheels hold with Python 3", printed, re.MULTILINE)

    def test_pip_install_of_a_checkout_brings_its_cubins(self, tmp_path):
        define = "cmake.define.CUPY_FLASH_ARCHS=sm_80"
        run(
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "-w",
            tmp_path,
            "--config-settings",  # why not -C: the pip of Python 3.11 does not know it
            define,
            ".",
            CUPY_FLASH_CUBINS="12",
        )
        (wheel,) = tmp_path.iterdir()
        folder = "cupy_flash/_cubins/cuda12/sm_80/"
        held = {name for name in names_in(wheel) if name.endswith(".cubin")}
        assert held == {f"{folder}{variant.name}.cubin" for variant in families.variants("sm_80")}
        run("-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path / "site", wheel)
        script = (
            "from cupy_flash.cubins import locate; from cupy_flash.plan import families;"
            "print({locate.locate(v, 'sm_86').origin for v in families.variants('sm_80')})"
        )
        # why -S: an editable installation of the checkout would come before PYTHONPATH.
        path = os.pathsep.join([str(tmp_path / "site"), sysconfig.get_paths()["purelib"]])
        found = subprocess.run(
            [sys.executable, "-S", "-c", script],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path)},
        )
        assert found.stdout.strip() == "{'cupy-flash'}", found.stderr


def test_nothing_that_was_built_or_fetched_is_tracked():
    """Wheels of others were, once: 17 MB in a tree that is 2 as an archive."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no checkout, or no git")
    tracked = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert tracked
    assert not [path for path in tracked if path.suffix in (".whl", ".so", ".cubin", ".gz", ".zip")]
    assert not [path for path in tracked if path.exists() and path.stat().st_size > 1 << 20]
