"""What verbs that measure a corpus share: the corpus, its sequences, and a run over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, TypeVar

from headscan.options import Group, Option
from headscan.pipelines.cli.verb_base import DEMO_CORPUS, OTHER_CORPORA, CorpusOptions, RunVerb, say
from headscan.pipelines.settings.corpus_settings import TokenPlan
from headscan.pipelines.settings.measure_settings import CorpusRunConfig

if TYPE_CHECKING:
    from headscan.pipelines.corpora import CorpusReport
    from headscan.pipelines.measure.run_corpus import CorpusRunResult

C = TypeVar("C", bound=CorpusRunConfig)


@dataclass(frozen=True, kw_only=True)
class LimitedCorpusOptions(CorpusOptions):
    name: Annotated[
        str | None,
        Option(
            "file or folder (.txt, .py, .jsonl, .parquet, .csv, ...; text and JSON also .gz or .zst), "
            f"{OTHER_CORPORA} (default: required, except for `demo`: {DEMO_CORPUS})",
            flag="--corpus",
        ),
    ] = None
    limit_documents: Annotated[int | None, Option("maximum number of documents (default: all)", least=1)] = None


@dataclass(frozen=True, kw_only=True)
class SequenceOptions:
    max_tokens: Annotated[
        int | None, Option("maximum sequence length (default: the model's context, at most 2048)", least=1)
    ] = None
    plan: Annotated[partial[TokenPlan], Group()]


@dataclass(frozen=True, kw_only=True)
class CorpusVerb(RunVerb):
    """A verb that measures the sequences of a corpus."""

    corpus: Annotated[LimitedCorpusOptions, Group("corpus")]
    tokens: Annotated[SequenceOptions, Group("sequences")]

    def run_measurement(self, config_of: Callable[..., C], job: Callable[..., CorpusRunResult]) -> str:
        """Measure the corpus with a job, print the counts, and return the id of the run."""
        from headscan.pipelines.settings.corpus_settings import longest_text

        corpus = self.corpus.required(self, limit_documents=self.corpus.limit_documents)
        spec, identity = self.identified()
        tokens = self.tokens.plan(longest_text(identity, self.tokens.max_tokens))
        config = config_of(model=spec, corpus=corpus, tokens=tokens)
        result = job(config, self.store.path, **self.job_options(identity))
        title = f"run {result.run_id}" if result.part is None else f"part {result.part} of run {result.run_id}"
        if result.already_done:
            print(f"{title} is complete in {self.store.path}: nothing to do")
            return result.run_id
        if result.report is not None:
            _say_counts(tokens, result.report)
        done = f"{result.measured} shards measured, {result.skipped} stored before"
        print(f"{title}: {done}, in {self.store.path}")
        return result.run_id


def _say_counts(tokens: TokenPlan, report: CorpusReport) -> None:
    for line in report.lines():
        say(line)
    if tokens.attention_across_documents:
        say("documents share sequences (--mode pack): queries attended across documents")
