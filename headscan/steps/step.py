"""A step: a verb that runs a model. Its fields are its options, on the command line and in Python.

    found = Scan(ModelSpec("demo"), CorpusSpec("texts/"), TokenConfig(512)).run("s.duckdb")

`headscan.cli` makes the command line of a verb from the fields of its step, and help from the docstring. This module
and those of the steps import no library, so that help starts at once; `execute` imports the work.
"""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Generic, Self, TypeVar, Unpack

from headscan.errors import HeadscanError
from headscan.model_spec import ModelSpec
from headscan.options import BATCH_TOKENS, Group, check_limits
from headscan.settings.corpus_settings import DEMO_CORPUS, CorpusSpec

if TYPE_CHECKING:
    from headscan.runs.model_identity import ModelIdentity
    from headscan.runs.run_context import Run
    from headscan.steps.open_run import JobOptions
    from headscan.steps.results import Result
    from headscan.store.store import Store

R = TypeVar("R")


@dataclass(frozen=True)
class Step(ABC, Generic[R]):
    """A step, whose result is an ``R``.

    Attributes:
        common: Options of the short help page.
        needs_tokenizer: The step refuses a model without a tokenizer before it begins.
        keeps_rows: The step needs a store.
        stores: Options of the store that the command line has.
        of_model: Condition under which the step loads a model.
        error: Class of errors of settings that are out of range.
        evaluates: The step asks questions, which needs memory for logits and a KV cache.
    """

    model: Annotated[ModelSpec, Group("model")]

    common: ClassVar[str]
    needs_tokenizer: ClassVar = True
    error: ClassVar[type[HeadscanError]] = HeadscanError
    evaluates: ClassVar = False
    keeps_rows: ClassVar = True
    stores: ClassVar[tuple[str, ...]] = ("store", "resume_anyway")
    of_model: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_limits(self, self.error)

    @property
    def batch_tokens(self) -> int:
        """Tokens of one forward pass, with padding, unless the devices say otherwise."""
        return BATCH_TOKENS

    def refuse(self, names: Collection[str], why: str) -> None:
        """Raise ``error`` if one of these fields is set; ``why`` says with what it has no effect."""
        for each in fields(self):
            default = each.default if each.default_factory is MISSING else each.default_factory()
            if each.name in names and getattr(self, each.name) != default:
                raise self.error(f"`{each.name}` has no effect {why}: leave it out")

    def require_corpus(
        self, problem: str = "`corpus` is required: name a file, a folder, a data set or a built-in corpus"
    ) -> None:
        """Name the corpus of the bundled model if ``corpus`` is None; raise ``error`` for other models."""
        if getattr(self, "corpus", None) is None:
            if not self.model.is_demo:
                raise self.error(problem)
            object.__setattr__(self, "corpus", CorpusSpec(DEMO_CORPUS))

    def for_demo(self, scratch: Path) -> Self:
        """Return the step with what the bundled model brings along, such as a task, which is written to a folder."""
        return self

    def check_inputs(self, store: Store) -> None:
        """Raise now, before libraries and the model load, if a file or a run that the step names is missing."""

    @property
    def in_this_process(self) -> bool:
        """True if the step runs in this process, because it removes heads."""
        return False

    @abstractmethod
    def longest(self, identity: ModelIdentity) -> int:
        """Return the tokens of the longest text, for which the placement reserves memory."""

    @abstractmethod
    def execute(self, run: Run) -> R:
        """Do the work in a run; the same work again resumes."""

    @abstractmethod
    def shown(self, result: R, store: Store) -> Result:
        """Return what the command line prints."""

    def run(self, store: str | Path | None, **options: Unpack[JobOptions]) -> R:
        """Do the step into a store; the same call again resumes.

        Args:
            store: DuckDB file; a missing one is created.
            options: See `JobOptions`.

        Raises:
            HeadscanError: A setting, a file or the model does not fit. What was stored before stays.
        """
        from headscan.steps.open_run import open_run

        with tempfile.TemporaryDirectory() as scratch:
            step = self.for_demo(Path(scratch)) if self.model.is_demo else self
            with open_run(step, store, options) as run:
                return step.execute(run)
