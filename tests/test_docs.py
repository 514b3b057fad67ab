"""The documentation's commands, queries, code, notebook and site work as they are written."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest

from headscan.catalog import BEHAVIOURS, IMPORTANCES, PROFILES, SCORES, STATISTICS
from headscan.store.store import Store
from headscan.store.tables import TABLES
from headscan.store.views import VIEWS
from headscan.texts.continuation_task import CONTINUATION, write_task
from headscan.texts.stdlib_files import held_out_files
from tests.numbers.conftest import make_profiles, make_stats, write_scan
from tests.numbers.sweep_fixtures import write_sweep
from tests.sources import ROOT, modules
from tests.test_readme import PAGES, README

#: Pages whose commands on the demo model run in order in one folder.
WALKED = ("tutorial.md", "howto/plan_and_generate.md", "howto/serve.md", "howto/compare_checkpoints.md")
OFFLINE = {**os.environ, "HF_HUB_OFFLINE": "1"}


def blocks(text: str, language: str) -> list[str]:
    return [
        re.sub(rf"^{indent}", "", block, flags=re.MULTILINE)
        for indent, block in re.findall(rf"^( *)```{language}\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    ]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    found = write_scan(tmp_path_factory.mktemp("docs") / "s.duckdb", make_stats() | make_profiles()).store
    write_sweep(found, scores=("entropy",), shares=(0.05, 0.1), seeds=1)
    return found


def test_every_query_of_a_page_runs(store: Store) -> None:
    queries = [(name, query) for name, page in PAGES.items() for query in blocks(page, "sql")]
    assert queries
    for name, query in queries:
        assert store.query(query).num_columns > 0, name


def test_python_blocks_are_python() -> None:
    for name, text in {"README.md": README, **PAGES}.items():
        for code in blocks(text, "python"):
            compile(code, name, "exec")


def test_names_that_python_blocks_and_notebooks_import_exist() -> None:
    texts = {name: "\n".join(blocks(text, "python")) for name, text in {"README.md": README, **PAGES}.items()}
    for path in (ROOT / "analysis").glob("*.ipynb"):
        cells = json.loads(path.read_text("utf-8"))["cells"]
        texts[path.name] = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    for code in texts.values():
        for node in ast.walk(ast.parse(re.sub(r"(?m)^[%!].*", "", code))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headscan"):
                for each in node.names:
                    line = f"from {node.module} import {each.name}"
                    exec(line, {})  # raises an ImportError that names the module and the missing name


def test_attributes_and_arguments_in_python_blocks_exist() -> None:
    """Names behind `headscan.`, and the keywords of calls to them."""
    import headscan

    checked = 0
    for name, text in {"README.md": README, **PAGES}.items():
        for code in blocks(text, "python"):
            for node in ast.walk(ast.parse(code)):
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "headscan":
                    assert hasattr(headscan, node.attr), f"{name}: {ast.unparse(node)}"
                    checked += 1
                called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
                if re.fullmatch(r"headscan\.\w+", called):
                    keywords = {each.arg for each in getattr(node, "keywords", ())} - {None}
                    assert keywords <= inspect.signature(resolve_name(called)).parameters.keys(), called
    assert checked >= 20


def test_every_public_name_is_in_the_tables_and_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name has a row, or stands in a sentence; the rows follow the docstrings."""
    import headscan

    monkeypatch.syspath_prepend(ROOT / "docs")
    monkeypatch.delitem(sys.modules, "generated_pages", raising=False)
    from generated_pages import api_names, api_page, reference_page

    assert api_page() == PAGES["api.md"], "docs/api.md is old: run `make schema`"
    named = {name.rpartition(".")[2] for name in api_names()} | set(re.findall(r"`headscan\.(\w+)`", PAGES["api.md"]))
    assert {*headscan.__all__} <= named
    rendered = {path: resolve_name(path) for path in re.findall(r"^::: ([\w.]+)$", reference_page(), re.MULTILINE)}
    assert len(rendered) == len(set(api_names())) == len(api_names())
    for path, found in rendered.items():
        # A dataclass without a docstring has one that begins with its call.
        assert not (inspect.getdoc(found) or f"{found.__name__}(").startswith(f"{found.__name__}("), path


