"""Checkpoints and configurations that do not fit: unused weights, other heads, names of wrappers, missing files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

import headscan
from headscan.errors import ModelLoadError, UnsupportedModelError
from headscan.layers.layer_ranges import open_layers
from headscan.loading import empty_model
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import logits_at
from headscan.sizing.forward_flops import forward_flops
from tests.instrument.gradients.gradient_oracle import next_token_loss, traced
from tests.small_models import make_model

IDS = torch.arange(5, 25).view(2, 10)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change_config(folder: Path, **fields: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    weights = change(load_file(folder / "model.safetensors"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def entropy(lm: headscan.LoadedModel) -> Tensor:
    return headscan.collect(lm, IDS, statistics=["entropy"])["entropy"]


def test_biases_that_the_configuration_does_not_name_are_refused(tmp_path: Path) -> None:
    config = make_model("llama").config
    config.attention_bias = True
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0, 2)
    model.save_pretrained(tmp_path)
    right = entropy(headscan.load(tmp_path))
    change_config(tmp_path, attention_bias=False)
    message = (
        r"has 12 weights that its configuration does not use: model\.layers\.0\.self_attn\.k_proj\.bias, .*, \.\.\. "
        r"Correct config\.json, or pass `unused_weights=True`"
    )
    with pytest.raises(ModelLoadError, match=message):
        headscan.load(tmp_path)
    with pytest.raises(ModelLoadError, match=message):
        open_layers(ModelSpec(str(tmp_path)), "cpu")
    assert not torch.allclose(entropy(headscan.load(tmp_path, unused_weights=True)), right)


BLOCK = "model.layers.1."


@pytest.mark.parametrize(
    "name",
    [
        f"{BLOCK}self_attn.q_norm.weight",
        f"{BLOCK}self_attn.sinks",
        f"{BLOCK}self_attn.qkv_proj.weight",
        f"{BLOCK}self_attn.q_proj.weight_scale",
        f"{BLOCK}self_attn.q_proj.lora_A.weight",
        f"{BLOCK}mlp.up_proj.bias",
        "model.layers.3.self_attn.q_proj.weight",
    ],
)
def test_unused_weights_of_blocks_are_refused(name: str, folder: Path) -> None:
    change_weights(folder, lambda weights: weights | {name: torch.ones(4)})
    with pytest.raises(ModelLoadError, match=f"does not use: {name}. Correct"):
        headscan.load(folder)
    assert headscan.load(folder, unused_weights=True).grid.num_layers == 3


@pytest.mark.parametrize(
    "name",
    [
        f"{BLOCK}self_attn.rotary_emb.inv_freq",
        f"{BLOCK}self_attn.masked_bias",
        f"{BLOCK}self_attn.k_scale",
        f"{BLOCK}self_attn.k_proj.input_scale",
        "vision_tower.layers.0.self_attn.q_proj.weight",
        "v_head.summary.weight",
    ],
)
def test_entries_that_change_no_number_are_none_of_these(name: str, folder: Path) -> None:
    right = entropy(headscan.load(folder))
    change_weights(folder, lambda weights: weights | {name: torch.ones(4)})
    assert torch.equal(entropy(headscan.load(folder)), right)


def test_causal_masks_of_old_checkpoints_are_no_weights(tmp_path: Path) -> None:
    make_model("gpt2").save_pretrained(tmp_path)
    change_weights(tmp_path, lambda weights: weights | {"transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8)})
    headscan.load(tmp_path)


def test_layers_that_predict_further_tokens_are_left_out(folder: Path) -> None:
    name = "model.layers.3.self_attn.q_proj.weight"
    change_weights(folder, lambda weights: weights | {name: torch.ones(4)})
    change_config(folder, num_nextn_predict_layers=1)
    assert headscan.load(folder).grid.num_layers == 3


def test_weights_of_more_layers_are_refused(folder: Path) -> None:
    change_config(folder, num_hidden_layers=2)
    with pytest.raises(ModelLoadError, match=r"9 weights .* does not use: model\.layers\.2\."):
        headscan.load(folder)


_SIZES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "head_dim": 8},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "t5": {"d_kv": 8, "d_ff": 64, "num_layers": 2},
    "bart": {
        f"{side}_{name}": number
        for side in ("encoder", "decoder")
        for name, number in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
    },
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("llama", "LlamaForSequenceClassification"),
        ("llama", "LlamaForTokenClassification"),
        ("llama", "LlamaForQuestionAnswering"),
        ("llama", "LlamaModel"),
        ("qwen3", "Qwen3Model"),
        ("bert", "BertModel"),
        ("bert", "BertForTokenClassification"),
        ("bert", "BertForQuestionAnswering"),
        ("bert", "BertForMultipleChoice"),
        ("bert", "BertForNextSentencePrediction"),
        ("t5", "T5EncoderModel"),
        ("t5", "T5ForTokenClassification"),
        ("bart", "BartForSequenceClassification"),
        ("dpr", "DPRQuestionEncoder"),
    ],
)
def test_a_model_with_another_head_is_measured_as_in_memory(kind: str, name: str, tmp_path: Path) -> None:
    small = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = AutoConfig.for_model(
        kind, **{**small, "num_attention_heads": 4, "pad_token_id": 0, **_SIZES.get(kind, {})}
    )
    torch.manual_seed(0)
    model: PreTrainedModel = getattr(transformers, name)(config).eval()
    model.save_pretrained(tmp_path)
    lm = headscan.load(tmp_path)
    assert torch.equal(entropy(lm), entropy(headscan.load(model)))
    if not lm.is_encoder_decoder:
        with pytest.raises(UnsupportedModelError, match=f"predicts no tokens: .*({name})"):
            logits_at(lm, IDS, [0], [1])


def test_a_head_of_an_unknown_class_is_named(folder: Path) -> None:
    change_config(folder, architectures=["LlamaForRewardModel"])
    assert headscan.load(folder).grid.num_layers == 3  # the checkpoint has a head for tokens
    change_weights(folder, lambda weights: {name: value for name, value in weights.items() if name != "lm_head.weight"})
    message = (
        r"saved as LlamaForRewardModel and lacks the head of LlamaForCausalLM: lm_head\.weight, .*\[\"LlamaModel\"\]"
    )
    with pytest.raises(ModelLoadError, match=message):
        headscan.load(folder)
    change_config(folder, architectures=["LlamaModel"])
    assert type(headscan.load(folder).model).__name__ == "LlamaModel"


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        (lambda name: f"_orig_mod.{name}", r"30 weights with `_orig_mod\.` in their names, which torch\.compile adds"),
        (lambda name: f"module.{name}", r"30 weights with `module\.` in their names, which a wrapper such as Distr"),
        (lambda name: f"base_model.model.{name}", r"30 weights with `base_model\.model\.` in .*, which PEFT adds"),
        (lambda name: f"student.{name}", r"30 weights with `student\.` in their names, which a wrapper adds"),
        (
            lambda name: name.replace("rs.1.", "rs.1._orig_mod."),
            r"9 weights with `_orig_mod\.` in .*torch\.compile adds",
        ),
    ],
)
def test_names_of_wrappers_are_the_cause(rename: Callable[[str], str], message: str, folder: Path) -> None:
    change_weights(folder, lambda weights: {rename(name): value for name, value in weights.items()})
    with pytest.raises(ModelLoadError, match=message):
        headscan.load(folder)


def test_files_that_are_missing_or_stand_for_others_are_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    make_model("llama").save_pretrained(folder, max_shard_size="60KB")
    first = next(folder.glob("model-00001-*"))
    whole = first.read_bytes()
    first.unlink()
    with pytest.raises(ModelLoadError, match=rf"No such file .*{first.name}\. Copy or download it again"):
        headscan.load(folder)
    first.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(
        ModelLoadError, match=rf"{first.name} is a pointer of Git LFS, not the file\. Run `git lfs pull`"
    ):
        headscan.load(folder)
    first.write_bytes(whole[:-100])
    with pytest.raises(ModelLoadError, match=r"deserializing header.*\. Copy or download it again"):
        headscan.load(folder)
    first.write_bytes(whole)
    headscan.load(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelLoadError, match=r"parts of weights and no model\.safetensors\.index\.json.*Copy it"):
        headscan.load(folder)


_OWN_CODE = """
import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class OwnConfig(PreTrainedConfig):
    model_type = "own_names"

    def __init__(self, vocab_size=97, width=24, head_width=6, heads=(2, 4), **others):
        self.vocab_size, self.width, self.head_width, self.heads = vocab_size, width, head_width, list(heads)
        super().__init__(**others)


