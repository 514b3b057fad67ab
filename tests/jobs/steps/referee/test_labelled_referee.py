"""The referee on labelled examples equals one example, one derivative and one masked head at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import headscan
from headscan.architectures import ENCODERS, HEADS, LAYERS
from headscan.cli.main import main
from headscan.cluster.pool import WorkError
from headscan.errors import InterventionError, UnknownNameError
from headscan.gradients.losses import ClassificationLoss
from headscan.models.loaded_model import LoadedModel
from headscan.report.ablation_costs import site_section
from headscan.runs.model_identity import identify
from headscan.settings.corpus_settings import CorpusSpec, ExamplesSpec
from headscan.settings.evaluation_settings import DEFAULT_CRITERIA, CriteriaComparison
from headscan.settings.saving_settings import PruneTexts
from headscan.steps.ablate import Ablate
from headscan.steps.prune.prune_step import RepairChoice
from headscan.steps.referee.referee_step import Referee
from headscan.store.store import Store
from headscan.texts.labelled_texts import LabelledText, read_labelled
from headscan.verdicts.criterion_points import SitePoint
from tests.jobs.cli.test_cli import fails
from tests.jobs.conftest import THREADS
from tests.jobs.steps.labelled_models import LABELLED, save_classifier, save_translator, write_lines
from tests.jobs.steps.labelled_oracle import Oracle, Refusing, config_of, execute, oracle_importance, zeroed

THIRDS = (1 / 3, 2 / 3, 1.0)
#: A head as the reference names it.
Head = tuple[str, int, int]


def by_value(values: Mapping[Head, float], kinds: list[str], removed: list[Head]) -> list[Head]:
    left = [head for head in values if head not in removed]
    return sorted(left, key=lambda head: (values[head], kinds.index(head[0]), head[1:]))


def referee(config: Ablate, compared: CriteriaComparison, rank_data: ExamplesSpec | None = None) -> Referee:
    return Referee(config.model, data=config.data, metric=config.metric, compared=compared, rank_data=rank_data)


def at(points: list[SitePoint], criterion: str, site: str, share: float) -> SitePoint:
    (found,) = [p for p in points if (p.criterion, p.site) == (criterion, site) and math.isclose(p.share, share)]
    return found


@pytest.mark.parametrize(
    ("family", "iterative"),
    [
        pytest.param("bert", True, marks=pytest.mark.slow),
        pytest.param("bart", False, marks=pytest.mark.slow),
        pytest.param("t5", True, marks=pytest.mark.slow),
        ("bert", False),
    ],
)
def test_shares_remove_the_least_important_heads(family: str, iterative: bool, tmp_path: Path, store: Store) -> None:
    config = config_of(tmp_path, family, "loss")
    compared = CriteriaComparison(("importance",), THIRDS, 0, iterative)
    asked = referee(config, compared, rank_data=config.data)
    run_id, points = execute(asked, store)
    oracle = Oracle(config, family)
    sites = ["self"] if family == "bert" else ["encoder", "self", "cross"]
    curves = sites if family == "bert" else [*sites, "all"]
    assert [(p.site, p.share) for p in points] == [(site, share) for site in sorted(curves) for share in THIRDS]
    before = oracle.metric("loss", [])
    for curve in curves:
        kinds = sites if curve == "all" else [curve]
        removed: list[Head] = []
        for share in THIRDS:
            if not removed or iterative:
                importance = oracle_importance(oracle, kinds, removed)
            left = by_value(importance, kinds, removed)
            removed += left[: round(share * len(importance)) - len(removed)]
            point = at(points, "importance", curve, share)
            assert point.heads == set(removed)
            assert point.effect.effect == pytest.approx(oracle.metric("loss", removed) - before, abs=2e-4)
    assert execute(asked, store, Refusing(config.model, THREADS)) == (run_id, points)


@pytest.mark.parametrize("family", [pytest.param("bart", marks=pytest.mark.slow), "bert"])
def test_effects_scores_and_entropy_order_heads(family: str, tmp_path: Path, store: Store) -> None:
    """Measured on one example at a time, without padding."""
    config = config_of(tmp_path, family, "loss")
    names = ("effect", "output_norm_ln", "entropy", "importance_entropy", "importance_ln")
    _, points = execute(referee(config, CriteriaComparison(names, (0.5,), 0), rank_data=config.data), store)
    oracle = Oracle(config, family)
    lm = headscan.load(config.model.source, device="cpu", dtype="float32")
    for kind in lm.grid.kinds:
        gradients = torch.zeros(LAYERS, HEADS)
        for (_, layer, head), value in oracle_importance(oracle, [kind], []).items():
            gradients[layer, head] = value / len(oracle.texts)
        statistics = {name: torch.zeros(LAYERS, HEADS) for name in ("output_norm", "entropy", "relative", "effect")}
        for text in oracle.texts:
            ids, target = torch.tensor([text.ids]), torch.tensor([text.target_ids])
            inputs = {"input_ids": ids}
            if family not in ENCODERS:
                start = torch.tensor([[oracle.model.generation_config.decoder_start_token_id]])
                inputs["decoder_input_ids"] = torch.cat([start, target[:, :-1]], 1)
            found = headscan.collect(lm.at(kind), **inputs, statistics=["output_norm", "entropy"])
            keys = target.shape[1] if kind == "self" and family not in ENCODERS else ids.shape[1]
            norms = found["output_norm"][0]
            statistics["output_norm"] += norms / norms.mean(-1, keepdim=True)
            statistics["entropy"] += found["entropy"][0]
            statistics["relative"] += found["entropy"][0] / math.log(keys)
        for layer in range(LAYERS):
            for head in range(HEADS):
                own = torch.tensor([loss_of(oracle, text, [(kind, layer, head)]) for text in oracle.texts])
                statistics["effect"][layer, head] = float(own.mean())

        def scaled(values: torch.Tensor) -> torch.Tensor:
            return (values - values.min()) / (values.max() - values.min())

        expected = {
            "effect": statistics["effect"],
            "output_norm_ln": statistics["output_norm"],
            "entropy": statistics["entropy"],
            "importance_ln": gradients / gradients.norm(dim=1, keepdim=True),
            "importance_entropy": 0.5 * scaled(gradients) + 0.5 * (1 - scaled(statistics["relative"])),
        }
        for name, values in expected.items():
            order = values.flatten().argsort()[: LAYERS * HEADS // 2].tolist()
            chosen = {(kind, place // HEADS, place % HEADS) for place in order}
            assert at(points, name, kind, 0.5).heads == chosen, (name, kind)


@pytest.mark.parametrize("wrong", [math.inf, math.nan])
def test_losses_that_are_not_finite_are_refused(
    wrong: float, tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One example without a loss would else change the mean of a head, or vanish from it."""
    losses, calls = ClassificationLoss.losses, count(1)

    def broken(self: ClassificationLoss, lm: LoadedModel) -> torch.Tensor:
        found = losses(self, lm)
        if next(calls) == 3:
            found[0] = wrong
        return found

    monkeypatch.setattr(ClassificationLoss, "losses", broken)
    config = config_of(tmp_path, "bert", "loss")
    asked = referee(config, CriteriaComparison(("effect",), (0.5,), 0), rank_data=config.data)
    with pytest.raises(WorkError, match=r"NaN or infinite losses with or without head 0:1, self attention: 1 of"):
        execute(asked, store)


