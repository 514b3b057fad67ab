"""The verbs that measure a corpus: scan and importance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, TypeVar

from headscan.options import Group, Option
from headscan.pipelines.cli.option_parser import UsageError, changed
from headscan.pipelines.cli.verb_base import DEMO_CORPUS, OTHER_CORPORA, CorpusOptions, RunVerb, say
from headscan.pipelines.settings.corpus_settings import DataSpec, TokenPlan
from headscan.pipelines.settings.measure_settings import CorpusRunConfig, ImportanceConfig, ScanConfig

if TYPE_CHECKING:
    from headscan.pipelines.corpora import CorpusReport
    from headscan.pipelines.runs.run_records import Run
    from headscan.pipelines.scan.run_scan import CorpusRunResult

C = TypeVar("C", bound=CorpusRunConfig)


@dataclass(frozen=True, kw_only=True)
class _Corpus(CorpusOptions):
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
class _Sequences:
    max_tokens: Annotated[
        int | None, Option("maximum sequence length (default: the model's context, at most 2048)", least=1)
    ] = None
    plan: Annotated[partial[TokenPlan], Group()]


@dataclass(frozen=True, kw_only=True)
class _CorpusVerb(RunVerb):
    corpus: Annotated[_Corpus, Group("corpus")]
    tokens: Annotated[_Sequences, Group("sequences")]

    def run_measurement(self, config_of: Callable[..., C], measure: Callable[[C, Run], CorpusRunResult]) -> str:
        """Measure the corpus, print the counts, and return the id of the run."""
        from headscan.pipelines.settings.corpus_settings import longest_text

        corpus = self.corpus.required(self, limit_documents=self.corpus.limit_documents)
        spec, identity = self.identified()
        tokens = self.tokens.plan(longest_text(identity, self.tokens.max_tokens))
        config = config_of(model=spec, corpus=corpus, tokens=tokens)
        with self.opened(spec, identity, tokens=tokens.max_tokens) as (run, placed):
            result = measure(replace(config, batch_tokens=placed.batch_tokens), run)
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


@dataclass(frozen=True, kw_only=True)
class Scan(_CorpusVerb):
    """measure every attention head on a corpus

        headscan scan MODEL --corpus texts/ --store s.duckdb
        headscan scan MODEL --corpus data.parquet --column text --mode chunk --panel full
        headscan scan MODEL --corpus texts/ --part 3/8 --store part3.duckdb

    The same command again resumes an interrupted scan, and does nothing if the scan is complete. Jobs that scan parts
    share nothing: each has a store of its own, and `headscan merge` joins them.
    """

    common: ClassVar = (
        "MODEL --corpus --store --max-tokens --mode --limit-sequences --panel --dtype --device --ray-address"
    )

    settings: Annotated[partial[ScanConfig], Group("statistics")]

    def run(self) -> None:
        from headscan.pipelines.scan.run_scan import scan

        self.run_measurement(self.settings, scan)


@dataclass(frozen=True, kw_only=True)
class Importance(_CorpusVerb):
    """measure the importance of every attention head from derivatives of the loss

        headscan importance MODEL --corpus texts/ --store s.duckdb
        headscan importance MODEL --corpus texts/ --recall-prompts 16
        headscan importance CLASSIFIER --data train.tsv
        headscan rank --by importance --store s.duckdb

    On a corpus, decoders predict the next token, encoders masked tokens, encoder-decoders their own input. On --data,
    classifiers predict labels and encoder-decoders target texts. The same command again resumes an interrupted run,
    and does nothing if the run is complete. With recall prompts, importance_recall orders heads by the importance on
    texts or on the prompts. The last lines show how well two halves of the texts agree on the heads' order.
    """

    common: ClassVar = (
        "MODEL --corpus --data --store --max-tokens --limit-sequences --reduction --dtype --device --ray-address"
    )

    data: Annotated[DataSpec | None, Group("labelled examples")]
    settings: Annotated[partial[ImportanceConfig], Group("loss")]

    def __post_init__(self) -> None:
        if self.data is None:
            if self.corpus.name is None and not self.is_demo:
                raise UsageError("--corpus or --data is required: name a text, or a file of labelled examples")
        elif self.corpus.name is not None:
            raise UsageError("--corpus and --data exclude each other: leave one of them out")
        else:
            for name, flag in changed(self).items():
                if name.startswith(("corpus.", "tokens.plan.", "settings.recall_prompts")):
                    raise UsageError(f"{flag} has no effect with --data: leave one of them out")

    def run(self) -> None:
        from headscan.analysis.heads.head_ranking import halves_agreement

        run_id = self._on_corpus() if self.data is None else self._on_examples(self.data)
        store = self.store.open()
        sites = store.query("SELECT DISTINCT site FROM head_importance WHERE run_id = ? ORDER BY site", [run_id])
        for site in sites["site"].to_pylist():
            for name in ("importance", "sequence_importance", "importance_recall"):
                if (found := halves_agreement(store, run_id, name, site=site)) is not None:
                    print(f"{name}, site {site}: {found.line()}")

    def _on_corpus(self) -> str:
        from headscan.models.model_facts import is_classifier
        from headscan.pipelines.scan.run_importance import run_importance

        spec = self.spec()
        if is_classifier(spec.config()):
            raise UsageError(f"{self.model} is a classifier, and text has no labels. Give --data")
        return self.run_measurement(self.settings, run_importance)

    def _on_examples(self, data: DataSpec) -> str:
        from headscan.pipelines.scan.labelled_texts import read_labelled
        from headscan.pipelines.scan.run_importance import run_labelled_importance
        from headscan.pipelines.settings.measure_settings import LabelledImportanceConfig

        spec, identity = self.identified()
        config = LabelledImportanceConfig(spec, data, self.tokens.max_tokens, **self.settings.keywords)
        texts = read_labelled(data, spec, identity, self.tokens.max_tokens)
        with self.opened(spec, identity, tokens=texts.longest) as (run, placed):
            result = run_labelled_importance(replace(config, batch_tokens=placed.batch_tokens), run, texts=texts)
        if result.already_done:
            print(f"run {result.run_id} is complete in {self.store.path}: nothing to do")
            return result.run_id
        print(
            f"run {result.run_id}: {len(texts.texts)} examples, {result.measured} shards measured, {result.skipped}"
            f" stored before, in {self.store.path}"
        )
        return result.run_id
