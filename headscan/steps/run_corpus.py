"""A run over a corpus, such as a scan: corpus -> sequences -> pool of replicas -> store.

The same command again resumes: shards in the store's ledger are skipped. The rows equal those of an uninterrupted run,
because a shard's batches depend only on the shard.

A thread writes shards while others are measured. Each opening of the store writes all waiting shards in one
transaction: a slow scan writes its shards one by one, a large cluster in groups, so that opening the file costs little.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, Generic, NamedTuple, Self, TypeVar

import pyarrow as pa

from headscan.cluster.pool import IncompleteError, PassTask, Task
from headscan.errors import HeadscanError
from headscan.runs.progress import Progress, at_work
from headscan.runs.run_context import Run
from headscan.sizing.forward_flops import forward_flops
from headscan.steps.corpus_step import CorpusStep
from headscan.steps.scan import Part
from headscan.store.records import RunKind, RunRecord, ShardRecord, ShardToWrite
from headscan.store.store import Store
from headscan.texts import CorpusReport, Shard, TokenSequence, open_corpus, sequences, shards
from headscan.texts.drawing import DRAWN

S = TypeVar("S", bound=Shard)

#: Tokens read before the first shard runs, so that the total of most corpora is known and progress shows a time left.
_READ_AHEAD_TOKENS = 20_000_000
#: Most bytes of tables that wait, next to those that are being written; then `ShardWriter.add` blocks. A shard of 80 x
#: 64 heads has 25 MB. Small shards are written in large groups: together, 64 shards of 1 MB take a quarter of
#: the CPU that they take one by one.
_MOST_WAITING_BYTES = 100_000_000
#: Time of a shard whose size is not given, and the most sequences of one.
_SHARD_SECONDS, _MOST_SHARD_SEQUENCES = 20, 64
#: Sequences of a shard of a part.
_PART_SHARD_SEQUENCES = 16
#: Operations per second that a device is assumed to run, by its type; they only choose the size of a shard.
_CPU_FLOPS_PER_SECOND, _GPU_FLOPS_PER_SECOND = 1e11, 1e14


class ShardTable(NamedTuple):
    """A shard's rows by site, sequence, layer and head, and the number of non-finite rows."""

    heads: pa.Table
    nonfinite_rows: int


@dataclass(frozen=True)
class CorpusMeasurement(Generic[S]):
    """What a run measures on every shard of a corpus.

    Attributes:
        cost_in_passes: Time of measuring a sequence, as a multiple of a plain forward pass.
        identity_settings: Settings on which the numbers depend, in addition to model and texts.
        stored_settings: The same settings as the store records them.
    """

    kind: RunKind
    task: Task[S, ShardTable]
    cost_in_passes: float
    identity_settings: Mapping[str, Any]
    stored_settings: Mapping[str, Any]


class CorpusChangedError(HeadscanError):
    """The text of a stored shard changed."""


@dataclass(frozen=True)
class CorpusRunResult:
    """Result of a run over a corpus; with ``already_done`` nothing was measured. ``skipped`` shards were in the ledger;
    ``report`` is None if the corpus was not read. ``part`` is None if all shards of the corpus are stored.
    """

    run_id: str
    already_done: bool
    measured: int = 0
    skipped: int = 0
    report: CorpusReport | None = None
    part: Part | None = None


def run_corpus(
    config: CorpusStep,
    run: Run,
    measurement: CorpusMeasurement[Shard],
    *,
    prompts: Iterable[TokenSequence] = (),
    part: Part | None = None,
) -> CorpusRunResult:
    """Measure every shard of a corpus, or of a part of it, into a store.

    For example, a corpus of 100 sequences in shards of 16 makes 7 shards. If the store has the first 3, 4 are measured.
    Part 2 of 3 measures shards 1 and 4 alone.

    Args:
        prompts: Sequences that are measured after the corpus, numbered from 0; they are read only if the run is not
            finished.
    """
    identity, report = run.identity, CorpusReport()
    assert config.corpus is not None
    tokens, corpus = config.tokens.within(identity), open_corpus(config.corpus)
    corpus_hash = corpus.fingerprint()

    def read(shard_size: int) -> Iterator[Shard]:
        corpus_shards = shards(sequences(corpus, identity.tokenizer, tokens, report), shard_size=shard_size)
        return _with_prompts(corpus_shards, list(prompts), shard_size)

    def notes(has_more_shards: bool) -> list[str]:
        lines = [] if report.drawn is None else [f"reads {report.total()}"]
        if tokens.mode == "truncate" and report.truncated:
            extent = "the first " if has_more_shards else ""
            documents = report.documents if report.drawn is None else report.drawn.documents
            lines.append(
                f"documents of more than {tokens.longest:,} tokens, of which only the beginning is measured:"
                f" {report.truncated:,} of {extent}{documents:,} (the mode chunk measures all of them)"
            )
        return lines

    across, drawn = tokens.attention_across_documents, {} if tokens.limit_sequences is None else {"reading": DRAWN}
    return run_shards(
        run,
        measurement,
        read,
        report,
        decides={"corpus": corpus_hash, "tokens": asdict(tokens), **drawn},
        stores={"corpus": asdict(config.corpus), "tokens": asdict(tokens), "attention_across_documents": across},
        longest=tokens.longest,
        shard_size=config.shard_size,
        part=part,
        notes=notes,
        corpus=config.corpus.name,
        corpus_hash=corpus_hash,
        bos_policy=tokens.bos,
    )


