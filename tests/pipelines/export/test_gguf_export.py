"""Models as GGUF files: read by transformers, and by a plain computation of llama.cpp's architectures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader, dequantize
from torch import Tensor

import headscan
from headscan.attention.discovery import discover
from headscan.errors import ExportError
from headscan.models.loaded_model import LoadedModel
from headscan.pipelines.cli.main import main
from headscan.pipelines.export.gguf_file import write_gguf
from headscan.pipelines.export.gguf_tokenizer import copied_keys
from tests.small_models import make_loaded, make_model

#: Heads of layers with 6 query and 2 KV heads, by case: whole groups; groups of different sizes; all heads of a layer.
REMOVED = {
    "none": [],
    "group": [(1, 0), (1, 1), (1, 2)],
    "uneven": [(0, 0), (2, 1), (2, 2), (2, 5)],
    "no attention": [(1, head) for head in range(6)],
    "first layer without attention": [*((0, head) for head in range(6)), (2, 3)],
    "equal": [(layer, head) for layer in range(3) for head in (1, 4)],
}


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return headscan.load("demo", device="cpu", dtype="float32")


def small(name: str, demo: LoadedModel) -> LoadedModel:
    """Return a small random model with the vocabulary of the demo."""
    model = make_model(name, vocabulary=len(demo.tokenizer))
    return LoadedModel(model, demo.tokenizer, discover(model), name)


def ids(vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, (1, 23), generator=torch.Generator().manual_seed(0))


def logits(lm: LoadedModel, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = lm.model(tokens).logits[0]
    return found


class GgufModel:
    """A GGUF file of architecture llama or deci, computed in float64 with rotary pairs of neighbours."""

    def __init__(self, file: Path) -> None:
        reader = GGUFReader(file)
        self.keys = {name: field.contents() for name, field in reader.fields.items()}
        self.weights = {
            each.name: torch.tensor(dequantize(each.data, each.tensor_type)).double() for each in reader.tensors
        }
        self.types = {each.name: each.tensor_type.name for each in reader.tensors}
        self.architecture = self.keys["general.architecture"]

    def key(self, name: str) -> Any:
        return self.keys[f"{self.architecture}.{name}"]

    def by_layer(self, name: str) -> list[int]:
        found, layers = self.key(name), self.key("block_count")
        return found if isinstance(found, list) else [found] * layers

    def linear(self, x: Tensor, name: str) -> Tensor:
        bias = self.weights.get(f"{name}.bias")
        out = x @ self.weights[f"{name}.weight"].T
        return out if bias is None else out + bias

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.key("attention.layer_norm_rms_epsilon")).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]

    def turned(self, x: Tensor) -> Tensor:
        """Rotate vectors (N, H, D) by their positions."""
        D = self.key("rope.dimension_count")
        angles = self.key("rope.freq_base") ** (-torch.arange(0, D, 2).double() / D)
        angles = angles / self.weights.get("rope_freqs.weight", torch.ones(D // 2))
        turns = torch.arange(len(x)).double()[:, None] * angles
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(turns), turns)[:, None]).flatten(-2)

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits (N, V) of tokens (1, N)."""
        x, D = self.weights["token_embd.weight"][tokens[0]], self.key("attention.key_length")
        N = len(x)
        hidden = torch.full((N, N), -torch.inf).triu(1).double()
        heads = zip(self.by_layer("attention.head_count"), self.by_layer("attention.head_count_kv"), strict=True)
        for layer, (H, K) in enumerate(heads):
            block = f"blk.{layer}"
            if H:
                y = self.norm(x, f"{block}.attn_norm")
                query = self.turned(self.linear(y, f"{block}.attn_q").view(N, H, D))
                key = self.turned(self.linear(y, f"{block}.attn_k").view(N, K, D))
                value = self.linear(y, f"{block}.attn_v").view(N, K, D)
                out = torch.zeros(N, H, D, dtype=torch.float64)
                for head in range(H):
                    scores = query[:, head] @ key[:, head // (H // K)].T / D**0.5 + hidden
                    out[:, head] = scores.softmax(-1) @ value[:, head // (H // K)]
                x = x + self.linear(out.flatten(1), f"{block}.attn_output")
            else:
                assert not any(name.startswith(f"{block}.attn") for name in self.weights)
            y = self.norm(x, f"{block}.ffn_norm")
            gate = torch.nn.functional.silu(self.linear(y, f"{block}.ffn_gate"))
            x = x + self.linear(gate * self.linear(y, f"{block}.ffn_up"), f"{block}.ffn_down")
        words = "output" if "output.weight" in self.weights else "token_embd"
        return self.linear(self.norm(x, "output_norm"), words)


#: Families whose files are read in every case in the fast suite, or in the cases that are named.
FAST = {
    "llama": (*REMOVED,),
    "qwen2": ("none", "uneven"),
    "mistral": ("no attention", "group"),
    "llama-mqa-wide": ("equal", "first layer without attention"),
}


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, marks=() if case in fast else pytest.mark.slow)
        for name, fast in FAST.items()
        for case in REMOVED
    ],
)
def test_a_file_computes_the_logits_of_the_model(name: str, case: str, demo: LoadedModel, tmp_path: Path) -> None:
    lm = headscan.slice_heads(small(name, demo), REMOVED[case])
    tokens = ids(len(demo.tokenizer))
    written = write_gguf(lm, tmp_path / "m.gguf", type="f32")
    file = GgufModel(written.file)
    assert file.architecture == written.architecture
    assert (logits(lm, tokens) - file.logits(tokens)).abs().max() < 1e-4
    assert written.bytes == (tmp_path / "m.gguf").stat().st_size


