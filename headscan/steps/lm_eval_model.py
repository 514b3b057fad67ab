"""The model ``headscan`` of lm-eval: heads ablated, a KV-cache plan, or a pruned model, under lm-eval's own command.

    python -m headscan.steps.lm_eval_model run --model headscan --tasks arc_easy \\
        --model_args pretrained=MODEL,heads=3:5+7:0

lm-eval has no entry point for models, so this file registers the model and starts lm-eval. A program passes a
`HeadscanModel` to ``lm_eval.simple_evaluate(model=...)``. The answers equal those of ``headscan evaluate``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from inspect import signature
from typing import Any, TypeVar, get_args

from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model

from headscan.ablation.rules import HeadRule
from headscan.cluster.placement_base import PlacementRequest
from headscan.engine.answer import AnswerItem, answer_item, settings_for
from headscan.engine.answering import request_chunks
from headscan.engine.arms import BASELINE, Arm, check_arms, mask_arm
from headscan.errors import HeadscanError
from headscan.model_spec import ModelSpec
from headscan.options import BATCH_TOKENS
from headscan.plans import load_plan
from headscan.runs.head_orders import imported_heads
from headscan.runs.progress import Progress
from headscan.runs.run_context import ModelContext, ModelOpener
from headscan.settings.corpus_settings import BosPolicy
from headscan.settings.evaluation_settings import TASK_TOKENS, HarnessError, PlanMode
from headscan.steps.checks import check_eviction, check_generates, check_next_token_head
from headscan.steps.plan_arms import check_plan, plan_arms
from headscan.store.records import ArmKind
from headscan.texts.harness import HeadscanLM

R = TypeVar("R")


@register_model("headscan")
class HeadscanModel(HeadscanLM):
    """A model that answers lm-eval's requests at once.

    Args:
        pretrained: A folder, a name on the hub, a GGUF file, or ``demo``; a pruned model, too.
        heads: Heads to ablate as ``3:5+7:0``, because lm-eval separates arguments by commas, or (layer, head) pairs.
        mask: JSON file with a list of ``[layer, head]`` to ablate.
        rule: Score that decides for each input which heads are ablated, with its ``threshold``.
        plan: File of a KV-cache plan. ``plan_mode`` is forward (keys are masked) or decode (keys are evicted).
        device: ``cpu``, ``cuda:1``, ...; ``auto`` and ``cuda:0``, lm-eval's default, choose a placement.
        batch_tokens: Tokens of one forward pass. lm-eval's batch size has no effect.

    Raises:
        HarnessError: Arguments that are unknown, have a wrong type, or do not go together.
    """

    def __init__(
        self,
        pretrained: str = "",
        *,
        heads: str | Sequence[tuple[int, int]] = (),
        mask: str | None = None,
        rule: str | None = None,
        threshold: float | None = None,
        plan: str | None = None,
        plan_mode: PlanMode = "forward",
        dtype: str = "auto",
        revision: str | None = None,
        trust_remote_code: bool = False,
        unused_weights: bool = False,
        bos: str = "auto",
        device: str | None = None,
        batch_tokens: int = BATCH_TOKENS,
        batch_size: Any = None,
        max_batch_size: Any = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise _no_argument(*next(iter(unknown.items())))
        if not pretrained:
            raise HarnessError("`pretrained` is missing (limit 1 model). Add pretrained=MODEL to the arguments")
        given = {"heads": heads, "mask": mask, "rule": rule, "plan": plan}
        if len(chosen := [name for name, value in given.items() if value]) > 1:
            raise HarnessError(f"{' and '.join(chosen)} exclude each other (limit 1). Set one of them")
        if (rule is None) != (threshold is None):
            raise HarnessError("rule and threshold go together. Set both, or none")
        if isinstance(threshold, bool) or not isinstance(threshold, int | float | None):
            raise HarnessError(f"`threshold={threshold!r}` is not a number. Change it")
        if isinstance(batch_tokens, bool) or not isinstance(batch_tokens, int) or batch_tokens < 1:
            raise HarnessError(f"`batch_tokens={batch_tokens!r}` is not a whole number (limit 1). Change it")
        if bos not in get_args(BosPolicy):
            raise HarnessError(f"`bos={bos!r}`. Choose {' or '.join(get_args(BosPolicy))}")
        if plan_mode not in get_args(PlanMode):
            raise HarnessError(f"`plan_mode={plan_mode!r}`. Choose {' or '.join(get_args(PlanMode))}")
        # lm-eval reads words such as 7 as numbers.
        revision = None if revision is None else str(revision)
        spec = ModelSpec(str(pretrained), dtype, revision, trust_remote_code, unused_weights=unused_weights)
        where = "auto" if device in (None, "cuda", "cuda:0") else device
        request = PlacementRequest(device=str(where))
        self._context = ModelContext(spec, ModelOpener(spec, TASK_TOKENS, request, batch_tokens, evaluates=True))
        super().__init__(self._context.identity, bos=bos)
        check_next_token_head(self._context)
        self._arm = BASELINE
        if heads:
            self._arm = mask_arm(_heads(heads))
        elif mask:
            self._arm = mask_arm(imported_heads(str(mask)))
        elif rule and threshold is not None:
            self._arm = Arm(f"rule {rule} {threshold:g}", ArmKind.RULE, HeadRule(str(rule), float(threshold)))
        elif plan:
            loaded = load_plan(str(plan))
            check_plan(loaded, self._context)
            [self._arm] = plan_arms(loaded, (plan_mode,), 0)
        check_arms(self._context.facts.grid, [self._arm])
        dtype, rope = self._context.facts.dtype, self._context.identity.rope_lengths
        share = False if self._context.pool.staged else None
        changes = [self._arm.intervention]
        self._settings = settings_for(changes, batch_tokens, share, dtype=dtype, rope=rope, say=lambda line: None)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return self._answered(partial(super().loglikelihood, requests))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        return self._answered(partial(super().loglikelihood_rolling, requests))

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return self._answered(partial(super().generate_until, requests))

    def get_model_info(self) -> dict[str, Any]:
        """Return the arm and the identity of the model, which lm-eval writes next to the results."""
        return {"headscan_arm": self._arm.name, **self._context.identity.fingerprint()}

    def _answered(self, ask: Callable[[], list[R]]) -> list[R]:
        """Return the values of requests: collect those that are new, run the model, and replay all answers."""
        known = self.answers or {}
        self.answers = None
        ask()
        new = {mark: request for mark, request in self.requests.items() if mark not in known}
        check_generates(self._context.pool, new)
        check_eviction(self._context, [self._arm], new)
        answers = dict(known)
        items = {
            f"{self._arm.name}, requests {item.index}": item
            for item in request_chunks(new, self._settings.batch_tokens)
        }
        work = (
            AnswerItem(name, item.requests, (self._arm.intervention,), self._settings) for name, item in items.items()
        )
        with Progress(self._arm.name, len(new), "request") as progress:
            for finished in self._context.pool.map(answer_item, work):
                hashes = items[finished.item.name].hashes
                answers |= zip(hashes, finished.value[0].values, strict=True)
                progress.update(len(hashes))
        self.answers = answers
        return ask()


#: Arguments of lm-eval's own models that change how weights are loaded, and what has the same effect here.
_LOADED_OTHERWISE = dict.fromkeys(
    ("load_in_4bit", "load_in_8bit", "quantization_config", "autogptq", "gptqmodel", "gguf_file"),
    "Save the quantised model with its configuration, and name its folder",
) | {
    "peft": "Merge the adapter with `merge_and_unload`, save the model, and name its folder",
    "delta": "Add the difference to the model, save it, and name its folder",
    "attn_implementation": "Leave it out: headscan chooses the attention",
    "max_length": "Leave it out: the model's own context is the limit",
    "parallelize": "Leave it out: the placement is automatic",
    "device_map": "Leave it out: the placement is automatic",
    "add_bos_token": "Set bos=always or bos=never",
}


def _no_argument(name: str, value: object) -> HarnessError:
    """Return the error for an argument of lm-eval that this model lacks."""
    known = [each for each in signature(HeadscanModel).parameters if each not in ("unknown", "max_batch_size")]
    fix = _LOADED_OTHERWISE.get(name)
    if fix is None:
        near = get_close_matches(name, known, n=1)
        fix = f"Did you mean {near[0]}?" if near else "Leave it out"
    return HarnessError(f"the model headscan has no argument {name}={value!r} (limit {', '.join(known)}). {fix}")


def _heads(text: str | int | Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the heads of a text such as ``3:5+7:0``, or of pairs."""
    pairs = text if isinstance(text, list | tuple) else [each.split(":") for each in str(text).split("+")]
    try:
        return [(int(layer), int(head)) for layer, head in pairs]
    except (TypeError, ValueError):
        raise HarnessError(
            f"`heads={text!r}` names no heads. Write LAYER:HEAD+LAYER:HEAD, for example 3:5+7:0"
        ) from None


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except HeadscanError as problem:
        sys.exit(f"headscan: {problem}")
