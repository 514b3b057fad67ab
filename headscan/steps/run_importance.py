"""An importance run: derivatives of the loss by a gate on every head, on a corpus or on labelled examples.

Shapes: B sequences, L layers, H query heads of the widest layer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from headscan import texts as corpora
from headscan.engine.prompt_losses import recall_prompts
from headscan.errors import UnsupportedModelError
from headscan.gradients.head_importance import default_loss, entropies, head_gradients
from headscan.gradients.losses import Loss
from headscan.models.loaded_model import LoadedModel
from headscan.models.model_facts import RopeLengths, is_classifier
from headscan.models.token_batches import Batch, pad, run_halving, whole_batches
from headscan.runs.model_identity import ModelIdentity
from headscan.runs.run_context import Run
from headscan.settings.corpus_settings import ExamplesSpec, TokenConfig
from headscan.steps.importance import Importance, LossReduction
from headscan.steps.run_corpus import CorpusMeasurement, CorpusRunResult, ShardTable, run_corpus, run_shards
from headscan.steps.run_scan import HeadMeasurements, head_table
from headscan.texts import CorpusReport
from headscan.texts.labelled_texts import Answers, LabelledText, labelled_loss, read_labelled
from headscan.texts.recall_tasks import fixed_by
from headscan.texts.sequences import hash_ids, special_tokens

#: Time of measuring a sequence, as a multiple of a plain forward pass: a forward and a backward pass, each block run
#: again. It only chooses the size of a shard.
_COST_IN_PASSES = 4
#: Columns that are measured; a run with others is another run.
MEASURED = ("gate_gradient", "token_gradient", "entropy")


def measure_importance(
    lm: LoadedModel, shard: corpora.Shard, *, reduction: LossReduction, batch_tokens: int, rope: RopeLengths
) -> ShardTable:
    """Pool task: measure the importance of every head on every sequence of a shard."""
    sequences = shard.sequences
    lengths = [len(sequence) for sequence in sequences]

    def loss_of(indices: list[int]) -> Loss:
        ids, lengths = pad([sequences[index].ids for index in indices])
        keys = [sequences[index].index for index in indices]
        return default_loss(lm, ids, lengths, input_keys=keys, summed=reduction == "sum")

    return _measure_losses(lm, shard, loss_of, lengths, whole_batches(lengths, batch_tokens, rope.group))


def _measure_losses(
    lm: LoadedModel,
    shard: corpora.Shard,
    loss_of: Callable[[list[int]], Loss],
    lengths: list[int],
    batches: list[Batch],
) -> ShardTable:
    """Return the derivatives of the losses of a shard's sequences by a gate on every head, at every site. ``loss_of``
    makes the loss of a batch from the indices of its sequences in the shard.
    """

    def measure(indices: list[int]) -> list[HeadMeasurements]:
        loss = loss_of(indices)
        corpus_indices = [shard.sequences[index].index for index in indices]
        measurements = []
        for kind, gradients in head_gradients(lm, loss).items():
            lm_at = lm.at(kind)
            values = dict(zip(MEASURED, (gradients.gates, gradients.tokens, entropies(lm_at, loss)), strict=True))
            nonfinite = torch.zeros(gradients.gates.shape, dtype=torch.bool)
            measurements.append(HeadMeasurements.of(lm_at.grid, corpus_indices, values, nonfinite))
        return measurements

    measured_batches: list[list[HeadMeasurements]] = []
    limit = lm.limits["importance"]
    for batch in batches:
        halves = run_halving(list(batch.sequence_indices), measure, lengths, limit)
        measured_batches += [measurements for _, measurements in halves]
    tables = [
        head_table(HeadMeasurements.of_batches(site_batches)) for site_batches in zip(*measured_batches, strict=True)
    ]
    return ShardTable(pa.concat_tables(tables), 0)


def recall_texts(identity: ModelIdentity, config: TokenConfig, count: int) -> list[corpora.TokenSequence]:
    """Return the recall prompts with their answers as texts: ``count`` of each family, as long as the longest text of
    ``config``. They are tokenised again, as a corpus is, and the loss of all tokens counts. No evaluation asks the
    same questions.
    """
    tokenizer, special = identity.tokenizer, special_tokens(identity.tokenizer, config)
    texts: list[corpora.TokenSequence] = []
    for prompts in recall_prompts(identity, config.longest, count, seed=0):
        for request in prompts.requests:
            text = str(tokenizer.decode(list(request.ids), skip_special_tokens=True))
            whole = tokenizer.encode(text, add_special_tokens=False, verbose=False)
            body = np.asarray(whole[: config.longest - special.total], dtype=np.int32)
            ids, number, name = special.around(body), len(texts), prompts.name
            is_cut = len(body) < len(whole)
            texts.append(corpora.TokenSequence(number, number, name, ids, is_cut, hash_ids(ids)[:16], name))
    return texts


def run_importance(config: Importance, run: Run) -> CorpusRunResult:
    """Measure the importance of all heads on a corpus, and on recall prompts if the settings ask for some, or on
    labelled examples.
    """
    if config.data is not None:
        return _run_on_examples(config, config.data, run)
    if is_classifier(run.model.config()):
        raise UnsupportedModelError(f"{run.identity.name} is a classifier, and text has no labels. Set `data`")
    settings: dict[str, Any] = {"reduction": config.reduction, "measured": MEASURED}
    if config.recall_prompts:
        settings["recall_prompts"] = config.recall_prompts
    task = partial(
        measure_importance, reduction=config.reduction, batch_tokens=run.batch_tokens, rope=run.identity.rope_lengths
    )
    measurement = CorpusMeasurement("importance", task, _COST_IN_PASSES, settings, settings)
    return run_corpus(config, run, measurement, prompts=_recall_prompts(config, run))


def _recall_prompts(config: Importance, run: Run) -> Iterator[corpora.TokenSequence]:
    """Yield the recall prompts of the settings. A generator, because a run that is finished does not load the model."""
    if not config.recall_prompts:
        return
    if not run.facts.grid.predicts_next_token:
        raise UnsupportedModelError(
            f"{run.identity.name} does not predict the next token, but recall prompts need a decoder. Set"
            " `recall_prompts` to 0"
        )
    with fixed_by("Set `recall_prompts` to 0, or raise `max_tokens` if the length is too small"):
        texts = recall_texts(run.identity, config.tokens.within(run.identity), config.recall_prompts)
    yield from texts


@dataclass(frozen=True, eq=False)
class LabelledShard(corpora.Shard):
    """Labelled examples, whose texts are the sequences of the shard."""

    examples: tuple[LabelledText, ...]


def measure_labelled(
    lm: LoadedModel,
    shard: LabelledShard,
    *,
    answers: Answers,
    reduction: LossReduction,
    batch_tokens: int,
    rope: RopeLengths,
) -> ShardTable:
    """Pool task: measure the importance of every head on every example of a shard."""
    lengths = [example.longest for example in shard.examples]

    def loss_of(indices: list[int]) -> Loss:
        examples = [shard.examples[index] for index in indices]
        return labelled_loss(lm, answers, examples, summed=reduction == "sum")

    return _measure_losses(lm, shard, loss_of, lengths, whole_batches(lengths, batch_tokens, rope.group))


def _run_on_examples(config: Importance, data: ExamplesSpec, run: Run) -> CorpusRunResult:
    texts = read_labelled(data, run.model, run.identity, config.tokens.max_tokens)
    if texts.truncated:
        run.say(f"{texts.truncated} of {len(texts.texts)} examples were cut to the longest allowed text")
    report, data_hash = CorpusReport(), texts.fingerprint()

    def read(size: int) -> Iterator[LabelledShard]:
        for index, start in enumerate(range(0, len(texts.texts), size)):
            yield _shard(index, texts.texts[start : start + size], data.name, report)

    task = partial(
        measure_labelled,
        answers=texts.answers,
        reduction=config.reduction,
        batch_tokens=run.batch_tokens,
        rope=run.identity.rope_lengths,
    )
    settings = {"reduction": config.reduction, "measured": MEASURED, "answers": texts.answers.value}
    return run_shards(
        run,
        CorpusMeasurement("importance", task, _COST_IN_PASSES, settings, settings),
        read,
        report,
        decides={"examples": data_hash},
        stores={"data": asdict(data)},
        longest=texts.longest,
        shard_size=config.shard_size,
        corpus=data.name,
        corpus_hash=data_hash,
        bos_policy=None,
    )


def _shard(index: int, examples: tuple[LabelledText, ...], source: str, report: CorpusReport) -> LabelledShard:
    """Return a group of examples as a shard; its hash includes the targets."""
    digest = hashlib.sha256()
    sequences = []
    for example in examples:
        ids, target = (np.asarray(tokens, dtype=np.int32) for tokens in (example.ids, example.target_ids))
        digest.update(f"{hash_ids(ids)} {hash_ids(target)}\n".encode())
        sequences.append(corpora.TokenSequence(example.index, example.index, source, ids, False, hash_ids(ids)[:16]))
        report.documents += 1
        report.sequences += 1
        report.tokens += len(ids)
    return LabelledShard(index, tuple(sequences), digest.hexdigest(), examples)