class OwnAttention(nn.Module):
    def __init__(self, config, heads):
        super().__init__()
        self.shape = 3, heads, config.head_width
        inner = heads * config.head_width
        self.qkv, self.out = nn.Linear(config.width, 3 * inner), nn.Linear(inner, config.width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, self.shape).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class OwnBlock(nn.Module):
    def __init__(self, config, heads):
        super().__init__()
        self.attention, self.mlp = OwnAttention(config, heads), nn.Linear(config.width, config.width)

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.mlp(x).tanh()


class OwnModel(PreTrainedModel):
    config_class = OwnConfig
    base_model_prefix = "body"
    _tied_weights_keys = {}

    def __init__(self, config):
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList([OwnBlock(config, heads) for heads in config.heads])
        self.lm_head = nn.Linear(config.width, config.vocab_size)
        self.post_init()

    def get_input_embeddings(self):
        return self.words

    def forward(self, input_ids=None, attention_mask=None, use_cache=None, **_):
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        return CausalLMOutput(logits=self.lm_head(x))
"""


def test_a_configuration_with_names_of_its_own(tmp_path: Path) -> None:
    """As OpenELM's: neither ``hidden_size`` nor ``num_hidden_layers``."""
    (tmp_path / "own_names.py").write_text(_OWN_CODE)
    classes = {"AutoConfig": "own_names.OwnConfig", "AutoModelForCausalLM": "own_names.OwnModel"}
    config = {"model_type": "own_names", "architectures": ["OwnModel"], "auto_map": classes, "vocab_size": 97}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = ModelSpec(str(tmp_path), trust_remote_code=True)
    torch.manual_seed(0)
    empty_model(spec, spec.config(), torch.float32).to_empty(device="cpu").save_pretrained(tmp_path)
    change_weights(tmp_path, lambda weights: {name: torch.randn(value.shape) / 4 for name, value in weights.items()})
    lm = headscan.load(tmp_path, trust_remote_code=True)
    found = headscan.importance(lm, IDS)["importance"]
    for row, ids in enumerate(IDS):
        expected = traced(lm, lambda ids=ids: next_token_loss(lm, ids))
        for layer, heads in ((0, 2), (1, 4)):
            torch.testing.assert_close(found[row, layer, :heads], expected[layer].token_importance_H)
    flops = forward_flops(spec)
    assert flops.parameters == sum(p.numel() for p in lm.model.parameters()) - 97 * 24 - (97 * 24 + 97)
    assert flops.widths == {None: 2 * 24 * 2}
    sharding = headscan.Sharding(("cpu", "cpu"), ((0, 1), (1, 2)))
    assert set(sharding.device_map(lm.model)) >= {"blocks.0", "blocks.1"}
