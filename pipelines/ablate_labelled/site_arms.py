"""Arms that ablate heads at the sites of a model: single heads, all but one of a layer, or any set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from headscan.ablation.intervene import intervene
from headscan.ablation.masks import HeadMask
from headscan.analysis.arm_kinds import ArmKind
from headscan.analysis.schema.effect_tables import EACH
from headscan.analysis.store.records import ArmRecord
from headscan.analysis.store.store import Store
from headscan.grid import Head, HeadGrid
from headscan.models.loaded_model import LoadedModel

#: Ablated heads by kind of site.
SiteHeads = tuple[tuple[str, tuple[Head, ...]], ...]


@dataclass(frozen=True)
class SiteArm:
    """One way of running the model: without ablation, or with the output of heads replaced by zero.

    Attributes:
        name: Unique in a run.
        heads: Ablated heads by kind of site; none for the baseline.
        details: Further settings for the store.
    """

    name: str
    heads: SiteHeads = ()
    details: tuple[tuple[str, object], ...] = ()

    @property
    def size(self) -> int:
        """Number of ablated heads."""
        return sum(len(heads) for _, heads in self.heads)

    def begin(self, store: Store, run_id: str) -> tuple[str, bool]:
        """Store the arm; return its id, and True if it is finished.

        Heads of one site are stored as a mask, those of several sites in the settings of the arm.
        """
        mask_id = None
        if len(self.heads) == 1:
            ((site, heads),) = self.heads
            listed = {"heads": [list(head) for head in heads]}
            mask_id = store.add_mask(f"{run_id}: {self.name}", heads, site=site, config=listed)
        record = ArmRecord(
            run_id=run_id,
            name=self.name,
            kind=ArmKind.MASK if self.heads else ArmKind.BASELINE,
            mask_id=mask_id,
            replacement="zero" if self.heads else None,
            config={**dict(self.details), "sites": self.as_lists()},
        )
        state = store.begin_arm(record)
        return state.arm_id, state.finished

    def as_lists(self) -> dict[str, Any]:
        """Return the ablated heads as plain data."""
        return {site: [list(head) for head in heads] for site, heads in self.heads}


WITHOUT_ABLATION = SiteArm("baseline")


@contextmanager
def ablated(lm: LoadedModel, heads: SiteHeads) -> Iterator[None]:
    """Ablate heads of several sites while the context is open."""
    with ExitStack() as masks:
        for site, of_site in heads:
            masks.enter_context(intervene(lm.at(site), HeadMask(of_site)))
        yield


def heads_of(lists: Mapping[str, Any]) -> SiteHeads:
    """Return ablated heads from plain data."""
    return tuple((site, tuple(Head(*head) for head in heads)) for site, heads in lists.items() if heads)


def single_arms(grid: HeadGrid, mode: str) -> list[SiteArm]:
    """Return an arm for each head of each site.

    Args:
        mode: Single heads, or all other heads of a layer; layers of one head have no others.
    """
    arms = []
    for kind in grid.kinds:
        for site in grid.at(kind).sites:
            every = [Head(site.layer, head) for head in range(site.num_attention_heads)]
            for head in every if mode == EACH or len(every) > 1 else ():
                removed = (head,) if mode == EACH else tuple(other for other in every if other != head)
                place = {"site": kind, "layer": site.layer, "head": head.head, "kv_head": site.kv_head_of[head.head]}
                words = "" if mode == EACH else "all but "
                name = f"{kind} {words}{site.layer}:{head.head}"
                arms.append(SiteArm(name, ((kind, removed),), (("mode", mode), *place.items())))
    return arms
