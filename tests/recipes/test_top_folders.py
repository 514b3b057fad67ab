"""What the folders that users run and edit hold: documented files that use the public interface alone."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from importlib import import_module

import pytest

import headscan
from tests.sources import ROOT, re_exports

FOLDERS = ("pipelines", "cluster", "analysis")
#: Modules whose `__init__` lists public names; all other public names stand in docs/api.md.
_LISTING = ("headscan.plans", "headscan.texts")

#: Files that go beyond the public interface. The two of analysis/ show parts of the library; `paper_run.py` prints
#: where a model runs; `plans.py` measures many plans in one process; `sixteen_heads.py` and `smollm2_page.py` read
#: stored effects and verdicts in more detail than `open_store` gives; the demo model is a part of the package.
BEYOND = {
    "analysis/one_scanned_row.py",
    "analysis/one_verdict.py",
    "pipelines/demo_model/card.py",
    "pipelines/demo_model/training_files.py",
    "pipelines/paper_run.py",
    "pipelines/plans.py",
    "pipelines/sixteen_heads.py",
    "pipelines/smollm2_page.py",
}


def _code() -> Iterator[tuple[str, str]]:
    """The Python of the scripts and notebooks, by path."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text("utf-8")
        for path in sorted((ROOT / folder).rglob("*.ipynb")):
            cells = json.loads(path.read_text("utf-8"))["cells"]
            code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
            yield path.relative_to(ROOT).as_posix(), re.sub(r"(?m)^[%!].*", "", code)


CODE = dict(_code())


@pytest.fixture(scope="module")
def public() -> set[str]:
    """Public names, with the modules from which they may be imported."""
    found = {f"headscan.{name}" for name in headscan.__all__}
    found |= {f"{module}.{name}" for module in _LISTING for name in re_exports(import_module(module))}
    return found | set(
        re.findall(r"^\| `(headscan[\w.]+)` \|", (ROOT / "docs/api.md").read_text("utf-8"), re.MULTILINE)
    )


def test_they_are_no_packages() -> None:
    assert [path for folder in FOLDERS for path in (ROOT / folder).rglob("__init__.py")] == []


@pytest.mark.parametrize("path", CODE)
def test_a_file_imports_public_names(path: str, public: set[str]) -> None:
    """The files that have to go beyond them are listed; a file that no longer does leaves the list."""
    beyond = set()
    for node in ast.walk(ast.parse(CODE[path])):
        if isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
            assert not [name for name in names if name.startswith("headscan.")], f"{path}: write `from ... import`"
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("headscan."):
            names = {alias.name for alias in node.names}
            assert not [name for name in names if name.startswith("_")], f"{path} imports {names}"
            if not {f"{node.module}.{name}" for name in names} <= public:
                beyond.add(node.module)
    assert bool(beyond) == (path in BEYOND), f"{path} imports {beyond}"


def test_names_behind_headscan_are_public(public: set[str]) -> None:
    for path, code in CODE.items():
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "headscan":
                assert f"headscan.{node.attr}" in public, f"{path}: {ast.unparse(node)}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_readme_names_every_file(folder: str) -> None:
    readme = (ROOT / folder / "README.md").read_text("utf-8")
    named = set(re.findall(r"`([\w.*/]+)`", readme))
    for path in (ROOT / folder).iterdir():
        shown = {path.name, f"{path.name}/", f"*{path.suffix}"}
        assert path.name in ("README.md", "__pycache__") or shown & named, f"{folder}/README.md lacks {path.name}"
    for name in named - {each.name for each in (ROOT / folder).iterdir()}:
        assert name.startswith("*.") or (ROOT / folder / name).exists(), f"{folder}/README.md names {name}"
