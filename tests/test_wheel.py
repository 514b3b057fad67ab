"""What an installation holds: one name in site-packages, real folders, and types that others can check."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.sources import ROOT

#: Folders of what users run and edit.
_TOP = ("pipelines", "cluster", "analysis")
_SOURCES = ("headscan", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the contents of the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in _SOURCES:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, folder / "source" / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source, folder / "source" / name)
    build = [
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(folder),
        str(folder / "source"),
    ]
    subprocess.run([sys.executable, "-m", "pip", *build], check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_claims_one_name(site: Path) -> None:
    assert {path.name for path in site.iterdir() if path.suffix != ".dist-info"} == {"headscan"}
    assert (site / "headscan/demo/demo-5m/model.safetensors").is_file()
    assert (site / "headscan/py.typed").is_file()
    templates = {path.name for path in (ROOT / "headscan/report/templates").glob("*.*")}
    assert {path.name for path in (site / "headscan/report/templates").glob("*.*")} == templates
    assert not list(site.rglob("tests")) + list(site.rglob("bench_*.py"))


def test_a_checkout_has_no_links() -> None:
    """Windows, zip downloads and `git -c core.symlinks=false clone` have none."""
    if not (ROOT / ".git").exists():
        pytest.skip("no repository here")
    files = subprocess.run(["git", "ls-files", "--stage"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert len(files.splitlines()) > 500
    assert [line for line in files.splitlines() if line.startswith("120000")] == []


@pytest.mark.slow
def test_a_type_checker_outside_of_the_checkout_finds_the_types(tmp_path: Path) -> None:
    """mypy reads the path of an editable installation, and no import hook."""
    venv.create(tmp_path / "environment", symlinks=True)
    install = ["--no-deps", "--no-build-isolation", "--quiet", "--disable-pip-version-check", "--editable", str(ROOT)]
    python = str(tmp_path / "environment/bin/python")
    (packages,) = (tmp_path / "environment/lib").glob("python*/site-packages")
    builder = packages / "builder.pth"  # lends setuptools to the installation alone
    builder.write_text(f"{sysconfig.get_path('purelib')}\n")
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", *install], check=True)
    builder.unlink()
    own = tmp_path / "own.py"
    own.write_text("import headscan\n\nheadscan.HeadMask(3)\n")
    check = [sys.executable, "-m", "mypy", "--python-executable", python, "--ignore-missing-imports", "own.py"]
    found = subprocess.run(check, capture_output=True, text=True, cwd=tmp_path).stdout
    assert 'own.py:3: error: Argument 1 to "HeadMask" has incompatible type "int"' in found


@pytest.mark.slow
def test_the_sdist_holds_what_a_wheel_needs(site: Path, tmp_path: Path) -> None:
    source = site.parent / "source"
    for name in ("MANIFEST.in", "CHANGELOG.md", "CITATION.cff", "SECURITY.md", "docs", *_TOP):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    build = "import sys, setuptools.build_meta as build; build.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], check=True, capture_output=True, cwd=source)
    (packed,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(packed, tmp_path, filter="data")
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert {"docs", *_TOP, "CITATION.cff", "SECURITY.md"} <= {path.name for path in unpacked.iterdir()}

    def files(folder: Path) -> set[str]:
        return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}

    assert files(site / "headscan") <= files(unpacked / "headscan")
    for folder in _TOP:
        assert {name for name in files(ROOT / folder) if "__pycache__" not in name} == files(unpacked / folder)


class Environment(NamedTuple):
    """A new environment with the wheel; ``work`` is a folder outside of the checkout, where its commands run."""

    folder: Path
    work: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def command(self) -> Path:
        return self.folder / "bin" / "headscan"

    @property
    def packages(self) -> Path:
        (found,) = (self.folder / "lib").glob("python*/site-packages")
        return found

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=self.work, env=outside)

    def install(self, *words: str | Path) -> int:
        pip = (self.python, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check")
        return self.run(*pip, *words).returncode


@pytest.fixture(scope="module")
def environment(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Only the wheel provides `headscan`; the other libraries are those of this environment."""
    folder = tmp_path_factory.mktemp("clean")
    (folder / "work").mkdir()
    made = Environment(folder / "environment", folder / "work")
    venv.create(made.folder, with_pip=True)
    libraries = folder / "libraries"
    libraries.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        # Not the editable installation of this checkout; .pth files of a linked folder are not read anyway.
        if "headscan" not in path.name.lower() and path.suffix != ".pth":
            (libraries / path.name).symlink_to(path)
    (made.packages / "libraries.pth").write_text(f"{libraries}\n")
    assert made.run(made.python, "-c", "import torch").returncode == 0
    assert "No module named 'headscan'" in made.run(made.python, "-c", "import headscan").stderr
    (wheel,) = site.parent.glob("*.whl")
    assert made.install("--no-index", wheel) == 0
    return made


@pytest.mark.slow
def test_the_installed_command_scans_the_demo_and_reports(environment: Environment) -> None:
    store = ("--store", "s.duckdb")
    scanned = environment.run(environment.command, "scan", "demo", "--limit-sequences", "4", "--device", "cpu", *store)
    assert scanned.returncode == 0, scanned.stderr
    asked = environment.run(
        environment.command, "sql", "select count(*) as n from head_summary", "--format", "csv", *store
    )
    assert asked.stdout.replace('"', "").split() == ["n", "48"], asked.stderr
    reported = environment.run(environment.command, "report", "--out", "r.html", *store)
    assert reported.returncode == 0, reported.stderr
    page = (environment.work / "r.html").read_text(encoding="utf-8")
    assert "How many heads can be ablated?" in page and "headscan.switchable" in page


@pytest.mark.slow
def test_it_works_in_a_new_environment(environment: Environment) -> None:
    run, python, command = environment.run, environment.python, environment.command
    shown = run(command, "--help")
    assert shown.returncode == 0 and "headscan demo" in shown.stdout, shown.stderr
    assert run(python, "-m", "headscan", "--version").stdout.startswith("headscan 1.")
    loaded = run(python, "-c", "import headscan; print(len(list(headscan.load('demo', device='cpu').grid.heads())))")
    assert loaded.stdout == "48\n", loaded.stderr
    placed = run(command, "place", "demo", "--device", "cpu")
    assert placed.returncode == 0 and "whole" in placed.stdout, placed.stderr
