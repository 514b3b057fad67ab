"""Sizes of models before loading equal those of the loaded models, and operations of a pass those that torch counts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError, SafetensorsParsingError
from huggingface_hub.utils import SafetensorsFileMetadata, SafetensorsRepoMetadata, TensorInfo
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

import headscan
from headscan.architectures import ALL, FAMILIES, VOCABULARY
from headscan.checkpoints import headers
from headscan.checkpoints.headers import read_headers
from headscan.errors import ModelLoadError
from headscan.model_spec import ModelSpec
from headscan.models.forward_inputs import run_forward
from headscan.sizing import model_sizes as sizes
from headscan.sizing import model_sizes as weight_bytes
from headscan.sizing.forward_flops import ForwardFlops, forward_flops
from headscan.sizing.model_sizes import model_sizes
from tests.benchmarks.overhead import peak_bytes
from tests.small_models import distinct_first, make_loaded, make_model, slow

#: Small, and unlike each other: GQA, windows, experts and latent keys, two towers. Further ones are slow.
SEVERAL = ["llama", "gemma3n", "deepseek_v3", "llava"]
MORE = ("gpt2", "gpt_neox", "gemma2-softcap", "qwen3_moe", "falcon_h1", "bert")


@pytest.fixture(autouse=True)
def nothing_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a dry run fails."""
    monkeypatch.setattr(sizes, "_estimated", lambda *_: pytest.fail("the dry run broke off"))


def save(name: str, folder: Path, **changes: Any) -> PreTrainedModel:
    model = make_model(name)
    model.save_pretrained(folder)
    if changes:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
    return model


@pytest.mark.parametrize("family", [*SEVERAL, "t5", *slow(*MORE)])
def test_bytes_of_parts_equal_those_of_the_loaded_model(family: str, tmp_path: Path) -> None:
    model = save(family, tmp_path)
    saved = model_sizes(ModelSpec(str(tmp_path)), 32)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    built = model_sizes(ModelSpec(str(tmp_path)), 32)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert built.weights == weights
    # A checkpoint also holds small tables that are no parameters.
    assert weights <= saved.weights <= 1.001 * weights
    for found in (saved, built):
        assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
        assert found.embedding == model.get_input_embeddings().weight.nbytes
        assert found.head == (0 if found.tied else model.get_output_embeddings().weight.nbytes)
        assert found.decoder is (family not in ("bert", "t5"))
    assert saved.num_layers == built.num_layers == (6 if family == "t5" else 3)


def test_bytes_of_blocks_equal_their_weights(tmp_path: Path) -> None:
    model = save("deepseek_v3", tmp_path)
    blocks = [sum(p.nbytes for p in block.parameters()) for block in model.model.layers]
    assert blocks[0] != blocks[1]  # the first has no experts
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    assert list(model_sizes(ModelSpec(str(tmp_path / "config.json")), 32).blocks) == blocks


def test_another_dtype_takes_other_bytes(tmp_path: Path) -> None:
    save("qwen3", tmp_path)
    whole, half = (model_sizes(ModelSpec(str(tmp_path), dtype=dtype), 32) for dtype in ("auto", "bfloat16"))
    assert whole.weights == 2 * half.weights
    assert whole.hidden == 2 * half.hidden == 4 * 48
    assert whole.cache == tuple(2 * size for size in half.cache)
    assert half.plain < whole.plain
    with pytest.raises(ModelLoadError, match=r"`dtype='int3'` is unknown. Choose auto or float32"):
        model_sizes(ModelSpec(str(tmp_path), dtype="int3"))