@pytest.mark.slow
def test_the_python_of_readme_and_api_runs_on_the_demo(tmp_path: Path) -> None:
    evaluate = "evaluate demo --store s.duckdb --heads 0:0 --limit 4 --no-recall"
    plan = "plan --method distant_mass --store s.duckdb --window-share 0.5"
    for command in ("scan demo --store s.duckdb --limit-sequences 4", evaluate, plan):
        subprocess.run([sys.executable, "-m", "headscan", *command.split()], check=True, cwd=tmp_path, env=OFFLINE)
    write_task(tmp_path / "headscan-demo/task", held_out_files(), 40, name=CONTINUATION)
    code = "\n".join(blocks(README, "python") + blocks(PAGES["api.md"], "python"))
    code = code.replace("path-or-hub-name", "demo").replace('device="auto"', 'device="cpu"')
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=OFFLINE)
    assert done.returncode == 0, done.stderr


def test_generated_pages_cover_the_declarations() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        from generated_pages import catalogue_page, schema_page
    finally:
        sys.path.remove(str(ROOT / "docs"))
    assert PAGES["catalogue.md"] == catalogue_page(), "run `make schema`"
    for name in (*STATISTICS, *PROFILES, *SCORES, *BEHAVIOURS, *IMPORTANCES):
        assert f"| `{name}` |" in PAGES["catalogue.md"]
    schema = schema_page()
    for table in TABLES.values():
        assert f"### {table.name}\n" in schema
        assert all(f"| `{column}` |" in schema for column in table.names)
    assert all(f"### {view}\n" in schema for view in VIEWS if not view.startswith("all_"))


#: Options that verbs explain in words of their own, and what each means everywhere.
SAID_DIFFERENTLY = {
    "--apply-chat-template": "prompts in the chat template",
    "--bos": "the BOS token before each text",
    "--controls": "number of random controls of the same size",
    "--criteria": "scores that rank heads",
    "--device": "the device",
    "--heads": "heads as LAYER:HEAD",
    "--hours": "time limit of a study",
    "--kv-bytes": "most bytes of one sequence's KV cache",
    "--limit": "most items: questions of a task, or heads of a ranking",
    "--mask": "a mask of the store",
    "--max-loss": "largest increase of a loss, in nats per token",
    "--max-points": "largest loss of accuracy, in percentage points",
    "--max-tokens": "longest text",
    "--method": "what chooses heads",
    "--out": "output file or folder",
    "--plan": "file of a plan",
    "--questions": "number of questions that judge",
    "--recall-prompts": "prompts of each recall task that measure",
    "--recall-questions": "questions of each recall task that judge",
    "--recent": "last tokens of a window",
    "--run": "first characters of a run's id",
    "--scores": "scores by name",
    "--search": "search among sets of windows",
    "--seed": "seed",
    "--sequences": "number of texts",
    "--share": "share of the heads",
    "--shares": "shares of the heads",
    "--sink": "first tokens of a window",
    "--unit": "what is planned or removed as a whole",
}


def test_an_option_means_one_thing_in_all_verbs() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        from generated_pages import option_uses, options_page
    finally:
        sys.path.remove(str(ROOT / "docs"))
    uses = option_uses()
    told: dict[str, set[str]] = {}
    for flag, by_verb in uses.items():
        # A flag without a value in one verb and with one in another has two meanings.
        assert len({option.field.kind is bool for option in by_verb.values()}) == 1, flag
        for option in by_verb.values() if flag.startswith("--") else ():
            told.setdefault(option.help.partition(" (default")[0], set()).add(flag)
    several = {flag for flag, by_verb in uses.items() if len({o.help for o in by_verb.values()}) > 1}
    assert several == SAID_DIFFERENTLY.keys()
    assert {words: flags for words, flags in told.items() if len(flags) > 1} == {}
    page = options_page()
    assert all(f"| `{flag}` |" in page for flag in uses)


def commands(page: str) -> list[list[str]]:
    """Return the headscan commands of a page that run on the demo model or on a store; others are only parsed."""
    found = []
    for block in blocks(PAGES[page], "bash"):
        for line in block.splitlines():
            if line.startswith("headscan ") and "# needs" not in line and "MODEL" not in line:
                found.append(shlex.split(line, comments=True)[1:])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("page", WALKED)
