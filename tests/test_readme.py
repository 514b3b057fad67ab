"""The README says what the catalogue declares, and starts with the two commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from headscan.analysis.schema.views import ALL_RUNS, VIEWS
from headscan.catalog import BEHAVIOURS, PROFILES, SCORES, STATISTICS
from headscan.pipelines.cli.main import build_parser
from headscan.pipelines.cli.query import sql

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_every_statistic_score_and_behaviour_has_its_row() -> None:
    for s in STATISTICS.values():
        assert f"| `{s.name}` | {s.formula} | {s.unit} | {s.source} |" in README
    for p in PROFILES.values():
        formula = p.formula.replace("|", r"\|")
        assert re.search(rf"\| `{p.name}` \| {re.escape(formula)} \| [^|]+ \| {re.escape(p.source)} \|", README)
    for s in SCORES.values():
        assert f"| `{s.name}` | {s.paper_name} | {s.formula} | {s.inactive} |" in README
    for b in BEHAVIOURS.values():
        assert f"| `{b.name}` | {b.formula} | {b.source} |" in README


def test_every_view_is_named_here_and_in_the_help() -> None:
    for view in VIEWS:
        assert f"`{view.removeprefix(ALL_RUNS)}`" in README
        assert view.removeprefix(ALL_RUNS) in (sql.__doc__ or "")
    assert ALL_RUNS in (sql.__doc__ or "")


def test_it_starts_with_the_two_commands() -> None:
    first_block = README.partition("```bash\n")[2].partition("```")[0]
    assert [line.split("#")[0].strip() for line in first_block.splitlines()] == ["make demo", "make test"]


def test_every_command_it_shows_is_understood() -> None:
    blocks = re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines() if line.startswith("headscan ")]
    assert len(commands) >= 8
    for command in commands:
        build_parser().parse_args(shlex.split(command, comments=True)[1:])
