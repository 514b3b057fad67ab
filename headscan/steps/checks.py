"""Checks before an evaluation: a model, its pool and the arms can answer the questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headscan.ablation.intervention import Ablation
from headscan.cluster.pool import Pool, refuse_staged
from headscan.engine.arms import Arm, check_tokenizer, model_settings
from headscan.errors import InterventionError, UnsupportedModelError
from headscan.layers.prefix_cache import shares_prefixes
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import LoadedModel
from headscan.runs.model_identity import ModelIdentity, identify
from headscan.runs.run_context import ModelContext
from headscan.text_tables import counted
from headscan.texts.tasks import AnyRequest, Questions
from headscan.texts.token_requests import GenerationRequest, Request


def check_next_token_head(model: ModelContext) -> None:
    if not model.facts.grid.predicts_next_token:
        raise UnsupportedModelError(
            f"{model.identity.name} does not predict the next token, but tasks need a decoder. Use a decoder"
        )


def check_generates(pool: Pool, requests: Mapping[str, AnyRequest]) -> None:
    """Raise StagingError if a request generates text, which needs all layers for every token, and a pool is staged."""
    prompts = sum(isinstance(request, GenerationRequest) for request in requests.values())
    if prompts:
        refuse_staged(pool, f"generation of {counted(prompts, 'text')}", instead="tasks with log-likelihoods")


def check_eviction(model: ModelContext, arms: Sequence[Arm], requests: Mapping[str, AnyRequest]) -> None:
    """Raise if an arm evicts keys and the pool is staged, or the model cannot score continuations of evicted caches."""
    evicting_arms = [arm.name for arm in arms if arm.intervention is not None and arm.intervention.evicts]
    if not evicting_arms:
        return
    refuse_staged(model.pool, f"{evicting_arms[0]} evicts keys, which", instead="the mode forward")
    has_scored = any(isinstance(request, Request) for request in requests.values())
    if has_scored and not model.pool.one(_continues_prefixes, None):
        raise UnsupportedModelError(
            f"{evicting_arms[0]} evicts keys, but {model.identity.name} continues a KV cache only token by token. Use"
            " the mode forward, or tasks that generate text"
        )


def _continues_prefixes(lm: LoadedModel, item: object) -> bool:
    """Pool task: return True if the model can continue cached prefixes of several tokens."""
    return shares_prefixes(lm)


def check_resampled(arms: Sequence[Arm], requests: Mapping[str, AnyRequest]) -> None:
    """Raise InterventionError if text is to be generated with resampled heads."""
    has_prompts = any(isinstance(request, GenerationRequest) for request in requests.values())
    for arm in arms:
        if has_prompts and isinstance(arm.intervention, Ablation) and not arm.intervention.replacement.position_free:
            raise InterventionError(
                f"{arm.name} resamples heads of whole inputs, but a task generates text. Use `kind=zero` or"
                " `kind=mean`, or tasks with log-likelihoods"
            )


def check_models(arms: Sequence[Arm], baseline: ModelIdentity, questions: Questions) -> dict[ModelSpec, ModelIdentity]:
    """Return the identities of the arms' other models; raise if one has changed, or cannot answer the questions."""
    identities: dict[ModelSpec, ModelIdentity] = {}
    longest = questions.longest_input(generated=True)
    for arm in arms:
        if arm.model is None:
            continue
        if arm.model not in identities:
            identities[arm.model] = identify(arm.model)
        identity = identities[arm.model]
        check_tokenizer(identity, baseline)
        arm_settings = dict(arm.details)
        if any(arm_settings.get(name) != value for name, value in model_settings(identity)):
            raise InterventionError(f"{arm.name}: the files of {arm.model.source} have changed. Make the arm again")
        if identity.max_tokens is not None and longest > identity.max_tokens:
            raise InterventionError(
                f"{arm.name} has {identity.max_tokens} positions, but the longest question and its answer need"
                f" {longest}. Use a model with as many positions as the baseline"
            )
    return identities
