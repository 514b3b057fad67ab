"""What verbs that measure a corpus share: the corpus, its sequences, and a run over them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, TypeVar

from headscan.cli.option_parser import Given
from headscan.cli.results import Json, Result
from headscan.cli.verb_base import DEMO_CORPUS, OTHER_CORPORA, CorpusOptions, RunVerb
from headscan.options import Group, Option
from headscan.settings.corpus_settings import LONGEST_TEXT, TokenConfig
from headscan.settings.measure_settings import CorpusRunConfig
from headscan.text_tables import say

if TYPE_CHECKING:
    from headscan.runs.model_identity import ModelIdentity
    from headscan.steps.run_corpus import CorpusRunResult

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
        int | None, Option(f"maximum sequence length (default: the model's context, at most {LONGEST_TEXT})", least=1)
    ] = None
    config: Annotated[Given[TokenConfig], Group()]


@dataclass(frozen=True, kw_only=True)
class CorpusVerb(RunVerb):
    """A verb that measures the sequences of a corpus."""

    json: Json = False
    corpus: Annotated[LimitedCorpusOptions, Group("corpus")]
    tokens: Annotated[SequenceOptions, Group("sequences")]

    def config(self, settings: Given[C]) -> tuple[C, ModelIdentity]:
        """Return the settings of the run, with its corpus and its sequences, and the identity of the model."""
        from headscan.settings.corpus_settings import longest_text

        corpus = self.corpus.required(self, limit_documents=self.corpus.limit_documents)
        spec, identity = self.identified()
        tokens = self.tokens.config.build(longest_text(identity, self.tokens.max_tokens))
        return settings.build(model=spec, corpus=corpus, tokens=tokens), identity


def say_counts(result: CorpusRunResult, tokens: TokenConfig) -> None:
    """Print what was read of a corpus, to standard error; nothing if it was not read."""
    if result.report is None:
        return
    for line in result.report.lines():
        say(line)
    if tokens.attention_across_documents:
        say("documents share sequences (--mode pack): queries attended across documents")


def run_result(result: CorpusRunResult, path: str) -> Result:
    """Return what a job measured, as one row, and the run in the store at ``path``."""
    part = None if result.part is None else str(result.part)

    def text() -> str:
        title = f"run {result.run_id}" if part is None else f"part {part} of run {result.run_id}"
        if result.already_done:
            return f"{title} is complete in {path}: nothing to do"
        return f"{title}: {result.measured} shards measured, {result.skipped} stored before, in {path}"

    row = {"run_id": result.run_id, "already_done": result.already_done, "measured": result.measured}
    report = None if result.report is None else asdict(result.report)
    return Result(
        [row | {"skipped": result.skipped, "report": report, "part": part}],
        text,
        {"run_id": result.run_id, "store": path},
    )
