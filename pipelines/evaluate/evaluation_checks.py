"""Checks that a model can answer the questions of an evaluation, made before it answers any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headscan.cluster.tasks.staged_task import StagingError
from headscan.errors import InterventionError, UnsupportedModelError
from headscan.model_spec import ModelSpec
from headscan.pipelines.runs.identity import ModelIdentity, identify
from headscan.pipelines.runs.run_records import ModelContext
from headscan.pipelines.scoring.arms import Arm, check_tokenizer, model_settings
from headscan.pipelines.scoring.scoring_mode import can_share_prefixes
from headscan.pipelines.scoring.token_requests import GenerationRequest, Request


def check_predicts(model: ModelContext) -> None:
    """Raise UnsupportedModelError if the model is no decoder."""
    if not model.facts.grid.predicts_next_token:
        raise UnsupportedModelError(
            f"{model.identity.name} does not predict the next token, but tasks need a decoder. Use a decoder"
        )


def check_scored(requests: Mapping[str, Request | GenerationRequest]) -> None:
    """Raise StagingError if a request generates text. Generation needs all layers for every token."""
    written = sum(isinstance(request, GenerationRequest) for request in requests.values())
    if written:
        raise StagingError(
            f"{written} texts are to be generated, which needs all layers of the model at once. Use tasks with "
            "log-likelihoods, or placement=whole or placement=sharded"
        )


def check_not_evicting(arms: Sequence[Arm]) -> None:
    """Raise StagingError if an arm evicts keys, which needs the KV cache of all layers at once."""
    evicting = [arm.name for arm in arms if arm.ablated is not None and arm.ablated.evicts]
    if evicting:
        raise StagingError(
            f"{evicting[0]} evicts keys, which needs all layers of the model at once. Use the mode forward, or"
            " placement=whole or placement=sharded"
        )


def check_continues(
    model: ModelContext, arms: Sequence[Arm], requests: Mapping[str, Request | GenerationRequest]
) -> None:
    """Raise UnsupportedModelError if continuations of evicting arms cannot be scored."""
    scored = any(isinstance(request, Request) for request in requests.values())
    evicting = [arm.name for arm in arms if arm.ablated is not None and arm.ablated.evicts]
    if scored and evicting and not model.pool.one(can_share_prefixes, None):
        raise UnsupportedModelError(
            f"{evicting[0]} evicts keys, but {model.identity.name} continues a KV cache only token by token. Use the"
            " mode forward, or tasks that generate text"
        )


def check_resampled(arms: Sequence[Arm], requests: Mapping[str, Request | GenerationRequest]) -> None:
    """Raise InterventionError if text is to be generated with resampled heads."""
    written = any(isinstance(request, GenerationRequest) for request in requests.values())
    for arm in arms:
        if written and arm.ablated is not None and not arm.ablated.replaces_by.position_free:
            raise InterventionError(
                f"{arm.name} resamples heads of whole inputs, but a task generates text. Use replace=zero or"
                " replace=mean, or tasks with log-likelihoods"
            )


def check_models(
    arms: Sequence[Arm], baseline: ModelIdentity, requests: Mapping[str, Request | GenerationRequest]
) -> dict[ModelSpec, ModelIdentity]:
    """Return the identities of the models that arms name."""
    found: dict[ModelSpec, ModelIdentity] = {}
    longest = max((len(each.ids) for each in requests.values()), default=0)
    for arm in arms:
        if arm.model is None:
            continue
        if arm.model not in found:
            found[arm.model] = identify(arm.model)
        identity = found[arm.model]
        check_tokenizer(identity, baseline)
        known = dict(arm.details)
        if any(known.get(name) != value for name, value in model_settings(identity)):
            raise InterventionError(f"{arm.name}: the files of {arm.model.source} have changed. Make the arm again")
        # The last token of a continuation is predicted, not read.
        if identity.max_tokens is not None and longest > identity.max_tokens + 1:
            raise InterventionError(
                f"{arm.name} has {identity.max_tokens} positions, but the longest question has {longest} tokens. Use a"
                " model with as many positions as the baseline"
            )
    return found
