"""PEFT models and folders of adapters. PEFT itself is not needed by most tests: its wrappers are imitated."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headscan
from headscan.checkpoints import source_folder
from headscan.errors import ModelLoadError, UnsupportedModelError
from tests.small_models import make_model

IDS = torch.arange(5, 25).view(2, 10)


class Wrapper(nn.Module):
    """What headscan reads of a PEFT model. ``prefix`` holds virtual tokens in front of each text; None adds none."""

    def __init__(self, model: Any, prefix: Tensor | None = None, **fields: object) -> None:
        super().__init__()
        self.inner, self.prefix = model, prefix
        self.peft_config = {"default": SimpleNamespace(peft_type=SimpleNamespace(value="PROMPT_TUNING"), **fields)}

    def get_base_model(self) -> nn.Module:
        return self.inner

    def forward(self, input_ids: Tensor) -> Any:
        if self.prefix is None:
            return self.inner(input_ids=input_ids)
        words = self.inner.get_input_embeddings()(input_ids)
        return self.inner(inputs_embeds=torch.cat([self.prefix.expand(len(words), -1, -1), words], 1))


def test_virtual_tokens_are_refused() -> None:
    model = make_model("llama")
    wrapper = Wrapper(model, torch.randn(1, 3, 48))
    with pytest.raises(
        UnsupportedModelError, match=r"^Wrapper computes more than its base .*\(PROMPT_TUNING\), such as"
    ):
        headscan.load(wrapper)  # type: ignore[arg-type]


def test_choices_by_the_input_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="computes more than its base model"):
        headscan.load(Wrapper(make_model("llama"), alora_invocation_tokens=[3]))  # type: ignore[arg-type]


def test_a_wrapper_that_only_calls_its_base_is_measured() -> None:
    model = make_model("llama")
    lm = headscan.load(Wrapper(model))  # type: ignore[arg-type]
    expected = headscan.collect(headscan.load(make_model("llama")), IDS)["entropy"]
    assert lm.model is model and torch.equal(headscan.collect(lm, IDS)["entropy"], expected)


@pytest.fixture
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADSCAN_CACHE", str(tmp_path / "cache"))
    make_model("llama").save_pretrained(tmp_path / "base")
    folder = tmp_path / "adapter"
    folder.mkdir()
    facts = {"base_model_name_or_path": str(tmp_path / "base"), "peft_type": "LORA", "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    return folder


def test_an_adapter_without_peft_names_the_package(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_folder, "find_spec", lambda name: None)
    with pytest.raises(
        ModelLoadError, match=r"holds an adapter of .*base, which needs the package peft\. Run `pip inst"
    ):
        headscan.load(adapter)


def test_an_adapter_without_a_base_model_is_refused(adapter: Path) -> None:
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"adapter_config\.json names no base model"):
        headscan.load(adapter)


def test_an_adapter_is_merged_once(adapter: Path) -> None:
    peft = pytest.importorskip("peft")
    base = make_model("llama")
    targets = ["q_proj", "v_proj", "o_proj"]
    config = peft.LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False)
    base.config.name_or_path = base.name_or_path = str(adapter.parent / "base")
    adapted = peft.get_peft_model(base, config).eval()
    adapted.save_pretrained(adapter)
    expected = headscan.collect(headscan.load(adapted), IDS)
    lm = headscan.load(adapter)
    for name, values in headscan.collect(lm, IDS).items():
        torch.testing.assert_close(values, expected[name], rtol=1e-4, atol=1e-5, msg=name)
    assert headscan.load(adapter).source == lm.source != str(adapter)


def test_an_adapter_of_virtual_tokens_is_refused(adapter: Path) -> None:
    peft = pytest.importorskip("peft")
    base = make_model("llama")
    base.config.name_or_path = base.name_or_path = str(adapter.parent / "base")
    config = peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    peft.get_peft_model(base, config).save_pretrained(adapter)
    with pytest.raises(ModelLoadError, match=r"adds virtual tokens to .*base \(PREFIX_TUNING\)"):
        headscan.load(adapter)
