"""The house rules: who may import whom, and that light things stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("headscan", "cluster", "analysis", "pipelines")

#: What each room may import beside the standard library and itself. `headscan.catalog` alone is open to `analysis`.
ALLOWED = {
    "headscan": {"torch", "transformers", "accelerate", "numpy", "safetensors", "huggingface_hub"},
    "cluster": {"ray", "headscan", "torch", "transformers", "numpy", "psutil"},
    "analysis": {"duckdb", "pyarrow", "numpy", "scipy", "pandas", "plotly", "headscan.catalog"},
}
FLOORS = {"headscan": 0, "cluster": 1, "analysis": 1, "pipelines": 2}


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
    return names


def sources(room: str) -> list[Path]:
    found = sorted((ROOT / room).rglob("*.py"))
    assert found, room
    return found


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    for path in sources(room):
        for name in imports_of(path):
            top = name.partition(".")[0]
            allowed = top in sys.stdlib_module_names or top == room or top in ALLOWED[room] or name in ALLOWED[room]
            assert allowed, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("room", ROOMS)
def test_no_import_runs_upwards(room: str) -> None:
    for path in sources(room):
        for name in imports_of(path):
            top = name.partition(".")[0]
            if top in FLOORS and top != room:
                assert FLOORS[top] < FLOORS[room], f"{path.relative_to(ROOT)} imports {name}"


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout


def without(*libraries: str) -> str:
    """Code that makes libraries look as if they were not installed."""
    return f"""
from importlib.machinery import PathFinder
find = PathFinder.find_spec
hides = lambda name: name.partition('.')[0] in {libraries!r}
PathFinder.find_spec = staticmethod(lambda name, *more: None if hides(name) else find(name, *more))
"""


def test_headscan_works_without_the_other_rooms_libraries() -> None:
    hide = without("ray", "duckdb", "datasets", "lm_eval", "pyarrow", "pandas", "scipy", "plotly")
    use = "from headscan import load, collect, intervene, HeadMask, HeadRule, score\nprint('fine')"
    assert python(hide + use) == "fine\n"


def test_analysis_works_without_torch() -> None:
    hide = without("torch", "transformers", "accelerate", "ray", "datasets", "lm_eval")
    modules = [".".join(p.relative_to(ROOT).with_suffix("").parts) for p in sources("analysis") if p.stem != "__init__"]
    assert python(hide + "".join(f"import {m}\n" for m in modules) + "print('fine')") == "fine\n"


def test_importing_headscan_loads_no_torch() -> None:
    assert (
        python("import sys, headscan, headscan.catalog; print('torch' in sys.modules, len(headscan.SCORES))")
        == "False 15\n"
    )


def test_help_answers_in_under_a_second() -> None:
    times = []
    for _ in range(3):
        started = time.perf_counter()
        shown = subprocess.run(
            [sys.executable, "-m", "headscan.pipelines.cli.main", "--help"],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        ).stdout
        times.append(time.perf_counter() - started)
    assert "headscan demo" in shown
    assert min(times) < 1.0
    parse = "import sys; from headscan.pipelines.cli.main import build_parser; build_parser()"
    assert python(f"{parse}; print({{'torch', 'ray', 'duckdb', 'numpy'}} & set(sys.modules))") == "set()\n"


def test_the_gpu_proof_needs_torch_transformers_and_accelerate_alone() -> None:
    hide = without("ray", "duckdb", "datasets", "lm_eval", "pyarrow", "pandas", "scipy", "plotly", "pytest", "tests")
    use = "from headscan.gpu_proof.__main__ import main\nprint(main(['--device', 'cpu', '--minutes', '0']))"
    assert python(hide + use).endswith("\n3\n")
