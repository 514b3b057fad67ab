"""The table of single heads equals one example and one masked head at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sacrebleu
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForSeq2SeqLM, AutoModelForSequenceClassification, PreTrainedModel

from headscan.analysis.effects.head_effects import HeadEffect, read_effects
from headscan.analysis.schema.effect_tables import ALL_BUT_ONE, EACH
from headscan.analysis.store.store import Store
from headscan.cluster.pools.in_process import InProcessPool
from headscan.errors import InterventionError
from headscan.model_spec import ModelSpec
from headscan.pipelines.ablate_labelled.iterative_removal import RemovalPlan, remove_iteratively
from headscan.pipelines.ablate_labelled.run_arms import LabelledConfig
from headscan.pipelines.ablate_labelled.single_head_table import labelled_effects
from headscan.pipelines.labelled.example_file import DataSpec
from headscan.pipelines.labelled.labelled_texts import LabelledText, read_labelled
from headscan.pipelines.runs.identity import identify
from headscan.testing.families import ALL, ENCODERS
from headscan.testing.family import HEADS, LAYERS
from tests.pipelines.conftest import THREADS
from tests.pipelines.labelled.labelled_models import LABELLED, TRANSLATED, save_classifier, save_translator, write_lines


@contextmanager
def zeroed(model: PreTrainedModel, family: str, heads: list[tuple[str, int, int]]) -> Iterator[None]:
    """Ablate (site, layer, head) by plain hooks."""
    handles = []
    for site, layer, head in heads:

        def zero(_: nn.Module, args: tuple[Tensor], head: int = head) -> tuple[Tensor]:
            parts = args[0].clone().unflatten(-1, (HEADS, -1))
            parts[..., head, :] = 0
            return (parts.flatten(-2),)

        handles.append(model.get_submodule(ALL[family].projection_of(layer, site)).register_forward_pre_hook(zero))
    yield
    for handle in handles:
        handle.remove()


class Oracle:
    """One example at a time, without padding."""

    def __init__(self, config: LabelledConfig, family: str) -> None:
        auto = AutoModelForSequenceClassification if family in ENCODERS else AutoModelForSeq2SeqLM
        identity = identify(config.model)
        self.model, self.family, self.tokenizer = (
            auto.from_pretrained(config.model.source).eval(),
            family,
            identity.tokenizer,
        )
        self.texts = read_labelled(config.data, config.model, identity).texts
        self.longest = max(len(text.target_ids) for text in self.texts)

    @torch.no_grad()
    def metric(self, name: str, heads: list[tuple[str, int, int]]) -> float:
        with zeroed(self.model, self.family, heads):
            return METRICS[name](self, self.texts)

    def loss_of(self, text: LabelledText) -> Tensor:
        ids, target = torch.tensor([text.ids]), torch.tensor(text.target_ids)
        if self.family in ENCODERS:
            return F.cross_entropy(self.model(input_ids=ids).logits, target)
        start = torch.tensor([self.model.generation_config.decoder_start_token_id])
        decoder = torch.cat([start, target[:-1]])[None]
        logits = self.model(input_ids=ids, decoder_input_ids=decoder).logits[0]
        return F.cross_entropy(logits, target, reduction="sum")

    def write(self, text: LabelledText) -> str:
        out: Any = self.model.generate(  # type: ignore[operator]
            torch.tensor([text.ids]), num_beams=1, do_sample=False, max_new_tokens=2 * self.longest + 8
        )
        return self.tokenizer.decode(out[0], skip_special_tokens=True).strip()

    def loss(self, texts: tuple[LabelledText, ...]) -> float:
        return float(sum(self.loss_of(text) for text in texts)) / sum(len(text.target_ids) for text in texts)

    def accuracy(self, texts: tuple[LabelledText, ...]) -> float:
        chosen = [int(self.model(input_ids=torch.tensor([text.ids])).logits.argmax()) for text in texts]
        return float(np.mean([(number,) == text.target_ids for number, text in zip(chosen, texts, strict=True)]))

    def bleu(self, texts: tuple[LabelledText, ...]) -> float:
        return sacrebleu.corpus_bleu([self.write(text) for text in texts], [[text.target for text in texts]]).score


METRICS: dict[str, Callable[[Oracle, tuple[LabelledText, ...]], float]] = {
    "loss": Oracle.loss,
    "accuracy": Oracle.accuracy,
    "bleu": Oracle.bleu,
}


def config_of(folder: Path, family: str, metric: str | None = None) -> LabelledConfig:
    save, lines = (save_classifier, LABELLED) if family in ENCODERS else (save_translator, TRANSLATED)
    model = save(folder / family, family)
    config = LabelledConfig(
        ModelSpec(str(model)), DataSpec(str(write_lines(folder / "d.tsv", lines))), metric, batch_tokens=200
    )
    if metric != "bleu" or family in ENCODERS:
        return config
    # The beginnings of the model's own outputs: on other targets a random model has a BLEU of 0.
    oracle = Oracle(config, family)
    written = zip(lines, oracle.texts, strict=True)
    rows = [{"source": line.split("\t")[0], "target": oracle.write(text)[:30] or "x"} for line, text in written]
    return replace(config, data=DataSpec(str(write_lines(folder / "d.jsonl", [json.dumps(row) for row in rows]))))


def pool_of(config: LabelledConfig) -> InProcessPool:
    return InProcessPool(config.model, THREADS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "metric", "sites"),
    [
        ("bert", "accuracy", ["self"]),
        pytest.param("bert", "loss", ["self"], marks=pytest.mark.slow),
        pytest.param("t5", "loss", ["encoder", "self", "cross"], marks=pytest.mark.slow),
        pytest.param("bart", "bleu", ["encoder", "self", "cross"], marks=pytest.mark.slow),
        pytest.param("marian", "loss", ["encoder", "self", "cross"], marks=pytest.mark.slow),
    ],
)
def test_effects_equal_one_masked_head_at_a_time(
    family: str, metric: str, sites: list[str], tmp_path: Path, store: Store
) -> None:
    config = config_of(tmp_path, family, metric)
    run_id, effects = labelled_effects(config, store, pool_of(config))
    oracle = Oracle(config, family)
    assert sorted({effect.site for effect in effects}) == sorted(sites)
    assert len(effects) == len(sites) * LAYERS * HEADS and {effect.metric for effect in effects} == {metric}
    before = oracle.metric(metric, [])
    assert effects[0].baseline == pytest.approx(before, abs=1e-4)
    for effect in effects[:: 1 if metric == "accuracy" else 5]:
        after = oracle.metric(metric, [(effect.site, effect.layer, effect.head)])
        assert effect.effect == pytest.approx(after - before, abs=1e-4)
    assert max(abs(effect.effect) for effect in effects) > 0.01
    assert store.resolve_run(run_id, "ablate")["status"] == "finished"


def key(effect: HeadEffect) -> tuple[str, str, int, int]:
    return effect.mode, effect.site, effect.layer, effect.head


class Refusing(InProcessPool):
    def map(self, task: Any, items: Any) -> Any:
        items = list(items)
        assert not any("group" in getattr(item, "name", "") for item in items), "an arm runs again"
        return super().map(task, items)


@pytest.mark.slow
def test_all_but_one_joins_the_run_and_nothing_runs_again(tmp_path: Path, store: Store) -> None:
    config = config_of(tmp_path, "bert", "loss")
    run_id, first = labelled_effects(config, store, pool_of(config))
    again, both = labelled_effects(config, store, pool_of(config), (EACH, ALL_BUT_ONE))
    assert again == run_id and len(first) == LAYERS * HEADS
    layers = [effect for effect in both if effect.mode == ALL_BUT_ONE]
    assert [key(effect) for effect in both if effect.mode == EACH] == [key(effect) for effect in first]
    assert [effect.layer for effect in layers] == list(range(LAYERS))
    assert labelled_effects(config, store, Refusing(config.model, THREADS), (EACH, ALL_BUT_ONE))[1] == both
    assert read_effects(store, run_id, ALL_BUT_ONE) == layers
    kept = layers[0]
    oracle = Oracle(config, "bert")
    others = [("self", kept.layer, head) for head in range(HEADS) if head != kept.head]
    rows = store.query(
        "select value from arm_results join arms using (arm_id) where run_id = ? and name = ?",
        [run_id, f"self all but {kept.layer}:{kept.head}"],
    )
    assert rows["value"][0].as_py() == pytest.approx(oracle.metric("loss", others), abs=1e-4)


def test_metrics_that_targets_lack_are_refused(tmp_path: Path, store: Store) -> None:
    config = config_of(tmp_path, "bert", "bleu")
    with pytest.raises(InterventionError, match=r"metric 'bleu' of class targets \(limit accuracy, loss\)"):
        labelled_effects(config, store, pool_of(config))


@pytest.mark.parametrize(
    ("family", "rescore"),
    [
        ("bert", True),
        pytest.param("bart", False, marks=pytest.mark.slow),
        pytest.param("t5", True, marks=pytest.mark.slow),
    ],
)
def test_steps_remove_the_least_important_heads(family: str, rescore: bool, tmp_path: Path, store: Store) -> None:
    config = config_of(tmp_path, family, "loss")
    plan = RemovalPlan("importance", 3, rescore, DataSpec(config.data.path))
    run_id, points = remove_iteratively(config, plan, store, pool_of(config))
    oracle = Oracle(config, family)
    sites = ["self"] if family == "bert" else ["encoder", "self", "cross"]
    curves = sites if family == "bert" else [*sites, "all"]
    assert [(point.site, point.step) for point in points] == [(c, s) for c in sorted(curves) for s in (1, 2, 3)]
    before = oracle.metric("loss", [])
    for curve in curves:
        kinds = sites if curve == "all" else [curve]
        removed: list[tuple[str, int, int]] = []
        for step in (1, 2, 3):
            if step == 1 or rescore:
                importance = oracle_importance(oracle, kinds, removed)
            left = [head for head in importance if head not in removed]
            left.sort(key=lambda head: (importance[head], kinds.index(head[0]), head[1:]))
            removed += left[: round(step * len(importance) / 3) - len(removed)]
            point = next(p for p in points if (p.site, p.step) == (curve, step))
            assert (point.heads, point.share) == (len(removed), pytest.approx(step / 3))
            assert point.effect.effect == pytest.approx(oracle.metric("loss", removed) - before, abs=2e-4)
    assert remove_iteratively(config, plan, store, Refusing(config.model, THREADS)) == (run_id, points)


def oracle_importance(
    oracle: Oracle, kinds: list[str], removed: list[tuple[str, int, int]]
) -> dict[tuple[str, int, int], float]:
    """Mean absolute derivative by gates after ablated heads, one example at a time."""
    gates = {kind: torch.ones(LAYERS, HEADS, requires_grad=True) for kind in kinds}
    model, total = oracle.model, {kind: torch.zeros(LAYERS, HEADS) for kind in kinds}
    with zeroed(model, oracle.family, removed):
        handles = []
        for kind in kinds:
            for layer in range(LAYERS):

                def gate(_: nn.Module, args: tuple[Tensor], kind: str = kind, layer: int = layer) -> tuple[Tensor]:
                    return ((args[0].unflatten(-1, (HEADS, -1)) * gates[kind][layer, :, None]).flatten(-2),)

                name = ALL[oracle.family].projection_of(layer, kind)
                handles.append(model.get_submodule(name).register_forward_pre_hook(gate))
        for text in oracle.texts:
            loss = oracle.loss_of(text) / len(text.target_ids)
            for kind, found in zip(kinds, torch.autograd.grad(loss, list(gates.values())), strict=True):
                total[kind] += found.abs()
        for handle in handles:
            handle.remove()
    return {
        (kind, layer, head): float(total[kind][layer, head])
        for kind in kinds
        for layer in range(LAYERS)
        for head in range(HEADS)
    }


def test_halves_rank_and_judge_different_texts(tmp_path: Path, store: Store) -> None:
    config = config_of(tmp_path, "bert")
    run_id, points = remove_iteratively(config, RemovalPlan(steps=2), store, pool_of(config))
    texts = read_labelled(config.data, config.model, identify(config.model))
    asked = store.query("select distinct question from answers order by 1")["question"].to_pylist()
    assert asked == [text.index for text in texts.halves()[1]] and len(asked) == 6
    assert [point.share for point in points] == [0.5, 1.0] and points[0].metric == "accuracy"
    for wrong in ({"by": "loss"}, {"steps": 0}):
        with pytest.raises(InterventionError):
            RemovalPlan(**wrong)  # type: ignore[arg-type]
    assert store.resolve_run(run_id, "ablate")["config"]["iterative"]["steps"] == 2
