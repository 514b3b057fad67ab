"""Every statistic and score, declared once, as data.

Tables, SQL views, rules inside a forward pass, ``--help`` and the documentation all read these declarations. This
module imports nothing of the project and nothing heavy, so any room may read it.

Notation: for one sequence of N real tokens and one layer, ``A`` is the causal softmax (N x N) of a query head, ``V``
the value vectors its KV head gives it, ``O = A V`` its output before concatenation and the output projection, ``W`` its
rows of the output projection. Means over q or k run over the N real tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

#: How many first tokens count as the sink (arXiv 2309.17453), and how many last ones as recent.
DEFAULT_SINK = 4
DEFAULT_RECENT = 256


@dataclass(frozen=True)
class Statistic:
    """A number measured per (sequence, site, layer, query head) and stored.

    Attributes:
        name: Column name.
        formula: What it is, in words and the notation of this module.
        unit: Unit of the number.
        door: Where it is measured: ``attention`` (query, key and value) or ``output`` (input of the output projection).
        source: Where it was defined.
    """

    name: str
    formula: str
    unit: str
    door: Literal["attention", "output"]
    source: str


@dataclass(frozen=True)
class Score:
    """A number derived from statistics of one sequence, with a direction.

    Attributes:
        name: Our name.
        paper_name: Name in the paper.
        statistic: The statistic in the numerator.
        normaliser: The statistic in the denominator, if any.
        over: ``layer``: the denominator is the mean of ``normaliser`` over all query heads of the layer, this head
            included; ``head``: it is the head's own; ``none``: there is no denominator.
        inactive: Which end of the score means that the head does little.
        source: Where it was defined.
    """

    name: str
    paper_name: str
    statistic: str
    normaliser: str | None
    over: Literal["none", "layer", "head"]
    inactive: Literal["high", "low"]
    source: str

    @property
    def formula(self) -> str:
        """The score in words."""
        if self.normaliser is None:
            return self.statistic
        return f"{self.statistic} / " + (
            f"layer mean of {self.normaliser}" if self.over == "layer" else f"own {self.normaliser}"
        )


_PAPER = "arXiv 2504.03889"

STATISTICS: dict[str, Statistic] = {
    s.name: s
    for s in (
        Statistic("first_token_weight", "mean_q A[q,0]", "share", "attention", _PAPER),
        Statistic("entropy", "mean_q of -sum_k A[q,k] ln A[q,k]", "nats", "attention", _PAPER),
        Statistic("first_value_norm", "norm(V[0])", "l2 norm", "attention", _PAPER),
        Statistic("value_norm", "mean_k norm(V[k])", "l2 norm", "attention", _PAPER),
        Statistic("last_output_norm", "norm(O[N-1])", "l2 norm", "output", _PAPER),
        Statistic("output_norm", "mean_q norm(O[q])", "l2 norm", "output", _PAPER),
        Statistic("projected_output_norm", "mean_q norm(O[q] W), no bias", "l2 norm", "output", f"{_PAPER}, appendix"),
        Statistic(
            "sink_mass", "mean_q of the weight on the first `sink` keys", "share", "attention", "arXiv 2309.17453"
        ),
        Statistic(
            "recent_mass",
            "mean_q of the weight on the last `recent` keys up to q, those of the sink left out",
            "share",
            "attention",
            "arXiv 2309.17453",
        ),
        Statistic("distant_mass", "1 - sink_mass - recent_mass", "share", "attention", "headscan"),
        Statistic("previous_token_weight", "mean over q > 0 of A[q,q-1]", "share", "attention", "arXiv 2209.11895"),
        Statistic("self_weight", "mean_q A[q,q]", "share", "attention", "headscan"),
        Statistic("relative_entropy", "mean over q > 0 of H_q / ln(q+1)", "share", "attention", "headscan"),
        Statistic("output_mean_norm", "norm(mean_q O[q])", "l2 norm", "output", "headscan"),
    )
}

SCORES: dict[str, Score] = {
    s.name: s
    for s in (
        Score("first_token_weight", "AWFT", "first_token_weight", None, "none", "high", _PAPER),
        Score(
            "first_token_weight_ln", "AWFT (LN)", "first_token_weight", "first_token_weight", "layer", "high", _PAPER
        ),
        Score("entropy", "AEQD", "entropy", None, "none", "low", _PAPER),
        Score("entropy_ln", "AEQD (LN)", "entropy", "entropy", "layer", "low", _PAPER),
        Score("first_value_norm", "FTVVN", "first_value_norm", None, "none", "low", _PAPER),
        Score("first_value_norm_ln", "FTVVN (LN)", "first_value_norm", "first_value_norm", "layer", "low", _PAPER),
        Score("value_norm", "AVVN", "value_norm", None, "none", "low", _PAPER),
        Score("value_norm_ln", "AVVN (LN)", "value_norm", "value_norm", "layer", "low", _PAPER),
        Score("last_output_norm", "LTHON", "last_output_norm", None, "none", "low", _PAPER),
        Score("last_output_norm_ln", "LTHON (LN)", "last_output_norm", "output_norm", "layer", "low", _PAPER),
        Score("last_output_norm_hn", "LTHON (HN)", "last_output_norm", "output_norm", "head", "low", _PAPER),
        Score("output_norm", "AHON", "output_norm", None, "none", "low", _PAPER),
        Score("output_norm_ln", "AHON (LN)", "output_norm", "output_norm", "layer", "low", _PAPER),
        Score("projected_output_norm", "A1", "projected_output_norm", None, "none", "low", f"{_PAPER}, appendix"),
        Score(
            "projected_output_norm_ln",
            "A2",
            "projected_output_norm",
            "projected_output_norm",
            "layer",
            "low",
            f"{_PAPER}, appendix",
        ),
    )
}


def statistics_for(scores: Iterable[str]) -> frozenset[str]:
    """Names of the statistics that ``scores`` are derived from."""
    needed = {s for name in scores for s in (SCORES[name].statistic, SCORES[name].normaliser)}
    return frozenset(name for name in needed if name is not None)
