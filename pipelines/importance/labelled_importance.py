"""An importance run on labelled examples: the loss is that of the labels or target texts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from headscan.gradients.example_losses import Loss
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import LoadedModel
from headscan.models.rope import UNVARYING, RopeLengths
from headscan.pipelines import corpora
from headscan.pipelines.corpora import CorpusReport
from headscan.pipelines.corpora.sequences import hash_ids
from headscan.pipelines.importance.importance_task import MEASURED, REDUCTIONS, Reduction, measure_losses
from headscan.pipelines.labelled.example_file import DataSpec
from headscan.pipelines.labelled.labelled_loss import labelled_loss
from headscan.pipelines.labelled.labelled_texts import Answers, LabelledText, LabelledTexts, read_labelled
from headscan.pipelines.runs.identity import fingerprint
from headscan.pipelines.runs.run_options import RunOptions
from headscan.pipelines.runs.run_records import run_record
from headscan.pipelines.scan.run_shards import CorpusRunError, CorpusRunResult, write_shards
from headscan.pipelines.scan.shard_task import Measured


@dataclass(frozen=True)
class LabelledItem:
    """One shard of examples for one replica.

    Attributes:
        texts: The examples of the shard.
        batch_tokens: Tokens of one pass, padding included.
    """

    shard: corpora.Shard
    texts: tuple[LabelledText, ...]
    answers: Answers
    reduction: Reduction
    batch_tokens: int
    rope: RopeLengths = UNVARYING

    @property
    def name(self) -> str:
        return f"shard {self.shard.index}"


def measure_labelled(lm: LoadedModel, item: LabelledItem) -> Measured:
    """Pool task: measure the importance of every head on every example of a shard.

    Raises:
        NotFiniteError: A derivative is NaN or infinite.
    """
    texts = item.texts

    def loss_of(rows: list[int]) -> Loss:
        return labelled_loss(lm, item.answers, [texts[row] for row in rows], summed=item.reduction == "sum")

    lengths = [text.longest for text in texts]
    return measure_losses(lm, loss_of, lengths, [text.index for text in texts], item.batch_tokens, item.rope)


@dataclass(frozen=True)
class LabelledImportanceConfig:
    """Settings of an importance run on labelled examples.

    Attributes:
        data: The examples.
        max_tokens: Longest text and target text; None uses the model's context, at most 2,048 tokens.
        reduction: Loss of a target text: the mean or the sum over its tokens.
        shard_size: Examples that are stored and resumed together.
        batch_tokens: Tokens of one pass, padding included.

    Raises:
        CorpusRunError: A setting is unknown or out of range.
    """

    model: ModelSpec
    data: DataSpec
    max_tokens: int | None = None
    reduction: Reduction = "mean"
    shard_size: int = field(default=64, kw_only=True)
    batch_tokens: int = field(default=8192, kw_only=True)

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise CorpusRunError(f"unknown reduction {self.reduction!r}. Choose {' or '.join(REDUCTIONS)}")
        for name in ("shard_size", "batch_tokens"):
            if getattr(self, name) < 1:
                raise CorpusRunError(f"{name}={getattr(self, name)} (limit 1). Raise `{name}`")


def run_labelled_importance(
    config: LabelledImportanceConfig, run: RunOptions, *, texts: LabelledTexts | None = None
) -> CorpusRunResult:
    """Measure the importance of all heads on labelled examples into a store.

    Args:
        texts: The examples; None reads the file.

    Raises:
        ExampleError: The file cannot be read, or a label is no class of the model.
        ResumeError: The run is unfinished, software or device changed, and ``resume_anyway`` is False.
        HeadscanError: An error of the user; shards stored before stay.
    """
    identity = run.identify(config.model)
    if texts is None:
        texts = read_labelled(config.data, config.model, identity, config.max_tokens)
    if texts.truncated:
        run.say(f"{texts.truncated} of {len(texts.texts)} examples were cut to the longest allowed text")
    settings = {
        "reduction": config.reduction,
        "measured": MEASURED,
        "shard_size": config.shard_size,
        "batch_tokens": config.batch_tokens,
        "answers": texts.answers.value,
    }
    data_hash = texts.fingerprint()
    mark = fingerprint(
        {"model": identity.fingerprint(), "dtype": config.model.dtype, "examples": data_hash, **settings}
    )
    if (done := run.finished("importance", mark, identity)) is not None:
        return CorpusRunResult(done, True)
    report = CorpusReport()
    groups = list(_groups(texts.texts, config.shard_size))
    shards = [_shard(index, group, config.data.name, report) for index, group in enumerate(groups)]
    answers = texts.answers
    with run.opened(identity) as context:
        record = run_record(
            "importance",
            mark,
            context,
            config={"model": asdict(config.model), "data": asdict(config.data), **settings},
            bos_policy=None,
            corpus=config.data.name,
            corpus_hash=data_hash,
            total_shards=len(shards),
        )
        written = write_shards(
            run.store,
            context.pool,
            record,
            shards,
            lambda shard: LabelledItem(
                shard, groups[shard.index], answers, config.reduction, config.batch_tokens, identity.rope_lengths
            ),
            report,
            total=len(texts.texts),
            task=measure_labelled,
            resume_anyway=run.resume_anyway,
            say=run.say,
        )
    return CorpusRunResult(written.run_id, False, written.measured, written.skipped, report)


def _groups(texts: Sequence[LabelledText], size: int) -> Iterator[tuple[LabelledText, ...]]:
    return (tuple(texts[start : start + size]) for start in range(0, len(texts), size))


def _shard(index: int, texts: Sequence[LabelledText], source: str, report: CorpusReport) -> corpora.Shard:
    """Return a group of examples as a shard; its hash includes the targets."""
    digest = hashlib.sha256()
    sequences = []
    for text in texts:
        ids, target = (np.asarray(each, dtype=np.int32) for each in (text.ids, text.target_ids))
        digest.update(f"{hash_ids(ids)} {hash_ids(target)}\n".encode())
        sequences.append(corpora.Sequence(text.index, text.index, source, ids, False, hash_ids(ids)[:16]))
        report.documents += 1
        report.sequences += 1
        report.tokens += len(ids)
    return corpora.Shard(index, tuple(sequences), digest.hexdigest())
