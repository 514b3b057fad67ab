"""Lengths of texts that fit into a model's context."""

from __future__ import annotations

from headscan.errors import SequenceError
from headscan.pipelines.runs.identity import ModelIdentity

#: Longest text by default, in tokens.
_LONGEST = 2048


def longest_text(identity: ModelIdentity, max_tokens: int | None) -> int:
    """Return the length of the longest text, in tokens.

    Args:
        max_tokens: Limit of the user; None uses the model's context, at most 2,048 tokens.

    Raises:
        SequenceError: The limit exceeds the model's context.
    """
    limit = identity.max_tokens
    if max_tokens is None:
        return min(limit or _LONGEST, _LONGEST)
    if limit is not None and max_tokens > limit:
        raise SequenceError(f"max_tokens={max_tokens} (limit {limit} positions of {identity.name}). Lower `max_tokens`")
    return max_tokens
