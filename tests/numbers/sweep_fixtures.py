"""A synthetic sweep: rules, masks and random arms at several shares, whose losses are known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from headscan.catalog import SCORES
from headscan.store.store import Store
from tests.numbers.plan_fixtures import evaluation_record
from tests.stores import arm_record

BASELINE = 0.7
RECALL_TASKS = ("needle@512", "needle@1024", "copying@512")

#: Questions of each recall task: enough to show that recall is kept, also on the part that judges a selected arm.
RECALL_QUESTIONS = 240

#: The mark of a sweep's arms.
SWEPT = {"swept": True}


def realised(score: str | None, share: float) -> float:
    """A rule's measured share differs from its quantile, for each score differently."""
    return share if score is None else share * (0.75 + 0.04 * list(SCORES).index(score))


def lost(kind: str, score: str | None, share: float) -> float:
    """Share of the benchmark's answers, 0 to 1, that an arm gets wrong and the baseline right: later scores lose more.

    Random heads lose twice as much as the worst score, masks a little more than rules.
    """
    rank = 2 * len(SCORES) if score is None else 1 + list(SCORES).index(score)
    return min(BASELINE, (1.2 if kind.endswith("mask") else 1.0) * rank * share**2 / 2)


def write_sweep(
    store: Store,
    *,
    scores: Sequence[str] = tuple(SCORES),
    shares: Sequence[float] = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3),
    kinds: Sequence[str] = ("rule", "mask"),
    seeds: int = 2,
    questions: int = 2000,
    recall: bool = True,
) -> str:
    """An evaluate run with one arm per kind, score and share, and ``seeds`` random ones per kind and share."""
    begun = evaluation_record(store, "sweep")
    rng = np.random.default_rng(0)
    tasks = ["sums"] * questions + [task for task in RECALL_TASKS * recall for _ in range(RECALL_QUESTIONS)]
    baseline = rng.random(len(tasks)) < BASELINE
    in_benchmark = np.arange(len(tasks)) < questions
    # One opening of the file for all arms: the store's own methods open it for each.
    with store.one_transaction():
        run_id = store.begin_run(begun).run_id
        records = [arm_record(run_id, "baseline", "baseline")]
        for kind in kinds:
            for share in shares:
                for score in scores:
                    name = f"{kind} {score} {share:.0%}"
                    records.append(arm_record(run_id, name, kind, criterion=score, share=share, config=SWEPT))
                for seed in range(seeds):
                    name = f"random {kind} {share:.0%} seed {seed}"
                    drawn = arm_record(run_id, name, f"random_{kind}", share=share, seed=seed, config=SWEPT)
                    records.append(drawn)
        for record in records:
            share = record.share or 0.0
            correct = baseline.copy()
            for part, factor in ((in_benchmark, 1.0), (~in_benchmark, 4.0)):
                right = np.flatnonzero(baseline & part)
                wrong = round(
                    factor * (lost(record.kind, record.criterion, share) + 0.01 * (record.seed or 0)) * part.sum()
                )
                correct[rng.choice(right, min(wrong, len(right)), replace=False)] = False
            answers = {
                "task": tasks,
                "question": np.arange(len(tasks)),
                "recall": ~in_benchmark,
                "correct": correct.astype(float),
            }
            store.begin_arm(record)
            store.finish_arm(record.arm_id, pa.table(answers), ablated_share=realised(record.criterion, share))
        store.finish_run(run_id)
    return run_id
