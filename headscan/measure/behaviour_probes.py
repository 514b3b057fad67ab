"""Behaviour probes: sequences made to show what a head does, and scores of how much it does it.

Two kinds of sequence. *Repeats*: random tokens, written several times over, on which a head that continues what it has
seen before (induction), looks back at equal tokens or at the token before shows itself (arXiv 2209.11895, 2211.00593).
*Needles*: a sentence hidden in a long text and asked for at its end (arXiv 2404.15574). The paper lets the model
generate and counts the tokens it copies; here the answer is given (teacher forcing), so that small, base and failing
models have scores too, and what is counted does not depend on what else of the model copies well.

Shapes: B sequences, N tokens, L layers, H query heads, R chosen queries, S keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from headscan.attention.calls import AttentionCall
from headscan.attention.hooks import attention_hook
from headscan.catalog import BEHAVIOURS
from headscan.errors import NotFiniteError, SequenceError, UnsupportedModelError, unknown_name
from headscan.grid import AttentionSite
from headscan.models.forward_inputs import run
from headscan.models.loaded_model import LoadedModel


@dataclass(frozen=True)
class BehaviourProbe:
    """The sequences of a probe; tokens and repeats are by default those of arXiv 2209.11895.

    Every token that is not special is drawn alike, for a model does not say which are common and which are rare.

    Attributes:
        seed: Of the random tokens.
        sequences: How many sequences of repeats.
        tokens: Random tokens of such a sequence, all different.
        repeats: How often they are written.
        lengths: Tokens of a prompt with a needle, question and answer included.
        depths: Where in the haystack the needle lies: 0 is its beginning, 1 its end.

    Raises:
        SequenceError: A value out of range.
    """

    seed: int = 0
    sequences: int = 8
    tokens: int = 25
    repeats: int = 4
    lengths: tuple[int, ...] = (512,)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)

    def __post_init__(self) -> None:
        for name, least in (("seed", 0), ("sequences", 1), ("tokens", 2), ("repeats", 2)):
            if getattr(self, name) < least:
                raise SequenceError(f"{name}={getattr(self, name)} is too small for a probe: give at least {least}")
        if self.seed >= 1 << 63:
            raise SequenceError(f"seed={self.seed} is too large: give less than 2**63")
        if not self.lengths or not self.depths:
            raise SequenceError("a probe has no lengths or no depths: give at least one of each")
        if min(self.lengths) < 1:
            raise SequenceError(f"length {min(self.lengths)} is too small for a prompt: give at least 1")
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise SequenceError(f"depth {depth} is outside the haystack: give 0 (its beginning) to 1 (its end)")


@dataclass(frozen=True)
class Needle:
    """A sentence to be hidden, and what asks for it, as token ids.

    Attributes:
        tokens: The sentence; it is also the answer.
        cue: What stands between the haystack and the answer.
    """

    tokens: tuple[int, ...]
    cue: tuple[int, ...]


@dataclass(frozen=True)
class NeedlePrompt:
    """A haystack with a needle, the cue, and the answer up to its last token but one.

    Attributes:
        ids: All tokens.
        start: Where the needle begins in the haystack.
        size: Tokens of the needle.
    """

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
    """Score how much every head shows each behaviour, from 0 (not at all) to 1.

    Args:
        lm: A causal decoder from `headscan.load`.
        behaviours: Names from the catalogue; None: all that can be probed with what is given.
        settings: The sequences.
        haystack: Token ids of ordinary text, at least as many as the longest prompt; `retrieval_score` needs it.
        needles: What is hidden in it.

    Returns:
        For each behaviour float32 (L, H) on the CPU: means over all its sequences. NaN where a layer has no such head.

    Raises:
        UnknownNameError: A behaviour that the catalogue lacks.
        UnsupportedModelError: Not a causal decoder, or in train mode.
        SequenceError: Sequences that the model or the haystack has no room for.
        NotFiniteError: The model's attention weights are NaN.
    """
    settings = settings or BehaviourProbe()
    if behaviours is None:
        behaviours = [b.name for b in BEHAVIOURS.values() if b.probe == "repeats" or (haystack is not None and needles)]
    wanted = check_behaviours(behaviours)
    scores: dict[str, Tensor] = {}
    if any(BEHAVIOURS[name].probe == "repeats" for name in wanted):
        scores |= {name: found.mean(0) for name, found in repeat_scores(lm, repeated_tokens(lm, settings)).items()}
    if "retrieval_score" in wanted:
        hay = () if haystack is None else haystack
        prompts = [
            prompt
            for length in settings.lengths
            for prompt in needle_prompts(length, settings.depths, hay, needles, _beginning(lm))
        ]
        # One by one: the weights of a prompt's few queries are small, but a long prompt's activations are not.
        scores["retrieval_score"] = torch.cat([retrieval_scores(lm, [prompt]) for prompt in prompts]).mean(0)
    return {name: scores[name] for name in wanted}


def check_behaviours(names: Iterable[str]) -> tuple[str, ...]:
    """The names, in the catalogue's order.

    Raises:
        UnknownNameError: The catalogue lacks one.
    """
    wanted = set(names)
    for name in sorted(wanted.difference(BEHAVIOURS)):
        raise unknown_name("behaviour", name, BEHAVIOURS)
    return tuple(name for name in BEHAVIOURS if name in wanted)


# Scores, from weights alone


def mean_weight_on(weights_BHRS: Tensor, wanted_BRS: Tensor) -> Tensor:
    """The weight (B, H) on the wanted keys of each query, its mean over the queries that have any."""
    wanted = wanted_BRS[:, None].to(weights_BHRS)
    queries = wanted_BRS.any(-1).sum(-1).to(weights_BHRS)
    return (weights_BHRS * wanted).sum((-2, -1)) / queries[:, None]


def share_of_hits(weights_BHRS: Tensor, target_BR: Tensor) -> Tensor:
    """The share (B, H) of queries whose largest weight is on their target; a target of -1 is no query."""
    hits = weights_BHRS.argmax(-1) == target_BR[:, None]
    return hits.sum(-1) / (target_BR >= 0).sum(-1)[:, None]


def earlier_occurrences(ids_BN: Tensor) -> Tensor:
    """Whether key k is an earlier occurrence of query q's token: bool (B, N, N)."""
    return (ids_BN[:, :, None] == ids_BN[:, None]).tril(-1)


