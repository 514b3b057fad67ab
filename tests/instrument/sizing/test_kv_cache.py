"""KV-cache sizes from the meta device equal those of real passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from headscan.architectures import ENCODER_DECODERS, ENCODERS, FAMILIES
from headscan.errors import UnsupportedModelError
from headscan.sizing.model_sizes import NO_CACHE, LayerCache, find_caches
from tests.small_models import distinct_first, make_loaded, make_model


def real_caches(model: PreTrainedModel, tokens: int) -> dict[str, list[tuple[int, int, int]]]:
    """Bytes, heads and key width of each layer's ``past_key_values`` after a pass over one sequence."""
    ids = torch.full((1, tokens), 5)
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        cache: Any = getattr(model(input_ids=ids, use_cache=True, **more), "past_key_values", None)
    if cache is None:
        return {}
    if model.config.is_encoder_decoder:
        return {"self": _held(cache.self_attention_cache), "cross": _held(cache.cross_attention_cache)}
    return {"self": _held(cache)}


def _held(cache: Any) -> list[tuple[int, int, int]]:
    found = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if isinstance(keys, Tensor) and isinstance(values, Tensor):
            found.append((keys.nbytes + values.nbytes, keys.shape[1], keys.shape[-1]))
        else:
            found.append((0, 0, 0))
    return found


@pytest.mark.parametrize("family", distinct_first([*FAMILIES, *ENCODERS, *ENCODER_DECODERS]))
def test_caches_are_those_of_a_real_pass(family: str) -> None:
    model = make_model(family)
    caches = find_caches(model)
    for tokens in (3, 64):  # below and above every window
        real = real_caches(model, tokens)
        assert caches.keys() == real.keys()
        for kind, layers in real.items():
            assert [(each.bytes(tokens), each.heads, each.key_dim) for each in caches[kind]] == layers


def test_latent_caches_hold_the_latent() -> None:
    """MLA: 20 numbers a token and layer, where keys and values of all heads are 132."""
    (latent, *_) = caches = find_caches(make_model("deepseek_v3"))["self"]
    assert latent == LayerCache(heads=1, bytes_per_token=4 * (16 + 4), tokens=None, key_dim=16)
    assert sum(each.bytes(64) for each in caches) == 15_360


@pytest.mark.parametrize(
    ("family", "tokens"),
    [("llama", [None] * 3), ("gemma3", [19, None, 19]), ("llama4", [31, None, 31]), ("gpt_neo", [None] * 3)],
)
def test_windows_and_chunks_bound_the_cache(family: str, tokens: list[int | None]) -> None:
    assert [each.tokens for each in find_caches(make_model(family))["self"]] == tokens


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.borrows])
def test_layers_that_share_a_cache_have_none(family: str) -> None:
    lm, borrows = make_loaded(family), FAMILIES[family].borrows
    assert {s.layer: s.kv_shared_from for s in lm.grid.sites if s.kv_shared_from is not None} == borrows
    assert [layer for layer, cache in enumerate(find_caches(lm.model)["self"]) if cache == NO_CACHE] == list(borrows)


def test_all_other_layers_have_keys_and_values_of_their_own() -> None:
    for family in ("llama", "gpt2", "bloom", "deepseek_v3", "bert", "t5", "falcon-mqa"):
        assert all(site.kv_shared_from is None for site in make_loaded(family).grid.sites)


def test_bytes_follow_the_dtype_and_a_deep_model_the_first_layers() -> None:
    model = make_model("gemma2-softcap")
    whole = find_caches(model)["self"]
    assert [each.bytes_per_token for each in find_caches(model.to(torch.bfloat16))["self"]] == [
        each.bytes_per_token // 2 for each in whole
    ]
    config = model.config
    config.num_hidden_layers, config.layer_types = 40, ["sliding_attention", "full_attention"] * 20
    deep = find_caches(type(model)(config))["self"]
    assert deep == whole[:2] * 20


def test_the_model_stays_as_it_is() -> None:
    model = make_model("gemma3n")
    before, state = model.config.to_dict(), torch.get_rng_state()
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    find_caches(model)
    assert model.config.to_dict() == before and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    assert len(model.model.layers) == 3


def test_models_that_cannot_run_without_weights_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")

    def reads_numbers(self: Any, input_ids: Tensor, **_: Any) -> None:
        input_ids.cpu().numpy()

    monkeypatch.setattr(type(model.base_model), "forward", reads_numbers)
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM cannot be sized on the meta device"):
        find_caches(model)
