"""Importance on labels and target texts equals gates of one in one example at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForSeq2SeqLM, AutoModelForSequenceClassification, PreTrainedModel

from headscan.architectures import ALL, ENCODERS, HEADS, LAYERS
from headscan.cli.main import main
from headscan.cluster.pool import Pool, open_pool
from headscan.model_spec import ModelSpec
from headscan.runs.model_identity import identify
from headscan.runs.run_context import Run
from headscan.settings.corpus_settings import CorpusSpec, ExamplesSpec, TokenConfig
from headscan.steps.corpus_step import CorpusRunError
from headscan.steps.importance import Importance
from headscan.steps.run_corpus import CorpusRunResult
from headscan.steps.run_importance import run_importance
from headscan.store.store import Store
from headscan.texts.labelled_texts import LabelledText, read_labelled
from tests.jobs.cli.test_cli import fails
from tests.jobs.conftest import THREADS
from tests.jobs.steps.labelled_models import LABELLED, TRANSLATED, save_classifier, save_translator, write_lines


def config_of(folder: Path, family: str, **settings: object) -> Importance:
    classifies = family in ENCODERS
    save = save_classifier if classifies else save_translator
    model = save(folder / family, family)
    data = write_lines(folder / "d.tsv", LABELLED if classifies else TRANSLATED)
    return Importance(ModelSpec(str(model)), data=ExamplesSpec(str(data)), shard_size=5, **settings)  # type: ignore[arg-type]


def run(config: Importance, store: Store) -> CorpusRunResult:
    return run_importance(config, Run(config.model, store, lambda _: open_pool(config.model, THREADS)))


def model_of(config: Importance, family: str) -> PreTrainedModel:
    auto = AutoModelForSequenceClassification if family in ENCODERS else AutoModelForSeq2SeqLM
    return auto.from_pretrained(config.model.source).eval()


def plain_loss(model: PreTrainedModel, text: LabelledText) -> Tensor:
    """The loss of one example, without padding."""
    ids, target = torch.tensor([text.ids]), torch.tensor(text.target_ids)
    if not model.config.is_encoder_decoder:
        return F.cross_entropy(model(input_ids=ids).logits, target)
    start = torch.tensor([model.generation_config.decoder_start_token_id])
    decoder = torch.cat([start, target[:-1]])[None]
    return F.cross_entropy(model(input_ids=ids, decoder_input_ids=decoder).logits[0], target)


def oracle(model: PreTrainedModel, family: str, site: str, text: LabelledText) -> np.ndarray:
    """Derivatives (layers, heads) by real gates of 1 on the inputs of the output projections."""
    gates = torch.ones(LAYERS, HEADS, requires_grad=True)
    handles = []
    for layer in range(LAYERS):

        def gate(_: nn.Module, args: tuple[Tensor], layer: int = layer) -> tuple[Tensor]:
            return ((args[0].unflatten(-1, (HEADS, -1)) * gates[layer, :, None]).flatten(-2),)

        name = ALL[family].projection_of(layer, site)
        handles.append(model.get_submodule(name).register_forward_pre_hook(gate))
    plain_loss(model, text).backward()
    for handle in handles:
        handle.remove()
    assert gates.grad is not None
    return gates.grad.numpy()


@pytest.mark.parametrize(
    ("family", "sites"),
    [
        ("bert", ["self"]),
        ("t5", ["encoder", "self", "cross"]),
        pytest.param("distilbert", ["self"], marks=pytest.mark.slow),
        pytest.param("roberta", ["self"], marks=pytest.mark.slow),
        pytest.param("bart", ["encoder", "self", "cross"], marks=pytest.mark.slow),
        pytest.param("marian", ["encoder", "self", "cross"], marks=pytest.mark.slow),
    ],
)
def test_rows_equal_gates_on_one_example(family: str, sites: list[str], tmp_path: Path, store: Store) -> None:
    config = config_of(tmp_path, family)
    run_id = run(config, store).run_id
    texts = read_labelled(config.data, config.model, identify(config.model)).texts
    model = model_of(config, family)
    for site in sites:
        found = store.query(
            "select gate_gradient as g from head_importance where run_id = ? and site = ?"
            " order by sequence, layer, head",
            [run_id, site],
        )["g"].to_numpy()
        ours = found.reshape(len(texts), LAYERS, HEADS)
        assert np.abs(ours).max() > 1e-3
        for text in texts[:4]:
            expected = oracle(model, family, site, text)
            np.testing.assert_allclose(ours[text.index], expected, rtol=2e-3, atol=2e-6)


def refuse(_: ModelSpec) -> Pool:
    raise AssertionError("no replica is needed")


def test_other_labels_are_another_run_and_the_same_ones_are_done(tmp_path: Path, store: Store) -> None:
    config = config_of(tmp_path, "bert")
    done = run(config, store)
    assert (done.measured, done.skipped) == (3, 0)
    assert run_importance(config, Run(config.model, store, refuse)) == CorpusRunResult(done.run_id, True)
    write_lines(tmp_path / "d.tsv", [line.replace("good", "bad") for line in LABELLED])
    assert run(config, store).run_id != done.run_id


def test_settings_out_of_range_are_named() -> None:
    with pytest.raises(CorpusRunError, match="Choose mean or sum"):
        Importance(ModelSpec("m"), data=ExamplesSpec("d"), reduction="max")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "without_effect", [{"corpus": CorpusSpec("c")}, {"recall_prompts": 4}, {"tokens": TokenConfig(64, mode="pack")}]
)
def test_settings_of_a_corpus_are_refused_with_examples(without_effect: dict[str, Any]) -> None:
    with pytest.raises(CorpusRunError, match=rf"`{next(iter(without_effect))}` ha(s|ve) no effect with `data`"):
        Importance(ModelSpec("m"), data=ExamplesSpec("d"), **without_effect)


def test_the_verb_reads_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str], model_folder: Path) -> None:
    config, store = config_of(tmp_path, "bert"), str(tmp_path / "s.duckdb")
    command = ["importance", config.model.source, "--store", store]
    fails(capsys, command, "--corpus is required: name a text, or a file of labelled examples as --data")
    fails(capsys, [*command, "--corpus", "c"], "is a classifier, and text has no labels. Set --data")
    fails(capsys, [*command, "--corpus", "c", "--data", "d"], "--corpus has no effect with --data")
    fails(capsys, [*command, "--data", config.data.path, "--mode", "pack"], "--mode has no effect with --data")
    of_decoder = ["importance", str(model_folder), "--store", store, "--data", config.data.path]
    fails(capsys, of_decoder, "has no loss on labels. Load an encoder with a classification head")
    assert main([*command, "--data", config.data.path]) == 0
    assert "1 shards measured, 0 stored before" in capsys.readouterr().out
    assert main(["rank", "--by", "importance", "--store", store, "--limit", "3"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5
