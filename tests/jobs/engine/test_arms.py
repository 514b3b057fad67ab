"""Arms: what identifies them, and what does not."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from headscan.ablation.intervention import HeadMeans
from headscan.ablation.masks import HeadMask, RandomHeads
from headscan.ablation.rules import HeadRule, ScoredAblation
from headscan.catalog import MassWidths
from headscan.engine.arms import BASELINE, Arm, distinct_arms, mask_arm, rule_arm
from headscan.errors import InterventionError
from headscan.grid import AttentionSite
from headscan.kv.kv_windows import KvWindows
from headscan.store.records import ArmKind
from headscan.windows import KeptKeys, Window


@dataclass(frozen=True)
class EveryNth(ScoredAblation):
    """An ablation with a parameter of its own."""

    step: int = 2
    label = "every nth head"

    @property
    def scored_by(self) -> tuple[str, MassWidths]:
        return "entropy", MassWidths()

    def heads_at(self, site: AttentionSite, scores_BH: Tensor | None) -> Tensor:
        return torch.arange(site.num_attention_heads) % self.step == 0


def means(value: float) -> HeadMeans:
    return HeadMeans({0: torch.full((2, 4), value)}, "self")


def windows(recent: int, name: str = "plan") -> KvWindows:
    return KvWindows(KeptKeys(((0, 0, Window(4, recent)),)), name)


MASK = Arm("mask", ArmKind.MASK, HeadMask([(0, 1)]), "entropy", 0.1, selection="scan 1a2b")
RULE = rule_arm(HeadRule("entropy", 0.5), share=0.1)
TEXTS = (("replacement_texts", {"corpus": "texts/", "hash": "1a2b"}),)


@pytest.mark.parametrize(
    ("arm", "other"),
    [
        (MASK, replace(MASK, name="another name")),
        (MASK, replace(MASK, measured=(("swept", True),))),
        (mask_arm([(0, 1), (1, 0)]), mask_arm([(1, 0), (0, 1)])),
        (Arm("plan", ArmKind.PLAN, windows(8)), Arm("plan", ArmKind.PLAN, windows(8, "for messages"))),
        # Other kernels round the same means differently, so their texts identify them.
        (
            replace(MASK, intervention=HeadMask([(0, 1)], means(0.5)), details=TEXTS),
            replace(MASK, intervention=HeadMask([(0, 1)], means(0.5000001)), details=TEXTS),
        ),
    ],
)
def test_names_and_measured_numbers_do_not_identify_an_arm(arm: Arm, other: Arm) -> None:
    assert arm.id == other.id == json.loads(json.dumps(arm.id))
    assert arm.record("run", None).arm_id == other.record("run", "mask").arm_id
    assert arm.record("run", None).arm_id != arm.record("another run", None).arm_id


@pytest.mark.parametrize(
    ("arm", "other"),
    [
        (MASK, replace(MASK, kind=ArmKind.RANDOM_MASK)),
        (MASK, replace(MASK, criterion="value_norm")),
        (MASK, replace(MASK, share=0.2)),
        (MASK, replace(MASK, selection="scan 1a2b by inactivity")),
        (MASK, replace(MASK, ranking_run="1a2b3c")),
        (MASK, replace(MASK, seed=0)),
        (MASK, replace(MASK, details=(("mode", "each"),))),
        (MASK, replace(MASK, intervention=HeadMask([(0, 2)]))),
        (MASK, replace(MASK, intervention=HeadMask([(0, 1)], means(0.5)))),
        (
            replace(MASK, intervention=HeadMask([(0, 1)], means(0.5))),
            replace(MASK, intervention=HeadMask([(0, 1)], means(0.25))),
        ),
        (RULE, replace(RULE, intervention=HeadRule("entropy", 0.25))),
        (RULE, replace(RULE, intervention=HeadRule("entropy", 0.5, widths=MassWidths(sink=8)))),
        (RULE, replace(RULE, intervention=EveryNth())),
        (replace(RULE, intervention=EveryNth()), replace(RULE, intervention=EveryNth(3))),
        (RULE, replace(RULE, intervention=RandomHeads(0.1, 0))),
        (Arm("plan", ArmKind.PLAN, windows(8)), Arm("plan", ArmKind.PLAN, windows(16))),
    ],
)
def test_every_setting_identifies_an_arm(arm: Arm, other: Arm) -> None:
    assert json.dumps(arm.id) != json.dumps(replace(other, name=arm.name).id)
    with pytest.raises(InterventionError, match=r"2 different arms are named .* \(limit 1\)"):
        distinct_arms([BASELINE, arm, replace(other, name=arm.name)])


def test_equal_arms_are_one_arm_of_one_name() -> None:
    assert distinct_arms([BASELINE, MASK, replace(MASK, measured=(("swept", True),)), BASELINE]) == [BASELINE, MASK]
    with pytest.raises(InterventionError, match=r"^'mask' and 'again' are one arm \(limit 1 name\)\. Leave one"):
        distinct_arms([MASK, replace(MASK, name="again")])


class _NoDataclass(EveryNth):
    @property
    def id(self) -> dict[str, object]:
        return {"class": "mine"}


@dataclass(frozen=True)
class _WithTensor(EveryNth):
    weights: Tensor | None = None


def test_an_ablation_that_nothing_identifies_is_refused() -> None:
    arm = Arm("mine", ArmKind.RULE, _WithTensor(weights=torch.ones(2)))
    with pytest.raises(InterventionError, match=r"^Tensor is no dataclass, so nothing identifies it\. Define its `id`"):
        _ = arm.id
    assert replace(arm, intervention=_NoDataclass()).id["change"] == {"class": "mine"}
