"""What every run over texts shares: lengths that fit, the pool, the store and messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from headscan.analysis.store.records import RunKind, RunRecord, RunState
from headscan.analysis.store.store import Store
from headscan.cluster.tasks.pool import Pool
from headscan.model_spec import ModelSpec
from headscan.pipelines.runs.identity import ModelIdentity, identify
from headscan.pipelines.runs.run_records import RunContext, begin_run, finished_run


@dataclass(frozen=True)
class RunOptions:
    """Store, pool and messages of a run.

    Attributes:
        store: Receives the rows.
        open_replicas: Opens the pool; called only if something has to be measured.
        identity: The model's identity; None computes it.
        resume_anyway: Resume a run even if the software or the device changed; both are recorded.
        say: Called with lines for the user.
    """

    store: Store
    open_replicas: Callable[[], AbstractContextManager[Pool]]
    identity: ModelIdentity | None = None
    resume_anyway: bool = False
    say: Callable[[str], None] = lambda line: None

    def identify(self, spec: ModelSpec, *, need_tokenizer: bool = True) -> ModelIdentity:
        """Return the model's identity; computed if it was not given."""
        return identify(spec, need_tokenizer=need_tokenizer) if self.identity is None else self.identity

    def finished(self, kind: RunKind, fingerprint: str, identity: ModelIdentity) -> str | None:
        """Return the finished run with this fingerprint, or None."""
        return finished_run(self.store, kind, fingerprint, identity, resume_anyway=self.resume_anyway, say=self.say)

    @contextmanager
    def opened(self, identity: ModelIdentity) -> Iterator[RunContext]:
        """Open the pool, and close it afterwards."""
        with self.open_replicas() as pool:
            yield RunContext(identity, pool)

    def begin(self, record: RunRecord) -> RunState:
        """Begin or resume a run."""
        return begin_run(self.store, record, resume_anyway=self.resume_anyway, say=self.say)
