"""The options of a job, and the run that they open: store, placement and model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypedDict

from headscan.cluster.placement_base import PlacementError, PlacementRequest, Timeouts, ray_address
from headscan.errors import StoreError
from headscan.model_spec import ModelSpec
from headscan.options import BATCH_TOKENS, LOCK_TIMEOUT, LONGEST_WAIT, Limits, check_limits
from headscan.plans import PlanError
from headscan.runs.model_identity import ModelIdentity, identify
from headscan.runs.run_context import ModelContext, ModelOpener, Run
from headscan.store.parquet_store import store_at
from headscan.text_tables import say


class LocalJobOptions(TypedDict, total=False):
    """Options of `referee`, `prune` and `study`, which run in this process because they remove heads.

    Attributes:
        devices: Placement and devices; None, the default, chooses them. ``devices.batch_tokens`` are the
            tokens of one forward pass; if they are not given, ``devices.memory`` lowers the usual ones to what fits,
            and a line reports that.
        timeouts: Timeouts of workers on Ray; None uses their defaults.
        resume_anyway: Resume although software, device or the model's code changed; the store records both versions.
        lock_timeout: Seconds to wait while another process has the store open.
        identity: Names and hashes of the model, if they are known; None reads its files.
        say: Function that receives lines for the user; the default prints them to standard error.
    """

    devices: PlacementRequest | None
    timeouts: Timeouts | None
    resume_anyway: bool
    lock_timeout: float
    identity: ModelIdentity | None
    say: Callable[[str], None]


class JobOptions(LocalJobOptions, total=False):
    """Options of all other jobs but `export`, which takes none: those of `LocalJobOptions`, and a Ray cluster.

    Attributes:
        ray_address: Address of a running Ray cluster, such as ``first:6379``; None, the default, uses this machine, and
            a local Ray for several replicas. The process stays connected, so that all its jobs use one cluster.
    """

    ray_address: str | None


@dataclass(frozen=True)
class CheckedOptions:
    """`JobOptions` with their defaults, checked."""

    devices: PlacementRequest | None = None
    ray_address: str | None = None
    timeouts: Timeouts | None = None
    resume_anyway: bool = False
    lock_timeout: Annotated[float, Limits(least=0, most=LONGEST_WAIT)] = LOCK_TIMEOUT
    identity: ModelIdentity | None = None
    say: Callable[[str], None] = say

    def __post_init__(self) -> None:
        check_limits(self, StoreError)
        if self.ray_address is not None:
            ray_address(self.ray_address)

    def opener(
        self, model: ModelSpec, tokens: int, batch_tokens: int = BATCH_TOKENS, *, evaluates: bool = False
    ) -> ModelOpener:
        return ModelOpener(
            model,
            tokens,
            self.devices or PlacementRequest(),
            batch_tokens,
            evaluates=evaluates,
            ray_address=self.ray_address,
            timeouts=self.timeouts,
            say=self.say,
        )


def checked_options(options: LocalJobOptions, *, in_this_process: bool = False) -> CheckedOptions:
    """Check a job's options before it reads a file; a job that runs ``in_this_process`` needs one replica."""
    if unknown := options.keys() - JobOptions.__annotations__.keys():
        raise TypeError(f"unknown option {min(unknown)!r}. Choose from {', '.join(JobOptions.__annotations__)}")
    checked = CheckedOptions(**options)
    if not in_this_process:
        return checked
    if checked.ray_address is not None:
        raise PlacementError(
            f"`ray_address={checked.ray_address}`: this job runs in one process. Leave out `ray_address`"
        )
    return replace(checked, devices=(checked.devices or PlacementRequest()).in_this_process())


def identified(
    model: ModelSpec, options: LocalJobOptions, *, in_this_process: bool = False, need_tokenizer: bool = True
) -> tuple[CheckedOptions, ModelIdentity]:
    """Check the options of a job, and return them with the identity of its model, which is read if they lack it."""
    checked = checked_options(options, in_this_process=in_this_process)
    identity = checked.identity or identify(model, need_tokenizer=need_tokenizer)
    return replace(checked, identity=identity), identity


@contextmanager
def open_run(
    options: CheckedOptions,
    model: ModelSpec,
    tokens: int,
    batch_tokens: int,
    store: str | Path,
    *,
    evaluates: bool = False,
) -> Iterator[Run]:
    """Yield the run of a job whose longest text has ``tokens``; a forward pass has ``batch_tokens`` tokens unless the
    options say otherwise.
    """
    opener = options.opener(model, tokens, batch_tokens, evaluates=evaluates)
    run = Run(
        model,
        store_at(store, lock_timeout=options.lock_timeout, on_wait=options.say),
        opener,
        identity=options.identity,
        batch_tokens=opener.batch_tokens,
        resume_anyway=options.resume_anyway,
        say=options.say,
    )
    with run:
        yield run


@contextmanager
def open_model(
    options: JobOptions, model: ModelSpec, longest: Callable[[ModelIdentity], int], why: str
) -> Iterator[ModelContext]:
    """Yield the model of a job that stores nothing; raise PlanError if it gets options of a store. ``why`` is where
    these have no effect. ``resume_anyway=False`` is what such a job does.
    """
    for name, given in (("resume_anyway", options.get("resume_anyway")), ("lock_timeout", "lock_timeout" in options)):
        if given:
            raise PlanError(f"`{name}` has no effect {why}: leave it out")
    checked, identity = identified(model, options)
    opener = checked.opener(model, longest(identity), evaluates=True)
    with ModelContext(model, opener, identity=identity, batch_tokens=opener.batch_tokens, say=checked.say) as context:
        yield context