def run_shards(
    run: Run,
    measurement: CorpusMeasurement[S],
    read: Callable[[int], Iterator[S]],
    report: CorpusReport,
    *,
    decides: Mapping[str, Any],
    stores: Mapping[str, Any],
    longest: int,
    shard_size: int | None,
    part: Part | None = None,
    notes: Callable[[bool], Sequence[str]] = lambda has_more_shards: (),
    corpus: str,
    corpus_hash: str,
    bos_policy: str | None,
) -> CorpusRunResult:
    """Measure the shards that ``read`` makes for a number of sequences, or a part of them, into a store.

    Args:
        decides: What decides the numbers, next to the model and the measurement: the texts.
        stores: What the store records of the texts, next to their hash.
        longest: Tokens of the longest sequence.
        notes: Returns lines for the user once the first shards are read; True means that there are more.
    """
    kind = measurement.kind
    settings = {**decides, **measurement.identity_settings, "batch_tokens": run.batch_tokens}
    run_hash = run_fingerprint(run, kind, settings, shard_size)
    finished_result = _finished_result(run, kind, run_hash, part)
    if finished_result is not None:
        return finished_result
    # Parts of one scan may run on different devices, and all need the same shards.
    wanted_size = _PART_SHARD_SEQUENCES if part is not None and shard_size is None else shard_size
    size = shard_size_of(run, kind, run_hash, wanted_size, longest, measurement.cost_in_passes)
    all_shards = read(size)
    first_shards, has_more_shards = _read_ahead(all_shards)
    for line in notes(has_more_shards):
        run.say(line)
    total_shards = total_sequences = None
    if not has_more_shards:
        total_shards = len(first_shards)
        total_sequences = sum(len(shard.sequences) for shard in first_shards if part is None or shard.index in part)
    record = run.record(
        kind,
        run_hash,
        config={
            "model": asdict(run.model),
            **stores,
            **measurement.stored_settings,
            "shard_size": size,
            "batch_tokens": run.batch_tokens,
            **({} if part is None else {"parts": [str(part)]}),
        },
        bos_policy=bos_policy,
        corpus=corpus,
        corpus_hash=corpus_hash,
        total_shards=total_shards,
    )
    shards_to_measure: Iterable[S] = chain(first_shards, all_shards)
    return measure_shards(
        run, record, measurement.task, shards_to_measure, report, total_sequences=total_sequences, part=part
    )


def _finished_result(run: Run, kind: RunKind, run_hash: str, part: Part | None) -> CorpusRunResult | None:
    """Return the result of a run, or of a part, that the store has already; None if there is work to do."""
    finished_run_id = run.finished_run(kind, run_hash)
    if finished_run_id is not None:
        with at_work("summary of all heads"):
            run.store.summarise(finished_run_id)
        return CorpusRunResult(finished_run_id, already_done=True)
    stored_run = None if part is None else run.stored_run(kind, run_hash)
    if part is not None and stored_run is not None and _has_part(run.store, stored_run, part):
        return CorpusRunResult(stored_run["run_id"], already_done=True, part=part)
    return None


