"""Damaged configurations of pruned models are refused by the name of the field, before anything is built."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import headscan
from headscan.errors import ModelLoadError
from headscan.model_spec import ModelSpec
from headscan.sizing.model_sizes import model_sizes
from tests.instrument.pruning.test_slicing import heads_of_layer
from tests.small_models import load_saved

Fields = dict[str, Any]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of 6 query and 2 KV heads: layer 0 keeps 2 to 5, layer 1 0 to 2, layer 2 none."""
    folder = tmp_path_factory.mktemp("hostile")
    lm = load_saved("llama", folder / "whole")
    removed = [(0, 0), (0, 1), (1, 3), (1, 4), (1, 5), *heads_of_layer(lm, 2)]
    headscan.save_pruned(headscan.slice_heads(lm, removed), folder / "model")
    return folder / "model"


def at(layer: str, **fields: Any) -> Callable[[Fields], None]:
    return lambda config: config["per_layer_config"][layer].update(fields)


def top(**fields: Any) -> Callable[[Fields], None]:
    return lambda config: config.update(fields)


def without(*path: str) -> Callable[[Fields], None]:
    def change(config: Fields) -> None:
        for key in path[:-1]:
            config = config[key]
        del config[path[-1]]

    return change


def moved(old: str, new: str) -> Callable[[Fields], None]:
    return lambda config: config["per_layer_config"].update({new: config["per_layer_config"].pop(old)})


def everywhere(config: Fields) -> None:
    config.update(num_attention_heads=10**9, head_dim=8)
    for layer in config["per_layer_config"].values():
        layer.update(original_heads=10**9)


def swapped(config: Fields) -> None:
    layers = config["per_layer_config"]
    layers["0"], layers["2"] = layers["2"], layers["0"]


