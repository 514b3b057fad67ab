"""Answers from a cache that evicts keys equal an oracle that keeps all keys and masks them per head."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import headscan
from headscan.ablation.intervention import Intervention
from headscan.architectures import VOCABULARY
from headscan.engine import eviction
from headscan.engine.answer import AnsweringSettings, answer
from headscan.engine.eviction import evicted_likelihoods
from headscan.engine.generation import generated_texts
from headscan.engine.likelihood import likelihoods
from headscan.errors import MemoryLimitError
from headscan.kv.kv_windows import KvEviction
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import LoadedModel
from headscan.plans import HeadPlan, PlannedModel
from headscan.settings.evaluation_settings import PLAN_MODES, PlanMode
from headscan.steps.plan_arms import plan_arms
from headscan.texts.token_requests import GenerationRequest, LogLikelihood, Request, Responses
from tests.instrument.kv.cache_plans import NARROW, random_plan
from tests.jobs.steps.kv_plans import SINK, decode_oracle, forward_oracle, only_drops, plan_for
from tests.small_models import make_loaded


@pytest.fixture(scope="module")
def plan(model: PlannedModel) -> HeadPlan:
    return plan_for(model, [(0, 0), (1, 1), (2, 0)], dropped=[(1, 0)])


def tokens(count: int, seed: int = 0, vocabulary: int = 300) -> tuple[int, ...]:
    return tuple(np.random.default_rng([seed, count]).integers(5, vocabulary, count).tolist())


def ablation(plan: HeadPlan, mode: PlanMode) -> Intervention:
    (arm,) = plan_arms(plan, [mode], 0)
    assert arm.intervention is not None
    return arm.intervention


def evicted(
    lm: LoadedModel, plan: HeadPlan, requests: Sequence[Request], batch_tokens: int = 1000
) -> Responses[LogLikelihood]:
    return evicted_likelihoods(lm, requests, ablation(plan, "decode"), batch_tokens)


def assert_close(found: Sequence[LogLikelihood], expected: Sequence[LogLikelihood], tolerance: float = 1e-4) -> None:
    assert [each.greedy_tokens for each in found] == [each.greedy_tokens for each in expected]
    ours, theirs = ([each.log_likelihood for each in answers] for answers in (found, expected))
    assert ours == pytest.approx(theirs, abs=tolerance)


CONTEXT = tokens(17)
#: Contexts of several lengths, a context with several continuations, one of them twice as long, and text that is
#: scored from its first token on.
REQUESTS = (
    Request((*tokens(30), *tokens(6, 1)), 6),
    Request((*CONTEXT, *tokens(4, 2)), 4),
    Request((*CONTEXT, *tokens(9, 3)), 9),
    Request((*CONTEXT, *tokens(4, 2)[:-1], 7), 4),
    Request((*tokens(17, 4), *tokens(5, 5)), 5),
    Request((*tokens(2), *tokens(12, 6)), 12),
    Request(tokens(25, 7), 24),
)


@pytest.mark.parametrize("batch_tokens", [1, 60, 1000])
def test_contexts_are_read_whole_and_continuations_from_what_is_left(
    lm: LoadedModel, plan: HeadPlan, batch_tokens: int
) -> None:
    found = evicted(lm, plan, REQUESTS, batch_tokens)
    assert_close(found.values, [decode_oracle(lm, plan, request) for request in REQUESTS])
    assert found.ablated_shares == (0.0,) * len(REQUESTS)


def test_the_two_modes_differ_only_if_there_is_a_context(lm: LoadedModel, plan: HeadPlan) -> None:
    for request in REQUESTS:
        forward, decode = forward_oracle(lm, plan, request), evicted(lm, plan, [request]).values[0]
        alike = abs(forward.log_likelihood - decode.log_likelihood) <= 1e-4
        # The last token of the context predicts the first scored one, so it belongs to the continuation.
        assert alike == (len(request.ids) - request.scored_tokens - 1 <= SINK)


def test_a_request_keeps_its_own_context_next_to_another_of_the_same_tokens(lm: LoadedModel, plan: HeadPlan) -> None:
    """Keys are evicted before the first scored token, wherever another request of the same tokens begins to score."""
    ids = tokens(28)
    requests = [Request(ids, 2), Request((*ids[:-1], 9), 15), Request(ids, 15)]
    found = evicted(lm, plan, requests).values
    assert_close(found, [decode_oracle(lm, plan, request) for request in requests])
    assert_close(found[:1], evicted(lm, plan, requests[:1]).values, 1e-5)


def test_forward_answers_are_those_of_window_masks(lm: LoadedModel, plan: HeadPlan) -> None:
    expected = [forward_oracle(lm, plan, request) for request in REQUESTS]
    for share, kernels in ((False, False), (True, False), (False, True)):
        (found,) = answer(lm, REQUESTS, [ablation(plan, "forward")], AnsweringSettings(200, share, kernels))
        assert_close(found.values, expected)
    dropped, heads = 3, 18
    assert found.ablated_shares == pytest.approx([dropped / heads] * len(REQUESTS))


@pytest.mark.parametrize("mode", PLAN_MODES)
def test_full_heads_give_the_baseline(lm: LoadedModel, model: PlannedModel, mode: PlanMode) -> None:
    expected = likelihoods(lm, REQUESTS, None, 1000, False).values
    for share in (False, True):
        (found,) = answer(lm, REQUESTS, [ablation(plan_for(model, 0), mode)], AnsweringSettings(1000, share))
        assert_close(found.values, expected)


def test_batches_without_enough_memory_are_halved(
    lm: LoadedModel, plan: HeadPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = evicted(lm, plan, REQUESTS).values
    answer, sizes = eviction._score, []

    def scarce(lm: LoadedModel, ablated: Intervention, reads: list) -> list:  # type: ignore[type-arg]
        sizes.append(len(reads))
        if len(reads) > most:
            raise torch.OutOfMemoryError("as if")
        return answer(lm, ablated, reads)

    monkeypatch.setattr(eviction, "_score", scarce)
    fresh = headscan.load(lm.source)  # limits belong to a loaded model
    most = 1
    assert_close(evicted(fresh, plan, REQUESTS).values, expected)
    assert max(sizes) > 1 and sizes.count(1) == len(REQUESTS) - 1  # two requests are one input
    most = 0
    with pytest.raises(MemoryLimitError, match="one sequence does not fit"):
        evicted(fresh, plan, REQUESTS[:1])


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2-softcap", "gemma3", "qwen3_next", "falcon_h1", "gpt2"])
def test_architectures_without_plain_attention_evict_too(family: str) -> None:
    """Learned sinks, soft caps, sliding layers and recurrent states; contexts shared by several continuations."""
    lm = make_loaded(family)
    implementation = lm.model.config._attn_implementation
    context = tokens(20, vocabulary=VOCABULARY)
    requests = [Request((*context, *tokens(6, seed, VOCABULARY)), 6) for seed in range(3)]
    plan = random_plan(lm, (NARROW,))
    found = evicted_likelihoods(lm, requests, KvEviction(plan), 1000).values
    assert_close(found, [decode_oracle(lm, plan, request) for request in requests], 1e-3)  # type: ignore[arg-type]
    baseline = likelihoods(lm, requests, None, 1000, False).values
    assert all(abs(a.log_likelihood - b.log_likelihood) > 1e-2 for a, b in zip(found, baseline, strict=True))
    assert lm.model.config._attn_implementation == implementation


# Generated text


@torch.no_grad()
def greedy(lm: LoadedModel, plan: HeadPlan, mode: PlanMode, prompt: tuple[int, ...], count: int) -> list[int]:
    """Greedy tokens by whole passes (forward), or step by step after a prompt that was read whole (decode)."""
    ids, cache = list(prompt), DynamicCache(config=lm.model.config)
    for step in range(count):
        masks = only_drops(plan) if mode == "decode" and not step else ablation(plan, "forward")
        with headscan.intervene(lm, masks):
            if mode == "forward":
                out = lm.model(torch.tensor([ids]), use_cache=False)
            else:
                out = lm.model(torch.tensor([ids[-1:] if step else ids]), past_key_values=cache, use_cache=True)
        ids.append(int(out.logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("mode", PLAN_MODES)
def test_texts_are_generated_from_what_a_plan_keeps(
    spec: ModelSpec, lm: LoadedModel, model: PlannedModel, plan: HeadPlan, mode: PlanMode
) -> None:
    """Prompts of several lengths are padded in one batch, and give the texts that they give alone."""
    prompts = [tokens(count, 20) for count in (11, 30, 30, 4)]
    requests = tuple(GenerationRequest(prompt, (), 12, ()) for prompt in prompts)
    tokenizer = lm.require_tokenizer()

    def texts(of: HeadPlan | None, batch_tokens: int) -> tuple[str, ...]:
        ablated = None if of is None else ablation(of, mode)
        return generated_texts(lm, requests, ablated, batch_tokens).values

    expected = []
    for prompt in prompts:
        written = greedy(lm, plan, mode, prompt, 12)
        end = written.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in written else len(written)
        expected.append(tokenizer.decode(written[:end], skip_special_tokens=True))
    for batch_tokens in (1, 1000):
        assert texts(plan, batch_tokens) == tuple(expected)
    assert texts(plan, 1000) != texts(None, 1000)
    assert texts(plan_for(model, 0), 1000) == texts(None, 1000)
