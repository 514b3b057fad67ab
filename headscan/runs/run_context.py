"""What every job needs, as its argument ``run``.

`ModelOpener` chooses the placement of a model and opens its pool. `ModelContext` has the model's identity, facts and
pool, and `Run` adds the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import pyarrow as pa
from numpy.typing import ArrayLike

from headscan.cluster.devices import machines, max_threads
from headscan.cluster.placement_base import ChosenPlacement, PlacementRequest, Timeouts
from headscan.cluster.placements import place
from headscan.cluster.pool import Pool, open_pool
from headscan.errors import StoreError
from headscan.long_work import KnownNumbers, WorkKey, hash_of
from headscan.model_spec import ModelSpec
from headscan.options import BATCH_TOKENS
from headscan.runs.code_version import software_of
from headscan.runs.model_identity import ModelFacts, ModelIdentity, identify, model_facts
from headscan.runs.progress import at_work
from headscan.sizing.model_sizes import model_sizes
from headscan.store.provenance import provenance_changes, unfinished_runs
from headscan.store.records import RunKind, RunRecord, RunState
from headscan.store.store import Store, refuse_resume, run_identity
from headscan.store.tables import TABLES

#: Opens the pool of a model.
PoolFactory = Callable[[ModelSpec], Pool]


@dataclass
class ModelOpener:
    """Opens the pool of a model, and pools of other models of the same job. The placement of the first is chosen and
    reported when the opener is made, because it decides the batch size of the job.

    Attributes:
        batch_tokens: Most tokens of one forward pass in the settings of the job. With ``memory`` in the request, they
            are lowered to what fits, which a line reports. The memory that is free now does not change them, because
            they are part of a run's identity, and the same command resumes the run. The ``batch_tokens`` of the
            request, if given, replace them, and are refused if ``memory`` does not hold them.
        evaluates: The job evaluates tasks, which needs memory for logits and a KV cache.
        ray_address: Address of a running Ray cluster, which runs single replicas, too. None uses this machine.
    """

    model: ModelSpec
    tokens: int
    request: PlacementRequest
    batch_tokens: int = BATCH_TOKENS
    evaluates: bool = False
    ray_address: str | None = None
    timeouts: Timeouts | None = None
    say: Callable[[str], None] = lambda line: None

    def __post_init__(self) -> None:
        self.batch_tokens = self.request.batch_tokens or self.batch_tokens
        self._placed = self._place(self.model)
        if self.request.memory is not None and self._placed.batch_tokens < self.batch_tokens:
            self.say(
                f"batches have {self._placed.batch_tokens} tokens instead of {self.batch_tokens}, as many as `memory`"
                " holds"
            )
            self.batch_tokens = self._placed.batch_tokens

    def __call__(self, model: ModelSpec) -> Pool:
        placed = self._placed if model == self.model else self._place(model)
        return open_pool(model, placed.placement, on_cluster=bool(self.ray_address), timeouts=self.timeouts)

    def _place(self, model: ModelSpec) -> ChosenPlacement:
        """Return and report the placement of a model."""
        placed = place(
            model_sizes(model, self.tokens),
            machines(self.ray_address),
            self.request,
            batch_tokens=self.batch_tokens,
            evaluates=self.evaluates,
            max_threads=max_threads(),
        )
        for line in (*(f"not {refusal}" for refusal in placed.why), placed.placement.describe()):
            self.say(line)
        if placed.batch_tokens < self.batch_tokens and self.request.memory is None:
            self.say(f"batches of {placed.batch_tokens} tokens fit; larger ones are halved when memory runs out")
        return placed


class ModelContext:
    """A model that jobs measure; a context manager that closes its pool. Identity, facts and pool are made when they
    are first needed, so that a job with nothing to measure loads no model; ``identity`` None reads the weight files
    then. ``make_pool`` opens the pool of this model, and of others that a job needs. A forward pass has at most
    ``batch_tokens`` tokens, padding included; numbers depend on them in the last digits.
    """

    def __init__(
        self,
        model: ModelSpec,
        make_pool: PoolFactory,
        *,
        identity: ModelIdentity | None = None,
        batch_tokens: int = BATCH_TOKENS,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.model, self.make_pool, self.batch_tokens, self.say = model, make_pool, batch_tokens, say
        self._pool: Pool | None = None
        if identity is not None:
            self.identity = identity

    @cached_property
    def identity(self) -> ModelIdentity:
        """Names and hashes of the model; pass those of a model without a tokenizer."""
        return identify(self.model)

    @cached_property
    def facts(self) -> ModelFacts:
        with at_work(f"loading {self.model.source}"):
            return self.pool.one(model_facts, None)

    @property
    def pool(self) -> Pool:
        """Replicas of the model; a pool that was closed is opened again."""
        if self._pool is None:
            self._pool = self.make_pool(self.model)
        return self._pool

    def record(
        self,
        kind: RunKind,
        fingerprint: str,
        *,
        config: Mapping[str, Any],
        corpus: str | None,
        corpus_hash: str | None,
        bos_policy: str | None = "auto",
        total_shards: int | None = None,
    ) -> RunRecord:
        """Return the record of a run on the model, which is loaded."""
        facts = self.facts
        return RunRecord(
            kind=kind,
            fingerprint=fingerprint,
            **self.identity.columns(),
            bos_policy=bos_policy,
            corpus=corpus,
            corpus_hash=corpus_hash,
            num_layers=facts.grid.num_layers,
            num_heads=facts.grid.max_heads,
            dtype=facts.dtype,
            attention_path=facts.attention_path,
            grid=facts.sites,
            config=config,
            device=facts.hardware,
            total_shards=total_shards,
            **software_of(self.identity.code_files_hash),
        )

    def resumable_numbers(self, record: RunRecord) -> AbstractContextManager[KnownNumbers]:
        """Yield the numbers that a job measures, by unit of work: here in memory alone, which a message reports. A
        `Run` keeps them in its store.
        """
        self.say("without a store, a job that stops keeps nothing of what it measured")
        return nullcontext(KnownNumbers())

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()


class Run(ModelContext):
    """A model, as in `ModelContext`, and the store that receives what jobs measure on it. ``resume_anyway`` resumes
    runs even if the software or the device changed, and records both.
    """

    def __init__(
        self,
        model: ModelSpec,
        store: Store,
        make_pool: PoolFactory,
        *,
        identity: ModelIdentity | None = None,
        batch_tokens: int = BATCH_TOKENS,
        resume_anyway: bool = False,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        super().__init__(model, make_pool, identity=identity, batch_tokens=batch_tokens, say=say)
        self.store, self.resume_anyway = store, resume_anyway

    def on(self, model: ModelSpec, identity: ModelIdentity) -> Run:
        """Return a run of another model. The pool of this one is closed, so that two are never loaded together."""
        self.close()
        return Run(
            model,
            self.store,
            self.make_pool,
            identity=identity,
            batch_tokens=self.batch_tokens,
            resume_anyway=self.resume_anyway,
            say=self.say,
        )

    def stored_run(self, kind: RunKind, fingerprint: str) -> dict[str, Any] | None:
        runs = self.store.runs(kind) if self.store.path.exists() else []
        return next((run for run in runs if run["fingerprint"] == fingerprint), None)

    def finished_run(self, kind: RunKind, fingerprint: str) -> str | None:
        """Return the finished run with this fingerprint, or None; a run with other software is reported. The device is
        not compared, because the model is not loaded yet.
        """
        run = self.stored_run(kind, fingerprint)
        if run is None:
            return None
        changes = provenance_changes(run["provenance"][-1], software_of(self.identity.code_files_hash))
        if run["status"] != "finished":
            if changes and not self.resume_anyway:
                raise refuse_resume(run["run_id"], changes)
            return None
        if changes:
            self.say(_finished_with(run["run_id"], changes))
        return str(run["run_id"])

    def begin(self, record: RunRecord, *, extends: bool = False) -> RunState:
        """Begin or resume a run and report changes; see `Store.begin_run`. For a new run, report the unfinished runs of
        the same model and corpus with the differences.
        """
        state = self.store.begin_run(record, resume_anyway=self.resume_anyway, extends=extends)
        if state.changes and state.status == "finished" and not extends:
            self.say(_finished_with(state.run_id, state.changes))
        elif state.changes:
            self.say(
                f"run {state.run_id} resumes with {', '.join(state.changes)}; both are recorded in runs.provenance"
            )
        if not state.resumed:
            for line in unfinished_runs(self.store.runs(record.kind), record, state.run_id):
                self.say(line)
        return state

    @contextmanager
    def resumable_numbers(self, record: RunRecord) -> Iterator[KnownNumbers]:
        """Yield the numbers of a plan or prune run: those that the store has, and new ones, which are stored within
        seconds. A run that measures nothing leaves no trace. A finished run of other software is measured again, unless
        ``resume_anyway`` is set.
        """
        known = self.stored_run(record.kind, record.fingerprint)
        if known is not None and known["status"] == "finished" and not self.resume_anyway:
            changes = provenance_changes(known["provenance"][-1], record.provenance)
            if changes:
                self.say(f"run {known['run_id']} is measured again with {', '.join(changes)}")
                self.store.restart_run(record)

        def begin() -> str:
            state = self.begin(record, extends=True)
            if not state.resumed:
                self.say(f"run {state.run_id}")
            return state.run_id

        numbers = StoredNumbers(self.store, begin)
        if known is not None:
            numbers.resume()
            self.say(f"run {known['run_id']}: the store has {numbers.count} units of this work")
        try:
            try:
                yield numbers
            finally:
                numbers.write()
        except Exception:
            self._fail(numbers.run_id)
            raise
        if numbers.run_id is not None:
            self.store.finish_run(numbers.run_id)

    @contextmanager
    def in_progress(self, record: RunRecord, *, arms: Collection[str] = ()) -> Iterator[RunState]:
        """Begin or resume a run, which fails if the block does; the caller finishes it. A finished run that lacks one
        of ``arms``, the names of all arms that will answer, is extended.
        """
        finished: set[str] = set()
        if arms and self.store.path.exists():
            known = [run_identity(record.kind, record.fingerprint)]
            rows = self.store.query("SELECT name FROM arms WHERE run_id = ? AND status = 'finished'", known)
            finished.update(rows["name"].to_pylist())
        state = self.begin(record, extends=not finished.issuperset(arms))
        try:
            yield state
        except Exception:
            self._fail(state.run_id)
            raise

    def _fail(self, run_id: str | None) -> None:
        with suppress(StoreError):  # a full disk may also prevent this write
            if run_id is not None:
                self.store.finish_run(run_id, status="failed")


#: Seconds between two writes: a process that is killed loses about as much work, and the unit in progress.
WRITE_SECONDS = 5.0
_UNITS = TABLES["measured_units"].schema(without=("run_id",))


class StoredNumbers(KnownNumbers):
    """Numbers by key of the work in the table ``measured_units``; the caller calls `write` at the end.

    ``begin`` begins or resumes the run and returns its id; the first write calls it.
    """

    def __init__(self, store: Store, begin: Callable[[], str]) -> None:
        super().__init__()
        self._store, self._begin = store, begin
        self.run_id: str | None = None
        self._waiting: list[WorkKey] = []
        self._written = time.monotonic()

    def resume(self) -> None:
        """Read the numbers of the run, which the store has."""
        self.run_id = self._begin()
        self._known |= self._store.measured_units(self.run_id)

    def add(self, key: WorkKey, numbers: ArrayLike) -> None:
        super().add(key, numbers)
        self._waiting.append(key)
        if time.monotonic() - self._written >= WRITE_SECONDS:
            self.write()

    def write(self) -> None:
        """Store what was added since the last write."""
        if self._waiting:
            if self.run_id is None:
                self.run_id = self._begin()
            rows = [
                {"unit": (name := hash_of(key)), "what": str(key[0]), "numbers": self._known[name]}
                for key in self._waiting
            ]
            self._store.add_measured_units(self.run_id, pa.Table.from_pylist(rows, schema=_UNITS))
        self._waiting.clear()
        self._written = time.monotonic()


def _finished_with(run_id: str, changes: tuple[str, ...]) -> str:
    return f"run {run_id} is complete, with other software or another device ({', '.join(changes)}); its rows stay"
