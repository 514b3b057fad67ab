"""Make all recall questions of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from headscan.pipelines.corpora.corpus_spec import BosPolicy, TokenPlan
from headscan.pipelines.corpora.sequences import special_tokens
from headscan.pipelines.recall.copying import copying_questions
from headscan.pipelines.recall.needle import needle_questions
from headscan.pipelines.recall.question import RecallQuestion
from headscan.pipelines.recall.recall_plan import (
    COPYING,
    NEEDLE,
    RecallError,
    RecallPlan,
    questions_per_length,
    recall_lengths,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def recall_questions(
    tokenizer: PreTrainedTokenizerBase, plan: RecallPlan, max_tokens: int | None, *, bos: str
) -> list[RecallQuestion]:
    """Return the questions, by length and then by task.

    The first questions of a length do not depend on other lengths.

    In every request the model reads exactly the length in the task's name.

    Args:
        max_tokens: Positions of the model; None means no limit.
        bos: ``auto`` (as the tokenizer does), ``always`` or ``never``.

    Raises:
        RecallError: A length is too long for the model or too short for the questions, or the tokenizer cannot write
            them.
        CorpusError: ``bos`` is unknown, or the tokenizer puts special tokens inside a text.
    """
    beginning = _beginning(tokenizer, bos)
    lengths = recall_lengths(plan, max_tokens)
    count = questions_per_length(plan, len(lengths))
    return [
        question
        for length in lengths
        for kind, make in ((NEEDLE, needle_questions), (COPYING, copying_questions))
        for question in make(tokenizer, beginning, length, count[kind], plan.seed)
    ]


def _beginning(tokenizer: PreTrainedTokenizerBase, bos: str) -> tuple[int, ...]:
    """Return the tokens before a question, as in a benchmark."""
    if bos != "always":
        return special_tokens(tokenizer, TokenPlan(2, bos=cast(BosPolicy, bos))).prefix
    for first in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if first is not None:
            return (int(first),)
    raise RecallError("bos=always: the tokenizer has neither BOS nor EOS. Use bos=auto or bos=never")
