"""Behaviour probes: sequences, and scores of how strongly heads react.

There are two kinds of sequence. *Repeats* are random tokens, repeated several times; they show induction heads,
duplicate-token heads and previous-token heads (arXiv 2209.11895, 2211.00593). *Needles* are a sentence hidden in a long
text and a question about it at the end (arXiv 2404.15574). The paper lets the model generate and counts copied tokens;
here the answer is part of the input (teacher forcing), so small, base and failing models have scores too, and a head's
score does not depend on how well the rest of the model copies.

Shapes: B sequences, N tokens, L layers, H query heads, R chosen queries, S keys.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from headscan.attention.calls import AttentionCall
from headscan.attention.hooks import attention_hook
from headscan.catalog import BEHAVIOURS, check_behaviours
from headscan.errors import NamedValues, NotFiniteError, SequenceError, UnsupportedModelError, check_type
from headscan.grid import AttentionSite
from headscan.measure.probe_settings import BehaviourProbe
from headscan.models.forward_inputs import run_forward
from headscan.models.loaded_model import LoadedModel, check_loaded
from headscan.models.token_batches import pad


@dataclass(frozen=True)
class Needle:
    """A sentence to hide and its question, as token ids.

    Attributes:
        tokens: The sentence; it is also the answer.
        cue: The question between haystack and answer.
    """

    tokens: tuple[int, ...]
    cue: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("tokens", "cue"):
            ids = getattr(self, name)
            if not isinstance(ids, Sequence) or not ids or not all(isinstance(token, Integral) for token in ids):
                raise SequenceError(
                    f"`{name}` of a needle are no token ids: {reprlib.repr(ids)}. Encode the text with the tokenizer"
                )
            object.__setattr__(self, name, tuple(map(int, ids)))


@dataclass(frozen=True)
class NeedlePrompt:
    """A haystack with a needle of ``size`` tokens from ``start`` on, the cue, and the answer without its last token."""

    ids: tuple[int, ...]
    start: int
    size: int


def probe(
    lm: LoadedModel,
    behaviours: Iterable[str] | None = None,
    *,
    settings: BehaviourProbe | None = None,
    haystack: Sequence[int] | None = None,
    needles: Sequence[Needle] = (),
) -> dict[str, Tensor]:
    """Score how strongly every head shows each behaviour, from 0 to 1.

    Args:
        lm: A causal decoder from `headscan.load`.
        behaviours: Names from the catalogue; None probes all, those with a needle only if ``haystack`` and ``needles``
            are passed.
        settings: The sequences; None uses the defaults.
        haystack: Token ids of ordinary text, at least as many as the longest prompt; `retrieval_score` needs it.
        needles: The sentences to hide in it.

    Returns:
        For each behaviour float32 (L, H) on the CPU: the mean over its sequences. NaN where a layer lacks the head.

    Raises:
        UnknownNameError: A behaviour is not in the catalogue.
        UnsupportedModelError: The model is not a causal decoder, or is in train mode.
        SequenceError: The sequences are too long for the model or the haystack.
        NotFiniteError: The model's attention weights are NaN.
    """
    check_loaded(lm)
    check_type("settings", settings, BehaviourProbe | None, "a BehaviourProbe", SequenceError)
    settings = settings or BehaviourProbe()
    if behaviours is None:
        behaviours = [b.name for b in BEHAVIOURS.values() if b.probe == "repeats" or (haystack is not None and needles)]
    wanted = check_behaviours(behaviours)
    scores: dict[str, Tensor] = {}
    if any(BEHAVIOURS[name].probe == "repeats" for name in wanted):
        scores |= {name: score.mean(0) for name, score in repeat_scores(lm, repeated_tokens(lm, settings)).items()}
    if "retrieval_score" in wanted:
        hay = () if haystack is None else haystack
        prompts = [
            prompt
            for length in settings.lengths_within(lm.max_tokens)
            for prompt in needle_prompts(length, settings.depths, hay, needles, _beginning(lm))
        ]
        # One prompt at a time, because the activations of a long prompt need much memory.
        scores["retrieval_score"] = torch.cat([retrieval_scores(lm, [prompt]) for prompt in prompts]).mean(0)
    elsewhere = dict.fromkeys(BEHAVIOURS, "Name it in the argument behaviours of probe, with what it needs")
    return NamedValues("behaviour", {name: scores[name] for name in wanted}, elsewhere)


# Scores, from weights alone


def mean_weight_on(weights_BHRS: Tensor, wanted_BRS: Tensor) -> Tensor:
    """Return the mean weight (B, H) on the wanted keys of queries."""
    wanted = wanted_BRS[:, None].to(weights_BHRS)
    queries = wanted_BRS.any(-1).sum(-1).to(weights_BHRS)
    return (weights_BHRS * wanted).sum((-2, -1)) / queries[:, None]


def share_of_hits(weights_BHRS: Tensor, target_BR: Tensor) -> Tensor:
    """Return the share (B, H) of hits; -1 in ``target_BR`` marks padding."""
    hits = weights_BHRS.argmax(-1) == target_BR[:, None]
    return hits.sum(-1) / (target_BR >= 0).sum(-1)[:, None]


def earlier_occurrences(ids_BN: Tensor) -> Tensor:
    """Return which keys repeat a query's token earlier: bool (B, N, N)."""
    return (ids_BN[:, :, None] == ids_BN[:, None]).tril(-1)


