"""Texts: corpora, tasks, recall questions and labelled examples, as token sequences and requests.

    corpus = open_corpus(CorpusSpec("books/"))                       # hub name, path or built-in
    config = TokenConfig(max_tokens=512, mode="chunk")
    report = CorpusReport()
    for shard in shards(sequences(corpus, tokenizer, config, report), shard_size=64):
        ...                                                          # shard.sequences, shard.content_hash
    print("\\n".join(report.lines()))

`corpus` opens a corpus by name: local `files`, tables on the hub or in files (`data_sets`), or `stdlib_files`. Each
yields `documents`, `tokenising` turns them into tokens, and `sequences` cuts these into sequences and shards. With a
limit, `drawing` chooses blocks of all files by a hash. `shared_runs` finds text that two sets of texts share.

`token_requests` are the requests of tasks, and `prefix_tree` finds their common prefixes. `tasks` asks lm-eval for them
through its `harness`; `recall_tasks` makes recall questions, `continuation_task` a task from any texts, `held_out_text`
texts whose loss is measured. `labelled_texts` reads labelled examples, and `example_questions` asks them.

The `CorpusReport` counts everything that is dropped: empty or undecodable documents, records without text, pieces that
are too short, and files of unknown type. It names the first few of each.
"""

# Names imported `as` themselves are public: type checkers let others import these alone from here.
from headscan.settings.corpus_settings import BosPolicy as BosPolicy
from headscan.settings.corpus_settings import CorpusError as CorpusError
from headscan.settings.corpus_settings import CorpusSpec as CorpusSpec
from headscan.settings.corpus_settings import TokenConfig as TokenConfig
from headscan.settings.corpus_settings import TokenMode as TokenMode
from headscan.texts.continuation_task import make_questions as make_questions
from headscan.texts.continuation_task import write_task as write_task
from headscan.texts.corpus import BUILT_IN as BUILT_IN
from headscan.texts.corpus import Corpus as Corpus
from headscan.texts.corpus import check_corpus as check_corpus
from headscan.texts.corpus import open_corpus as open_corpus
from headscan.texts.documents import Document as Document
from headscan.texts.documents import Problem as Problem
from headscan.texts.sequences import CorpusReport as CorpusReport
from headscan.texts.sequences import Shard as Shard
from headscan.texts.sequences import TokenSequence as TokenSequence
from headscan.texts.sequences import sequences as sequences
from headscan.texts.sequences import shards as shards
from headscan.texts.stdlib_files import held_out_files as held_out_files
