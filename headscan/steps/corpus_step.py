"""What steps over the sequences of a corpus share: their options, and what the command line prints."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar

from headscan.errors import HeadscanError
from headscan.options import Group, Option
from headscan.settings.corpus_settings import CorpusSpec, TokenConfig, longest_text
from headscan.steps.results import Result
from headscan.steps.step import Step
from headscan.text_tables import counted

if TYPE_CHECKING:
    from headscan.runs.model_identity import ModelIdentity
    from headscan.steps.run_corpus import CorpusRunResult
    from headscan.store.store import Store


class CorpusRunError(HeadscanError):
    """Settings of a run over a corpus that are out of range."""


@dataclass(frozen=True)
class CorpusStep(Step["CorpusRunResult"]):
    """A step over the sequences of a corpus.

    Attributes:
        corpus: None names that of the bundled model, `DEMO_CORPUS`; other models need a corpus.
        shard_size: Sequences that are stored and resumed together; None chooses about 20 s of work when the run begins,
            and 16 sequences for a part of the corpus.
    """

    error: ClassVar = CorpusRunError

    corpus: Annotated[CorpusSpec | None, Group("corpus")] = None
    tokens: Annotated[TokenConfig, Group("sequences")] = field(default_factory=TokenConfig)
    shard_size: Annotated[
        int | None,
        Option(
            "number of sequences stored and resumed together (default: about 20 s of work by the sizes of model and "
            "texts, and 16 for a part of a corpus)",
            least=1,
        ),
    ] = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_corpus()

    def longest(self, identity: ModelIdentity) -> int:
        return longest_text(identity, self.tokens.max_tokens)

    def shown(self, result: CorpusRunResult, store: Store) -> Result:
        part = None if result.part is None else str(result.part)

        def text() -> str:
            title = f"run {result.run_id}" if part is None else f"part {part} of run {result.run_id}"
            if result.already_done:
                return f"{title} is complete in {store.path}: nothing to do"
            measured = counted(result.measured, "shard")
            return f"{title}: {measured} measured, {result.skipped} stored before, in {store.path}"

        row = {"run_id": result.run_id, "already_done": result.already_done, "measured": result.measured}
        report = None if result.report is None else asdict(result.report)
        return Result(
            [row | {"skipped": result.skipped, "report": report, "part": part}],
            text,
            {"run_id": result.run_id, "store": str(store.path)},
            self._counts(result),
        )

    def _counts(self, result: CorpusRunResult) -> list[str]:
        """Return lines about what was read of the corpus; none if it was not read."""
        if result.report is None:
            return []
        lines = list(result.report.lines())
        if self.tokens.attention_across_documents:
            lines.append("documents share sequences (--mode pack): queries attended across documents")
        return lines
