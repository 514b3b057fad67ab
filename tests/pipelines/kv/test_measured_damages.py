"""Damages and losses by window masks: the same on every pool, and the same as masks opened by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import headscan
from headscan.cluster.placement.streamed_placement import StreamedPlacement
from headscan.cluster.pools.in_process import InProcessPool
from headscan.cluster.pools.streamed_pool import StreamedPool
from headscan.errors import HeadscanError, NotFiniteError, SequenceError
from headscan.kv.kept_keys import KeptKeys, Window
from headscan.kv.kv_damage import kv_damages
from headscan.kv.kv_windows import KvWindows
from headscan.model_spec import ModelSpec
from headscan.pipelines.kv.damage.doubtful_heads import doubtful_heads, flipped_windows
from headscan.pipelines.kv.damage.masked_losses import ALL_KEYS, masked_losses
from headscan.pipelines.kv.damage.measured_damages import one_by_one, pool_damages
from headscan.pipelines.kv.damage.window_widths import smallest_windows
from headscan.pipelines.scoring.token_requests import Request
from headscan.sizing.window_candidates import window_candidates
from headscan.testing.family import VOCABULARY
from tests.pipelines.conftest import THREADS
from tests.small_models import make_model

WINDOW = Window(2, 7)
STREAMED = StreamedPlacement("cpu", 1, 1 << 30, ((0, 1), (1, 3)))


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    folder: Path = tmp_path_factory.mktemp("llama")
    make_model("llama").save_pretrained(folder)
    return ModelSpec(str(folder))


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    rng = np.random.default_rng(0)
    return [
        Request(tuple(rng.integers(5, VOCABULARY, size).tolist()), scored)
        for size, scored in ((40, 39), (31, 4), (40, 8), (25, 24), (33, 32))
    ]


def losses_by_hand(spec: ModelSpec, requests: list[Request], kept: KeptKeys) -> list[float]:
    lm = headscan.load(spec.source, device="cpu")
    found = []
    for ids, scored in requests:
        row = torch.tensor([ids])
        with torch.no_grad(), headscan.intervene(lm, KvWindows(kept)):
            log_probabilities = lm.model(input_ids=row).logits[0].log_softmax(-1)
        places = range(len(ids) - scored, len(ids))
        found.append(-float(np.mean([float(log_probabilities[at - 1, ids[at]]) for at in places])))
    return found


def test_losses_are_those_of_masks_opened_by_hand_in_every_pool(spec: ModelSpec, requests: list[Request]) -> None:
    sets = [ALL_KEYS, KeptKeys.of([(1, 0, WINDOW)]), KeptKeys.of([(0, 1, WINDOW), (2, 0, WINDOW)])]
    expected = [losses_by_hand(spec, requests, kept) for kept in sets]
    for pool in (InProcessPool(spec, THREADS), StreamedPool(spec, STREAMED)):
        with pool:
            found = masked_losses(pool, requests, sets, batch_tokens=128)
        np.testing.assert_allclose(found.nats, expected, rtol=1e-4, atol=1e-5)
        assert found.greedy.shape == found.nats.shape


def test_one_by_one_is_the_same_in_every_pool_and_streams_replace_the_derivative(
    spec: ModelSpec, requests: list[Request]
) -> None:
    with InProcessPool(spec, THREADS) as local, StreamedPool(spec, STREAMED) as streamed:
        heads = window_candidates(headscan.load(spec.source, device="cpu"))
        exact = one_by_one(local, requests, WINDOW, heads, batch_tokens=128)
        far = pool_damages(streamed, requests, WINDOW, heads, gates=(0.5,), batch_tokens=128)
    np.testing.assert_allclose(far, exact, rtol=1e-3, atol=1e-5)


def test_whole_replicas_estimate_damage_from_derivatives(spec: ModelSpec, requests: list[Request]) -> None:
    lm = headscan.load(spec.source, device="cpu")
    heads = window_candidates(lm)
    with InProcessPool(spec, THREADS) as pool:
        found = pool_damages(pool, requests, WINDOW, heads, gates=(0.2, 0.8), batch_tokens=128)
    for row, (ids, scored) in enumerate(requests):
        alone = kv_damages(lm, torch.tensor([ids]), None, 2, 7, gates=(0.2, 0.8), scored=[scored]).by_sequence_BLK
        expected = [float(alone[0, layer, kv_head]) for layer, kv_head in heads]
        np.testing.assert_allclose(found[row], expected, rtol=1e-3, atol=1e-5)


def test_the_mean_of_many_gates_is_the_loss_of_all_windows_together(spec: ModelSpec, requests: list[Request]) -> None:
    lm = headscan.load(spec.source, device="cpu")
    heads = window_candidates(lm)
    gates = tuple((np.arange(20) + 0.5) / 20)
    with InProcessPool(spec, THREADS) as pool:
        estimate = pool_damages(pool, requests, WINDOW, heads, gates=gates, batch_tokens=512).sum(1)
        every = KeptKeys.of([(*head, WINDOW) for head in heads])
        nats = masked_losses(pool, requests, [ALL_KEYS, every], batch_tokens=128).nats
    np.testing.assert_allclose(estimate, nats[1] - nats[0], rtol=0.02, atol=2e-3)


def test_losses_and_damages_that_are_not_finite_name_the_dtype(requests: list[Request], tmp_path: Path) -> None:
    broken = make_model("llama")
    torch.nn.init.constant_(broken.model.norm.weight, float("nan"))
    broken.save_pretrained(tmp_path)
    with InProcessPool(ModelSpec(str(tmp_path)), THREADS) as pool:
        with pytest.raises(NotFiniteError, match=r"NaN or infinite losses: 5 of 5 \(limit 0\). Use another `dtype`"):
            masked_losses(pool, requests, [ALL_KEYS], batch_tokens=128)
        with pytest.raises(HeadscanError, match=r"NaN or infinite damages: 10 of 10 .*`dtype`"):
            pool_damages(pool, requests, WINDOW, [(0, 0), (1, 0)], gates=(0.5,), batch_tokens=128)
        with pytest.raises(SequenceError, match=r"shortest prompt has 25 tokens \(at least 30"):
            pool_damages(pool, requests, Window(2, 27), [(0, 0)], gates=(0.5,), batch_tokens=128)


def test_doubtful_heads_lie_around_the_edge() -> None:
    order = [(0, index) for index in range(100)]
    assert doubtful_heads(order, 50) == tuple(order[35:65])
    assert len(doubtful_heads([(0, index) for index in range(1000)], 500)) == 32
    assert doubtful_heads(order[:6], 1) == tuple(order[:3])
    assert doubtful_heads(order[:6], 6) == tuple(order[4:6])


def test_a_flipped_head_changes_sides_alone() -> None:
    windows = {(0, index): WINDOW for index in range(3)}
    base, first, third = flipped_windows(windows, [(0, 0), (0, 1)], [(0, 0), (0, 2)])
    assert [head for _, head, _ in base.windows] == [0, 1]
    assert [head for _, head, _ in first.windows] == [1]
    assert [head for _, head, _ in third.windows] == [0, 1, 2]


def test_a_head_gets_the_narrowest_window_that_costs_hardly_more() -> None:
    narrow, wide = Window(4, 16), Window(4, 64)
    damages = {narrow: [np.array([0.5, 0.3, -0.1, 0.2])], wide: [np.array([0.1, 0.29, -0.1, 0.2])]}
    assert smallest_windows(damages) == [wide, narrow, narrow, narrow]
    assert smallest_windows({wide: damages[wide]}) == [wide] * 4
