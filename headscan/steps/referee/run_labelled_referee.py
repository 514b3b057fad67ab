"""A referee on labelled examples: criteria remove heads of each site of a classifier or encoder-decoder.

With one criterion, importance, and all sites together it is the removal of arXiv 1905.10650. Heads are ablated: their
outputs are zero. The same command again resumes.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from headscan.ablation.intervention import intervene
from headscan.ablation.masks import HeadMask, SiteMask
from headscan.catalog import EFFECT, IMPORTANCES, RANDOM, head_count
from headscan.cluster.pool import Pool
from headscan.engine.arms import BASELINE, Arm, site_arm
from headscan.errors import NotFiniteError
from headscan.gradients.losses import Loss
from headscan.grid import Head, HeadGrid
from headscan.long_work import KnownNumbers
from headscan.models.loaded_model import LoadedModel
from headscan.models.model_facts import UNVARYING, RopeLengths
from headscan.models.token_batches import run_halving, whole_batches
from headscan.pruning.head_values import criterion_inputs, criterion_values
from headscan.runs.model_identity import fingerprint
from headscan.runs.run_context import Run
from headscan.settings.evaluation_settings import TaskConfig
from headscan.steps.referee.referee_step import Referee
from headscan.steps.run_evaluation import Purpose, run_evaluation
from headscan.text_tables import counted
from headscan.texts.example_questions import ExampleQuestions
from headscan.texts.labelled_texts import Answers, LabelledText, labelled_loss, read_labelled
from headscan.texts.tasks import Questions
from headscan.verdicts.criterion_points import ALL_SITES, SitePoint, read_site_points

#: Examples of one item of a pool.
_ITEM_EXAMPLES = 256
#: Sums over examples and numbers of examples (2, L, H), by site and measure.
Totals = dict[tuple[str, str], Tensor]
#: Values (L, H) by criterion and site; the heads with the smallest ones are removed first.
SiteValues = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class ValuesItem:
    """Examples on which criteria are measured, scores, importances and ``effect``, while heads are ablated."""

    texts: tuple[LabelledText, ...]
    answers: Answers
    names: tuple[str, ...]
    intervention: SiteMask
    batch_tokens: int
    rope: RopeLengths = UNVARYING

    @property
    def name(self) -> str:
        return f"values from example {self.texts[0].index}"


def site_values(pool: Pool, item: ValuesItem) -> SiteValues:
    """Return the means over the examples of every head's values, by criterion. ``effect`` is the change of the loss,
    with its sign: heads that do harm are removed first.
    """
    starts = range(0, len(item.texts), _ITEM_EXAMPLES)
    items = [replace(item, texts=item.texts[start : start + _ITEM_EXAMPLES]) for start in starts]
    totals_by_item = {done.item.name: done.value for done in pool.map(total_values, items)}
    total: Totals = {}
    for each in items:  # a sum depends on its order
        _add(total, totals_by_item[each.name])
    means: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for (site, measure), (sums, counts) in total.items():
        means[site][measure] = sums / counts
    return {name: {site: criterion_values(name, of_site) for site, of_site in means.items()} for name in item.names}


def total_values(lm: LoadedModel, item: ValuesItem) -> Totals:
    """Pool task: sum what the criteria measure over examples."""
    lengths = [text.longest for text in item.texts]
    has_importance = any(name in IMPORTANCES for name in item.names)

    def measure(rows: list[int]) -> Totals:
        loss = labelled_loss(lm, item.answers, [item.texts[row] for row in rows])
        sums: Totals = {}
        effects = _effects(lm, loss) if EFFECT in item.names else ()
        for site, name, values_BLH in chain(
            criterion_inputs(lm, loss.texts, loss if has_importance else None, item.names), effects
        ):
            values = values_BLH.double()  # all are finite, or NaN where a layer lacks the head or by definition
            sums[site, name] = torch.stack([values.nansum(0), (~values.isnan()).sum(0)])
        return sums

    total: Totals = {}
    with intervene(lm, item.intervention):
        for batch in whole_batches(lengths, item.batch_tokens, item.rope.group):
            for _, sums in run_halving(list(batch.sequence_indices), measure, lengths, lm.limits["importance"]):
                _add(total, sums)
    return total


def _add(total: Totals, part: Totals) -> None:
    for key, table in part.items():
        total[key] = total[key] + table if key in total else table


@torch.no_grad()
def _effects(lm: LoadedModel, loss: Loss) -> Iterator[tuple[str, str, Tensor]]:
    """Yield how much the losses grow when each head alone is ablated, as `measured` yields other criteria."""
    before = loss.losses(lm).cpu()
    for kind in lm.grid.kinds:
        grid = lm.grid.at(kind)
        growth = torch.full((len(before), *grid.shape), float("nan"), dtype=torch.float64)
        for head in grid.heads():
            with intervene(lm.at(kind), HeadMask([Head(*head)])):
                grown = (loss.losses(lm).cpu() - before).double()
            if wrong := int((~grown.isfinite()).sum()):
                raise NotFiniteError(
                    f"NaN or infinite losses with or without head {head.layer}:{head.head}, {kind} attention: {wrong}"
                    f" of {grown.numel()} (limit 0). Load the model in another dtype"
                )
            growth[:, head.layer, head.head] = grown
        yield kind, EFFECT, growth


#: A head of a site.
SiteHead = tuple[str, Head]


class LabelledRefereeResult(NamedTuple):
    """The run of a finished referee on labelled examples, and the points of its curves."""

    run_id: str
    points: list[SitePoint]


def run_labelled_referee(config: Referee, run: Run) -> LabelledRefereeResult:
    """Remove heads of each site by every criterion, and measure the metric at every share. Models with several sites
    also have curves of all sites together.
    """
    assert config.data is not None
    compared, longest = config.compared, config.texts.max_tokens
    texts = read_labelled(config.data, run.model, run.identity, longest)
    if config.rank_data is None:
        ranking, judging = texts.halves()
    else:
        ranking = read_labelled(config.rank_data, run.model, run.identity, longest).texts
        judging = texts.texts
    # Criteria and shares are in the names of the arms, so that more of them join the run. Heads that are measured
    # again after each share depend on the other shares.
    path = sorted(compared.shares) if compared.iterative else None
    ranked_by = fingerprint({"texts": [text.tokens for text in ranking]})
    examples = ExampleQuestions(replace(texts, texts=judging), config.metric, run.identity.max_tokens)
    questions = Questions(TaskConfig(), None, run.identity, examples=examples)
    item = ValuesItem(ranking, texts.answers, (), SiteMask({}), run.batch_tokens, run.identity.rope_lengths)
    curves = list(_curves(config, run.facts.grid))
    names = {curve.name(share) for curve in curves for share in compared.shares}
    run.say(
        f"{', '.join(config.criteria)}: {len(names) + 1} arms on {counted(len(judging), 'example')}; order of the heads"
        f" from {counted(len(ranking), 'example')}"
    )
    facts = {"ranked_by": ranked_by, "batch_tokens": run.batch_tokens}
    record = run.record(
        "prune",
        run.fingerprint(facts),
        config={"model": asdict(run.model), **facts},
        bos_policy=None,
        corpus=config.data.name,
        corpus_hash=ranked_by,
    )
    with run.resumable_numbers(record) as known:
        arms = _arms(curves, config, run, item, known, path)
    purpose = Purpose("ablate", {"referee": {"ranked_by": ranked_by, "iterative": path}}, judges_arms=False)
    run_id = run_evaluation(config, run, [BASELINE, *arms], questions=questions, purpose=purpose)
    points = read_site_points(run.store, run_id)
    shown = [point for point in points if _arm_name(*point.curve, point.site, point.share) in names]
    return LabelledRefereeResult(run_id, shown)


@dataclass(frozen=True)
class _Curve:
    """A criterion that removes the heads of a site, or a random order of them, which has a seed."""

    criterion: str
    seed: int | None
    site: str
    heads: tuple[SiteHead, ...]

    def name(self, share: float) -> str:
        return _arm_name(self.criterion, "" if self.seed is None else f"seed {self.seed}", self.site, share)

    def first(self, count: int, gone: Sequence[SiteHead], values: SiteValues) -> tuple[SiteHead, ...]:
        """Return the heads of ``gone``, and those that the criterion removes next."""
        known = set(gone)
        left = [head for head in self._order(values) if head not in known]
        return (*gone, *left[: count - len(gone)])

    def _order(self, values: SiteValues) -> list[SiteHead]:
        if self.seed is not None:
            return random.Random(self.seed).sample(self.heads, len(self.heads))

        def value(head: SiteHead) -> float:
            number = float(values[self.criterion][head[0]][head[1]])
            return math.inf if math.isnan(number) else number  # heads without a value go last

        return sorted(self.heads, key=value)

    def arm(self, share: float, heads: Sequence[SiteHead]) -> Arm:
        settings = {"criterion": self.criterion, "seed": self.seed, "curve": self.site, "share": share}
        return site_arm(self.name(share), _mask(heads), settings)


def _mask(heads: Sequence[SiteHead]) -> SiteMask:
    sites: dict[str, list[Head]] = defaultdict(list)
    for site, head in heads:
        sites[site].append(head)
    return SiteMask(sites)


def _arm_name(criterion: str, seed: str, site: str, share: float) -> str:
    return f"{criterion}{f' {seed}' if seed else ''}, {100 * share:g}% of {site}"


def _curves(config: Referee, grid: HeadGrid) -> Iterator[_Curve]:
    """Yield the curves of every criterion and site, then those of random orders."""
    sites: dict[str, tuple[str, ...]] = {kind: (kind,) for kind in grid.kinds}
    if len(sites) > 1:
        sites[ALL_SITES] = grid.kinds
    orders = [(name, None) for name in config.criteria] + [(RANDOM, seed) for seed in range(config.compared.controls)]
    for criterion, seed in orders:
        for site, kinds in sites.items():
            yield _Curve(criterion, seed, site, tuple((kind, head) for kind in kinds for head in grid.at(kind).heads()))


def _arms(
    curves: Sequence[_Curve],
    config: Referee,
    run: Run,
    item: ValuesItem,
    known: KnownNumbers,
    path: Sequence[float] | None,
) -> list[Arm]:
    """Return the arms of all curves, by growing share; heads that are ``known`` are not chosen again. With iterations,
    ``path`` has the shares before which heads are measured again.
    """
    shares, kinds = sorted(config.compared.shares), run.facts.grid.kinds
    keys = {(curve, share): ("heads of a criterion", curve.name(share), path) for curve in curves for share in shares}
    missing = {curve.criterion for (curve, _), key in keys.items() if known.get(key) is None}
    values: SiteValues = {}
    if names := tuple(name for name in config.criteria if name in missing):
        run.say(f"measuring {', '.join(names)}")
        values = site_values(run.pool, replace(item, names=names))
    arms: dict[float, list[Arm]] = {share: [] for share in shares}
    for curve in curves:
        removed: tuple[SiteHead, ...] = ()
        for share in shares:
            key = keys[curve, share]
            if (stored := known.get(key)) is not None:
                chosen = stored.astype(int).reshape(-1, 3).tolist()
                removed = tuple((kinds[site], Head(layer, head)) for site, layer, head in chosen)
            else:
                now = values
                if path is not None and removed and curve.seed is None:
                    run.say(f"measuring {curve.criterion} without {counted(len(removed), 'head')} of {curve.site}")
                    now = site_values(run.pool, replace(item, names=(curve.criterion,), intervention=_mask(removed)))
                removed = curve.first(head_count(share, len(curve.heads)), removed, now)
                known.add(key, [(kinds.index(site), *head) for site, head in removed])
            arms[share].append(curve.arm(share, removed))
    return [arm for of_share in arms.values() for arm in of_share]
