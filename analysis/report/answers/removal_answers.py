"""How many heads can go at what cost: ablated, and removed from the model's files."""

from __future__ import annotations

from collections.abc import Sequence

from headscan.analysis.arm_kinds import ArmKind
from headscan.analysis.report.answers.answer import Answer, Commands, interval
from headscan.analysis.verdicts.confirmation import Choice
from headscan.analysis.verdicts.judge import ArmVerdict, Verdict
from headscan.analysis.verdicts.paired import about

ABLATED = "How many heads can be ablated?"
REMOVED = "How many heads can be removed for good?"

_CHOSEN = (ArmKind.MASK, ArmKind.RULE)


def ablation_answer(
    verdict: Verdict | None, choices: Sequence[Choice], tried: int, link: str, commands: Commands
) -> Answer:
    """Return the answer from masks and rules.

    Args:
        verdict: None without an evaluation.
        choices: The selected arms of a sweep; they were judged on questions that did not select them, unless it
            was not confirmed. Empty without a sweep.
        tried: Number of masks and rules with a verdict.
    """
    command = commands.on_model("sweep", "--tasks", "TASKS")
    if verdict is None:
        return Answer(ABLATED, "Not measured", "No evaluation of this model is in the store.", "missing", None, command)
    arms = [choice.verdict for choice in choices] or [arm for arm in verdict.arms if arm.kind in _CHOSEN]
    if not arms:
        return Answer(ABLATED, "Not measured", "The evaluation has no mask and no rule.", "missing", None, command)
    best = _best(arms)
    how = _how([choice for choice in choices if choice.verdict is best], tried)
    return _answer(ABLATED, arms, "ablated", how, link, command)


def _how(choices: Sequence[Choice], tried: int) -> str:
    if not choices:
        return "" if tried < 2 else f" It is one of {tried} tested arms; their intervals are not corrected for that."
    best = choices[0]
    if best.confirmed:
        wide = f" by intervals widened for {best.comparisons} judged arms" if best.comparisons > 1 else ""
        return f" Half of the questions selected it among {best.candidates} arms, and the others judge it{wide}."
    return f" The same questions selected it among {best.candidates} arms, so the interval is too optimistic."


def pruning_answer(verdict: Verdict | None, link: str, commands: Commands) -> Answer:
    """Return the answer from pruned models."""
    command = commands.on_model("prune", "--share", "0.1", *commands.texts_and_tasks, "--out", "DIR")
    outcomes = [] if verdict is None else [*verdict.arms, *verdict.unjudged]
    pruned = [arm for arm in outcomes if arm.kind is ArmKind.PRUNED]
    if not pruned:
        why = "No evaluation of a pruned model is in the store, or another evaluation is shown."
        return Answer(REMOVED, "Not measured", why, "missing", None, command)
    judged = [arm for arm in pruned if isinstance(arm, ArmVerdict)]
    if not judged:
        first = min(pruned, key=lambda arm: arm.zeroed_share or 0.0)
        measures = "; ".join(measure.words() for measure in first.measures) or "no measure"
        detail = f"No task has right answers. Fewest removed: {first.name} ({_share(first.zeroed_share)}): {measures}."
        return Answer(REMOVED, "No verdict", detail, "open", link, command)
    return _answer(REMOVED, judged, "removed", "", link, command)


def _best(arms: Sequence[ArmVerdict]) -> ArmVerdict:
    """Return the passing arm with the largest share; if none passes, the one with the best lower end."""
    passing = [arm for arm in arms if arm.removable]
    if passing:
        return max(passing, key=lambda arm: (arm.zeroed_share or 0.0, arm.paired.low))
    return max(arms, key=lambda arm: arm.paired.low)


def _answer(question: str, arms: Sequence[ArmVerdict], done: str, how: str, link: str, command: str) -> Answer:
    """Return the largest share that passes; if none does, the arm with the best lower end."""
    best = _best(arms)
    if best.removable:
        headline = f"{_share(best.zeroed_share)} of heads"
        return Answer(question, headline, f"{_cost(best, done)}{how}", "known", link)
    if not best.paired.above_chance:
        lead = "The model itself is at or near chance, so its questions show nothing."
        return Answer(question, "Model at chance", f"{lead} {_cost(best, done)}", "open", link, command)
    if best.questions_needed and not best.losses:
        lead = (
            f"{best.paired.questions:,} questions cannot show it: about {about(best.questions_needed)} are needed to"
            " exclude a loss of one point, if there is none."
        )
        return Answer(question, "Too few questions", f"{lead} {_cost(best, done)}", "open", link, command)
    lead = "No tested set of heads is shown to cost at most one point and to keep recall. Closest:"
    return Answer(question, "None shown", f"{lead} {_cost(best, done)}{how}", "open", link, command)


def _cost(arm: ArmVerdict, done: str) -> str:
    p = arm.paired
    recall = ", ".join(family.points() for family in arm.recall if family.informative)
    text = (
        f"{arm.name}: {_share(arm.zeroed_share)} of heads {done} cost {interval(p.difference, p.low, p.high)} of"
        f" accuracy on {p.questions:,} questions (baseline {p.baseline:.1f} %)"
    )
    return f"{text}; recall left: {recall}." if recall else f"{text}; recall was not tested."


def _share(share: float | None) -> str:
    return "an unknown share" if share is None else f"{share:.1%}"
