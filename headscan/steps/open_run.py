"""The options of a step that say where and how it runs, and the run that they open: store, placement and model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from headscan.cluster.placement_base import PlacementError, PlacementRequest, Timeouts, ray_address
from headscan.errors import StoreError
from headscan.options import LOCK_TIMEOUT, LONGEST_WAIT, Limits, check_limits
from headscan.plans import PlanError
from headscan.runs.model_identity import ModelIdentity, identify
from headscan.runs.progress import at_work
from headscan.runs.run_context import ModelContext, ModelOpener, Run
from headscan.store.parquet_store import store_at
from headscan.text_tables import say

if TYPE_CHECKING:
    from headscan.steps.step import Step


class JobOptions(TypedDict, total=False):
    """Options of `Step.run`. Steps that remove heads (a referee on tasks, `Prune`, `Study`) run in this process: they
    take one replica, and no ``ray_address``.

    Attributes:
        devices: Placement and devices; None, the default, chooses them. ``devices.batch_tokens`` are the tokens of one
            forward pass; if they are not given, ``devices.memory`` lowers the usual ones to what fits, and a line
            reports that.
        ray_address: Address of a running Ray cluster, such as ``first:6379``; None, the default, uses this machine, and
            a local Ray for several replicas. The process stays connected, so that all its steps use one cluster.
        timeouts: Timeouts of workers on Ray; None uses their defaults.
        resume_anyway: Resume although software, device or the model's code changed; the store records both versions.
        lock_timeout: Seconds to wait while another process has the store open.
        identity: Names and hashes of the model, if they are known; None reads its files.
        say: Function that receives lines for the user; the default prints them to standard error.
    """

    devices: PlacementRequest | None
    ray_address: str | None
    timeouts: Timeouts | None
    resume_anyway: bool
    lock_timeout: float
    identity: ModelIdentity | None
    say: Callable[[str], None]


@dataclass(frozen=True)
class _Checked:
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


@contextmanager
def open_run(step: Step[Any], store: str | Path | None, options: JobOptions) -> Iterator[Any]:
    """Yield the `Run` of a step, or its `ModelContext` if ``store`` is None; options are checked before a file is read.

    Raises:
        StoreError: ``store`` is None, and the step keeps rows.
        PlanError: ``store`` is None, and an option of a store is given. ``resume_anyway=False`` is what happens anyway.
    """
    if unknown := options.keys() - JobOptions.__annotations__.keys():
        raise TypeError(f"unknown option {min(unknown)!r}. Choose from {', '.join(JobOptions.__annotations__)}")
    checked = _Checked(**options)
    devices = checked.devices or PlacementRequest()
    if step.in_this_process:
        if checked.ray_address is not None:
            raise PlacementError(
                f"`ray_address={checked.ray_address}`: this step runs in one process. Leave out `ray_address`"
            )
        devices = devices.in_this_process()
    if store is None and step.keeps_rows:
        raise StoreError("`store=None`: the rows have no place. Name a DuckDB file")
    if store is None:
        for name, given in (("resume_anyway", checked.resume_anyway), ("lock_timeout", "lock_timeout" in options)):
            if given:
                raise PlanError(f"`{name}` has no effect without a store: leave it out")
    with at_work(f"reading the files of {step.model.source}"):
        identity = checked.identity or identify(step.model, need_tokenizer=step.needs_tokenizer)
    opener = ModelOpener(
        step.model,
        step.longest(identity),
        devices,
        step.batch_tokens,
        evaluates=step.evaluates,
        ray_address=checked.ray_address,
        timeouts=checked.timeouts,
        say=checked.say,
    )
    shared: dict[str, Any] = {"identity": identity, "batch_tokens": opener.batch_tokens, "say": checked.say}
    if store is None:
        with ModelContext(step.model, opener, **shared) as context:
            yield context
        return
    kept = store_at(store, lock_timeout=checked.lock_timeout, on_wait=checked.say)
    with Run(step.model, kept, opener, resume_anyway=checked.resume_anyway, **shared) as run:
        yield run
