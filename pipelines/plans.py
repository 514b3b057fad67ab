"""Loss of plans by method and budget, on texts and prompts that neither ranked heads nor chose between plans.

    python pipelines/plans.py [--model demo --corpus FOLDER --judge CORPUS,CORPUS --windows 12,15,18,21]
    python pipelines/plans.py --by-layer [--sink 0]

The measured plan is compared with those by ``retrieval_score`` and ``distant_mass``, the lowest estimates without a
search, and a random plan, on the same texts and prompts: differences of the loss with their 95 % intervals (t, over
texts or prompts), and the number of KV heads that have a window in one of the two plans alone. With ``--by-layer``
plans by layer are rows as well: the cost of whole layers at equal bytes. With ``--store`` a stopped call resumes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from headscan.catalog import MassWidths
from headscan.cluster.placements import WholePlacement
from headscan.cluster.pool import InProcessPool
from headscan.engine.prompt_losses import ALL_KEYS, PromptPool, Prompts, recall_prompts, text_prompts
from headscan.measure.probe_settings import BehaviourProbe
from headscan.model_spec import ModelSpec
from headscan.plans import (
    HeadPlan,
    PlanMethod,
    PlannedModel,
    WindowHeads,
    allocate,
    make_plan,
    random_plan,
    random_scores,
)
from headscan.runs.model_identity import fingerprint
from headscan.runs.progress import Progress
from headscan.runs.run_context import Run
from headscan.steps.plan import Plan
from headscan.steps.probe import Probe
from headscan.steps.run_plan import model_to_plan, run_plan
from headscan.steps.scan import Scan
from headscan.store.store import Store
from headscan.text_tables import text_table
from headscan.texts import CorpusSpec, TokenConfig
from headscan.windows import KeptKeys

#: The plan that is compared with all others.
MEASURED = "measured"
_BY_SCORE: tuple[PlanMethod, ...] = ("distant_mass", "retrieval_score")
#: Plans by layer are made by measured damage, by chance, and by this score.
_LAYER_SCORE: PlanMethod = "distant_mass"
#: Seed of the judged prompts; plans are measured with seed 0.
_JUDGE_SEED = 1


@dataclass(frozen=True)
class PlanLoss:
    """The loss that a plan adds on one kind of texts or prompts, in nats per scored token.

    Attributes:
        windows: Number of KV heads with a window.
        judged_on: Name of the texts or prompts; ``prompts`` is their number.
        minus_measured: Difference to the measured plan, with the ends of its 95 % interval.
        heads_differ: Number of KV heads that have a window here and none in the measured plan.
    """

    windows: int
    judged_on: str
    prompts: int
    plan: str
    loss: float
    minus_measured: tuple[float, float, float]
    heads_differ: int


def main() -> None:
    options = _options()
    spec = ModelSpec(options.model, "float32")
    config = Plan(
        spec,
        method="measured",
        corpus=CorpusSpec(options.corpus),
        sink=options.sink,
        recent=(options.recent,),
        max_tokens=options.tokens,
        sequences=options.sequences,
        recall_prompts=options.recall_prompts,
    )
    with (
        InProcessPool(spec, WholePlacement(1, options.device, options.threads)) as pool,
        tempfile.TemporaryDirectory() as folder,
    ):
        run = Run(spec, Store(options.store or Path(folder) / "s.duckdb"), lambda _: pool, batch_tokens=2048)
        rows = losses_of_plans(run, config, options)
    print("\n" + text_table([_cells(row) for row in rows]))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


def _cells(row: PlanLoss) -> dict[str, object]:
    value, low, high = row.minus_measured
    return {
        "windows": row.windows,
        "judged on": f"{row.judged_on} ({row.prompts})",
        "plan": row.plan,
        "loss increase": f"{row.loss:+.4f}",
        "minus measured [95 %]": f"{value:+.4f} [{low:+.4f}, {high:+.4f}]",
        "heads differ": row.heads_differ,
    }


def losses_of_plans(run: Run, config: Plan, options: argparse.Namespace) -> list[PlanLoss]:
    """Return the loss of each plan on unseen texts and prompts, by number of windows."""
    counts = options.windows
    if options.by_layer:
        counts = sorted({whole_layers(model_to_plan(run), count) for count in counts})
    plans = plans_by_budget(run, config, counts, by_layer=options.by_layer)
    rows = []
    for prompts in judged_prompts(run, config, options):
        sets = [ALL_KEYS, *(kept for named in plans.values() for kept in named.values())]
        record = run.record(
            "plan",
            fingerprint({"judged": prompts.content_hash, "model": run.identity.fingerprint()}),
            config={},
            corpus=prompts.name,
            corpus_hash=prompts.content_hash,
        )
        total = len(sets) * len(prompts.requests)
        with run.resumable_numbers(record) as known, Progress(f"plans on {prompts.name}", total, "prompts") as progress:
            pool = PromptPool(run.pool, run.batch_tokens, known=known, progress=progress)
            nats, _ = pool.losses(prompts.requests, sets)
        lost = iter(nats[1:] - nats[:1])
        for count, named in plans.items():
            found = {name: next(lost) for name in named}
            for name, values in found.items():
                difference = values - found[MEASURED]
                rows.append(
                    PlanLoss(
                        count,
                        prompts.name,
                        len(prompts.requests),
                        name,
                        float(values.mean()),
                        (float(difference.mean()), *interval(difference)),
                        len(places(named[name]) - places(named[MEASURED])),
                    )
                )
    return rows


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--corpus", default="python-stdlib", help="texts that rank heads and choose plans")
    parser.add_argument(
        "--judge",
        type=lambda text: text.split(","),
        default=["python-stdlib-heldout"],
        help="corpora of unseen texts, comma-separated",
    )
    parser.add_argument(
        "--windows",
        type=lambda text: [int(count) for count in text.split(",")],
        default=[6, 9, 12, 15, 18, 21],
        help="numbers of window heads, comma-separated",
    )
    parser.add_argument(
        "--by-layer",
        action="store_true",
        help="also plans by layer, with numbers of windows that are rounded to whole layers",
    )
    parser.add_argument("--sink", type=int, default=4, help="first tokens of a window; serving engines keep 0")
    parser.add_argument("--recent", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a text and of a prompt")
    parser.add_argument("--sequences", type=int, default=64, help="texts of a measurement, half of them held out")
    parser.add_argument("--recall-prompts", type=int, default=32, help="prompts of each recall task, half held out")
    parser.add_argument("--judged-texts", type=int, default=96)
    parser.add_argument("--judged-prompts", type=int, default=32, help="prompts of each recall task, a multiple of 8")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, help="cpu, cuda, cuda:1 (default: a GPU if there is one)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--store", type=Path, help="keeps what is measured, and resumes")
    parser.add_argument("--json", type=Path, help="file of the rows")
    return parser.parse_args()


def plans_by_budget(
    run: Run, config: Plan, counts: Sequence[int], *, by_layer: bool = False
) -> dict[int, dict[str, KeptKeys]]:
    """Return the windows of each method by number of windows; all methods read the same texts."""
    (window,) = config.windows
    # Distant mass needs a sink of one key; its plans get the same windows as all others.
    sink, recent = max(window.sink, 1), window.recent
    tokens = TokenConfig(config.max_tokens, "chunk", min_tokens=window.covers + 1, limit_sequences=config.sequences)
    found: dict[int, dict[str, KeptKeys]] = {}
    assert config.corpus is not None
    Scan(run.model, config.corpus, tokens, widths=MassWidths(sink, recent)).execute(run)
    Probe(run.model, ("retrieval_score",), config.corpus, BehaviourProbe(lengths=(512,))).execute(run)
    unsearched = run_plan(replace(config, search=False), run, WindowHeads(counts[0]))
    candidates = [head for head in unsearched.heads if head.score is not None]
    estimated = [(head.layer, head.kv_head) for head in sorted(candidates, key=lambda head: head.keep_score)]
    for count in counts:
        budget, start = WindowHeads(count), time.perf_counter()
        measured = run_plan(config, run, budget)
        run.say(f"{count} windows: measured in {time.perf_counter() - start:.0f} s; {measured.notes[0]}")
        options: dict[str, Any] = {"budget": budget, "sink": sink, "recent": recent}
        by_score: dict[str, HeadPlan] = {name: make_plan(run.store, None, method=name, **options) for name in _BY_SCORE}
        plans = {MEASURED: measured, **by_score, "random, seed 0": random_plan(measured, 0)}
        if by_layer:
            start = time.perf_counter()
            layers = run_plan(replace(config, unit="layer"), run, budget)
            run.say(f"{count} windows, by layer: {time.perf_counter() - start:.0f} s; {layers.notes[0]}")
            plans |= {f"{MEASURED} by layer": layers, "random by layer, seed 0": random_plan(layers, 0)}
            of_layers = make_plan(run.store, None, method=_LAYER_SCORE, granularity="layer", **options)
            plans[f"{_LAYER_SCORE} by layer"] = of_layers
        found[count] = {
            name: KeptKeys.of([(*place, window) for place in plan.window_heads]) for name, plan in plans.items()
        }
        found[count]["estimates alone"] = KeptKeys.of([(*place, window) for place in estimated[:count]])
    return found


def whole_layers(model: PlannedModel, count: int) -> int:
    """Return the number of windows on whole layers that is nearest to a wanted one."""
    return len(allocate(random_scores(model, 0, granularity="layer"), WindowHeads(count)).window_heads)


def judged_prompts(run: Run, config: Plan, options: argparse.Namespace) -> list[Prompts]:
    """Return the unseen texts of each corpus, and unseen recall prompts."""
    width = config.windows[-1].width
    texts = [
        text_prompts(CorpusSpec(name), run.identity, options.tokens, options.judged_texts, width)
        for name in options.judge
    ]
    return [*texts, *recall_prompts(run.identity, options.tokens, options.judged_prompts, _JUDGE_SEED)]


def interval(differences: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of a mean difference."""
    half = stats.t.ppf(0.975, len(differences) - 1) * stats.sem(differences)
    return float(differences.mean() - half), float(differences.mean() + half)


def places(kept: KeptKeys) -> set[tuple[int, int]]:
    """Return the KV heads with a window."""
    return {(layer, kv_head) for layer, kv_head, _ in kept.windows}


if __name__ == "__main__":
    main()
