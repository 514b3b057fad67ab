"""How the arms of an evaluation read prompts: what begins alike once, and in a way that lets arms be compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from cluster.pool import Pool
from headscan.interventions import HeadMask, HeadRule
from headscan.loaded_model import LoadedModel
from headscan.prefixes import shares_prefixes
from pipelines.arms import Silenced
from pipelines.packed_likelihood import can_read_packs

#: Dtypes in which the order of a sum shows in the answers.
_HALF = ("bfloat16", "float16")


class Reading(NamedTuple):
    """How prompts are read.

    Attributes:
        share_prefixes: Common prefixes are read once: from a KV cache.
        packs: Arms with rules, which cannot go on from one, share prefixes too: in rows.
        as_rules: All arms read as those with rules do, by the same kernels: in rows, or whole where there are none.
    """

    share_prefixes: bool
    packs: bool = False
    as_rules: bool = False


def choose_reading(
    pool: Pool, dtype: str, silenced: Sequence[Silenced | None], share: bool | None, say: Callable[[str], None]
) -> Reading:
    """The fastest way of reading for arms that silence this, under which they can be compared.

    Args:
        share: Whether to share prefixes; None: unless that would compare what was computed in different ways.
        say: Told why nothing is shared.
    """
    rules = any(isinstance(each, HeadRule) for each in silenced)
    half = dtype in _HALF
    whole = Reading(False, as_rules=half and rules)
    if pool.staged or share is False:
        return whole
    if rules and pool.one(can_read_packs, None):
        return Reading(True, packs=True, as_rules=half)
    if share is None and half and not all(isinstance(each, HeadMask | None) for each in silenced):
        say(f"{dtype}: every arm reads whole prompts, so that all are computed alike")
        return whole
    if not pool.one(can_share_prefixes, None):
        say("this model does not go on from a prefix as from the whole: every prompt is read whole")
        return whole
    return Reading(True)


def can_share_prefixes(lm: LoadedModel, item: object) -> bool:
    """A pool task: whether common prefixes can be read once."""
    return shares_prefixes(lm)
