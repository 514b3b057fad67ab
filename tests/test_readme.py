"""README and docs: complete tables, commands that parse, links that lead somewhere, and a README of readable length."""

from __future__ import annotations

import ast
import re
import shlex
from itertools import pairwise, takewhile
from pathlib import Path

import pytest

from headscan.catalog import BEHAVIOURS, IMPORTANCES, PROFILES
from headscan.cli.main import VERBS, read_command, verb_class
from headscan.cli.option_parser import UsageError, options_of, verb_parser
from headscan.cli.sql import Sql
from headscan.store.views import ALL_RUNS, VIEWS
from tests.sources import ROOT, modules

README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))}
#: Page that exists on the site alone, generated from the declarations.
GENERATED = ("schema.md",)
MEASURING, STORE = PAGES["measuring.md"], PAGES["store.md"]


def test_every_profile_behaviour_and_importance_has_its_row() -> None:
    for p in PROFILES.values():
        formula = p.formula.replace("|", r"\|")
        assert re.search(rf"\| `{p.name}` \| {re.escape(formula)} \| [^|]+ \| {re.escape(p.source)} \|", MEASURING)
    for b in BEHAVIOURS.values():
        assert f"| `{b.name}` | {b.formula} | {b.source} |" in MEASURING
    for i in IMPORTANCES.values():
        formula = i.formula.replace("|", r"\|")
        assert f"| `{i.name}` | {formula} | {i.source} |" in PAGES["importance.md"]


def test_every_view_is_named_here_and_in_the_help() -> None:
    for view in VIEWS:
        assert f"`{view.removeprefix(ALL_RUNS)}`" in STORE
        assert view.removeprefix(ALL_RUNS) in (Sql.__doc__ or "")
    assert ALL_RUNS in (Sql.__doc__ or "")


def test_it_starts_with_the_installation() -> None:
    first_block = README.partition("```bash\n")[2].partition("```")[0]
    assert [line.split("#")[0].strip() for line in first_block.splitlines()] == [
        "pip install .",
        "make demo",
        "make test",
    ]


def test_the_readme_is_short() -> None:
    assert len(README.split()) < 1800


def test_every_link_leads_to_a_file() -> None:
    for name, text in {"README.md": README, **PAGES}.items():
        folder = ROOT if name == "README.md" else (DOCS / name).parent
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            generated = (folder / target).resolve() in [DOCS / page for page in GENERATED]
            there = target.startswith("https://") or generated or (folder / target).exists()
            assert there, f"{name}: {target}"


def test_every_file_that_is_named_exists() -> None:
    folders = "|".join(("headscan", "pipelines", "cluster", "analysis", "tests", "docs"))
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
    for page in pages:
        for path in re.findall(rf"`((?:{folders})/[\w/.-]*)`", page.read_text(encoding="utf-8")):
            assert (ROOT / path).exists(), f"{page.name}: {path}"
    for source in modules().values():
        for path in re.findall(rf"\b((?:{folders})/[\w/.-]*\.(?:py|md))\b", source.read_text(encoding="utf-8")):
            assert (ROOT / path).exists(), f"{source.relative_to(ROOT)}: {path}"


def test_the_reading_orders_state_how_many_files_they_list() -> None:
    design = PAGES["design.md"]
    lists = re.findall(r"read these (\d+)\b[^:`]*:\s+((?:\d\. |`)(?:.|\n)*?)(?=\n\n|\. To )", design)
    shared = design.partition("### What all verbs share\n")[2].partition("###")[0]
    lists += [(count, shared) for count in re.findall(r"the (\d+) files \[that all verbs share\]", design)]
    assert len(lists) == 6
    for count, listed in lists:
        assert len(set(re.findall(r"`([\w/]+\.py)`", listed))) == int(count), listed


#: Functions of a route that call what an earlier one of it passes.
PASSED_ON = ("Pool.map",)
_NAME = r"`[A-Za-z_]\w*(?:\.(?!py`)[A-Za-z_]\w*)?`"


def _names(text: str) -> list[str]:
    return [each.strip("`") for each in re.findall(_NAME, text)]


def _definitions(path: Path) -> dict[str, ast.AST]:
    """Return classes, functions, methods and other names of a file; functions also with the file's name before them."""
    found: dict[str, ast.AST] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {each.id: node for each in targets if isinstance(each, ast.Name)}
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found |= {node.name: node, f"{path.stem}.{node.name}": node}
        if isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            found |= {name: each for each in methods for name in (f"{node.name}.{each.name}", each.name)}
    return found


def _mentioned(start: ast.AST, names: dict[str, ast.AST]) -> set[str]:
    """Return the names in a function, and in the functions, constants and private classes of its file that it names."""
    seen, waiting, reached = set[str](), [start], [start]
    while waiting:
        for node in ast.walk(waiting.pop()):
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
            seen.add(name)
            called = names.get(name)
            is_public_class = isinstance(called, ast.ClassDef) and not name.startswith("_")
            if called is not None and not is_public_class and called not in reached:
                waiting.append(called)
                reached.append(called)
    return seen


