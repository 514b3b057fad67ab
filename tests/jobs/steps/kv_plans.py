"""Plans of the small model of the tests, with chosen windows."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

import headscan
from headscan.kv.kv_windows import KvWindows
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import LoadedModel
from headscan.plans import HeadPlan, PlannedModel, WindowHeads, allocate, planned_model
from headscan.plans.keep_scores import KeepScores, full_heads
from headscan.plans.plan_records import RandomCalibration
from headscan.runs.model_identity import identify, model_facts
from headscan.texts.token_requests import LogLikelihood, Request
from headscan.windows import DROPPED, KeptKeys

#: Narrow windows, so that short texts lose keys.
SINK, RECENT = 1, 3


def model_of(spec: ModelSpec, lm: LoadedModel) -> PlannedModel:
    facts = model_facts(lm, None)
    run = {
        "run_id": "r0",
        "grid": facts.sites,
        **identify(spec).columns(),
        "num_layers": lm.grid.num_layers,
        "dtype": "float32",
    }
    return planned_model(run)[0]


def plan_for(
    model: PlannedModel,
    windows: int | Sequence[tuple[int, int]],
    *,
    seed: int = 0,
    dropped: Sequence[tuple[int, int]] = (),
    recent: int = RECENT,
) -> HeadPlan:
    """Return a plan with windows on these KV heads, or on so many; ``seed`` orders them."""
    places = full_heads(model)
    random.Random(seed).shuffle(places)
    chosen = places[:windows] if isinstance(windows, int) else list(windows)
    order = (*chosen, *(place for place in places if place not in chosen))
    scores = {place: rank / len(order) for rank, place in enumerate(order)}
    keep = KeepScores("random", "a rank", model, scores, order, (), RandomCalibration(seed, None))
    verdicts = dict.fromkeys(dropped, "a verdict")
    return allocate(keep, WindowHeads(len(chosen)), sink=SINK, recent=recent, dropped=verdicts)


@torch.no_grad()
def forward_oracle(lm: LoadedModel, plan: HeadPlan, request: Request) -> LogLikelihood:
    """Answer a request in one pass in which all tokens see their windows."""
    ids = torch.tensor([request.ids[:-1]])
    with headscan.intervene(lm, KvWindows(plan.kept)):
        logits = lm.model(ids, use_cache=False).logits[0, -request.scored_tokens :]
    return _likelihood(logits, request)


def only_drops(plan: HeadPlan) -> KvWindows:
    """Return the masks of a context that is read with all keys: dropped heads output zero there too."""
    kept = plan.kept
    return KvWindows(KeptKeys.of(each for each in kept.windows if each[2] == DROPPED))


@torch.no_grad()
def decode_oracle(lm: LoadedModel, plan: HeadPlan, request: Request) -> LogLikelihood:
    """Answer a request token by token from a cache that keeps all keys, with masks per head after the context."""
    start = len(request.ids) - request.scored_tokens - 1
    cache = DynamicCache(config=lm.model.config)
    if start:
        with headscan.intervene(lm, only_drops(plan)):
            lm.model(torch.tensor([request.ids[:start]]), past_key_values=cache, use_cache=True)
    logits = []
    for token in request.ids[start:-1]:
        with headscan.intervene(lm, KvWindows(plan.kept)):
            logits.append(lm.model(torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0, -1])
    return _likelihood(torch.stack(logits), request)


def _likelihood(logits: Tensor, request: Request) -> LogLikelihood:
    targets = torch.tensor(request.ids[-request.scored_tokens :])
    values = logits.double().log_softmax(-1).gather(1, targets[:, None])
    return LogLikelihood(float(values.sum()), int((logits.argmax(-1) == targets).sum()))
