"""Models as GGUF files: read by transformers, and by a plain computation of llama.cpp's architectures."""

from __future__ import annotations

import copy
import json
import math
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from gguf import GGUFReader, dequantize
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import headscan
from headscan.attention.discovery import discover
from headscan.cli.main import main
from headscan.errors import ExportError, ModelLoadError, UnknownNameError
from headscan.export.gguf_file import write_gguf
from headscan.export.gguf_tokenizer import copied_keys, made_keys
from headscan.models.loaded_model import LoadedModel
from tests.jobs.conftest import make_tokenizer
from tests.small_models import make_loaded, make_model

VOCABULARY = 300
#: Heads of layers with 6 query and 2 KV heads, by case: whole groups; groups of different sizes; all heads of a layer.
REMOVED = {
    "none": [],
    "group": [(1, 0), (1, 1), (1, 2)],
    "uneven": [(0, 0), (2, 1), (2, 2), (2, 5)],
    "no attention": [(1, head) for head in range(6)],
    "first layer without attention": [*((0, head) for head in range(6)), (2, 3)],
    "two layers without attention": [*((layer, head) for layer in (0, 1) for head in range(6)), (2, 4)],
    "equal": [(layer, head) for layer in range(3) for head in (1, 4)],
}

#: Cases with biases that stand for the mean output of removed heads.
WITH_BIAS = [("group", True), ("no attention", True), ("two layers without attention", True)]


