"""What silencing heads costs: the arms of an evaluation against their baseline and random controls.

Nothing here prints.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.errors import VerdictError
from analysis.paired import PairedDifference, compare
from analysis.store import Store

#: The most an arm may lose to be called removable, in percentage points.
MARGIN = 1.0

#: Below this many questions no loss at all is still compatible with one above the margin (rule of three: 3 / 300).
LEAST_QUESTIONS = 300

#: Two arms are of one size when their realised shares of silenced heads differ by at most this part of the larger.
SAME_SIZE = 0.1


@dataclass(frozen=True)
class Controls:
    """The random arms of one arm's size.

    Attributes:
        arms: Their names.
        mean: Mean of their differences to the baseline, in percentage points.
        lowest: The worst seed's difference.
        highest: The best seed's difference.
        advantage: The arm against the mean of its controls, per question.
    """

    arms: tuple[str, ...]
    mean: float
    lowest: float
    highest: float
    advantage: PairedDifference

    @property
    def beaten(self) -> bool:
        """Whether the arm does better than they do: the whole interval of the advantage is above zero."""
        return self.advantage.low > 0


@dataclass(frozen=True)
class ArmVerdict:
    """What is known of one arm.

    Attributes:
        zeroed_share: Share of the heads really silenced, 0 to 1.
        controls: None when no random arm of its size was evaluated.
    """

    name: str
    kind: str
    zeroed_share: float | None
    paired: PairedDifference
    controls: Controls | None

    @property
    def removable(self) -> bool:
        """Whether the interval's lower end is above -1 point, and there were questions enough to tell."""
        return self.paired.low > -MARGIN and self.paired.questions >= LEAST_QUESTIONS

    def sentence(self) -> str:
        """The verdict in words."""
        p = self.paired
        share = "" if self.zeroed_share is None else f" ({self.zeroed_share:.1%} of heads silenced)"
        text = (
            f"{self.name}{share}: {p.arm:.2f} % against {p.baseline:.2f} % on {p.questions} questions,"
            f" {p.difference:+.2f} points [{p.low:+.2f}, {p.high:+.2f}], p = {p.p_value:.3g};"
        )
        if self.removable:
            text += " removable within one point"
        elif p.high < -MARGIN:
            text += " not removable: it loses more than one point"
        elif p.low <= -MARGIN:
            text += " not shown to be removable: the interval reaches below -1 point"
        else:
            text += f" not shown to be removable: at least {LEAST_QUESTIONS} questions are needed to tell one point"
        c = self.controls
        if c is None:
            return f"{text}; no random control of its size."
        word = "better than" if c.beaten else "worse than" if c.advantage.high < 0 else "not told apart from"
        return (
            f"{text}; {word} {len(c.arms)} random control{'s' if len(c.arms) > 1 else ''} of its size"
            f" ({c.mean:+.2f} points, {c.lowest:+.2f} to {c.highest:+.2f})."
        )


@dataclass(frozen=True)
class Verdict:
    """All finished arms of an evaluate run but the baseline, random controls last."""

    run_id: str
    model: str
    arms: tuple[ArmVerdict, ...]

    def sentences(self) -> list[str]:
        """One sentence per arm that is not a random control."""
        return [arm.sentence() for arm in self.arms if arm.kind != "random"]


def _controls_of(arm: dict[str, Any], randoms: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The random arms that name this one, or else those for no arm in particular that are of its size."""
    named = [r for r in randoms if r["config"].get("control_of") == arm["name"]]
    if named or arm["kind"] == "random":
        return named
    size = arm["zeroed_share"]
    return [
        r
        for r in randoms
        if r["config"].get("control_of") is None
        and size is not None
        and r["zeroed_share"] is not None
        and abs(size - r["zeroed_share"]) <= SAME_SIZE * max(size, r["zeroed_share"])
    ]


def _answers(store: Store, run_id: str) -> dict[str, tuple[list[Any], np.ndarray, np.ndarray]]:
    """Of each arm: question identities, tasks (questions,) and correct (questions,), in one order for all arms."""
    table = store.query(
        "SELECT arm_id, task, question, doc_hash, correct FROM answers JOIN arms USING (arm_id)"
        " WHERE run_id = ? AND status = 'finished' ORDER BY arm_id, task, question",
        [run_id],
    ).to_pandas()
    return {
        str(arm_id): (
            list(zip(rows["task"], rows["question"], rows["doc_hash"].fillna(""), strict=True)),
            rows["task"].to_numpy(),
            rows["correct"].to_numpy(dtype=np.float64),
        )
        for arm_id, rows in table.groupby("arm_id", sort=False)
    }


def judge(store: Store, run_id: str, *, resamples: int = 2000, seed: int = 0) -> Verdict:
    """Every finished arm of an evaluate run against its baseline and its random controls.

    Raises:
        VerdictError: Not exactly one finished baseline, no other finished arm, or arms with other questions.
    """
    run = store.resolve_run(run_id, "evaluate")
    arms = store.query(
        "SELECT arm_id, name, kind, zeroed_share, config FROM arms WHERE run_id = ? AND status = 'finished'"
        " ORDER BY kind = 'random', started_at, name",
        [run["run_id"]],
    ).to_pylist()
    for arm in arms:
        arm["config"] = json.loads(arm["config"])
    baselines = [arm for arm in arms if arm["kind"] == "baseline"]
    others = [arm for arm in arms if arm["kind"] != "baseline"]
    if len(baselines) != 1 or not others:
        raise VerdictError(
            f"run {run['run_id']} has {len(baselines)} finished baselines and {len(others)} other finished arms; a"
            " verdict needs one and at least one: finish it with `headscan evaluate`"
        )
    answers = _answers(store, run["run_id"])
    questions, tasks, baseline = answers.get(baselines[0]["arm_id"], ([], np.array([]), np.array([])))
    for arm in others:
        given = answers.get(arm["arm_id"], ([],))[0]
        if given != questions:
            raise VerdictError(
                f"arm {arm['name']} of run {run['run_id']} answered {len(given)} questions, not the baseline's"
                f" {len(questions)}: evaluate it again"
            )

    def correct(arm: dict[str, Any]) -> np.ndarray:
        return answers[arm["arm_id"]][2]

    def verdict(arm: dict[str, Any]) -> ArmVerdict:
        paired = compare(baseline, correct(arm), tasks, resamples=resamples, seed=seed)
        controls = None
        if found := _controls_of(arm, [r for r in others if r["kind"] == "random"]):
            losses = [100 * float((correct(r) - baseline).mean()) for r in found]
            pooled = np.mean([correct(r) for r in found], axis=0)
            controls = Controls(
                arms=tuple(r["name"] for r in found),
                mean=float(np.mean(losses)),
                lowest=min(losses),
                highest=max(losses),
                advantage=compare(pooled, correct(arm), tasks, resamples=resamples, seed=seed),
            )
        return ArmVerdict(arm["name"], arm["kind"], arm["zeroed_share"], paired, controls)

    return Verdict(run["run_id"], run["model"], tuple(verdict(arm) for arm in others))
