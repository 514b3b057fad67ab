"""Effects of single heads on a task, on the loss of texts, or on labelled examples.

Every head is an arm of one evaluation: this head ablated, or all others of its layer. Masks share work up to the layer
of their head. The same command again resumes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from headscan.ablation.masks import HeadMask, SiteMask
from headscan.engine.arms import BASELINE, Arm, site_arm
from headscan.engine.replacements import ZERO_REPLACEMENT, ArmReplacement, collect_replacement
from headscan.errors import HeadIndexError
from headscan.grid import Head, HeadGrid
from headscan.models.model_facts import check_bounds
from headscan.runs.progress import at_work
from headscan.runs.run_context import Run
from headscan.settings.evaluation_settings import TaskConfig
from headscan.steps.ablate import Ablate
from headscan.steps.checks import check_next_token_head
from headscan.steps.run_evaluation import Purpose, run_evaluation
from headscan.store.records import ArmKind
from headscan.store.tables import EACH
from headscan.text_tables import counted
from headscan.texts.example_questions import ExampleQuestions
from headscan.texts.held_out_text import HeldOutText
from headscan.texts.labelled_texts import read_labelled
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


def site_head_arms(grid: HeadGrid, mode: str) -> list[Arm]:
    """Return an arm for each head of every site, see `ablated_sets`."""
    return [
        site_arm(f"{kind} {place}", SiteMask({kind: heads}), settings)
        for kind in grid.kinds
        for place, heads, settings in ablated_sets(grid.at(kind), mode)
    ]


class AblateResult(NamedTuple):
    """The run of a finished table, and its effects by mode, site, layer and head."""

    run_id: str
    effects: tuple[HeadEffect, ...]


def run_ablate(config: Ablate, run: Run) -> AblateResult:
    """Measure the effect of every head, record the table in the store, and return it."""
    check_bounds(run.model.config(), config.heads)
    questions, asked = _questions(config, run)
    replacement = collect_replacement(config.replacement, run, questions.longest_input())
    grid, wanted, arms = run.facts.grid, set(config.heads), [BASELINE]
    for mode in config.modes:
        of_mode = head_arms(grid, mode, replacement) if questions.examples is None else site_head_arms(grid, mode)
        arms += [arm for arm in of_mode if not wanted or _head_of(arm) in wanted]
    if missing := sorted(wanted - {_head_of(arm) for arm in arms[1:]}):
        raise HeadIndexError(f"no head {missing[0][0]}:{missing[0][1]} in {run.identity.name}. Choose another")
    run.say(f"{counted(len(arms), 'arm')}: the baseline and {counted(len(arms) - 1, 'set')} of heads, on {asked}")
    purpose = Purpose("ablate", {"replace": config.replacement.kind, **dict(replacement.details)}, judges_arms=False)
    run_id = run_evaluation(config, run, arms, questions=questions, purpose=purpose)
    with at_work("effects and their intervals"):
        return AblateResult(run_id, tuple(record_effects(run.store, run_id)))


def _head_of(arm: Arm) -> tuple[int, int]:
    """Return the layer and the head of an arm of `ablated_sets`."""
    settings: dict[str, Any] = dict(arm.details)
    return settings["layer"], settings["head"]


def _questions(config: Ablate, run: Run) -> tuple[Questions, str]:
    """Return what the arms answer, with its number in words: labelled examples, questions of tasks, or texts."""
    if config.data is not None:
        texts = read_labelled(config.data, run.model, run.identity, config.max_tokens)
        examples = ExampleQuestions(texts, config.metric, run.identity.max_tokens)
        return Questions(TaskConfig(), None, run.identity, examples=examples), counted(len(texts.texts), "example")
    check_next_token_head(run)
    text = None
    if not config.tasks.names:
        assert config.corpus is not None
        text = HeldOutText.of_corpus(
            config.corpus, run.model, sequences=config.sequences, max_tokens=config.max_tokens, identity=run.identity
        )
    questions = Questions(config.tasks, None, run.identity, text)
    if text is None:
        return questions, counted(questions.tasks.questions, "question")
    return questions, counted(len(text.chunks), "text")
