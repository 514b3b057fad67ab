"""Bytes of backward passes before loading are those that torch counts on the loaded model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import headscan
from headscan.errors import UnsupportedModelError
from headscan.gradients.head_importance import GRAPH_BYTES
from headscan.kv import damage_bytes
from headscan.kv.damage_bytes import backward_bytes
from headscan.model_spec import ModelSpec
from tests.benchmarks.overhead import make_model, peak_bytes
from tests.small_models import make_model as small_model


@pytest.mark.parametrize(("layers", "vocabulary"), [(4, 128), (8, 128), (4, 16384)])
def test_bytes_equal_those_of_a_measured_pass(layers: int, vocabulary: int, tmp_path: Path) -> None:
    lm = make_model("tiny", 1024, "cpu", torch.float32, layers=layers, vocabulary=vocabulary)
    lm.model.save_pretrained(tmp_path)
    weights = sum(parameter.nbytes for parameter in lm.model.parameters())
    ids = torch.randint(0, 100, (1, 1024))
    measured = peak_bytes(lm, lambda: headscan.kv_damage(lm, ids)) - weights
    of_sequence, of_loss = backward_bytes(ModelSpec(str(tmp_path)), 1024)
    assert 1.0 <= (of_sequence + of_loss) / measured < 1.5
    importance = peak_bytes(lm, lambda: headscan.importance(lm, ids)) - weights
    assert importance <= of_sequence + of_loss + GRAPH_BYTES


def test_bytes_grow_with_the_length(tmp_path: Path) -> None:
    make_model("tiny", 8192, "cpu", torch.float32).model.save_pretrained(tmp_path)
    spec = ModelSpec(str(tmp_path))
    short, long = (backward_bytes(spec, tokens)[0] for tokens in (4096, 8192))
    assert long == pytest.approx(2 * short, rel=0.1)


def test_models_that_cannot_run_without_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks_off(*_: object) -> None:
        raise RuntimeError("asks for the contents of tensors")

    small_model("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(damage_bytes, "run_forward", breaks_off)
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM cannot be sized on the meta device"):
        damage_bytes.backward_bytes(ModelSpec(str(tmp_path)), 64)
