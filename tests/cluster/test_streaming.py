"""The streamed pool: the same results as in one process, each weight read once, nothing left behind."""

from __future__ import annotations

import errno
import json
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headscan.cluster import streamed_pool as streaming
from headscan.cluster.placements import WholePlacement
from headscan.cluster.pool import InProcessPool, InspectionTask, StagingError, WorkError
from headscan.cluster.streamed_pool import HiddenStates, StreamedPool
from headscan.errors import HeadscanError, SequenceError, UnsupportedModelError
from headscan.layers import lazy_model as lazy_models
from headscan.layers.layer_ranges import Layers, open_layers
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import LoadedModel
from headscan.steps.run_corpus import ShardTable
from headscan.steps.run_scan import MeasureShard
from headscan.texts import Shard
from tests.jobs.engine.test_staged import MEASURE, PLACEMENT, SHARDS, assert_same_rows, measured, saved
from tests.small_models import make_model

__all__ = ["saved"]  # a fixture

#: More memory than any of these models takes.
PLENTY = 1 << 30


class Heads(InspectionTask[None, int]):
    """How many heads there are."""

    def __call__(self, lm: LoadedModel, item: None) -> int:
        return sum(1 for _ in lm.grid.heads())


def assert_same(ours: dict[int, ShardTable], theirs: dict[int, ShardTable], tolerance: float = 1e-6) -> None:
    assert ours.keys() == theirs.keys()
    for index, rows in theirs.items():
        assert_same_rows(ours[index], rows, tolerance)


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
        measured(pool)
        first = counted.copy()
        measured(pool)
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
        assert_same(measured(pool), measured(pool))
    assert asked == ([(2, 3)] * 2 if ahead else [])
    assert layers.size(0, 2) < memory


def test_results_come_item_by_item_and_an_unfinished_map_leaves_nothing(saved: Callable[[str], ModelSpec]) -> None:
    with StreamedPool(saved("llama"), PLACEMENT) as pool:
        running = pool.map(MEASURE, SHARDS)
        done = next(running)
        assert (done.item, done.worker) == (SHARDS[0], "streamed")
        assert done.seconds > 0
        running.close()  # type: ignore[attr-defined]
        assert pool._layers is not None
        modules = list(pool._layers.lazy_model.model.model.layers.modules())
        assert all(parameter.is_meta for module in modules for parameter in module.parameters())
        assert not any(module._forward_pre_hooks or "forward" in vars(module) for module in modules)
        assert list(pool.map(MEASURE, [])) == []


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
        spilled = measured(pool)
    assert 0 < max(seen) <= 20_000
    assert stores[0]._end > 0
    with InProcessPool(saved("llama"), WholePlacement(1, "cpu", 1)) as local:
        assert_same(spilled, measured(local))


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
        expected = measured(pool)
    batches, plain = Counter[tuple[int, int]](), MeasureShard.run

    def run(task: MeasureShard, lm: Any, item: Shard, part: Any) -> Any:
        batches[lm.first, len(part)] += 1
        if lm.first == 1 and len(part) > 1:
            raise torch.OutOfMemoryError("as if")
        return plain(task, lm, item, part)

    monkeypatch.setattr(MeasureShard, "run", run)
    with StreamedPool(saved("llama"), PLACEMENT) as pool:
        assert_same(measured(pool), expected, 1e-5)  # a batch of another size is rounded otherwise
    texts = sum(len(shard.sequences) for shard in SHARDS)
    assert sum(size * count for (first, size), count in batches.items() if first == 0) == texts
    assert max(size for first, size in batches if first == 0) > 1 and batches[1, 1] == texts
    monkeypatch.setattr(MeasureShard, "halves", lambda task, part: ())
    with (
        StreamedPool(saved("llama"), PLACEMENT) as pool,
        pytest.raises(WorkError, match="shard 0: one sequence does not fit"),
    ):
        measured(pool)


def test_errors_name_their_item_and_end_the_reader(
    saved: Callable[[str], ModelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second shard fails in its second range."""
    plain, problem = MeasureShard.run, [Exception()]

    def run(task: MeasureShard, lm: Any, item: Shard, part: Any) -> Any:
        if item.index == 1 and lm.first == 1:
            raise problem[0]
        return plain(task, lm, item, part)

    with StreamedPool(saved("llama"), PLACEMENT) as pool, monkeypatch.context() as patch:
        patch.setattr(MeasureShard, "run", run)
        problem[0] = SequenceError("too long")
        with pytest.raises(WorkError, match=r"^shard 1: too long$"):
            measured(pool)
        problem[0] = ZeroDivisionError()
        with pytest.raises(ZeroDivisionError) as bug:
            measured(pool)
        assert bug.value.__notes__ == ["while working on shard 1"]
        patch.undo()
        assert len(measured(pool)) == 3
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reader")]


def plain_task(lm: LoadedModel, item: Shard) -> None: ...


def test_models_that_cannot_be_streamed_are_refused(saved: Callable[[str], ModelSpec], tmp_path: Path) -> None:
    with StreamedPool(saved("llama"), PLACEMENT) as pool:
        assert pool.staged and pool.replicas == 1
        with pytest.raises(StagingError, match="plain task needs all layers of the model at once"):
            list(pool.map(plain_task, SHARDS))
    make_model("gemma3n").save_pretrained(tmp_path)
    with StreamedPool(ModelSpec(str(tmp_path)), PLACEMENT) as pool, pytest.raises(UnsupportedModelError, match="cut"):
        measured(pool)
    for ranges in (((0, 2), (2, 4)), ((0, 1), (2, 3)), ((0, 2),)):
        with (
            StreamedPool(saved("llama"), replace(PLACEMENT, ranges=ranges)) as pool,
            pytest.raises(HeadscanError, match=r"do not make up .*Put each layer from 0 to 2 in one range"),
        ):
            measured(pool)


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
