"""Progress within a shard: every sequence counts once, with the results of the plain task."""

from __future__ import annotations

import pytest
import torch

from headscan.catalog import MassWidths
from headscan.loading import load_spec
from headscan.models.loaded_model import LoadedModel
from headscan.runs.model_identity import identify
from headscan.steps.run_scan import MeasureShard
from headscan.texts import CorpusReport, CorpusSpec, Shard, TokenConfig, open_corpus, sequences, shards

MEASURE = MeasureShard(("entropy", "output_norm"), MassWidths(), 150, False)


@pytest.fixture
def shard(spec, corpus_folder) -> Shard:
    corpus = open_corpus(CorpusSpec(str(corpus_folder)))
    tokenizer = identify(spec).tokenizer
    found = sequences(corpus, tokenizer, TokenConfig(60, mode="chunk", min_tokens=5), CorpusReport())
    return next(iter(shards(found, shard_size=64)))


def test_progress_moves_with_each_pass(spec, shard: Shard) -> None:
    lm = load_spec(spec, "cpu")
    counts: list[int] = []
    assert MEASURE(lm, shard, on_pass=counts.append).heads.equals(MEASURE(lm, shard).heads)
    assert len(counts) > 1
    assert sum(counts) == len(shard.sequences)


def test_halves_of_a_pass_count_once(spec, shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = load_spec(spec, "cpu")
    counts: list[int] = []
    plain = MeasureShard.run

    def short_of_memory(self, lm: LoadedModel, shard: Shard, part):
        if len(part) > 1:
            raise torch.OutOfMemoryError("no room")
        return plain(self, lm, shard, part)

    monkeypatch.setattr(MeasureShard, "run", short_of_memory)
    MEASURE(lm, shard, on_pass=counts.append)
    assert counts == [1] * len(shard.sequences)
