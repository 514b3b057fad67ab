"""Token ids of pieces of text that are put together as tokens.

Text that is tokenised whole may merge where its pieces meet, and then a question's words are other tokens than the
same words in the haystack. Pieces keep theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headscan.pipelines.recall.recall_plan import RecallError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = tuple[int, ...]

#: Among so many keys or values there is enough variety; where fewer are equally short, longer ones are taken.
_ENOUGH = 16


class TextTokens:
    """A tokenizer's ids for pieces of running text, without special tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def words(self, text: str) -> Ids:
        """Ids of words inside a text, with the blank before them."""
        return self._after(".", f" {text}")

    def full_stop(self) -> Ids:
        """Ids of a full stop behind a word."""
        return self._after("a", ".")

    def alike(self, words: Sequence[str], least: int) -> list[Ids]:
        """Ids of those words that are equally many tokens: as few as enough words have.

        Raises:
            RecallError: Fewer than ``least`` words are equally many different tokens.
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
                f"the tokenizer tells {len(found)} of the words {', '.join(words[:3])}, ... apart, and {least} are "
                "needed to hide: leave recall out"
            )
        return found

    def told_apart(self, values: Sequence[Ids]) -> tuple[list[Ids], int]:
        """Return values that begin differently, and the number of tokens in which all of them differ.

        It is the smallest number that leaves enough values: mostly one token, and then one input answers a question
        with all its choices.
        """
        for size in range(1, len(values[0])):
            found = {value[:size]: value for value in reversed(values)}
            if len(found) >= min(_ENOUGH, len(values)):
                return sorted(found.values()), size
        return list(values), len(values[0])

    def _after(self, before: str, text: str) -> Ids:
        """Ids of ``text`` as it is tokenised behind ``before``, or by itself where the two merge."""
        context, whole = self._encode(before), self._encode(before + text)
        return whole[len(context) :] if whole[: len(context)] == context else self._encode(text)

    def _encode(self, text: str) -> Ids:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))