# Repeats


def repeated_tokens(lm: LoadedModel, settings: BehaviourProbe) -> Tensor:
    """Return repeated random tokens (B, N), after BOS if there is one."""
    ordinary = _ordinary_tokens(lm)
    if len(ordinary) < settings.tokens:
        raise SequenceError(
            f"too many tokens to repeat: {settings.tokens} (limit {len(ordinary)}, the tokens of {lm.source} that are "
            "not special). Lower `tokens`"
        )
    generator = torch.Generator().manual_seed(settings.seed)
    rows = []
    for _ in range(settings.sequences):
        drawn = ordinary[torch.randperm(len(ordinary), generator=generator)[: settings.tokens]]
        rows.append(torch.cat([torch.tensor(_beginning(lm), dtype=torch.long), drawn.repeat(settings.repeats)]))
    return torch.stack(rows)


def repeat_scores(lm: LoadedModel, ids_BN: Tensor) -> dict[str, Tensor]:
    """Return each sequence's scores of the behaviours on repeats: float32 (B, L, H)."""
    B, N = ids_BN.shape
    occurrence = earlier_occurrences(ids_BN)
    wanted = {
        "induction_score": F.pad(occurrence[..., :-1], (1, 0)),
        "duplicate_token_score": occurrence,
        "previous_token_score": torch.ones(N, N, dtype=torch.bool).triu(-1).tril(-1).expand(B, N, N),
    }

    def scores(weights_BHRS: Tensor) -> dict[str, Tensor]:
        return {name: mean_weight_on(weights_BHRS, keys.to(weights_BHRS.device)) for name, keys in wanted.items()}

    return _measured(lm, ids_BN, torch.arange(N).expand(B, N), scores)


# Needles


def needle_prompts(
    length: int,
    depths: Sequence[float],
    haystack: Sequence[int],
    needles: Sequence[Needle],
    beginning: Sequence[int] = (),
) -> list[NeedlePrompt]:
    """Return a prompt of ``length`` tokens for each needle and depth; ``beginning`` (BOS) precedes all text."""
    if not needles or any(not needle.tokens or not needle.cue for needle in needles):
        raise SequenceError("retrieval_score needs a needle and a cue. Pass `needles` with tokens")
    prompts = []
    for needle in needles:
        size = len(needle.tokens)
        room = length - len(beginning) - 2 * size - len(needle.cue) + 1
        if room < size:
            raise SequenceError(
                f"length is too small for a needle of {size} tokens, its question and its answer: {length} (limit "
                f"{length - room + size}). Raise lengths"
            )
        if room > len(haystack):
            raise SequenceError(
                f"haystack is too short: {len(haystack)} tokens (limit {room} for a prompt of {length}). Pass more "
                "text, or lower lengths"
            )
        for depth in depths:
            cut = round(depth * room)
            above = (*beginning, *haystack[:cut])
            ids = (*above, *needle.tokens, *haystack[cut:room], *needle.cue, *needle.tokens[:-1])
            prompts.append(NeedlePrompt(ids, len(above), size))
    return prompts