def test_the_checkpoints_dtype_counts_where_the_configuration_names_none(tmp_path: Path) -> None:
    save("llama", tmp_path, dtype=None)
    weights = load_file(tmp_path / "model.safetensors")
    halves = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
    # A block that predicts a further token is saved beside the layers, and not loaded.
    halves |= {name.replace("layers.2", "layers.3"): w.clone() for name, w in halves.items() if "layers.2" in name}
    whole = model_sizes(ModelSpec(str(tmp_path)), 32)
    save_file(halves, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert model_sizes(ModelSpec(str(tmp_path)), 32).weights == whole.weights // 2


def test_quantised_weights_keep_their_bytes(tmp_path: Path) -> None:
    model = save("llama", tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    weights = load_file(tmp_path / "model.safetensors")
    linear = sum(weight.numel() for name, weight in weights.items() if "_proj" in name)
    rest = sum(weight.nbytes for name, weight in weights.items() if "_proj" not in name)
    eights = {n: w.to(torch.float8_e4m3fn) if "_proj" in n else w for n, w in weights.items()}
    save_file(eights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert model_sizes(ModelSpec(str(tmp_path), dtype="bfloat16"), 32).weights == linear + rest
    (tmp_path / "model.safetensors").unlink()
    said = model_sizes(ModelSpec(str(tmp_path)), 32)
    assert said.weights == pytest.approx(linear + rest, rel=0.001)
    assert said.head == model.lm_head.weight.nbytes


@pytest.mark.parametrize(
    ("settings", "bits"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64}, 4.5),
        ({"quant_method": "mxfp4"}, 4.25),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8}}}}, 8),
        ({"quant_method": "unheard-of"}, None),
    ],
)
def test_bits_of_quantised_weights(settings: dict[str, Any], bits: float | None) -> None:
    assert weight_bytes._bits(settings) == bits


@pytest.mark.parametrize("family", distinct_first(sorted(set(FAMILIES) - {"bloom", "mpt", "gpt_neo"}), SEVERAL))
def test_bytes_of_the_cache_equal_those_of_a_real_cache(family: str, tmp_path: Path) -> None:
    """GQA, windows, latent keys and borrowed ones: as transformers' own cache holds them."""
    model = save(family, tmp_path)
    found = model_sizes(ModelSpec(str(tmp_path)), 48)
    cache = DynamicCache(config=model.config.get_text_config())
    model(input_ids=torch.full((1, 48), 5), past_key_values=cache, use_cache=True)
    pairs = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers]
    held = [sum(x.nbytes for x in pair if x is not None) for pair in pairs]
    assert list(found.cache) == held + [0] * (found.num_layers - len(held))
    assert found.cache_bytes(96) == 2 * sum(held)


def test_equal_layers_run_once(tmp_path: Path) -> None:
    """Windows every other layer, and a depth that is not run."""
    family = FAMILIES["gemma2-softcap"]
    deep = dict(family.config, num_hidden_layers=12, layer_types=["sliding_attention", "full_attention"] * 6)
    config = make_model("gemma2-softcap").config
    for name in ("num_hidden_layers", "layer_types"):
        setattr(config, name, deep[name])
    family.auto.from_config(config).save_pretrained(tmp_path)
    found = model_sizes(ModelSpec(str(tmp_path)), 48)
    assert found.cache == found.cache[:2] * 6
    assert found.cache[0] < found.cache[1]
    shallow = tmp_path / "shallow"
    save("gemma2-softcap", shallow)
    assert found.measured == model_sizes(ModelSpec(str(shallow)), 48).measured


@pytest.mark.parametrize("family", ["llama", "gemma3", *slow(*MORE[:4])])
def test_activations_are_those_of_a_measured_peak(family: str, tmp_path: Path) -> None:
    tokens = 600
    save(family, tmp_path)
    lm = make_loaded(family)
    found = model_sizes(ModelSpec(str(tmp_path)), tokens)
    ids = torch.randint(5, VOCABULARY, (2, tokens))
    weights = sum(parameter.nbytes for parameter in lm.model.parameters())
    plain = peak_bytes(lm, lambda: run_forward(lm.model, {"input_ids": ids})) - weights
    measured = peak_bytes(lm, lambda: headscan.collect(lm, ids)) - weights
    assert 1.0 <= found.activation_bytes(2 * tokens, measured=False) / plain < 1.5
    assert 1.0 <= found.activation_bytes(2 * tokens, measured=True) / measured < 1.5


def test_models_that_the_dry_run_cannot_run_are_estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def breaks_off(*_: object) -> None:
        raise RuntimeError("asks for the contents of tensors")

    save("llama", tmp_path)
    known = model_sizes(ModelSpec(str(tmp_path)), 512)
    monkeypatch.setattr(sizes, "dry_run", breaks_off)
    guessed = model_sizes(ModelSpec(str(tmp_path)), 512)
    assert known.measured <= guessed.measured < 4 * known.measured
    assert sum(known.cache) <= sum(guessed.cache)
    assert replace(guessed, plain=0, measured=0, cache=()) == replace(known, plain=0, measured=0, cache=())


def test_sequences_end_with_the_context(tmp_path: Path) -> None:
    save("llama", tmp_path)
    assert model_sizes(ModelSpec(str(tmp_path)), 9999).tokens == 1024


