"""Corpora: from a name to token sequences in deterministic shards.

    corpus = open_corpus(CorpusSpec("books/"))                       # hub name, path or built-in
    plan = TokenPlan(max_tokens=512, mode="chunk")
    report = CorpusReport()
    for shard in shards(sequences(corpus, tokenizer, plan, report), shard_size=64):
        ...                                                          # shard.sequences, shard.content_hash
    print("\\n".join(report.lines()))

`corpus` opens a corpus by name: local `files`, tables on the hub or in files (`data_sets`), or `stdlib_files`. Each
yields `documents`, `tokenising` turns them into tokens, and `sequences` cuts these into sequences and shards.

The `CorpusReport` counts everything that is dropped: empty or undecodable documents, records without text, pieces that
are too short, and files of unknown type. It names the first few of each.
"""

from headscan.pipelines.corpora.corpus import BUILT_IN, Corpus, check_corpus, open_corpus
from headscan.pipelines.corpora.documents import Document, Problem
from headscan.pipelines.corpora.sequences import CorpusReport, Shard, TokenSequence, sequences, shards
from headscan.pipelines.settings.corpus_settings import BosPolicy, CorpusError, CorpusSpec, TokenMode, TokenPlan

__all__ = [
    "BUILT_IN",
    "BosPolicy",
    "Corpus",
    "CorpusError",
    "CorpusReport",
    "CorpusSpec",
    "Document",
    "Problem",
    "Shard",
    "TokenMode",
    "TokenPlan",
    "TokenSequence",
    "check_corpus",
    "open_corpus",
    "sequences",
    "shards",
]
