"""The verb probe."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from headscan.catalog import BEHAVIOURS
from headscan.cli.option_parser import Given
from headscan.cli.results import Json, Result
from headscan.cli.verb_base import CorpusOptions, RunVerb
from headscan.measure.probe_settings import BehaviourProbe
from headscan.options import Group, Needs, Option
from headscan.settings.measure_settings import ProbeConfig

if TYPE_CHECKING:
    from headscan.store.store import Store

#: Condition of options of the behaviour that is measured on texts; without --behaviours, it is, too.
_RETRIEVED = Needs(
    key="settings.behaviours",
    values=("retrieval_score",),
    unless=Needs(key="settings.behaviours", absent=True),
    of=("lengths", "depths", "corpus"),
)
#: Heads shown for each behaviour.
_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class _Haystack(CorpusOptions):
    name: Annotated[
        str, Option("text around the sentence: file, folder, data set on the hub, or built-in corpus", flag="--corpus")
    ] = "python-stdlib"


@dataclass(frozen=True, kw_only=True)
class _Retrieval:
    lengths: Annotated[
        tuple[int, ...] | None,
        Option(
            "comma-separated prompt lengths in tokens (default: 512,2048, or the model's context)", least=1, spaces=True
        ),
    ] = None
    probe: Annotated[Given[BehaviourProbe], Group()]
    corpus: Annotated[_Haystack, Group()]


@dataclass(frozen=True, kw_only=True)
class Probe(RunVerb):
    """score the behaviours of every head: induction, duplicate and previous tokens, retrieval from long texts

        headscan probe MODEL --store s.duckdb
        headscan probe MODEL --behaviours retrieval_score --lengths 512,2048 --depths 0,0.5,1

    Heads are scored on sequences made for the behaviour: repeated random tokens, and sentences hidden in a long text.
    The same command again reads the scores from the store.
    """

    common: ClassVar = "MODEL --behaviours --lengths --corpus --store --json --dtype --device --ray-address"

    json: Json = False
    settings: Annotated[Given[ProbeConfig], Group("behaviours")]
    retrieval: Annotated[_Retrieval, Group("retrieval_score", needs=(_RETRIEVED,))]

    def run(self) -> Result:
        from headscan.jobs import job_functions
        from headscan.steps.run_probe import default_lengths

        spec, identity = self.identified(need_tokenizer=False)
        lengths = tuple(self.retrieval.lengths or default_lengths(identity))
        config = self.settings.build(
            model=spec, corpus=self.retrieval.corpus.spec(), probe=self.retrieval.probe.build(lengths=lengths)
        )
        result = job_functions.probe(config, self.store.path, **self.job_options(identity))
        return _result(self.store.open(), result.run_id, self.store.path, already_done=result.already_done)


def _result(store: Store, run_id: str, path: str, *, already_done: bool) -> Result:
    """Return the heads of each behaviour (as text, the strongest), and how many exceed the source's threshold."""
    from headscan.ranking.head_ranking import measured_behaviours, rank_behaviours
    from headscan.text_tables import text_table

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
        done = f"is complete in {path}: nothing to do" if already_done else f"in {path}"
        counts = [
            f"{count} of {len(ranked[name])} heads have a {name} above {BEHAVIOURS[name].threshold:g}"
            f" ({BEHAVIOURS[name].source})"
            for name, count in above.items()
        ]
        shown = text_table([row for row in rows if row["rank"] <= _SHOWN])
        return "\n".join([f"run {run_id} {done}", shown, *counts])

    return Result(rows, text, {"run_id": run_id, "store": path, "above_threshold": above})