# Repeats


def repeated_tokens(lm: LoadedModel, settings: BehaviourProbe) -> Tensor:
    """Random tokens, repeated, after BOS where the model has one: ids (B, N).

    Raises:
        SequenceError: The model has too few tokens to draw from.
    """
    ordinary = _ordinary_tokens(lm)
    if len(ordinary) < settings.tokens:
        raise SequenceError(
            f"{lm.source} has {len(ordinary)} tokens that are not special, and {settings.tokens} different ones are to "
            "be repeated: lower tokens"
        )
    generator = torch.Generator().manual_seed(settings.seed)
    rows = []
    for _ in range(settings.sequences):
        drawn = ordinary[torch.randperm(len(ordinary), generator=generator)[: settings.tokens]]
        rows.append(torch.cat([torch.tensor(_beginning(lm), dtype=torch.long), drawn.repeat(settings.repeats)]))
    return torch.stack(rows)


def repeat_scores(lm: LoadedModel, ids_BN: Tensor) -> dict[str, Tensor]:
    """The behaviours on repeats, of each sequence: float32 (B, L, H)."""
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
    """A prompt of ``length`` tokens for each needle and depth; ``beginning`` is what stands before all text (BOS).

    Raises:
        SequenceError: There is nothing to hide or no room for it, or the haystack is too short.
    """
    if not needles or any(not needle.tokens or not needle.cue for needle in needles):
        raise SequenceError("retrieval_score needs a needle and a cue that asks for it: give `needles` with tokens")
    prompts = []
    for needle in needles:
        size = len(needle.tokens)
        room = length - len(beginning) - 2 * size - len(needle.cue) + 1
        if room < size:
            raise SequenceError(
                f"a prompt of {length} tokens leaves no haystack beside a needle of {size} tokens, its question and "
                f"its answer: give lengths of at least {length - room + size}"
            )
        if room > len(haystack):
            raise SequenceError(
                f"the haystack has {len(haystack)} tokens, and a prompt of {length} takes {room} of them: give more "
                "text or lower the lengths"
            )
        for depth in depths:
            cut = round(depth * room)
            above = (*beginning, *haystack[:cut])
            ids = (*above, *needle.tokens, *haystack[cut:room], *needle.cue, *needle.tokens[:-1])
            prompts.append(NeedlePrompt(ids, len(above), size))
    return prompts


