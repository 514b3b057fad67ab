"""Token ids of pieces of text that are concatenated as tokens.

If text is tokenised as a whole, pieces may merge where they meet, so a question's words would have other tokens than
the same words in the haystack. Pieces that are tokenised separately keep their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headscan.pipelines.recall.recall_plan import RecallError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = tuple[int, ...]

#: Number of keys or values with enough variety; if fewer have the same short length, longer ones are used.
_ENOUGH = 16


class TextTokens:
    """A tokenizer's ids for pieces of running text, without special tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def words(self, text: str) -> Ids:
        """Return ids of words inside a text, with the space before them."""
        return self._after(".", f" {text}")

    def full_stop(self) -> Ids:
        """Return ids of a full stop after a word."""
        return self._after("a", ".")

    def of_one_length(self, words: Sequence[str], least: int) -> list[Ids]:
        """Return ids of words with equal numbers of tokens.

        It is the smallest number that enough words have.

        Raises:
            RecallError: Fewer than ``least`` different words have the same number of tokens.
        """
        by_size: dict[int, set[Ids]] = {}
        for word in words:
            ids = self.words(word)
            if self._tokenizer.unk_token_id not in ids:
                by_size.setdefault(len(ids), set()).add(ids)
        enough = [size for size, found in by_size.items() if len(found) >= _ENOUGH]
        size = min(enough) if enough else max(by_size, key=lambda size: len(by_size[size]), default=0)
        found = sorted(by_size.get(size, ()))
        if len(found) < least:
            raise RecallError(
                f"words with different tokens among {', '.join(words[:3])}, ...: {len(found)} (at least {least}). "
                "Disable recall"
            )
        return found

    def distinguished(self, values: Sequence[Ids]) -> tuple[list[Ids], int]:
        """Return values that begin differently, and the distinguishing token count.

        All of them differ in that many first tokens.

        It is the smallest number that leaves enough values. It is mostly one token; then one input covers all choices
        of a question.
        """
        for size in range(1, len(values[0])):
            found = {value[:size]: value for value in reversed(values)}
            if len(found) >= min(_ENOUGH, len(values)):
                return sorted(found.values()), size
        return list(values), len(values[0])

    def _after(self, before: str, text: str) -> Ids:
        """Return ids of ``text`` after ``before``.

        If the two merge, they are those of ``text`` alone.
        """
        context, whole = self._encode(before), self._encode(before + text)
        return whole[len(context) :] if whole[: len(context)] == context else self._encode(text)

    def _encode(self, text: str) -> Ids:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))
