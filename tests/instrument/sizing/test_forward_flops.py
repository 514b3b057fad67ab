"""Operations of a forward pass: as torch counts them, and attention token by token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from headscan.model_spec import ModelSpec
from headscan.sizing.forward_flops import ForwardFlops, forward_flops
from tests.small_models import make_model

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
    assert found.per_token(tokens, calls=2, logits=True) == pytest.approx(220 + 4 * seen / tokens)


@pytest.mark.parametrize("family", ["gemma4", "bert", "t5", "bart", "jamba"])
def test_layers_that_differ_and_encoders_are_counted(family: str, tmp_path: Path) -> None:
    make_model(family).config.save_pretrained(tmp_path)
    found = forward_flops(ModelSpec(str(tmp_path)))
    assert found.per_token(64, logits=True) > found.per_token(8, logits=True) > 0
