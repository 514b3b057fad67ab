"""A scan: corpus -> sequences -> pool of replicas -> store.

The same command again resumes: shards in the store's ledger are skipped. The rows equal those of an uninterrupted run,
because a shard's batches depend only on the shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

from headscan.analysis.store.store import Store
from headscan.attention.attention_request import MassWidths
from headscan.catalog import PANELS, Panel, panel_names
from headscan.cluster.tasks.pool import Pool
from headscan.errors import HeadscanError, SequenceError
from headscan.measure.collect import check_statistics
from headscan.model_spec import ModelSpec
from headscan.pipelines.corpora import CorpusReport, CorpusSpec, Shard, TokenPlan, open_corpus, sequences, shards
from headscan.pipelines.runs.identity import ModelIdentity, fingerprint, identify
from headscan.pipelines.runs.run_context import RunContext
from headscan.pipelines.runs.run_records import finished_run, run_record
from headscan.pipelines.scan.run_shards import write_shards
from headscan.pipelines.scan.shard_task import ShardItem

#: Tokens read before the first shard runs, so that the total of most corpora is known and progress shows a time left.
_READ_AHEAD = 20_000_000


class ScanError(HeadscanError):
    """Settings of a scan that are out of range."""


@dataclass(frozen=True)
class ScanConfig:
    """Settings of a scan.

    Attributes:
        model: The model.
        corpus: The corpus.
        tokens: How documents become sequences.
        panel: Set of statistics, unless ``statistics`` is given.
        statistics: Names of statistics and profiles; empty uses those of the panel.
        keep_nonfinite: Store NaN and infinite values as NULL instead of ending the scan.
        widths: Widths of sink and recent mass.
        shard_size: Sequences that are stored and resumed together.
        batch_tokens: Tokens of one forward pass, padding included.

    Raises:
        UnknownNameError: A statistic is not in the catalogue.
        ScanError: The panel is unknown, or a size is below 1.
    """

    model: ModelSpec
    corpus: CorpusSpec
    tokens: TokenPlan
    panel: Panel = "fast"
    statistics: tuple[str, ...] = ()
    keep_nonfinite: bool = False
    widths: MassWidths = field(default_factory=MassWidths)
    shard_size: int = 64
    batch_tokens: int = 8192

    def __post_init__(self) -> None:
        if self.panel not in PANELS:
            raise ScanError(f"unknown panel {self.panel!r}. Choose {' or '.join(PANELS)}")
        check_statistics(self.statistics)
        for name in ("shard_size", "batch_tokens"):
            if getattr(self, name) < 1:
                raise ScanError(f"{name}={getattr(self, name)} is too small. Give at least 1")

    @property
    def measured(self) -> tuple[str, ...]:
        """Names of the measured statistics and profiles, sorted."""
        return tuple(sorted(check_statistics(self.statistics or panel_names(self.panel))))


@dataclass(frozen=True)
class ScanResult:
    """Result of a scan.

    Attributes:
        run_id: The run in the store.
        already_done: True if the run was complete before, so that nothing was measured.
        measured: Shards measured now.
        skipped: Shards found in the ledger.
        nonfinite_rows: Rows of the whole run with values stored as NULL because they were NaN or infinite.
        report: Counts of the corpus; None if it was not read.
    """

    run_id: str
    already_done: bool
    measured: int
    skipped: int
    nonfinite_rows: int
    report: CorpusReport | None


def scan(
    config: ScanConfig,
    store: Store,
    open_replicas: Callable[[], AbstractContextManager[Pool]],
    *,
    identity: ModelIdentity | None = None,
    resume_anyway: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> ScanResult:
    """Scan a corpus into a store.

    Args:
        open_replicas: Opens the pool; called only if something has to be measured.
        identity: The model's identity; None computes it.
        resume_anyway: Resume a run even if the software or the device changed; both are recorded.
        say: Called with lines for the user.

    Raises:
        ResumeError: The run is unfinished, software or device changed, and ``resume_anyway`` is False.
        HeadscanError: An error of the user; shards stored before stay.
    """
    identity = identify(config.model) if identity is None else identity
    limit = identity.max_tokens
    if limit is not None and config.tokens.max_tokens > limit:
        raise SequenceError(
            f"max_tokens={config.tokens.max_tokens} (limit {limit} positions of {identity.name}). Lower `max_tokens`"
        )
    corpus = open_corpus(config.corpus)
    corpus_fingerprint = corpus.fingerprint()
    mark = fingerprint(
        {
            "model": identity.fingerprint(),
            "dtype": config.model.dtype,
            "corpus": corpus_fingerprint,
            "tokens": asdict(config.tokens),
            "statistics": config.measured,
            "keep_nonfinite": config.keep_nonfinite,
            "widths": asdict(config.widths),
            "shard_size": config.shard_size,
            "batch_tokens": config.batch_tokens,
        }
    )
    done = finished_run(store, "scan", mark, identity, resume_anyway=resume_anyway, say=say)
    if done is not None:
        return ScanResult(done, True, 0, 0, _nonfinite_rows(store, done), None)

    report = CorpusReport()
    found, rest = read_ahead(
        shards(sequences(corpus, identity.tokenizer, config.tokens, report), shard_size=config.shard_size)
    )
    with open_replicas() as pool:
        context = RunContext(identity, pool)
        written = write_shards(
            store,
            pool,
            run_record(
                "scan",
                mark,
                context,
                config=_config_facts(config),
                bos_policy=config.tokens.bos,
                corpus=config.corpus.name,
                corpus_hash=corpus_fingerprint,
                total_shards=None if rest is not None else len(found),
            ),
            chain(found, rest or ()),
            lambda shard: ShardItem(
                shard,
                config.measured,
                config.widths,
                config.batch_tokens,
                config.keep_nonfinite,
                identity.rope_lengths,
            ),
            report,
            total=None if rest is not None else sum(len(shard.sequences) for shard in found),
            resume_anyway=resume_anyway,
            say=say,
        )
    nonfinite_rows = _nonfinite_rows(store, written.run_id)
    return ScanResult(written.run_id, False, written.measured, written.skipped, nonfinite_rows, report)


def default_max_tokens(identity: ModelIdentity, cap: int = 2048) -> int:
    """Return the model's context length, at most ``cap``."""
    return min(identity.max_tokens or cap, cap)


def _config_facts(config: ScanConfig) -> dict[str, Any]:
    return {
        "model": asdict(config.model),
        "corpus": asdict(config.corpus),
        "tokens": asdict(config.tokens),
        "attention_across_documents": config.tokens.attention_across_documents,
        "panel": None if config.statistics else config.panel,
        "statistics": config.measured,
        "keep_nonfinite": config.keep_nonfinite,
        "sink": config.widths.sink,
        "recent": config.widths.recent,
        "shard_size": config.shard_size,
        "batch_tokens": config.batch_tokens,
    }


def _nonfinite_rows(store: Store, run_id: str) -> int:
    return int(store.resolve_run(run_id, "scan")["nonfinite_rows"])


def read_ahead(source: Iterable[Shard]) -> tuple[list[Shard], Iterator[Shard] | None]:
    """Return the first shards, and an iterator over the rest; None if there are no more."""
    rest = iter(source)
    found: list[Shard] = []
    tokens = 0
    for shard in rest:
        found.append(shard)
        tokens += sum(map(len, shard.sequences))
        if tokens >= _READ_AHEAD:
            return found, rest
    return found, None
