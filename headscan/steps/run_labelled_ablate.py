"""Arms of ablated heads at the sites of a model answer labelled examples, into the store.

Arms ablate single heads, all but one of a layer, or any set. The same command again resumes.

Shapes: B examples, C classes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from headscan.ablation.masks import SiteMask
from headscan.cluster.pool import refuse_staged
from headscan.engine.answer import AnsweringSettings
from headscan.engine.answering import RequestChunk
from headscan.engine.arms import BASELINE, Arm
from headscan.errors import InterventionError
from headscan.grid import HeadGrid
from headscan.runs.model_identity import ModelIdentity, fingerprint
from headscan.runs.progress import at_work
from headscan.runs.run_context import Run
from headscan.settings.corpus_settings import ExamplesSpec
from headscan.steps.ablate import Ablate
from headscan.steps.run_ablate import AblateResult, ablated_sets
from headscan.steps.run_evaluation import ArmRun
from headscan.store.records import ArmKind, RunRecord
from headscan.store.tables import ACCURACY, BLEU, LOSS
from headscan.texts.labelled_texts import Answers, ExampleRequest, LabelledText, LabelledTexts, read_labelled
from headscan.texts.tasks import ANSWERS, RESULTS, TaskResults
from headscan.texts.token_requests import LogLikelihood
from headscan.verdicts.head_effects import bleu, record_effects


def site_arm(name: str, mask: SiteMask, settings: Mapping[str, object]) -> Arm:
    """Return an arm that ablates heads of several sites; ``settings`` are further JSON data that identify it."""
    sites = {site: [list(head) for head in heads] for site, heads in mask.sites}
    return Arm(name, ArmKind.MASK, mask, details=(*settings.items(), ("sites", sites)))


def single_arms(grid: HeadGrid, mode: str) -> list[Arm]:
    """Return an arm for each head of every site, see `ablated_sets`."""
    return [
        site_arm(f"{kind} {place}", SiteMask({kind: heads}), settings)
        for kind in grid.kinds
        for place, heads, settings in ablated_sets(grid.at(kind), mode)
    ]


#: Metrics by kind of targets; the first is the default.
METRICS = {Answers.CLASS: (ACCURACY, LOSS), Answers.TEXT: (BLEU, LOSS, ACCURACY)}


#: Examples of one chunk.
_CHUNK_EXAMPLES = 512
#: Generated tokens beyond twice the longest target.
_SPARE_TOKENS = 8


def metric_of(asked: str | None, texts: LabelledTexts) -> str:
    """Return the metric of examples: the one that is asked, or the default of their targets."""
    known = METRICS[texts.answers]
    if asked is not None and asked not in known:
        raise InterventionError(
            f"metric {asked!r} of {texts.answers.value} targets (limit {', '.join(known)}). Choose another"
        )
    return known[0] if asked is None else asked


@dataclass
class LabelledQuestions:
    """The examples ``judging`` as questions of an evaluation; the JSON data ``settings`` are a part of its identity."""

    data: ExamplesSpec
    metric: str
    texts: LabelledTexts
    judging: Sequence[LabelledText]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._hashes = [fingerprint({"example": (text.index, *text.tokens)}) for text in self.judging]

    def record(self, run: Run) -> RunRecord:
        settings = {
            "metric": self.metric,
            "answers": self.texts.answers.value,
            "examples": len(self.judging),
            "batch_tokens": run.batch_tokens,
            "replace": "zero",
            **self.settings,
        }
        data_hash = self.texts.fingerprint()
        model = {"model": run.identity.fingerprint(), "dtype": run.model.dtype}
        return run.record(
            "ablate",
            fingerprint({**model, "examples_hash": data_hash, **settings}),
            config={"data": asdict(self.data), "dtype": run.model.dtype, **settings},
            bos_policy=None,
            corpus=self.data.name,
            corpus_hash=data_hash,
        )

    def chunks(self, identity: ModelIdentity) -> list[RequestChunk]:
        most = 2 * max(len(text.target_ids) for text in self.judging) + _SPARE_TOKENS
        if (limit := identity.max_tokens) is not None:
            most = min(most, limit - 1)
        answers, scored, classes = self.texts.answers, self.metric == LOSS, self.texts.classes
        requests = [ExampleRequest(text, answers, scored, classes, most) for text in self.judging]
        cuts = [slice(start, start + _CHUNK_EXAMPLES) for start in range(0, len(requests), _CHUNK_EXAMPLES)]
        return [RequestChunk(index, tuple(self._hashes[cut]), tuple(requests[cut])) for index, cut in enumerate(cuts)]

    def grade(self, responses: Mapping[str, LogLikelihood | str]) -> TaskResults:
        given = [responses[each] for each in self._hashes]
        numbers = self._numbers(given)
        graded = self.metric == ACCURACY
        rows = [
            {
                "task": self.data.name,
                "question": text.index,
                "doc_hash": text.document,
                "target": text.target,
                "response": answer if isinstance(answer, str) else None,
                "correct": own[0] if graded else None,
                "recall": False,
                "metrics": json.dumps({} if graded else {self.metric: own}),
            }
            for text, answer, own in zip(self.judging, given, numbers, strict=True)
        ]
        result = {
            "task": self.data.name,
            "is_group": False,
            "metric": self.metric,
            "filter": "none",
            "value": _level(self.metric, np.array(numbers, dtype=float)),
            "questions": len(rows),
        }
        return TaskResults(pa.Table.from_pylist(rows, schema=ANSWERS), pa.Table.from_pylist([result], schema=RESULTS))

    def _numbers(self, answers: Sequence[Any]) -> list[list[float]]:
        """Return the numbers of each answer: 1 or 0 for accuracy, log-likelihood and tokens for a loss, or the counts
        of a sentence for BLEU.
        """
        pairs = list(zip(answers, self.judging, strict=True))
        if self.metric == ACCURACY:
            return [[float(answer == text.target)] for answer, text in pairs]
        if self.metric == LOSS:
            return [[answer.log_likelihood, len(text.target_ids)] for answer, text in pairs]
        from sacrebleu.metrics.bleu import BLEU as SentenceBleu

        scorer: Any = SentenceBleu(effective_order=True)  # avoids a warning about single sentences
        scores = [scorer.sentence_score(answer, [text.target]) for answer, text in pairs]
        return [[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in scores]

    def ablated_share(self, shares: Mapping[str, float]) -> float:
        return shares[self._hashes[0]]  # masks are the same for every example


def _level(metric: str, numbers: np.ndarray) -> float:
    """Return the metric of examples from their numbers (examples, ...)."""
    if metric == ACCURACY:
        return float(numbers.mean())
    total = numbers.sum(0)
    return float(bleu(total)) if metric == BLEU else float(-total[0] / total[1])


def answer_labelled(questions: LabelledQuestions, run: Run, run_id: str, arms: Sequence[Arm]) -> None:
    """Answer the examples with every arm of a run that has begun, and finish the run."""
    refuse_staged(run.pool, "an answer to a labelled example")
    arm_run = ArmRun(run, run_id, arms, judges_arms=False)
    if unfinished := arm_run.begin():
        settings = AnsweringSettings(run.batch_tokens, share_prefixes=False, bundle_size=1)
        arm_run.answer(run, unfinished, questions, questions.chunks(run.identity), settings)
    arm_run.finish()


def run_labelled_ablate(config: Ablate, run: Run) -> AblateResult:
    """Measure the effect of every head of every site, record the table in the store, and return it."""
    assert config.data is not None
    texts = read_labelled(config.data, run.model, run.identity, config.max_tokens)
    questions = LabelledQuestions(config.data, metric_of(config.metric, texts), texts, texts.texts)
    arms = [BASELINE, *(arm for mode in config.modes for arm in single_arms(run.facts.grid, mode))]
    run.say(f"{len(arms)} arms: the baseline and {len(arms) - 1} sets of heads, on {len(texts.texts)} examples")
    with run.in_progress(questions.record(run), arms=[arm.name for arm in arms]) as state:
        answer_labelled(questions, run, state.run_id, arms)
    with at_work("effects and their intervals"):
        return AblateResult(state.run_id, tuple(record_effects(run.store, state.run_id)))