#: Each damage, and the field that the error names.
CASES: dict[str, tuple[Callable[[Fields], None], str]] = {
    "a billion heads": (at("0", original_heads=10**9), "layer 0: original_heads"),
    "a billion heads everywhere": (everywhere, "layer 0: original_heads"),
    "no heads": (at("0", original_heads=0), "layer 0: original_heads"),
    "more heads": (at("1", original_heads=8), "layer 1: original_heads"),
    "heads as text": (at("0", original_heads="6"), "layer 0: original_heads"),
    "heads as a truth": (at("0", original_heads=True), "layer 0: original_heads"),
    "no number of heads": (without("per_layer_config", "0", "original_heads"), "layer 0: original_heads"),
    "KV heads that do not divide": (at("0", original_kv_heads=4), "layer 0: original_kv_heads"),
    "other KV heads": (at("1", original_kv_heads=3), "layer 1: num_key_value_heads"),
    "other KV heads that agree": (at("1", original_kv_heads=3, num_key_value_heads=2), "layer 1: original_kv_heads"),
    "no KV heads": (at("0", original_kv_heads=0), "layer 0: original_kv_heads"),
    "shifted heads": (at("0", kept_heads=[1, 2, 3, 4]), "layer 0: kept_heads"),
    "shifted heads of another group": (at("1", kept_heads=[1, 2, 3]), "layer 1: kept_heads"),
    "shifted heads, whole group": (at("1", kept_heads=[3, 4, 5]), "layer 1: kept_heads"),
    "heads beyond the last": (at("0", kept_heads=[3, 4, 5, 6]), "layer 0: kept_heads"),
    "negative heads": (at("0", kept_heads=[-1, 2, 3, 4]), "layer 0: kept_heads"),
    "heads twice": (at("0", kept_heads=[2, 2, 3, 4]), "layer 0: kept_heads"),
    "heads out of order": (at("0", kept_heads=[5, 4, 3, 2]), "layer 0: kept_heads"),
    "heads as text in a list": (at("0", kept_heads=["2", 3, 4, 5]), "layer 0: kept_heads"),
    "heads as a text": (at("0", kept_heads="2345"), "layer 0: kept_heads"),
    "heads as numbers with a fraction": (at("0", kept_heads=[2.0, 3, 4, 5]), "layer 0: kept_heads"),
    "fewer heads": (at("0", kept_heads=[2, 3], num_attention_heads=2), "layer 0: kept_heads"),
    "no heads where there are weights": (
        at("0", kept_heads=[], kept_heads_crc32=0, num_attention_heads=0, num_key_value_heads=0, skip=["attention"]),
        "layer 0: kept_heads",
    ),
    "heads where there are no weights": (
        at("2", kept_heads=[0], kept_heads_crc32=4108050209, num_attention_heads=1, num_key_value_heads=1, skip=[]),
        "layer 2: kept_heads",
    ),
    "no kept heads": (without("per_layer_config", "0", "kept_heads"), "layer 0: kept_heads"),
    "another count": (at("0", num_attention_heads=3), "layer 0: num_attention_heads"),
    "another count of KV heads": (at("1", num_key_value_heads=2), "layer 1: num_key_value_heads"),
    "a skipped layer with heads": (at("0", skip=["attention"]), "layer 0: skip"),
    "a layer without heads that is not skipped": (without("per_layer_config", "2", "skip"), "layer 2: skip"),
    "a bias as text": (at("0", has_added_bias="yes"), "layer 0: has_added_bias"),
    "an added bias that was not saved": (at("0", has_added_bias=True), "layer 0: has_added_bias"),
    "an unknown field": (at("0", hidden_size=7), "layer 0: hidden_size"),
    "a layer that is no object": (lambda config: config["per_layer_config"].update({"0": 7}), "layer 0"),
    "no entries": (top(per_layer_config={}), "per_layer_config"),
    "a list of layers": (top(per_layer_config=[]), "per_layer_config"),
    "missing layers": (without("per_layer_config"), "per_layer_config"),
    "a layer beyond the last": (moved("2", "9"), "layer 9"),
    "a negative layer": (moved("2", "-1"), "layer -1"),
    "a layer with a name": (moved("2", "last"), "layer last"),
    "swapped layers": (swapped, "layer 0: kept_heads"),
    "a layer twice": (moved("2", "00"), "layer 00"),
    "a million layers": (top(num_hidden_layers=10**6), "num_hidden_layers"),
    "a trillion layers": (top(num_hidden_layers=10**12), "num_hidden_layers"),
    "fewer layers": (top(num_hidden_layers=2), "num_hidden_layers"),
    "layers as text": (top(num_hidden_layers="3"), "num_hidden_layers"),
    "a huge hidden size": (top(hidden_size=10**9), "hidden_size"),
    "a huge vocabulary": (top(vocab_size=10**9), "vocab_size"),
    "a huge MLP": (top(intermediate_size=10**9), "intermediate_size"),
    "a huge head": (top(head_dim=10**9), "head_dim"),
    "no original type": (without("base_model_type"), "base_model_type"),
    "an unknown original type": (top(base_model_type="nothing"), "base_model_type"),
    "its own type": (top(base_model_type="headscan_pruned"), "base_model_type"),
    "an encoder": (top(base_model_type="t5"), "base_model_type"),
    "types in a list": (top(base_model_type=["llama"]), "base_model_type"),
    "no name of the attention": (without("pruned_attention"), "pruned_attention"),
    "a width in the name": (top(pruned_attention="model.layers.{:>1000000000}.self_attn"), "pruned_attention"),
    "an attribute in the name": (top(pruned_attention="model.layers.{0.__class__}.self_attn"), "pruned_attention"),
    "another name": (top(pruned_attention="model.blocks.{}.self_attn"), "pruned_attention"),
    "another module": (top(pruned_attention="model.layers.{}.attn"), "kept_heads"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_damaged_configurations_name_the_field(name: str, saved: Path, tmp_path: Path) -> None:
    change, field = CASES[name]
    folder = tmp_path / "model"
    shutil.copytree(saved, folder)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    for read in (headscan.load, lambda path: model_sizes(ModelSpec(str(path)))):
        with pytest.raises(ModelLoadError) as caught:
            read(folder)
        assert f"{field} in config.json: " in str(caught.value) and "\n" not in str(caught.value)
        assert "(limit " in str(caught.value) and len(str(caught.value)) < 400
    for build in (AutoConfig.from_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(ValueError, match=r"in config\.json: "):
            build(folder)


@pytest.mark.parametrize("name", ["gpt_neox", "gpt2", "phi3"])
def test_other_groups_do_not_fit_a_fused_projection(name: str, tmp_path: Path) -> None:
    lm = load_saved(name, tmp_path / "whole")
    headscan.save_pruned(headscan.slice_heads(lm, [(0, 5)]), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    entry = config["per_layer_config"]["0"]
    entry.pop("num_key_value_heads", None)
    entry["original_kv_heads"] = 3
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"layer 0: original_kv_heads in config\.json: 3"):
        headscan.load(tmp_path / "model")


def test_a_saved_bias_that_the_configuration_denies_is_refused(tmp_path: Path) -> None:
    lm = load_saved("llama", tmp_path / "whole")
    bias = {"model.layers.0.self_attn.o_proj.bias": torch.ones(48)}
    headscan.save_pruned(headscan.slice_heads(lm, [(0, 0)], bias), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["per_layer_config"]["0"]["has_added_bias"] is True
    at("0", has_added_bias=False)(config)
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"1 weights .*self_attn\.o_proj\.bias.* config\.json"):
        headscan.load(tmp_path / "model")


def test_the_undamaged_configuration_loads_also_without_checksums(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(saved, folder)
    config = json.loads((folder / "config.json").read_text())
    for entry in config["per_layer_config"].values():
        del entry["kept_heads_crc32"]
    (folder / "config.json").write_text(json.dumps(config))
    assert headscan.load(folder).grid == headscan.load(saved).grid
