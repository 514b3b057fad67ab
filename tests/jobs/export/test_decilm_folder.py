"""DeciLM folders, read back from disk by a plain computation of the architecture that knows no library's model."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import headscan
from headscan.checkpoints.source_folder import locate
from headscan.cli.main import main
from headscan.errors import ExportError, ModelLoadError, PruningError
from headscan.export import llama_folder
from headscan.export.decilm_folder import decilm_slots, write_decilm
from headscan.export.servable_model import HeadSlots
from headscan.grid import HeadGrid
from headscan.models.loaded_model import LoadedModel
from headscan.steps.prune.pruning_units import divisor_kv_heads
from tests.jobs.export.test_gguf_export import REMOVED, WITH_BIAS, logits, without_heads
from tests.small_models import make_loaded


class DecilmModel:
    """A folder computed in float64, from ``config.json`` and the weights alone; all query heads have their columns."""

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        files = sorted(folder.glob("*.safetensors"))
        self.weights = {name: each.double() for file in files for name, each in load_file(file).items()}
        self.read: set[str] = set()

    def weight(self, name: str) -> Tensor:
        self.read.add(name)
        return self.weights[name]

    def linear(self, x: Tensor, name: str, has_bias: bool) -> Tensor:
        out = x @ self.weight(f"{name}.weight").T
        return out + self.weight(f"{name}.bias") if has_bias else out

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.weight(f"{name}.weight")

    def turned(self, x: Tensor) -> Tensor:
        """Rotate vectors (N, H, D): number i of the first half with number i of the second."""
        D = self.config["head_dim"]
        angles = self.config["rope_theta"] ** (-torch.arange(0, D, 2).double() / D)
        turns = (torch.arange(len(x)).double()[:, None] * angles)[:, None]
        first, second = x.chunk(2, -1)
        return torch.cat([first * turns.cos() - second * turns.sin(), second * turns.cos() + first * turns.sin()], -1)

    def first_key(self, layer: int, at: int) -> int:
        """Return the first key that a query sees, as vLLM reads the configuration."""
        types = self.config.get("layer_types")
        if types is None or types[layer] == "full_attention":
            return 0
        return max(0, at + 1 - self.config["sliding_window"])

    def attention(self, x: Tensor, block: str, group: int, layer: int) -> Tensor:
        H, D, N = self.config["num_attention_heads"], self.config["head_dim"], len(x)
        bias = self.config["attention_bias"]
        assert H % group == 0
        query = self.turned(self.linear(x, f"{block}.q_proj", bias).view(N, H, D))
        key = self.turned(self.linear(x, f"{block}.k_proj", bias).view(N, H // group, D))
        value = self.linear(x, f"{block}.v_proj", bias).view(N, H // group, D)
        out = torch.zeros(N, H, D, dtype=torch.float64)
        for head in range(H):
            for at in range(N):
                seen = slice(self.first_key(layer, at), at + 1)
                scores = key[seen, head // group] @ query[at, head] / D**0.5
                weights = (scores - scores.max()).exp()
                out[at, head] = weights @ value[seen, head // group] / weights.sum()
        return self.linear(out.flatten(1), f"{block}.o_proj", bias)

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits (N, V) of tokens (1, N)."""
        x, bias = self.weight("model.embed_tokens.weight")[tokens[0]], self.config["mlp_bias"]
        for layer, settings in enumerate(self.config["block_configs"]):
            block = f"model.layers.{layer}"
            if not settings["attention"]["no_op"]:
                y = self.norm(x, f"{block}.input_layernorm")
                x = x + self.attention(y, f"{block}.self_attn", settings["attention"]["n_heads_in_group"], layer)
            y = self.norm(x, f"{block}.post_attention_layernorm")
            gate = self.linear(y, f"{block}.mlp.gate_proj", bias)
            inner = gate / (1 + (-gate).exp()) * self.linear(y, f"{block}.mlp.up_proj", bias)
            assert inner.shape[1] == settings["ffn"]["intermediate_size"]
            x = x + self.linear(inner, f"{block}.mlp.down_proj", bias)
        words = "model.embed_tokens" if self.config["tie_word_embeddings"] else "lm_head"
        return self.linear(self.norm(x, "model.norm"), words, False)


def ids(lm: LoadedModel) -> Tensor:
    return torch.randint(lm.model.config.vocab_size, (1, 19), generator=torch.Generator().manual_seed(0))


def check(lm: LoadedModel, folder: Path) -> DecilmModel:
    """Check that a folder computes a model, and that each of its weights is used."""
    found, tokens = DecilmModel(folder), ids(lm)
    assert (logits(lm, tokens) - found.logits(tokens)).abs().max() < 1e-4
    assert found.read == set(found.weights)
    return found