def test_headers_list_every_tensor(tmp_path: Path) -> None:
    model = make_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="50kB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    found = read_headers(str(tmp_path))
    assert found.keys() == model.state_dict().keys()
    assert all(found[name].shape == weight.shape for name, weight in model.state_dict().items())
    (tmp_path / "model-00001.safetensors").write_bytes(b"\x05\0\0\0\0\0\0\0nono!")
    with pytest.raises(ModelLoadError, match="not a safetensors file"):
        read_headers(str(tmp_path))


def test_headers_come_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_headers("nobody/no-such-model") == {}
    tensor = TensorInfo("BF16", [3, 5], (100, 130))
    file = SafetensorsFileMetadata({}, {"lm_head.weight": tensor})
    repository = SafetensorsRepoMetadata({}, False, {}, {"model.safetensors": file})
    monkeypatch.setattr(headers, "hub_answers", lambda: True)
    monkeypatch.setattr(headers, "get_safetensors_metadata", lambda name, revision: repository)
    (found,) = read_headers("nobody/no-such-model", "main").values()
    assert (found.dtype, found.shape, found.nbytes) == ("BF16", (3, 5), 30)


def test_headers_are_empty_if_the_hub_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(problem: Exception) -> None:
        raise problem

    library = HfHubHTTPError.__bases__[0]  # base class of the errors of the hub's HTTP library
    monkeypatch.setattr(headers, "hub_answers", lambda: True)
    for problem in (library("no route"), OSError("no route"), SafetensorsParsingError("no route")):
        caplog.clear()
        monkeypatch.setattr(headers, "get_safetensors_metadata", lambda *_, problem=problem, **__: fail(problem))
        assert read_headers("nobody/no-such-model") == {}
        assert "cannot read the tensor headers of nobody/no-such-model from the hub: no route" in caplog.text
    monkeypatch.setattr(headers, "get_safetensors_metadata", lambda *_, **__: fail(TypeError("a bug")))
    with pytest.raises(TypeError, match="a bug"):
        read_headers("nobody/no-such-model")


def test_sources_without_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no such folder"):
        model_sizes(ModelSpec(str(tmp_path / "absent")))
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        model_sizes(ModelSpec(str(tmp_path)))
    assert set(ALL) > set(SEVERAL)


SIZES = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("tied", [True, False])
def test_operations_are_those_that_torch_counts(tied: bool, tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES, head_dim=10, tie_word_embeddings=tied, attn_implementation="eager")
    model = LlamaForCausalLM(config).eval()
    config.save_pretrained(tmp_path)
    found, tokens = forward_flops(ModelSpec(str(tmp_path))), 7
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(input_ids=torch.ones(1, tokens, dtype=torch.long))
    norms = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    # torch counts the products of eager attention with masked keys, too.
    everywhere = 2 * sum(found.widths.values()) * tokens
    assert counted.get_total_flops() == tokens * (2 * (found.parameters - norms + found.head) + everywhere)


def test_a_token_uses_its_experts(tmp_path: Path) -> None:
    config = MixtralConfig(**SIZES, num_local_experts=8, num_experts_per_tok=2, sliding_window=None)
    config.save_pretrained(tmp_path)
    expert = 3 * SIZES["hidden_size"] * SIZES["intermediate_size"]
    model = MixtralForCausalLM(config)
    words = 2 * SIZES["vocab_size"] * SIZES["hidden_size"]
    every = sum(p.numel() for p in model.parameters())
    assert forward_flops(ModelSpec(str(tmp_path))).parameters == every - words - 3 * 6 * expert


def test_attention_sees_earlier_keys_within_the_window() -> None:
    tokens, widths = 9, {None: 5, 4: 3}
    found = ForwardFlops(parameters=100, head=10, widths=widths)
    seen = sum(
        width * sum(position + 1 if window is None else min(position + 1, window) for position in range(tokens))
        for window, width in widths.items()
    )
    assert found.attention(tokens) == pytest.approx(2 * seen / tokens)
    assert found.per_token(tokens, logits=True) == pytest.approx(220 + 2 * seen / tokens)


@pytest.mark.parametrize("family", ["gemma4", "bert", "t5", "bart", "jamba"])
def test_layers_that_differ_and_encoders_are_counted(family: str, tmp_path: Path) -> None:
    make_model(family).config.save_pretrained(tmp_path)
    found = forward_flops(ModelSpec(str(tmp_path)))
    assert found.per_token(64, logits=True) > found.per_token(8, logits=True) > 0
