"""Models of which a range of layers is loaded: the same numbers as of the whole, and no more is read.

Tensors are in memory maps of their own, which are freed with the tensor.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

import headscan
from headscan.ablation.masks import HeadMask, RandomHeads
from headscan.ablation.rules import HeadRule
from headscan.architectures import FAMILIES, VOCABULARY
from headscan.attention.discovery import discover
from headscan.errors import HeadIndexError, InterventionError, ModelLoadError, UnsupportedModelError
from headscan.layers import lazy_model as lazy_models
from headscan.layers.layer_ranges import Layers, ablation_here, gives_logits, inspect_model, open_layers
from headscan.layers.lazy_model import LazyModel, bytes_of, empty_mmap, mmap_copy
from headscan.model_spec import ModelSpec
from headscan.models.token_batches import return_freed_memory
from tests.small_models import distinct_first, make_loaded, make_model

#: Grouped heads; two tables of rotary positions and windows; learned positions and a tied head; experts; a hybrid.
CHOSEN = ("llama", "qwen3", "gemma3", "gpt2", "mixtral", "granitemoehybrid")
#: Models whose later layers borrow keys and values, and the layers that cannot begin a range.
BORROWERS = {"gemma3n": {1, 2}, "gemma4": {2}}
LENGTHS = torch.tensor([30, 7, 22])
ARMS = (None, HeadMask([(0, 1), (2, 3), (2, 4)]), HeadRule("output_norm_ln", threshold=0.9), RandomHeads(0.4, seed=1))


def ids_of(sequences: int = 3, tokens: int = 30) -> Tensor:
    return torch.randint(5, VOCABULARY, (sequences, tokens), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a folder with a family's model in several files, created on first use."""
    root = tmp_path_factory.mktemp("families")

    def folder(family: str) -> Path:
        if not (root / family).exists():
            make_model(family).save_pretrained(root / family, max_shard_size="100KB")
        return root / family

    return folder


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each tensor of a checkpoint was read."""
    counted: Counter[str] = Counter()
    read_tensors = lazy_models.read_tensors

    def counting(files, names, keep):  # type: ignore[no-untyped-def]
        names = list(names)
        counted.update(names)
        return read_tensors(files, names, keep)

    monkeypatch.setattr(lazy_models, "read_tensors", counting)
    return counted


def measured(lm: headscan.LoadedModel, arm: HeadMask | HeadRule | RandomHeads | None) -> list[Tensor]:
    """All statistics of a batch (B, L, H) with heads ablated, and which were (B, L, H)."""
    with ExitStack() as context:
        ablated = []
        if arm is not None:
            here = ablation_here(lm, arm)
            record = context.enter_context(headscan.intervene(lm, here, lengths=LENGTHS))
        values = headscan.collect(lm, ids_of().to(lm.device), LENGTHS)
        if arm is not None and record.ablated is not None:
            ablated = [record.ablated]
    return [*values.values(), *ablated]


def in_parts(layers: Layers, bounds: list[int]) -> Iterator[tuple[int, int, list[list[Tensor]]]]:
    """Return the result of `measured` for each arm, range by range."""
    hidden: list[Tensor | None] = [None] * len(ARMS)
    for first, last in pairwise(bounds):
        with layers.at(first, last) as stage:
            found = []
            for index, arm in enumerate(ARMS):
                with stage.running_range(hidden[index]) as range_pass:
                    found.append(measured(stage.lm, arm))
                hidden[index] = range_pass.hidden_out
            yield first, last, found


@pytest.mark.gpu
@pytest.mark.parametrize("family", distinct_first([f for f in FAMILIES if f not in BORROWERS], CHOSEN))
def test_ranges_measure_and_ablate_like_the_whole_model(
    family: str, saved: Callable[[str], Path], device: torch.device
) -> None:
    lm = headscan.load(saved(family), device=str(device))
    layers = open_layers(ModelSpec(str(saved(family))), str(device))
    assert layers.inspection.grid == lm.grid
    assert not layers.inspection.uncuttable
    whole = [measured(lm, arm) for arm in ARMS]
    for first, last, found in in_parts(layers, [0, 1, 3]):
        sites = [site for site in lm.grid.sites if first <= site.layer < last]
        for of_range, of_all in zip(found, whole, strict=True):
            for ours, theirs in zip(of_range, of_all, strict=bool(sites)):
                for site in sites:
                    same(ours[:, site.layer], theirs[:, site.layer], device)


def same(found: Tensor, expected: Tensor, device: torch.device) -> None:
    """Compare numbers bit for bit on a CPU; some kernels of a GPU sum in a changing order."""
    bound = 0.0 if device.type == "cpu" else 1e-5
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("family", CHOSEN)
def test_the_last_range_gives_the_logits_of_the_whole(
    family: str, saved: Callable[[str], Path], device: torch.device
) -> None:
    lm = headscan.load(saved(family), device=str(device))
    layers = open_layers(ModelSpec(str(saved(family))), str(device))
    ids = ids_of().to(device)
    hidden = None
    for first, last in ((0, 2), (2, 3)):
        with layers.at(first, last) as stage, stage.running_range(hidden) as range_pass:
            assert gives_logits(stage.lm) == (last == 3)
            if stage.is_last:
                logits = stage.lm.model(input_ids=ids, use_cache=False).logits
            else:
                stage.lm.model.base_model(input_ids=ids, use_cache=False)
        hidden = range_pass.hidden_out
    same(logits, lm.model(input_ids=ids, use_cache=False).logits, device)
    assert hidden is None


def test_each_tensor_is_read_once_and_only_when_its_layers_are(
    saved: Callable[[str], Path], reads: Counter[str]
) -> None:
    layers = open_layers(ModelSpec(str(saved("mixtral"))), "cpu")
    assert set(reads) == {"model.norm.weight"}
    with layers.at(1, 2) as stage:
        assert all(name.startswith(("model.layers.1.", "model.norm")) for name in reads)
        held = [p for p in stage.lm.model.parameters() if not p.is_meta and p.untyped_storage().nbytes() > 4]
        assert sum(p.numel() * p.element_size() for p in held) == layers.size(1, 2) + layers.size_outside
    assert {n for n, p in stage.lm.model.named_parameters() if not p.is_meta and p.untyped_storage().nbytes() > 4} == {
        "model.norm.weight"
    }
    for first, last in ((0, 1), (2, 3)):
        with layers.at(first, last):
            pass
    index = json.loads((saved("mixtral") / "model.safetensors.index.json").read_text())
    assert reads == Counter(dict.fromkeys(index["weight_map"], 1))


def test_weights_read_ahead_are_loaded(saved: Callable[[str], Path], reads: Counter[str]) -> None:
    layers = open_layers(ModelSpec(str(saved("llama"))), "cpu")
    raw = layers.read(0, 2)
    before = reads.copy()
    with layers.at(0, 2, raw) as stage, stage.running_range():
        found = headscan.collect(stage.lm, ids_of())
    assert not raw
    assert reads == before
    lm = headscan.load(saved("llama"), device="cpu")
    assert torch.equal(found["entropy"][:, :2], headscan.collect(lm, ids_of())["entropy"][:, :2])


def test_an_inspection_matches_the_whole_model_and_reads_no_weights(
    saved: Callable[[str], Path], reads: Counter[str]
) -> None:
    lazy_model = LazyModel(ModelSpec(str(saved("gemma3"))), "cpu")
    state = torch.random.get_rng_state()
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in lazy_model.model.modules())
    found = inspect_model(lazy_model)
    assert not reads
    assert torch.equal(torch.random.get_rng_state(), state)
    assert found.grid == discover(make_model("gemma3"))
    assert all(p.is_meta for p in lazy_model.model.parameters())
    assert hooks == sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in lazy_model.model.modules()
    )


@pytest.mark.parametrize("family", BORROWERS)
def test_a_model_whose_layers_borrow_from_lower_ones_is_not_cut_between_them(
    family: str, saved: Callable[[str], Path]
) -> None:
    layers = open_layers(ModelSpec(str(saved(family))), "cpu")
    assert layers.inspection.uncuttable.keys() == BORROWERS[family]
    with pytest.raises(UnsupportedModelError, match=r"cannot be cut below layer 2: .*KeyError"):
        layers.load(2, 3)
    with layers.at(0, 3) as stage, stage.running_range():
        found = headscan.collect(stage.lm, ids_of())
    lm = headscan.load(saved(family), device="cpu")
    assert torch.equal(found["entropy"], headscan.collect(lm, ids_of())["entropy"])


def test_hidden_state_between_blocks_is_detected(saved: Callable[[str], Path]) -> None:
    lazy_model = LazyModel(ModelSpec(str(saved("llama"))), "cpu")
    told: dict[str, Tensor] = {}
    lower, upper = (lazy_model.model.get_submodule(f"model.layers.{layer}.mlp") for layer in (0, 1))
    lower.register_forward_hook(lambda _, args, out: told.update(secret=out))
    upper.register_forward_hook(lambda _, args, out: out + 0.1 * told["secret"][:, -args[0].shape[1] :])
    found = inspect_model(lazy_model)
    assert found.uncuttable.keys() == {1}
    assert "differs by" in found.uncuttable[1]


def test_later_layers_that_read_the_embeddings_get_them(saved: Callable[[str], Path], reads: Counter[str]) -> None:
    layers = open_layers(ModelSpec(str(saved("gemma4"))), "cpu")
    assert layers.inspection.embeds_everywhere
    reads.clear()
    with layers.at(1, 3):
        assert "model.embed_tokens.weight" in reads


def test_stage_errors(saved: Callable[[str], Path]) -> None:
    stage = open_layers(ModelSpec(str(saved("llama"))), "cpu").load(1, 2)
    hidden = torch.randn(3, 30, 48)
    assert (stage.first, stage.last, stage.is_last) == (1, 2, False)
    assert stage.lm.vocab_size == VOCABULARY and stage.lm.device.type == "cpu"
    with pytest.raises(InterventionError, match="no hidden states for layer 1: None"), stage.running_range():
        headscan.collect(stage.lm, ids_of())
    with (
        pytest.raises(InterventionError, match=r"hidden states for layer 1 .*: \(2, 30, 48\) instead of \(3, 30, 48\)"),
        stage.running_range(hidden[:2]),
    ):
        headscan.collect(stage.lm, ids_of())
    with pytest.raises(InterventionError, match="with `use_cache=False`"), stage.running_range(hidden):
        stage.lm.model.base_model(input_ids=ids_of(), use_cache=True)
    with pytest.raises(HeadIndexError, match="layer with heads: 1 to 1"):
        stage.lm.grid.check([(2, 0)])
    with stage.running_range(hidden) as range_pass:
        headscan.collect(stage.lm, ids_of())
    assert range_pass.hidden_out is not None and range_pass.hidden_out.shape == hidden.shape
    modules = list(stage.lm.model.model.layers.modules())
    assert not any(module._forward_pre_hooks or "forward" in vars(module) for module in modules)


@pytest.mark.parametrize("bounds", [(0, 4), (2, 2), (3, 1), (-1, 2)])
def test_ranges_that_the_model_lacks_are_refused(bounds: tuple[int, int], saved: Callable[[str], Path]) -> None:
    with pytest.raises(UnsupportedModelError, match="cannot be divided at"):
        open_layers(ModelSpec(str(saved("llama"))), "cpu").load(*bounds)


def test_models_that_cannot_be_read_in_parts_are_refused(saved: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="not a decoder"):
        make_model("bert").save_pretrained(tmp_path / "bert")
        open_layers(ModelSpec(str(tmp_path / "bert")), "cpu")
    folder = tmp_path / "damaged"
    make_model("llama").save_pretrained(folder, max_shard_size="100KB")
    shard = sorted(folder.glob("*.safetensors"))[0]
    whole = shard.read_bytes()
    shard.unlink()
    with pytest.raises(ModelLoadError, match=str(folder)):
        open_layers(ModelSpec(str(folder)), "cpu")
    shard.write_bytes(whole)
    layers = open_layers(ModelSpec(str(folder)), "cpu")
    shard.write_bytes(whole[:-20])
    with pytest.raises(ModelLoadError, match=rf"{shard.name} cannot be read: it ends in .*Copy or download it again"):
        layers.load(0, 3)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ModelLoadError, match="is quantised and cannot be read layer by layer"):
        open_layers(ModelSpec(str(folder)), "cpu")
    lm = make_loaded("llama")
    torch.save(lm.model.state_dict(), tmp_path / "pytorch_model.bin")
    lm.model.config.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="has no safetensors weights"):
        open_layers(ModelSpec(str(tmp_path)), "cpu")
    with pytest.raises(ModelLoadError, match="others cannot be read layer by layer"):
        open_layers(ModelSpec(str(tmp_path), safetensors=False), "cpu")


@pytest.mark.parametrize(("family", "dtype"), [("mixtral", "bfloat16"), ("llama", "float64")])
def test_weights_have_the_requested_dtype(family: str, dtype: str, saved: Callable[[str], Path]) -> None:
    stage = open_layers(ModelSpec(str(saved(family)), dtype=dtype), "cpu").load(0, 1)
    lm = headscan.load(saved(family), device="cpu", dtype=dtype)
    whole = dict(lm.model.named_parameters())
    assert stage.lm.dtype == dtype
    for name, parameter in stage.lm.model.named_parameters():
        if not parameter.is_meta:
            assert torch.equal(parameter, whole[name]), name


#: One that is worth pages of its own, and one that is not.
SHAPES = [(512, 1024), (3, 5)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_they_keep_their_contents(shape: tuple[int, int], dtype: torch.dtype) -> None:
    given = torch.randint(0, 100, shape).to(dtype)
    copy = mmap_copy(given)
    assert copy.dtype == dtype and torch.equal(copy, given)
    assert copy.data_ptr() != given.data_ptr()
    assert torch.equal(mmap_copy(given, torch.float64), given.double())
    empty = empty_mmap(shape, dtype)
    bytes_of(empty)[:] = bytes_of(given)
    assert torch.equal(empty, given)
    assert torch.equal(mmap_copy(given.T), given.T)


@pytest.mark.skipif(sys.platform != "linux", reason="the process's memory is read from /proc")
def test_their_memory_is_the_systems_again_at_once() -> None:
    def resident() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

    size = 4 << 20
    # What the C library is used to free of this size, it keeps.
    for _ in range(3):
        del [torch.ones(size // 4) for _ in range(16)][:]
    return_freed_memory()
    before = resident()
    held = [empty_mmap((size // 4,), torch.float32).fill_(1.0) for _ in range(16)]
    assert resident() - before > 15 * size
    kept = held[-1]
    del held
    assert resident() - before < 3 * size
    assert kept.sum() == size // 4
