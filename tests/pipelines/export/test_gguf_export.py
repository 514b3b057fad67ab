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
from headscan.models.loaded_model import LoadedModel
from headscan.pipelines.export.gguf_file import write_gguf
from tests.small_models import make_model

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


@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral", "llama-mqa-wide"])
@pytest.mark.parametrize("case", REMOVED)
def test_a_file_computes_the_logits_of_the_model(name: str, case: str, demo: LoadedModel, tmp_path: Path) -> None:
    lm = headscan.slice_heads(small(name, demo), REMOVED[case])
    tokens = ids(len(demo.tokenizer))
    written = write_gguf(lm, tmp_path / "m.gguf", type="f32")
    file = GgufModel(written.file)
    assert file.architecture == written.architecture
    assert (logits(lm, tokens) - file.logits(tokens)).abs().max() < 1e-4
    assert written.bytes == (tmp_path / "m.gguf").stat().st_size
