"""Texts that choose heads and repair projections, and others that judge the result."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch

from headscan.engine.prompt_losses import ALL_KEYS, PromptPool, Prompts, recall_prompts, refusal
from headscan.errors import PruningError
from headscan.models.token_batches import pad
from headscan.pruning.calibration import Calibration
from headscan.runs.model_identity import ModelIdentity
from headscan.runs.progress import Progress
from headscan.runs.run_context import ModelContext
from headscan.settings.corpus_settings import SHORTEST
from headscan.settings.saving_settings import PruneTexts, RecallPrompts
from headscan.text_tables import counted, percent
from headscan.texts import CorpusSpec, TokenSequence
from headscan.texts.held_out_text import HeldOutText, chunks
from headscan.texts.recall_tasks import RecallSeries, fixed_by, recall_series
from headscan.texts.sequences import read_spread, spread
from headscan.texts.shared_runs import MOST_SHARED, RUN, shares_with


class CalibrationTexts(NamedTuple):
    """Token ids of texts (B, N), padded on the right, and their lengths (B,), both int64. ``wanted`` is the number of
    texts that the corpus should have given.
    """

    corpus: str
    ids: np.ndarray
    lengths: np.ndarray
    wanted: int = 0

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def content_hash(self) -> str:
        """First 16 hexadecimal digits of a hash of the ids."""
        return hashlib.sha256(self.ids.astype("<i8").tobytes() + self.lengths.tobytes()).hexdigest()[:16]

    def decoded(self, tokenizer: Any) -> list[str]:
        return decoded(tokenizer, (row[:length] for row, length in zip(self.ids, self.lengths, strict=True)))

    def as_calibration(self, batch_tokens: int) -> Calibration:
        return Calibration(torch.from_numpy(self.ids), torch.from_numpy(self.lengths), batch_tokens)


def read_texts(
    config: PruneTexts, identity: ModelIdentity, columns: int, say: Callable[[str], None] = lambda line: None
) -> tuple[CalibrationTexts, HeldOutText]:
    """Return the texts that choose and repair, and those that judge. They share no document, except if the corpus has
    one only, which is split in the middle, and no text that judges has more than 5 % of its runs of 20 words in the
    others. ``columns`` are those of the widest projection that a repair solves, 0 without a repair. ``say`` receives
    the number of texts and documents of each half.
    """
    assert config.corpus is not None
    tokens = config.longest(identity)
    half = config.half(tokens, columns)
    if config.held_out is None:
        # More than needed, because the halves of the documents can differ in texts.
        calibrating, judging = _halves(_read_texts(config.corpus, identity, tokens, 4 * half), config.corpus.name)
    else:
        calibrating = _read_texts(config.corpus, identity, tokens, half)
        judging = _read_texts(config.held_out, identity, tokens, half)
    name = (config.held_out or config.corpus).name
    chosen = spread(calibrating, half)
    # Copies of a text can be in several documents; a short one has no run of words.
    seen = {text.content_hash for text in chosen}
    words = [decoded(identity.tokenizer, [text.ids for text in each]) for each in (judging, chosen)]
    shares = {
        text.index: share
        for text, share in zip(judging, shares_with(*words), strict=True)
        if share <= MOST_SHARED and text.content_hash not in seen
    }
    if not shares:
        raise PruningError(
            f"every held-out text of {name} has more than {percent(MOST_SHARED)} of its runs of {RUN} words in the"
            " calibration texts. Choose another corpus"
        )
    held_out = spread([text for text in judging if text.index in shares], half)
    largest = max(shares[text.index] for text in held_out)
    say(
        f"{_size(chosen)} of {config.corpus.name} choose and repair, {_size(held_out)} of {name} judge, which share at"
        f" most {percent(largest)} of their runs of {RUN} words with these (limit {percent(MOST_SHARED)})"
    )
    ids, lengths = pad([text.ids for text in chosen])
    calibration = CalibrationTexts(config.corpus.name, ids.numpy(), lengths.numpy(), half)
    _check_tokens(calibration, columns)
    return calibration, HeldOutText(name, chunks(identity.tokenizer, held_out))


def decoded(tokenizer: Any, rows: Iterable[np.ndarray]) -> list[str]:
    """Return the texts of rows of token ids."""
    return [str(tokenizer.decode(row.tolist(), skip_special_tokens=True)) for row in rows]


def _size(texts: Sequence[TokenSequence]) -> str:
    documents = len({text.document for text in texts})
    return f"{counted(len(texts), 'text')} from {counted(documents, 'document')}"


class CalibrationPrompts(NamedTuple):
    """Recall prompts of one task that choose and repair."""

    name: str
    series: tuple[RecallSeries, ...]

    def as_calibration(self, batch_tokens: int) -> Calibration:
        """Return the prompts as sequences whose answers count."""
        ids, lengths = pad([each.ids for each in self.series])
        scoring_BN = torch.zeros(ids.shape, dtype=torch.bool)
        for row, each in zip(scoring_BN, self.series, strict=True):
            row[[place - 1 for place in each.answers]] = True
        return Calibration(ids, lengths, batch_tokens, scoring_BN)


def read_recall(
    config: RecallPrompts, model: ModelContext, batch_tokens: int
) -> tuple[tuple[CalibrationPrompts, ...], tuple[Prompts, ...]]:
    """Return the recall prompts that choose and repair, and those that judge, of the tasks that the original can do."""
    if not config.prompts:
        return (), ()
    identity = model.identity
    tokens = min(config.max_tokens, identity.max_tokens or config.max_tokens)
    able = []
    with fixed_by("Set `recall_weight` to 0"):
        found = recall_prompts(identity, tokens, config.prompts // 2, config.seed)
    for prompts in found:
        with Progress(f"{prompts.name} with all heads", len(prompts.requests), "prompt", brief=True) as progress:
            pool = PromptPool(model.pool, batch_tokens, identity.rope_lengths, progress=progress)
            _, greedy = pool.losses(prompts.requests, [ALL_KEYS])
        if (refused := refusal(prompts, greedy)) is None:
            able.append(prompts)
        else:
            model.say(refused)
    series = recall_series(identity.tokenizer, tokens, config.prompts // 2, config.seed)
    return tuple(CalibrationPrompts(each.name, series[each.task]) for each in able), tuple(able)


def _check_tokens(texts: CalibrationTexts, columns: int) -> None:
    """Raise PruningError if the widest repaired projection has more columns than the texts have tokens."""
    if texts.tokens < columns:
        needed = 2 * -(-columns * len(texts.lengths) // texts.tokens)
        is_exhausted = len(texts.lengths) < texts.wanted
        fix = "Choose a larger corpus" if is_exhausted else f"Set `sequences` to {needed} or more"
        raise PruningError(
            f"{texts.tokens} calibration tokens of {texts.corpus} (limit {columns}, the columns of the widest repaired"
            f" projection). {fix}"
        )


def _read_texts(corpus: CorpusSpec, identity: ModelIdentity, tokens: int, count: int) -> list[TokenSequence]:
    return read_spread(corpus, identity.tokenizer, tokens, count, shortest=SHORTEST)


def _halves(texts: Sequence[TokenSequence], corpus: str) -> tuple[list[TokenSequence], list[TokenSequence]]:
    """Split texts by document into halves of about as many texts; if there is one document, in the middle."""
    halves: tuple[list[TokenSequence], list[TokenSequence]] = ([], [])
    documents = [list(of_document) for _, of_document in groupby(texts, key=lambda text: text.document)]
    # A long document leaves the next ones to the other half.
    for document in sorted(documents, key=lambda each: (-len(each), each[0].content_hash)):
        min(halves, key=len).extend(document)
    if halves[1]:
        return halves
    if len(texts) < 2:
        raise PruningError(
            f"{corpus} has {len(texts)} text of {SHORTEST} tokens or more (limit 2, one to repair and one held out)."
            " Choose another corpus, or lower `max_tokens`"
        )
    return list(texts[: len(texts) // 2]), list(texts[len(texts) // 2 :])
