"""Log-likelihoods of continuations with heads ablated, on one replica.

Distinct inputs are read in batches, common prefixes first: those of one length as the sequences of one batch, before
what follows them. Logits are computed only at scored tokens. Rules and random heads need whole inputs, so they share
equal inputs only; `shared_row_likelihood.SharedRowItem` shares prefixes for rules.

Shapes: B sequences, N tokens (padded on the right), M scored positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

import headscan
from headscan.ablation.intervention import Intervention, InterventionRecord
from headscan.attention.hooks import attention_hook
from headscan.layers.prefix_cache import Prefix, read_prefix
from headscan.models.loaded_model import LoadedModel, logits_at
from headscan.models.model_facts import UNVARYING, RopeLengths
from headscan.models.token_batches import batches, pad, pass_cost, pass_tokens, run_halving
from headscan.pipelines.scoring.prefix_tree import PrefixNode, join_similar, prefix_tree
from headscan.pipelines.scoring.token_requests import ArmItem, LogLikelihood, Request, Responses, input_key


class DistinctInput(NamedTuple):
    """An input of the model, and the requests it answers by index and scored tokens. The last token of a continuation
    is predicted, never read, so the choices of a question are often one read.
    """

    ids: tuple[int, ...]
    requests: list[tuple[int, tuple[int, ...]]]

    @property
    def first_place(self) -> int:
        return len(self.ids) - max(len(target) for _, target in self.requests)

    @property
    def places(self) -> range:
        return range(self.first_place, len(self.ids))


class InputResult(NamedTuple):
    """Likelihoods of a read's requests, and its ablated share, 0 to 1."""

    likelihoods: list[LogLikelihood]
    ablated_share: float


def distinct_inputs(requests: Sequence[Request], *, same_context: bool = False) -> list[DistinctInput]:
    """Return the distinct inputs of the requests; with ``same_context``, those of a read score equally many tokens."""
    reads: dict[tuple[tuple[int, ...], int], DistinctInput] = {}
    for index, (ids, scored) in enumerate(requests):
        key = (ids[:-1], scored if same_context else 0)
        reads.setdefault(key, DistinctInput(ids[:-1], [])).requests.append((index, ids[-scored:]))
    return list(reads.values())


def by_request(reads: Sequence[DistinctInput], results: Mapping[int, InputResult]) -> Responses[LogLikelihood]:
    """Return the likelihoods of the reads, given by index, in the order of the requests."""
    values: dict[int, LogLikelihood] = {}
    shares: dict[int, float] = {}
    for index, read in enumerate(reads):
        for (request, _), likelihood in zip(read.requests, results[index].likelihoods, strict=True):
            values[request], shares[request] = likelihood, results[index].ablated_share
    order = range(len(values))
    return Responses(tuple(values[i] for i in order), tuple(shares[i] for i in order))


P = TypeVar("P")
A = TypeVar("A")

#: A batch that continues a prefix holds the prefix once per sequence, but in one layer at a time: a prefix token takes
#: at most 1 / _PREFIX_WEIGHT of the memory of other tokens.
_PREFIX_WEIGHT = 4

#: Passes of this many times the cost of a pass gain little from further sequences.
_GROUPED_COSTS = 8


@dataclass(frozen=True)
class Continued(Generic[P]):
    """What a batch of reads continues: prefixes of ``start`` tokens (None if 0), and each read's index in them."""

    start: int
    prefix: P | None
    rows: tuple[int, ...]


def grouped_tokens(device: str) -> int:
    """Return the most tokens of prefixes that are read in one batch on a type of device."""
    return _GROUPED_COSTS * pass_cost(device)


def shareable_tokens(lm: LoadedModel, reads: Sequence[DistinctInput]) -> list[int]:
    """Return how many tokens of each read may be shared: those before its first scored logit, or none if its rotary
    frequencies are not those of short inputs.
    """
    rope = lm.rope_lengths
    return [read.first_place if rope.group(len(read.ids)) == rope.group(1) else 0 for read in reads]


