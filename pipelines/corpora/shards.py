"""Shards: groups of sequences that are measured, stored and resumed together."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from headscan.pipelines.corpora.corpus_spec import CorpusError
from headscan.pipelines.corpora.sequences import Sequence


@dataclass(frozen=True, eq=False)
class Shard:
    """Consecutive sequences, stored together.

    ``content_hash`` is the SHA-256 in hexadecimal of their lengths and token ids.
    """

    index: int
    sequences: tuple[Sequence, ...]
    content_hash: str


def shards(sequences: Iterable[Sequence], *, shard_size: int) -> Iterator[Shard]:
    """Cut ``sequences`` into shards of ``shard_size`` sequences (the last may have fewer), in order.

    Raises:
        CorpusError: ``shard_size`` is below 1; raised before the first shard.
    """
    if shard_size < 1:
        raise CorpusError(f"shard_size={shard_size} is too small. Give at least 1")
    return _shards(iter(sequences), shard_size)


def _shards(stream: Iterator[Sequence], shard_size: int) -> Iterator[Shard]:
    index = 0
    while group := tuple(islice(stream, shard_size)):
        digest = hashlib.sha256()
        for sequence in group:
            digest.update(len(sequence).to_bytes(8, "little"))
            digest.update(sequence.ids.astype("<i4").tobytes())
        yield Shard(index, group, digest.hexdigest())
        index += 1
