"""Small random models: each is built once in a process, and every caller gets a copy of its own.

A copy takes a tenth of the time of a new model.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import headscan
from headscan import architectures
from headscan.architectures import VOCABULARY
from headscan.models.loaded_model import LoadedModel


@cache
def _loaded(name: str, seed: int, dtype: torch.dtype) -> tuple[LoadedModel, Tensor]:
    return architectures.make_loaded(name, seed=seed, dtype=dtype), torch.get_rng_state()


@cache
def _model(name: str, seed: int, dtype: torch.dtype, vocabulary: int) -> tuple[PreTrainedModel, Tensor]:
    return architectures.make_model(name, seed=seed, dtype=dtype, vocabulary=vocabulary), torch.get_rng_state()


def make_loaded(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Return what `headscan.architectures.make_loaded` returns; random numbers continue as after it."""
    if torch.get_default_device().type != "cpu":  # such as the meta device, whose tensors hold no numbers
        return architectures.make_loaded(name, seed=seed, dtype=dtype)
    lm, random_state = _loaded(name, seed, dtype)
    torch.set_rng_state(random_state)
    return copy.deepcopy(lm)


def make_model(
    name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, vocabulary: int = VOCABULARY
) -> PreTrainedModel:
    """Return what `headscan.architectures.make_model` returns; random numbers continue as after it."""
    if torch.get_default_device().type != "cpu":
        return architectures.make_model(name, seed=seed, dtype=dtype, vocabulary=vocabulary)
    model, random_state = _model(name, seed, dtype, vocabulary)
    torch.set_rng_state(random_state)
    return copy.deepcopy(model)


def load_saved(name: str, folder: Path, *, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Return the model of a family, loaded from a checkpoint that is written into a folder."""
    make_loaded(name, dtype=dtype).model.save_pretrained(folder)
    return headscan.load(folder)


#: Families with attention code of their own; the attention of the others differs in sizes and norms only.
DISTINCT = frozenset(
    "llama llama-mqa-wide qwen3 qwen3_next mistral-sliding gemma2-softcap gemma3 gemma3n gemma4 phi3 gpt2 gpt_bigcode "
    "gpt_neox gptj opt bloom falcon-alibi mpt deepseek_v3 gpt_oss llama4 jamba falcon_h1 nemotron_h lfm2 laguna "
    "granitemoehybrid minicpm3 mimo_v2_flash dbrx gemma3-wrapper t5 bert marian".split()
)


def slow(*cases: Any) -> list[Any]:
    """Return test cases, values or tuples of them, that are marked slow."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]


def distinct_first(cases: Iterable[Any], fast: Collection[str] = DISTINCT) -> list[Any]:
    """Return test cases, families or tuples that begin with one; those outside ``fast`` are marked slow."""
    return [case if (case if isinstance(case, str) else case[0]) in fast else slow(case)[0] for case in cases]
