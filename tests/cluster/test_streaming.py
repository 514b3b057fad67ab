"""The streamed pool: the same results as in one process, each weight read once, nothing left behind."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headscan
from headscan.architectures import VOCABULARY
from headscan.cluster import streamed_pool as streaming
from headscan.cluster.placements import StreamedPlacement, WholePlacement
from headscan.cluster.pool import InProcessPool, InspectionTask, PassTask, StagingError, WorkError
from headscan.cluster.streamed_pool import HiddenStates, StreamedPool
from headscan.errors import HeadscanError, SequenceError, UnsupportedModelError
from headscan.layers import lazy_model as lazy_models
from headscan.layers.layer_ranges import Layers, open_layers
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import LoadedModel
from tests.small_models import make_model

#: More than any of these models takes.
PLENTY = 1 << 30
PLACEMENT = StreamedPlacement("cpu", 1, PLENTY, ((0, 1), (1, 3)))
FAMILIES = ("llama", "qwen3", "gemma3", "gpt2")


@dataclass(frozen=True)
class Texts:
    """Random texts, in passes of so many."""

    number: int
    passes: int = 2
    sequences: int = 3

    @property
    def name(self) -> str:
        return f"texts {self.number}"


class Measure(PassTask[Texts, Tensor, dict[str, Tensor], dict[str, Tensor]]):
    """Statistics (B, L, H) of all texts."""

    def passes(self, item: Texts) -> list[Tensor]:
        generator = torch.Generator().manual_seed(item.number)
        return [
            torch.randint(5, VOCABULARY, (item.sequences, 20 + number), generator=generator)
            for number in range(item.passes)
        ]

    def run(self, lm: LoadedModel, item: Texts, part: Tensor) -> dict[str, Tensor]:
        return headscan.collect(lm, part)

    def halves(self, part: Tensor) -> Sequence[Tensor]:
        return part.split([len(part) // 2, len(part) - len(part) // 2]) if len(part) > 1 else ()

    def join_halves(self, halves: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.cat([half[name] for half in halves]) for name in halves[0]}

    def join(self, item: Texts, partials: Sequence[Sequence[dict[str, Tensor]]]) -> dict[str, Tensor]:
        layers = [_together(ranges) for ranges in partials]
        return {name: torch.cat([of_pass[name] for of_pass in layers]) for name in layers[0]}


def _together(ranges: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Every layer's numbers from the range that has it; the others are NaN there."""
    found = ranges[0]
    for more in ranges[1:]:
        found = {name: torch.where(found[name].isnan(), more[name], found[name]) for name in found}
    return found


class Heads(InspectionTask[None, int]):
    """How many heads there are."""

    def __call__(self, lm: LoadedModel, item: None) -> int:
        return sum(1 for _ in lm.grid.heads())


measure = Measure()
ITEMS = [Texts(1), Texts(2, passes=3), Texts(3, sequences=1)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModelSpec]:
    root = tmp_path_factory.mktemp("streamed")

    def spec(family: str) -> ModelSpec:
        if not (root / family).exists():
            make_model(family).save_pretrained(root / family, max_shard_size="100KB")
        return ModelSpec(str(root / family))

    return spec


def results(pool: Any, items: Sequence[Texts] = ITEMS) -> dict[int, dict[str, Tensor]]:
    return {done.item.number: done.value for done in pool.map(measure, iter(items))}


