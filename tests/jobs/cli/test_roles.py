"""The verb ``roles``: heads per role, commands for what is missing, and what a mask takes."""

from __future__ import annotations

import shlex
from pathlib import Path

import pyarrow as pa
import pytest

from headscan.cli.main import main, read_command, verb_class
from headscan.cli.roles import role_command
from headscan.ranking.head_roles import RoleHead, strongest_words
from headscan.store.records import RunRecord
from headscan.store.store import Store
from headscan.store.views import ROLES


def test_each_role_has_a_command_of_its_run() -> None:
    for name, role in ROLES.items():
        words = shlex.split(role_command(name).replace("MODEL", "demo"))
        assert isinstance(read_command(words[1:]), verb_class(role.measured_by))


def test_a_table_lists_the_strongest_heads_and_counts_the_others() -> None:
    heads = tuple(
        RoleHead(layer, 0, value / 100, None) for layer, value in enumerate((50, 90, 70, 60, 80, 55, 65, 75, 85, 95))
    )
    assert strongest_words(heads) == "9:0 1:0 8:0 4:0 7:0 2:0 6:0 3:0 and 2 more"
    assert strongest_words(heads[:3], lowest=True) == "0:0 2:0 1:0"


def test_roles_and_what_a_mask_keeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store(tmp_path / "s.duckdb")
    run_id = store.begin_run(RunRecord("probe", "p", "tiny", 2, 2)).run_id
    heads = {"layer": pa.array([0, 0, 1, 1], pa.int16()), "head": pa.array([0, 1, 0, 1], pa.int16())}
    values = {"behaviour": ["induction_score"] * 4, "value": pa.array([0.9, 0.1, 0.8, 0.7], pa.float32())}
    store.add_behaviours(run_id, pa.table({"site": ["self"] * 4, **heads, **values}))
    store.finish_run(run_id)
    store.add_mask("mine", [(0, 0), (0, 1)])
    where = ["--store", str(store.path)]

    assert main(["roles", *where]) == 0
    shown = capsys.readouterr()
    row = next(line.split() for line in shown.out.splitlines() if line.startswith("induction"))
    assert row == ["induction", ">", "0.5", "headscan", "3", "4", "0:0", "1:0", "1:1"]
    assert "not measured: sink. Run `headscan scan MODEL" in shown.err and f"from probe {run_id}" in shown.err

    assert main(["roles", "--all-heads", "--run", run_id[:6], *where]) == 0
    assert [line.split()[:3] for line in capsys.readouterr().out.splitlines()[2:]] == [
        ["induction", layer, head] for layer, head in ("00", "10", "11")
    ]

    assert main(["roles", "--mask", "mine", *where]) == 0
    assert capsys.readouterr().out.splitlines()[2].split() == ["induction", "3", "2", "1.5", "0:0"]

    for words, message in (
        (["--mask", "theirs"], "no mask theirs"),
        (["--mask", "mine", "--all-heads"], "--all-heads"),
    ):
        assert main(["roles", *words, *where]) == 2
        assert message in capsys.readouterr().err
