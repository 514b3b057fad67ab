"""Hours and memory of jobs before anything is loaded, for `headscan place`.

Times are multiples of a plain forward pass over as many tokens, as in a study's plan of its hours (`PassCosts`). A job
has its defaults, but for the length and the number of its texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Literal, get_args

from headscan.catalog import RECALL_FAMILIES
from headscan.errors import HeadscanError
from headscan.model_spec import ModelSpec
from headscan.settings.corpus_settings import LONGEST_TEXT, CorpusSpec
from headscan.settings.evaluation_settings import IN_ALL, RecallQuestions
from headscan.settings.saving_settings import PRUNE_TOKENS, PruneTexts, RecallPrompts
from headscan.steps.plan import PLAN_TOKENS, Plan
from headscan.steps.prune.prune_step import Prune
from headscan.store.verdict_limits import QUESTIONS_PER_TEXT
from headscan.study.study_step import LONGEST_STUDY_TEXT, Study
from headscan.text_tables import counted

if TYPE_CHECKING:
    from headscan.sizing.forward_flops import ForwardFlops
    from headscan.study.study_time import PassCosts

#: The jobs: those that read as many tokens as a corpus has, and those with texts of their own number.
ReadingJob = Literal["scan", "evaluate", "importance"]
Job = Literal[ReadingJob, "plan", "prune", "study"]
READING_JOBS = get_args(ReadingJob)
#: Jobs with backward passes, and jobs that run one replica in one process.
BACKWARD_JOBS, SINGLE_JOBS = ("importance", "plan", "prune", "study"), ("prune", "study")
#: Longest texts of a job by default, in tokens; the model's context if that is shorter.
DEFAULT_TOKENS = {"plan": PLAN_TOKENS, "prune": PRUNE_TOKENS, "study": LONGEST_STUDY_TEXT}
#: Operations per second in forward passes of an 8B shape in bfloat16, by GPU: measured (docs/performance.md).
GPU_FLOPS = {"H200": 5.1e14}
#: Tokens of a question that asks which of four passages continues a text.
_QUESTION_TOKENS = 260
#: Needles and copies that the whole model is assumed to get right, in percent.
_RECALLED = 90.0


class JobError(HeadscanError):
    """A job that cannot be sized with these settings."""


def default_tokens(job: Job) -> int:
    return DEFAULT_TOKENS.get(job, LONGEST_TEXT)


@dataclass(frozen=True)
class JobModel:
    """What the costs of jobs depend on.

    Attributes:
        layers, kv_heads: Layers, and the KV heads of all of them.
        context: Number of positions; None without a limit.
        head_columns, mlp_columns: Columns of the widest output projection of an attention and of an MLP.
        hidden: Width of a hidden state.
        itemsize: Bytes of a weight.
        forward: Operations of a forward pass.
    """

    layers: int
    kv_heads: int
    context: int | None
    head_columns: int
    mlp_columns: int
    hidden: int
    itemsize: int
    forward: ForwardFlops

    def pass_flops(self, job: Job, tokens: int) -> float:
        """Return the operations of a token in a plain pass over sequences of so many tokens."""
        return self.forward.per_token(tokens, logits=job != "scan")

    def kept_bytes(self, job: Job) -> int:
        """Return the most bytes that a job keeps next to the model: the graph of all blocks for an importance; for the
        removal of heads, second moments and repaired weights in float32, the repaired weights in the model's dtype, and
        the sums of the widest repair in float32 and float64.
        """
        from headscan.gradients.head_importance import GRAPH_BYTES

        if job == "importance":
            return GRAPH_BYTES
        if job not in SINGLE_JOBS:
            return 0
        head, mlp, hidden = self.head_columns, self.mlp_columns, self.hidden
        moments = 4 * self.layers * (head**2 + hidden**2)
        repaired = (4 + self.itemsize) * self.layers * hidden * (head + mlp)
        return moments + repaired + (4 + 2 * 8) * max(head, mlp) ** 2


def job_steps(
    job: Job,
    model: JobModel,
    tokens: int,
    *,
    corpus_tokens: int | None = None,
    sequences: int | None = None,
    hours: float | None = None,
    speed: float | None = None,
    staged: bool = False,
) -> tuple[str, dict[str, float]]:
    """Return what a job reads, in words, and its steps, each with the tokens that a plain forward pass reads in as much
    time.

    Args:
        tokens: Length of the texts.
        corpus_tokens: Tokens of the corpus of a `ReadingJob`.
        sequences: Number of texts of a plan or a pruning; None takes that of the verb.
        hours, speed: Time limit of a study, and tokens per second of a plain pass, from which it decides what it does.
        staged: The model runs range by range of its layers, without backward passes.
    """
    from headscan.study.study_time import PassCosts

    passes = PassCosts()
    if job in READING_JOBS:
        if corpus_tokens is None:
            raise JobError(f"`job={job}` reads a corpus: no number of tokens. Give `tokens`")
        cost = {"scan": passes.scan, "evaluate": 1.0, "importance": passes.importance}[job]
        return f"{corpus_tokens:,} tokens in texts of {tokens:,}", {job: cost * corpus_tokens}
    if job == "plan":
        return _plan_steps(model, tokens, sequences or Plan.sequences, passes, staged=staged)
    if job == "prune":
        return _prune_steps(model, tokens, sequences, passes)
    assert speed is not None
    return _study_steps(model, tokens, hours or Study.hours, speed)


def _plan_steps(
    model: JobModel, tokens: int, sequences: int, passes: PassCosts, *, staged: bool
) -> tuple[str, dict[str, float]]:
    from headscan.plans.window_search import search_passes

    # One half ranks the heads, the other is held out.
    half = (sequences + len(RECALL_FAMILIES) * Plan.recall_prompts) / 2 * tokens
    first, further = search_passes(model.kv_heads)
    damage = {"one KV head at a time": (1 + model.kv_heads) * half} if staged else {"damage": passes.derivatives * half}
    amount = f"{sequences} texts and {Plan.recall_prompts} prompts of each recall task, of {tokens:,} tokens"
    return amount, {
        **damage,
        "search": first * half,
        "search, two more rounds if it finds better plans": further * half,
        "held-out loss": 2 * half,
    }


def _prune_steps(
    model: JobModel, tokens: int, sequences: int | None, passes: PassCosts
) -> tuple[str, dict[str, float]]:
    half = PruneTexts(sequences=sequences).half(tokens, max(model.head_columns, model.mlp_columns))
    texts = half * tokens
    recall = RecallPrompts()
    length = min(recall.max_tokens, model.context or recall.max_tokens)
    prompts = len(RECALL_FAMILIES) * recall.prompts // 2 * length
    # The pruned model, random controls, and one without whole layers.
    built = 2 + Prune.controls
    lengths = RecallQuestions().lengths_within(model.context)
    questions = len(RECALL_FAMILIES) * IN_ALL / QUESTIONS_PER_TEXT * sum(lengths) / len(lengths)
    return f"{2 * half} texts of {tokens:,} tokens, one share, method damage", {
        "choice by damage": passes.damage * texts,
        f"repair of {counted(built, 'model')}": passes.repair * built * 2 * (texts + prompts),
        "held-out losses": 2 * (texts + prompts),
        f"recall questions, {1 + built} models": (1 + built) * questions,
    }


def _enough_recall(comparisons: int) -> int:
    """Return the recall questions of each task that are enough for a model that recalls `_RECALLED` percent."""
    from headscan.verdicts.scope_verdicts import recall_needed

    return max(recall_needed(family, _RECALLED, comparisons) for family in RECALL_FAMILIES)


def _study_steps(model: JobModel, tokens: int, hours: float, speed: float) -> tuple[str, dict[str, float]]:
    from headscan.study.study_time import QuestionCosts, decided, enough_for, study_seconds

    config = Study(ModelSpec("model"), CorpusSpec("texts"), max_tokens=tokens, hours=hours)
    kinds, enough = config.kind_count, enough_for(config, by_probability=True)
    costs = QuestionCosts(
        tokens=_QUESTION_TOKENS,
        recall_tokens=len(RECALL_FAMILIES) * tokens / QUESTIONS_PER_TEXT,
        by_probability=True,
        enough=enough,
        available=enough[1],
        enough_recall=(_enough_recall(kinds), _enough_recall(2 * kinds)),
        recalls="",
        repair_texts=ceil(1.25 * max(model.head_columns, model.mlp_columns) / tokens),
    )
    config = decided(config, speed, costs, lambda line: None)
    amount = (
        f"{config.sequences} texts of {tokens:,} tokens measure, {config.judged_texts} judge; {config.questions:,} "
        f"questions and {config.recall_questions} of each recall task (limit {hours:g} h)"
    )
    return amount, study_seconds(config, costs, speed=1.0)
