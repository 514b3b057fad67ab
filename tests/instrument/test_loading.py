"""Loading from folders, and errors of wrong folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import headscan
from headscan.architectures import ALL, SITES, VOCABULARY
from headscan.attention.discovery import discover
from headscan.checkpoints.headers import weights_hash
from headscan.errors import InterventionError, ModelLoadError, SequenceError, UnknownNameError, UnsupportedModelError
from headscan.models.loaded_model import LoadedModel
from headscan.models.model_facts import max_tokens
from tests.small_models import distinct_first, make_loaded, make_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(("family", "site"), distinct_first(SITES))
def test_the_grid_is_discovered(family: str, site: str) -> None:
    grid = make_loaded(family).grid.at(site)
    declared = ALL[family]
    assert [found.layer for found in grid.sites] == list(declared.layers)
    assert grid.layers_without_heads == tuple(sorted({0, 1, 2} - set(declared.layers)))
    assert grid.kind == site
    for found in grid.sites:
        assert found.output_projection == declared.projection_of(found.layer, site)
    config = declared.config.get("text_config", declared.config)
    if "num_key_value_heads" in config:
        assert config["num_key_value_heads"] in {found.num_key_value_heads for found in grid.sites}


@pytest.mark.parametrize(
    ("family", "windows"),
    [("mistral-sliding", [20, 20, 20]), ("gemma2-softcap", [24, None, 24]), ("gpt_oss", [20, None, 20])],
)
def test_windows_are_found(family: str, windows: list[int | None]) -> None:
    assert [site.sliding_window for site in make_loaded(family).grid.sites] == windows


def test_value_width_may_differ_from_key_width() -> None:
    site = make_loaded("deepseek_v3").grid.sites[0]
    assert (site.head_dim, site.value_dim) == (12, 10)


def test_repeated_key_heads_count_once() -> None:
    """Falcon spreads its KV heads over the query heads before attention."""
    assert make_loaded("falcon-gqa").grid.sites[0].num_key_value_heads == 2


def test_a_set_of_pruned_heads_as_in_transformers_4_is_no_choice_of_headscan() -> None:
    """Attention modules of remote code often have it."""
    model = make_model("llama")
    for layer in model.model.layers:
        layer.self_attn.pruned_heads = {1}
    lm = headscan.load(model)
    whole = make_loaded("llama")
    assert lm.grid == whole.grid
    smaller, expected = (headscan.slice_heads(each, [(0, 0), (0, 1), (1, 3)]) for each in (lm, whole))
    ids = torch.arange(5, 15)[None]
    assert smaller.grid == expected.grid
    torch.testing.assert_close(smaller.model(ids).logits, expected.model(ids).logits)


@pytest.mark.parametrize(
    ("family", "reason"),
    [("bitnet", "something mixes"), ("albert", "serves several layers"), ("diffllama", "no projection takes")],
)
def test_unsupported_models_are_refused(family: str, reason: str) -> None:
    model = make_model(family)
    with pytest.raises(UnsupportedModelError, match=reason):
        discover(model)
    assert model.config._attn_implementation == "sdpa" or family == "diffllama"
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_only_errors_of_the_model_refuse_it() -> None:
    """Discovery lets an out-of-memory error pass: the model itself is supported."""
    model = make_model("llama")

    def fail(problem: Exception) -> None:
        raise problem

    for problem, expected, message in (
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError, "CUDA out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), RuntimeError, "can't allocate memory"),
        (
            ValueError("bad shape"),
            UnsupportedModelError,
            "LlamaForCausalLM fails on a short text: ValueError: bad shape",
        ),
    ):
        hook = model.model.layers[1].register_forward_pre_hook(lambda *_, problem=problem: fail(problem))
        with pytest.raises(expected, match=message):
            discover(model)
        hook.remove()


@pytest.mark.parametrize("family", ["bert", "t5", "llava", "gptj"])
def test_every_kind_of_model_loads_from_a_folder(family: str, tmp_path: Path) -> None:
    make_model(family).save_pretrained(tmp_path)
    lm = headscan.load(tmp_path)
    assert lm.grid == make_loaded(family).grid
    assert type(lm.model) is type(make_model(family))


def test_positions_behind_padding_do_not_count(tmp_path: Path) -> None:
    """RoBERTa's table of 1,026 positions serves 1,024 tokens."""
    lm = make_loaded("roberta")
    assert lm.max_tokens == max_tokens(lm.model.config) == 1024
    ids = torch.full((1, 1025), 5)
    assert headscan.collect(lm, ids[:, :1024], statistics=["entropy"])["entropy"].isfinite().all()
    with pytest.raises(SequenceError, match=r"1025 tokens \(limit 1024\)"):
        headscan.collect(lm, ids)