def without_heads(lm: LoadedModel, case: str, has_bias: bool) -> LoadedModel:
    """Return a model without the heads of a case, with biases on request."""
    layers = {layer for layer, _ in REMOVED[case]} if has_bias else ()
    biases = {f"model.layers.{layer}.self_attn.o_proj.bias": torch.randn(48) for layer in layers}
    return headscan.slice_heads(lm, REMOVED[case], biases)


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return headscan.load("demo", device="cpu", dtype="float32")


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE of 300 tokens, whose keys are read in milliseconds."""
    return make_tokenizer(VOCABULARY)


def small(name: str) -> LoadedModel:
    """Return a small random model with a tokenizer."""
    model = make_model(name, vocabulary=VOCABULARY)
    return LoadedModel(model, copy.deepcopy(tokenizer()), discover(model), name)


def ids() -> Tensor:
    return torch.randint(VOCABULARY, (1, 23), generator=torch.Generator().manual_seed(0))


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
        scale = self.keys.get(f"{self.architecture}.rope.scaling.attn_factor", 1.0)
        if self.keys.get(f"{self.architecture}.rope.scaling.type") == "yarn":
            factor, known = self.key("rope.scaling.factor"), self.key("rope.scaling.original_context_length")
            # Frequencies with more than 32 turns in the known context stay, those with less than one are interpolated.
            edges = [
                D * math.log(known / (turns * 2 * math.pi)) / (2 * math.log(self.key("rope.freq_base")))
                for turns in (32, 1)
            ]
            low, high = max(math.floor(edges[0]), 0), min(math.ceil(edges[1]), D - 1)
            interpolated = ((torch.arange(D // 2).double() - low) / max(high - low, 1e-3)).clamp(0, 1)
            angles = angles * (1 - interpolated) + angles / factor * interpolated
            scale *= 1 + 0.1 * math.log(factor)
        turns = torch.arange(len(x)).double()[:, None] * angles
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.full_like(turns, scale), turns)[:, None]).flatten(-2)

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


@pytest.mark.parametrize(
    ("name", "case", "has_bias"),
    [
        *(("llama", case, False) for case in REMOVED),
        *(("llama", *each) for each in WITH_BIAS),
        ("qwen2", "none", False),
        ("qwen2", "uneven", True),
        ("qwen2", "first layer without attention", True),
        ("mistral", "no attention", False),
        ("mistral", "group", False),
        ("llama-mqa-wide", "equal", False),
        ("llama-mqa-wide", "first layer without attention", False),
    ],
)
def test_a_file_computes_the_logits_of_the_model_and_is_read_back(
    name: str, case: str, has_bias: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADSCAN_CACHE", str(tmp_path / "cache"))
    lm = without_heads(small(name), case, has_bias)
    tokens = ids()
    written = write_gguf(lm, tmp_path / "m.gguf", type="f32")
    file = GgufModel(written.file)
    assert file.architecture == written.architecture
    assert (logits(lm, tokens) - file.logits(tokens)).abs().max() < 1e-4
    assert written.bytes == (tmp_path / "m.gguf").stat().st_size
    if not has_bias:
        return
    found = headscan.load(written.file, device="cpu")
    assert found.grid == lm.grid
    assert torch.equal(logits(found, tokens), logits(lm, tokens))
    text = "Hello world! 123  foo\n\tbar's \u00e9 \u4f60"
    if name == "llama":  # transformers splits words for an unpruned qwen2 by a rule of its own
        assert found.tokenizer(text).input_ids == lm.tokenizer(text).input_ids
    again = headscan.slice_heads(found, [(2, 0)])
    assert write_gguf(again, tmp_path / "again.gguf", tokenizer=tmp_path / "m.gguf").architecture


def test_heads_of_zeros_fill_the_smaller_groups_and_no_place_of_the_cache(tmp_path: Path) -> None:
    lm = headscan.slice_heads(small("llama"), [(0, 0), (2, 0), (2, 1), (2, 2), (2, 5)])
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADSCAN_CACHE", str(tmp_path / "cache"))
    first, again = tmp_path / "my.gguf", tmp_path / "again.gguf"
    write_gguf(small("llama"), first, type="f32")
    assert main(["export", "gguf", str(first), "--out", str(again), "--type", "f32"]) == 0
    assert copied_keys(again) == copied_keys(first)
    (tmp_path / "elsewhere").mkdir()
    moved = first.rename(tmp_path / "elsewhere" / first.name)  # not converted again
    assert main(["export", "gguf", str(moved), "--out", str(again), "--type", "f32"]) == 0
    read = headscan.load(moved, device="cpu")
    moved.unlink()
    with pytest.raises(ExportError, match=r"read from my\.gguf, whose tokenizer is copied\. Pass that file"):
        write_gguf(read, again)


def test_matrices_have_the_type_that_is_named(tmp_path: Path) -> None:
    lm = headscan.slice_heads(small("llama"), [(1, 0), (1, 1), (2, 3)])
    for weight in lm.model.parameters():
        weight.data = weight.data.bfloat16().float()
    tokens = ids()
    differences = {}
    for type in ("f32", "f16", "bf16", "q8_0"):
        file = GgufModel(write_gguf(lm, tmp_path / f"{type}.gguf", type=type).file)  # type: ignore[arg-type]
        for name, weight in file.weights.items():
            is_whole = type != "q8_0" or weight.shape[-1] % 32 == 0
            assert file.types[name] == ("F32" if weight.ndim == 1 else type.upper() if is_whole else "F16")
        differences[type] = (logits(lm, tokens) - file.logits(tokens)).abs().max().item()
    # The weights are numbers of both types of 16 bits.
    assert max(differences[kind] for kind in ("f32", "f16", "bf16")) < 1e-4 < differences["q8_0"] < 0.5
    with pytest.raises(UnknownNameError, match=r"unknown type 'Q8_0'; did you mean q8_0"):
        write_gguf(lm, tmp_path / "m.gguf", type="Q8_0")  # type: ignore[arg-type]


def test_what_the_format_cannot_hold_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    def refused(lm: LoadedModel, message: str, **options: Any) -> None:
        with pytest.raises(ExportError, match=message):
            write_gguf(lm, tmp_path / "m.gguf", **options)
        assert not list(tmp_path.iterdir())

    refused(small("qwen3"), "qwen3 has norms of queries and keys, which have no place there")
    refused(small("mistral-sliding"), "sliding window: 20 tokens")
    refused(make_loaded("llama"), "the tokenizer of llama has no known form in GGUF: it has no tokenizer.json")
    large = small("llama")
    large.model.model.layers[1].mlp.up_proj.weight.data[3, 3] = 1e5
    refused(large, r"blk.1.ffn_up.weight has numbers beyond F16 .limit 65504.. Write type f32", type="f16")
    other = small("llama")
    for kind in ("dynamic", "longrope"):
        other.model.config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
        refused(other, f"rotary positions of llama: {kind} .limit default, linear, llama3, yarn, on whole heads")


#: Rotary positions, and the keys of a file that hold them.
SCALED = {
    "yarn": ({"rope_type": "yarn", "factor": 4.0}, ["attn_factor"], False),
    "yarn with a factor of attention": ({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3}, [], False),
    "yarn with other limits": ({"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0, "beta_slow": 2.0}, [], True),
    "yarn that is not rounded": ({"rope_type": "yarn", "factor": 4.0, "truncate": False}, [], True),
    "yarn with scales": ({"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.0}, [], False),
    "linear": ({"rope_type": "linear", "factor": 4.0}, [], True),
    "llama3": ({"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, [], True),
}


@pytest.mark.parametrize("case", SCALED)
def test_scaled_rotary_positions(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSCAN_CACHE", str(tmp_path / "cache"))
    rope, absent, has_factors = SCALED[case]
    original = small("llama").model.config.to_dict()
    scaled = {"rope_theta": 1e4, "original_max_position_embeddings": 16, **rope}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**original | {"rope_parameters": scaled})).eval()
    lm = headscan.slice_heads(LoadedModel(model, tokenizer(), discover(model), "llama"), [(0, 0), (1, 4)])
    with torch.no_grad():
        for layer in lm.model.model.layers:
            layer.self_attn.q_proj.weight.mul_(20)
            layer.self_attn.k_proj.weight.mul_(20)
    tokens = ids()
    file = GgufModel(write_gguf(lm, tmp_path / "m.gguf", type="f32").file)
    assert (logits(lm, tokens) - file.logits(tokens)).abs().max() < 1e-4
    assert ("rope_freqs.weight" in file.weights) == has_factors
    assert not any(f"{file.architecture}.rope.scaling.{name}" in file.keys for name in absent)
    assert (logits(headscan.load(tmp_path / "m.gguf", device="cpu"), tokens) - logits(lm, tokens)).abs().max() < 1e-5


def test_a_deci_file_of_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSCAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("headscan.export.gguf_file.GGUF_RECORD", "another.key")
    write_gguf(without_heads(small("llama"), "group", False), tmp_path / "m.gguf")
    with pytest.raises(ModelLoadError, match=r"is a deci file without the configuration of its model"):
        headscan.load(tmp_path / "m.gguf", device="cpu")


def sentencepiece(spaces: str = "prefix") -> PreTrainedTokenizerFast:
    """Return a BPE of SentencePiece as transformers converts it: each two tokens that make a third are merged."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    made = [
        "\u2581t",
        "he",
        "\u2581the",
        "in",
        "er",
        "\u2581\u2581",
        "\u2581\u2581\u2581\u2581",
        "hel",
        "lo",
        "hello",
        "\u2581in",
        "ll",
    ]
    characters = sorted({*"".join(made), *"abcdefgxyz.,!"})
    vocabulary = {word: at for at, word in enumerate(["<unk>", "<s>", "</s>", *bytes_, *made, *characters])}
    cuts = [(word[:at], word[at:]) for word in made for at in range(1, len(word))]
    merges = [pair for pair in cuts if all(part in vocabulary for part in pair)]
    model = models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    found = tokenizers.Tokenizer(model)
    replace = normalizers.Replace(" ", "\u2581")
    found.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace]) if spaces == "prefix" else replace
    if spaces == "words":
        found.normalizer, found.pre_tokenizer = None, pre_tokenizers.Metaspace(split=True)
    found.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    found.add_special_tokens([tokenizers.AddedToken(word, special=True, normalized=False) for word in ("<s>", "</s>")])
    found.add_tokens([tokenizers.AddedToken("<tool>", normalized=False)])
    found.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=found, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def as_llama_cpp(keys: dict[str, Any], text: str) -> list[int]:
    """Return the tokens of a text without special ones, merged by the scores of a file."""
    tokens, scores = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.scores"]
    number = {token: at for at, token in enumerate(tokens)}
    prefix = " " if keys["tokenizer.ggml.add_space_prefix"] and text else ""
    parts = list((prefix + text).replace(" ", "\u2581"))
    while True:
        joint = [(scores[number[a + b]], -at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in number]
        if not joint:
            break
        at = -max(joint)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    found = []
    for part in parts:
        found += [number[part]] if part in number else [number[f"<0x{byte:02X}>"] for byte in part.encode()]
    return found


@pytest.mark.parametrize("spaces", ["prefix", "none"])
def test_a_bpe_of_sentencepiece_has_scores_and_types(spaces: str) -> None:
    tokenizer = sentencepiece(spaces)
    keys = {key.name: key.value for key in made_keys(tokenizer, len(tokenizer) + 2, "m")}
    assert keys["tokenizer.ggml.model"] == "llama" and "tokenizer.ggml.merges" not in keys
    assert keys["tokenizer.ggml.add_bos_token"] and keys["tokenizer.ggml.add_space_prefix"] == (spaces == "prefix")
    types = dict(zip(keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"], strict=True))
    named = {"<unk>": 2, "<s>": 3, "</s>": 3, "<tool>": 4, "<0x41>": 6, "he": 1, f"[PAD{len(tokenizer)}]": 5}
    assert {word: types[word] for word in named} == named
    for text in (
        "the hello in  there",
        " the",
        "    x",
        "",
        "a\nb\tc",
        "\u00e9 \U0001f600 \u4f60",
        "hellollo ther",
        "\u2581\u2581",
    ):
        assert as_llama_cpp(keys, text) == tokenizer(text, add_special_tokens=False).input_ids, text


def test_a_bpe_that_scores_do_not_express_is_refused() -> None:
    with pytest.raises(ExportError, match=r"treats spaces otherwise than SentencePiece \(Metaspace\)"):
        made_keys(sentencepiece("words"), 400, "m")

    def changed(change: Any) -> PreTrainedTokenizerFast:
        saved = json.loads(sentencepiece().backend_tokenizer.to_str())
        change(saved["model"])
        return PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(saved)))

    def more(model: dict[str, Any]) -> None:
        model["vocab"]["the"] = 390
        model["merges"] += [["t", "he"], ["\u2581", "the"]]

    with pytest.raises(ExportError, match="the merges for its token '\u2581the' do not follow each other"):
        made_keys(changed(more), 400, "m")
    with pytest.raises(ExportError, match="its tokenizer does not merge 'l' and 'o'"):
        made_keys(changed(lambda model: model["merges"].remove(["l", "o"])), 400, "m")


def test_named_chat_templates_are_kept(tmp_path: Path) -> None:
    lm = small("llama")
    lm.tokenizer.chat_template = {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}
    keys = GgufModel(write_gguf(lm, tmp_path / "m.gguf").file).keys
    assert keys["tokenizer.chat_template"] == "{{ 1 }}" and keys["tokenizer.chat_template.tool_use"] == "{{ 2 }}"
    assert keys["tokenizer.chat_templates"] == ["tool_use"]
    lm.tokenizer.chat_template = {"tool use": "{{ 2 }}"}
    with pytest.raises(ExportError, match=r"names a chat template 'tool use' \(limit letters, digits and _\)"):
        write_gguf(lm, tmp_path / "n.gguf")
    lm.tokenizer.chat_template = None
