"""A probe: sequences -> pool of replicas -> scores -> store.

The same command again resumes: what was measured, repeated tokens or needles in one length, is not measured again.

Shapes: B sequences, L layers, H query heads of the widest layer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor

from headscan.catalog import BEHAVIOURS, check_behaviours
from headscan.errors import SequenceError, UnsupportedModelError
from headscan.grid import HeadGrid
from headscan.long_work import WorkKey
from headscan.measure.behaviour_probes import (
    Needle,
    NeedlePrompt,
    needle_prompts,
    repeat_scores,
    repeated_tokens,
    retrieval_scores,
)
from headscan.measure.probe_settings import BehaviourProbe
from headscan.models.loaded_model import LoadedModel
from headscan.models.token_batches import run_halving, whole_batches
from headscan.runs.ledger import measured
from headscan.runs.model_identity import ModelIdentity
from headscan.runs.progress import Progress
from headscan.runs.run_context import Run
from headscan.steps.probe import Probe, ProbeError
from headscan.texts import Corpus, TokenConfig, open_corpus, sequences

#: Hidden sentences and their questions. No sentence's end follows from its beginning or from a haystack.
NEEDLES = (
    (
        " The baker on Linden Street keeps a blue lantern burning beside the flour scale every winter night.",
        "\n\nOne sentence above is about the baker on Linden Street. Word for word, that sentence is:",
    ),
    (
        " Grandmother hid the silver compass under a loose brick behind the greenhouse before she sailed to Norway.",
        "\n\nOne sentence above is about the silver compass. Word for word, that sentence is:",
    ),
    (
        " The most patient creature in the valley is an old grey donkey who waits for the noon train with an umbrella.",
        "\n\nOne sentence above is about the most patient creature in the valley. Word for word, that sentence is:",
    ),
)


@dataclass(frozen=True)
class ProbeResult:
    """A probe run, and True if the run was complete before."""

    run_id: str
    already_done: bool


@dataclass(frozen=True)
class ProbeItem:
    """Sequences for one replica: needle prompts, else repeated tokens."""

    name: str
    settings: BehaviourProbe
    prompts: tuple[NeedlePrompt, ...]
    batch_tokens: int

    @property
    def sequences(self) -> int:
        return len(self.prompts) or self.settings.sequences

    @property
    def behaviours(self) -> list[str]:
        probe = "needle" if self.prompts else "repeats"
        return [each.name for each in BEHAVIOURS.values() if each.probe == probe]


def run_probe(config: Probe, run: Run) -> ProbeResult:
    identity = run.identity
    config = replace(config, probe=replace(config.probe, lengths=config.probe.lengths_within(identity.max_tokens)))
    names = check_behaviours(config.behaviours)
    if not names:
        names = tuple(b.name for b in BEHAVIOURS.values() if b.probe == "repeats" or identity.found_tokenizer)
        if left_out := [name for name in BEHAVIOURS if name not in names]:
            run.say(f"{identity.name} has no tokenizer; not measured: {', '.join(left_out)}")
    facts = _facts(config, names, run.batch_tokens)
    corpus = None
    if any(BEHAVIOURS[name].probe == "needle" for name in names):
        _check_lengths(config.probe, identity)
        corpus = open_corpus(config.corpus)
        facts |= {"corpus": corpus.fingerprint()}
    run_hash = run.fingerprint(facts)
    if (done := run.finished_run("probe", run_hash)) is not None:
        return ProbeResult(done, True)

    items = []
    if any(BEHAVIOURS[name].probe == "repeats" for name in names):
        items.append(ProbeItem("repeated tokens", config.probe, (), run.batch_tokens))
    corpus_hash = None
    if corpus is not None:
        haystack = _haystack(corpus, identity, config.longest(identity))
        corpus_hash = f"{facts['corpus'][:16]}-{hashlib.sha256(haystack.tobytes()).hexdigest()[:16]}"
        items += _needle_items(config, run, haystack)

    if not run.facts.grid.predicts_next_token:
        raise UnsupportedModelError(
            f"{identity.name} is not a causal decoder, and behaviours are defined for causal decoders only. Use "
            "`headscan scan`"
        )
    record = run.record(
        "probe",
        run_hash,
        config={"model": asdict(config.model), **facts},
        bos_policy="always" if _beginning(identity) else "never" if identity.found_tokenizer else None,
        corpus=None if corpus is None else config.corpus.name,
        corpus_hash=corpus_hash,
    )
    grid = run.facts.grid
    with run.ledger(record) as ledger:
        run_id, found = ledger.run_id, dict[str, np.ndarray]()
        with Progress("probe", sum(item.sequences for item in items), "sequence") as progress:
            for item, numbers, is_new in measured(run.pool, probe_heads, items, ledger, _key, _numbers):
                found[item.name] = numbers.astype(np.float32).reshape(-1, item.sequences, *grid.shape)
                progress.count(item.sequences, is_new=is_new)
        # In the order of the items, not in which they finished, because a sum of floats depends on the order.
        strengths = [strength for item in items for strength in zip(item.behaviours, found[item.name], strict=True)]
        scores = {name: np.concatenate([values for of, values in strengths if of == name]).mean(0) for name in names}
        run.store.add_behaviours(run_id, behaviour_table(grid, scores))
    return ProbeResult(run_id, False)


def _key(item: ProbeItem) -> WorkKey:
    return "behaviours of heads", item.name


def _numbers(values: dict[str, np.ndarray]) -> np.ndarray:
    return np.stack([values[name] for name in BEHAVIOURS if name in values])


def probe_heads(lm: LoadedModel, item: ProbeItem) -> dict[str, np.ndarray]:
    """Pool task: score the behaviours of an item's sequences; float32 (B, L, H) each."""
    if item.prompts:
        lengths = [len(prompt.ids) for prompt in item.prompts]

        def measure(rows: list[int]) -> dict[str, Tensor]:
            return {"retrieval_score": retrieval_scores(lm, [item.prompts[row] for row in rows])}
    else:
        ids = repeated_tokens(lm, item.settings)
        lengths = [ids.shape[1]] * len(ids)

        def measure(rows: list[int]) -> dict[str, Tensor]:
            return repeat_scores(lm, ids[rows])

    values: dict[str, np.ndarray] = {}
    for batch in whole_batches(lengths, item.batch_tokens, lm.rope_lengths.group):
        for rows, scores in run_halving(list(batch.sequence_indices), measure, lengths, lm.limits["probe"]):
            for name, scores_BLH in scores.items():
                kept = values.setdefault(name, np.empty((len(lengths), *lm.grid.shape), dtype=np.float32))
                kept[rows] = scores_BLH.numpy()
    return values