def test_heads_of_zeros_fill_the_smaller_groups_and_no_place_of_the_cache(demo: LoadedModel, tmp_path: Path) -> None:
    lm = headscan.slice_heads(small("llama", demo), [(0, 0), (2, 0), (2, 1), (2, 2), (2, 5)])
    written = write_gguf(lm, tmp_path / "m.gguf", type="f32")
    file = GgufModel(written.file)
    assert file.architecture == "deci"
    assert file.by_layer("attention.head_count") == [6, 6, 2] and file.by_layer("attention.head_count_kv") == [2, 2, 1]
    query = file.weights["blk.0.attn_q.weight"].view(6, 8, 48).abs().sum((1, 2)) > 0
    assert query.tolist() == [True, True, False, True, True, True]  # the smaller group is the first one
    original, own, held = written.sizes
    assert (original.query_heads, own.query_heads, held.query_heads) == (18, 13, 14)
    assert (original.kv_bytes, own.kv_bytes, held.kv_bytes) == (192, 160, 160)
    assert sum(each.numel() for each in file.weights.values()) == held.parameters == own.parameters + 2 * 8 * 48


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_added_biases_are_kept_also_where_attention_is_gone(name: str, demo: LoadedModel, tmp_path: Path) -> None:
    removed = [*((0, head) for head in range(6)), *((1, head) for head in range(6)), (2, 4)]
    weights = {f"model.layers.{layer}.self_attn.o_proj.bias": torch.randn(48) for layer in range(3)}
    lm = headscan.slice_heads(small(name, demo), removed, weights)
    tokens = ids(len(demo.tokenizer))
    file = GgufModel(write_gguf(lm, tmp_path / "m.gguf", type="f32").file)
    assert (logits(lm, tokens) - file.logits(tokens)).abs().max() < 1e-4


def test_a_file_of_equal_layers_is_a_model_with_the_same_tokens(
    demo: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADSCAN_CACHE", str(tmp_path / "cache"))
    lm = headscan.slice_heads(demo, [(layer, head) for layer in range(6) for head in range(4)])
    written = write_gguf(lm, tmp_path / "m.gguf", type="f32")
    found = headscan.load(written.file, device="cpu", dtype="float32")
    assert written.architecture == "llama"
    text = "Hello world! 123 4567  foo\n\n\tbar's don't\u00e9t\u00e9 \u4f60\u597d 3.14"
    tokens = demo.tokenizer(text, return_tensors="pt").input_ids
    assert found.tokenizer(text).input_ids == tokens[0].tolist()
    assert (logits(lm, tokens) - logits(found, tokens)).abs().max() < 1e-4
    again = write_gguf(lm, tmp_path / "again.gguf", type="f32", tokenizer=written.file)
    assert again.file.read_bytes() == written.file.read_bytes()


def test_a_file_is_exported_with_its_own_tokenizer(
    demo: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADSCAN_CACHE", str(tmp_path / "cache"))
    first, again = tmp_path / "my.gguf", tmp_path / "again.gguf"
    write_gguf(demo, first, type="f32")
    assert main(["export", "gguf", str(first), "--out", str(again), "--type", "f32"]) == 0
    assert copied_keys(again) == copied_keys(first)
    (tmp_path / "elsewhere").mkdir()
    moved = first.rename(tmp_path / "elsewhere" / first.name)  # not converted again
    assert main(["export", "gguf", str(moved), "--out", str(again), "--type", "f32"]) == 0
    read = headscan.load(moved, device="cpu")
    moved.unlink()
    with pytest.raises(ExportError, match=r"read from my\.gguf, whose tokenizer is copied\. Pass that file"):
        write_gguf(read, again)


def test_matrices_have_the_type_that_is_named(demo: LoadedModel, tmp_path: Path) -> None:
    lm = headscan.slice_heads(demo, [(1, 0), (1, 1), (2, 3)])
    tokens = ids(len(demo.tokenizer))
    differences = {}
    for type in ("f32", "f16", "q8_0"):
        file = GgufModel(write_gguf(lm, tmp_path / f"{type}.gguf", type=type).file)  # type: ignore[arg-type]
        for name, weight in file.weights.items():
            is_whole = type != "q8_0" or weight.shape[-1] % 32 == 0
            assert file.types[name] == ("F32" if weight.ndim == 1 else type.upper() if is_whole else "F16")
        differences[type] = (logits(lm, tokens) - file.logits(tokens)).abs().max().item()
    # The demo's weights are numbers of 16 bits.
    assert max(differences["f32"], differences["f16"]) < 1e-4 < differences["q8_0"] < 0.5


def test_what_the_format_cannot_hold_is_refused_and_leaves_no_file(demo: LoadedModel, tmp_path: Path) -> None:
    def refused(lm: LoadedModel, message: str, **options: Any) -> None:
        with pytest.raises(ExportError, match=message):
            write_gguf(lm, tmp_path / "m.gguf", **options)
        assert not list(tmp_path.iterdir())

    refused(small("qwen3", demo), "qwen3 has norms of queries and keys, which have no place there")
    refused(small("mistral-sliding", demo), "sliding window: 20 tokens")
    refused(make_loaded("llama"), "the tokenizer of llama has no known form in GGUF: it has no tokenizer.json")
    large = small("llama", demo)
    large.model.model.layers[1].mlp.up_proj.weight.data[3, 3] = 1e5
    refused(large, r"blk.1.ffn_up.weight has numbers beyond F16 .limit 65504.. Write type f32", type="f16")
    yarn = small("llama", demo)
    yarn.model.config.rope_parameters = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
    refused(yarn, "rotary positions of llama: yarn")
