"""Patterns of other tools: written, read back and checked against the consumers' loading logic."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from headscan.cli.main import verb_class
from headscan.cli.option_parser import options_of
from headscan.plans import (
    HeadPlan,
    PlanError,
    allocate,
    imported_scores,
    make_plan,
    own_budget,
    read_pattern,
    write_pattern,
)
from headscan.plans.pattern_files import TABLE_FILES
from headscan.plans.plan_records import PatternFormat
from headscan.store.store import Store
from headscan.windows import Window
from tests.numbers.plan_fixtures import RECENT, SINK, everything, masses, site, write_scan
from tests.small_models import slow
from tests.sources import SHARED

TOKENS = [64, 200]
SAMPLES = SHARED / "reference"
FORMATS = list(TABLE_FILES)


def scan(path: Path, need: np.ndarray, grid: list[dict]) -> tuple[Store, str]:
    return write_scan(path / "s.duckdb", grid, masses(need, TOKENS), TOKENS)


def plan_of(path: Path, need: np.ndarray, grid: list[dict], share: float = 0.5) -> HeadPlan:
    return make_plan(*scan(path, need, grid), window_share=share, sink=SINK, recent=RECENT)


def quantile_mask(path: Path, sparsity: float, seed: int | None) -> np.ndarray:
    """A table as a consumer reads it: clipped, ties broken by noise (None: no noise), cut at the quantile."""
    heads = np.clip(np.loadtxt(path, dtype=float, delimiter="\t"), 0, 1)
    if seed is not None:
        heads = heads + np.random.default_rng(seed).uniform(0, 1e-6, heads.shape)
    if sparsity >= 1:
        return np.zeros(heads.shape, dtype=bool)
    return np.asarray(heads >= np.quantile(heads, sparsity))


def table(folder: Path, name: str, values: object, **config: object) -> Path:
    """Write a table and its configuration, as another tool does."""
    folder.mkdir(parents=True, exist_ok=True)
    np.savetxt(folder / name, np.array(values, dtype=float), delimiter="\t")
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder / name


def test_the_command_line_offers_every_format() -> None:
    formats = options_of(verb_class("export"))["settings.format"].names
    assert formats == ("gguf", "decilm", "layer-types", "vllm", "tensorrt-llm", *FORMATS, "parquet")


def test_a_head_that_looks_far_is_one(tmp_path: Path) -> None:
    need = np.array([[0.0, 0.0, 0.8, 0.0], [0.01, 0.0, 0.0, 0.02]])
    plan = plan_of(tmp_path, need, [site(0, 4, 2), site(1, 4, 2)])
    for format, file in TABLE_FILES.items():
        files = write_pattern(plan, tmp_path / format, format)
        assert [f.name for f in files] == [file, "config.json"]
        assert np.loadtxt(files[0], delimiter="\t").tolist() == [[0, 1], [0, 1]]
        assert json.loads(files[1].read_text()) == {"sink_size": SINK, "recent_size": RECENT, "sparsity": 0.5}
        assert sorted(p.name for p in (tmp_path / format).iterdir()) == sorted(f.name for f in files)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("layers", "heads"), [(4, 8), *slow((12, 8), (32, 8), (80, 8), (28, 4))])
def test_a_plan_survives_its_consumer_and_its_import(
    tmp_path: Path, layers: int, heads: int, format: PatternFormat
) -> None:
    stats = everything(layers, heads, TOKENS)
    store, run_id = write_scan(tmp_path / "s.duckdb", [site(i, heads, heads) for i in range(layers)], stats, TOKENS)
    for share in (0.03, 0.5, 0.77, 1.0):
        plan = make_plan(store, run_id, window_share=share, sink=SINK, recent=RECENT)
        file, _ = write_pattern(plan, tmp_path / "out", format)
        pattern = read_pattern(tmp_path / "out")
        assert pattern.sparsity is not None and (pattern.sink_size, pattern.recent_size) == (SINK, RECENT)
        for seed in (None, 0, 1) if share < 1 else (0,):
            mask = quantile_mask(file, pattern.sparsity, seed)
            assert [(int(a), int(b)) for a, b in np.argwhere(~mask)] == plan.window_heads
        again = make_plan(store, run_id, method="imported", pattern=pattern)
        assert actions(again) == actions(plan)
        assert (again.method, again.calibration.kind) == ("imported", "pattern")


def actions(plan: HeadPlan) -> list[tuple]:
    return [(head.layer, head.kv_head, head.window) for head in plan.heads]


def test_sliding_layers_are_ones_and_stay_full_on_import(tmp_path: Path) -> None:
    store, run_id = scan(tmp_path, np.full((2, 2), 0.5), [site(0, 2, 2), site(1, 2, 2, window=8)])
    plan = make_plan(store, run_id, window_share=1.0, sink=SINK, recent=RECENT)
    write_pattern(plan, tmp_path)
    assert read_pattern(tmp_path).keep.tolist() == [[0, 0], [1, 1]]
    assert actions(make_plan(store, run_id, method="imported", pattern=read_pattern(tmp_path))) == actions(plan)


def test_plans_that_the_formats_cannot_hold_are_refused(tmp_path: Path) -> None:
    need = np.linspace(0.1, 0.8, 8).reshape(2, 4)
    for folder, grid, message in (
        ("a", [site(0, 4, 2), site(1, 4, 4)], "2 and 4 KV heads"),
        ("b", [site(1, 4, 2)], "1 of the 2 layers"),
    ):
        with pytest.raises(PlanError, match=message):
            write_pattern(plan_of(tmp_path / folder, need, grid), tmp_path / folder)
        assert not (tmp_path / folder / "config.json").exists()
    store, run_id = scan(tmp_path / "c", need, [site(0, 4, 4), site(1, 4, 4)])
    plan = make_plan(store, run_id, window_share=0.5, sink=SINK, recent=RECENT)
    wider = dataclasses.replace(plan.heads[0], window=Window(SINK, 512))
    with pytest.raises(PlanError, match=r"4 \+ 16 and 4 \+ 512"):
        write_pattern(dataclasses.replace(plan, heads=(wider, *plan.heads[1:])), tmp_path / "c")
    dropping = make_plan(store, run_id, window_share=0.5, sink=SINK, recent=RECENT, dropped={(0, 0): "verdict"})
    with pytest.raises(PlanError, match="the plan drops 1 KV heads; rlkv has windows only"):
        write_pattern(dropping, tmp_path / "c", "rlkv")
    with pytest.raises(PlanError, match="headkv cannot be written"):
        write_pattern(plan, tmp_path / "c", "headkv")


@pytest.mark.parametrize(
    "held", ['{"model_type": "llama"}', '{"sink_size": 4, "model_type": "llama"}', "[]", "no JSON"]
)
def test_the_configuration_of_a_model_is_not_replaced(held: str, tmp_path: Path) -> None:
    plan = plan_of(tmp_path / "scan", np.linspace(0.1, 0.8, 8).reshape(2, 4), [site(0, 4, 4), site(1, 4, 4)])
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(held)
    with pytest.raises(PlanError, match=r"config\.json has further settings, which would be lost\. Choose another"):
        write_pattern(plan, model)
    assert [file.name for file in model.iterdir()] == ["config.json"]
    assert (model / "config.json").read_text() == held
    (model / "config.json").unlink()
    assert write_pattern(plan, model) == write_pattern(plan, model)  # its own files are replaced


def test_incomplete_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="has 0 tables of heads"):
        read_pattern(tmp_path)
    with pytest.raises(PlanError, match="cannot read"):
        read_pattern(tmp_path / "masks.tsv")
    (tmp_path / "full_attention_heads.tsv").write_text("1.0\t0.0\n1.0\n")
    with pytest.raises(PlanError, match="is not a complete table of numbers"):
        read_pattern(tmp_path)
    (tmp_path / "full_attention_heads.tsv").write_text("1.0\tnan\n1.0\t0.0\n")
    with pytest.raises(PlanError, match="lacks head 1 of layer 0"):
        read_pattern(tmp_path)
    (tmp_path / "full_attention_heads.tsv").write_text("1.0\t0.0\n")
    with pytest.raises(PlanError, match="does not state sink_size and recent_size"):
        read_pattern(tmp_path)
    (tmp_path / "config.json").write_text('{"sink_size": 4, "recent_size": 16, "sparsity": 2}')
    with pytest.raises(PlanError, match=r"sparsity of .* out of range: 2 "):
        read_pattern(tmp_path)
    (tmp_path / "masks.tsv").write_text("")
    with pytest.raises(PlanError, match="has 2 tables of heads"):
        read_pattern(tmp_path)
    with pytest.raises(PlanError, match="is empty"):
        read_pattern(tmp_path / "masks.tsv")
    (tmp_path / "heads.tsv").write_text("1.0\t0.0\n")
    with pytest.raises(PlanError, match="cannot tell the format"):
        read_pattern(tmp_path / "heads.tsv")


def test_tables_as_rlkv_and_prulong_write_them(tmp_path: Path) -> None:
    rlkv = read_pattern(table(tmp_path, "adapter_weights.tsv", [[0.93, -0.01], [1.02, 0.2]]).parent)
    assert (rlkv.format, rlkv.sink_size, rlkv.recent_size, rlkv.sparsity) == ("rlkv", None, None, None)
    assert rlkv.keep.tolist() == [[0.93, 0.0], [1.0, 0.2]]
    with (tmp_path / "masks_sp0.75.tsv").open("w") as file:
        csv.writer(file, delimiter="\t").writerows([[0.0, 0.0], [1.0, 0.0]])
    prulong = read_pattern(tmp_path / "masks_sp0.75.tsv")
    assert (prulong.format, prulong.sparsity, prulong.stated_window_heads) == ("prulong", 0.75, 3)
    for encoding in ("utf-8-sig", "utf-16"):
        (tmp_path / "masks_sp0.75.tsv").write_text("0.0\t0.0\n1.0\t0.0\n", encoding=encoding)
        assert read_pattern(tmp_path / "masks_sp0.75.tsv").keep.tolist() == prulong.keep.tolist()


HALF = [[1, 1, 1, 0], [1, 1, 1, 0]]  # two of eight heads keep little by the usual polarity


@pytest.mark.parametrize("name", ["full_attention_heads.tsv", "adapter_weights.tsv", "masks.tsv"])
def test_inverted_polarity_is_reported_with_the_way_to_import_it(tmp_path: Path, name: str) -> None:
    path = table(tmp_path, name, HALF, sink_size=4, recent_size=16, sparsity=0.75)
    with pytest.raises(PlanError, match=r"inverted polarity: 2 of 8 heads .* sparsity 0.75.*`inverted=True`"):
        read_pattern(path)
    turned = read_pattern(path, inverted=True)
    assert turned.inverted and turned.keep.tolist() == (1 - np.array(HALF)).tolist()
    trusted = read_pattern(path, inverted=False)
    assert not trusted.inverted and trusted.keep.tolist() == HALF
    store, run_id = scan(tmp_path, np.full((2, 4), 0.5), [site(0, 4, 4), site(1, 4, 4)])
    plan = make_plan(store, run_id, method="imported", pattern=turned)
    assert plan.window_heads == [(layer, head) for layer in (0, 1) for head in (0, 1, 2)]
    assert plan.calibration.kind == "pattern" and plan.calibration.inverted and "inverted" in plan.score


def test_inverted_polarity_shows_in_continuous_tables_and_in_names(tmp_path: Path) -> None:
    path = table(tmp_path, "masks_sp0.75.tsv", np.array(HALF) * 0.8 + 0.1)
    with pytest.raises(PlanError, match="inverted polarity"):
        read_pattern(path)
    path = table(tmp_path / "b", "full_attention_heads.tsv", np.ones((2, 4)), sink_size=4, recent_size=16)
    with pytest.raises(PlanError, match=r"inverted polarity: all 8 heads .* window of 4 \+ 16 tokens"):
        read_pattern(path)


def test_counts_that_show_nothing_are_left_alone(tmp_path: Path) -> None:
    balanced = [[1, 0], [0, 1]]
    assert not read_pattern(table(tmp_path / "a", "masks_sp0.5.tsv", balanced)).inverted
    odd = read_pattern(table(tmp_path / "b", "masks_sp0.5.tsv", np.eye(8)))
    assert odd.notes == ("56 of 64 heads of the pattern are 0, but it states sparsity 0.5",)
    smooth = np.linspace(0, 1, 64).reshape(8, 8)
    assert read_pattern(table(tmp_path / "c", "masks_sp0.3.tsv", smooth)).notes == ()


def test_patterns_of_other_models_are_refused(tmp_path: Path) -> None:
    store, run_id = scan(tmp_path, np.full((2, 4), 0.5), [site(0, 4, 2), site(1, 4, 2)])
    for values in (np.eye(2, 4), np.eye(3, 2), np.eye(2, 1)):
        pattern = read_pattern(table(tmp_path / str(values.shape), "masks.tsv", values))
        with pytest.raises(PlanError, match=r"has \d layers of \d KV heads, but tiny has 2 layers, .* 2 KV heads"):
            make_plan(store, run_id, method="imported", pattern=pattern, window_share=0.5)


def headkv(path: Path, means: np.ndarray) -> Path:
    path.write_text(
        json.dumps({f"{i}-{j}": [2 * mean, 0] for i, row in enumerate(means.tolist()) for j, mean in enumerate(row)})
    )
    return path


def test_query_head_scores_are_reduced_to_the_largest_of_a_group(tmp_path: Path) -> None:
    means = np.array([[0.1, 0.4, 0.0, 0.2], [0.0, 0.1, 0.8, 0.0]])
    pattern = read_pattern(headkv(tmp_path / "heads.json", means))
    assert (pattern.format, pattern.heads) == ("headkv", "query_head")
    assert pattern.keep == pytest.approx(means / 0.8)
    store, run_id = scan(tmp_path, np.full((2, 4), 0.5), [site(0, 4, 2), site(1, 4, 2)])
    plan = make_plan(store, run_id, method="imported", pattern=pattern, window_share=0.5)
    assert [head.score for head in plan.heads] == pytest.approx([0.5, 0.25, 0.125, 1.0])
    assert plan.window_heads == [(0, 1), (1, 0)]
    with pytest.raises(PlanError, match="does not state how many heads get a window"):
        make_plan(store, run_id, method="imported", pattern=pattern)


def test_damaged_query_head_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "heads.json"
    for text, message in (
        ("no", "is not JSON"),
        ("[]", "has no head with a score above 0"),
        ('{"0-0": [1], "1-1": [1]}', "lacks query head 1 of layer 0"),
        ('{"0-0": [1], "a": [1]}', "entry 'a'"),
        ('{"0-0": []}', "entry '0-0'"),
    ):
        path.write_text(text)
        with pytest.raises(PlanError, match=message):
            read_pattern(path)


def shape(layers: int, heads: int, kv_heads: int, folder: Path) -> tuple[Store, str]:
    grid = [site(i, heads, kv_heads) for i in range(layers)]
    return write_scan(folder / f"{kv_heads}.duckdb", grid, everything(layers, heads, [64]), [64])


@pytest.mark.slow
@pytest.mark.skipif(not SAMPLES.is_dir(), reason="no published patterns here")
def test_published_tables_are_read_with_high_for_full(tmp_path: Path) -> None:
    shapes = {}
    for folder in sorted(p for p in (SAMPLES / "duo-attention").iterdir() if p.is_dir()):
        pattern = read_pattern(folder)
        shapes[folder.name] = rows, columns = pattern.keep.shape
        assert (pattern.sink_size, pattern.recent_size, pattern.sparsity) == (128, 256, None)
        assert not pattern.inverted and pattern.notes == ()
        raw = np.loadtxt(folder / "full_attention_heads.tsv", delimiter="\t")
        # Training pushes heads towards 0 from an initial 1, so only streaming heads end below 0.
        assert raw.max() <= 1 and raw.min() <= 0
        store, run_id = shape(rows, 32, columns, tmp_path / folder.name)
        for share in (0.25, 0.5):
            plan = make_plan(store, run_id, method="imported", pattern=pattern, window_share=share)
            kept = [pattern.values[h.layer, h.kv_head] for h in plan.heads if h.window is None]
            gone = [pattern.values[h.layer, h.kv_head] for h in plan.heads if h.window is not None]
            assert min(kept) >= max(gone) and len(gone) == share * rows * columns
            assert {h.window for h in plan.heads} - {None} == {Window(128, 256)}
        # Inverted by mistake, the file would state a sparsity that only its inverse has.
        ones = np.argsort(pattern.values, axis=None)[pattern.values.size * 3 // 4 :]
        low = np.ones(pattern.values.size)
        low[ones] = 0
        with pytest.raises(PlanError, match="inverted polarity"):
            read_pattern(
                table(
                    tmp_path,
                    "full_attention_heads.tsv",
                    low.reshape(rows, columns),
                    sink_size=4,
                    recent_size=8,
                    sparsity=0.75,
                )
            )
    assert shapes["Llama-2-7B-32K-Instruct"] == (32, 32) and shapes["Meta-Llama-3.1-8B-Instruct"] == (32, 8)


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="no published patterns here")
def test_published_query_head_scores_are_read_with_high_for_full(tmp_path: Path) -> None:
    store, run_id = shape(32, 32, 8, tmp_path)
    for path in sorted((SAMPLES / "headkv").glob("*.json")):
        pattern = read_pattern(path)
        assert pattern.keep.shape == (32, 32) and pattern.keep.max() == 1
        plan = make_plan(store, run_id, method="imported", pattern=pattern, window_share=0.5)
        # The strongest retrieval head is kept.
        layer, head = np.unravel_index(pattern.values.argmax(), pattern.values.shape)
        assert (int(layer), int(head) // 4) not in plan.window_heads


def test_a_published_pattern_without_a_sparsity_is_cut_at_one_half(tmp_path: Path) -> None:
    store, run_id = scan(tmp_path, np.full((2, 4), 0.5), [site(0, 4, 4), site(1, 4, 4)])
    pattern = read_pattern(table(tmp_path, "adapter_weights.tsv", [[0.9, 0.49, 0.5, 0.1], [1.0, 0.6, -0.1, 0.7]]))
    plan = make_plan(store, run_id, method="imported", pattern=pattern)
    assert plan.window_heads == [(0, 1), (0, 3), (1, 2)]
    scores = imported_scores(plan.model, pattern)
    assert allocate(scores, own_budget(pattern, scores)).window_heads == plan.window_heads
    assert {h.window for h in plan.heads} - {None} == {Window(4, 256)}
