"""How much of the KV cache can go."""

from __future__ import annotations

from collections.abc import Mapping

from headscan.analysis.plans import HeadPlan
from headscan.analysis.report.answers.answer import Answer, Commands, interval
from headscan.analysis.verdicts.judge import ArmVerdict, Verdict
from headscan.analysis.verdicts.paired import about

QUESTION = "How much KV cache can go?"


def cache_answer(
    verdict: Verdict | None,
    left: Mapping[str, float],
    tokens: int | None,
    plan: HeadPlan | None,
    links: tuple[str, str],
    commands: Commands,
) -> Answer:
    """Return the largest saving of a plan that passes, or what is known instead.

    Args:
        left: By name of an arm with a plan, the share of the cache that is left at ``tokens`` tokens.
        links: Sections of the evaluated plans, and of the plan.
    """
    arms = [] if verdict is None else [arm for arm in verdict.arms if arm.name in left and not arm.is_random]
    if not arms:
        return _unjudged(plan, links[1], commands)
    at = f" at {tokens:,} tokens" if tokens else ""
    passing = [arm for arm in arms if arm.removable]
    if passing:
        best = min(passing, key=lambda arm: left[arm.name])
        return Answer(QUESTION, f"{1 - left[best.name]:.1%}{at}", _cost(best, left[best.name], at), "known", links[0])
    best = max(arms, key=lambda arm: arm.paired.low)
    command = commands.on_model("evaluate", "--tasks", "TASKS", "--plan", commands.plan, "--controls", "19")
    if not best.paired.above_chance:
        headline, lead = "Model at chance", "The model itself is at or near chance, so its questions show nothing."
    elif best.questions_needed and not best.losses:
        headline = "Too few questions"
        needed = about(best.questions_needed)
        lead = f"{best.paired.questions:,} questions cannot show it: about {needed} are needed, if nothing is lost."
    else:
        headline, lead = "None shown", "No tested plan is shown to cost at most one point and to keep recall. Closest:"
    return Answer(QUESTION, headline, f"{lead} {_cost(best, left[best.name], at)}", "open", links[0], command)


def _unjudged(plan: HeadPlan | None, link: str, commands: Commands) -> Answer:
    if plan is None:
        command = commands.on_store("plan", "--window-share", "0.5")
        return Answer(QUESTION, "Not measured", "No plan is given and none was evaluated.", "missing", None, command)
    command = commands.on_model("evaluate", "--tasks", "TASKS", "--plan", commands.plan, "--controls", "19")
    longest = max(plan.budget.lengths, key=lambda length: length.tokens)
    detail = (
        f"The plan (method {plan.method}) saves {longest.saved_share:.1%} at {longest.tokens:,} tokens, but the shown"
        " evaluation does not test what that costs."
    )
    return Answer(QUESTION, "Not tested", detail, "missing", link, command)


def _cost(arm: ArmVerdict, left: float, at: str) -> str:
    p = arm.paired
    recall = ", ".join(family.points() for family in arm.recall if family.informative)
    text = (
        f"{arm.name}: {1 - left:.1%} of the cache less{at} changes accuracy by {interval(p.difference, p.low, p.high)}"
        f" on {p.questions:,} questions"
    )
    return f"{text}; recall left: {recall}." if recall else f"{text}; recall was not tested."