def retrieval_scores(lm: LoadedModel, prompts: Sequence[NeedlePrompt]) -> Tensor:
    """Return `retrieval_score` of each prompt, float32 (B, L, H); the query before an answer's token predicts it."""
    ids_BN, length_B = pad([prompt.ids for prompt in prompts])
    lm.rope_lengths.check(ids_BN.shape[1], length_B.tolist())
    targets = [torch.arange(prompt.start, prompt.start + prompt.size) for prompt in prompts]
    queries = [torch.arange(len(prompt.ids) - prompt.size, len(prompt.ids)) for prompt in prompts]
    target_BR = pad_sequence(targets, batch_first=True, padding_value=-1)

    def scores(weights_BHRS: Tensor) -> dict[str, Tensor]:
        return {"retrieval_score": share_of_hits(weights_BHRS, target_BR.to(weights_BHRS.device))}

    return _measured(lm, ids_BN, pad_sequence(queries, batch_first=True), scores)["retrieval_score"]


def _measured(
    lm: LoadedModel, ids_BN: Tensor, position_BR: Tensor, scores: Callable[[Tensor], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Run the model and score (B, L, H) each layer's weights (B, H, R, S) of the queries at ``position_BR``."""
    _check_sequences(lm, ids_BN)
    measured: dict[str, Tensor] = {}

    def observe(site: AttentionSite, call: AttentionCall) -> None:
        weights = call.weights(position_BR)
        if not weights.isfinite().all():
            raise NotFiniteError(
                f"attention weights are not finite in layer {site.layer} of {lm.source}. Load it in another dtype"
            )
        for name, values_BH in scores(weights).items():
            layers = measured.setdefault(name, torch.full((len(ids_BN), *lm.grid.shape), float("nan")))
            layers[:, site.layer, : site.num_attention_heads] = values_BH.cpu()

    with torch.no_grad(), attention_hook(lm, observe):
        run_forward(lm.model, {"input_ids": ids_BN.to(lm.device)})
    return measured


def _check_sequences(lm: LoadedModel, ids_BN: Tensor) -> None:
    if lm.is_encoder_decoder or lm.grid.kind != "self" or not all(site.causal for site in lm.grid.sites):
        raise UnsupportedModelError(
            f"behaviours are defined for causal decoders only: {lm.source} is not a causal decoder. Use collect"
        )
    if lm.max_tokens is not None and ids_BN.shape[1] > lm.max_tokens:
        raise SequenceError(
            f"sequences are too long for {lm.source}: {ids_BN.shape[1]} tokens (limit {lm.max_tokens}). Lower lengths, "
            "or tokens of repeats"
        )
    if int(ids_BN.min()) < 0 or int(ids_BN.max()) >= lm.vocab_size:
        raise SequenceError(
            f"token ids are out of range: {int(ids_BN.max())} (limit {lm.vocab_size - 1}). Use the tokenizer of "
            f"{lm.source}"
        )


def _beginning(lm: LoadedModel) -> list[int]:
    """Return BOS if the tokenizer has one; without a tokenizer, the configuration's."""
    named = lm.model.config.get_text_config() if lm.tokenizer is None else lm.tokenizer
    bos = getattr(named, "bos_token_id", None)
    return [bos] if isinstance(bos, int) and 0 <= bos < lm.vocab_size else []


def _ordinary_tokens(lm: LoadedModel) -> Tensor:
    """Return the ids, ascending, that model and tokenizer have and that are neither special nor added later."""
    special: set[int] = set()
    for config in (lm.model.config, lm.model.config.get_text_config()):
        for name, value in config.to_dict().items():
            if name.endswith(("_token_id", "_token_index")):
                special.update(value if isinstance(value, list) else [value])
    known = set(range(lm.vocab_size))
    if lm.tokenizer is not None:
        known &= set(lm.tokenizer.get_vocab().values())
        special |= {*lm.tokenizer.all_special_ids, *getattr(lm.tokenizer, "added_tokens_decoder", ())}
    return torch.tensor(sorted(known - special), dtype=torch.long)
