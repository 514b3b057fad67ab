"""An importance run: corpus -> sequences -> pool of replicas -> store.

It is stored and resumed by shards, as a scan is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from headscan.analysis.store.store import Store
from headscan.cluster.tasks.pool import Pool
from headscan.errors import HeadscanError, SequenceError
from headscan.model_spec import ModelSpec
from headscan.pipelines.corpora import CorpusReport, CorpusSpec, TokenPlan, open_corpus, sequences, shards
from headscan.pipelines.importance.importance_task import REDUCTIONS, ImportanceItem, Reduction, measure_importance
from headscan.pipelines.runs.identity import ModelIdentity, fingerprint, identify
from headscan.pipelines.runs.run_context import RunContext
from headscan.pipelines.runs.run_records import finished_run, run_record
from headscan.pipelines.scan.run_scan import read_ahead
from headscan.pipelines.scan.run_shards import write_shards


class ImportanceError(HeadscanError):
    """Settings of an importance run that are out of range."""


@dataclass(frozen=True)
class ImportanceConfig:
    """Settings of an importance run.

    Attributes:
        model: The model.
        corpus: The corpus.
        tokens: How documents become sequences.
        reduction: Loss of a sequence: the mean or the sum over its tokens.
        shard_size: Sequences that are stored and resumed together.
        batch_tokens: Tokens of one pass, padding included.

    Raises:
        ImportanceError: A setting is unknown or out of range.
    """

    model: ModelSpec
    corpus: CorpusSpec
    tokens: TokenPlan
    reduction: Reduction = "mean"
    shard_size: int = 64
    batch_tokens: int = 8192

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise ImportanceError(f"unknown reduction {self.reduction!r}. Choose {' or '.join(REDUCTIONS)}")
        for name in ("shard_size", "batch_tokens"):
            if getattr(self, name) < 1:
                raise ImportanceError(f"{name}={getattr(self, name)} (limit 1). Raise `{name}`")
        if self.tokens.min_tokens < 2:
            raise ImportanceError(
                f"min_tokens={self.tokens.min_tokens} (limit 2, the last one is predicted). Raise `min_tokens`"
            )


@dataclass(frozen=True)
class ImportanceResult:
    """Result of an importance run.

    Attributes:
        run_id: The run in the store.
        already_done: True if the run was complete before, so that nothing was measured.
        measured: Shards measured now.
        skipped: Shards found in the ledger.
        report: Counts of the corpus; None if it was not read.
    """

    run_id: str
    already_done: bool
    measured: int = 0
    skipped: int = 0
    report: CorpusReport | None = None


def run_importance(
    config: ImportanceConfig,
    store: Store,
    open_replicas: Callable[[], AbstractContextManager[Pool]],
    *,
    identity: ModelIdentity | None = None,
    resume_anyway: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> ImportanceResult:
    """Measure the importance of all heads on a corpus into a store.

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
            "reduction": config.reduction,
            "shard_size": config.shard_size,
            "batch_tokens": config.batch_tokens,
        }
    )
    done = finished_run(store, "importance", mark, identity, resume_anyway=resume_anyway, say=say)
    if done is not None:
        return ImportanceResult(done, True)

    report = CorpusReport()
    found, rest = read_ahead(
        shards(sequences(corpus, identity.tokenizer, config.tokens, report), shard_size=config.shard_size)
    )
    with open_replicas() as pool:
        written = write_shards(
            store,
            pool,
            run_record(
                "importance",
                mark,
                RunContext(identity, pool),
                config=_config_facts(config),
                bos_policy=config.tokens.bos,
                corpus=config.corpus.name,
                corpus_hash=corpus_fingerprint,
                total_shards=None if rest is not None else len(found),
            ),
            chain(found, rest or ()),
            lambda shard: ImportanceItem(shard, config.reduction, config.batch_tokens, identity.rope_lengths),
            report,
            total=None if rest is not None else sum(len(shard.sequences) for shard in found),
            task=measure_importance,
            resume_anyway=resume_anyway,
            say=say,
        )
    return ImportanceResult(written.run_id, False, written.measured, written.skipped, report)


def _config_facts(config: ImportanceConfig) -> dict[str, Any]:
    return {
        "model": asdict(config.model),
        "corpus": asdict(config.corpus),
        "tokens": asdict(config.tokens),
        "attention_across_documents": config.tokens.attention_across_documents,
        "reduction": config.reduction,
        "shard_size": config.shard_size,
        "batch_tokens": config.batch_tokens,
    }
