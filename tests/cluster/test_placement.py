"""Placements of models on devices, and errors of devices that are too small."""

from __future__ import annotations

import random
import re
from dataclasses import fields, replace
from itertools import combinations, pairwise
from pkgutil import resolve_name
from typing import Any

import pytest

from headscan.cluster.placement_base import (
    PLACEMENTS,
    ChosenPlacement,
    Node,
    PlacementError,
    PlacementRequest,
    balanced_ranges,
    fewest_ranges,
)
from headscan.cluster.placements import PipelinePlacement, ShardedPlacement, StreamedPlacement, WholePlacement, place
from headscan.cluster.pool import open_pool
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import Sharding
from headscan.sizing.model_sizes import ModelSizes

#: Ten layers of 100 bytes, with 20 for a token of activations: small numbers that can be added up in the head.
SIZES = ModelSizes(
    name="toy",
    parameters=600,
    embedding=60,
    blocks=(100,) * 10,
    head=40,
    rest=10,
    tied=False,
    decoder=True,
    hidden=1,
    logits=0,
    tokens=10,
    plain=100,
    measured=150,
    cache=(10,) * 10,
)
#: Of 10 tokens with the margin of 1.1, beside the weights; hidden states that wait come on top where layers are staged.
ACTIVE, WAITING = 165, 40
WEIGHTS = 1110


def gpus(*sizes: int, memory: int = 1 << 40, cpus: int = 16) -> Node:
    return Node("n", sizes, memory, cpus)


def cpu(memory: int = 1 << 40, cpus: int = 8) -> Node:
    return Node("n", (), memory, cpus)


def plan(
    *nodes: Node, sizes: ModelSizes = SIZES, evaluates: bool = False, max_threads: int | None = None, **wishes: Any
) -> ChosenPlacement:
    request = PlacementRequest(**{"batch_tokens": 10, **wishes})
    return place(sizes, nodes, request, evaluates=evaluates, max_threads=max_threads)


def whole(*nodes: Node, **wishes: Any) -> WholePlacement:
    found = plan(*nodes, **wishes).placement
    assert isinstance(found, WholePlacement)
    return found


def test_replicas_share_the_cores_that_the_user_allows() -> None:
    assert whole(cpu(), device="cpu") == WholePlacement(1, "cpu", 8)
    placement = whole(cpu(), device="cpu", replicas=3)
    assert (placement.replicas, placement.threads) == (3, 2)
    assert placement.describe() == "placement: whole, 3 replicas on cpu, 2 CPU threads each"
    assert whole(cpu(), device="cpu", max_threads=3).threads == 3
    assert whole(cpu(), device="cpu", replicas=3, max_threads=3).threads == 2
    assert whole(gpus(1 << 40), max_threads=3).threads == 3
    assert whole(cpu(), device="cpu", replicas=2, max_threads=3) == WholePlacement(2, "cpu", 3, idle_cpus=1)
    assert plan(cpu(), placement="sharded", device="cpu", offload="disk", max_threads=3).placement.threads == 3
    assert plan(cpu(), placement="streamed", device="cpu", max_threads=3).placement.threads == 3


def test_devices_that_are_too_few_or_not_there_are_named() -> None:
    with pytest.raises(PlacementError, match=r"`replicas=0` \(limit 1\). Raise `replicas`"):
        plan(cpu(), replicas=0, device="cpu")
    with pytest.raises(PlacementError, match="limit 2 on this machine: one CPU per replica"):
        plan(cpu(cpus=2), replicas=5, device="cpu")
    four = gpus(9999, 9999, 9999, 9999)
    assert whole(four).replicas == 4
    assert whole(four, replicas=1) == WholePlacement(1, "cuda", 16)
    with pytest.raises(PlacementError, match=r"limit 4 on this machine: .* or use `device=cpu`"):
        plan(four, replicas=5, device="cuda")
    with pytest.raises(PlacementError, match=r"on cuda:1 .limit 1 on this machine: one GPU per replica"):
        plan(four, replicas=2, device="cuda:1")
    assert whole(four, device="cuda:1") == WholePlacement(1, "cuda:1", 16)
    with pytest.raises(PlacementError, match="on n the last GPU is cuda:3"):
        plan(four, device="cuda:4")
    with pytest.raises(PlacementError, match="unknown device 'toaster'"):
        plan(cpu(), device="toaster")
    with pytest.raises(PlacementError, match=r"`device=cuda`: this machine has no GPU. Use `device=cpu`"):
        plan(cpu(), device="cuda")
    with pytest.raises(PlacementError, match="cluster chooses the GPU itself"):
        plan(gpus(9999), gpus(9999), device="cuda:0")


