"""A model over several devices, and partly on disk: the same heads, numbers and logits as of one that is loaded whole.

A CPU stands for all devices here; what is on disk goes through accelerate's own hooks, as on GPUs.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import headscan
from headscan.architectures import VOCABULARY
from headscan.errors import ModelLoadError
from headscan.models.loaded_model import LoadedModel, Sharding, find_layout
from tests.instrument.kv.cache_plans import FULL, NARROW, make_cache, random_plan
from tests.small_models import make_model

SHARDINGS = {
    "two devices": Sharding(("cpu", "cpu"), ((0, 1), (1, 3))),
    "disk": Sharding(("cpu",), ((0, 1),), "disk"),
    "all blocks on disk": Sharding(("cpu",), ((0, 0),), "disk"),
}


def sharding_on(device: torch.device, name: str) -> Sharding:
    """Return the same blocks on a GPU; what was on the second CPU is in RAM."""
    if device.type == "cpu":
        return SHARDINGS[name]
    assert device.index is not None
    return Sharding((device.index,), SHARDINGS[name].layers[:1], "disk" if "disk" in name else "cpu")


WHATS = (
    headscan.HeadMask([(0, 1), (2, 3)]),
    headscan.HeadRule("output_norm_ln", threshold=0.9),
    headscan.HeadRule("entropy", threshold=2.0),
    headscan.HeadRule("projected_output_norm_ln", threshold=0.9),
)


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3", "gpt2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sharding") / request.param
    make_model(request.param).save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path


def logits(lm: LoadedModel, what: headscan.HeadMask | headscan.HeadRule, ids: torch.Tensor) -> torch.Tensor:
    with headscan.intervene(lm, what):
        return lm.model(input_ids=ids).logits


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHARDINGS)
def test_numbers_and_logits_are_those_of_the_whole_model(name: str, folder: Path, device: torch.device) -> None:
    def same(found: Tensor, expected: Tensor) -> None:
        bound = 0.0 if device.type == "cpu" else 1e-5
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound)

    ids = torch.randint(5, VOCABULARY, (2, 25), generator=torch.Generator().manual_seed(0)).to(device)
    whole, sharded = (headscan.load(folder, device=where) for where in (str(device), sharding_on(device, name)))
    on_disk = any(parameter.is_meta for parameter in sharded.model.parameters())
    assert on_disk is ("disk" in name or device.type != "cpu")
    assert sharded.grid == whole.grid
    assert sharded.device == device
    found = headscan.collect(sharded, ids)
    assert "projected_output_norm" in found  # whose factor needs the weight
    for statistic, values in headscan.collect(whole, ids).items():
        same(found[statistic], values)
    plain = whole.model(input_ids=ids).logits
    same(sharded.model(input_ids=ids).logits, plain)
    for what in WHATS:
        ablated = logits(whole, what, ids)
        assert not torch.equal(ablated, plain), what
        same(logits(sharded, what, ids), ablated)


@torch.no_grad()
def with_cache(lm: LoadedModel, ids: Tensor) -> Tensor:
    cache = make_cache(lm, random_plan(lm, (NARROW, FULL)))
    return torch.cat([lm.model(input_ids=part, past_key_values=cache).logits for part in ids.split([30, 1, 9], 1)], 1)


@pytest.mark.parametrize("name", ["two devices", "disk"])
def test_derivatives_and_caches_are_those_of_the_whole_model(name: str, folder: Path) -> None:
    ids = torch.randint(5, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(0))
    whole, sharded = headscan.load(folder, device="cpu"), headscan.load(folder, device=SHARDINGS[name])
    for measure in (headscan.importance, partial(headscan.kv_damage, sink=2, recent=8)):
        expected, found = measure(whole, ids), measure(sharded, ids)
        if isinstance(expected, Tensor):
            expected, found = {"damage": expected}, {"damage": found}
        for each, values in expected.items():
            assert values.nan_to_num().abs().max() > 0
            torch.testing.assert_close(found[each], values, rtol=1e-4, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(with_cache(sharded, ids), with_cache(whole, ids), rtol=1e-5, atol=1e-6)
    # Measuring leaves the model as it was.
    assert all(weight.requires_grad for weight in sharded.model.parameters())
    torch.testing.assert_close(sharded.model(input_ids=ids).logits, whole.model(input_ids=ids).logits)


def test_offloaded_files_are_deleted_with_the_model(folder: Path, temporary: Path) -> None:
    lm = headscan.load(folder, device=SHARDINGS["disk"], dtype="bfloat16")
    assert list(temporary.glob("headscan-offload-*"))
    headscan.collect(lm, torch.full((1, 9), 5))
    del lm
    gc.collect()
    assert not list(temporary.glob("headscan-offload-*"))
    with pytest.raises(ModelLoadError, match=r"lacks|does not load|safetensors"):
        bare = temporary / "bare"
        bare.mkdir()
        (bare / "config.json").write_text((folder / "config.json").read_text())
        headscan.load(bare, device=SHARDINGS["disk"])
    assert not list(temporary.glob("headscan-offload-*"))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "gemma3n", "deepseek_v3", "llava", "falcon_h1", "t5"])
def test_every_part_has_a_device(family: str) -> None:
    with torch.device("meta"):
        model = make_model(family)
    layout = find_layout(model)
    blocks = len(layout.blocks)
    device_map = Sharding((0, 1), ((0, 2), (2, blocks))).device_map(model)
    assert [device_map[block] for block in layout.blocks] == [0, 0] + [1] * (blocks - 2)
    assert device_map[layout.embedding] == 0
    assert layout.head is not None
    assert device_map[layout.head] == (0 if layout.tied else 1)
    for name in model.state_dict():
        assert sum(name == part or name.startswith(f"{part}.") for part in device_map) == 1, name


def test_the_final_norm_is_with_the_last_blocks() -> None:
    device_map = Sharding((0, 1), ((0, 2), (2, 3))).device_map(make_model("llama"))
    assert device_map["model.norm"] == device_map["lm_head"] == 1
    assert device_map["model.rotary_emb"] == device_map["model.embed_tokens"] == 0


def test_ranges_that_do_not_fit_are_refused(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="one range a device"):
        Sharding((0,), ((0, 1), (1, 3)))
    with pytest.raises(ModelLoadError, match="without gaps"):
        Sharding((0, 1), ((0, 1), (2, 3)))
    with pytest.raises(ModelLoadError, match="do not fit a model of 3 layers"):
        headscan.load(folder, device=Sharding(("cpu",), ((0, 2),)))
    with pytest.raises(ModelLoadError, match="do not fit a model of 3 layers"):
        headscan.load(folder, device=Sharding(("cpu",), ((0, 4),)))
    with pytest.raises(ModelLoadError, match="this machine has 0 CUDA devices"):
        headscan.load(folder, device=Sharding((0, 1), ((0, 2), (2, 3))))
