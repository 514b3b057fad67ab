"""The answers of a study: largest safe savings, all shares that were tried, and the files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headscan.catalog import RECALL_FAMILIES, head_count
from headscan.export.servable_model import command_lines
from headscan.report.ablation_costs import ABLATION
from headscan.report.answers import ABLATED_QUESTION, CACHE_QUESTION, REMOVED_QUESTION, ReportAnswer
from headscan.report.saving_costs import CACHE, REMOVAL
from headscan.runs.progress import time_text
from headscan.settings.saving_settings import ENGINES, Engine
from headscan.store.output_files import write_text
from headscan.store.verdict_limits import limits_words
from headscan.text_tables import counted, html_text, percent, plain, text_table
from headscan.verdicts.arm_verdict import PROBABLY_LOSES, TOO_FEW_QUESTIONS, TOO_FEW_TEXTS, Outcome
from headscan.verdicts.metrics import Increase, exceeds
from headscan.verdicts.ordered_shares import ShareVerdict, largest_safe


@dataclass(frozen=True)
class SavingKind:
    """A kind of saving: its name in tables and files, its question and section of the report, and what is counted."""

    name: str
    question: str
    section: str
    unit: str


ABLATED = SavingKind("heads ablated", ABLATED_QUESTION, ABLATION, "heads")
CACHED = SavingKind("KV cache", CACHE_QUESTION, CACHE, "KV heads windowed")
REMOVED = SavingKind("heads removed", REMOVED_QUESTION, REMOVAL, "heads")


@dataclass(frozen=True)
class Saving:
    """One kind of saving, with its shares from small to large.

    Attributes:
        judged: Verdicts on shares; the last one may have failed.
        tried: Names of all arms with their shares.
        units: Heads or KV heads of the model.
        criterion: Score that ranks the heads; empty for other kinds.
        cache_saved: Share of the KV cache that each arm saves, 0 to 1.
        weights_saved: Share of the weights that each arm saves, 0 to 1.
        length: Tokens at which the cache is counted; 0 if the share does not depend on them.
        file: File or folder of the largest safe share; empty without one.
        commands: Commands by engine that serve the file, or use it.
        tried_file: File or folder of the first share that was judged, which is not safe; empty if one is safe, or if
            the heads of the share have no file.
        own_losses: Loss of each plan on its own held-out prompts, in words, by arm.
        stopped: What plans lose there for which a study asks no questions, by arm.
    """

    kind: SavingKind
    judged: tuple[ShareVerdict, ...]
    tried: tuple[tuple[str, float], ...]
    units: int = 0
    criterion: str = ""
    cache_saved: Mapping[str, float] = field(default_factory=dict)
    weights_saved: Mapping[str, float] = field(default_factory=dict)
    length: int = 0
    file: str = ""
    commands: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tried_file: str = ""
    own_losses: Mapping[str, str] = field(default_factory=dict)
    stopped: Mapping[str, str] = field(default_factory=dict)

    @property
    def cache_counted(self) -> tuple[int, dict[str, float]]:
        """The length at which the cache is counted, and the share of it that each arm leaves."""
        return self.length, {name: 1 - saved for name, saved in self.cache_saved.items()}

    @property
    def safe(self) -> ShareVerdict | None:
        """The largest safe share; None if none is shown to be safe."""
        return largest_safe(self.judged)

    def answer(self) -> str:
        """Return the largest safe share in words."""
        if self.safe is None:
            return "none shown to be safe"
        parts = [self._size(self.safe)]
        if self.safe.recall_unknown:
            parts.append(self.safe.recall_unknown)
        return ", ".join(parts)

    def saves(self) -> str:
        """Return the cache and the weights that the largest safe share saves, and how many times as many tokens fit
        into a cache of fixed size; empty without a safe share.
        """
        if self.kind == ABLATED:
            return "nothing by itself"
        if self.safe is None:
            return ""
        name = self.safe.name
        parts = [
            f"{what} {percent(saved[name])}"
            for what, saved in (("cache", self.cache_saved), ("weights", self.weights_saved))
            if name in saved
        ]
        if name in self.tokens_fit:
            parts.append(f"{self.tokens_fit[name]:.2f} times the tokens")
        return ", ".join(parts)

    @property
    def tokens_fit(self) -> dict[str, float]:
        """How many times as many tokens fit into a cache of fixed size, by arm."""
        return {name: 1 / (1 - saved) for name, saved in self.cache_saved.items() if saved < 1}

    def next(self) -> str:
        """Return the first share that is not safe, with its verdict as the table shows it, and why."""
        failed = next((each for each in self.judged if each.outcome is not Outcome.SAFE), None)
        if failed is None:
            rest = len(self.tried) - len(self.judged)
            return f"{rest} larger not asked" if rest else "all tried shares are safe"
        why = f"loses {failed.why}" if failed.outcome is Outcome.LOSES else f"{failed.label}: {failed.why}"
        return f"{percent(failed.share)} {why}"

    def card(self) -> ReportAnswer:
        """Return the answer as the report shows it."""
        question, link = self.kind.question, self.kind.section
        shown = self.safe or next(iter(self.judged), None)
        numbers = "" if shown is None else f" At {percent(shown.share)}: {_numbers(shown)}."
        if self.safe is not None:
            detail = f"{self.answer()}. Saves: {self.saves()}.{numbers} Next: {self.next()}."
            headline = f"{percent(self.safe.share)} is {self.safe.label}"
            return ReportAnswer(question, headline, detail, "open" if self.safe.recall_unknown else "known", link)
        headline = "None shown to be safe"
        if shown is not None and shown.label in (TOO_FEW_QUESTIONS, TOO_FEW_TEXTS, PROBABLY_LOSES):
            headline = shown.label.capitalize()
        following = self.next()
        tried = f" The file of the tried share, which is not safe: {self.tried_file}." * bool(self.tried_file)
        detail = f"{following[0].upper()}{following[1:]}.{numbers}{tried}"
        return ReportAnswer(question, headline, detail, "open", link)

    def _size(self, share: ShareVerdict) -> str:
        by = f" by {self.criterion}" if self.criterion else ""
        return f"{head_count(share.share, self.units)} of {self.units} {self.kind.unit} ({percent(share.share)}){by}"


def _numbers(share: ShareVerdict) -> str:
    """Return the changes of accuracy, loss and recall at a share, in words."""
    parts = [f"loss {share.loss.numbers()} nats per token"] if share.loss is not None else []
    if share.accuracy is not None:
        parts.append(
            f"accuracy {share.accuracy.interval.words(1)} points on {counted(share.accuracy.questions, 'question')}"
        )
    if share.expected is not None:
        parts.append(f"expected accuracy {share.expected.interval.words(1)} points")
    parts += [f"{RECALL_FAMILIES[each.family].heading} {each.numbers()}" for each in share.recall]
    return ", ".join(parts)


@dataclass(frozen=True)
class StudyAnswer:
    """The answers of a study.

    Attributes:
        questions: Benchmark questions that judge.
        texts: Texts whose loss is judged.
        tokens: Length of the texts and of the recall questions.
        more_questions: Questions up to which the same command with more hours asks; 0 if it asks no more.
        losses: Increase of the held-out loss by arm, with intervals widened for the kinds of savings.
        seconds: Time of all calls.
        steps: Approximate seconds of each step, of a dry run alone; it has no savings.
        engine: Serving engine in whose form the savings are.
    """

    model: str
    corpus: str
    layers: int
    heads: int
    questions: int
    texts: int
    tokens: int
    max_loss: float
    max_points: float
    savings: tuple[Saving, ...]
    losses: Mapping[str, Increase]
    report: str
    store: str
    seconds: float
    steps: Mapping[str, float] = field(default_factory=dict)
    more_questions: int = 0
    engine: Engine = "transformers"

    def __str__(self) -> str:
        """Return the answers as two tables, savings and every judged share; of a dry run, the steps."""
        if self.steps:
            rows = [{"step": name, "about": time_text(seconds)} for name, seconds in self.steps.items()]
            return f"{text_table(rows)}\n\nnothing is kept: the same command without --dry-run runs these steps"
        head = (
            f"{self.model} on {self.corpus}: {counted(self.layers, 'layer')}, {counted(self.heads, 'head')}, judged on"
            f" {counted(self.questions, 'question')} and {counted(self.texts, 'text')} of up to {self.tokens:,} tokens,"
            f" in {time_text(self.seconds)}"
        )
        savings = [
            {
                "saving": each.kind.name,
                "largest safe": each.answer(),
                "saves": each.saves(),
                "next larger share": each.next(),
                "file": each.file or (each.tried_file and f"{each.tried_file} (tried, not safe)"),
            }
            for each in self.savings
        ]
        several = len(self.savings) > 1
        limits = limits_words(self.max_loss, self.max_points)
        limits += f". Intervals hold for all {len(self.savings)} savings together" * several
        length = max((each.length for each in self.savings), default=0)
        at = f" (plans: at {length:,} tokens)" if length else ""
        saves = (
            f"saves: shares of the KV cache{at} and of the weights in {ENGINES[self.engine]}, and how many times as"
            " many tokens fit into the same cache"
        )
        serving = [
            "\n".join([f"{each.file}:", *command_lines(each.commands)]) for each in self.savings if each.commands
        ]
        own = [
            f"{saving.kind.name} {percent(share)}, on the held-out prompts of its plan, in nats per token:"
            f" {saving.own_losses[name]}"
            for saving in self.savings
            for name, share in saving.tried
            if name in saving.own_losses
        ]
        return "\n\n".join(
            [
                head,
                text_table(savings),
                saves,
                text_table(self._share_rows()),
                *(["\n".join(own)] if own else []),
                limits,
                *self._more(),
                *serving,
                f"report  {self.report}\nstore   {self.store}",
            ]
        )

    def _more(self) -> list[str]:
        """Return what more hours would do, if they do anything."""
        if not self.more_questions:
            return []
        return [f"The same command with more --hours goes on, and asks up to {self.more_questions:,} questions."]

    def _repr_html_(self) -> str:
        return html_text(str(self))

    def __repr__(self) -> str:
        savings = "; ".join(f"{each.kind.name}: {each.answer()}" for each in self.savings)
        return f"StudyAnswer({self.model}, {counted(self.questions, 'question')}: {savings or 'a dry run'})"

    def save(self, path: Path) -> None:
        """Write the answers as JSON."""
        write_text(path, json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n")

    def as_dict(self) -> dict[str, Any]:
        """Return the answers as JSON can hold them."""
        fields = asdict(self)
        for saving, row in zip(self.savings, fields["savings"], strict=True):
            safe = None if saving.safe is None else saving.safe.share
            row |= {"kind": saving.kind.name, "answer": saving.answer(), "safe": safe}
            row |= {"saves": saving.saves(), "tokens_fit": saving.tokens_fit}
        if not self.steps:
            del fields["steps"]
        fields["limits"] = limits_words(self.max_loss, self.max_points)
        whole: dict[str, Any] = plain(fields)
        return whole

    def _share_rows(self) -> list[dict[str, str]]:
        rows = []
        for saving in self.savings:
            judged = {each.name: each for each in saving.judged}
            for name, share in saving.tried:
                verdict = judged.get(name)
                paired, expected = (None, None) if verdict is None else (verdict.accuracy, verdict.expected)
                recall = {} if verdict is None else {each.family: each.numbers() for each in verdict.recall}
                rows.append(
                    {
                        "arm": f"{saving.kind.name} {percent(share)}",
                        "heads": f"{head_count(share, saving.units)}",
                        "questions": f"{verdict.questions:,}" if verdict is not None and verdict.questions else "",
                        "accuracy": "" if paired is None else paired.interval.words(1),
                        "expected": "" if expected is None else expected.interval.words(1),
                        "loss": self.losses[name].numbers(),
                        **{each.heading: recall.get(name, "") for name, each in RECALL_FAMILIES.items()},
                        "verdict": self._outcome(verdict, name, saving.stopped),
                    }
                )
        return rows

    def _outcome(self, verdict: ShareVerdict | None, name: str, stopped: Mapping[str, str]) -> str:
        if verdict is not None:
            return verdict.label
        if exceeds(self.losses[name], self.max_loss):
            return f"{Outcome.LOSES} (loss)"
        return f"{Outcome.LOSES} (held-out prompts)" if name in stopped else "not asked"