def test_a_replica_fits_on_one_node_of_a_cluster() -> None:
    nodes = [cpu(cpus=4)] * 4
    assert whole(*nodes) == WholePlacement(4, "cpu", 4)
    assert whole(*nodes, replicas=2, device="cpu").threads == 4
    assert whole(*nodes, replicas=5).threads == 2
    assert whole(*nodes, replicas=16).threads == 1
    with pytest.raises(PlacementError, match="limit 16 on the cluster"):
        plan(*nodes, replicas=17)
    mixed = [gpus(*[9999] * 8, cpus=32), gpus(*[9999] * 8, cpus=64), cpu()]
    assert whole(*mixed) == WholePlacement(16, "cuda", 4)
    with pytest.raises(PlacementError, match="limit 16 on the cluster"):
        plan(*mixed, replicas=17, device="cuda")


def test_replicas_that_ray_starts_on_one_node_share_its_memory() -> None:
    found = plan(cpu(4000, 64), cpu(4000, 4), device="cpu", batch_tokens=10_000)
    assert found.placement == WholePlacement(2, "cpu", 32)
    assert found.devices[0].total <= found.devices[0].usable == 2000
    assert plan(cpu(8000, 10), cpu(8000, 1), replicas=6, device="cpu").devices[0].usable == 8000 // 6
    small = [cpu(4000, 64), cpu(100, 64)]
    with pytest.raises(PlacementError, match=r"none does, because Ray .* by their CPUs alone. Start .* fewer CPUs"):
        plan(*small, placement="whole")
    assert whole(small[0], cpu(100, 8)).threads == 64


