"""The declarations of all statistics, profiles, scores, behaviours, criteria and recall tasks.

Tables, SQL views, rules, ``--help`` and the documentation read them; `headscan.statistics` implements the statistics.
This module imports no library, so every package can read it.

Notation: for one sequence of N real tokens and one layer, ``A`` is the softmax (N x N) of a query head, ``V`` the value
vectors of its KV head, ``O`` its output at the input of the output projection (``A V``, times its gate if it has one),
``W`` its rows of the output projection. Means over q or k run over the N real tokens. Formulas are those of
causal attention; in bidirectional attention distances are ``|q-k|`` and ``ln(q+1)`` is the log of the number of keys.
Statistics of positions are undefined (NaN) in cross attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import floor
from typing import Annotated, Final, Literal

from headscan.errors import InterventionError, UnknownNameError, unknown_name
from headscan.options import Option, check_limits, short

#: Number of first tokens that form the sink (arXiv 2309.17453), and of last tokens that are recent: the keys of the
#: mass statistics, and what a window head keeps.
DEFAULT_SINK = 4
DEFAULT_RECENT = 256

#: Fast: statistics from fused attention calls. Full: also those that need explicit weights, a block at a time.
Panel = Literal["fast", "full"]
PANELS: tuple[Panel, ...] = ("fast", "full")


@dataclass(frozen=True)
class Statistic:
    """A number measured per (sequence, site, layer, query head) and stored; ``panel`` is the smallest that has it."""

    name: str
    formula: str
    unit: str
    hook: Literal["attention", "output"]
    source: str
    panel: Panel = "fast"


@dataclass(frozen=True)
class Profile:
    """A histogram per (sequence, site, layer, query head); its bins, labelled in order, sum to the total weight."""

    name: str
    formula: str
    bins: tuple[str, ...]
    source: str
    panel: Panel = "full"


@dataclass(frozen=True)
class Score:
    """A number derived from statistics of one sequence, with a direction.

    Attributes:
        inactive: The end of the score at which a head contributes little.
        normaliser: The statistic in the denominator; None divides by nothing.
        over: ``layer``: the denominator is the mean of ``normaliser`` over all query heads of the layer, this head
            included; ``head``: the head's own ``normaliser``. None without a normaliser.
    """

    name: str
    paper_name: str
    statistic: str
    inactive: Literal["high", "low"]
    source: str
    normaliser: str | None = None
    over: Literal["layer", "head"] | None = None

    def __post_init__(self) -> None:
        for name in (self.statistic, self.normaliser):
            if name is not None and name not in STATISTICS:
                raise unknown_name("statistic", name, STATISTICS)
        if (self.normaliser is None) != (self.over is None):
            given, missing = ("`over`", "`normaliser`") if self.normaliser is None else ("`normaliser`", "`over`")
            raise ValueError(f"score {self.name!r} has {given} and no {missing}. Pass both or neither")

    @property
    def formula(self) -> str:
        if self.normaliser is None:
            return self.statistic
        return f"{self.statistic} / " + (
            f"layer mean of {self.normaliser}" if self.over == "layer" else f"own {self.normaliser}"
        )


@dataclass(frozen=True)
class Behaviour:
    """A score of how strongly a query head shows a behaviour.

    Attributes:
        probe: The sequences: ``repeats`` of random tokens, or a ``needle`` in a haystack.
        threshold: Heads above it show the behaviour, by the source; None if the source has no threshold.
    """

    name: str
    formula: str
    probe: Literal["repeats", "needle"]
    source: str
    threshold: float | None = None


_PAPER = "arXiv 2504.03889"
_APPENDIX = f"{_PAPER}, appendix"

STATISTICS: dict[str, Statistic] = {
    s.name: s
    for s in (
        Statistic("first_token_weight", "mean_q A[q,0]", "share", "attention", _PAPER),
        Statistic("entropy", "mean_q of -sum_k A[q,k] ln A[q,k]", "nats", "attention", _PAPER),
        Statistic("first_value_norm", "norm(V[0])", "l2 norm", "attention", _PAPER),
        Statistic("value_norm", "mean_k norm(V[k])", "l2 norm", "attention", _PAPER),
        Statistic("last_output_norm", "norm(O[N-1])", "l2 norm", "output", _PAPER),
        Statistic("output_norm", "mean_q norm(O[q])", "l2 norm", "output", _PAPER),
        Statistic("projected_output_norm", "mean_q norm(O[q] W), no bias", "l2 norm", "output", _APPENDIX),
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
        Statistic("distant_mass", "1 - sink_mass - recent_mass - learned_sink_mass", "share", "attention", "headscan"),
        Statistic(
            "learned_sink_mass",
            "1 - mean_q sum_k A[q,k]: what a learned sink logit takes, 0 without one",
            "share",
            "attention",
            "arXiv 2508.10925",
        ),
        Statistic("previous_token_weight", "mean over q > 0 of A[q,q-1]", "share", "attention", "arXiv 2209.11895"),
        Statistic("self_weight", "mean_q A[q,q]", "share", "attention", "headscan"),
        Statistic("relative_entropy", "mean over q > 0 of H_q / ln(q+1)", "share", "attention", "headscan"),
        Statistic("output_mean_norm", "norm(mean_q O[q])", "l2 norm", "output", "headscan"),
        Statistic(
            "confidence",
            "mean_q max_k A[q,k], the first token and end-of-sequence tokens left out of the keys",
            "share",
            "attention",
            "arXiv 1905.09418",
            "full",
        ),
        Statistic("received_max", "max_k R[k], where R[k] = mean_q A[q,k]", "share", "attention", "headscan", "full"),
        Statistic(
            "received_concentration",
            "1 - entropy(R) / ln N: 0 where all keys receive alike, 1 where one key receives all",
            "share",
            "attention",
            "headscan",
            "full",
        ),
    )
}

#: Largest offset |k - q| with a bin of its own in the arg-max histogram; larger ones share a bin at either end.
MAX_OFFSET = 8
#: Number of doubling bins of distances and key positions; the last bin is open.
DISTANCE_BINS = 20

_DOUBLING = (
    "0",
    "1",
    *(f"{2**b}-{2 ** (b + 1) - 1}" for b in range(1, DISTANCE_BINS - 2)),
    f"{2 ** (DISTANCE_BINS - 2)}+",
)

PROFILES: dict[str, Profile] = {
    p.name: p
    for p in (
        Profile(
            "argmax_offsets",
            "share of queries whose largest weight is on the key at offset k - q",
            (
                f"<{-MAX_OFFSET}",
                *(f"{offset:+d}" if offset else "0" for offset in range(-MAX_OFFSET, MAX_OFFSET + 1)),
                f">{MAX_OFFSET}",
            ),
            "arXiv 1905.09418",
        ),
        Profile("mass_by_distance", "mean_q of the weight on keys at distance |q - k|", _DOUBLING, "headscan"),
        Profile("received_by_position", "sum over keys k at that position of mean_q A[q,k]", _DOUBLING, "headscan"),
    )
}

SCORES: dict[str, Score] = {
    s.name: s
    for s in (
        Score("first_token_weight", "AWFT", "first_token_weight", "high", _PAPER),
        Score(
            "first_token_weight_ln", "AWFT (LN)", "first_token_weight", "high", _PAPER, "first_token_weight", "layer"
        ),
        Score("entropy", "AEQD", "entropy", "low", _PAPER),
        Score("entropy_ln", "AEQD (LN)", "entropy", "low", _PAPER, "entropy", "layer"),
        Score("first_value_norm", "FTVVN", "first_value_norm", "low", _PAPER),
        Score("first_value_norm_ln", "FTVVN (LN)", "first_value_norm", "low", _PAPER, "first_value_norm", "layer"),
        Score("value_norm", "AVVN", "value_norm", "low", _PAPER),
        Score("value_norm_ln", "AVVN (LN)", "value_norm", "low", _PAPER, "value_norm", "layer"),
        Score("last_output_norm", "LTHON", "last_output_norm", "low", _PAPER),
        Score("last_output_norm_ln", "LTHON (LN)", "last_output_norm", "low", _PAPER, "output_norm", "layer"),
        Score("last_output_norm_hn", "LTHON (HN)", "last_output_norm", "low", _PAPER, "output_norm", "head"),
        Score("output_norm", "AHON", "output_norm", "low", _PAPER),
        Score("output_norm_ln", "AHON (LN)", "output_norm", "low", _PAPER, "output_norm", "layer"),
        Score("projected_output_norm", "A1", "projected_output_norm", "low", _APPENDIX),
        Score(
            "projected_output_norm_ln",
            "A2",
            "projected_output_norm",
            "low",
            _APPENDIX,
            "projected_output_norm",
            "layer",
        ),
    )
}

BEHAVIOURS: dict[str, Behaviour] = {
    b.name: b
    for b in (
        Behaviour(
            "induction_score",
            "random tokens, repeated: mean over the repeats' queries of the weight on keys that follow earlier "
            "occurrences of the query's token",
            "repeats",
            "arXiv 2209.11895",
        ),
        Behaviour(
            "duplicate_token_score",
            "the same queries: weight on earlier occurrences of the query's token",
            "repeats",
            "arXiv 2211.00593",
        ),
        Behaviour(
            "previous_token_score", "the same sequences: mean over q > 0 of A[q,q-1]", "repeats", "arXiv 2209.11895"
        ),
        Behaviour(
            "retrieval_score",
            "a needle in a haystack, then the needle again: share of its tokens at which the query before the token "
            "weighs that token in the haystack most",
            "needle",
            "arXiv 2404.15574",
            0.1,
        ),
    )
}


#: What makes means of heads comparable: the division by their l2 norm over a layer (``norm``) or by their mean over all
#: heads (``mean``), the scaling to 0 to 1 over all heads (``range``), or 1 minus that. If the divisor is zero, all
#: numerators are zero, too, and so are the results: heads of no importance in a layer of such heads are removed first.
TermScale = Literal["none", "norm", "mean", "range", "1 - range"]


#: Means over sequences that importances consist of. `headscan.pruning.head_values` measures them, and
#: `headscan.store.views` computes them from ``head_importance``.
TermMean = Literal["importance", "sequence_importance", "relative_entropy", "prompt_importance"]

#: ``importance`` on recall prompts instead of texts.
PROMPT_IMPORTANCE: Final = "prompt_importance"


@dataclass(frozen=True)
class Term:
    """A part of an importance: a mean over sequences, scaled, times a weight."""

    mean: TermMean
    scale: TermScale = "none"
    weight: float = 1.0

    def __str__(self) -> str:
        weight = "" if self.weight == 1 else f"{self.weight:g} "
        return f"{weight}{self.mean}" + ("" if self.scale == "none" else f" ({self.scale})")


@dataclass(frozen=True)
class Importance:
    """A score from derivatives of the loss, one number per head of a run; low heads are removed first. In its formula g
    is a gate of 1 on a head's output, for all tokens of a sequence or for one, L the loss of the sequence in nats.

    Attributes:
        formula: The terms, in words. SQL views and `headscan.pruning` compute the score from ``terms``.
        combined: The score is the sum of the terms, or the largest.
    """

    name: str
    formula: str
    source: str
    terms: tuple[Term, ...]
    combined: Literal["sum", "largest"] = "sum"

    @property
    def on_recall(self) -> bool:
        """True if recall prompts are measured in addition to texts."""
        return any(term.mean == PROMPT_IMPORTANCE for term in self.terms)


#: Weight of the importance in ``importance_entropy``; the rest is that of the entropy.
IMPORTANCE_WEIGHT = 0.5

IMPORTANCES: dict[str, Importance] = {
    i.name: i
    for i in (
        Importance(
            "importance",
            "mean over sequences of the sum over tokens of |dL/dg of the token|",
            "published code of arXiv 1905.10650",
            (Term("importance"),),
        ),
        Importance(
            "importance_ln",
            "importance / l2 norm of importance over the heads of the layer",
            "arXiv 1905.10650",
            (Term("importance", "norm"),),
        ),
        Importance(
            "importance_entropy",
            f"{IMPORTANCE_WEIGHT} i + {1 - IMPORTANCE_WEIGHT} (1 - e), where i is importance and e the mean over "
            "sequences of entropy / ln N, each scaled to 0 to 1 over all heads",
            "arXiv 2510.13832, HIES",
            (
                Term("importance", "range", IMPORTANCE_WEIGHT),
                Term("relative_entropy", "1 - range", 1 - IMPORTANCE_WEIGHT),
            ),
        ),
        Importance(
            "sequence_importance",
            "mean over sequences of |dL/dg|",
            "equation 2 of arXiv 1905.10650",
            (Term("sequence_importance"),),
        ),
        # Each is divided by its mean, because the losses of different sequences differ in size.
        Importance(
            "importance_recall",
            f"the larger of importance and {PROMPT_IMPORTANCE}, which is importance on recall prompts, each divided by "
            "its mean over all heads",
            "headscan",
            (Term("importance", "mean"), Term(PROMPT_IMPORTANCE, "mean")),
            "largest",
        ),
    )
}


@dataclass(frozen=True)
class RecallFamily:
    """A family of recall tasks, which differ in length only; a task is named like ``needle@512``.

    Attributes:
        heading: What is counted, as a heading of a table.
        does: What the whole model does with the questions, with a place for its score in percent.
        choices: Answers to choose from; None if the model continues a text, which no guess can do.
        least: Score in percent from which on a model solves the tasks; below it there is no recall to lose. With
            choices, the score must be shown to exceed it.
    """

    name: str
    heading: str
    does: str
    choices: int | None
    least: float

    @property
    def chance(self) -> float:
        """Score of guessing, in percent."""
        return 100 / self.choices if self.choices else 0.0


#: Everything that differs between families of recall questions, in the order in which they are asked. The generators
#: of `headscan.texts.recall_tasks` make the questions.
RECALL_FAMILIES: dict[str, RecallFamily] = {
    f.name: f
    for f in (
        RecallFamily("needle", "needles", "finds {:.0f} % of the needles", choices=4, least=30.0),
        RecallFamily("copying", "copying", "copies {:.0f} % of the tokens", choices=None, least=10.0),
    )
}
#: Their names in words, for help and comments.
RECALL_NAMES = ", ".join(RECALL_FAMILIES)


def recall_family(task: str) -> RecallFamily:
    """Return the family of a recall task, such as that of ``needle@512``. A family that is not declared here has
    answers that no guess gives.
    """
    name = task.partition("@")[0]
    if name in RECALL_FAMILIES:
        return RECALL_FAMILIES[name]
    return RecallFamily(name, name, "solves {:.0f} % of the other recall questions", choices=None, least=10.0)


#: Criteria of one family share their measurements. A ``set`` is chosen as a whole, without an order of the heads.
CriterionFamily = Literal["score", "importance", "effect", "gate", "set"]


@dataclass(frozen=True)
class Criterion:
    """A criterion that chooses the heads to ablate or to remove.

    Attributes:
        run: Kind of the run in a store that orders heads by the criterion; None if there is none.
        by_value: Every head has a number of its own, so what is left can be measured again once some heads are gone.
        on_recall: Recall prompts are measured in addition to texts.
    """

    name: str
    family: CriterionFamily
    removed_first: str
    source: str
    run: Literal["scan", "importance", "ablate", "gates"] | None
    by_value: bool = True
    on_recall: bool = False


EFFECT, GATE, DAMAGE, LAYER_DROP, RANDOM = "effect", "gate", "damage", "layer-drop", "random"

CRITERIA: dict[str, Criterion] = {
    c.name: c
    for c in (
        *(Criterion(s.name, "score", f"{s.inactive} {s.formula}", s.source, "scan") for s in SCORES.values()),
        *(
            Criterion(i.name, "importance", f"low {i.formula}", i.source, "importance", on_recall=i.on_recall)
            for i in IMPORTANCES.values()
        ),
        Criterion(EFFECT, "effect", "heads whose ablation, alone, changes the predictions least", "headscan", "ablate"),
        Criterion(GATE, "gate", "the most closed gates of a fit", "arXiv 1905.09418", "gates", by_value=False),
        Criterion(DAMAGE, "set", "the heads that leave the least loss after repair", "headscan", None, by_value=False),
        Criterion(LAYER_DROP, "set", "whole attention layers", "arXiv 2406.15786", None, by_value=False),
    )
}


#: Methods of pruning that choose a set of heads for a model, without a run in a store.
SET_METHODS: tuple[str, ...] = (RANDOM, *(name for name, declared in CRITERIA.items() if declared.family == "set"))

#: Criteria that runs of a store order heads by.
RANKED_CRITERIA: tuple[str, ...] = tuple(name for name, declared in CRITERIA.items() if declared.run is not None)

#: What orders heads, by a number for each.
ORDERS: tuple[str, ...] = tuple(dict.fromkeys([*SCORES, *STATISTICS, *BEHAVIOURS, *RANKED_CRITERIA]))

#: What replaces the output of an ablated head.
ReplacementKind = Literal["zero", "mean", "resample"]


def head_count(share: float, total: int) -> int:
    """Return the number of heads of a share (0 to 1) of ``total`` heads: the nearest one, halves up, and at least 1."""
    return max(1, floor(share * total + 0.5))


def statistics_for(scores: Iterable[str]) -> frozenset[str]:
    """Return the names of the statistics that ``scores`` are derived from."""
    needed = {s for name in scores for s in (SCORES[name].statistic, SCORES[name].normaliser)}
    return frozenset(name for name in needed if name is not None)


def panel_names(panel: Panel) -> tuple[str, ...]:
    """Return the names of the statistics and profiles of a panel."""
    everything: tuple[Statistic | Profile, ...] = (*STATISTICS.values(), *PROFILES.values())
    return tuple(entry.name for entry in everything if panel == "full" or entry.panel == "fast")


@short
@dataclass(frozen=True)
class MassWidths:
    """Widths of sink and recent mass, in keys.

    Attributes:
        sink: Number of first keys that form the sink.
        recent: Number of last keys, up to the query's own, that are recent.

    Raises:
        InterventionError: A width below 1.
    """

    sink: Annotated[int, Option("number of first keys that count as the sink", least=1)] = DEFAULT_SINK
    recent: Annotated[int, Option("number of last keys that count as recent", least=1)] = DEFAULT_RECENT

    def __post_init__(self) -> None:
        check_limits(self, InterventionError)


def check_statistics(names: Iterable[str] | None) -> frozenset[str]:
    """Return the named statistics and profiles; None returns the fast panel."""
    _refuse_text("statistics", names)
    wanted = frozenset(panel_names("fast") if names is None else names)
    known = [*STATISTICS, *PROFILES]
    for name in sorted(wanted.difference(known), key=str):
        raise unknown_name("statistic", name, known)
    return wanted


def check_behaviours(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names in the catalogue's order."""
    _refuse_text("behaviours", names)
    wanted = set(names)
    for name in sorted(wanted.difference(BEHAVIOURS), key=str):
        raise unknown_name("behaviour", name, BEHAVIOURS)
    return tuple(name for name in BEHAVIOURS if name in wanted)


def _refuse_text(parameter: str, names: Iterable[str] | None) -> None:
    """Raise UnknownNameError if names are no list of texts, or one text, whose letters would be read as names."""
    if names is not None and not isinstance(names, Iterable):
        raise UnknownNameError(f"`{parameter}={names!r}` is no list of names. Pass a list of names")
    if isinstance(names, str):
        raise UnknownNameError(f"`{parameter}={names!r}` is one text. Pass a list of names, such as [{names!r}]")