def behaviour_table(grid: HeadGrid, scores: dict[str, np.ndarray]) -> pa.Table:
    """Return rows by behaviour, layer and head from arrays (L, H), without absent heads."""
    layer, head = np.array(list(grid.heads()), dtype=np.int16).reshape(-1, 2).T
    return pa.table(
        {
            "site": [grid.kind] * len(layer) * len(scores),
            "layer": np.tile(layer, len(scores)),
            "head": np.tile(head, len(scores)),
            "behaviour": [name for name in scores for _ in layer],
            "value": np.concatenate([values[layer, head] for values in scores.values()]),
        }
    )


def _facts(config: Probe, names: Sequence[str], batch_tokens: int) -> dict[str, Any]:
    probes = {BEHAVIOURS[name].probe for name in names}
    facts: dict[str, Any] = {"behaviours": list(names), "batch_tokens": batch_tokens}
    settings = asdict(config.probe)
    if "repeats" in probes:
        facts |= {name: settings[name] for name in ("seed", "sequences", "tokens", "repeats")}
    if "needle" in probes:
        facts |= {name: settings[name] for name in ("lengths", "depths")} | {"needles": NEEDLES}
    return facts


def _check_lengths(settings: BehaviourProbe, identity: ModelIdentity) -> None:
    longest = max(settings.lengths_within(identity.max_tokens))
    if identity.max_tokens is not None and longest > identity.max_tokens:
        raise SequenceError(
            f"`lengths={longest}` (limit {identity.max_tokens} positions of {identity.name}). Lower `lengths`"
        )


def _needle_items(config: Probe, run: Run, haystack: np.ndarray) -> list[ProbeItem]:
    identity = run.identity

    def tokens(text: str) -> tuple[int, ...]:
        ids = tuple(identity.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        known = sum(token != identity.tokenizer.unk_token_id for token in ids)
        if 2 * known < max(len(ids), 2):
            raise ProbeError(
                f"the tokenizer of {identity.name} has {known} of {len(ids)} tokens of the needle {text[:30]!r} (at "
                "least half). Leave retrieval_score out of `behaviours`"
            )
        return ids

    needles = [Needle(tokens(sentence), tokens(cue)) for sentence, cue in NEEDLES]
    hay, settings = haystack.tolist(), config.probe
    return [
        ProbeItem(
            f"needles in {length} tokens",
            settings,
            tuple(needle_prompts(length, settings.depths, hay, needles, _beginning(identity))),
            run.batch_tokens,
        )
        for length in dict.fromkeys(settings.lengths_within(identity.max_tokens))
    ]


def _beginning(identity: ModelIdentity) -> tuple[int, ...]:
    bos = None if identity.found_tokenizer is None else identity.found_tokenizer.bos_token_id
    return () if bos is None else (int(bos),)


def _haystack(corpus: Corpus, identity: ModelIdentity, tokens: int) -> np.ndarray:
    """Return ``tokens`` tokens of drawn documents, or all."""
    found, pieces, texts = 0, list[np.ndarray](), 0
    while found < tokens and texts <= len(pieces):
        texts = max(1, 4 * texts)
        cutting = TokenConfig(max(tokens, 2), mode="chunk", bos="never", min_tokens=1, limit_sequences=texts)
        pieces = [piece.ids for piece in sequences(corpus, identity.tokenizer, cutting)]
        found = sum(map(len, pieces))
    return np.concatenate(pieces)[:tokens]
