"""Options and methods that verbs share: the model, its devices, the store, texts, and messages."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from headscan.checkpoints.source_folder import DEMO_MODEL, check_folder
from headscan.cli.option_parser import Given, UsageError, with_flags
from headscan.cluster.placement_base import PlacementRequest, Timeouts, ray_address
from headscan.errors import ModelLoadError
from headscan.model_spec import ModelSpec
from headscan.options import LOCK_TIMEOUT, LONGEST_WAIT, Group, Needs, Option
from headscan.settings.corpus_settings import BUILT_IN_CORPORA, CorpusSpec, ExamplesSpec
from headscan.settings.evaluation_settings import ResumeAnyway
from headscan.text_tables import say

if TYPE_CHECKING:
    from headscan.jobs.job_functions import JobOptions
    from headscan.runs.model_identity import ModelIdentity
    from headscan.store.store import Store

#: Corpus of the bundled model unless one is named: modules of the standard library that it has not read.
DEMO_CORPUS = "python-stdlib-heldout"
#: What can be a corpus, apart from a file or a folder.
OTHER_CORPORA = f"data set on the hub, or a built-in corpus: {', '.join(BUILT_IN_CORPORA)}"
CORPORA = f"file, folder, {OTHER_CORPORA}"
_MODEL = Option(
    "folder saved by transformers, name on the hub, GGUF file, `smollm2`, or `demo` for the bundled model",
    flag="MODEL",
    parse=check_folder,
)


def say_run(run: Mapping[str, Any]) -> None:
    """Print which run of the store, a row of ``runs``, a verb reads."""
    corpus = f" on {run['corpus']}" if run["corpus"] else ""
    began = f"{run['started_at']:%Y-%m-%d %H:%M}"
    say(f"from {run['kind']} {run['run_id']} of {run['model']}{corpus}, {began}, {run['status']}")


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
        float,
        Option(
            "wait for another process that holds the store, in seconds", metavar="SECONDS", least=0, most=LONGEST_WAIT
        ),
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

    def check_exists(self) -> None:
        """Raise StoreError if there is no store to read."""
        self.open().runs()


def check_inputs(settings: Any) -> None:
    """Raise now, before libraries and models load, which takes seconds, if a corpus, examples or a model's folder that
    a verb names are missing. Names that can be on the hub pass.
    """
    if isinstance(settings, CorpusOptions) and (settings.name or "").strip():  # `CorpusSpec` refuses an empty name
        from headscan.texts import check_corpus

        check_corpus(settings.name or "")
    if isinstance(settings, ExamplesSpec):
        settings.check_file()
    folder = settings.model if isinstance(settings, ModelVerb) else None
    if folder is not None and folder.endswith("/") and not Path(folder).exists():
        raise ModelLoadError(f"no model at {folder}: there is no such folder. Check the path")
    for field in fields(settings):
        part = getattr(settings, field.name)
        if is_dataclass(part) and not isinstance(part, Given):
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

    def job_options(self, identity: ModelIdentity | None, verb: type) -> JobOptions:
        """Return the options of a job without a store; its lines have the flags of the verb."""
        return {
            "devices": self.request,
            "ray_address": self.ray_address,
            "timeouts": self.timeouts,
            "identity": identity,
            "say": lambda line: say(with_flags(line, verb)),
        }

    def in_this_process(self) -> Devices:
        """Return the devices of a verb whose one replica is in this process."""
        if self.ray_address is not None:
            raise UsageError("--ray-address has no effect on this verb: leave it out")
        return replace(self, request=self.request.in_this_process())


@dataclass(frozen=True, kw_only=True)
class CorpusOptions:
    """A corpus; verbs with another meaning of it have a class of their own."""

    name: Annotated[
        str | None, Option(f"{CORPORA} (default: required, except for `demo`: {DEMO_CORPUS})", flag="--corpus")
    ] = None
    data_set: Annotated[Given[CorpusSpec], Group(needs=(Needs(key="name"),))]

    def spec(self, **settings: Any) -> CorpusSpec | None:
        return None if self.name is None else self.data_set.build(self.name, **settings)

    def required(self, verb: ModelVerb, **settings: Any) -> CorpusSpec:
        """Return the corpus; the bundled model has one of its own."""
        if self.name is not None:
            return self.data_set.build(self.name, **settings)
        if not verb.is_demo:
            raise UsageError("--corpus is required: name a file, a folder, a data set or a built-in corpus")
        say(f"corpus: {DEMO_CORPUS}")
        return self.data_set.build(DEMO_CORPUS, **settings)


@dataclass(frozen=True, kw_only=True)
class StoreVerb:
    """A verb with a store."""

    store: Annotated[StoreOptions, Group()]


@dataclass(frozen=True, kw_only=True)
class ModelVerb:
    """A verb with a model."""

    model: Annotated[str, _MODEL]
    loading: Annotated[Given[ModelSpec], Group("model")]

    @property
    def is_demo(self) -> bool:
        return self.model == DEMO_MODEL

    def spec(self) -> ModelSpec:
        return self.loading.build(self.model)

    def identified(self, *, need_tokenizer: bool = True) -> tuple[ModelSpec, ModelIdentity]:
        """Return the model and its identity, and turn off progress bars and warnings of transformers."""
        from headscan.runs.model_identity import identify

        quiet_libraries()
        spec = self.spec()
        return spec, identify(spec, need_tokenizer=need_tokenizer)

    def full_precision(self) -> ModelSpec:
        """Return the model; the demo in float32, because half precision is slower on most CPUs, and rounds repairs."""
        spec = self.spec()
        return replace(spec, dtype="float32") if self.is_demo and spec.dtype == "auto" else spec


@dataclass(frozen=True, kw_only=True)
class OptionalModelVerb(ModelVerb):
    """A verb that can do without a model."""

    model: Annotated[str | None, _MODEL] = None  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class RunVerb(ModelVerb, StoreVerb):
    """A verb that runs a model and writes a run into the store."""

    devices: Annotated[Devices, Group("devices")]
    resume_anyway: ResumeAnyway = False
    #: The same command again resumes after an interruption.
    resumes = True

    def job_options(self, identity: ModelIdentity | None = None) -> JobOptions:
        """Return the options of the job of this verb; ``identity`` None lets the job read it. Raise now, before
        anything is measured, if the store cannot be written.
        """
        self.store.open(writes=True)
        return {
            **self.devices.job_options(identity, type(self)),
            "resume_anyway": self.resume_anyway,
            "lock_timeout": self.store.lock_timeout,
        }
