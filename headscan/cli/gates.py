"""The verb gates."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from headscan.cli.option_parser import Given
from headscan.cli.results import Json, Result
from headscan.cli.verb_base import CorpusOptions, RunVerb
from headscan.options import Group
from headscan.settings.measure_settings import GatesConfig
from headscan.text_tables import say

if TYPE_CHECKING:
    from headscan.store.store import Store


@dataclass(frozen=True, kw_only=True)
class Gates(RunVerb):
    """fit gates on the heads of a frozen model: which heads may close

        headscan gates MODEL --corpus texts/ --share 0.4 --store s.duckdb
        headscan gates MODEL --corpus texts/ --two-sided
        headscan rank --by gate --store s.duckdb

    The closed heads become a mask for `headscan prune --mask`, and a list for `headscan evaluate --heads`. Two-sided
    fits classify facilitating, interfering and irrelevant heads. The same command again resumes an interrupted run.
    """

    common: ClassVar = "MODEL --corpus --store --share --objective --steps --sequences --max-tokens --dtype --device"

    json: Json = False
    corpus: Annotated[CorpusOptions, Group("texts")]
    settings: Annotated[Given[GatesConfig], Group("fit")]

    def run(self) -> Result:
        from headscan.jobs import job_functions

        corpus = self.corpus.required(self)
        spec, identity = self.identified()
        config = self.settings.build(model=spec, corpus=corpus)
        config = replace(config, max_tokens=min(config.max_tokens, identity.max_tokens or config.max_tokens))
        result = job_functions.gates(config, self.store.path, **self.job_options(identity))
        if result.already_done:
            say(f"run {result.run_id} is complete in {self.store.path}: nothing to do")
        return _result(self.store.open(), result.run_id, self.store.path, config.site, result.mask)


def _result(store: Store, run_id: str, path: str, site: str, mask: str) -> Result:
    """Return the gates, the most closed first, and the number of heads of each class."""
    from headscan.ranking.head_ranking import rank_gates
    from headscan.text_tables import table_cells, text_table

    heads = rank_gates(store, run_id, site=site)
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
            f"run {run_id} in {path}; prune with --mask {mask}",
        ]
        return "\n".join(filter(None, lines))

    facts = {"run_id": run_id, "store": path, "mask": mask, "closed": closed, "open": still_open, "classes": classes}
    return Result(heads, text, facts)
