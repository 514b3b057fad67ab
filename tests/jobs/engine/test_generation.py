"""Texts are those of lm-eval's own model with the same heads ablated, and draws repeat."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

import headscan
from headscan.ablation.intervention import Intervention
from headscan.cluster.pool import InProcessPool
from headscan.engine import generation
from headscan.engine.answering import request_chunks
from headscan.engine.arms import BASELINE, Arm
from headscan.engine.generation import generated_texts
from headscan.grid import Head
from headscan.model_spec import ModelSpec
from headscan.options import BATCH_TOKENS
from headscan.runs.model_identity import identify
from headscan.settings.evaluation_settings import TaskConfig
from headscan.steps.evaluate import Evaluate
from headscan.steps.run_evaluation import run_evaluation
from headscan.store.records import ArmKind
from headscan.store.store import Store
from headscan.texts.harness import HeadscanLM
from headscan.texts.tasks import Tasks
from headscan.texts.token_requests import GenerationRequest, Responses, input_key
from tests.jobs.conftest import TEXTS, THREADS, run_on, zeroed_by_hand

PROMPTS = ["ada counts to 3: 0 1", "bo", TEXTS[2], "cy counts again and again and "]
GREEDY = {"until": ["\n", "e"], "max_gen_toks": 10, "do_sample": False}
SAMPLED = {"until": ["\n"], "max_gen_toks": 6, "do_sample": True, "temperature": 3.0}
MASK = headscan.HeadMask([(0, 1), (1, 0), (2, 2), (2, 4)])


def instances(prompts: Sequence[str], options: dict[str, Any]) -> list[Instance]:
    return [Instance("generate_until", {}, (text, options), i, ("task", i, 1)) for i, text in enumerate(prompts)]


def collected(spec: ModelSpec, prompts: Sequence[str], options: dict[str, Any]) -> tuple[GenerationRequest, ...]:
    adapter = HeadscanLM(identify(spec))
    adapter.generate_until(instances(prompts, options))
    return tuple(request for request in adapter.requests.values() if isinstance(request, GenerationRequest))


def written(
    lm: headscan.LoadedModel,
    requests: Sequence[GenerationRequest],
    ablated: Intervention | None = None,
    batch_tokens: int = 1000,
) -> Responses[str]:
    return generated_texts(lm, requests, ablated, batch_tokens)


@torch.no_grad()
def greedy_by_hand(lm: headscan.LoadedModel, request: GenerationRequest) -> str:
    """Token by token, each from a whole forward pass."""
    ids = list(request.ids)
    tokenizer = lm.require_tokenizer()
    for _ in range(request.max_new_tokens):
        ids.append(int(lm.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] == tokenizer.eos_token_id:
            break
    text = str(tokenizer.decode(ids[len(request.ids) :], skip_special_tokens=True))
    for end in request.until:
        text = text.partition(end)[0]
    return text


@pytest.mark.parametrize("mask", [None, MASK], ids=["baseline", "mask"])
def test_texts_are_those_of_lm_eval_under_a_plain_hook(
    spec: ModelSpec, lm: headscan.LoadedModel, mask: headscan.HeadMask | None
) -> None:
    theirs = HFLM(pretrained=lm.model, tokenizer=lm.tokenizer, batch_size=len(PROMPTS), max_length=lm.max_tokens)
    requests = collected(spec, PROMPTS, GREEDY)
    with zeroed_by_hand(lm, mask.heads if mask else []):
        expected = theirs.generate_until(instances(PROMPTS, GREEDY), disable_tqdm=True)
        assert [greedy_by_hand(lm, request) for request in requests] == expected
    assert len(set(expected)) > 2
    for batch_tokens in (1, 1000):
        ours = written(lm, requests, mask, batch_tokens)
        assert list(ours.values) == expected
        assert ours.ablated_shares == (len(mask.heads) / 18 if mask else 0.0,) * len(PROMPTS)


def test_a_rule_ablates_the_prompts_inactive_heads_in_every_step(spec: ModelSpec, lm: headscan.LoadedModel) -> None:
    rule = headscan.HeadRule("output_norm_ln", threshold=0.9)
    requests = collected(spec, PROMPTS, GREEDY)
    ours = written(lm, requests, rule)
    found = set()
    for request, text, share in zip(requests, ours.values, ours.ablated_shares, strict=True):
        with torch.no_grad(), headscan.intervene(lm, rule) as record:
            lm.model(torch.tensor([request.ids]))
        assert record.ablated is not None
        heads = [(int(layer), int(head)) for layer, head in record.ablated[0].nonzero()]
        with zeroed_by_hand(lm, heads):
            assert text == greedy_by_hand(lm, request)
        assert share == pytest.approx(len(heads) / 18)
        found.add(tuple(heads))
    assert len(found) > 1


def test_random_heads_follow_from_the_prompts_tokens(spec: ModelSpec, lm: headscan.LoadedModel) -> None:
    random_heads = headscan.RandomHeads(0.3, seed=2)
    requests = collected(spec, PROMPTS, GREEDY)
    ours = written(lm, requests, random_heads)
    for request, text, share in zip(requests, ours.values, ours.ablated_shares, strict=True):
        drawn = random_heads.draw(input_key(request.ids), lm.grid.shape)
        with zeroed_by_hand(lm, [Head(*map(int, head)) for head in drawn.nonzero()]):
            assert text == greedy_by_hand(lm, request)
        assert share == pytest.approx(int(drawn.sum()) / 18)
    assert len(set(ours.ablated_shares)) > 1


def test_a_rule_that_ablates_nothing_generates_the_baselines_text(spec: ModelSpec, lm: headscan.LoadedModel) -> None:
    requests = collected(spec, PROMPTS, GREEDY)
    ours = written(lm, requests, headscan.HeadRule("entropy", threshold=float("-inf")))
    assert ours == written(lm, requests)
    assert set(ours.ablated_shares) == {0.0}


# Draws


@pytest.mark.parametrize("ablated", [None, MASK, headscan.RandomHeads(0.3)], ids=["baseline", "mask", "random"])
@pytest.mark.parametrize("batch_tokens", [1, 1000])
def test_samples_of_one_prompt_differ_and_are_the_same_again(
    spec: ModelSpec, lm: headscan.LoadedModel, ablated: Intervention | None, batch_tokens: int
) -> None:
    requests = collected(spec, [text for text in PROMPTS[:2] for _ in range(3)], SAMPLED)
    assert [request.draw for request in requests] == [0, 1, 2, 0, 1, 2]
    texts = written(lm, requests, ablated, batch_tokens).values
    assert len(set(texts[:3])) == len(set(texts[3:])) == 3
    torch.manual_seed(5)
    state = torch.get_rng_state()
    assert written(lm, requests, ablated, batch_tokens).values == texts
    assert torch.equal(torch.get_rng_state(), state)


def test_samples_do_not_depend_on_ablated_heads(spec: ModelSpec, lm: headscan.LoadedModel) -> None:
    """Sampled prompts run alone under every arm: in batches of another size the same seed samples other texts."""
    requests = collected(spec, PROMPTS, SAMPLED)
    nothing = headscan.HeadRule("entropy", threshold=float("-inf"))
    assert written(lm, requests, nothing).values == written(lm, requests).values


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "alone"), [("float32", False), ("bfloat16", True)])
def test_in_half_precision_all_arms_write_as_rules_do(
    spec: ModelSpec, task_folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch, dtype: str, alone: bool
) -> None:
    sizes: list[int] = []
    write = generation._write

    def counted(lm: Any, requests: list[GenerationRequest], mask: Any) -> list[str]:
        sizes.append(len(requests))
        return write(lm, requests, mask)

    monkeypatch.setattr(generation, "_write", counted)
    spec = dataclasses.replace(spec, dtype=dtype)
    rule = Arm("rule", ArmKind.RULE, headscan.HeadRule("entropy", threshold=float("-inf")), "entropy")
    config = Evaluate(spec, TaskConfig(("telling",), include_path=str(task_folder), limit=4), recall=None)
    run_evaluation(config, run_on(InProcessPool(spec, THREADS), store), [BASELINE, rule])
    assert (max(sizes) == 1) == alone
    texts = store.query(
        "select name, question, response from answers join arms using (arm_id) order by all"
    ).to_pylist()
    assert [row["response"] for row in texts[:4]] == [row["response"] for row in texts[4:]]


def test_sampled_and_greedy_requests_are_told_apart_and_grouped(spec: ModelSpec, lm: headscan.LoadedModel) -> None:
    ways = [GREEDY, GREEDY | {"max_gen_toks": 3}, GREEDY | {"until": []}, GREEDY | {"suppress_tokens": [5, 6]}]
    requests = [request for way in ways for request in collected(spec, PROMPTS[:2], way)]
    assert len(set(map(repr, requests))) == 8
    together = written(lm, requests).values
    assert together == tuple(written(lm, [request]).values[0] for request in requests)
    told = {name: value for name, value in SAMPLED.items() if name != "do_sample"}
    assert collected(spec, [PROMPTS[0]] * 3, told) == collected(spec, [PROMPTS[0]] * 3, SAMPLED)
    assert len(collected(spec, [PROMPTS[0]] * 3, GREEDY)) == 1
    assert len(collected(spec, [PROMPTS[0]] * 3, GREEDY | {"temperature": 0.0})) == 1


def test_a_prompt_longer_than_the_room_loses_its_beginning(spec: ModelSpec) -> None:
    adapter = HeadscanLM(identify(spec))
    adapter.generate_until(instances([TEXTS[0] * 80, "short"], GREEDY | {"max_gen_toks": 24}))
    (long, short) = adapter.requests.values()
    assert len(long.ids) == 1000
    assert long.ids == tuple(adapter.tok_encode(TEXTS[0] * 80)[-1000:])
    assert len(short.ids) < 10
    assert len(adapter.truncated) == 1


# In an evaluation


def test_a_task_with_samples_is_graded_by_the_first_of_each(
    spec: ModelSpec, lm: headscan.LoadedModel, task_folder: Path, store: Store
) -> None:
    rule = headscan.HeadRule("entropy", 1.0)
    arms = [BASELINE, Arm("rule", ArmKind.RULE, rule, "entropy")]
    config = Evaluate(spec, TaskConfig(("dreaming",), include_path=str(task_folder)), recall=None)
    run_evaluation(config, run_on(InProcessPool(spec, THREADS), store), arms)
    adapter = HeadscanLM(identify(spec))
    Tasks(config.tasks).collect(adapter)
    (item,) = request_chunks(adapter.requests, BATCH_TOKENS)
    assert sorted(request.draw for request in item.requests) == [0, 0, 0, 1, 1, 1]
    for arm in arms:
        texts = dict(zip(item.hashes, written(lm, item.requests, arm.intervention, BATCH_TOKENS).values, strict=True))
        matches = [re.search(r"\S", texts[found]) for found in [*adapter.requests][::2]]
        answers = store.query("from answers join arms using (arm_id) where name = ? order by question", [arm.name])
        assert answers["response"].to_pylist() == [match.group() if match else "[invalid]" for match in matches]
