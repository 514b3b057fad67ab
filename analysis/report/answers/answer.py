"""One answer at the top of a report."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

#: ``known``: a verdict. ``open``: measured, but not shown either way. ``missing``: nothing was measured.
State = Literal["known", "open", "missing"]


@dataclass(frozen=True)
class Answer:
    """One question with its answer.

    Attributes:
        headline: The number in a few words.
        detail: The number with its interval and conditions.
        link: Identity of the section with the evidence; None without one.
        command: Command that gives a missing or better answer; None if none is needed.
    """

    question: str
    headline: str
    detail: str
    state: State
    link: str | None = None
    command: str | None = None


#: What commands call a bundled model, by its name in the store.
_BUNDLED = {"demo-5m": "demo"}
#: Options of the corpus by field of its stored settings, with the field's default.
_CORPUS_OPTIONS = {
    "config": ("--config", None),
    "split": ("--split", "train"),
    "column": ("--column", None),
    "revision": ("--corpus-revision", None),
}


@dataclass(frozen=True)
class Commands:
    """Commands on the model and store of a report, which run as they are, except for words in capitals.

    Attributes:
        model: The words that name the model: its folder or hub name, and the options of loading it.
        store: The store.
        corpus: The options that name a corpus.
        plan: File of the plan.
    """

    model: tuple[str, ...]
    store: Path
    corpus: tuple[str, ...] = ("--corpus", "CORPUS")
    plan: str = "PLAN"

    @classmethod
    def of(cls, run: Mapping[str, Any], store: Path, plan: str | Path | None = None) -> Commands:
        """Return the commands for the model and corpus of a scan, as its settings name them.

        Args:
            plan: File of the plan; None leaves a placeholder.
        """
        config = run.get("config") or {}
        file = {} if plan is None else {"plan": str(plan)}
        return cls(_model_words(run["model"], config.get("model")), store, _corpus_words(config.get("corpus")), **file)

    @property
    def own_texts(self) -> tuple[str, ...]:
        """The options that name texts; the bundled model has its own."""
        return () if self.model[0] in _BUNDLED.values() else self.corpus

    @property
    def texts_and_tasks(self) -> tuple[str, ...]:
        """The options of `prune` that name texts and tasks; the bundled model has its own."""
        return () if self.model[0] in _BUNDLED.values() else (*self.corpus, "--tasks", "TASKS")

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
    if name in _BUNDLED:
        return (_BUNDLED[name],)
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


def interval(value: float, low: float, high: float) -> str:
    """Return a difference in points with its 95 % interval."""
    return f"{value:+.2f} points [{low:+.2f}, {high:+.2f}]"
