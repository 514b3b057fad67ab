"""The step probe."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar

from headscan.catalog import BEHAVIOURS
from headscan.errors import HeadscanError
from headscan.measure.probe_settings import BehaviourProbe
from headscan.options import Group, Option, short
from headscan.settings.corpus_settings import CorpusSpec
from headscan.steps.results import Result
from headscan.steps.step import Step

if TYPE_CHECKING:
    from headscan.runs.model_identity import ModelIdentity
    from headscan.runs.run_context import Run
    from headscan.steps.run_probe import ProbeResult
    from headscan.store.store import Store

#: Condition of options of the behaviour that is measured on texts; without --behaviours, it is, too.
_RETRIEVED = "--behaviours retrieval_score or no --behaviours"
#: Heads shown for each behaviour.
_SHOWN = 5


class ProbeError(HeadscanError):
    """Settings of a probe that are out of range."""


@short
@dataclass(frozen=True)
class Probe(Step["ProbeResult"]):
    """score the behaviours of every head: induction, duplicate and previous tokens, retrieval from long texts

        headscan probe MODEL --store s.duckdb
        headscan probe MODEL --behaviours retrieval_score --lengths 512,2048 --depths 0,0.5,1

    Heads are scored on sequences made for the behaviour: repeated random tokens, and sentences hidden in a long text.
    The same command again reads the scores from the store.

    Attributes:
        behaviours: Names from the catalogue. Empty uses all of them, or those that need no tokenizer if there is none.
        corpus: The text in which needles are hidden.
    """

    common: ClassVar = "MODEL --behaviours --lengths --corpus --store --json --dtype --device --ray-address"
    needs_tokenizer: ClassVar = False
    error: ClassVar = ProbeError

    behaviours: Annotated[
        tuple[str, ...],
        Option(
            f"comma-separated behaviours: {', '.join(BEHAVIOURS)} (default: all)", kind="behaviour", names=BEHAVIOURS
        ),
    ] = ()
    corpus: Annotated[CorpusSpec, Group("retrieval_score", needs=_RETRIEVED)] = field(
        default_factory=lambda: CorpusSpec("python-stdlib")
    )
    probe: Annotated[BehaviourProbe, Group("retrieval_score", needs=_RETRIEVED, free="seed tokens")] = field(
        default_factory=BehaviourProbe
    )

    def longest(self, identity: ModelIdentity) -> int:
        return max(self.probe.lengths_within(identity.max_tokens))

    def execute(self, run: Run) -> ProbeResult:
        from headscan.steps.run_probe import run_probe

        return run_probe(self, run)

    def shown(self, result: ProbeResult, store: Store) -> Result:
        """Return the heads of each behaviour (as text, the strongest), and how many exceed the source's threshold."""
        from headscan.ranking.head_ranking import measured_behaviours, rank_behaviours
        from headscan.text_tables import text_table

        run_id = result.run_id
        ranked = {name: rank_behaviours(store, run_id, name) for name in measured_behaviours(store, run_id)}
        rows = [
            {"behaviour": name, "rank": place, **asdict(head)}
            for name, heads in ranked.items()
            for place, head in enumerate(heads, 1)
        ]
        above = {
            name: sum(head.value > declared for head in heads)
            for name, heads in ranked.items()
            if (declared := BEHAVIOURS[name].threshold) is not None
        }

        def text() -> str:
            done = f"is complete in {store.path}: nothing to do" if result.already_done else f"in {store.path}"
            counts = [
                f"heads with a {name} above {BEHAVIOURS[name].threshold:g} ({BEHAVIOURS[name].source}):"
                f" {count} of {len(ranked[name])}"
                for name, count in above.items()
            ]
            shown = text_table([row for row in rows if row["rank"] <= _SHOWN])
            return "\n".join([f"run {run_id} {done}", shown, *counts])

        return Result(rows, text, {"run_id": run_id, "store": str(store.path), "above_threshold": above})
