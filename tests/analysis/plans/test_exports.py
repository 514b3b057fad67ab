from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from headscan.analysis.plans.duoattention import export_duoattention, load_duoattention
from headscan.analysis.plans.make_plan import HeadPlan, PlanError, make_plan
from tests.analysis.plan_fixtures import RECENT, SINK, everything, masses, site, write_scan
from tests.sources import ROOT

TOKENS = [64, 200]
SAMPLES = ROOT.parent / "shared" / "reference" / "duo-attention"


def _plan(path: Path, need: np.ndarray, grid: list[dict], share: float = 0.5) -> HeadPlan:
    store, run_id = write_scan(path / "s.duckdb", grid, masses(need, TOKENS), TOKENS)
    return make_plan(store, run_id, window_share=share, sink=SINK, recent=RECENT)


def _consumer_mask(heads: np.ndarray, sparsity: float, seed: int) -> np.ndarray:
    """Numbers to a mask as DuoAttention's loader does: ties broken by noise, cut at the quantile."""
    if sparsity >= 1:
        return np.zeros_like(heads)
    noisy = heads + np.random.default_rng(seed).uniform(0, 1e-6, heads.shape)
    return (noisy >= np.quantile(noisy, sparsity)).astype(float)


def test_a_head_that_looks_far_is_one(tmp_path: Path) -> None:
    need = np.array([[0.0, 0.0, 0.8, 0.0], [0.01, 0.0, 0.0, 0.02]])
    files = export_duoattention(_plan(tmp_path, need, [site(0, 4, 2), site(1, 4, 2)]), tmp_path / "duo")
    assert [f.name for f in files] == ["full_attention_heads.tsv", "config.json"]
    assert np.loadtxt(files[0], delimiter="\t").tolist() == [[0, 1], [0, 1]]
    assert json.loads(files[1].read_text()) == {"sink_size": SINK, "recent_size": RECENT, "sparsity": 0.5}
    assert sorted(p.name for p in (tmp_path / "duo").iterdir()) == ["config.json", "full_attention_heads.tsv"]


@pytest.mark.parametrize(("layers", "heads"), [(32, 8), (80, 8), (28, 4)])
def test_the_consumer_reads_the_plan_back(tmp_path: Path, layers: int, heads: int) -> None:
    stats = everything(layers, heads, TOKENS)
    store, run_id = write_scan(tmp_path / "s.duckdb", [site(i, heads, heads) for i in range(layers)], stats, TOKENS)
    for share in (0.03, 0.5, 0.77, 1.0):
        plan = make_plan(store, run_id, window_share=share, sink=SINK, recent=RECENT)
        export_duoattention(plan, tmp_path)
        pattern = load_duoattention(tmp_path)
        assert pattern.sparsity is not None and (pattern.sink_size, pattern.recent_size) == (SINK, RECENT)
        for seed in range(5):
            mask = _consumer_mask(pattern.heads, pattern.sparsity, seed)
            assert [(int(a), int(b)) for a, b in np.argwhere(mask == 0)] == plan.window_heads


def test_sliding_layers_are_ones(tmp_path: Path) -> None:
    plan = _plan(tmp_path, np.full((2, 2), 0.5), [site(0, 2, 2), site(1, 2, 2, window=8)], share=1.0)
    export_duoattention(plan, tmp_path)
    assert load_duoattention(tmp_path).heads.tolist() == [[0, 0], [1, 1]]


def test_plans_that_the_format_cannot_hold_are_refused(tmp_path: Path) -> None:
    need = np.linspace(0.1, 0.8, 8).reshape(2, 4)
    for folder, grid, message in (
        ("a", [site(0, 4, 2), site(1, 4, 4)], "2 and 4 KV heads"),
        ("b", [site(1, 4, 2)], "1 of the 2 layers"),
    ):
        with pytest.raises(PlanError, match=message):
            export_duoattention(_plan(tmp_path / folder, need, grid), tmp_path / folder)
        assert not (tmp_path / folder / "config.json").exists()
    plan = _plan(tmp_path / "c", need, [site(0, 4, 4), site(1, 4, 4)])
    wider = dataclasses.replace(plan.heads[0], recent=512)
    with pytest.raises(PlanError, match=r"4 \+ 16 and 4 \+ 512"):
        export_duoattention(dataclasses.replace(plan, heads=(wider, *plan.heads[1:])), tmp_path / "c")


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="is not a DuoAttention folder"):
        load_duoattention(tmp_path)
    (tmp_path / "full_attention_heads.tsv").write_text("1.0\t0.0\n1.0\n")
    (tmp_path / "config.json").write_text('{"sink_size": 4, "recent_size": 16}')
    with pytest.raises(PlanError, match="is not a DuoAttention folder"):
        load_duoattention(tmp_path)


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="no published patterns here")
def test_published_patterns_are_read() -> None:
    shapes = {}
    for folder in sorted(p for p in SAMPLES.iterdir() if p.is_dir()):
        pattern = load_duoattention(folder)
        shapes[folder.name] = pattern.heads.shape
        assert pattern.heads.min() >= 0 and pattern.heads.max() <= 1
        assert (pattern.sink_size, pattern.recent_size) == (128, 256)
    assert shapes["Llama-2-7B-32K-Instruct"] == (32, 32) and shapes["Meta-Llama-3.1-8B-Instruct"] == (32, 8)
