"""README and docs: complete tables, commands that parse, links that lead somewhere, and a README of readable length."""

from __future__ import annotations

import re
import shlex

from headscan.analysis.store.views import ALL_RUNS, VIEWS
from headscan.catalog import BEHAVIOURS, IMPORTANCES, PROFILES, SCORES, STATISTICS
from headscan.pipelines.cli.main import VERBS, verb_class
from headscan.pipelines.cli.option_parser import options_of, verb_parser
from headscan.pipelines.cli.status import Sql
from tests.sources import PACKAGES, ROOT, modules

README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))}
#: Pages that the site generates from the declarations.
GENERATED = ("catalogue.md", "schema.md")
MEASURING, STORE = PAGES["measuring.md"], PAGES["store.md"]


def test_every_statistic_score_and_behaviour_has_its_row() -> None:
    for s in STATISTICS.values():
        assert f"| `{s.name}` | {s.formula} | {s.unit} | {s.source} |" in MEASURING
    for p in PROFILES.values():
        formula = p.formula.replace("|", r"\|")
        assert re.search(rf"\| `{p.name}` \| {re.escape(formula)} \| [^|]+ \| {re.escape(p.source)} \|", MEASURING)
    for s in SCORES.values():
        assert f"| `{s.name}` | {s.paper_name} | {s.formula} | {s.inactive} |" in MEASURING
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
            there = target.startswith("https://") or target in GENERATED or (folder / target).exists()
            assert there, f"{name}: {target}"


def test_every_file_that_is_named_exists() -> None:
    folders = "|".join((*PACKAGES, "tests", "docs", "reproduce", "examples"))
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
    for page in pages:
        for path in re.findall(rf"`((?:{folders})/[\w/.-]*)`", page.read_text(encoding="utf-8")):
            assert (ROOT / path).exists(), f"{page.name}: {path}"
    for source in modules().values():
        for path in re.findall(rf"\b((?:{folders})/[\w/.-]*\.(?:py|md))\b", source.read_text(encoding="utf-8")):
            assert (ROOT / path).exists(), f"{source.relative_to(ROOT)}: {path}"


def test_every_verb_with_json_is_named() -> None:
    [verbs] = re.findall(r"takes `--json`: ([^.]*)\.", PAGES["howto/use_in_scripts.md"])
    with_json = [verb for verb in VERBS if "--json" in [each.flag for each in options_of(verb_class(verb))]]
    assert sorted(re.findall(r"`([a-z]+)`", verbs)) == sorted(with_json)


def test_every_command_they_show_is_understood() -> None:
    blocks = [
        block for text in (README, *PAGES.values()) for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    ]
    commands = [line for block in blocks for line in block.splitlines() if line.startswith("headscan ")]
    assert len(commands) >= 12
    for command in commands:
        verb, *words = shlex.split(command, comments=True)[1:]
        verb_parser(verb, verb_class(verb)).parse_args(words)
