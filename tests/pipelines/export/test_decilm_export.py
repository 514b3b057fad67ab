"""Models as DeciLM folders: read back from disk by a plain computation of that architecture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import headscan
from headscan.errors import ExportError, PruningError
from headscan.models.loaded_model import LoadedModel
from headscan.pipelines.cli.main import main
from headscan.pipelines.export.decilm_folder import write_decilm
from tests.pipelines.export.test_gguf_export import REMOVED, ids, logits, small


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return headscan.load("demo", device="cpu", dtype="float32")


class DecilmModel:
    """A DeciLM folder, computed in float64 with explicit softmax."""

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.weights: dict[str, Tensor] = {}
        for file in folder.glob("*.safetensors"):
            self.weights |= {name: each.double() for name, each in load_file(file).items()}

    def linear(self, x: Tensor, name: str) -> Tensor:
        bias = self.weights.get(f"{name}.bias")
        return x @ self.weights[f"{name}.weight"].T + (0 if bias is None else bias)

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]

    def turned(self, x: Tensor) -> Tensor:
        """Rotate vectors (N, H, D) by their positions; the halves of a vector are pairs."""
        D = self.config["head_dim"]
        angles = self.config["rope_theta"] ** (-torch.arange(0, D, 2).double() / D)
        turns = (torch.arange(len(x)).double()[:, None] * angles)[:, None]
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * turns.cos() - second * turns.sin(), second * turns.cos() + first * turns.sin()], -1)

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits (N, V) of tokens (1, N)."""
        x, D, H = (
            self.weights["model.embed_tokens.weight"][tokens[0]],
            self.config["head_dim"],
            self.config["num_attention_heads"],
        )
        N = len(x)
        hidden = torch.full((N, N), -torch.inf).triu(1).double()
        for layer, block in enumerate(self.config["block_configs"]):
            name, group = f"model.layers.{layer}", block["attention"]["n_heads_in_group"]
            if block["attention"]["no_op"]:
                assert not any(each.startswith(f"{name}.self_attn") for each in self.weights)
            else:
                y = self.norm(x, f"{name}.input_layernorm")
                query = self.turned(self.linear(y, f"{name}.self_attn.q_proj").view(N, H, D))
                key = self.turned(self.linear(y, f"{name}.self_attn.k_proj").view(N, H // group, D))
                value = self.linear(y, f"{name}.self_attn.v_proj").view(N, H // group, D)
                out = torch.zeros(N, H, D, dtype=torch.float64)
                for head in range(H):
                    scores = query[:, head] @ key[:, head // group].T / D**0.5 + hidden
                    out[:, head] = scores.softmax(-1) @ value[:, head // group]
                x = x + self.linear(out.flatten(1), f"{name}.self_attn.o_proj")
            y = self.norm(x, f"{name}.post_attention_layernorm")
            gate = torch.nn.functional.silu(self.linear(y, f"{name}.mlp.gate_proj"))
            x = x + self.linear(gate * self.linear(y, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")
        words = "lm_head" if "lm_head.weight" in self.weights else "model.embed_tokens"
        return self.linear(self.norm(x, "model.norm"), words)


@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral", "llama-mqa-wide"])
@pytest.mark.parametrize("case", REMOVED)
def test_a_folder_computes_the_logits_of_the_model(name: str, case: str, demo: LoadedModel, tmp_path: Path) -> None:
    lm = headscan.slice_heads(small(name, demo), REMOVED[case])
    tokens = ids(len(demo.require_tokenizer()))
    written = write_decilm(lm, tmp_path / "served")
    folder = DecilmModel(written.folder)
    assert (logits(lm, tokens) - folder.logits(tokens)).abs().max() < 1e-4
    for block in folder.config["block_configs"]:
        group = block["attention"]["n_heads_in_group"]
        assert block["attention"]["no_op"] or folder.config["num_attention_heads"] % group == 0
    original, own, served = written.sizes
    assert own.kv_bytes <= served.kv_bytes <= original.kv_bytes
    assert own.parameters <= served.parameters
    assert served.parameters <= original.parameters or case != "none"


def test_a_folder_is_readable_and_complete_or_missing(demo: LoadedModel, tmp_path: Path) -> None:
    target = tmp_path / "served"
    write_decilm(demo, target)
    plain = tmp_path / "plain"
    plain.write_text("")
    assert {oct(file.stat().st_mode & 0o777) for file in target.iterdir()} == {oct(plain.stat().st_mode & 0o777)}
    with pytest.raises(PruningError):
        write_decilm(demo, target)
    with pytest.raises(ExportError, match="cannot be written"):
        write_decilm(demo, plain / "served")
    assert not (plain / "served").exists()
    with pytest.raises(ExportError, match="norms of queries and keys"):
        write_decilm(small("qwen3", demo), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_the_command_line_says_what_the_engine_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "decilm", "demo", "--out", str(tmp_path / "served")]) == 0
    said = capsys.readouterr().out
    assert "saved in the engine: 0.0% of the KV cache" in said and "vllm serve" in said
    assert main(["export", "decilm", "demo", "--out", str(tmp_path / "x"), "--type", "f32"]) == 2
    assert "--type has no effect on decilm (only on gguf)" in capsys.readouterr().err
