"""Options and methods that verbs share: the model, its devices, the store, texts, and messages."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, make_dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from headscan.cli.option_parser import with_flags
from headscan.cluster.placement_base import PlacementRequest, Timeouts, ray_address
from headscan.errors import ModelLoadError
from headscan.model_spec import ModelSpec
from headscan.options import LOCK_TIMEOUT, LONGEST_WAIT, Group, Option
from headscan.settings.corpus_settings import DEMO_CORPUS, CorpusSpec, ExamplesSpec
from headscan.settings.evaluation_settings import RESUME_ANYWAY, TaskConfig
from headscan.steps.results import Json, Result, run_line
from headscan.steps.step import Step
from headscan.text_tables import say

if TYPE_CHECKING:
    from headscan.steps.open_run import JobOptions
    from headscan.store.store import Store


def say_run(run: Mapping[str, Any]) -> None:
    """Print which run of the store, a row of ``runs``, a verb reads."""
    say(run_line(run))


def quiet_libraries() -> None:
    """Turn off progress bars and warnings of transformers."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """The store of a verb."""

    path: Annotated[str, Option("DuckDB file", flag="--store")] = "headscan.duckdb"
    lock_timeout: Annotated[
        float, Option("wait for another process that holds the store, in seconds", least=0, most=LONGEST_WAIT)
    ] = LOCK_TIMEOUT

    def open(self, *, writes: bool = False) -> Store:
        """Return the store, and report a wait for another process. ``writes`` raises now, before anything is measured,
        if the store cannot be written.
        """
        from headscan.store.parquet_store import store_at

        path = Path(self.path)
        if writes and not path.exists():
            folder = next(parent for parent in path.absolute().parents if parent.exists())
            if not folder.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "not a folder that can hold the store", str(folder))
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "the store cannot be written there", str(folder))
        return store_at(self.path, lock_timeout=self.lock_timeout, on_wait=say)


def check_inputs(settings: Any) -> None:
    """Raise now, before libraries and models load, which takes seconds, if a corpus, examples or a model's folder that
    a verb names are missing. Names that can be on the hub pass.
    """
    if isinstance(settings, CorpusSpec):
        from headscan.texts import check_corpus

        check_corpus(settings.name)
    if isinstance(settings, ExamplesSpec):
        settings.check_file()
    if isinstance(settings, TaskConfig):
        settings.check_folder()
    if isinstance(settings, ModelSpec) and settings.source.endswith("/") and not Path(settings.source).exists():
        raise ModelLoadError(f"no model at {settings.source}: there is no such folder. Check the path")
    for field in fields(settings):
        part = getattr(settings, field.name)
        if is_dataclass(part):
            check_inputs(part)


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Where a model runs."""

    request: Annotated[PlacementRequest, Group()]
    ray_address: Annotated[
        str | None,
        Option(
            "address of a running Ray cluster (default: a local Ray if there are several replicas)", parse=ray_address
        ),
    ] = None
    timeouts: Annotated[Timeouts, Group()]

    def job_options(self, verb: type) -> JobOptions:
        """Return the options of a step without a store; its lines have the flags of the verb."""
        return {
            "devices": self.request,
            "ray_address": self.ray_address,
            "timeouts": self.timeouts,
            "say": lambda line: say(with_flags(line, verb)),
        }


@dataclass(frozen=True, kw_only=True)
class StoreVerb:
    """A verb with a store."""

    store: Annotated[StoreOptions, Group()]


@dataclass(frozen=True, kw_only=True)
class StepVerb:
    """A verb that runs a step: its options, and where it runs. `step_verb` makes the class of each step."""

    step: Any
    json: Json = False
    devices: Annotated[Devices, Group("devices")]
    store: StoreOptions | None = None
    resume_anyway: bool = False

    @property
    def resumes(self) -> bool:
        """The same command again resumes after an interruption."""
        return bool(self.step.stores)

    def run(self) -> Result:
        step: Step[Any] = self.step
        options = self.devices.job_options(type(self))
        if "resume_anyway" in step.stores:
            options["resume_anyway"] = self.resume_anyway
        store: Any = None  # of steps that keep nothing
        if self.store is not None:
            options["lock_timeout"] = self.store.lock_timeout
            store = self.store.open(writes=step.model is not None)
        step.check_inputs(store)
        quiet_libraries()
        if step.model is not None and step.model.is_demo and getattr(step, "corpus", None) == CorpusSpec(DEMO_CORPUS):
            say(f"corpus: {DEMO_CORPUS}")
        result = step.run(None if self.store is None else self.store.path, **options)
        return step.shown(result, store)


@cache
def step_verb(step: type[Step[Any]]) -> type[StepVerb]:
    """Return the verb of a step."""
    options: list[Any] = [
        ("step", Annotated[step, Group()]),
        ("devices", Annotated[Devices, Group("devices", needs=step.of_model)]),
    ]
    if "store" in step.stores:
        options.append(("store", Annotated[StoreOptions, Group()]))
    if "resume_anyway" in step.stores:
        options.append(("resume_anyway", Annotated[bool, replace(RESUME_ANYWAY, needs=step.of_model)], False))
    namespace = {"__doc__": step.__doc__, "common": step.common, "__module__": __name__}
    return make_dataclass(step.__name__, options, bases=(StepVerb,), namespace=namespace, frozen=True, kw_only=True)
