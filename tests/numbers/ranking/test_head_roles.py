"""Roles of heads in hand-made stores: numbers at, above and below each threshold, and what a mask leaves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from headscan.catalog import MAX_OFFSET, PROFILES
from headscan.cli.main import main
from headscan.errors import SelectionError, StoreError
from headscan.ranking.head_roles import RoleHead, find_mask, read_roles, survival
from headscan.report.head_measures import read_head_tables
from headscan.store.records import RunRecord
from headscan.store.site_rows import SiteHeads
from headscan.store.store import Store
from headscan.store.views import ROLES
from headscan.verdicts.head_effects import HeadEffect
from tests.numbers.conftest import HEADS, LAYERS, write_scan
from tests.stores import begin_arm, write_behaviours

_BINS = len(PROFILES["argmax_offsets"].bins)
ALL = LAYERS * HEADS


def above(value: float) -> float:
    """Return the next number of the stored type."""
    return float(np.nextafter(np.float32(value), np.float32(9)))


def below(value: float) -> float:
    return float(np.nextafter(np.float32(value), np.float32(-9)))


def same(first: tuple[float, ...], shape: tuple[int, ...] = (2, LAYERS, HEADS)) -> np.ndarray:
    """Return statistics that are equal in all sequences; the first heads have the given numbers, others 0."""
    values = np.zeros(ALL, np.float32)
    values[: len(first)] = first
    return np.broadcast_to(values.reshape(LAYERS, HEADS), shape).copy()


def profiles(*heads: tuple[int, float]) -> np.ndarray:
    """Return histograms of offsets; the first heads have (offset, share), and all other weight is in an open bin."""
    shares = np.zeros((2, ALL, _BINS), np.float32)
    shares[:, :, 0] = 1.0
    for number, (offset, share) in enumerate(heads):
        shares[:, number, 0] = 1 - share
        shares[:, number, 1 + MAX_OFFSET + offset] = share
    return shares.reshape(2, LAYERS, HEADS, _BINS)


def probed(store: Store, behaviour: str, values: tuple[float, ...], model: str = "tiny") -> str:
    return write_behaviours(store, {behaviour: same(values)[0]}, f"{behaviour} {model}", model)


def ablated(store: Store, replacement: str, metric: str, intervals: list[tuple[float | None, float | None]]) -> str:
    """Write effects of the first heads, with the interval of each; the baseline is 0.5 or 2 nats."""
    run_id = store.begin_run(RunRecord("ablate", f"{replacement} {metric}", "tiny", LAYERS, HEADS)).run_id
    effects = [
        HeadEffect("each", "self", 0, head, head // 2, replacement, metric, 0.5 if metric == "accuracy" else 2.0,
                   0.0, 0.1, low, high, 1.0, 1.0, 100, None)
        for head, (low, high) in enumerate(intervals)
    ]  # fmt: skip
    rows = [{"run_id": run_id, **effect.__dict__} for effect in effects]
    store.replace_rows("head_effects", run_id, pa.Table.from_pylist(rows))
    store.finish_run(run_id)
    return run_id


def having(store: Store, role: str, runs: tuple[str, ...] = ()) -> list[tuple[int, int]]:
    (found,) = (verdicts for verdicts in read_roles(store, runs).found if verdicts.role == role)
    return [(head.layer, head.head) for head in found.heads]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A store with every role: a scan, three probes, two ablate runs, and a mask."""
    path = tmp_path_factory.mktemp("roles") / "s.duckdb"
    stats = {
        "first_token_weight": same((below(0.3), 0.3, above(0.3), 1.0)),
        "confidence": same((below(0.5), 0.5, above(0.5))),
        "output_norm": np.ones((2, LAYERS, HEADS), np.float32),
        "argmax_offsets": profiles((-1, 0.9), (-1, below(0.9)), (0, 1.0), (-MAX_OFFSET, 0.95)),
    }
    # Of 24 values of output_norm_ln the 10 % quantile is above two: one head in both sequences, or two in one.
    stats["output_norm"][:, 2, 3] = 0.01
    store = write_scan(path, stats).store
    probed(store, "previous_token_score", (0.5, above(0.5)))
    probed(store, "induction_score", (0.5, 0.9, above(0.5), 0.1))
    probed(store, "retrieval_score", (below(0.1), 0.1, above(0.1)))
    ablated(store, "zero", "loss", [(-0.1, 0.02), (-0.1, 0.019), (0.03, 0.05), (None, None)])
    ablated(store, "mean", "accuracy", [(-0.01, 0.2), (-0.009, 0.2), (0.1, 0.2), (-0.3, -0.2)])
    mask = store.add_mask("mine", [(0, 1), (0, 2), (2, 3)])
    run_id = store.begin_run(RunRecord("evaluate", "e", "tiny", LAYERS, HEADS)).run_id
    begin_arm(store, run_id, "pruned by hand", "pruned", mask_id=mask)
    with store.reading():
        yield store