def score_in_batches(
    lm: LoadedModel,
    reads: Sequence[DistinctInput],
    batch_tokens: int,
    share_prefixes: bool,
    read_on: Callable[[Sequence[Sequence[int]], P | None], P],
    score: Callable[[list[DistinctInput], Continued[P]], list[A]],
) -> Iterator[tuple[int, A]]:
    """Run all reads in batches, common prefixes first; yield each read's index and its result of ``score``.

    Args:
        read_on: Reads the tokens (R, N) after a prefix (None starts at the first token) and returns R longer prefixes.
        score: Scores a batch of reads from their prefixes on.
    """
    cost, limit = pass_cost(lm.device.type), lm.limits["reads"]
    batch_tokens = pass_tokens(lm.device.type, batch_tokens)
    root = PrefixNode(0, [], [(row, 0) for row in range(len(reads))])
    if share_prefixes:
        root = prefix_tree([read.ids for read in reads], shareable_tokens(lm, reads), cost)
        join_similar(root, cost, min(batch_tokens, grouped_tokens(lm.device.type)))
    # A prefix stays in memory while reads or longer prefixes continue from it.
    todo: list[tuple[PrefixNode, P | None]] = [(root, None)]
    while todo:
        node, prefix = todo.pop()
        parts: list[tuple[list[int], P | None]] = [([0], None)]
        if node.tokens:
            tokens, parent = node.tokens, prefix

            def longer(chosen: list[int], tokens: Sequence[Sequence[int]] = tokens, parent: P | None = parent) -> P:
                return read_on([tokens[index] for index in chosen], parent)

            parts = [*run_halving(list(range(len(tokens))), longer, [len(ids) for ids in tokens], limit)]
        for chosen, prefix in parts:
            yield from _score_after(lm, reads, node, chosen, prefix, batch_tokens, score)
        todo += [(child, prefix) for child in node.children]


def _score_after(
    lm: LoadedModel,
    reads: Sequence[DistinctInput],
    node: PrefixNode,
    chosen: Sequence[int],
    prefix: P | None,
    batch_tokens: int,
    score: Callable[[list[DistinctInput], Continued[P]], list[A]],
) -> Iterator[tuple[int, A]]:
    place = {index: row for row, index in enumerate(chosen)}
    rows = [(read, place[index]) for read, index in node.rows if index in place]
    lengths = [_weight(len(reads[read].ids) - node.end, node.end) for read, _ in rows]
    groups = [lm.rope_lengths.group(len(reads[read].ids)) for read, _ in rows]

    def score_batch(batch: list[int]) -> list[A]:
        after = Continued(node.end, prefix, tuple(rows[i][1] for i in batch))
        return score([reads[rows[i][0]] for i in batch], after)

    for batch in batches(lengths, batch_tokens, pass_cost=pass_cost(lm.device.type), groups=groups):
        for part, results in run_halving(batch, score_batch, lengths, lm.limits["reads"]):
            yield from zip((rows[i][0] for i in part), results, strict=True)


