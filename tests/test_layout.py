"""The layout: allowed imports, no cycles, distinct names."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter, defaultdict
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from headscan.cli.main import STEPS, VERBS
from tests.sources import PARTS, ROOT, cycles, imports_of, modules, part_of

#: What each part of the package may import in addition to the standard library and itself.
ALLOWED = {
    "instrument": {"torch", "transformers", "accelerate", "numpy", "safetensors", "huggingface_hub", "gguf", "peft"},
    "cluster": {"instrument", "ray", "torch", "transformers", "numpy", "psutil"},
    "numbers": set(
        "duckdb fsspec pyarrow numpy scipy plotly jinja2 markupsafe pydantic pydantic_core"
        " headscan.catalog headscan.errors headscan.text_tables headscan.windows".split()
    ),
    "jobs": set(
        "instrument cluster numbers torch transformers tokenizers datasets lm_eval sacrebleu filelock gguf"
        " huggingface_hub numpy pyarrow jinja2 yaml tqdm shtab".split()
    ),
}

TESTS = sorted((ROOT / "tests").rglob("*.py"))

#: The index of all public names, whose imports type checkers alone read.
INDEX = "headscan"
#: The files of the steps, and of what they share.
STEP_FILES = {*STEPS.values(), "headscan.steps.step", "headscan.steps.corpus_step"}
#: Random-weight models for tests and benchmarks, which the library uses nowhere but in the list of architectures.
FOR_TESTS, USES_THEM = "headscan.architectures", "headscan.cli.models"


@pytest.mark.parametrize("part", ALLOWED)
def test_a_part_imports_only_what_it_may(part: str) -> None:
    for module, path in modules().items():
        if part_of(module) != part:
            continue
        for name in imports_of(path, running=module == INDEX):
            top = name.partition(".")[0]
            own = top == "headscan" and part_of(name) in {part, *ALLOWED[part]}
            fine = own or top in sys.stdlib_module_names or {top, name} & ALLOWED[part]
            assert fine, f"{path.relative_to(ROOT)} imports {name}"


def test_the_table_of_the_design_names_what_a_part_may_import() -> None:
    design = (ROOT / "docs/design.md").read_text("utf-8")
    rows = re.findall(r"^\| (\w+) \|([^|]*)\|[^|]*\|([^|]*)\|$", design, re.MULTILINE)
    named = {part: (folders, cell) for part, folders, cell in rows if part in ALLOWED}
    assert {part: set(re.findall(r"[\w.]+", cell)) for part, (_, cell) in named.items()} == ALLOWED
    assert {part: tuple(re.findall(r"`(\w+)/`", folders)) for part, (folders, _) in named.items()} == PARTS


def test_imported_packages_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = [each for name, extra in project["optional-dependencies"].items() if name != "dev" for each in extra]
    requirements = [*project["dependencies"], *extras]
    declared = {_normal(re.split(r"[^\w.-]", requirement)[0]) for requirement in requirements}
    distributions = packages_distributions()
    for path in modules().values():
        for name in {name.partition(".")[0] for name in imports_of(path)} - {"headscan", *sys.stdlib_module_names}:
            providers = {_normal(distribution) for distribution in distributions.get(name, [name])}
            assert providers & declared, f"{path.relative_to(ROOT)} imports {name}, which pyproject.toml lacks"


def _normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def test_no_files_import_each_other() -> None:
    """Imports of types count: a reader follows them, too. A step imports its work when it runs, and the work names the
    step, so of a step those imports count that are made at once.
    """
    graph = {
        module: imports_of(path, running=module == INDEX, at_once=module in STEP_FILES) - {module}
        for module, path in modules().items()
    }
    assert cycles(graph) == []


def test_no_folders_import_each_other() -> None:
    """The files at the top count separately: `headscan.errors` is below the folders, `headscan.loading` above."""

    def folder(module: str) -> str:
        at_top = module == "headscan" or module.rpartition(".")[0] == "headscan"
        return module if at_top or modules()[module].stem == "__init__" else module.rpartition(".")[0]

    graph: dict[str, set[str]] = defaultdict(set)
    for module, path in modules().items():
        graph[folder(module)] |= {folder(name) for name in imports_of(path, running=True) if name in modules()}
    assert cycles({place: others - {place} for place, others in graph.items()}) == []


def test_the_library_does_not_import_what_is_for_tests() -> None:
    for module, path in modules().items():
        assert module == USES_THEM or FOR_TESTS not in imports_of(path), f"{path.relative_to(ROOT)} imports {FOR_TESTS}"


def test_file_names_are_distinct() -> None:
    stems = Counter(path.stem for path in modules().values())
    assert {stem: count for stem, count in stems.items() if count > 1} == {"__init__": stems["__init__"]}
    tests = Counter(path.stem for path in TESTS if path.stem not in ("__init__", "conftest"))
    assert {stem: count for stem, count in tests.items() if count > 1} == {}


def test_names_in_the_docstrings_of_packages_exist() -> None:
    """A name in backticks is a file or folder of the package, or a name that its `__init__` defines or imports."""
    for module, path in modules().items():
        if path.stem != "__init__":
            continue
        tree = ast.parse(path.read_text("utf-8"))
        inside = {other.removeprefix(f"{module}.").partition(".")[0] for other in modules()}
        inside |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
        inside |= {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        named = re.findall(r"(?<!`)`(\w+)`(?!`)", ast.get_docstring(tree) or "")
        assert not set(named) - inside, f"{path.relative_to(ROOT)} names {set(named) - inside}"


def test_the_docstring_of_a_package_names_what_it_holds() -> None:
    """A newcomer picks a file by it. Verbs are left out: each has the file of its name."""
    files_of_verbs = {f"headscan.cli.{verb}" for verb in VERBS}
    for module, path in modules().items():
        inside = {other for other in modules() if other.rpartition(".")[0] == module} - files_of_verbs
        if path.stem == "__init__" and len(inside) > 1:
            docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
            unnamed = {other.rpartition(".")[2] for other in inside if not other.endswith(".__main__")}
            unnamed -= set(re.findall(r"`(\w+)`", docstring))
            assert not unnamed, f"the docstring of {path.relative_to(ROOT)} lacks {', '.join(sorted(unnamed))}"


def test_the_folders_of_tests_are_those_of_the_package() -> None:
    """Below the part of the package that they test."""
    for folder in {path.parent.relative_to(ROOT / "tests") for path in TESTS}:
        if folder.parts and folder.parts[0] in PARTS:
            tested = Path("headscan", *folder.parts[1 - (folder.parts[0] == "cluster") :])
            assert (ROOT / tested).is_dir(), folder
            assert not folder.parts[1:] or part_of(".".join(tested.parts)) == folder.parts[0], folder
