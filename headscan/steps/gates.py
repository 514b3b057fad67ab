"""The step gates."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from headscan.errors import GateError
from headscan.gates.gate_settings import GateFitConfig
from headscan.options import Group, Option, Site, short
from headscan.settings.corpus_settings import SHORTEST, CorpusSpec
from headscan.steps.results import Result
from headscan.steps.step import Step

if TYPE_CHECKING:
    from headscan.runs.model_identity import ModelIdentity
    from headscan.runs.run_context import Run
    from headscan.steps.run_gates import GatesResult
    from headscan.store.store import Store


@short
@dataclass(frozen=True)
class Gates(Step["GatesResult"]):
    """fit gates on the heads of a frozen model: which heads may close

        headscan gates MODEL --corpus texts/ --share 0.4 --store s.duckdb
        headscan gates MODEL --corpus texts/ --two-sided
        headscan rank --by gate --store s.duckdb

    The closed heads become a mask for `headscan prune --mask`, and a list for `headscan evaluate --heads`. Two-sided
    fits classify facilitating, interfering and irrelevant heads. The same command again resumes an interrupted run.

    Attributes:
        fit: ``fit.share``, the share of heads whose gates close, must not be None.
    """

    common: ClassVar = "MODEL --corpus --store --share --objective --steps --sequences --max-tokens --dtype --device"

    error: ClassVar = GateError

    corpus: Annotated[CorpusSpec | None, Group("texts")] = None
    fit: Annotated[GateFitConfig, Group("fit")] = field(default_factory=GateFitConfig)
    two_sided: Annotated[
        bool, Option("second fit that opens gates with the same penalty, and the class of every head")
    ] = False
    site: Site = "self"
    sequences: Annotated[int, Option("number of texts", least=1)] = 256
    max_tokens: Annotated[int, Option("longest text in tokens, at most the model's context", least=SHORTEST)] = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fit.share is None:
            raise GateError("`share=None` (limit above 0, below 1). Set the share of heads to close")
        self.require_corpus()

    @property
    def batch_tokens(self) -> int:
        return self.fit.batch_tokens

    def longest(self, identity: ModelIdentity) -> int:
        return min(self.max_tokens, identity.max_tokens or self.max_tokens)

    def execute(self, run: Run) -> GatesResult:
        from headscan.steps.run_gates import run_gates

        return run_gates(self, run)

    def shown(self, result: GatesResult, store: Store) -> Result:
        """Return the gates, the most closed first, and the number of heads of each class."""
        from headscan.ranking.head_ranking import rank_gates
        from headscan.text_tables import table_cells, text_table

        run_id, mask = result.run_id, result.mask
        heads = rank_gates(store, run_id, site=self.site)
        closed = sorted((head.layer, head.head) for head in heads if head.closed)
        still_open = sum(head.closed and head.gate > 0.5 for head in heads)
        classes = dict(Counter(head.head_class for head in heads if head.head_class is not None).most_common())
        columns = {name: name for name in ("layer", "head", "kv_head", "gate", "p_open", "closed")}
        columns |= {"gate up": "gate_up", "class": "head_class"} if classes else {}

        def text() -> str:
            listed = ",".join(f"{layer}:{head}" for layer, head in closed)
            lines = [
                text_table(table_cells([asdict(head) for head in heads], columns)),
                f"{len(closed)} of {len(heads)} heads closed: --heads {listed}",
                f"{still_open} of these the fit keeps open (gate above 0.5): the share is not reached"
                if still_open
                else "",
                ", ".join(f"{count} {name}" for name, count in classes.items()),
                f"run {run_id} in {store.path}; prune with --mask {mask}",
            ]
            return "\n".join(filter(None, lines))

        facts: dict[str, Any] = {"run_id": run_id, "store": str(store.path), "mask": mask}
        facts |= {"closed": closed, "open": still_open, "classes": classes}
        notes = [f"run {run_id} is complete in {store.path}: nothing to do"] if result.already_done else []
        return Result(heads, text, facts, notes)