@pytest.mark.parametrize("name", ["llama", "llama-mha", "qwen2", "mistral", "llama-mqa-wide"])
@pytest.mark.parametrize(("case", "has_bias"), [*((case, False) for case in REMOVED), *WITH_BIAS])
def test_a_folder_computes_the_logits_of_the_model_and_is_read_back(
    name: str, case: str, has_bias: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADSCAN_CACHE", str(tmp_path / "cache"))
    lm = without_heads(make_loaded(name), case, has_bias)
    written = write_decilm(lm, tmp_path / "served")
    model = check(lm, written.folder)
    assert model.config["num_attention_heads"] == written.heads
    skipped = [each["attention"]["no_op"] for each in model.config["block_configs"]]
    is_gone = case in ("no attention", "two layers without attention")
    assert skipped == [False, is_gone, False]  # engines cannot skip the first layer
    if name != "llama-mqa-wide":
        again, tokens = headscan.load(written.folder), ids(lm)
        assert torch.allclose(logits(lm, tokens), logits(again, tokens), atol=1e-5)
        assert [site.num_key_value_heads for site in again.grid.sites] == [
            site.num_key_value_heads for site in lm.grid.sites
        ]


def test_counts_that_do_not_divide_the_query_heads_are_padded(tmp_path: Path) -> None:
    lm = headscan.slice_heads(make_loaded("llama-mha"), [(1, 0), (1, 5), (2, 3)])
    written = write_decilm(lm, tmp_path / "served")
    model = check(lm, written.folder)
    assert [each["attention"]["n_heads_in_group"] for each in model.config["block_configs"]] == [1, 1, 1]
    key = model.weights["model.layers.1.self_attn.k_proj.weight"].view(6, 8, 48)
    assert key[:4].abs().amin((1, 2)).min() > 0 and not key[4:].any()
    original, own, served = written.sizes
    # 6 query and 6 KV heads of width 8 in each of 3 layers; a key and a value have 2 bytes a number.
    assert (original.kv_heads, own.kv_heads, served.kv_heads) == (18, 15, 18)
    assert (original.kv_bytes, own.kv_bytes, served.kv_bytes) == (576, 480, 576)
    assert own.parameters == original.parameters - 3 * 4 * 8 * 48 and served.parameters == original.parameters
    stored = sum(each.numel() for each in model.weights.values())
    assert stored == served.parameters


def test_another_tokenizer_is_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A converted folder is kept, with the tokenizer of that time."""
    monkeypatch.setenv("HEADSCAN_CACHE", str(tmp_path / "cache"))
    folder = write_decilm(headscan.slice_heads(make_loaded("llama-mha"), [(1, 0)]), tmp_path / "served").folder
    before = locate(str(folder))
    assert locate(str(folder)) == before
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    after = Path(locate(str(folder)))
    assert str(after) != before and (after / "chat_template.jinja").is_file()


@pytest.mark.parametrize("text", ["[]", '"a"', '{"model_type": "nemotron-nas", "auto_map": 5}'])
def test_a_configuration_that_is_no_object_is_of_another_model(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert locate(str(tmp_path)) == str(tmp_path)


def test_folders_that_cannot_be_read_back_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSCAN_CACHE", str(tmp_path / "cache"))
    folder = write_decilm(headscan.slice_heads(make_loaded("llama-mha"), [(1, 0)]), tmp_path / "served").folder
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.self_attn.o_proj.weight"] += 1.0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"layers.1.*o_proj.weight is not 0 where its model has no head"):
        headscan.load(folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"layer_types": ["sliding_attention"] * 3, "sliding_window": 8}))
    with pytest.raises(ModelLoadError, match="has windows by layer, which only engines apply"):
        headscan.load(folder)
    file.write_text(json.dumps({name: value for name, value in config.items() if name != "headscan_model"}))
    with pytest.raises(ModelLoadError, match="without the configuration of its model"):
        headscan.load(folder)


@pytest.mark.parametrize(
    ("own", "places"),
    [
        ([(8, 4), (2, 4)], [(8, 4), (2, 16)]),  # 32 query heads hold 8 and 2 KV heads
        ([(3, 3), (2, 3)], [(3, 3), (3, 3)]),  # 9 query heads have no 2 KV heads
        ([(2, 3), (1, 3)], [(2, 3), (1, 6)]),  # 6 query heads are enough where no layer needs more
        ([(3, 3), (0, 0)], [(3, 3), (0, 0)]),
        ([(1, 1), (4, 2)], [(1, 8), (4, 2)]),
    ],
)
def test_places_have_the_smallest_cache_that_one_number_of_query_heads_allows(
    own: list[tuple[int, int]], places: list[tuple[int, int]]
) -> None:
    most = max(K * G for K, G in places)
    assert decilm_slots([HeadSlots(*each) for each in own], most) == tuple(HeadSlots(*each) for each in places)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "numbers"),
    [(32, 8, (0, 1, 2, 4, 8)), (9, 3, (0, 1, 3)), (24, 8, (0, 1, 2, 3, 4, 6, 8)), (6, 6, (0, 1, 2, 3, 6))],
)
def test_numbers_of_kv_heads_that_need_no_zeros(heads: int, kv_heads: int, numbers: tuple[int, ...]) -> None:
    site = replace(make_loaded("llama").grid.sites[0], num_attention_heads=heads, num_key_value_heads=kv_heads)
    grid = HeadGrid(tuple(replace(site, layer=layer) for layer in range(2)), 2, "sdpa")
    assert divisor_kv_heads(grid) == {0: numbers[1:], 1: numbers}  # engines cannot skip the first layer
    own = HeadSlots(kv_heads, heads // kv_heads)
    for number in range(kv_heads + 1):
        places = decilm_slots([own, HeadSlots(number, own.group if number else 0)], heads)
        assert (places[1].kv_heads == number) == (number in numbers)


def test_transformers_reads_the_configuration(tmp_path: Path) -> None:
    from transformers import AutoConfig

    lm = headscan.slice_heads(make_loaded("llama"), REMOVED["no attention"])
    folder = write_decilm(lm, tmp_path / "served").folder
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    assert config.model_type == "nemotron-nas" and config.architectures == ["DeciLMForCausalLM"]
    assert [each.attention.no_op for each in config.block_configs] == [False, True, False]
    assert config.block_configs[0].ffn.intermediate_size == 64 and not hasattr(config.block_configs[0].ffn, "ffn_mult")


def test_others_can_read_the_weights_and_large_ones_have_shards(tmp_path: Path) -> None:
    lm = make_loaded("llama")
    written = write_decilm(lm, tmp_path / "served", max_shard_size=100_000)
    files = list(written.folder.glob("*.safetensors"))
    assert len(files) > 1 and written.bytes == sum(file.stat().st_size for file in files)
    modes = {stat.S_IMODE(file.stat().st_mode) for file in written.folder.iterdir()}
    plain = tmp_path / "plain"
    plain.touch()
    assert modes == {stat.S_IMODE(plain.stat().st_mode)}
    check(lm, written.folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen3", "qwen3 has norms of queries and keys, which have no place there. Serve the folder with transformers"),
        ("gpt2", "gpt2 has no place there"),
        ("mistral-sliding", "sliding window: 20 tokens .limit: none.. Serve the folder with transformers"),
    ],
)
def test_models_without_a_place_in_the_format_are_refused(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=message):
        write_decilm(make_loaded(name), tmp_path / "served")
    assert not list(tmp_path.iterdir())


def test_another_activation_is_refused(tmp_path: Path) -> None:
    lm = make_loaded("llama")
    lm.model.config.hidden_act = "gelu"
    with pytest.raises(ExportError, match="compute silu in the MLP; llama has gelu"):
        write_decilm(lm, tmp_path / "served")


def test_a_failed_export_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").touch()
    with pytest.raises(ExportError, match=r"file/served cannot be written: .* Free space, or choose another folder"):
        write_decilm(make_loaded("llama"), tmp_path / "file/served")
    with pytest.raises(PruningError, match="full is not empty"):
        write_decilm(make_loaded("llama"), tmp_path / "full")
    monkeypatch.setattr(llama_folder, "open_weights", full)  # the weights are written by then
    with pytest.raises(ExportError, match="served cannot be written: No space left on device"):
        write_decilm(make_loaded("llama"), tmp_path / "served")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full"]


def test_the_command_prints_what_the_engine_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lm = headscan.slice_heads(make_loaded("llama-mha"), [(1, 0), (2, 0), (2, 1), (2, 2)])
    headscan.save_pruned(lm, tmp_path / "smaller")
    command = ["export", "decilm", str(tmp_path / "smaller"), "--out", str(tmp_path / "served")]
    assert main(command) == 0
    out = capsys.readouterr().out
    rows = {line.split("  ")[0]: line.split() for line in out.splitlines()}
    assert rows["original"][1:5] == ["18", "18", "3", "576"]
    assert rows["this model"][2:6] == ["14", "14", "3", "448"]
    assert rows["served"][1:5] == ["18", "15", "3", "480"]
    assert "saved in the engine: 16.7 % of the KV cache, " in out
    # A head has 2 * 8 * 48 numbers as a query head, and as many as a KV head.
    assert "padding with zeros gives back 32 KV bytes per token and 3,840 parameters" in out
    assert f"vllm serve {tmp_path / 'served'} --trust-remote-code" in out
    assert "no multiple of 256, so SGLang cannot read it" in out
    assert main(command) == 2
    assert "is not empty" in capsys.readouterr().err
