"""How the arms of an evaluation read prompts: what begins alike once, and in a way that lets arms be compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from headscan.ablation.ablation import Ablation
from headscan.layers.prefix_cache import shares_prefixes
from headscan.models.loaded_model import LoadedModel
from headscan.models.rope import UNVARYING, RopeLengths
from headscan.pipelines.scoring.likelihood import LikelihoodItem
from headscan.pipelines.scoring.shared_row_likelihood import SharedRowItem, can_read_shared_rows
from headscan.pipelines.scoring.token_requests import Request

#: Dtypes in which the order of a sum shows in the answers.
HALF = ("bfloat16", "float16")

#: Has a pool task answered by the model.
Ask = Callable[[Callable[[LoadedModel, Any], bool], None], bool]


class Reading(NamedTuple):
    """How prompts are read.

    Attributes:
        share_prefixes: Common prefixes are read once: from a KV cache.
        shared_rows: Arms with rules, which cannot go on from one, share prefixes too: in rows.
        as_rules: All arms go through the kernels that rules need, and read rows where those do.
        rope: The sequence lengths at which the model's rotary frequencies change.
    """

    share_prefixes: bool
    shared_rows: bool = False
    as_rules: bool = False
    rope: RopeLengths = UNVARYING

    def item(
        self, name: str, requests: tuple[Request, ...], ablated: Ablation | None, batch_tokens: int
    ) -> LikelihoodItem | SharedRowItem:
        """Requests for one replica, to be read by an arm that ablates this."""
        if self.shared_rows and (self.as_rules or (ablated is not None and ablated.needs_whole_input)):
            return SharedRowItem(name, requests, ablated, batch_tokens)
        return LikelihoodItem(name, requests, ablated, batch_tokens, self.share_prefixes, self.as_rules, self.rope)


def computed_as_rules(dtype: str, ablated: Sequence[Ablation | None]) -> bool:
    """Whether arms that ablate this can be compared only if all go through the kernels that rules need.

    In half precision another kernel's rounding shows, and it would be in every difference to the baseline.
    """
    return dtype in HALF and not all(each is None or each.fixed for each in ablated)


def choose_reading(
    ask: Ask, dtype: str, ablated: Sequence[Ablation | None], share: bool | None, say: Callable[[str], None]
) -> Reading:
    """The fastest way of reading for arms that ablate this, under which they can be compared.

    Args:
        share: Whether to share prefixes; None: unless that would compare what was computed in different ways.
        say: Told why nothing is shared.
    """
    as_rules = computed_as_rules(dtype, ablated)
    whole = Reading(False, as_rules=as_rules)
    if share is False:
        return whole
    rules = any(each is not None and each.needs_whole_input for each in ablated)
    if (rules or as_rules) and ask(can_read_shared_rows, None):
        return Reading(True, shared_rows=True, as_rules=as_rules)
    if as_rules and share is None:
        say(f"{dtype}, and this model does not read prompts in rows: every arm reads them whole, to be computed alike")
        return whole
    if not ask(can_share_prefixes, None):
        say("this model does not go on from a prefix as from the whole: every prompt is read whole")
        return whole
    return Reading(True)


def can_share_prefixes(lm: LoadedModel, item: object) -> bool:
    """A pool task: whether common prefixes can be read once."""
    return shares_prefixes(lm)
