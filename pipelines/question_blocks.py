"""How dependent are a study's questions of one block of text, and the losses of neighbouring blocks?

python pipelines/question_blocks.py study/

Prints for each arm the variance of its difference in accuracy with blocks as clusters, over that of independent
questions, and the 95 % range of this ratio if the questions are shuffled over the blocks. Then prints, for each arm
with a loss of text, the correlation of the loss increases of neighbouring blocks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

import headscan
from headscan.report.notebook_tables import StoreTables

#: The task that a study makes from the texts.
_TASK = "continuation"
#: Questions, and blocks with a loss, below which an arm is left out.
_LEAST, _LEAST_BLOCKS = 200, 20
_SHUFFLES = 1_000


def design_effect(changes: np.ndarray, blocks: np.ndarray) -> float:
    """Return the ratio of variances for changes (questions,) and indices of blocks (questions,)."""
    centred = changes - changes.mean()
    return float((np.bincount(blocks, centred) ** 2).sum() / (centred**2).sum())


def neighbours(increases: np.ndarray) -> float:
    """Return the correlation of each of the increases (blocks,) with the next."""
    centred = increases - increases.mean()
    return float((centred[1:] * centred[:-1]).sum() / (centred**2).sum())


def losses(store: StoreTables) -> None:
    """Print the correlation of neighbouring blocks for each arm of each run that read held-out text."""
    found = store.query(
        "SELECT name, run_id, doc_hash, min(question) AS place,"
        " -sum((metrics ->> '$.loss[0]')::DOUBLE) / sum((metrics ->> '$.loss[1]')::DOUBLE) AS loss"
        " FROM answers JOIN arms USING (arm_id) WHERE task = 'text' GROUP BY ALL ORDER BY name, run_id, place"
    )
    by_arm: dict[tuple[str, str], list[float]] = {}
    for name, run_id, _, _, loss in found.fetchall():
        by_arm.setdefault((name, run_id), []).append(loss)
    for (name, run_id), of_blocks in by_arm.items():
        if name != "baseline" and len(of_blocks) >= _LEAST_BLOCKS:
            increases = np.array(of_blocks) - np.array(by_arm["baseline", run_id])
            print(f"{name}: loss {increases.mean():+.3f}, {len(increases)} blocks, {neighbours(increases):+.2f}")


def main(folder: Path) -> None:
    rows = (folder / "task" / f"{_TASK}.jsonl").read_text(encoding="utf-8").splitlines()
    names = [json.loads(row)["module"] for row in rows]
    blocks = np.unique(names, return_inverse=True)[1]
    print(f"{len(names):,} questions of {blocks.max() + 1} blocks")
    store = headscan.open_store(folder / "study.duckdb")
    answers = store.query(
        "SELECT name, run_id, list(correct ORDER BY question) AS correct, list(question ORDER BY question) AS question"
        f" FROM answers JOIN arms USING (arm_id) WHERE task = '{_TASK}' GROUP BY ALL ORDER BY name"
    )
    found = answers.to_arrow_table().to_pylist()
    whole = {row["run_id"]: np.array(row["correct"]) for row in found if row["name"] == "baseline"}
    generator = np.random.default_rng(0)
    for row in found:
        baseline = whole[row["run_id"]]
        changes = np.array(row["correct"]) - baseline
        if row["name"] == "baseline" or len(changes) < _LEAST or not changes.any():
            continue
        of_arm = blocks[np.array(row["question"])]
        shuffled = [design_effect(generator.permutation(changes), of_arm) for _ in range(_SHUFFLES)]
        low, high = np.quantile(shuffled, (0.025, 0.975))
        changed = f"{100 * np.count_nonzero(changes) / len(changes):.1f} % of the answers change"
        print(f"{row['name']}: {design_effect(changes, of_arm):.2f} (shuffled {low:.2f} to {high:.2f}), {changed}")
    losses(store)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
