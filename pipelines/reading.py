"""How the arms of an evaluation read prompts: what begins alike once, and in a way that lets arms be compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from cluster.pool import Pool
from headscan.interventions import HeadMask, HeadRule
from headscan.loaded_model import LoadedModel
from headscan.prefixes import shares_prefixes
from pipelines.arms import Silenced
from pipelines.packed_likelihood import can_read_packs

#: Which arms read rows of prompts that begin alike, per-input random ones always aside.
Packs = Literal["none", "rules", "all"]

#: Dtypes in which the order of a sum shows in the answers.
_HALF = ("bfloat16", "float16")


class Reading(NamedTuple):
    """How prompts are read.

    Attributes:
        share_prefixes: Common prefixes are read once.
        packs: The arms that do so in rows, where rules can, too; the others go on from a KV cache.
    """

    share_prefixes: bool
    packs: Packs = "none"


def choose_reading(
    pool: Pool, dtype: str, silenced: Sequence[Silenced | None], share: bool | None, say: Callable[[str], None]
) -> Reading:
    """The fastest way of reading for arms that silence this.

    In half precision beside rules the baseline and masks read the same rows as they do; where there can be none, every
    arm reads whole prompts.

    Args:
        share: Whether to share prefixes; None: unless that would compare what was computed in different ways.
        say: Told why nothing is shared.
    """
    if pool.staged or share is False:
        return Reading(False)
    half = dtype in _HALF
    if any(isinstance(each, HeadRule) for each in silenced) and pool.one(can_read_packs, None):
        return Reading(True, "all" if half else "rules")
    if share is None and half and not all(isinstance(each, HeadMask | None) for each in silenced):
        say(f"{dtype}: every arm reads whole prompts, so that all are computed alike")
        return Reading(False)
    if not pool.one(can_share_prefixes, None):
        say("this model does not go on from a prefix as from the whole: every prompt is read whole")
        return Reading(False)
    return Reading(True)


def can_share_prefixes(lm: LoadedModel, item: object) -> bool:
    """A pool task: whether common prefixes can be read once."""
    return shares_prefixes(lm)