def measure_shards(
    run: Run,
    record: RunRecord,
    task: Task[S, ShardTable],
    all_shards: Iterable[S],
    report: CorpusReport,
    *,
    total_sequences: int | None,
    part: Part | None = None,
) -> CorpusRunResult:
    """Begin or resume a run, measure the missing shards of the corpus or of a part, and close the run. It is finished
    if the store then has all shards. ``report`` may grow while ``all_shards`` is read; ``total_sequences`` is the
    number of sequences to measure, None if unknown.
    """
    with run.ledger(record) as ledger:
        tally = _ShardTally(ledger.run_id, record.corpus, ledger.state.shards, part)
        try:
            with (
                Progress(record.kind, total_sequences, "sequence") as progress,
                ShardWriter(run.store, ledger.run_id) as writer,
            ):
                pool_task, counts_passes = task, False
                if run.pool.local and isinstance(task, PassTask):
                    # In this process progress moves with each pass, elsewhere with each shard.
                    pool_task, counts_passes = partial(task, on_pass=progress.update), True
                for finished in run.pool.map(pool_task, tally.to_measure(all_shards, progress)):
                    shard, table = finished.item, finished.value
                    ledger_row = ShardRecord(
                        shard.index, shard.content_hash, finished.seconds, finished.worker, table.nonfinite_rows
                    )
                    writer.add(ShardToWrite(ledger_row, sequence_table(shard), table.heads))
                    tally.measured += 1
                    if not counts_passes:
                        progress.update(len(shard.sequences))
            ledger.closing = {
                "status": "part" if tally.others_missing else "finished",
                "total_shards": tally.total,
                "corpus_hash": f"{(record.corpus_hash or '')[:16]}-{tally.content.hexdigest()[:16]}",
            }
        except IncompleteError as problem:
            ledger.closing["total_shards"] = tally.total + len(problem.items)
            raise
        finally:
            ledger.closing["report"] = report.as_dict()
    return CorpusRunResult(
        ledger.run_id,
        already_done=False,
        measured=tally.measured,
        skipped=tally.skipped,
        report=report,
        part=part if tally.others_missing else None,
    )


@dataclass
class _ShardTally:
    """Counts of the shards of a corpus, made while they are read. ``stored`` has the content hash of each shard in the
    store by index, and ``content`` hashes those of all shards; ``others`` are in other parts than ``part``.
    """

    run_id: str
    corpus: str | None
    stored: Mapping[int, str]
    part: Part | None
    content: Any = field(default_factory=hashlib.sha256)
    measured: int = 0
    skipped: int = 0
    others_stored: int = 0
    others_missing: int = 0

    @property
    def total(self) -> int:
        return self.measured + self.skipped + self.others_stored + self.others_missing

    def to_measure(self, all_shards: Iterable[S], progress: Progress) -> Iterator[S]:
        """Yield the shards to measure. Raises CorpusChangedError if a stored one has other text."""
        for shard in all_shards:
            self.content.update(shard.content_hash.encode())
            stored_hash = self.stored.get(shard.index)
            if stored_hash is not None and stored_hash != shard.content_hash:
                raise CorpusChangedError(
                    f"corpus {self.corpus} changed since run {self.run_id}: shard {shard.index} has other text. "
                    "Use another store, or pin a revision"
                )
            if self.part is not None and shard.index not in self.part:
                self.others_stored += stored_hash is not None
                self.others_missing += stored_hash is None
            elif stored_hash is None:
                yield shard
            else:
                self.skipped += 1
                progress.skip(len(shard.sequences))


def _with_prompts(corpus_shards: Iterable[Shard], prompts: Sequence[TokenSequence], shard_size: int) -> Iterator[Shard]:
    """Yield the shards of a corpus, then those of prompts, whose numbers go on from the corpus's."""
    next_shard = next_sequence = next_document = 0
    for shard in corpus_shards:
        yield shard
        last = shard.sequences[-1]
        next_shard, next_sequence, next_document = shard.index + 1, last.index + 1, last.document + 1
    numbered_prompts = [
        replace(prompt, index=next_sequence + prompt.index, document=next_document + prompt.document)
        for prompt in prompts
    ]
    for shard in shards(numbered_prompts, shard_size=shard_size):
        yield replace(shard, index=next_shard + shard.index)


def _has_part(store: Store, run: Mapping[str, Any], part: Part) -> bool:
    """Return True if the corpus of a run was read to its end, and all shards of the part are stored."""
    if run["status"] != "part" or run["total_shards"] is None:
        return False
    stored = set(store.query("SELECT shard FROM shards WHERE run_id = ?", [run["run_id"]])["shard"].to_pylist())
    return stored.issuperset(shard for shard in range(run["total_shards"]) if shard in part)