def test_every_role_is_read_with_its_run_and_number(made: Store) -> None:
    roles = read_roles(made)
    assert [verdicts.role for verdicts in roles.found] == list(ROLES) and roles.missing == ()
    by_role = {verdicts.role: verdicts for verdicts in roles.found}
    # Numbers at the threshold are decided as declared.
    assert {role: [(head.layer, head.head) for head in verdicts.heads] for role, verdicts in by_role.items()} == {
        "positional": [(0, 0), (0, 2), (0, 3)],
        "confident": [(0, 2)],
        "previous_token": [(0, 1)],
        "induction": [(0, 1), (0, 2)],
        "retrieval": [(0, 2)],
        "sink": [(0, 2), (0, 3)],
        "low_output": [(2, 3)],
        "inactive": [(0, 1)],
        "constant": [(0, 1), (0, 2)],
    }
    assert {run["run_id"] for run in roles.runs} == {verdicts.run_id for verdicts in roles.found}
    assert by_role["positional"].heads[0] == RoleHead(0, 0, pytest.approx(0.9), -1)
    assert by_role["positional"].heads[2].key_offset == -MAX_OFFSET
    assert by_role["inactive"].heads[0].value == pytest.approx(0.019 / 2)
    assert by_role["inactive"].measured == 3, "a head without an interval has no verdict"
    assert by_role["constant"].heads[0].value == pytest.approx(0.009)
    assert {verdicts.measured for role, verdicts in by_role.items() if role not in ("inactive", "constant")} == {ALL}


def test_positional_roles_are_the_positional_heads(made: Store) -> None:
    columns = "layer, head, key_offset"
    roles = made.query(f"SELECT {columns} FROM head_roles WHERE role = 'positional' AND holds ORDER BY ALL")
    assert roles == made.query(f"SELECT {columns} FROM positional_heads ORDER BY ALL")
    assert roles.num_rows == 3


def test_a_mask_takes_its_heads_from_every_role(made: Store) -> None:
    roles = read_roles(made)
    for name in ("mine", "pruned by hand"):
        mask = find_mask(made, name, roles.model)
        left = {each.role: each for each in survival(roles, mask.heads)}
        assert [(h.layer, h.head) for h in left["positional"].left] == [(0, 0), (0, 3)]
        assert [(h.layer, h.head) for h in left["positional"].lost] == [(0, 2)]
        assert (left["induction"].had, left["induction"].left) == (2, ())
        assert left["low_output"].lost[0][:2] == (2, 3)
        assert left["positional"].at_random == pytest.approx(3 * 9 / 12)
    assert all(each.left == before.heads for each, before in zip(survival(roles, []), roles.found, strict=True))


def test_newer_runs_come_first_unless_one_is_named(tmp_path: Path) -> None:
    store = Store(tmp_path / "s.duckdb")
    old = probed(store, "induction_score", (0.9,))
    newer = store.begin_run(RunRecord("probe", "newer", "tiny", LAYERS, HEADS)).run_id
    rows = store.query("SELECT site, layer, head, behaviour, 1 - value AS value FROM head_behaviours")
    store.add_behaviours(newer, rows)
    assert having(store, "induction") == [(0, 0)], "the newer run is unfinished"
    store.finish_run(newer)
    assert (0, 0) not in having(store, "induction")
    assert having(store, "induction", (old,)) == [(0, 0)]
    assert read_roles(store).missing == tuple(role for role in ROLES if role != "induction")


def test_mistakes_are_named(made: Store, tmp_path: Path) -> None:
    with pytest.raises(SelectionError, match="site cross"):
        read_roles(made, site="cross")
    with pytest.raises(SelectionError, match="0 runs that measure roles begin with 'zzz'"):
        read_roles(made, ["zzz"])
    with pytest.raises(StoreError, match="no mask"):
        find_mask(made, "absent", read_roles(made).model)
    store = Store(tmp_path / "s.duckdb")
    first = probed(store, "induction_score", (0.9,))
    other = probed(store, "retrieval_score", (0.9,), "another")
    with pytest.raises(SelectionError, match="another model"):
        read_roles(store, [first, other])
    store.add_mask("theirs", [(0, 0)], run_id=other)
    with pytest.raises(SelectionError, match="mask theirs is of another"):
        find_mask(store, "theirs", read_roles(store, [first]).model)


def test_a_newer_run_without_effects_does_not_hide_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store(tmp_path / "s.duckdb")
    run_id = ablated(store, "zero", "loss", [(0.0, 0.1), (0.1, 0.2)])
    other = store.begin_run(RunRecord("ablate", "criteria on labelled examples", "tiny", LAYERS, HEADS)).run_id
    store.finish_run(other)
    assert store.resolve_run(None, "ablate")["run_id"] == other
    assert main(["rank", "--by", "effect", "--store", str(store.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run_id"] == run_id
    heads = SiteHeads(run_id, "self", *(np.arange(ALL) // HEADS, np.arange(ALL) % HEADS, np.zeros(ALL, int)), 1)
    _, runs = read_head_tables(store, store.resolve_run(run_id, "ablate"), heads)
    assert [run["run_id"] for run in runs.values()] == [run_id]
