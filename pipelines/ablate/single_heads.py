"""Effects of single heads on a task, or on the loss of texts.

Every head is an arm of one evaluation: this head ablated, or all others of its layer. Masks share work up to the
layer of their head. The same command again resumes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from headscan.ablation.masks import HeadMask
from headscan.analysis.arm_kinds import ArmKind
from headscan.analysis.effects.head_effects import HeadEffect, record_effects
from headscan.analysis.schema.effect_tables import ALL_BUT_ONE, EACH
from headscan.analysis.store.store import Store
from headscan.cluster.tasks.pool import Pool
from headscan.errors import InterventionError
from headscan.grid import AttentionSite, HeadGrid
from headscan.pipelines.corpora import CorpusSpec
from headscan.pipelines.corpora.sequences import read_spread
from headscan.pipelines.evaluate.collect_values import ValueConfig, collect_value
from headscan.pipelines.evaluate.evaluation_checks import check_predicts
from headscan.pipelines.evaluate.evaluation_requests import Questions
from headscan.pipelines.evaluate.held_out_text import HeldOutText, chunks
from headscan.pipelines.evaluate.run_evaluation import EvaluateConfig, Purpose, evaluate
from headscan.pipelines.runs.identity import ModelIdentity, identify
from headscan.pipelines.runs.run_records import RunContext
from headscan.pipelines.scoring.arms import BASELINE, ZERO_VALUE, AblationValue, Arm


def head_arms(grid: HeadGrid, mode: str, value: AblationValue = ZERO_VALUE) -> list[Arm]:
    """Return an arm for each head, in the order of the layers, which arms of neighbouring layers share.

    Args:
        mode: Single heads, or all other heads of a layer; layers of one head have no others.
        value: What replaces the output of ablated heads.
    """
    arms = []
    for site in grid.sites:
        every = range(site.num_attention_heads)
        for head in every:
            if mode == EACH:
                arms.append(_arm(site, head, mode, f"head {site.layer}:{head}", [head], value))
            elif len(every) > 1:
                others = [other for other in every if other != head]
                arms.append(_arm(site, head, mode, f"all but {site.layer}:{head}", others, value))
    return arms


def _arm(site: AttentionSite, head: int, mode: str, name: str, ablated: Iterable[int], value: AblationValue) -> Arm:
    mask = HeadMask(((site.layer, each) for each in ablated), value.replacement)
    place = {"site": site.site, "layer": site.layer, "head": head, "kv_head": site.kv_head_of[head]}
    details = (("mode", mode), *place.items(), *value.details)
    return Arm(f"{name}{value.suffix}", ArmKind.MASK, mask, details=details)


#: Modes of an ablate run.
MODES = (EACH, ALL_BUT_ONE)


#: Longest text by default and shortest text, in tokens: predictions after few tokens say little.
_LONGEST, _SHORTEST = 2048, 16


@dataclass(frozen=True)
class LossTexts:
    """Texts whose loss is measured.

    Attributes:
        corpus: Ordinary text.
        sequences: Number of texts, from many documents.
        max_tokens: Longest text; None uses the model's context, at most 2,048 tokens.

    Raises:
        InterventionError: A number is out of range.
    """

    corpus: CorpusSpec
    sequences: int = 128
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("sequences", 1), ("max_tokens", _SHORTEST)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InterventionError(f"{name}={value} (limit {least}). Raise `{name}`")

    def read(self, identity: ModelIdentity) -> HeldOutText:
        """Return the texts in tokens.

        Raises:
            InterventionError: A text exceeds the model's context, or the corpus has none.
            CorpusError: The corpus cannot be read.
        """
        limit = identity.max_tokens
        tokens = self.max_tokens or min(_LONGEST, limit or _LONGEST)
        if limit is not None and tokens > limit:
            raise InterventionError(f"max_tokens={tokens} (limit {limit}, the model's context). Lower `max_tokens`")
        shortest = min(_SHORTEST, tokens)
        found = read_spread(self.corpus, identity.tokenizer, tokens, self.sequences, shortest=shortest)
        if not found:
            raise InterventionError(
                f"{self.corpus.name} has 0 texts of {shortest} tokens or more (limit 1). Choose another corpus"
            )
        return HeldOutText(self.corpus.name, chunks(identity.tokenizer, found))


@dataclass(frozen=True)
class AblateConfig:
    """Settings of a table of effects.

    Attributes:
        evaluation: Model and tasks; recall questions and text are left out.
        texts: Texts whose loss is measured; None uses the tasks.
        modes: ``each``: one head is ablated; ``all_but_one``: all other heads of its layer.
        value: What replaces the output of ablated heads.

    Raises:
        InterventionError: A mode is unknown, or there are not either tasks or texts.
    """

    evaluation: EvaluateConfig
    texts: LossTexts | None = None
    modes: tuple[str, ...] = (EACH,)
    value: ValueConfig = field(default_factory=ValueConfig)

    def __post_init__(self) -> None:
        unknown = [mode for mode in self.modes if mode not in MODES]
        if unknown or not self.modes:
            raise InterventionError(f"unknown mode {(unknown or [''])[0]!r}. Choose {' or '.join(MODES)}")
        if bool(self.evaluation.tasks.names) == (self.texts is not None):
            both = "tasks and texts" if self.texts is not None else "neither tasks nor texts"
            raise InterventionError(f"{both}, but effects have one metric. Set either `tasks` or `corpus`")


class AblateResult(NamedTuple):
    """A finished table.

    Attributes:
        run_id: The run in the store.
        effects: Effects of all modes of the run, by mode, layer and head.
    """

    run_id: str
    effects: tuple[HeadEffect, ...]


def single_head_effects(
    config: AblateConfig,
    store: Store,
    pool: Pool,
    *,
    context: RunContext | None = None,
    resume_anyway: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> AblateResult:
    """Measure the effect of every head, record the table in the store, and return it.

    Args:
        context: Identity and facts of the model; None computes them.
        resume_anyway: Add answers to a run even if the software or the device changed; both are recorded.
        say: Called with lines for the user.

    Raises:
        ResumeError: The run needs more answers, software or device changed, and ``resume_anyway`` is False.
        EffectError: The tasks have neither right answers nor losses.
        HeadscanError: The run fails; finished answers stay in the store.
    """
    context = RunContext(identify(config.evaluation.model), pool) if context is None else context
    check_predicts(context)
    text = None if config.texts is None else config.texts.read(context.identity)
    evaluation = replace(config.evaluation, recall=None, text=text)
    questions = Questions(evaluation.tasks, None, context.identity, text)
    value = collect_value(config.value, context, questions.longest_input)
    arms = [BASELINE]
    for mode in config.modes:
        arms += head_arms(context.facts.grid, mode, value)
    asked = f"{questions.benchmark_size} questions" if text is None else f"{len(text.chunks)} texts"
    say(f"{len(arms)} arms: the baseline and {len(arms) - 1} sets of heads, on {asked}")
    run_id = evaluate(
        evaluation,
        store,
        pool,
        arms,
        questions=questions,
        context=context,
        resume_anyway=resume_anyway,
        say=say,
        purpose=Purpose("ablate", {"replace": config.value.value, **dict(value.details)}, judges_arms=False),
    )
    return AblateResult(run_id, tuple(record_effects(store, run_id)))