def test_the_routes_of_the_reading_orders_are_those_of_the_code() -> None:
    """Every name is defined in a listed file, and every function of a route mentions the next one. In a table the
    caller that a row names mentions the function; where the pool or the model calls it, one above mentions it.
    """
    orders = PAGES["design.md"].partition("## Reading order\n")[2].partition("\n## ")[0]
    files = {path: _definitions(ROOT / path) for path in dict.fromkeys(re.findall(r"`([\w/]+\.py)`", orders))}
    for name in _names(orders):
        assert any(name in names for names in files.values()), name
    for listed, path in re.findall(rf"((?:{_NAME}(?:,? and |,\s))*{_NAME})(?: \([^)]*\))?\sin\s`([\w/]+\.py)`", orders):
        assert set(_names(listed)) <= files[path].keys(), (listed, path)
    steps = 0
    for route in re.findall(rf"{_NAME}(?:\s->\s{_NAME})+", orders):
        before = set[str]()
        for caller, called in pairwise(_names(route)):
            mentioned = set[str]().union(*(_mentioned(each[caller], each) for each in files.values() if caller in each))
            known = mentioned | before if caller in PASSED_ON else mentioned
            assert called.rpartition(".")[2] in known, f"{caller} -> {called}"
            before |= mentioned
            steps += 1
    for section in orders.split("\n### "):
        tables = re.findall(r"^\| function \|.*\n\| --- .*\n((?:\|.*\n)+)", section, re.MULTILINE)
        rows = re.findall(rf"^\| ({_NAME}) \| ([^|]+) \| `([\w/]+\.py)` \|", "".join(tables), re.MULTILINE)
        assert len(rows) == sum(table.count("\n") for table in tables)
        above: dict[str, set[str]] = {}
        for name, caller, path in rows:
            function = name.strip("`")
            of_class, _, called = function.rpartition(".")
            named = above[caller.strip("`")] if caller.startswith("`") else set[str]().union(*above.values())
            first = not above and caller == "the command line"
            assert first or (of_class if called == "__call__" else called) in named, (
                f"{caller} does not call {function}"
            )
            above[function] = _mentioned(files[path][function], files[path])
            steps += 1
    assert steps >= 80


def test_the_verbs_without_json_are_named() -> None:
    [verbs] = re.findall(r"Every verb takes `--json`, except ([^.]*)\.", PAGES["howto/use_in_scripts.md"])
    without = [verb for verb in VERBS if "--json" not in [each.flag for each in options_of(verb_class(verb))]]
    assert sorted(re.findall(r"`([a-z]+)`", verbs)) == sorted(without)


#: What the folders that users run and edit hold.
TOP_READMES = tuple(f"{folder}/README.md" for folder in ("pipelines", "cluster", "analysis"))
#: Pages with commands. Words in capitals, and `$NAMES`, stand for what a reader has.
WITH_COMMANDS = {
    "README.md": README,
    **{name: (ROOT / name).read_text(encoding="utf-8") for name in ("CONTRIBUTING.md", *TOP_READMES)},
    **PAGES,
}
_FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


def fenced_commands(text: str) -> list[list[str]]:
    """Return the words after `headscan` of each command in a block of shell, wherever in its line it begins."""
    found = []
    for language, block in _FENCE.findall(text):
        if language not in ("bash", "sh", "console", ""):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            for inside in re.findall(r"(?:^|[$\"(&|;]|srun|time) *headscan ([a-z].*)", line):
                # A command in the quotes of another one ends with its quote.
                whole = inside.rpartition('"')[0] if inside.count('"') % 2 else inside
                words = shlex.split(re.sub(r"\$\w+", "1", whole), comments=True)
                found.append(list(takewhile(lambda word: word not in ("|", ">", ">>", "&", "&&", ";"), words)))
    return found


def inline_commands(text: str) -> list[list[str]]:
    """Return the words after `headscan` of each command inside a sentence."""
    plain = _FENCE.sub("", text)
    return [shlex.split(command) for command in re.findall(r"`headscan ([a-z][^`]*)`", plain)]


def test_every_command_they_show_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line builds the settings, so that a missing option, or two that exclude each other, fails, too."""
    monkeypatch.chdir(tmp_path)
    count = 0
    for name, text in WITH_COMMANDS.items():
        files = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
        for words in fenced_commands(text):
            if "--config-file" in words:  # the page shows the file
                (tmp_path / words[words.index("--config-file") + 1]).write_text(files[0])
            try:
                read_command(words)
            except UsageError as problem:
                raise AssertionError(f"{name}: headscan {' '.join(words)}: {problem}") from problem
            count += 1
    assert count >= 60


def test_commands_inside_sentences_name_verbs_and_options_that_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sentence may name a verb with one option alone, or write `...`; other commands are whole."""
    monkeypatch.chdir(tmp_path)
    count = 0
    for name, text in WITH_COMMANDS.items():
        for verb, *words in inline_commands(text):
            shown = f"{name}: headscan {' '.join([verb, *words])}"
            assert verb in VERBS, shown
            known = verb_parser(verb, verb_class(verb))._option_string_actions
            assert all(word in known for word in words if word.startswith("--")), shown
            if words and not words[0].startswith("--") and "..." not in words:
                read_command([verb, *words])
            count += 1
    assert count >= 60
