"""Settings of evaluations: tasks, recall questions, ablations and their comparisons."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from headscan.catalog import (
    CRITERIA,
    DAMAGE,
    EFFECT,
    GATE,
    LAYER_DROP,
    RANKED_CRITERIA,
    RECALL_FAMILIES,
    RECALL_NAMES,
    SCORES,
    ReplacementKind,
)
from headscan.checkpoints.source_folder import check_folder
from headscan.errors import HeadscanError, InterventionError, unknown_name
from headscan.grid import check_pairs, parse_head
from headscan.model_spec import ModelSpec
from headscan.options import Count, Group, Limits, Option, Seed, check_limits, short
from headscan.settings.corpus_settings import DEMO_CORPUS, LONGEST_TEXT, SHORTEST, BosPolicy, CorpusSpec, longest_text
from headscan.store.verdict_limits import QUESTIONS_PER_TEXT

if TYPE_CHECKING:
    from headscan.plans import HeadPlan
    from headscan.runs.model_identity import ModelIdentity

#: Limits of the largest loss increase of a safe arm, in nats per token.
LOSS_LIMITS = Limits(above=0, most=100)
#: Limits of the largest loss of accuracy of a safe arm, in percentage points.
POINT_LIMITS = Limits(above=0, below=100)

#: Prompt length that placement reserves memory for when tasks run. Longer prompts run alone, or fail.
TASK_TOKENS = 2048

#: Default lengths of recall questions are the powers of two from the first to the second.
_SHORTEST_RECALL, _LONGEST_RECALL = 256, 4096

#: Default number of recall questions of each family, over all lengths.
IN_ALL = 400
#: Prompts of each recall task that measure ``importance_recall`` where no setting states another number.
RECALL_PROMPTS = 16

#: Option of every verb that writes runs.
RESUME_ANYWAY = Option(
    "resume an unfinished run although packages, headscan, the device or the model's code changed; the store records "
    "both (default: an error names the changes)"
)
ResumeAnyway = Annotated[bool, RESUME_ANYWAY]


class HarnessError(HeadscanError):
    """Raised if a task cannot be evaluated."""


class RecallError(HeadscanError):
    """Recall questions that cannot be made with these settings."""


@short
@dataclass(frozen=True)
class RecallQuestions:
    """Settings of the recall questions.

    There are two families, needles and copying. By default each has 400 questions, spread over all lengths: a model
    with 4,096 or more positions gets 80 for each of five lengths. An arm then reads 1.3 million tokens, or 0.33 million
    if common prefixes are read once.

    No arm can be shown to keep recall with fewer than 192 needles or 144 copying questions
    (`docs/verdicts.md`). A sweep judges on three quarters of the questions, so by default it asks more
    if the whole model recalls little, which it measures first (`run_sweep.size_recall`).

    Attributes:
        lengths: Tokens that the model reads in a question; None uses those of `lengths_within`.
        questions: Number for each length and family, a multiple of 4; None follows ``in_all``.
        in_all: Number for each family over all lengths, a multiple of 4, if ``questions`` is None. For example,
            ``{"needle": 800}`` asks 800 needles and 400 copying questions, because a family that is not named has
            `IN_ALL`. None uses `IN_ALL` for both.
    """

    lengths: Annotated[
        tuple[int, ...] | None,
        Option(
            "comma-separated prompt lengths of recall questions (default: powers of two from "
            f"{_SHORTEST_RECALL} to {_LONGEST_RECALL} that fit)",
            flag="--recall-lengths",
            least=1,
        ),
    ] = None
    questions: Annotated[
        int | None,
        Option(
            f"number of recall questions per family and length, a multiple of 4 (default: {IN_ALL} per family over all "
            "lengths; more in a sweep if the model recalls little)",
            flag="--recall-questions",
            least=QUESTIONS_PER_TEXT,
            multiple=QUESTIONS_PER_TEXT,
        ),
    ] = None
    seed: Seed = 0
    in_all: Mapping[str, int] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        check_limits(self, RecallError)
        if self.lengths is not None:
            if not self.lengths:
                raise RecallError("recall lengths are empty. Give at least one, or None for the default")
            if len(set(self.lengths)) < len(self.lengths):
                raise RecallError(f"recall lengths {', '.join(map(str, self.lengths))} repeat. Give each once")
        if self.in_all is not None and self.questions is not None:
            raise RecallError("`in_all` has no effect with `questions`: leave one of them out")
        if not isinstance(self.in_all, Mapping | None):
            raise RecallError(f"`in_all={self.in_all!r}` names no families. Pass numbers by name, of {RECALL_NAMES}")
        for family, number in (self.in_all or {}).items():
            if family not in RECALL_FAMILIES:
                raise unknown_name("family of recall questions", family, RECALL_FAMILIES)
            if not isinstance(number, Integral) or number < QUESTIONS_PER_TEXT or number % QUESTIONS_PER_TEXT:
                limit = f"limit {QUESTIONS_PER_TEXT}, a multiple of {QUESTIONS_PER_TEXT}"
                raise RecallError(
                    f"`in_all` has {number!r} questions of the family {family} ({limit}). Change `in_all`"
                )

    def lengths_within(self, max_tokens: int | None) -> tuple[int, ...]:
        """Return the lengths of the questions for a model. Their default is the powers of two from 256 to 4,096 up to
        the model's limit, and the limit itself if it is below 4,096; ``max_tokens`` None means no limit.
        """
        if self.lengths is not None:
            longest = max(self.lengths)
            if max_tokens is not None and longest > max_tokens:
                raise RecallError(
                    f"recall length of {longest} tokens (limit {max_tokens} positions of the model). Lower the "
                    "recall lengths"
                )
            return self.lengths
        limit = _LONGEST_RECALL if max_tokens is None else min(max_tokens, _LONGEST_RECALL)
        lengths = [_SHORTEST_RECALL]
        while lengths[-1] < limit:
            lengths.append(2 * lengths[-1])
        return tuple(dict.fromkeys(min(length, limit) for length in lengths))

    def by_family(self) -> dict[str, int]:
        """Return the number of questions over all lengths by family, if ``questions`` is None."""
        return {family: (self.in_all or {}).get(family, IN_ALL) for family in RECALL_FAMILIES}

    def settings(self) -> dict[str, Any]:
        """Return the settings that identify a run. Earlier runs lack ``in_all``, so its default is left out, and list
        its numbers without the names of the families.
        """
        settings = asdict(replace(self, in_all=None))
        del settings["in_all"]
        return settings if self.in_all is None else {**settings, "in_all": (*self.by_family().values(),)}


@short
@dataclass(frozen=True)
class TaskConfig:
    """Tasks of lm-eval, and the form of their prompts. Without ``names`` an evaluation asks recall and text only."""

    names: Annotated[
        tuple[str, ...],
        Option("comma-separated lm-eval tasks, groups or tags (default: none; the demo has its own)", flag="--tasks"),
    ] = ()
    include_path: Annotated[
        str | None,
        Option(
            "folder with your own lm-eval tasks, such as headscan-demo/task for `continuation`, the task of the demo; "
            "task files can run code, so name only folders that you trust (default: none)",
            needs="--tasks",
        ),
    ] = None
    num_fewshot: Annotated[
        int | None, Option("number of examples in the prompt (default: the task's own)", least=0)
    ] = None
    limit: Annotated[int | None, Option("number of questions per task, drawn by a hash (default: all)", least=1)] = None
    apply_chat_template: Annotated[bool, Option("prompts in the tokenizer's chat template")] = False
    fewshot_as_multiturn: Annotated[
        bool | None, Option("examples as turns of the chat (default: yes with a chat template)")
    ] = None
    bos: Annotated[BosPolicy, Option("BOS token before each prompt; auto follows the tokenizer")] = "auto"
    mmlu_cloze: Annotated[
        bool,
        Option(
            "also score MMLU by the likelihood of the answer texts (mmlu_continuation): a model can lose the letters "
            "and keep the knowledge"
        ),
    ] = False

    def __post_init__(self) -> None:
        if isinstance(self.names, str):
            object.__setattr__(self, "names", (self.names,))
        check_limits(self, HarnessError)
        if self.include_path is not None:
            object.__setattr__(self, "include_path", os.fspath(self.include_path))
        if self.fewshot_as_multiturn and not self.apply_chat_template:
            raise HarnessError("`fewshot_as_multiturn=True` needs a chat template. Set `apply_chat_template`, too")

    @classmethod
    def of(cls, tasks: Any) -> Any:
        """Return settings of the tasks that a tuple or a list names; others stay as they are, and are checked later."""
        return cls(tuple(tasks)) if isinstance(tasks, tuple | list) else tasks

    def check_folder(self) -> None:
        """Raise HarnessError if ``include_path`` is no folder."""
        if self.include_path is not None and not Path(self.include_path).is_dir():
            raise HarnessError(f"`include_path={self.include_path}` is no folder. Use a folder with task files")

    def check_effect(self, *others: str) -> None:
        """Raise HarnessError if a setting of prompts, or one of ``others``, is given, but no task."""
        for name in ("num_fewshot", "limit", "mmlu_cloze", "apply_chat_template", *others):
            if not self.names and getattr(self, name) != getattr(TaskConfig, name):
                raise HarnessError(f"`{name}` has no effect without `tasks`: add `tasks`, or leave it out")

    @property
    def multiturn(self) -> bool:
        """True if examples are turns of the chat."""
        return self.apply_chat_template if self.fewshot_as_multiturn is None else self.fewshot_as_multiturn


#: Option of every verb that ablates heads.
ReplacementOption = Annotated[
    ReplacementKind,
    Option(
        "output of ablated heads: zero (tests whether they are inactive), mean (their mean on --corpus: constant) "
        "or resample (their output on another text of --corpus: independent of the input)",
        flag="--replace",
    ),
]


@short
@dataclass(frozen=True)
class ReplacementConfig:
    """Replacement of the output of ablated heads.

    Attributes:
        kind: ``zero``; ``mean``, the head's mean output over the tokens of ``texts`` texts; or ``resample``, its
            output at the same position of another text, which ``seed`` chooses for each input.
        corpus: The texts of ``mean`` and ``resample``; None for ``zero``, and where a step names them (`with_corpus`).
        samples: Number of texts of ``resample``, each as long as the longest input; their outputs in all layers stay in
            memory.
    """

    kind: ReplacementOption = "zero"
    corpus: CorpusSpec | None = None
    texts: Count = 64
    samples: Annotated[int, Limits(least=2)] = 8
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_limits(self, InterventionError)
        if self.kind == "zero" and self.corpus is not None:
            raise InterventionError("`corpus` has no effect with `kind=zero`: leave it out, or use mean or resample")
        for name, used_by in (("texts", "mean"), ("samples", "resample"), ("seed", "resample")):
            if self.kind != used_by and getattr(self, name) != getattr(ReplacementConfig, name):
                raise InterventionError(
                    f"`{name}` has no effect with `kind={self.kind}`: leave it out, or use {used_by}"
                )

    def with_corpus(self, corpus: CorpusSpec | None, model: ModelSpec) -> ReplacementConfig:
        """Return the replacement with the texts of a step; the bundled model has its own. Raise InterventionError if it
        has none.
        """
        if self.kind == "zero" or self.corpus is not None:
            return self
        if corpus is None and not model.is_demo:
            raise InterventionError(f"`replace={self.kind}` needs texts: no corpus. Set `corpus`")
        return replace(self, corpus=corpus or CorpusSpec(DEMO_CORPUS))


#: Score of arms where a setting needs one and none is named, and the share of heads that it chooses.
COMMON_SCORE, CHOSEN_SHARE = "output_norm_ln", 0.1
#: How a mask ranks heads: by mean score, or by the share of inputs in which they are inactive.
MaskOrder = Literal["mean", "inactive"]
MaskOrderOption = Annotated[
    MaskOrder,
    Option(
        "order of the masks' heads: by mean score, or by the share of inputs in which they are inactive",
        flag="--mask-order",
    ),
]
#: ``forward``: window masks in the scored pass. ``decode``: keys are evicted after the context.
PlanMode = Literal["forward", "decode"]
PLAN_MODES: tuple[PlanMode, ...] = ("forward", "decode")


@short
@dataclass(frozen=True, kw_only=True)
class ChosenArms:
    """Choice of the arms that are compared with the baseline.

    Attributes:
        criterion: Criterion whose order gives a mask of ``share`` heads, and a rule if ``rule``. None gives neither, or
            becomes `COMMON_SCORE` with ``share``, ``rule`` or ``run_id``.
        plans: Plans of the KV cache or their files, each evaluated in all ``plan_modes``.

    Raises:
        HeadIndexError: One of ``heads`` is no pair of indices.
        InterventionError: A number is out of range, or a setting has no effect on the arms.
        PlanError: A file holds no plan.
        UnknownNameError: The score or a mode is unknown.
    """

    heads: Annotated[
        tuple[tuple[int, int], ...],
        Option("comma-separated heads of a mask (default: none)", metavar="LAYER:HEAD", parse=parse_head, spaces=True),
    ] = ()
    mask: Annotated[
        str | None, Option("name or id of a mask in the store whose heads are ablated (default: none)", metavar="NAME")
    ] = None
    criterion: Annotated[
        str | None,
        Option(
            "score or other criterion that chooses the heads, from a scan, importance, ablate or gates run in the "
            f"store (default: none; {COMMON_SCORE} with --share, --rule or --run)",
            flag="--score",
            kind="criterion",
            names=RANKED_CRITERIA,
        ),
    ] = None
    share: Annotated[
        float | None,
        Option(f"share of heads to ablate, chosen by the score (default: {CHOSEN_SHARE:g})", above=0, below=1),
    ] = None
    mask_order: MaskOrderOption = "mean"
    run_id: Annotated[
        str | None, Option("first characters of the id of that run (default: the newest of this model)", flag="--run")
    ] = None
    rule: Annotated[bool, Option("also evaluate the rule, which ablates per input the heads beyond the quantile")] = (
        False
    )
    plans: Annotated[
        tuple[Any, ...],
        Option(
            "comma-separated files of KV-cache plans, from `headscan plan` (default: none)",
            flag="--plan",
            metavar="FILE",
            spaces=True,
        ),
    ] = ()
    plan_modes: Annotated[
        tuple[PlanMode, ...],
        Option(
            "forward: all tokens see what the plan keeps; decode: keys are evicted after the context; or both, with a "
            "comma",
            flag="--plan-mode",
            metavar="MODE",
            spaces=True,
        ),
    ] = ("forward",)
    models: Annotated[
        tuple[str, ...],
        Option(
            "comma-separated folders or names of models with the same tokenizer, to compare with MODEL; one is loaded "
            "at a time (default: none)",
            metavar="MODEL",
            parse=check_folder,
            spaces=True,
        ),
    ] = ()
    controls: Annotated[
        int,
        Option(
            "number of random controls per mask (as many heads), per rule (heads drawn for each input) and per plan "
            "(as many bytes); at least 19 can show that a choice is better than chance",
            least=0,
        ),
    ] = 0
    replacement: Annotated[ReplacementConfig, Group("texts")] = field(default_factory=ReplacementConfig)

    def __post_init__(self) -> None:
        check_limits(self, InterventionError)
        object.__setattr__(self, "models", tuple(map(os.fspath, self.models)))
        check_pairs(self.heads)
        if objects := [plan for plan in self.plans if not isinstance(plan, str | os.PathLike)]:
            from headscan.plans import check_is_plan

            for plan in objects:
                check_is_plan(plan)
        if not self.plan_modes:
            raise InterventionError("`plan_modes` is empty (limit 1 mode). Set `plan_modes`")
        if self.criterion is None and (self.share is not None or self.rule or self.run_id is not None):
            object.__setattr__(self, "criterion", COMMON_SCORE)
        if self.criterion is not None and self.share is None:
            object.__setattr__(self, "share", CHOSEN_SHARE)
        ablates = bool(self.heads or self.mask or self.criterion)
        if self.replacement.kind != "zero" and not ablates:
            raise InterventionError(
                f"`kind={self.replacement.kind}` needs ablated heads. Set `heads`, `mask` or `criterion`"
            )
        for name, needed, is_used in (
            ("mask_order", "`criterion`", bool(self.criterion)),
            ("plan_modes", "`plans`", bool(self.plans)),
            ("controls", "`heads`, `mask`, `criterion` or `plans`", ablates or bool(self.plans)),
        ):
            if not is_used and getattr(self, name) != getattr(ChosenArms, name):
                raise InterventionError(f"`{name}` has no effect without {needed}: leave it out")
        if self.criterion not in (None, *SCORES) and (self.rule or self.mask_order != "mean"):
            needing = "rule" if self.rule else "mask_order"
            raise InterventionError(
                f"`{needing}` needs a score of each input, which `criterion={self.criterion}` is not. Choose another"
                " `criterion`"
            )

    @cached_property
    def head_plans(self) -> tuple[HeadPlan, ...]:
        """The plans, whose files are read once."""
        from headscan.plans import load_plan

        given: tuple[Any, ...] = self.plans
        return tuple(load_plan(os.fspath(plan)) if isinstance(plan, str | os.PathLike) else plan for plan in given)


#: Words that stand for several scores.
SCORE_SETS = {"all": tuple(SCORES), "none": ()}


@short
@dataclass(frozen=True)
class LossTexts:
    """Texts whose loss is judged next to the tasks."""

    corpus: Annotated[
        CorpusSpec,
        Option(
            "text whose loss is judged, too, which needs fewer passes than accuracy: file, folder, data set on the hub,"
            " or built-in corpus (default: none)",
            flag="--held-out",
            metavar="CORPUS",
            parse=CorpusSpec,
        ),
    ]
    sequences: Annotated[int, Option("number of texts whose loss is measured", least=1)] = 128
    max_tokens: Annotated[
        int | None,
        Option(
            f"longest of these texts in tokens (default: the model's context, at most {LONGEST_TEXT})", least=SHORTEST
        ),
    ] = None

    def longest(self, identity: ModelIdentity) -> int:
        return longest_text(identity, self.max_tokens)

    def __post_init__(self) -> None:
        check_limits(self, InterventionError)


#: One of each kind, the two best-known scores among them.
DEFAULT_CRITERIA = (
    "output_norm_ln",
    "first_token_weight",
    "importance",
    "importance_entropy",
    EFFECT,
    GATE,
    DAMAGE,
    LAYER_DROP,
)


#: Criteria that order the heads of each site on labelled examples, which have no recall prompts.
SITE_CRITERIA = tuple(name for name, declared in CRITERIA.items() if declared.by_value and not declared.on_recall)
DEFAULT_SITE_CRITERIA = tuple(name for name in DEFAULT_CRITERIA if name in SITE_CRITERIA)


#: Criteria that are no scores.
_OTHERS = tuple(name for name in CRITERIA if name not in SCORES)


@short
@dataclass(frozen=True)
class CriteriaComparison:
    """Criteria (names in `CRITERIA`) and the shares of heads that each removes; repeated ones count once. ``criteria``
    None compares `DEFAULT_CRITERIA`, on labelled examples `DEFAULT_SITE_CRITERIA`.
    """

    criteria: Annotated[
        tuple[str, ...] | None,
        Option(
            f"comma-separated criteria, or `all`: the scores, {', '.join(_OTHERS)} (default: "
            f"{','.join(DEFAULT_CRITERIA)}; with --data {','.join(DEFAULT_SITE_CRITERIA)})",
            kind="criterion",
            names=CRITERIA,
            sets={"all": tuple(CRITERIA)},
        ),
    ] = None
    shares: Annotated[
        tuple[float, ...],
        Option("comma-separated shares of heads to remove, of each site with --data", above=0, most=1),
    ] = (0.1, 0.2, 0.3, 0.4, 0.5)
    controls: Annotated[int, Option("number of random controls per share", flag="--controls --seeds", least=0)] = 3
    iterative: Annotated[bool, Option("scores, importances and effects are measured again after each share")] = False

    def __post_init__(self) -> None:
        check_limits(self, InterventionError)
        for name in ("criteria", "shares"):
            if (values := getattr(self, name)) is not None:
                object.__setattr__(self, name, tuple(dict.fromkeys(values)))
        if self.criteria == () or not self.shares:
            raise InterventionError("nothing to compare: 0 criteria or shares (limit 1). Set `criteria` and `shares`")
