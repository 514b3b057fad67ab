"""The questions of an evaluation, the same for every arm."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import pyarrow as pa

from headscan.pipelines.corpora import CorpusError
from headscan.pipelines.evaluate.answer_tables import ANSWERS
from headscan.pipelines.evaluate.harness import HeadscanLM
from headscan.pipelines.evaluate.tasks import TaskConfig, TaskResults, Tasks
from headscan.pipelines.recall import RecallError, RecallPlan, RecallQuestion, grade, recall_questions
from headscan.pipelines.runs.identity import ModelIdentity
from headscan.pipelines.scoring.token_requests import GenerationRequest, Likelihood, Request, request_hash


class Questions:
    """Requests, built once, and the grading of an arm's answers.

    Args:
        tasks: Benchmark tasks.
        recall: Recall questions; None omits them.
        identity: The model and its tokenizer.

    Attributes:
        requests: Every request by its hash.

    Raises:
        HarnessError, RecallError: A task cannot be loaded or does not fit the model, or recall does not fit it.
    """

    def __init__(self, tasks: TaskConfig, recall: RecallPlan | None, identity: ModelIdentity) -> None:
        self._tasks = Tasks(tasks)
        self._lm = HeadscanLM(identity, bos=tasks.bos)
        self._tasks.collect(self._lm)
        self._recall: list[RecallQuestion] = []
        self._notes: list[str] = []
        if recall is not None:
            try:
                self._recall = recall_questions(identity.tokenizer, recall, identity.max_tokens, bos=tasks.bos)
            except (
                RecallError,
                CorpusError,
            ) as problem:  # the context or the tokenizer does not fit
                if recall.lengths is not None:
                    raise
                self._notes.append(f"recall questions are omitted: {problem}")
        self._of_recall = {request_hash(request): request for question in self._recall for request in question.requests}
        self.requests: dict[str, Request | GenerationRequest] = {**self._lm.requests, **self._of_recall}

    def fingerprint(self) -> dict[str, str]:
        """Return hashes of everything that determines the answers and their grades."""
        requests = hashlib.sha256("".join(self.requests).encode()).hexdigest()
        recall = hashlib.sha256(repr([(q.task, q.question, q.answer) for q in self._recall]).encode()).hexdigest()
        return {"tasks": self._tasks.fingerprint(), "requests": requests, "recall": recall}

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
    def benchmark_size(self) -> int:
        """Number of benchmark questions with right answers, without recall."""
        return self._tasks.questions

    def prompts(self) -> list[tuple[int, ...]]:
        """Return the distinct inputs of the benchmark, in task order."""
        return list(dict.fromkeys(map(_input, self._lm.requests.values())))

    def zeroed_share(self, shares: Mapping[str, float]) -> float:
        """Return the mean ablated share of the benchmark's requests, 0 to 1."""
        return sum(shares[found] for found in self._lm.requests) / len(self._lm.requests)

    def grade(self, answers: Mapping[str, Likelihood | str]) -> TaskResults:
        """Grade one arm's answers, given by request hash.

        Rows of the benchmark come before those of recall.
        """
        graded = self._tasks.results(self._lm, answers)
        recalled = [
            grade(question, [_likelihood(answers[request_hash(request)]) for request in question.requests])
            for question in self._recall
        ]
        rows = pa.Table.from_pylist(recalled, schema=ANSWERS)
        return TaskResults(pa.concat_tables([graded.answers, rows]), graded.results)


def _input(request: Request | GenerationRequest) -> tuple[int, ...]:
    """Return the input of a request.

    The last token of a continuation is predicted, not read.
    """
    return request.ids[:-1] if isinstance(request, Request) else request.ids


def _likelihood(answer: Likelihood | str) -> Likelihood:
    assert isinstance(answer, Likelihood)
    return answer