def test_tables_of_words_are_none_of_positions() -> None:
    """Encoder and decoder have a table each, here as long as the table of positions."""
    positions = make_loaded("marian").max_tokens
    assert positions
    model = make_model("marian", vocabulary=positions)
    assert LoadedModel(model, None, discover(model), "marian").max_tokens == positions


def test_causality_is_detected_from_attention() -> None:
    """Modules of these models do not declare whether attention is causal."""
    from transformers import LayoutLMConfig, LayoutLMForMaskedLM, PegasusXConfig, PegasusXForConditionalGeneration

    small = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    encoder = LayoutLMForMaskedLM(LayoutLMConfig(**small, num_attention_heads=6)).eval()
    lm = LoadedModel(encoder, None, discover(encoder), "layoutlm")
    assert not any(site.causal for site in lm.grid.sites)
    ids = torch.randint(5, 97, (1, 30))
    padded = torch.cat([ids, torch.full((1, 9), 7)], 1)
    alone, beside = headscan.collect(lm, ids), headscan.collect(lm, padded, [30])
    for name, values in alone.items():
        torch.testing.assert_close(beside[name], values, rtol=1e-5, atol=1e-6, msg=name)
    sides = {
        f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 2), ("attention_heads", 6))
    }
    widths = {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "d_model": 48, "vocab_size": 97, "block_size": 16}
    local = PegasusXForConditionalGeneration(PegasusXConfig(**sides, **widths)).eval()
    with pytest.raises(UnsupportedModelError, match=r"encoder cannot be seen|unsupported kind"):
        discover(local)


def test_hooked_and_compiled_models_are_refused() -> None:
    lm = make_loaded("llama")
    ids = torch.zeros(1, 5, dtype=torch.long)
    with (
        headscan.intervene(lm, headscan.HeadRule("entropy", threshold=0.0)),
        pytest.raises(InterventionError, match="hook is open"),
    ):
        discover(lm.model)
    lm.model.model.layers[1].compile(backend="eager")
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.1 is compiled"):
        headscan.collect(lm, ids)
    with pytest.raises(UnsupportedModelError, match="is compiled"):
        headscan.intervene(lm, headscan.HeadMask([(0, 0)])).__enter__()


def test_head_mask_is_an_error(folder: Path) -> None:
    ids = torch.zeros(1, 4, dtype=torch.long)
    for source in (folder, make_model("llama")):
        lm = headscan.load(source)
        with pytest.raises(InterventionError, match=r"head_mask= has no effect.*headscan\.intervene"):
            lm.model(input_ids=ids, head_mask=torch.zeros(3, 6))
        lm.model(input_ids=ids, head_mask=None)


def test_a_saved_model_gives_the_same_numbers(folder: Path) -> None:
    ids = torch.randint(2, VOCABULARY, (2, 25))
    lm = headscan.load(folder)
    assert lm.tokenizer is None
    with pytest.raises(ModelLoadError, match="no tokenizer"):
        lm.require_tokenizer()
    made = headscan.collect(make_loaded("llama"), ids)
    for name, values in headscan.collect(lm, ids).items():
        torch.testing.assert_close(values, made[name])
    assert headscan.load(folder, dtype="bfloat16").dtype == "bfloat16"


def test_offloaded_weights_are_measured_rightly(folder: Path, tmp_path: Path) -> None:
    """Both hooks under accelerate's own hooks: the projection's weight is only there while its layer runs."""
    from accelerate import cpu_offload, disk_offload

    ids = torch.randint(2, VOCABULARY, (2, 25))
    plain = headscan.collect(headscan.load(folder), ids)
    for offload in (
        lambda model: cpu_offload(model, execution_device="cpu"),
        lambda model: disk_offload(model, tmp_path / "offload", execution_device=torch.device("cpu")),
    ):
        model = make_model("llama")
        offload(model)
        assert model.model.layers[0].self_attn.o_proj.weight.device.type == "meta"
        lm = LoadedModel(model, None, discover(model), "offloaded")
        for name, values in headscan.collect(lm, ids).items():
            torch.testing.assert_close(values, plain[name], msg=name)


