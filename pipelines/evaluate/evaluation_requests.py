"""The questions of an evaluation, the same for every arm."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import pyarrow as pa

from headscan.pipelines.corpora import CorpusError
from headscan.pipelines.evaluate.harness import HeadscanLM
from headscan.pipelines.evaluate.held_out_text import HeldOutText
from headscan.pipelines.evaluate.tasks import ANSWERS, TaskResults, Tasks
from headscan.pipelines.recall import RecallError, RecallPlan, RecallQuestion, grade, recall_questions
from headscan.pipelines.runs.run_records import ModelIdentity
from headscan.pipelines.scoring.token_requests import GenerationRequest, Likelihood, Request, request_hash
from headscan.pipelines.settings.evaluation_settings import HarnessError, TaskConfig


class Questions:
    """Requests, built once, and the grading of an arm's answers.

    Args:
        tasks: Benchmark tasks.
        recall: Recall questions; None omits them.
        identity: The model and its tokenizer.
        text: Ordinary text; None omits it.
        recall_only: Recall questions alone are enough.

    Attributes:
        requests: Every request by its hash.
    """

    def __init__(
        self,
        tasks: TaskConfig,
        recall: RecallPlan | None,
        identity: ModelIdentity,
        text: HeldOutText | None = None,
        *,
        recall_only: bool = False,
    ) -> None:
        if not tasks.names and text is None and not recall_only:
            raise HarnessError("no tasks. Name at least one in `tasks`")
        self._tasks = Tasks(tasks)
        self._lm = HeadscanLM(identity, bos=tasks.bos)
        self._tasks.collect(self._lm)
        self._identity = identity
        self._bos = tasks.bos
        self._text = text
        self.ask_recall(recall)

    def ask_recall(self, recall: RecallPlan | None) -> None:
        """Make recall questions, in place of earlier ones; None makes none."""
        self._recall: list[RecallQuestion] = []
        self._notes: list[str] = []
        identity = self._identity
        if recall is not None:
            try:
                self._recall = recall_questions(identity.tokenizer, recall, identity.max_tokens, bos=self._bos)
            except (
                RecallError,
                CorpusError,
            ) as problem:  # the context or the tokenizer does not fit
                if recall.lengths is not None:
                    raise
                self._notes.append(f"recall questions are omitted: {problem}")
        of_recall = {request_hash(request): request for question in self._recall for request in question.requests}
        self.requests: dict[str, Request | GenerationRequest] = {**self._lm.requests, **of_recall}
        if self._text is not None:
            self.requests |= self._text.requests

    def fingerprint(self) -> dict[str, str]:
        """Return hashes of everything that determines the answers and their grades."""
        requests = hashlib.sha256("".join(self.requests).encode()).hexdigest()
        recall = hashlib.sha256(repr([(q.task, q.question, q.answer) for q in self._recall]).encode()).hexdigest()
        text = {} if self._text is None else {"text": self._text.fingerprint()}
        return {"tasks": self._tasks.fingerprint(), "requests": requests, "recall": recall} | text

    @property
    def groups(self) -> dict[str, list[str]]:
        """The requested groups of tasks, and the names of their tasks."""
        return self._tasks.groups

    @property
    def notes(self) -> list[str]:
        """Warnings about the questions."""
        # The choices of a question are often one input.
        cut = len({_input(self.requests[found]) for found in self._lm.truncated})
        notes = self._tasks.notes + self._notes
        return notes + ([f"{cut} prompts are longer than the context; their beginning is cut off"] if cut else [])

    @property
    def longest_input(self) -> int:
        """Tokens of the longest input."""
        return max(len(_input(request)) for request in self.requests.values())

    @property
    def benchmark_size(self) -> int:
        """Number of benchmark questions with right answers, without recall."""
        return self._tasks.questions

    def prompts(self) -> list[tuple[int, ...]]:
        """Return the distinct inputs of the benchmark, in task order."""
        return list(dict.fromkeys(map(_input, self._lm.requests.values())))

    def zeroed_share(self, shares: Mapping[str, float]) -> float:
        """Return the mean ablated share of the benchmark's requests, 0 to 1. Without a benchmark it is that of all
        requests.
        """
        counted = self._lm.requests or self.requests
        return sum(shares[found] for found in counted) / len(counted)

    def grade(self, answers: Mapping[str, Likelihood | str]) -> TaskResults:
        """Grade one arm's answers, given by request hash. Rows of the benchmark come before those of recall and of
        text.
        """
        graded = self._tasks.results(self._lm, answers)
        recalled = [
            grade(question, [_likelihood(answers[request_hash(request)]) for request in question.requests])
            for question in self._recall
        ]
        read = [] if self._text is None else self._text.answers(answers)
        rows = pa.Table.from_pylist([*recalled, *read], schema=ANSWERS)
        results = [] if self._text is None else self._text.results(answers)
        measured = pa.Table.from_pylist(results, schema=graded.results.schema)
        return TaskResults(pa.concat_tables([graded.answers, rows]), pa.concat_tables([graded.results, measured]))


def _input(request: Request | GenerationRequest) -> tuple[int, ...]:
    """Return the input of a request. The last token of a continuation is predicted, not read."""
    return request.ids[:-1] if isinstance(request, Request) else request.ids


def _likelihood(answer: Likelihood | str) -> Likelihood:
    assert isinstance(answer, Likelihood)
    return answer
