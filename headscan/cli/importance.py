"""The verb importance."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from headscan.cli.corpus_verb import CorpusVerb, LimitedCorpusOptions, SequenceOptions, run_result, say_counts
from headscan.cli.option_parser import Given, UsageError
from headscan.cli.results import Result
from headscan.cli.task_options import NO_DATA
from headscan.cli.verb_base import quiet_libraries
from headscan.options import Group
from headscan.settings.corpus_settings import ExamplesSpec
from headscan.settings.measure_settings import ImportanceConfig
from headscan.text_tables import say

if TYPE_CHECKING:
    from headscan.steps.run_corpus import CorpusRunResult


@dataclass(frozen=True, kw_only=True)
class Importance(CorpusVerb):
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

    corpus: Annotated[LimitedCorpusOptions, Group("corpus", needs=(NO_DATA,))]
    tokens: Annotated[SequenceOptions, Group("sequences", needs=(replace(NO_DATA, of=("config",)),))]
    data: Annotated[ExamplesSpec | None, Group("labelled examples")]
    settings: Annotated[Given[ImportanceConfig], Group("loss", needs=(replace(NO_DATA, of=("recall_prompts",)),))]

    def __post_init__(self) -> None:
        if not (self.data or self.corpus.name or self.is_demo):
            raise UsageError("--corpus or --data is required: name a text, or a file of labelled examples")

    def run(self) -> Result:
        from headscan.ranking.head_ranking import halves_agreement

        measured = self._on_corpus() if self.data is None else self._on_examples(self.data)
        result, store = run_result(measured, self.store.path), self.store.open()
        found = store.query(
            "SELECT DISTINCT site FROM head_importance WHERE run_id = ? ORDER BY site", [measured.run_id]
        )
        halves = [
            (name, site, agreement)
            for site in found["site"].to_pylist()
            for name in ("importance", "sequence_importance", "importance_recall")
            if (agreement := halves_agreement(store, measured.run_id, name, site=site)) is not None
        ]

        def text() -> str:
            return "\n".join([result.text(), *(f"{name}, site {site}: {each.line()}" for name, site, each in halves)])

        rows = [{"by": name, "site": site, **asdict(each)} for name, site, each in halves]
        return replace(result, text=text, facts={**result.facts, "halves": rows})

    def _on_corpus(self) -> CorpusRunResult:
        from headscan.jobs import job_functions
        from headscan.models.model_facts import is_classifier

        spec = self.spec()
        if is_classifier(spec.config()):
            raise UsageError(f"{self.model} is a classifier, and text has no labels. Give --data")
        config, identity = self.config(self.settings)
        result = job_functions.importance(config, self.store.path, **self.job_options(identity))
        say_counts(result, config.tokens)
        return result

    def _on_examples(self, data: ExamplesSpec) -> CorpusRunResult:
        from headscan.jobs import job_functions
        from headscan.settings.measure_settings import LabelledImportanceConfig

        quiet_libraries()
        config = LabelledImportanceConfig(self.spec(), data, self.tokens.max_tokens, **self.settings.values)
        result = job_functions.labelled_importance(config, self.store.path, **self.job_options())
        if result.report is not None:
            say(f"{result.report.sequences} examples")
        return result
