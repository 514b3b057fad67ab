"""Damages and caches of a model over several devices, and partly on disk: those of one that is loaded whole."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import headscan
from headscan.architectures import VOCABULARY
from headscan.models.loaded_model import LoadedModel, Sharding
from tests.instrument.kv.cache_plans import NARROW, make_cache, random_plan
from tests.small_models import make_model

SHARDINGS = {"two devices": Sharding(("cpu", "cpu"), ((0, 1), (1, 3))), "disk": Sharding(("cpu",), ((0, 1),), "disk")}


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sharded") / request.param
    make_model(request.param).save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield


@torch.no_grad()
def with_cache(lm: LoadedModel, ids: Tensor) -> Tensor:
    cache = make_cache(lm, random_plan(lm, (NARROW, ("full", None, None))))
    return torch.cat([lm.model(input_ids=part, past_key_values=cache).logits for part in ids.split([30, 1, 9], 1)], 1)


@pytest.mark.parametrize("name", SHARDINGS)
def test_damages_and_caches_are_those_of_the_whole_model(name: str, folder: Path) -> None:
    ids = torch.randint(5, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(0))
    whole, sharded = headscan.load(folder, device="cpu"), headscan.load(folder, device=SHARDINGS[name])
    damage = headscan.kv_damage(whole, ids, sink=2, recent=8)
    assert not damage.isnan().any() and damage.abs().max() > 0
    torch.testing.assert_close(headscan.kv_damage(sharded, ids, sink=2, recent=8), damage, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(with_cache(sharded, ids), with_cache(whole, ids), rtol=1e-5, atol=1e-6)
    # Measuring leaves the model as it was.
    torch.testing.assert_close(sharded.model(input_ids=ids).logits, whole.model(input_ids=ids).logits)
