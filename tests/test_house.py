"""Light things stay light, and packages do without the libraries of others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from headscan.verdicts.confirmation import record_confirmation
from headscan.verdicts.verdict_rows import record_verdicts
from tests.numbers.conftest import make_profiles, make_stats, write_scan
from tests.numbers.sweep_fixtures import write_sweep
from tests.sources import ROOT, modules, part_of


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout


def without(*libraries: str) -> str:
    """Code that makes libraries look as if they were not installed."""
    return f"""
from importlib.machinery import PathFinder
find = PathFinder.find_spec
hides = lambda name: name.partition('.')[0] in {libraries!r}
PathFinder.find_spec = classmethod(lambda cls, name, *more: None if hides(name) else find(name, *more))
"""


def test_stored_numbers_are_read_without_torch() -> None:
    hide = without("torch", "transformers", "accelerate", "ray", "datasets", "lm_eval")
    use = "".join(f"import {name}\n" for name in modules() if part_of(name) == "numbers")
    assert python(f"{hide}{use}print('fine')") == "fine\n"


def test_importing_headscan_loads_no_torch() -> None:
    assert (
        python("import sys, headscan; print('torch' in sys.modules, 'output_norm_ln' in headscan.SCORES)")
        == "False True\n"
    )


def test_help_imports_no_library() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "headscan.cli.main", "--help"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    assert "headscan demo" in shown
    parse = "import sys; from headscan.cli.main import verb_list; verb_list()"
    assert (
        python(f"{parse}; print({{'torch', 'ray', 'duckdb', 'numpy', 'scipy', 'pydantic'}} & set(sys.modules))")
        == "set()\n"
    )


OTHERS = ("ray", "duckdb", "datasets", "lm_eval", "pyarrow", "pandas", "scipy", "plotly", "psutil", "sacrebleu")


def test_headscan_needs_torch_transformers_and_accelerate_and_make_gpu_pytest_with_xdist() -> None:
    """Its tests are collected, and its benchmarks imported, where the other libraries are missing. What `make gpu-8b`
    needs is held by a run (`tests/benchmarks/test_bench_8b.py`).
    """
    targets = (ROOT / "Makefile").read_text("utf-8").partition("\ngpu:")[2].partition("\n\n")[0].strip().splitlines()
    tests, *benches = (target.partition("(GPU_PYTHON) -m ")[2].split() for target in targets)
    assert tests[0] == "pytest" and len(benches) == 3
    parallel = ["-n", "8", "--dist", "loadfile"]
    assert tests[-4:] == parallel
    tried = [*tests[1:-4], "--collect-only", "--device", "cpu"]
    use = "".join(f"import {bench[0]}\n" for bench in benches) + f"import pytest\nprint(pytest.main({tried}))"
    library = "from headscan import load, collect, intervene, HeadMask, HeadRule, score\nprint('library')\n"
    without_these = f"hides = lambda name: name.partition('.')[0] in {OTHERS!r}\n"
    hide = without(*OTHERS, "pytest", "tests") + "import os\nos.environ['PYTEST_DISABLE_PLUGIN_AUTOLOAD'] = '1'\n"
    first, *_, shown, code = python(hide + library + without_these + use).splitlines()
    assert first == "library"
    collected = re.match(r"(\d+)/\d+ tests collected", shown)
    assert code == "0" and collected and int(collected[1]) > 800, (shown, code)


def test_without_time_the_tests_of_a_device_do_not_pass(tmp_path: Path) -> None:
    """With the suite's options, a file of one test, which imports nothing."""
    (tmp_path / "test_one.py").write_text("import pytest\n\n@pytest.mark.gpu\ndef test_one(): pass\n")
    tried = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml")]
    tried += [str(tmp_path), "-m", "gpu"]
    settings = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ended = subprocess.run([*tried, "--minutes", "0"], capture_output=True, text=True, cwd=ROOT, env=settings)
    assert ended.returncode == 3 and "0 minutes are over" in ended.stdout
    ended = subprocess.run([*tried, "--device", "cuda:99"], capture_output=True, text=True, cwd=ROOT, env=settings)
    assert ended.returncode == 0 and "No CUDA device here: nothing was run" in ended.stderr + ended.stdout


def test_reading_verbs_need_no_torch(tmp_path: Path) -> None:
    """Verdicts that the job wrote are read as they are."""
    store = write_scan(tmp_path / "s.duckdb", make_stats() | make_profiles()).store
    run_id = write_sweep(store, scores=("entropy",), shares=(0.05, 0.1), seeds=1, questions=400)
    record_verdicts(store, run_id)
    record_confirmation(store, run_id)
    verbs = (["status"], ["rank"], ["roles"], ["sql", "select 1"], ["report", "--out", str(tmp_path / "r.html")])
    code = f"""
import sys
from headscan.cli.main import main
for verb in {verbs!r}:
    code = main([*verb, "--store", {str(store.path)!r}])
    print("after", verb[0], code, sorted({{"torch", "transformers", "scipy.stats"}} & set(sys.modules)))
"""
    found = [line for line in python(code).splitlines() if line.startswith("after ")]
    assert found == [f"after {verb[0]} 0 []" for verb in verbs]
    assert 'id="curves-rule"' in (tmp_path / "r.html").read_text("utf-8")