def test_weights_hash_differs_for_other_weights(folder: Path) -> None:
    before = weights_hash(folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1e-3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert weights_hash(folder) != before


def test_errors_of_a_wrong_model(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no such folder"):
        headscan.load(tmp_path / "absent")
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        headscan.load(tmp_path)
    with pytest.raises(ModelLoadError, match="there is no such folder, the cache does not hold all of it"):
        headscan.load("nobody/no-such-model")
    with pytest.raises(ModelLoadError, match=r"`dtype='int3'` is unknown. Choose auto or float32"):
        headscan.load(folder, dtype="int3")
    with pytest.raises(ModelLoadError, match="unknown device"):
        headscan.load(folder, device="toaster")

    weights = load_file(folder / "model.safetensors")
    absent = weights.pop("model.layers.1.mlp.up_proj.weight")
    assert absent is not None
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"lacks 1 weights.*layers\.1\.mlp\.up_proj"):
        headscan.load(folder)

    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="safetensors"):
        headscan.load(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "vit"}))
    with pytest.raises(ModelLoadError, match="does not predict text tokens"):
        headscan.load(folder)


def test_a_model_without_attention_is_refused() -> None:
    from transformers import AutoModelForCausalLM, MambaConfig

    config = MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, state_size=4, intermediate_size=32)
    with pytest.raises(UnsupportedModelError, match="no softmax attention heads"):
        discover(AutoModelForCausalLM.from_config(config))


def test_batches_that_cannot_be_measured() -> None:
    lm = make_loaded("gpt2")
    with pytest.raises(SequenceError, match=r"1025 tokens \(limit 1024\)"):
        headscan.collect(lm, torch.zeros(1, 1025, dtype=torch.long))
    with pytest.raises(SequenceError, match="shape"):
        headscan.collect(lm, torch.zeros(0, 5, dtype=torch.long))
    with pytest.raises(SequenceError, match="lengths are out of range: 0 to 3"):
        headscan.collect(lm, torch.zeros(2, 5, dtype=torch.long), [0, 3])
    with pytest.raises(SequenceError, match="Pass 2 integers"):
        headscan.collect(lm, torch.zeros(2, 5, dtype=torch.long), [3])
    with pytest.raises(SequenceError, match=f"limit 0 to {VOCABULARY - 1}"):
        headscan.collect(lm, torch.full((1, 5), VOCABULARY))
    with pytest.raises(SequenceError, match=r"token ids are out of range: -1 to 2 \(limit"):
        headscan.collect(lm, torch.tensor([[1, 2, -100], [1, -1, 2]]), [2, 3])
    with pytest.raises(UnknownNameError, match="did you mean entropy"):
        headscan.collect(lm, torch.zeros(1, 5, dtype=torch.long), statistics=["entropi"])
    with pytest.raises(SequenceError, match="not an integer tensor"):
        headscan.collect(lm, torch.zeros(1, 5))
    with pytest.raises(SequenceError, match="without decoder_input_ids"):
        headscan.collect(lm, torch.zeros(1, 5, dtype=torch.long), decoder_lengths=[3])


def test_weights_hash_sees_a_change_in_the_middle_of_a_large_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.truncate(200 << 20)
    before = weights_hash(tmp_path)
    assert weights_hash(tmp_path) == before
    with path.open("r+b") as file:
        file.seek(100 << 20)
        file.write(b"\x01" * (400 << 10))
    assert weights_hash(tmp_path) != before


def test_quantised_projections_are_measured_by_what_they_compute() -> None:
    """A packed weight shows no matrix, but a linear module shows it by its outputs for unit vectors."""
    lm = make_loaded("llama")
    projection = lm.model.model.layers[1].self_attn.o_proj
    weight = projection.weight.detach().clone()
    ids = torch.zeros(1, 5, dtype=torch.long)
    expected = headscan.collect(lm, ids)["projected_output_norm"]
    projection.weight = torch.nn.Parameter(torch.zeros_like(weight, dtype=torch.int8), requires_grad=False)
    projection.forward = lambda x: x @ weight.T + 1
    found = headscan.collect(lm, ids)["projected_output_norm"]
    torch.testing.assert_close(found[:, 1], expected[:, 1])
    projection.forward = lambda x: 2 * x @ weight.T  # changed weights are noticed
    found = headscan.collect(lm, ids)["projected_output_norm"]
    torch.testing.assert_close(found[:, 1], 2 * expected[:, 1])
    projection.forward = lambda x: (8 * x).round() / 8 @ weight.T  # rounded inputs
    message = r"o_proj, a Linear, differs from it by .* \(limit 0\.2 %\)"
    with pytest.raises(UnsupportedModelError, match=message):
        headscan.collect(lm, ids, statistics=["projected_output_norm"])
    assert headscan.collect(lm, ids, statistics=["output_norm"])["output_norm"].isfinite().all()
