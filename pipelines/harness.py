"""The lm-eval adapter: a model class that lm-eval drives, answered by a pool of replicas with heads silenced."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from lm_eval.api.model import TemplateLM

from cluster.pool import Pool
from headscan.errors import HeadscanError
from headscan.interventions import HeadMask, HeadRule
from pipelines.identity import ModelIdentity
from pipelines.likelihood import LikelihoodItem, Request, score_requests
from pipelines.progress import Progress

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

#: Items a replica gets in one evaluation: enough for the last ones to end together.
_ITEMS_PER_REPLICA = 8


class HarnessError(HeadscanError):
    """A task that cannot be evaluated."""


class HeadscanLM(TemplateLM):
    """Answers lm-eval's log-likelihood requests for one arm.

    Attributes:
        truncated: Prompts that were longer than the context and lost their beginning, as in lm-eval.
        zeroed_share: Mean share of heads silenced over all requests.
    """

    def __init__(
        self,
        pool: Pool,
        identity: ModelIdentity,
        silenced: HeadMask | HeadRule | None,
        *,
        batch_tokens: int,
        bos: str = "auto",
        title: str = "evaluate",
    ) -> None:
        super().__init__()
        self.tokenizer: Any = identity.tokenizer
        self._pool, self._identity, self._silenced = pool, identity, silenced
        self._batch_tokens, self._bos, self._title = batch_tokens, bos, title
        self.max_length = identity.max_tokens or 4096
        self.truncated = 0
        self._answered = 0
        self._zeroed = 0.0

    @property
    def zeroed_share(self) -> float:
        return self._zeroed / max(1, self._answered)

    @property
    def eot_token_id(self) -> int:
        if self.tokenizer.eos_token_id is None:
            raise HarnessError(f"the tokenizer of {self._identity.name} has neither BOS nor EOS to begin a prompt with")
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return int(bos) if bos is not None else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        return self._identity.name.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if not self.tokenizer.chat_template:
            raise HarnessError(
                f"the tokenizer of {self._identity.name} has no chat template: leave --apply-chat-template out"
            )
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        bos = self.tokenizer.bos_token
        if add_special_tokens is None:
            # A chat template may have written BOS already.
            add_special_tokens = self._bos != "never" and not (bos and string.startswith(bos))
            if add_special_tokens and self._bos == "always":
                ids = self.tokenizer.encode(string, add_special_tokens=False, verbose=False)
                return [self.prefix_token_id, *ids]
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens, verbose=False))

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        # Tokenising takes a moment, and its bar would stand beside ours.
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        prepared = [self._prepare(context, continuation) for _, context, continuation in requests]
        # Requests of similar length go to one replica: little padding, and the same batches in every arm.
        order = sorted(range(len(prepared)), key=lambda i: (-len(prepared[i].ids), i))
        size = max(1, -(-len(order) // (_ITEMS_PER_REPLICA * self._pool.replicas)))
        chunks = [order[start : start + size] for start in range(0, len(order), size)]
        items = (
            LikelihoodItem(i, tuple(prepared[row] for row in chunk), self._silenced, self._batch_tokens)
            for i, chunk in enumerate(chunks)
        )
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(prepared)
        with Progress(self._title, len(prepared), "requests") as progress:
            for finished in self._pool.map(score_requests, items):
                rows = chunks[finished.item.index]
                for row, answer in zip(rows, finished.value.answers, strict=True):
                    answers[row] = (answer.log_likelihood, answer.greedy_tokens == prepared[row].scored)
                self._zeroed += finished.value.zeroed_share * len(rows)
                self._answered += len(rows)
                progress.update(len(rows))
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        raise HarnessError(
            f"task {requests[0].task_name} reports perplexity, by which arms are not compared: choose tasks with right "
            "and wrong answers, such as multiple choice"
        )

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        raise HarnessError(
            f"task {requests[0].task_name} generates text, which is not evaluated yet: choose tasks that compare "
            "log-likelihoods, such as multiple choice"
        )

    def _prepare(self, context: list[int], continuation: list[int]) -> Request:
        if not continuation or len(continuation) > self.max_length:
            raise HarnessError(
                f"a continuation of {len(continuation)} tokens cannot be scored: 1 to {self.max_length} fit the context"
            )
        # lm-eval moves a context's trailing blanks to the continuation, which may leave nothing to condition on.
        ids = (context or [self.prefix_token_id]) + continuation
        # One token more than the context holds, for the last one is only predicted.
        self.truncated += len(ids) > self.max_length + 1
        return Request(tuple(ids[-(self.max_length + 1) :]), len(continuation))


@contextmanager
def quiet_harness() -> Iterator[None]:
    """Keep lm-eval's and datasets' notes and bars out of the user's terminal; their errors still come through."""
    import datasets
    import lm_eval.api.task

    loggers = [logging.getLogger(name) for name in ("lm_eval", "lm-eval", "datasets")]
    levels = [logger.level for logger in loggers]
    bars = datasets.utils.logging.is_progress_bar_enabled()
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        datasets.utils.logging.disable_progress_bar()
        # Its bar of requests that are being built cannot be turned off by an option.
        with patch.object(lm_eval.api.task, "tqdm", lambda items, **_: items):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if bars:
            datasets.utils.logging.enable_progress_bar()