def retrieval_scores(lm: LoadedModel, prompts: Sequence[NeedlePrompt]) -> Tensor:
    """`retrieval_score` of each prompt: float32 (B, L, H).

    The query that predicts an answer's token is the one before it; a hit is its arg-max on that token in the haystack.

    Raises:
        SequenceError: Prompts whose lengths need different rotary frequencies.
    """
    lengths = [len(prompt.ids) for prompt in prompts]
    lm.rope_lengths.check(max(lengths), lengths)
    ids_BN = pad_sequence([torch.tensor(prompt.ids) for prompt in prompts], batch_first=True)
    targets = [torch.arange(prompt.start, prompt.start + prompt.size) for prompt in prompts]
    queries = [torch.arange(len(prompt.ids) - prompt.size, len(prompt.ids)) for prompt in prompts]
    target_BR = pad_sequence(targets, batch_first=True, padding_value=-1)

    def scores(weights_BHRS: Tensor) -> dict[str, Tensor]:
        return {"retrieval_score": share_of_hits(weights_BHRS, target_BR.to(weights_BHRS.device))}

    return _measured(lm, ids_BN, pad_sequence(queries, batch_first=True), scores)["retrieval_score"]


def _measured(
    lm: LoadedModel, ids_BN: Tensor, position_BR: Tensor, scores: Callable[[Tensor], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Run the model, and score the weights (B, H, R, S) of the queries at ``position_BR`` layer by layer: (B, L, H)."""
    _check(lm, ids_BN)
    found: dict[str, Tensor] = {}

    def observe(site: AttentionSite, call: AttentionCall) -> None:
        weights = call.weights(position_BR)
        if not weights.isfinite().all():
            raise NotFiniteError(
                f"attention weights are not finite in layer {site.layer}: the model's activations are NaN or infinite "
                "there; load it in another dtype"
            )
        for name, values_BH in scores(weights).items():
            layers = found.setdefault(name, torch.full((len(ids_BN), *lm.grid.shape), float("nan")))
            layers[:, site.layer, : site.num_attention_heads] = values_BH.cpu()

    with torch.no_grad(), attention_hook(lm, observe):
        run(lm.model, {"input_ids": ids_BN.to(lm.device)})
    return found


def _check(lm: LoadedModel, ids_BN: Tensor) -> None:
    if lm.is_encoder_decoder or lm.grid.kind != "self" or not all(site.causal for site in lm.grid.sites):
        raise UnsupportedModelError(
            f"{lm.source} is not a causal decoder, and the behaviours are defined for those: measure its heads with "
            "collect (headscan scan)"
        )
    if lm.max_tokens is not None and ids_BN.shape[1] > lm.max_tokens:
        raise SequenceError(
            f"{ids_BN.shape[1]} tokens are more than the {lm.max_tokens} positions of {lm.source}: give shorter lengths"
            " (or, of repeats, fewer tokens)"
        )
    if int(ids_BN.min()) < 0 or int(ids_BN.max()) >= lm.vocab_size:
        raise SequenceError(f"token ids run to {int(ids_BN.max())}: {lm.source} knows 0 to {lm.vocab_size - 1}")


def _beginning(lm: LoadedModel) -> list[int]:
    """BOS, where the tokenizer has one; without a tokenizer, where the configuration does."""
    named = lm.model.config.get_text_config() if lm.tokenizer is None else lm.tokenizer
    bos = getattr(named, "bos_token_id", None)
    return [bos] if isinstance(bos, int) and 0 <= bos < lm.vocab_size else []


def _ordinary_tokens(lm: LoadedModel) -> Tensor:
    """Ids of tokens of text, ascending: known to model and tokenizer, and neither special nor added later."""
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
