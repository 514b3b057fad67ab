"""A referee on labelled examples: criteria remove heads of each site of a classifier or encoder-decoder.

With one criterion, importance, and all sites together it is the removal of arXiv 1905.10650. Heads are ablated: their
outputs are zero. The same command again resumes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from headscan.analysis.criteria.site_points import ALL_SITES, RANDOM, SitePoint, read_site_points
from headscan.analysis.store.store import Store
from headscan.cluster.tasks.pool import Pool
from headscan.errors import unknown_name
from headscan.grid import Head, HeadGrid
from headscan.pipelines.ablate_labelled.run_arms import LabelledConfig, LabelledRun
from headscan.pipelines.ablate_labelled.site_arms import WITHOUT_ABLATION, SiteArm, SiteHeads, heads_of
from headscan.pipelines.labelled.example_file import DataSpec
from headscan.pipelines.labelled.labelled_texts import LabelledTexts, read_labelled
from headscan.pipelines.referee.choose_heads import MEASURED
from headscan.pipelines.referee.comparison import Comparison, head_count
from headscan.pipelines.referee.site_values import SiteValues, ValuesItem, site_values
from headscan.pipelines.runs.identity import fingerprint, identify
from headscan.pipelines.runs.run_context import RunContext

#: A head of a site.
SiteHead = tuple[str, Head]


@dataclass(frozen=True)
class SiteRefereeConfig:
    """Settings of a referee on labelled examples.

    Attributes:
        judging: Model, examples and metric.
        compared: Criteria, shares and random orders; all heads of a site may go.
        rank_data: Examples that order the heads; None uses one half of the examples and judges on the other.

    Raises:
        UnknownNameError: A criterion is not measured on labelled examples.
    """

    judging: LabelledConfig
    compared: Comparison
    rank_data: DataSpec | None = None

    def __post_init__(self) -> None:
        for name in self.compared.criteria:
            if name not in MEASURED:
                raise unknown_name("criterion of labelled examples", name, MEASURED)


def site_referee(
    config: SiteRefereeConfig,
    store: Store,
    pool: Pool,
    *,
    context: RunContext | None = None,
    texts: LabelledTexts | None = None,
    resume_anyway: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[str, list[SitePoint]]:
    """Remove heads of each site by every criterion, and measure the metric at every share.

    Models with several sites also have curves of all sites together.

    Args:
        context: Identity and facts of the model; None computes them.
        texts: The examples; None reads the file.
        resume_anyway: Resume even if the software or the device changed; both are recorded.

    Returns:
        The id of the run, and its points.

    Raises:
        ExampleError: A file cannot be read, or a label is no class of the model.
        InterventionError: The targets do not have the metric.
        HeadscanError: The run fails; finished arms stay in the store.
    """
    judged, compared = config.judging, config.compared
    context = RunContext(identify(judged.model), pool) if context is None else context
    if texts is None:
        texts = read_labelled(judged.data, judged.model, context.identity, judged.max_tokens)
    if config.rank_data is None:
        ranking, judging = texts.halves()
    else:
        ranking = read_labelled(config.rank_data, judged.model, context.identity, judged.max_tokens).texts
        judging = texts.texts
    # Criteria and shares are in the names of the arms, so that more of them join the run. Heads that are measured
    # again after each share depend on the other shares.
    path = sorted(compared.shares) if compared.iterative else None
    ranked_by = fingerprint({"texts": [(text.ids, text.target_ids) for text in ranking]})
    settings = {"referee": {"ranked_by": ranked_by, "iterative": path}}
    run = LabelledRun(judged, texts, judging, store, pool, context, settings, resume_anyway, say)
    item = ValuesItem(ranking, texts.answers, (), (), judged.batch_tokens, context.identity.rope_lengths)
    curves = list(_curves(compared, context.facts.grid))
    names = [curve.name(share) for curve in curves for share in compared.shares]
    say(f"{len(names) + 1} arms on {len(judging)} examples; {len(ranking)} examples order the heads")
    with run.opened([WITHOUT_ABLATION.name, *names]) as run_id:
        run.answer([WITHOUT_ABLATION])
        run.answer(_arms(curves, compared, run, item))
    points = read_site_points(store, run_id)
    return run_id, [point for point in points if _name(*point.curve, point.site, point.share) in set(names)]


@dataclass(frozen=True)
class _Curve:
    """A criterion that removes the heads of a site.

    Attributes:
        seed: Seed of a random order; None for all others.
        heads: All heads of the site.
    """

    criterion: str
    seed: int | None
    site: str
    heads: tuple[SiteHead, ...]

    def name(self, share: float) -> str:
        """Return the name of an arm."""
        return _name(self.criterion, "" if self.seed is None else f"seed {self.seed}", self.site, share)

    def first(self, count: int, gone: Sequence[SiteHead], values: SiteValues) -> tuple[SiteHead, ...]:
        """Return the heads of ``gone``, and those that the criterion removes next."""
        known = set(gone)
        left = [each for each in self._order(values) if each not in known]
        return (*gone, *left[: count - len(gone)])

    def _order(self, values: SiteValues) -> list[SiteHead]:
        if self.seed is not None:
            return random.Random(self.seed).sample(self.heads, len(self.heads))

        def value(each: SiteHead) -> float:
            found = float(values[self.criterion][each[0]][each[1]])
            return math.inf if math.isnan(found) else found  # heads without a value go last

        return sorted(self.heads, key=value)

    def arm(self, share: float, heads: Sequence[SiteHead]) -> SiteArm:
        """Return the arm that ablates heads."""
        sites = dict.fromkeys(site for site, _ in self.heads)
        removed = {site: tuple(sorted(head for of, head in heads if of == site)) for site in sites}
        chosen = tuple((site, of_site) for site, of_site in removed.items() if of_site)
        details = (("criterion", self.criterion), ("seed", self.seed), ("curve", self.site), ("share", share))
        return SiteArm(self.name(share), chosen, details)


def _name(criterion: str, seed: str, site: str, share: float) -> str:
    return f"{criterion}{f' {seed}' if seed else ''}, {100 * share:g}% of {site}"


def _curves(compared: Comparison, grid: HeadGrid) -> Iterator[_Curve]:
    """Yield the curves of every criterion and site, then those of random orders."""
    sites: dict[str, tuple[str, ...]] = {kind: (kind,) for kind in grid.kinds}
    if len(sites) > 1:
        sites[ALL_SITES] = grid.kinds
    orders = [(name, None) for name in compared.criteria] + [(RANDOM, seed) for seed in range(compared.seeds)]
    for criterion, seed in orders:
        for site, kinds in sites.items():
            yield _Curve(criterion, seed, site, tuple((kind, head) for kind in kinds for head in grid.at(kind).heads()))


def _arms(curves: Sequence[_Curve], compared: Comparison, run: LabelledRun, item: ValuesItem) -> list[SiteArm]:
    """Return the arms of all curves, by growing share; the heads of stored arms stay as they are."""
    stored = {name: heads_of(arm["sites"]) for name, arm in run.stored_arms(run.run_id).items()}
    shares = sorted(compared.shares)
    missing = {curve.criterion for curve in curves for share in shares if curve.name(share) not in stored}
    names = tuple(name for name in compared.criteria if name in missing)
    values: SiteValues = {}
    if names:
        run.say(f"measuring {', '.join(names)}")
        values = site_values(run.pool, replace(item, names=names))
    arms: dict[float, list[SiteArm]] = {share: [] for share in shares}
    for curve in curves:
        removed: tuple[SiteHead, ...] = ()
        for share in shares:
            known = stored.get(curve.name(share))
            if known is not None:
                removed = tuple((site, head) for site, heads in known for head in heads)
            else:
                now = values
                if compared.iterative and removed and curve.seed is None:
                    run.say(f"measuring {curve.criterion} without {len(removed)} heads of {curve.site}")
                    now = site_values(run.pool, replace(item, names=(curve.criterion,), heads=_by_site(removed)))
                removed = curve.first(head_count(share, len(curve.heads)), removed, now)
            arms[share].append(curve.arm(share, removed))
    return [arm for of_share in arms.values() for arm in of_share]


def _by_site(heads: Sequence[SiteHead]) -> SiteHeads:
    sites = dict.fromkeys(site for site, _ in heads)
    return tuple((site, tuple(head for of, head in heads if of == site)) for site in sites)
