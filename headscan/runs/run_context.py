"""What every job needs, as its argument ``run``.

`ModelOpener` chooses the placement of a model and opens its pool. `ModelContext` has the model's identity, facts and
pool, and `Run` adds the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from headscan.cluster.devices import machines, max_threads
from headscan.cluster.placement_base import ChosenPlacement, PlacementRequest, Timeouts
from headscan.cluster.placements import place
from headscan.cluster.pool import Pool, open_pool
from headscan.errors import StoreError
from headscan.long_work import KnownNumbers
from headscan.model_spec import ModelSpec
from headscan.options import BATCH_TOKENS
from headscan.runs.code_version import software_of
from headscan.runs.ledger import Ledger
from headscan.runs.model_identity import ModelFacts, ModelIdentity, fingerprint, identify, model_facts
from headscan.runs.progress import at_work
from headscan.sizing.model_sizes import model_sizes
from headscan.store.provenance import provenance_changes, unfinished_runs
from headscan.store.records import SHARDED_KINDS, RunKind, RunRecord, RunState
from headscan.store.store import Store, refuse_resume
from headscan.text_tables import counted

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

    def fingerprint(self, decides: Mapping[str, Any]) -> str:
        """Return the fingerprint of a run on the model, from JSON data of what else decides its numbers."""
        return fingerprint({"model": self.identity.fingerprint(), "dtype": self.model.dtype, **decides})

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
        if not state.resumed or state.shards:
            stored = f": {counted(len(state.shards), 'shard')} stored before" if state.shards else ""
            self.say(f"run {state.run_id}{stored}")
        return state

    @contextmanager
    def ledger(self, record: RunRecord, *, extends: bool = False) -> Iterator[Ledger]:
        """Yield the ledger of a run, which ends with the block: finished, or failed if the block raises. ``extends``
        means that even a finished run may grow.
        """
        ledger = Ledger(self.store, lambda: self.begin(record, extends=extends))
        try:
            yield ledger
            ledger.write()
            if ledger.has_begun:
                with at_work("summary of all heads") if record.kind in SHARDED_KINDS else nullcontext():
                    self.store.finish_run(ledger.run_id, **ledger.closing)
        except BaseException as problem:
            # The first error is the one to report; a full disk also prevents these writes.
            with suppress(StoreError):
                ledger.write()
            with suppress(StoreError):
                if isinstance(problem, Exception) and ledger.has_begun:
                    self.store.finish_run(ledger.run_id, **ledger.closing | {"status": "failed"})
            raise

    @contextmanager
    def resumable_numbers(self, record: RunRecord) -> Iterator[KnownNumbers]:
        """Yield the ledger of a plan or prune run, which every such job with the same texts extends. A finished run of
        other software is measured again, unless ``resume_anyway`` is set.
        """
        known = self.stored_run(record.kind, record.fingerprint)
        if known is not None and known["status"] == "finished" and not self.resume_anyway:
            changes = provenance_changes(known["provenance"][-1], record.provenance)
            if changes:
                self.say(f"run {known['run_id']} is measured again with {', '.join(changes)}")
                self.store.restart_run(record)
        with self.ledger(record, extends=True) as ledger:
            if known is not None:
                self.say(f"run {ledger.run_id}: the store has {counted(ledger.count, 'unit')} of this work")
            yield ledger


def _finished_with(run_id: str, changes: tuple[str, ...]) -> str:
    return f"run {run_id} is complete, with other software or another device ({', '.join(changes)}); its rows stay"
