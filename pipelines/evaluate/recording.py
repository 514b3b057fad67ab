"""Recording of a task's prompts.

One scan of them gives every score and every threshold of a sweep.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict

import numpy as np

from headscan.analysis.store.store import Store
from headscan.attention.attention_request import MassWidths
from headscan.catalog import SCORES, statistics_for
from headscan.cluster.tasks.pool import Pool
from headscan.pipelines.corpora import CorpusReport, Sequence, shards
from headscan.pipelines.corpora.sequences import hash_ids
from headscan.pipelines.evaluate.evaluation_requests import Questions
from headscan.pipelines.evaluate.run_evaluation import EvaluateConfig
from headscan.pipelines.runs.identity import fingerprint
from headscan.pipelines.runs.run_context import RunContext
from headscan.pipelines.runs.run_records import finished_run, run_record
from headscan.pipelines.scan.run_shards import write_shards
from headscan.pipelines.scan.shard_task import ShardItem

#: Prompts per shard, the unit of storing and resuming.
_SHARD = 64


def record_prompts(
    config: EvaluateConfig,
    context: RunContext,
    questions: Questions,
    store: Store,
    pool: Pool,
    *,
    resume_anyway: bool = False,
    say: Callable[[str], None],
) -> str:
    """Measure every prompt of the benchmark; return the run's id.

    No heads are ablated.

    The scores have one entry for each distinct input: the choices of a question are often one input.
    """
    statistics = tuple(sorted(statistics_for(SCORES)))
    widths = MassWidths()
    prompts = questions.prompts()
    names = ", ".join(config.tasks.names)
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(hash_ids(np.asarray(prompt, dtype=np.int32)).encode())
    mark = fingerprint(
        {
            "model": context.identity.fingerprint(),
            "dtype": config.model.dtype,
            "prompts": digest.hexdigest(),
            "statistics": statistics,
            "widths": asdict(widths),
            "batch_tokens": config.batch_tokens,
        }
    )
    done = finished_run(store, "recording", mark, context.identity, resume_anyway=resume_anyway, say=say)
    if done is not None:
        say(f"run {done}: the prompts of {names} were recorded before")
        return done
    report = CorpusReport()
    record = run_record(
        "recording",
        mark,
        context,
        bos_policy=config.tasks.bos,
        corpus=f"prompts of {names}",
        corpus_hash=digest.hexdigest(),
        config={
            "tasks": config.tasks.names,
            "statistics": statistics,
            "sink": widths.sink,
            "recent": widths.recent,
            "batch_tokens": config.batch_tokens,
        },
    )
    written = write_shards(
        store,
        pool,
        record,
        shards(_sequences(prompts, names, report), shard_size=_SHARD),
        lambda shard: ShardItem(shard, statistics, widths, config.batch_tokens, False, context.identity.rope_lengths),
        report,
        total=len(prompts),
        resume_anyway=resume_anyway,
        say=say,
    )
    return written.run_id


def _sequences(prompts: Iterable[tuple[int, ...]], source: str, report: CorpusReport) -> Iterator[Sequence]:
    for index, prompt in enumerate(prompts):
        ids = np.asarray(prompt, dtype=np.int32)
        report.documents += 1
        report.sequences += 1
        report.tokens += len(ids)
        yield Sequence(index, index, source, ids, False, hash_ids(ids)[:16])