def test_the_commands_of_a_page_run(page: str, tmp_path: Path) -> None:
    (tmp_path / "prompt.py").write_text(Path(shlex.__file__).read_text()[:600])
    todo = commands(page)
    assert todo
    for command in todo:
        if "RUN_A" in command:
            runs = [run["run_id"] for run in Store(tmp_path / "two.duckdb").runs("scan")]
            command = [dict(zip(("RUN_A", "RUN_B"), runs, strict=True)).get(word, word) for word in command]
        run = [sys.executable, "-m", "headscan", *command]
        done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path, env=OFFLINE)
        assert done.returncode == 0, f"{command}: {done.stderr}"


#: The guide's words for a large model, and those for the demo.
GUIDE_ON_DEMO = {
    "meta-llama/Llama-3.1-8B": "demo",
    "32768": "256",
    "4096,32768": "256",
    "texts/": "python-stdlib-heldout",
    "19": "1",
}
GUIDE_SIZES = {
    "plan": ["--recent", "28", "--sequences", "4", "--no-search"],
    "evaluate": ["--limit", "8", "--recall-questions", "4"],
}


@pytest.mark.slow
def test_the_guide_runs_on_the_demo(tmp_path: Path) -> None:
    verbs = []
    # The demo has questions of its own.
    for block in blocks(PAGES["guide.md"].replace("--tasks mmlu ", ""), "bash"):
        [[_, verb, *words]] = [shlex.split(line, comments=True) for line in block.splitlines()]
        words = [GUIDE_ON_DEMO.get(word, word) for word in words]
        run = [sys.executable, "-m", "headscan", verb, *words, *GUIDE_SIZES.get(verb, [])]
        done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path, env=OFFLINE)
        assert done.returncode == 0, f"{verb} {words}: {done.stderr}"
        verbs.append(verb)
    assert verbs == ["place", "plan", "evaluate", "export"]


@pytest.mark.slow
def test_the_notebooks_run() -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    for path in (ROOT / "analysis").glob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        assert any(cell.get("outputs") for cell in notebook.cells)
        nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(build, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "Measure every attention head on a batch" in (tmp_path / "site/api/index.html").read_text(encoding="utf-8")


def _listed(node: ast.AST, section: str) -> list[str]:
    """The names that a section of a docstring explains."""
    doc = ast.get_docstring(node) if isinstance(node, ast.ClassDef | ast.FunctionDef) else None
    found = re.search(rf"^{section}:\n((?:    .*\n?|\n(?=    ))+)", doc or "", re.MULTILINE)
    entries = re.findall(r"^    (\w+(?:, \w+)*)(?: \([^)]*\))?:", found[1], re.MULTILINE) if found else []
    return [name for entry in entries for name in entry.split(", ")]


def test_docstrings_explain_fields_and_arguments_that_exist() -> None:
    nodes = [(path, node) for path in modules().values() for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    classes = {node.name: node for _, node in nodes if isinstance(node, ast.ClassDef)}

    def fields(node: ast.ClassDef) -> set[str]:
        """Names that a class, or one of its bases, defines in its body or on ``self``."""
        own = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
        own |= {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
        own |= {each.name for each in ast.walk(node) if isinstance(each, ast.FunctionDef)}
        bases = {each.id for base in node.bases for each in ast.walk(base) if isinstance(each, ast.Name)}
        return own.union(*(fields(classes[base]) for base in bases - {node.name} if base in classes))

    wrong, checked = [], 0
    for path, node in nodes:
        if isinstance(node, ast.ClassDef):
            listed, known = _listed(node, "Attributes"), fields(node)
        elif isinstance(node, ast.FunctionDef):
            arguments = (each for each in ast.walk(node.args) if isinstance(each, ast.arg))
            listed, known = _listed(node, "Args"), {each.arg for each in arguments}
        else:
            continue
        checked += len(listed)
        wrong += [f"{path}: {node.name}: {name}" for name in listed if name not in known]
    assert checked > 700 and wrong == []
