"""The step importance."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from headscan.catalog import RECALL_NAMES
from headscan.options import Group, Option, short
from headscan.settings.corpus_settings import CorpusSpec, ExamplesSpec, TokenConfig
from headscan.steps.corpus_step import CorpusRunError, CorpusStep

if TYPE_CHECKING:
    from headscan.runs.run_context import Run
    from headscan.steps.results import Result
    from headscan.steps.run_corpus import CorpusRunResult
    from headscan.store.store import Store

#: Loss of a sequence: the mean or the sum of the losses of its tokens.
LossReduction = Literal["mean", "sum"]


@short
@dataclass(frozen=True)
class Importance(CorpusStep):
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

    corpus: Annotated[CorpusSpec | None, Group("corpus", needs="no --data")] = None
    tokens: Annotated[TokenConfig, Group("sequences", needs="no --data", free="max_tokens")] = field(
        default_factory=TokenConfig
    )
    data: Annotated[ExamplesSpec | None, Group("labelled examples")] = None
    reduction: Annotated[LossReduction, Option("loss of a sequence: mean or sum of the losses of its tokens")] = "mean"
    recall_prompts: Annotated[
        int,
        Option(
            f"number of prompts of each recall task ({RECALL_NAMES}), a multiple of 4, which importance_recall needs",
            least=0,
            multiple=4,
            needs="no --data",
        ),
    ] = 0

    def require_corpus(
        self, problem: str = "`corpus` is required: name a text, or a file of labelled examples as `data`"
    ) -> None:
        if self.data is None:
            super().require_corpus(problem)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data is not None:
            self.refuse(("corpus", "recall_prompts"), "with `data`")
            if self.tokens != TokenConfig(self.tokens.max_tokens):
                raise CorpusRunError("`tokens` have no effect with `data`, except `max_tokens`: leave the others out")
        if self.tokens.min_tokens < 2:
            raise CorpusRunError(
                f"`min_tokens={self.tokens.min_tokens}` (limit 2, the last one is predicted). Raise `min_tokens`"
            )

    def execute(self, run: Run) -> CorpusRunResult:
        from headscan.steps.run_importance import run_importance

        return run_importance(self, run)

    def shown(self, result: CorpusRunResult, store: Store) -> Result:
        """Return what was measured, and how well two halves of the texts agree on the heads' order."""
        from headscan.ranking.head_ranking import halves_agreement

        found = store.query("SELECT DISTINCT site FROM head_importance WHERE run_id = ? ORDER BY site", [result.run_id])
        halves = [
            (name, site, agreement)
            for site in found["site"].to_pylist()
            for name in ("importance", "sequence_importance", "importance_recall")
            if (agreement := halves_agreement(store, result.run_id, name, site=site)) is not None
        ]
        measured = super().shown(result, store)

        def text() -> str:
            return "\n".join([measured.text(), *(f"{name}, site {site}: {each.line()}" for name, site, each in halves)])

        rows = [{"by": name, "site": site, **asdict(each)} for name, site, each in halves]
        return replace(measured, text=text, facts={**measured.facts, "halves": rows})