@pytest.mark.parametrize("wishes", [{"placement": "whole"}, {"placement": "pipeline"}])
def test_no_packing_of_workers_exceeds_the_memory_of_a_node(wishes: dict[str, str]) -> None:
    rng = random.Random(3)
    several = 0
    for _ in range(600):
        nodes = [cpu(rng.randint(500, 9000), rng.randint(1, 20)) for _ in range(rng.randint(1, 4))]
        replicas = rng.choice((None, rng.randint(1, sum(node.cpus for node in nodes))))
        try:
            tokens, limit = rng.choice((10, 10_000)), rng.choice((None, 2))
            found = plan(*nodes, replicas=replicas, batch_tokens=tokens, max_threads=limit, **wishes)
        except PlacementError:
            continue
        placement = found.placement
        workers = placement.replicas * placement.devices_at_once
        reserved = placement.threads + placement.idle_cpus
        admitted = [min(workers, node.cpus // reserved) for node in nodes]
        assert sum(admitted) >= workers
        worst = max(device.total for device in found.devices)
        assert all(count * worst <= node.memory for node, count in zip(nodes, admitted, strict=True))
        several += workers > 1
    assert several > 50


def test_a_replica_has_to_fit_into_the_memory() -> None:
    need = WEIGHTS + ACTIVE
    assert whole(gpus(need, need, need - 1)).replicas == 2
    assert whole(cpu(3 * need - 1), replicas=2).replicas == 2
    with pytest.raises(PlacementError, match=r"whole: 3 replicas of 1\.2 KiB do not fit; at most 2 do"):
        plan(cpu(3 * need - 1), replicas=3, placement="whole")
    with pytest.raises(PlacementError, match=r"whole: .* needed on one GPU .limit .*; 1 B missing"):
        plan(gpus(need - 1), placement="whole")


def test_the_batch_is_what_fits() -> None:
    assert plan(gpus(WEIGHTS + 3 * ACTIVE), batch_tokens=100).batch_tokens == 30
    assert plan(gpus(WEIGHTS + 99 * ACTIVE), batch_tokens=100).batch_tokens == 100
    with_cache = plan(gpus(WEIGHTS + 3 * ACTIVE), batch_tokens=100, evaluates=True)
    assert with_cache.batch_tokens == 18
    (device,) = with_cache.devices
    assert (device.weights, device.cache, device.activations, device.panel) == (WEIGHTS, 180, 198, 99)
    assert device.total <= device.usable


def test_auto_takes_the_first_that_fits_with_reasons() -> None:
    found = plan(gpus(700, 700, 700), gpus(700, 700, 700))
    # Embedding and rest with the first layers, the head with the last.
    assert found.placement == ShardedPlacement(2, 3, ((0, 3), (3, 7), (7, 10)), 16)
    assert [device.weights for device in found.devices] == [370, 400, 340]
    assert len(found.why) == 1
    assert found.why[0].startswith("whole: 1.2 KiB needed on one GPU (limit 700 B;")
    found = plan(gpus(700), gpus(700), gpus(700), gpus(700))
    assert isinstance(found.placement, PipelinePlacement)
    assert found.placement.stages == ((0, 3), (3, 7), (7, 10))
    assert [refusal.split(":")[0] for refusal in found.why] == ["whole", "sharded"]
    found = plan(gpus(700))
    assert isinstance(found.placement, StreamedPlacement)
    assert found.placement.memory == 700
    with pytest.raises(PlacementError, match=r"toy cannot be placed\. whole: .* pipeline: .* streamed: .* missing"):
        plan(gpus(300))


def test_sharded_over_the_requested_number_of_gpus() -> None:
    eight = gpus(*[9999] * 8)
    found = plan(eight, placement="sharded", gpus_per_replica=4).placement
    assert isinstance(found, ShardedPlacement)
    assert (found.replicas, found.devices, found.threads) == (2, 4, 8)
    assert found.target == Sharding((0, 1, 2, 3), found.layers)
    assert "sharded, 2 replicas over 4 GPUs each, layers 0-1 2-4 5-7 8-9" in found.describe()
    assert plan(eight, gpus_per_replica=4).placement == found
    with pytest.raises(PlacementError, match=r"`gpus_per_replica=9` .limit 8 GPUs of a node"):
        plan(eight, gpus_per_replica=9)
    with pytest.raises(PlacementError, match="3 replicas over 4 GPUs of one node each do not fit; at most 2 do"):
        plan(eight, gpus_per_replica=4, replicas=3)
    with pytest.raises(PlacementError, match="no node has two GPUs"):
        plan(gpus(9999), placement="sharded")


def test_layers_beyond_the_devices_are_offloaded() -> None:
    found = plan(gpus(700), offload="cpu")
    # Of 700: a batch 165, a layer that is brought in 100, embedding and rest 70, the head 40; 325 are left.
    assert found.placement == ShardedPlacement(1, 1, ((0, 3),), 16, "cpu")
    assert found.placement.target == Sharding((0,), ((0, 3),), "cpu")
    assert found.devices[-1].name == "RAM"
    assert found.devices[-1].weights == 700
    with pytest.raises(PlacementError, match=r"needed on RAM .limit 699 B; 1 B missing.. Set `offload=disk`"):
        plan(gpus(700, memory=699), offload="cpu")
    on_disk = plan(cpu(700), offload="disk")
    assert on_disk.placement == ShardedPlacement(1, 0, ((0, 3),), 8, "disk")
    assert on_disk.placement.target == Sharding(("cpu",), ((0, 3),), "disk")
    assert "the other layers on disk" in on_disk.placement.describe()
    with pytest.raises(PlacementError, match="Use GPUs, or set `offload=disk`"):
        plan(cpu(), offload="cpu")


def test_pipelines_have_the_requested_stages_and_a_copy_of_a_tied_head() -> None:
    assert plan(cpu(cpus=2), stages=2).placement == PipelinePlacement(1, ((0, 5), (5, 10)), "cpu", 1)
    nodes = [gpus(9999, 9999)] * 3
    found = plan(*nodes, placement="pipeline", stages=3).placement
    assert found == PipelinePlacement(2, ((0, 3), (3, 7), (7, 10)), "cuda", 8)
    with pytest.raises(PlacementError, match=r"`stages=11` .limit 10 layers"):
        plan(*nodes, stages=11)
    with pytest.raises(PlacementError, match=r"2 replicas of 4 stages need 8 GPUs .limit 6"):
        plan(*nodes, stages=4, replicas=2)
    need = 400 + 10 + ACTIVE + WAITING
    assert plan(*[gpus(need)] * 3, stages=3).batch_tokens == 10
    with pytest.raises(PlacementError, match=r"needed on each of 3 stages .* 1 B missing"):
        plan(*[gpus(need - 1)] * 3, stages=3)
    tied = replace(SIZES, tied=True, head=0, embedding=300)
    assert plan(cpu(), sizes=tied, stages=2).devices[-1].weights == 500 + 300 + 10
    assert [d.weights for d in plan(gpus(9999, 9999), sizes=tied, gpus_per_replica=2).devices] == [610, 700]


def test_streaming_keeps_within_its_memory_or_is_refused() -> None:
    found = plan(gpus(9999), memory=700)
    assert isinstance(found.placement, StreamedPlacement)
    # 700 less rest, batch and hidden states: 485, half of it for the range that runs, half for the next one.
    assert found.placement.ranges == tuple(pairwise([0, 1, 3, 5, 7, 9, 10]))
    assert all(device.total <= 700 for device in found.devices)
    assert found.placement.describe() == (
        "placement: streamed, on cuda within 0.00 GiB, 10 layers in 6 ranges of at most 2, 16 CPU threads"
    )
    # RAM also holds hidden states between ranges, for which as much is kept free as for a pass.
    on_cpu = plan(cpu(), memory=700 + ACTIVE + WAITING)
    assert on_cpu.placement == replace(found.placement, device="cpu", memory=905, threads=8)
    assert on_cpu.devices[0].total == found.devices[0].total + ACTIVE + WAITING
    for node, need in ((gpus(9999), WEIGHTS + ACTIVE + WAITING), (cpu(), WEIGHTS + 2 * (ACTIVE + WAITING))):
        assert plan(node, memory=need).placement.ranges == ((0, 10),)  # type: ignore[union-attr]
    with pytest.raises(PlacementError, match=r"for two layers and a pass .limit 400 B; .*Raise `memory`"):
        plan(cpu(), memory=400)
    with pytest.raises(PlacementError, match=r"`memory=700 B` .limit 500 B of the CPU; 200 B missing"):
        plan(cpu(500), memory=700)
    with pytest.raises(PlacementError, match=r"`replicas=2` .limit 1"):
        plan(cpu(), memory=700, replicas=2)
    with pytest.raises(PlacementError, match=r"`batch_tokens=100` .* .limit 18.. Set `batch_tokens=18`"):
        plan(gpus(9999), memory=700, batch_tokens=100)
    # Half of the memory, where no batch is asked for: 350 bytes at 20.5 a token.
    assert plan(gpus(9999), memory=700, batch_tokens=None).batch_tokens == 17
    assert plan(gpus(700), placement="streamed", batch_tokens=100).batch_tokens == 18


def _shape(rng: random.Random) -> ModelSizes:
    """Layers, ends and activations of any proportion."""
    blocks = tuple(rng.choice((100, rng.randint(1, 400))) for _ in range(rng.randint(1, 12)))
    plain = rng.randint(20, 900)
    return replace(
        SIZES,
        blocks=blocks,
        cache=(10,) * len(blocks),
        embedding=rng.choice((0, 60, 2000)),
        head=rng.choice((0, 40, 2000)),
        rest=rng.choice((0, 10, 500)),
        tied=rng.random() < 0.3,
        logits=rng.choice((0, 1)),
        plain=plain,
        measured=plain * rng.randint(50, 300) // 100,
    )


@pytest.mark.parametrize("batch_tokens", [None, 1, 60, 4000])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_more_memory_never_streams_smaller_batches(on_gpu: bool, batch_tokens: int | None) -> None:
    rng = random.Random(7)
    compared = 0
    for _ in range(40):
        sizes, evaluates = _shape(rng), rng.random() < 0.5
        most = 3 * (sizes.weights + 2 * sizes.measured)
        before: ChosenPlacement | None = None
        for memory in sorted(rng.randrange(1, most) for _ in range(120)):
            request = PlacementRequest("streamed", batch_tokens=batch_tokens)
            try:
                found = place(sizes, [gpus(memory) if on_gpu else cpu(memory)], request, evaluates=evaluates)
            except PlacementError:
                assert before is None, f"{memory} bytes are refused, and fewer were not"
                continue
            (device,) = found.devices
            assert device.total <= memory
            assert before is None or found.batch_tokens >= before.batch_tokens, (sizes, memory)
            compared += before is not None
            before = found
    assert compared > 1000


def test_more_memory_never_offers_smaller_batches() -> None:
    """The batch that the error proposes fits."""
    offered = []
    for memory in range(450, 4000, 10):
        with pytest.raises(PlacementError) as refused:
            plan(gpus(9999), memory=memory, batch_tokens=1000)
        if found := re.search(r"Set `batch_tokens=(\d+)`,", str(refused.value)):
            offered.append(int(found[1]))
    assert len(offered) > 300
    assert offered == sorted(offered)


def test_wishes_that_no_placement_fulfils_are_refused() -> None:
    encoder = replace(SIZES, decoder=False)
    with pytest.raises(PlacementError, match="cannot be divided: its layers cannot run on their own"):
        plan(cpu(), sizes=encoder, stages=2)
    assert isinstance(plan(gpus(9999, 9999), sizes=encoder, gpus_per_replica=2).placement, ShardedPlacement)
    formless = replace(SIZES, blocks=(), cache=(), rest=WEIGHTS)
    assert isinstance(plan(cpu(), sizes=formless).placement, WholePlacement)
    with pytest.raises(PlacementError, match="no list of layers"):
        plan(gpus(9999, 9999), sizes=formless, placement="sharded")
    with pytest.raises(PlacementError, match="`stages` is only for `placement=pipeline`"):
        plan(cpu(), placement="whole", stages=2)
    with pytest.raises(PlacementError, match="`memory` is only for `placement=streamed`"):
        plan(cpu(), stages=2, memory=10)
    with pytest.raises(PlacementError, match=r"`stages=0` \(limit 1\)"):
        PlacementRequest(stages=0)


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_ranges_are_as_even_as_can_be(parts: int) -> None:
    weights = [7, 1, 1, 4, 9, 2, 2, 8]
    best = min(
        max(sum(weights[a:b]) for a, b in pairwise([0, *cuts, 8])) for cuts in combinations(range(1, 8), parts - 1)
    )
    ranges = balanced_ranges(weights, parts)
    assert len(ranges) == parts
    assert [first for first, _ in ranges] == [0, *(last for _, last in ranges)][:-1]
    assert ranges[-1][1] == 8
    assert max(sum(weights[a:b]) for a, b in ranges) == best
    assert (fewest_ranges(weights, best) or 9) <= parts
    assert fewest_ranges(weights, 8) is None


def test_every_placement_has_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    for pool in ("ray_pool.RayPool", "ray_pool.PipelinePool", "streamed_pool.StreamedPool"):
        monkeypatch.setattr(f"headscan.cluster.{pool}", lambda *_, pool=pool, **__: pool)
    halves = ((0, 1), (1, 2))
    placements = (
        WholePlacement(1, "cpu", 1),
        ShardedPlacement(1, 2, halves, 1),
        PipelinePlacement(1, halves, "cpu", 1),
        StreamedPlacement("cpu", 1, 1, halves),
    )
    opened = {each.name: open_pool(ModelSpec("m"), each, on_cluster=True) for each in placements}
    assert opened == {
        "whole": "ray_pool.RayPool",
        "sharded": "ray_pool.RayPool",
        "pipeline": "ray_pool.PipelinePool",
        "streamed": "streamed_pool.StreamedPool",
    }
    assert list(opened) == list(PLACEMENTS)
    for each in placements:
        kind = PLACEMENTS[each.name]
        assert resolve_name(f"headscan.cluster.{kind.placement}") is type(each)
        assert PlacementRequest(each.name).placement == each.name
        assert {*kind.options} <= {field.name for field in fields(PlacementRequest)}
