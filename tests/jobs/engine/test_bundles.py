"""Sharing prefixes, and sharing layers between masks and the baseline, changes no answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random

import pytest
import torch
from torch import Tensor

import headscan
from headscan.ablation.intervention import Intervention
from headscan.architectures import VOCABULARY
from headscan.engine.bundles import (
    FROM_TOKENS,
    Start,
    bundle_passes,
    bundle_size,
    bundled_likelihoods,
    possible_starts,
    start_of,
)
from headscan.engine.likelihood import distinct_inputs, likelihoods
from headscan.layers.prefix_cache import shares_prefixes
from headscan.sizing.model_sizes import LayerCache
from headscan.texts.token_requests import LogLikelihood, Request, Responses
from headscan.windows import KeptKeys, Window
from tests.jobs.conftest import naive_likelihood, zeroed_by_hand
from tests.small_models import make_loaded

#: Of gemma3 two of three layers see 20 tokens back.
SHARING = ["llama", "gemma3", "qwen3", "gpt2"]
WHOLE = ["jamba", "bamba"]
MASKS = [None, headscan.HeadMask([(0, 3), (2, 1)]), headscan.HeadMask([(2, head) for head in range(6)])]
#: Masks without heads in layer 0, which they share with the baseline; jamba and bamba have no heads in layer 1.
ABOVE = [None, headscan.HeadMask([(2, 0), (2, 5)]), headscan.HeadMask([(2, 3)])]
BATCH_TOKENS = 300


def nested_requests() -> tuple[Request, ...]:
    """Contexts that are prefixes of each other, with several continuations each."""
    random = Random(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(random.choices(range(5, VOCABULARY), k=count))

    contexts = [tokens(2)]
    for length in (90, 70, 3):
        contexts += [random.choice(contexts) + tokens(length) for _ in range(2)]
    contexts[0] = contexts[-1][:100] + tokens(15)
    found = []
    for context in contexts:
        word, other = tokens(4), tokens(1)
        found += [
            Request(context + word, 4),
            Request(context + word[:2], 2),  # a beginning of the one before
            Request(context + word[:2], 1),  # the same tokens, fewer of them scored
            Request(context + other, 1),
            Request(context + tokens(1), 1),  # the same read as the one before: a last token is only predicted
        ]
    random.shuffle(found)
    return tuple(found)


REQUESTS = nested_requests()
#: For models that take long.
FEW = REQUESTS[::4]


def scored(
    lm: headscan.LoadedModel, ablated: Intervention | None, share: bool, requests: tuple[Request, ...] = REQUESTS
) -> Responses[LogLikelihood]:
    return likelihoods(lm, requests, ablated, BATCH_TOKENS, share)


def close(ours: Sequence[LogLikelihood], expected: Sequence[LogLikelihood]) -> bool:
    assert [answer.greedy_tokens for answer in ours] == [answer.greedy_tokens for answer in expected]
    values = [answer.log_likelihood for answer in ours]
    return values == pytest.approx([answer.log_likelihood for answer in expected], abs=1e-4)


@contextmanager
def tokens_read(lm: headscan.LoadedModel) -> Iterator[list[int]]:
    """The tokens of every forward pass, padding included."""
    found: list[int] = []

    def count(_: torch.nn.Module, args: tuple[Tensor]) -> None:
        found.append(args[0].numel())

    handle = lm.model.get_input_embeddings().register_forward_pre_hook(count)
    yield found
    handle.remove()


@pytest.mark.parametrize("mask", MASKS, ids=["baseline", "two layers", "whole layer"])
@pytest.mark.parametrize("family", SHARING)
def test_prefixes_read_once_give_the_likelihoods_of_whole_requests(family: str, mask: headscan.HeadMask | None) -> None:
    lm = make_loaded(family)
    assert shares_prefixes(lm)
    with zeroed_by_hand(lm, mask.heads if mask else [], family):
        expected = [naive_likelihood(lm, request) for request in REQUESTS]
    with tokens_read(lm) as shared_tokens:
        shared = scored(lm, mask, share=True)
    with tokens_read(lm) as whole_tokens:
        whole = scored(lm, mask, share=False)
    assert close(shared.values, expected)
    assert close(whole.values, expected)
    assert sum(shared_tokens) < 0.7 * sum(whole_tokens)
    ablated = len(mask.heads) / 18 if mask else 0
    assert shared.ablated_shares == whole.ablated_shares == pytest.approx((ablated,) * len(REQUESTS))


@pytest.mark.parametrize(("family", "mask"), [*zip(SHARING, [*MASKS, MASKS[1]], strict=True)])
def test_prefixes_of_several_questions_are_read_together(family: str, mask: headscan.HeadMask | None) -> None:
    lm, random = make_loaded(family), Random(1)
    start = random.choices(range(5, VOCABULARY), k=70)
    requests = []
    for length in (50, 60, 55, 40, 90):
        context = start + random.choices(range(5, VOCABULARY), k=length)
        requests += [Request((*context, *random.choices(range(5, VOCABULARY), k=3)), 3) for _ in range(4)]
    with tokens_read(lm) as passes:
        shared = likelihoods(lm, requests, mask, 1000, True)
    # The common beginning; four contexts, cut to the shortest; the longest; and the endings of both.
    assert sorted(passes) == sorted([70, 4 * 39, 89, 4 * 4 * (60 - 40 + 3), 4 * 3])
    with zeroed_by_hand(lm, mask.heads if mask else [], family):
        expected = [naive_likelihood(lm, request) for request in requests]
    assert close(shared.values, expected)


@pytest.mark.parametrize("family", WHOLE)
def test_models_that_cannot_go_on_from_a_prefix_read_whole_requests(family: str) -> None:
    lm = make_loaded(family)
    assert not shares_prefixes(lm)
    for mask in ABOVE:
        with zeroed_by_hand(lm, mask.heads if mask else [], family):
            expected = [naive_likelihood(lm, request) for request in FEW]
        assert close(scored(lm, mask, share=False, requests=FEW).values, expected)


@pytest.mark.parametrize("ablated", [headscan.HeadRule("output_norm_ln", 0.9), headscan.RandomHeads(0.3, 1)], ids=type)
def test_ablations_of_whole_inputs_share_no_prefix(ablated: Intervention) -> None:
    lm = make_loaded("llama")
    ours = scored(lm, ablated, share=True)
    assert ours == scored(lm, ablated, share=False)
    reads = {read.ids: read.requests for read in distinct_inputs(REQUESTS)}
    assert len(reads) < len(REQUESTS)
    for requests in reads.values():  # one input is ablated in one way
        assert len({ours.ablated_shares[index] for index, _ in requests}) == 1
    assert len(set(ours.ablated_shares)) > 3


@pytest.mark.parametrize(
    ("family", "with_baseline"),
    [
        *((family, True) for family in (*SHARING, *WHOLE, "bloom")),
        *((family, False) for family in ("gemma3", "gpt2", "jamba", "bloom")),
    ],
)
def test_a_bundle_gives_every_mask_the_bits_that_it_has_alone(family: str, with_baseline: bool) -> None:
    lm = make_loaded(family)
    share = shares_prefixes(lm)
    masks = [mask for mask in ABOVE if mask is not None or with_baseline]
    if family not in WHOLE:
        masks += [headscan.HeadMask([(1, 1), (2, 2)]), headscan.HeadMask([(0, 4)])]
    possible = possible_starts(lm, masks)
    starts = tuple(start_of(mask, possible) for mask in masks)
    # The attention of bloom adds the residual, so it cannot be shared.
    assert max(starts) == Start(2, family != "bloom")
    requests = FEW if family in WHOLE else REQUESTS
    together = bundled_likelihoods(lm, requests, masks, starts, BATCH_TOKENS, share)
    for mask, ours in zip(masks, together, strict=True):
        assert ours == scored(lm, mask, share, requests)


def test_a_bundle_runs_the_layers_below_its_masks_for_the_baseline_alone() -> None:
    lm = make_loaded("llama")
    starts = (FROM_TOKENS, Start(1, True), Start(2, True))
    masks = (None, headscan.HeadMask([(1, 1), (2, 2)]), headscan.HeadMask([(2, 3)]))
    counts = [0, 0, 0]
    for layer in range(3):

        def count(*_: object, layer: int = layer) -> None:
            counts[layer] += 1

        lm.module(f"model.layers.{layer}.self_attn.q_proj").register_forward_pre_hook(count)
    scored(lm, None, share=True)
    passes = counts[0]
    counts[:] = [0, 0, 0]
    bundled_likelihoods(lm, REQUESTS, masks, starts, BATCH_TOKENS, True)
    found = 1  # one pass more finds the blocks
    # The second mask computes no attention, and its prefixes are the baseline's, since it changes no keys.
    assert counts == [passes + found, passes + found, 2 * passes + found]
    counts[:] = [0, 0, 0]
    bundled_likelihoods(lm, REQUESTS, masks[1:], starts[1:], BATCH_TOKENS, True)
    assert counts == [passes, passes, 2 * passes]


def test_a_bundle_that_does_not_fit_into_memory_is_answered_in_parts() -> None:
    lm = make_loaded("llama")
    starts = (FROM_TOKENS, Start(2, False), Start(2, True))

    def answered() -> list[Responses[LogLikelihood]]:
        return bundled_likelihoods(lm, REQUESTS, ABOVE, starts, BATCH_TOKENS, True)

    expected = answered()
    refused = []

    def allocate(_: torch.nn.Module, args: tuple[Tensor], kwargs: dict[str, Tensor]) -> None:
        if args[0].shape[0] > 2 and len(refused) < 2:
            refused.append(args[0].shape)
            raise torch.OutOfMemoryError("CUDA out of memory")

    lm.module("model.layers.2").register_forward_pre_hook(allocate, with_kwargs=True)
    for ours, whole in zip(answered(), expected, strict=True):
        assert close(ours.values, whole.values)
    assert refused


# Which arms are bundled

RULE = headscan.HeadRule("entropy", 1.0)


def mask_at(layer: int) -> headscan.HeadMask:
    return headscan.HeadMask([(layer, 0), (9, 1)])


def starts_at(*layers: int, behind: Sequence[int] = ()) -> frozenset[Start]:
    return frozenset({*(Start(layer, False) for layer in layers), *(Start(layer, True) for layer in behind)})


def test_a_pass_starts_as_late_as_its_first_head_allows() -> None:
    every = starts_at(*range(1, 8), behind=range(8))
    assert start_of(mask_at(5), every) == Start(5, True)
    assert start_of(mask_at(5), starts_at(*range(1, 8))) == Start(5, False)
    assert start_of(mask_at(5), starts_at(2, 4, 6, behind=[6])) == Start(4, False)
    assert start_of(mask_at(0), every) == Start(0, True)
    windows = headscan.KvWindows(KeptKeys.of([(5, 0, Window(0, 4))]))  # these change the attention itself
    assert start_of(windows, every) == Start(5, False)
    for ablated, possible in [(mask_at(0), starts_at(1)), (mask_at(3), starts_at(4)), (None, every), (RULE, every)]:
        assert start_of(ablated, possible) == FROM_TOKENS


def bundles_of(arms: Sequence[Intervention | None], possible: frozenset[Start], size: int = 8) -> list[list[int]]:
    return bundle_passes([None if arm is None else start_of(arm, possible) for arm in arms], size)


#: Behind the attention of layer 2 alone.
POSSIBLE = starts_at(*range(1, 10), behind=[2])


@pytest.mark.parametrize(
    ("arms", "groups"),
    [
        ([], []),
        ([None], [[0]]),
        ([None, mask_at(1)], [[0, 1]]),  # the baseline's pass is needed anyway
        ([None, mask_at(0)], [[0], [1]]),
        ([None, RULE, mask_at(4), headscan.RandomHeads(0.1), mask_at(2)], [[0, 2, 4], [1], [3]]),
        ([mask_at(2), mask_at(2)], [[0, 1]]),
        ([mask_at(6)], [[0]]),  # six layers more for the baseline, six less for the mask
        ([mask_at(4), mask_at(6)], [[0, 1]]),  # six layers more for the baseline, ten less for the masks
    ],
)
def test_arms_are_bundled_where_that_saves_layers(arms: list[Intervention | None], groups: list[list[int]]) -> None:
    assert bundles_of(arms, POSSIBLE) == groups
    assert bundles_of(arms, frozenset()) == [[index] for index in range(len(arms))]


def test_the_size_of_bundles_has_a_limit_by_number_and_by_prefix() -> None:
    arms = [None, *(mask_at(1 + n % 9) for n in range(30)), RULE]
    groups = bundles_of(arms, POSSIBLE)
    assert sorted(index for group in groups for index in group) == list(range(32))
    assert max(map(len, groups)) == 8
    assert max(map(len, bundles_of(arms, POSSIBLE, 16))) == 16
    caches = {"self": (LayerCache(4, 1 << 16, None, 64), LayerCache(4, 1 << 16, 512, 64))}
    assert bundle_size(None, 2048) == 8
    assert bundle_size(caches, 512) == 16  # 32 MiB and 32 MiB for each arm
    assert bundle_size(caches, 2048) == 8  # 160 MiB for each arm, so fewer would fit
    assert bundle_size(caches, 16) == 64