def _weight(tokens: int, prefix: int) -> int:
    return max(tokens, -(-(prefix + tokens) // _PREFIX_WEIGHT)) if prefix else tokens


#: Positions normalised at a time, so that no second copy of all logits exists.
_PLACES = 512


@dataclass(frozen=True)
class LikelihoodItem(ArmItem[Request]):
    """Requests for one replica; ``rule_kernels``, the attention kernels of rules, exclude ``share_prefixes``."""

    share_prefixes: bool
    rule_kernels: bool = False
    rope: RopeLengths = UNVARYING

    def run(self, lm: LoadedModel) -> list[Responses[LogLikelihood]]:
        """Answer requests with the item's heads ablated."""
        reads = distinct_inputs(self.requests)
        share = self.share_prefixes and (self.intervention is None or self.intervention.may_share_prefix)
        with torch.no_grad(), intervening(lm, self.intervention, rule_kernels=self.rule_kernels) as record:
            score = partial(score_inputs, lm, record=record)
            results = dict(score_in_batches(lm, reads, self.batch_tokens, share, partial(read_prefix, lm), score))
        return [by_request(reads, results)]


@contextmanager
def intervening(
    lm: LoadedModel, intervention: Intervention | None, *, rule_kernels: bool, **about: Any
) -> Iterator[InterventionRecord | None]:
    """Apply an intervention while the context is open; None yields None. ``rule_kernels`` uses the kernels of rules for
    every arm, because kernels round differently in half precision; ``about`` goes to `headscan.intervene`.
    """
    with ExitStack() as context:
        if rule_kernels and (intervention is None or not intervention.needs_whole_input):
            context.enter_context(attention_hook(lm, lambda site, call: call.output()))
        yield None if intervention is None else context.enter_context(headscan.intervene(lm, intervention, **about))


def score_inputs(
    lm: LoadedModel, reads: Sequence[DistinctInput], after: Continued[Prefix], record: InterventionRecord | None
) -> list[InputResult]:
    ids, lengths = pad([read.ids[after.start :] for read in reads])
    if record is not None:
        record.lengths = lengths
        record.input_keys = [input_key(read.ids) for read in reads]
    places = [(row, place - after.start) for row, read in enumerate(reads) for place in read.places]
    cache: dict[str, Any] = {"use_cache": False}
    if after.prefix is not None:
        cache = {"use_cache": True, "past_key_values": after.prefix.continued(after.rows)}
    likelihoods = likelihoods_at(lm, reads, ids, places, **cache)
    shares = [0.0] * len(reads) if record is None else record.ablated_shares.tolist()
    return [InputResult(of_read, share) for of_read, share in zip(likelihoods, shares, strict=True)]


def likelihoods_at(
    lm: LoadedModel, reads: Sequence[DistinctInput], ids: Tensor, places: Sequence[tuple[int, int]], **kwargs: Any
) -> list[list[LogLikelihood]]:
    """Return log-likelihoods by input, from one pass over ids (B, N). ``places`` are those of the inputs, as (row, column).
    """
    rows, columns = ([place[axis] for place in places] for axis in (0, 1))
    likelihoods = iter(_likelihoods(logits_at(lm, ids, rows, columns, **kwargs), reads))
    return [[next(likelihoods) for _ in read.requests] for read in reads]


def _likelihoods(logits_MV: Tensor, reads: Sequence[DistinctInput]) -> list[LogLikelihood]:
    places: list[int] = []
    targets: list[int] = []
    owners: list[int] = []
    end = requests = 0
    for read in reads:
        end += len(read.ids) - read.first_place
        for _, target in read.requests:
            places += range(end - len(target), end)
            targets += target
            owners += [requests] * len(target)
            requests += 1
    at = torch.tensor(places, device=logits_MV.device)
    target_ids = torch.tensor(targets, device=logits_MV.device)
    values = torch.empty(len(at), device=logits_MV.device)
    greedy = torch.empty(len(at), dtype=torch.bool, device=logits_MV.device)
    for start, logits in zip(range(0, len(logits_MV), _PLACES), logits_MV.split(_PLACES), strict=True):
        here = ((at >= start) & (at < start + _PLACES)).nonzero()[:, 0]
        rows, ids = at[here] - start, target_ids[here]
        values[here] = logits.float().log_softmax(-1)[rows, ids]
        greedy[here] = _greedy(logits, rows, ids)
    sums = torch.zeros(requests, dtype=torch.float64).index_add_(
        0, owner := torch.tensor(owners), values.cpu().double()
    )
    counts = torch.zeros(requests, dtype=torch.long).index_add_(0, owner, greedy.cpu().long())
    return [LogLikelihood(*row) for row in zip(sums.tolist(), counts.tolist(), strict=True)]


def _greedy(logits_MV: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    """Return whether each id is the first one with the largest logit of its row."""
    greedy = logits_MV[rows, ids] == logits_MV.amax(-1)[rows]
    # On a CPU, argmax takes 20 times as long as the maximum: it decides only between equal logits.
    largest = greedy.nonzero()[:, 0]
    greedy[largest] = logits_MV[rows[largest]].float().argmax(-1) == ids[largest]
    return greedy
