"""From a loaded model to a plan: the KV bytes are those of the cache that the model fills."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import headscan
from headscan.architectures import ENCODERS, FAMILIES
from headscan.cli.main import main
from headscan.errors import UnsupportedModelError
from headscan.models.loaded_model import LoadedModel, Sharding
from headscan.plans import PlanError, planned_model
from headscan.runs import model_identity
from headscan.runs.model_identity import model_facts
from tests.instrument.sizing.test_kv_cache import real_caches
from tests.jobs.conftest import make_tokenizer
from tests.small_models import distinct_first, make_loaded, make_model


def run_row(lm: LoadedModel) -> dict[str, Any]:
    """Return a run's record of its model, as read from the store."""
    facts = model_facts(lm, None)
    names = ("model_revision", "model_config_hash", "weights_hash")
    return {
        "run_id": "r0",
        "model": lm.source,
        "dtype": facts.dtype,
        "num_layers": facts.grid.num_layers,
        "grid": json.loads(json.dumps(facts.sites)),
    } | dict.fromkeys(names)


@pytest.mark.parametrize("family", distinct_first([*FAMILIES, *ENCODERS]))
def test_planned_bytes_are_those_of_the_real_cache(family: str) -> None:
    lm = make_loaded(family)
    model, recorded = planned_model(run_row(lm))
    assert recorded
    for tokens in (3, 64):
        real = real_caches(lm.model, tokens).get("self", [(0, 0, 0)] * 3)
        assert {layer.layer: layer.cache_bytes(tokens) for layer in model.layers} == {
            layer.layer: real[layer.layer][0] for layer in model.layers
        }
    assert all(layer.head_dim > 0 for layer in model.layers if layer.type != "uncached")


@pytest.mark.parametrize(
    ("family", "types"),
    [
        ("llama", ["full"] * 3),
        ("falcon-gqa", ["full"] * 3),
        ("mpt", ["full"] * 3),
        ("deepseek_v3", ["latent"] * 3),
        ("minicpm3", ["latent"] * 3),
        ("gemma3n", ["sliding", "full", "shared"]),
        ("gemma4", ["sliding", "full", "shared"]),
        ("llama4", ["sliding", "full", "sliding"]),
        ("bert", ["uncached"] * 3),
    ],
)
def test_types_of_layers(family: str, types: list[str]) -> None:
    model, _ = planned_model(run_row(make_loaded(family)))
    assert [layer.type for layer in model.layers] == types
    for layer in model.layers:
        if layer.kv_bytes is not None:
            assert layer.kv_bytes * layer.num_key_value_heads == layer.cache_bytes_per_token


def test_a_cache_that_cannot_be_found_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: object) -> None:
        raise UnsupportedModelError("no")

    monkeypatch.setattr(model_identity, "find_caches", fails)
    assert not planned_model(run_row(make_loaded("llama")))[1]
    with pytest.raises(PlanError, match="does not record the KV cache, and it does not follow"):
        planned_model(run_row(make_loaded("deepseek_v3")))


@pytest.mark.parametrize("family", ["deepseek_v3", "gemma4"])
def test_offloaded_layers_record_the_same(family: str, tmp_path: Path) -> None:
    make_model(family).save_pretrained(tmp_path)
    sharded = headscan.load(tmp_path, device=Sharding(("cpu",), ((0, 1),), "disk"))
    assert model_facts(sharded, None) == model_facts(headscan.load(tmp_path, device="cpu"), None)


def plan_of(family: str, folder: Path, corpus: Path) -> int:
    """Scan a small model and plan from that, by the command line; the plan's exit code."""
    make_model(family, vocabulary=300).save_pretrained(folder / "model")
    make_tokenizer(300).save_pretrained(folder / "model")
    store = ["--store", str(folder / "s.duckdb")]
    on = ["--corpus", str(corpus), "--device", "cpu", "--sink", "2", "--recent", "8"]
    assert main(["scan", str(folder / "model"), *on, *store]) == 0
    return main(
        ["plan", "--method", "distant_mass", *store, "--sink", "2", "--recent", "8", "--out", str(folder / "plan.json")]
    )


def test_plans_of_models_with_other_caches(tmp_path: Path, corpus_folder: Path) -> None:
    for family in ("gemma4", "gptj"):
        assert plan_of(family, tmp_path / family, corpus_folder) == 0
    gemma4, gptj = (json.loads((tmp_path / family / "plan.json").read_text()) for family in ("gemma4", "gptj"))
    assert {head["layer"] for head in gemma4["heads"] if head["window"]} == {1}
    assert any("the cache of layer 1 is also read by layer 2" in note for note in gemma4["notes"])
    # Layer 0: 19 tokens of 2 heads of 12 + 12 numbers; layer 1: 2 heads of 16 + 16; layer 2: none.
    (long, *_), (other, *_) = (plan["budget"]["lengths"] for plan in (gemma4, gptj))
    assert long["kv_bytes"] == 4 * (19 * 2 * 24 + long["tokens"] * 2 * 32)
    assert other["kv_bytes"] == 4 * other["tokens"] * 3 * 6 * (8 + 8)


def test_a_latent_cache_has_nothing_to_plan(
    tmp_path: Path, corpus_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_of("deepseek_v3", tmp_path, corpus_folder) == 2
    assert "18 KV heads are protected: their layers cache one latent vector a token" in capsys.readouterr().err
    assert not (tmp_path / "plan.json").exists()
