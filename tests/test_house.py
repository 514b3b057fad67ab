"""Light things stay light, and packages do without the libraries of others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from headscan.analysis.verdicts.confirmation import record_confirmation
from headscan.analysis.verdicts.verdict_rows import record_verdicts
from tests.analysis.conftest import make_profiles, make_stats, write_scan
from tests.analysis.sweep_fixtures import write_sweep
from tests.sources import ROOT, modules


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


def test_analysis_works_without_torch() -> None:
    hide = without("torch", "transformers", "accelerate", "ray", "datasets", "lm_eval")
    use = "".join(f"import {name}\n" for name in modules() if name.startswith("headscan.analysis"))
    assert python(f"{hide}{use}print('fine')") == "fine\n"


def test_importing_headscan_loads_no_torch() -> None:
    assert (
        python("import sys, headscan, headscan.catalog; print('torch' in sys.modules, len(headscan.SCORES))")
        == "False 15\n"
    )


def test_help_imports_no_library() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "headscan.pipelines.cli.main", "--help"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout
    assert "headscan demo" in shown
    parse = "import sys; from headscan.pipelines.cli.main import build_parser; build_parser()"
    assert python(f"{parse}; print({{'torch', 'ray', 'duckdb', 'numpy', 'scipy'}} & set(sys.modules))") == "set()\n"


def test_headscan_and_the_gpu_proof_need_torch_transformers_and_accelerate_alone() -> None:
    hide = without("ray", "duckdb", "datasets", "lm_eval", "pyarrow", "pandas", "scipy", "plotly", "pytest", "tests")
    use = "from headscan import load, collect, intervene, HeadMask, HeadRule, score\nprint('fine')\n"
    use += "from headscan.gpu_proof.__main__ import main\nprint(main(['--device', 'cpu', '--minutes', '0']))"
    shown = python(hide + use)
    assert shown.startswith("fine\n") and shown.endswith("\n3\n")


def test_reading_verbs_need_no_torch(tmp_path: Path) -> None:
    """Verdicts that the job wrote are read as they are."""
    store = write_scan(tmp_path / "s.duckdb", make_stats() | make_profiles()).store
    run_id = write_sweep(store, scores=("entropy",), shares=(0.05, 0.1), seeds=1)
    record_verdicts(store, run_id)
    record_confirmation(store, run_id)
    verbs = (["status"], ["sql", "select 1"], ["report", "--out", str(tmp_path / "r.html")])
    code = f"""
import sys
from headscan.pipelines.cli.main import main
for verb in {verbs!r}:
    code = main([*verb, "--store", {str(store.path)!r}])
    print("after", verb[0], code, sorted({{"torch", "transformers", "scipy.stats"}} & set(sys.modules)))
"""
    found = [line for line in python(code).splitlines() if line.startswith("after ")]
    assert found == [f"after {verb[0]} 0 []" for verb in verbs]
    assert 'id="curves-rule"' in (tmp_path / "r.html").read_text("utf-8")