def loss_of(oracle: Oracle, text: LabelledText, heads: list[Head]) -> float:
    with torch.no_grad(), zeroed(oracle.model, oracle.family, heads):
        return float(oracle.loss_of(text)) / len(text.target_ids)


def test_halves_rank_and_judge_different_texts_and_new_shares_join(tmp_path: Path, store: Store) -> None:
    config = config_of(tmp_path, "bert")
    run_id, points = execute(referee(config, CriteriaComparison(("importance_ln",), (0.5,), 2)), store)
    assert config.data is not None
    texts = read_labelled(config.data, config.model, identify(config.model))
    answered = store.query("select distinct question from answers order by 1")["question"].to_pylist()
    assert answered == [text.index for text in texts.halves()[1]] and len(answered) == 6
    assert [point.curve for point in points] == [("importance_ln", ""), ("random", "seed 0"), ("random", "seed 1")]
    assert {len(point.heads) for point in points} == {LAYERS * HEADS // 2} and points[0].metric == "accuracy"
    assert len({point.heads for point in points}) == 3
    again, curve = execute(referee(config, CriteriaComparison(("importance_ln",), (0.5, 1.0), 0)), store)
    assert again == run_id and curve[0] == points[0] and [point.share for point in curve] == [0.5, 1.0]


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    config = config_of(tmp_path, "bert")
    with pytest.raises(UnknownNameError, match="gate"):
        referee(config, CriteriaComparison(DEFAULT_CRITERIA))
    assert referee(config, CriteriaComparison()).criteria == (*DEFAULT_CRITERIA[:4], "effect")
    asked = referee(config, CriteriaComparison())
    ignored: dict[str, Any] = {"recall": None, "max_loss": 0.1, "share_prefixes": False, "repair": RepairChoice("o")}
    for name, value in ignored.items():
        with pytest.raises(InterventionError, match=f"^`{name}` has no effect with `data`: leave it out$"):
            replace(asked, **{name: value})
    with pytest.raises(InterventionError, match=r"^of `texts` only `max_tokens` has an effect with `data`: leave out"):
        replace(asked, texts=PruneTexts(CorpusSpec("texts/"), max_tokens=64))
    without: dict[str, Any] = {"metric": "loss", "rank_data": config.data}
    for name, value in without.items():
        with pytest.raises(InterventionError, match=f"^`{name}` has no effect without `data`: leave it out$"):
            Referee(config.model, texts=PruneTexts(CorpusSpec("texts/")), **{name: value})
    for wrong in ({"criteria": ()}, {"shares": (1.2,)}, {"controls": -1}):
        with pytest.raises(InterventionError):
            CriteriaComparison(**wrong)  # type: ignore[arg-type]


def test_the_verb_prints_a_table_for_each_site(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_translator(tmp_path / "m", "marian")
    data = write_lines(tmp_path / "d.tsv", [f"{line.split(chr(9))[0]}\tout {n}" for n, line in enumerate(LABELLED)])
    words = ["referee", model, "--data", data, "--store", tmp_path / "s.duckdb", "--metric", "loss", "--controls", "1"]
    words += ["--criteria", "importance,output_norm_ln", "--shares", "0.5,1", "--device", "cpu"]
    assert main([*map(str, words)]) == 0
    out = capsys.readouterr().out
    for title in ("Heads of encoder", "Heads of self", "Heads of cross", "Heads of all sites."):
        assert out.count(title) == 2  # losses, and agreement
    assert out.count("random heads, mean") == 4 and "Without ablation: loss" in out
    assert main([*map(str, words), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = found["rows"]
    assert {(row["site"], row["criterion"], row["share"]) for row in rows} >= {("cross", "importance", 1.0)}
    everything = {row["value"] for row in rows if row["site"] == "all" and row["share"] == 1.0}
    assert max(everything) - min(everything) < 1e-5  # all heads are gone, by whichever criterion
    store = Store(tmp_path / "s.duckdb")
    (run,) = store.runs("ablate")
    section = site_section(store, run)
    assert section is not None and site_section(store, run | {"weights_hash": "other"}) is None
    assert site_section(store, run | {"model_revision": "other"}) is None
    cell = next(f"{row['value']:+.3f} [" for row in rows if (row["site"], row["criterion"]) == ("cross", "importance"))
    assert cell in section and section.count("random, seed 0") == 4 and "heads of cross attention" in section


def test_faults_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_lines(tmp_path / "d.tsv", LABELLED)
    start = ["referee", save_classifier(tmp_path / "m"), "--store", tmp_path / "s.duckdb"]
    fails(capsys, [*start, "--data", data, "--repair", "o"], "--repair has no effect with --data")
    fails(capsys, [*start, "--data", data, "--criteria", "gate"], "unknown criterion of labelled examples 'gate'")
    fails(capsys, ["referee", "demo", *start[2:], "--data", data], "has no loss on labels")
    fails(capsys, [*start, "--corpus", "c", "--metric", "loss"], "--metric has no effect without --data")
    fails(capsys, [*start, "--corpus", "c", "--rank-data", data], "--rank-data has no effect without --data")