def assert_same(ours: dict[int, dict[str, Tensor]], theirs: dict[int, dict[str, Tensor]]) -> None:
    assert ours.keys() == theirs.keys()
    for number, values in theirs.items():
        for name, expected in values.items():
            torch.testing.assert_close(ours[number][name], expected, rtol=0, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_and_in_process_give_the_same(family: str, saved: Callable[[str], ModelSpec]) -> None:
    with InProcessPool(saved(family), WholePlacement(1, "cpu", 1)) as local:
        expected = results(local)
    for ranges in (((0, 1), (1, 3)), ((0, 2), (2, 3)), ((0, 1), (1, 2), (2, 3)), ((0, 3),)):
        with StreamedPool(saved(family), replace(PLACEMENT, ranges=ranges)) as pool:
            assert_same(results(pool), expected)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_each_tensor_is_read_once_a_map(
    family: str, saved: Callable[[str], ModelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: Counter[str] = Counter()
    read_tensors = lazy_models.read_tensors

    def counting(files: Any, names: Any, keep: Any) -> Any:
        names = list(names)
        counted.update(names)
        return read_tensors(files, names, keep)

    monkeypatch.setattr(lazy_models, "read_tensors", counting)
    spec = saved(family)
    with StreamedPool(spec, PLACEMENT) as pool:
        assert pool.one(Heads(), None) == 18
        opened = counted.copy()
        results(pool)
        first = counted.copy()
        results(pool)
        layers = pool._layers
        assert layers is not None
        left = [p for p in layers.lazy_model.model.parameters() if not p.is_meta and p.untyped_storage().nbytes() > 4]
        assert sum(p.nbytes for p in left) == layers.size_outside
    index = json.loads(Path(spec.source, "model.safetensors.index.json").read_text())["weight_map"]
    # A head that is the embedding's weight is at both ends of the model.
    once = Counter(dict.fromkeys(index, 1)) + Counter({"transformer.wte.weight": int(family == "gpt2")})
    assert first == once
    assert opened.total() == len(opened) < 5
    assert counted == once + once - opened


@pytest.mark.parametrize(("memory", "ahead"), [(PLENTY, True), (200_000, False)])
def test_the_next_range_is_read_ahead_where_both_fit(
    memory: int, ahead: bool, saved: Callable[[str], ModelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = StreamedPool(saved("llama"), replace(PLACEMENT, memory=memory, ranges=((0, 2), (2, 3))))
    layers = pool._opened()
    asked = []
    monkeypatch.setattr(layers, "read", lambda *part, read=layers.read: (asked.append(part), read(*part))[1])
    with pool:
        assert_same(results(pool), results(pool))
    assert asked == ([(2, 3)] * 2 if ahead else [])
    assert layers.size(0, 2) < memory


def test_results_come_item_by_item_and_an_unfinished_map_leaves_nothing(saved: Callable[[str], ModelSpec]) -> None:
    with StreamedPool(saved("llama"), PLACEMENT) as pool:
        running = pool.map(measure, ITEMS)
        done = next(running)
        assert (done.item, done.worker) == (ITEMS[0], "streamed")
        assert done.seconds > 0
        running.close()  # type: ignore[attr-defined]
        assert pool._layers is not None
        modules = list(pool._layers.lazy_model.model.model.layers.modules())
        assert all(parameter.is_meta for module in modules for parameter in module.parameters())
        assert not any(module._forward_pre_hooks or "forward" in vars(module) for module in modules)
        assert list(pool.map(measure, [])) == []


def test_hidden_states_that_ram_has_no_room_for_go_through_the_disk(
    saved: Callable[[str], ModelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    stores: list[HiddenStates] = []
    seen: list[int] = []
    init, take = HiddenStates.__init__, HiddenStates.take

    def remember(store: HiddenStates, limit: int) -> None:
        init(store, 20_000)
        stores.append(store)

    def look(store: HiddenStates, key: int) -> Tensor:
        seen.append(store._used)
        return take(store, key)

    monkeypatch.setattr(HiddenStates, "__init__", remember)
    monkeypatch.setattr(HiddenStates, "take", look)
    with StreamedPool(saved("llama"), replace(PLACEMENT, ranges=((0, 1), (1, 2), (2, 3)))) as pool:
        spilled = results(pool)
    assert 0 < max(seen) <= 20_000
    total = sum(3 * (20 + n) * 48 * 4 for n in (0, 1, 0, 1, 2)) + sum((20 + n) * 48 * 4 for n in (0, 1))
    assert 0 < stores[0]._end <= total
    with InProcessPool(saved("llama"), WholePlacement(1, "cpu", 1)) as local:
        assert_same(spilled, results(local))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_come_back_as_they_went(dtype: torch.dtype, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    given = [torch.randn(2, 5, 8).to(dtype), torch.randn(1, 9, 8).to(dtype)]
    with HiddenStates(given[0].nbytes) as store:
        for _ in range(2):
            for key, hidden in enumerate(given):
                store.put(key, hidden[:, :, :])
            assert store._used == given[0].nbytes
            assert store._end == given[1].nbytes
            assert all(torch.equal(store.take(key), hidden) for key, hidden in enumerate(given))
        assert store._used == 0
        part = torch.randn(50, 2, 8).to(dtype)[:1]
        store.put(0, part)
        assert store.take(0).untyped_storage().nbytes() == part.nbytes
        assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def seek(self, offset: int) -> None: ...

        def write(self, data: memoryview) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def close(self) -> None: ...

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: Full())
    with HiddenStates(0) as store, pytest.raises(StagingError, match=r"no room for hidden states: .* Set TMPDIR"):
        store.put(0, torch.zeros(1, 2, 3))


def test_a_pass_without_enough_memory_is_halved_in_its_range_alone(
    saved: Callable[[str], ModelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    with StreamedPool(saved("llama"), PLACEMENT) as pool:
        expected = results(pool)
    batches = []

    def run(task: Measure, lm: Any, item: Texts, part: Tensor) -> dict[str, Tensor]:
        batches.append((lm.first, len(part)))
        if lm.first == 1 and len(part) > 1:
            raise torch.OutOfMemoryError("as if")
        return headscan.collect(lm, part)

    monkeypatch.setattr(Measure, "run", run)
    with StreamedPool(saved("llama"), PLACEMENT) as pool:
        assert_same(results(pool), expected)
    assert Counter(batches)[0, 3] == 5
    assert Counter(batches)[1, 1] == 17
    monkeypatch.setattr(Measure, "halves", lambda task, part: ())
    with (
        StreamedPool(saved("llama"), PLACEMENT) as pool,
        pytest.raises(WorkError, match="texts 1: one sequence does not fit"),
    ):
        results(pool)


class Broken(Measure):
    """Fails at one item, in its second range."""

    def __init__(self, problem: Exception) -> None:
        self.problem = problem

    def run(self, lm: LoadedModel, item: Texts, part: Tensor) -> dict[str, Tensor]:
        if item.number == 2 and lm.grid.sites[0].layer == 1:
            raise self.problem
        return super().run(lm, item, part)


def test_errors_name_their_item(saved: Callable[[str], ModelSpec]) -> None:
    with StreamedPool(saved("llama"), PLACEMENT) as pool:
        with pytest.raises(WorkError, match=r"^texts 2: too long$"):
            list(pool.map(Broken(SequenceError("too long")), ITEMS))
        with pytest.raises(ZeroDivisionError) as bug:
            list(pool.map(Broken(ZeroDivisionError()), ITEMS))
        assert bug.value.__notes__ == ["while working on texts 2"]
        assert len(results(pool)) == 3


def plain_task(lm: LoadedModel, item: Texts) -> None: ...


def test_models_that_cannot_be_streamed_are_refused(saved: Callable[[str], ModelSpec], tmp_path: Path) -> None:
    with StreamedPool(saved("llama"), PLACEMENT) as pool:
        assert pool.staged and pool.replicas == 1
        with pytest.raises(StagingError, match="plain task needs all layers of the model at once"):
            list(pool.map(plain_task, ITEMS))
    make_model("gemma3n").save_pretrained(tmp_path)
    with StreamedPool(ModelSpec(str(tmp_path)), PLACEMENT) as pool, pytest.raises(UnsupportedModelError, match="cut"):
        results(pool)
    for ranges in (((0, 2), (2, 4)), ((0, 1), (2, 3)), ((0, 2),)):
        with (
            StreamedPool(saved("llama"), replace(PLACEMENT, ranges=ranges)) as pool,
            pytest.raises(HeadscanError, match=r"do not make up .*Put each layer from 0 to 2 in one range"),
        ):
            results(pool)


def test_the_reader_ends_with_the_map(saved: Callable[[str], ModelSpec]) -> None:
    import threading

    def readers() -> Iterator[str]:
        return (thread.name for thread in threading.enumerate() if thread.name.startswith("reader"))

    with StreamedPool(saved("llama"), PLACEMENT) as pool:
        results(pool)
        with pytest.raises(WorkError):
            list(pool.map(Broken(SequenceError("too long")), ITEMS))
    assert not list(readers())


def test_layers_go_through_the_gpu_by_which_they_were_placed(
    two_gpus: None, saved: Callable[[str], ModelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []

    def open_on_cpu(spec: ModelSpec, device: str) -> Layers:
        taken.append(device)
        return open_layers(spec, "cpu")

    monkeypatch.setattr(streaming, "open_layers", open_on_cpu)
    for device in ("cuda", "cuda:0", "cpu"):
        with StreamedPool(saved("llama"), replace(PLACEMENT, device=device)) as pool:
            assert pool.one(Heads(), None) == 18
    assert taken == ["cuda:1", "cuda:0", "cpu"]
