"""Effects of single heads on a task, or on the loss of texts.

Every head is an arm of one evaluation: this head ablated, or all others of its layer. Masks share work up to the layer
of their head. The same command again resumes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from headscan.ablation.masks import HeadMask
from headscan.engine.arms import BASELINE, Arm
from headscan.engine.replacements import ZERO_REPLACEMENT, ArmReplacement, collect_replacement
from headscan.grid import Head, HeadGrid
from headscan.runs.progress import at_work
from headscan.runs.run_context import Run
from headscan.steps.ablate import Ablate
from headscan.steps.checks import check_next_token_head
from headscan.steps.run_evaluation import Purpose, run_evaluation
from headscan.store.records import ArmKind
from headscan.store.tables import EACH
from headscan.texts.held_out_text import HeldOutText
from headscan.texts.tasks import Questions
from headscan.verdicts.head_effects import HeadEffect, record_effects


def ablated_sets(grid: HeadGrid, mode: str) -> Iterator[tuple[str, list[Head], dict[str, object]]]:
    """Yield the name, the ablated heads and the settings of an arm for each head: that head, or all others of its layer
    (no arm in layers of one head). The arms follow the layers, because arms of neighbouring layers share work.
    """
    for site in grid.sites:
        every = [Head(site.layer, head) for head in range(site.num_attention_heads)]
        for head in every if mode == EACH or len(every) > 1 else ():
            ablated = [head] if mode == EACH else [other for other in every if other != head]
            place = {"site": site.kind, "layer": site.layer, "head": head.head, "kv_head": site.kv_head_of[head.head]}
            yield f"{'' if mode == EACH else 'all but '}{site.layer}:{head.head}", ablated, {"mode": mode, **place}


def head_arms(grid: HeadGrid, mode: str, replacement: ArmReplacement = ZERO_REPLACEMENT) -> list[Arm]:
    """Return an arm for each head of a decoder, see `ablated_sets`."""
    arms = []
    for place, heads, settings in ablated_sets(grid, mode):
        name = f"{'head ' if mode == EACH else ''}{place}{replacement.suffix}"
        mask, details = HeadMask(heads, replacement.outputs), (*settings.items(), *replacement.details)
        arms.append(Arm(name, ArmKind.MASK, mask, details=details))
    return arms


class AblateResult(NamedTuple):
    """The run of a finished table, and its effects by mode, site, layer and head."""

    run_id: str
    effects: tuple[HeadEffect, ...]


def run_ablate(config: Ablate, run: Run) -> AblateResult:
    """Measure the effect of every head, record the table in the store, and return it."""
    check_next_token_head(run)
    text = None
    if not config.tasks.names:
        assert config.corpus is not None
        text = HeldOutText.of_corpus(
            config.corpus, run.model, sequences=config.sequences, max_tokens=config.max_tokens, identity=run.identity
        )
    questions = Questions(config.tasks, None, run.identity, text)
    replacement = collect_replacement(config.replacement, run, questions.longest_input())
    arms = [BASELINE]
    for mode in config.modes:
        arms += head_arms(run.facts.grid, mode, replacement)
    asked = f"{questions.tasks.questions} questions" if text is None else f"{len(text.chunks)} texts"
    run.say(f"{len(arms)} arms: the baseline and {len(arms) - 1} sets of heads, on {asked}")
    purpose = Purpose("ablate", {"replace": config.replacement.kind, **dict(replacement.details)}, judges_arms=False)
    run_id = run_evaluation(config, run, arms, questions=questions, purpose=purpose)
    with at_work("effects and their intervals"):
        return AblateResult(run_id, tuple(record_effects(run.store, run_id)))
