"""Progress within a shard: every sequence counts once, with the results of the plain task."""

from __future__ import annotations

import pytest
import torch

from headscan.catalog import MassWidths
from headscan.loading import load_spec
from headscan.models.loaded_model import LoadedModel
from headscan.pipelines.corpora import CorpusReport, CorpusSpec, TokenConfig, open_corpus, sequences, shards
from headscan.pipelines.measure.run_scan import ScanItem, measure_shard
from headscan.pipelines.runs.model_identity import identify


@pytest.fixture
def item(spec, corpus_folder) -> ScanItem:
    corpus = open_corpus(CorpusSpec(str(corpus_folder)))
    tokenizer = identify(spec).tokenizer
    found = sequences(corpus, tokenizer, TokenConfig(60, mode="chunk", min_tokens=5), CorpusReport())
    return ScanItem(next(iter(shards(found, shard_size=64))), ("entropy", "output_norm"), MassWidths(), 150, False)


def test_progress_moves_with_each_pass(spec, item: ScanItem) -> None:
    lm = load_spec(spec, "cpu")
    counts: list[int] = []
    assert measure_shard(lm, item, on_pass=counts.append).heads.equals(measure_shard(lm, item).heads)
    assert len(counts) > 1
    assert sum(counts) == len(item.shard.sequences)


def test_halves_of_a_pass_count_once(spec, item: ScanItem, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = load_spec(spec, "cpu")
    counts: list[int] = []
    plain = type(measure_shard).run

    def short_of_memory(self, lm: LoadedModel, item: ScanItem, part):
        if len(part) > 1:
            raise torch.OutOfMemoryError("no room")
        return plain(self, lm, item, part)

    monkeypatch.setattr(type(measure_shard), "run", short_of_memory)
    measure_shard(lm, item, on_pass=counts.append)
    assert counts == [1] * len(item.shard.sequences)