def run_fingerprint(run: Run, kind: RunKind, settings: Mapping[str, Any], shard_size: int | None) -> str:
    """Return the fingerprint by which the store finds a run again, from the settings on which its numbers depend.

    The size of a shard is one of them, because batches do not cross shards. Without a ``shard_size`` (None) the run
    chooses it. For example, if a scan chose shards of 20 sequences, the same scan with a ``shard_size`` of 20 resumes
    it, and with one of 30 it is another run.
    """
    # Fingerprints of runs that chose their size hold the largest one, so the same size, if given, needs another mark.
    hash_of_chosen_size = run.fingerprint({**settings, "shard_size": _MOST_SHARD_SEQUENCES})
    if shard_size is None:
        return hash_of_chosen_size
    size_mark = f"{shard_size} given" if shard_size == _MOST_SHARD_SEQUENCES else shard_size
    hash_of_given_size = run.fingerprint({**settings, "shard_size": size_mark})
    stored_run = run.stored_run(kind, hash_of_chosen_size)
    chose_this_size = stored_run is not None and stored_run["config"]["shard_size"] == shard_size
    if chose_this_size and run.stored_run(kind, hash_of_given_size) is None:
        return hash_of_chosen_size
    return hash_of_given_size


def shard_size_of(
    run: Run, kind: RunKind, run_hash: str, wanted_size: int | None, tokens: int, cost_in_passes: float
) -> int:
    """Return the number of sequences of a shard: that of the run if it began before, else the wanted one, else about 20
    seconds of work on texts of ``tokens`` tokens that cost ``cost_in_passes`` forward passes each.
    """
    stored_run = run.stored_run(kind, run_hash)
    if stored_run is not None:
        return int(stored_run["config"]["shard_size"])
    if wanted_size is not None:
        return wanted_size
    flops = forward_flops(run.model)
    speed = _CPU_FLOPS_PER_SECOND if run.facts.device.startswith("cpu") else _GPU_FLOPS_PER_SECOND
    seconds = cost_in_passes * tokens * flops.per_token(tokens, logits=True) / speed
    return max(1, min(_MOST_SHARD_SEQUENCES, int(_SHARD_SECONDS / seconds)))


def _read_ahead(all_shards: Iterator[S]) -> tuple[list[S], bool]:
    """Take the first shards from an iterator. Return them, and True unless the iterator is known to have no more."""
    first_shards: list[S] = []
    tokens = 0
    for shard in all_shards:
        first_shards.append(shard)
        tokens += sum(map(len, shard.sequences))
        if tokens >= _READ_AHEAD_TOKENS:
            return first_shards, True
    return first_shards, False


def sequence_table(shard: Shard) -> pa.Table:
    return pa.table(
        {
            "sequence": pa.array([sequence.index for sequence in shard.sequences], pa.int32()),
            "document": pa.array([sequence.document for sequence in shard.sequences], pa.int32()),
            "source": [sequence.source for sequence in shard.sequences],
            "tokens": pa.array([len(sequence) for sequence in shard.sequences], pa.int32()),
            "truncated": [sequence.truncated for sequence in shard.sequences],
            "content_hash": [sequence.content_hash for sequence in shard.sequences],
            "recall_task": pa.array([sequence.recall_task for sequence in shard.sequences], pa.string()),
        }
    )


class ShardWriter:
    """A writer of a run's shards; a context manager that writes all of them before it exits."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._store, self._run_id = store, run_id
        self._waiting: list[ShardToWrite] = []
        self._bytes = 0  # of the waiting tables
        self._changed = threading.Condition()
        self._closed = False
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)

    def add(self, shard: ShardToWrite) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._bytes < _MOST_WAITING_BYTES or self._problem is not None)
            self._raise()
            self._waiting.append(shard)
            self._bytes += shard.heads.nbytes
            self._changed.notify_all()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *problem: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        if kind is None:
            self._raise()

    def _raise(self) -> None:
        if self._problem is not None:
            raise self._problem

    def _run(self) -> None:
        while taken := self._take():
            try:
                self._store.add_shards(self._run_id, taken)
            except BaseException as problem:
                with self._changed:
                    self._problem = problem
                    self._changed.notify_all()
                return

    def _take(self) -> list[ShardToWrite]:
        """Wait for shards and return all that are queued: none if the writer is closed and has written all."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            taken, self._waiting, self._bytes = self._waiting, [], 0
            self._changed.notify_all()
            return taken
