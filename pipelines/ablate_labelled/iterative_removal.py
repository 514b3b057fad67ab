"""Iterative removal: heads in the order of their importance, a share of a site at each step (arXiv 1905.10650)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import numpy as np

from headscan.analysis.effects.removal_curves import ALL_SITES, RemovalPoint, read_removal
from headscan.analysis.store.store import Store
from headscan.cluster.tasks.pool import Pool
from headscan.errors import InterventionError
from headscan.grid import Head, HeadGrid
from headscan.pipelines.ablate_labelled.masked_importance import MaskedItem, mean_importance
from headscan.pipelines.ablate_labelled.run_arms import LabelledConfig, LabelledRun
from headscan.pipelines.ablate_labelled.site_arms import WITHOUT_ABLATION, SiteArm, SiteHeads, heads_of
from headscan.pipelines.labelled.example_file import DataSpec
from headscan.pipelines.labelled.labelled_texts import read_labelled
from headscan.pipelines.runs.identity import fingerprint, identify
from headscan.pipelines.runs.run_context import RunContext

#: Importance as it is, or divided by its l2 norm over the heads of a layer.
CRITERIA = ("importance_ln", "importance")


@dataclass(frozen=True)
class RemovalPlan:
    """Settings of an iterative removal.

    Attributes:
        by: Importance that orders the heads, least first.
        steps: Number of steps; each removes the same share, and the last one all heads of a site.
        rescore: Measure the importance again after each step, with the removed heads ablated.
        rank_data: Examples that order the heads; None uses one half of the examples and judges on the other.

    Raises:
        InterventionError: A setting is unknown or out of range.
    """

    by: str = CRITERIA[0]
    steps: int = 10
    rescore: bool = False
    rank_data: DataSpec | None = None

    def __post_init__(self) -> None:
        if self.by not in CRITERIA:
            raise InterventionError(f"unknown importance {self.by!r}. Choose {' or '.join(CRITERIA)}")
        if self.steps < 1:
            raise InterventionError(f"steps={self.steps} (limit 1). Raise `steps`")


def remove_iteratively(
    config: LabelledConfig,
    plan: RemovalPlan,
    store: Store,
    pool: Pool,
    *,
    context: RunContext | None = None,
    resume_anyway: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[str, list[RemovalPoint]]:
    """Remove the heads of each site step by step, and measure the metric after each step.

    Models with several sites also have a curve of all sites together.

    Args:
        context: Identity and facts of the model; None computes them.
        resume_anyway: Resume even if the software or the device changed; both are recorded.

    Returns:
        The id of the run, and its points by site and step.

    Raises:
        ExampleError: A file cannot be read, or a label is no class of the model.
        InterventionError: The targets do not have the metric.
        HeadscanError: The run fails; finished arms stay in the store.
    """
    context = RunContext(identify(config.model), pool) if context is None else context
    texts = read_labelled(config.data, config.model, context.identity, config.max_tokens)
    if plan.rank_data is None:
        ranking, judging = texts.halves()
    else:
        ranking = read_labelled(plan.rank_data, config.model, context.identity, config.max_tokens).texts
        judging = texts.texts
    ranked_by = fingerprint({"texts": [(text.ids, text.target_ids) for text in ranking]})
    settings = {"iterative": {**asdict(plan), "rank_data": ranked_by}}
    run = LabelledRun(config, texts, judging, store, pool, context, settings, resume_anyway, say)
    item = MaskedItem(ranking, texts.answers, (), config.batch_tokens, context.identity.rope_lengths)
    removal = _Removal(plan, run, item, context.facts.grid)
    names = [removal.name(site, step) for site in removal.curves for step in range(1, plan.steps + 1)]
    say(f"{len(names) + 1} arms on {len(judging)} examples; {len(ranking)} examples order the heads")
    with run.opened([WITHOUT_ABLATION.name, *names]) as run_id:
        run.answer([WITHOUT_ABLATION])
        removal.answer()
    return run_id, read_removal(store, run_id)


@dataclass
class _Removal:
    """A removal in progress."""

    plan: RemovalPlan
    run: LabelledRun
    item: MaskedItem
    grid: HeadGrid

    @property
    def curves(self) -> dict[str, tuple[str, ...]]:
        """Kinds of sites of each curve."""
        kinds = self.grid.kinds
        return {**{kind: (kind,) for kind in kinds}, **({ALL_SITES: kinds} if len(kinds) > 1 else {})}

    def name(self, site: str, step: int) -> str:
        """Return the name of an arm."""
        return f"{site} step {step} of {self.plan.steps}"

    def answer(self) -> None:
        """Answer with every step of every curve."""
        known = self.run.stored_arms(self.run.run_id)
        first: Mapping[str, np.ndarray] | None = None
        arms: list[SiteArm] = []
        for site, kinds in self.curves.items():
            removed: SiteHeads = ()
            for step in range(1, self.plan.steps + 1):
                stored = known.get(self.name(site, step))
                if stored is not None:  # the heads of an interrupted run stay as they are
                    removed = heads_of(stored["sites"])
                else:
                    if first is None:
                        first = self._importance(())
                    again = self.plan.rescore and removed
                    removed = self._next(kinds, step, removed, self._importance(removed) if again else first)
                arms.append(self._arm(site, kinds, step, removed))
                if self.plan.rescore:
                    self.run.answer(arms)
                    arms = []
        self.run.answer(arms)

    def _importance(self, removed: SiteHeads) -> Mapping[str, np.ndarray]:
        item = MaskedItem(self.item.texts, self.item.answers, removed, self.item.batch_tokens, self.item.rope)
        return mean_importance(self.run.pool, item)

    def _next(
        self, kinds: tuple[str, ...], step: int, removed: SiteHeads, importance: Mapping[str, np.ndarray]
    ) -> SiteHeads:
        """Return the removed heads of a step: those of the step before, and the least important others."""
        gone = {(kind, head) for kind, heads in removed for head in heads}
        left = [(kind, head) for kind in kinds for head in self.grid.at(kind).heads() if (kind, head) not in gone]
        tables = {kind: _normalised(importance[kind], self.plan.by) for kind in kinds}
        order = sorted(left, key=lambda each: (tables[each[0]][each[1]], kinds.index(each[0]), each[1]))
        total = len(gone) + len(left)
        chosen = gone | set(order[: round(step * total / self.plan.steps) - len(gone)])
        by_kind = {kind: tuple(sorted(head for of, head in chosen if of == kind)) for kind in kinds}
        return tuple((kind, heads) for kind, heads in by_kind.items() if heads)

    def _arm(self, site: str, kinds: tuple[str, ...], step: int, removed: SiteHeads) -> SiteArm:
        count = sum(len(heads) for _, heads in removed)
        share = count / sum(self.grid.at(kind).total_heads for kind in kinds)
        details = (("curve", site), ("step", step), ("removed", count), ("site_share", share))
        return SiteArm(self.name(site, step), removed, details)


def _normalised(importance: np.ndarray, by: str) -> Mapping[Head, float]:
    """Return the values by head; NaN becomes infinite, so that it is removed last."""
    table = importance
    if by == CRITERIA[0]:
        norms = np.sqrt(np.nansum(table**2, axis=1, keepdims=True))
        table = np.divide(table, norms, out=np.zeros_like(table), where=norms > 0)
    return {
        Head(layer, head): float(value) for (layer, head), value in np.ndenumerate(np.nan_to_num(table, nan=np.inf))
    }
