"""Corpora: from a name to token sequences in deterministic shards.

    corpus = open_corpus(CorpusSpec("books/"))                       # hub name, path or built-in
    config = TokenConfig(max_tokens=512, mode="chunk")
    report = CorpusReport()
    for shard in shards(sequences(corpus, tokenizer, config, report), shard_size=64):
        ...                                                          # shard.sequences, shard.content_hash
    print("\\n".join(report.lines()))

`corpus` opens a corpus by name: local `files`, tables on the hub or in files (`data_sets`), or `stdlib_files`. Each
yields `documents`, `tokenising` turns them into tokens, and `sequences` cuts these into sequences and shards.

The `CorpusReport` counts everything that is dropped: empty or undecodable documents, records without text, pieces that
are too short, and files of unknown type. It names the first few of each.
"""

# Names imported `as` themselves are public: type checkers let others import these alone from here.
from headscan.pipelines.corpora.corpus import BUILT_IN as BUILT_IN
from headscan.pipelines.corpora.corpus import Corpus as Corpus
from headscan.pipelines.corpora.corpus import check_corpus as check_corpus
from headscan.pipelines.corpora.corpus import open_corpus as open_corpus
from headscan.pipelines.corpora.documents import Document as Document
from headscan.pipelines.corpora.documents import Problem as Problem
from headscan.pipelines.corpora.sequences import CorpusReport as CorpusReport
from headscan.pipelines.corpora.sequences import Shard as Shard
from headscan.pipelines.corpora.sequences import TokenSequence as TokenSequence
from headscan.pipelines.corpora.sequences import sequences as sequences
from headscan.pipelines.corpora.sequences import shards as shards
from headscan.pipelines.settings.corpus_settings import BosPolicy as BosPolicy
from headscan.pipelines.settings.corpus_settings import CorpusError as CorpusError
from headscan.pipelines.settings.corpus_settings import CorpusSpec as CorpusSpec
from headscan.pipelines.settings.corpus_settings import TokenConfig as TokenConfig
from headscan.pipelines.settings.corpus_settings import TokenMode as TokenMode
