"""Log-likelihoods of continuations with heads ablated, on one replica.

A common prefix of several requests is read once, and logits are computed only at scored tokens. Rules and random heads
need whole inputs, so they share equal inputs only; `shared_row_likelihood` shares prefixes for rules.

Shapes: B sequences, N tokens (padded on the right), M scored positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

import headscan
from headscan.ablation.ablation import Ablation
from headscan.ablation.record import InterventionRecord
from headscan.attention.hooks import attention_hook
from headscan.layers.prefix_cache import Prefix, read_prefix
from headscan.models.loaded_model import LoadedModel
from headscan.models.logits import logits_at
from headscan.models.rope import UNVARYING, RopeLengths
from headscan.models.token_batches import batches, run_halving
from headscan.pipelines.scoring.batching import pad
from headscan.pipelines.scoring.prefix_tree import PrefixNode, prefix_tree
from headscan.pipelines.scoring.token_requests import Likelihood, Request, input_key

P = TypeVar("P")
A = TypeVar("A")

#: Cost of one more forward pass, in tokens: on a GPU a short pass takes as long as one of hundreds of tokens.
_PASS_COST = {"cpu": 64, "cuda": 512}

#: Most tokens of one pass on devices where more are slower: on a CPU larger activations exceed its caches.
_PASS_TOKENS = {"cpu": 2048}

#: A batch that continues a prefix holds the prefix once per sequence, but in one layer at a time: a prefix token takes
#: at most 1 / _PREFIX_WEIGHT of the memory of other tokens.
_PREFIX_WEIGHT = 4

#: Positions normalised at a time, so that no second copy of all logits exists.
_PLACES = 512


@dataclass(frozen=True)
class LikelihoodItem:
    """Requests for one replica.

    Attributes:
        share_prefixes: Read common prefixes once.
        as_rules: Compute attention with the kernels of rules; not together with ``share_prefixes``.
        rope: The sequence lengths at which the model's rotary frequencies change; batches never mix them.
    """

    name: str
    requests: tuple[Request, ...]
    ablated: Ablation | None
    batch_tokens: int
    share_prefixes: bool
    as_rules: bool = False
    rope: RopeLengths = UNVARYING

    def run(self, lm: LoadedModel) -> list[LikelihoodResult]:
        return [score_requests(lm, self)]


@dataclass(frozen=True)
class LikelihoodResult:
    """Answers, and the ablated share of each request, 0 to 1."""

    answers: tuple[Likelihood, ...]
    zeroed_shares: tuple[float, ...]


class Read(NamedTuple):
    """An input of the model, and the requests it answers.

    A request has its index and scored tokens.

    The last token of a continuation is predicted, never read, so the choices of a question are often one read.
    """

    ids: tuple[int, ...]
    requests: list[tuple[int, tuple[int, ...]]]

    @property
    def first_place(self) -> int:
        """The first position with a scored logit."""
        return len(self.ids) - max(len(target) for _, target in self.requests)

    @property
    def places(self) -> range:
        """All positions with scored logits."""
        return range(self.first_place, len(self.ids))


class ReadAnswer(NamedTuple):
    """Likelihoods of a read's requests, and its ablated share, 0 to 1."""

    likelihoods: list[Likelihood]
    zeroed_share: float


def pass_cost(lm: LoadedModel) -> int:
    """Return the cost of one more forward pass, in tokens."""
    return _PASS_COST.get(lm.device.type, max(_PASS_COST.values()))


def pass_tokens(lm: LoadedModel, batch_tokens: int) -> int:
    """Return the tokens of one pass, at most ``batch_tokens``.

    There are fewer if the device is faster with fewer.
    """
    return min(batch_tokens, _PASS_TOKENS.get(lm.device.type, batch_tokens))


def score_requests(lm: LoadedModel, item: LikelihoodItem) -> LikelihoodResult:
    """Pool task: answer requests with the item's heads ablated."""
    reads = distinct_reads(item.requests)
    share = item.share_prefixes and (item.ablated is None or item.ablated.may_share_prefix)
    answers = answers_to(lm, reads, item.ablated, item.batch_tokens, share_prefixes=share, as_rules=item.as_rules)
    return by_request(reads, answers)


@contextmanager
def ablating(
    lm: LoadedModel, ablated: Ablation | None, *, as_rules: bool, **about: Any
) -> Iterator[InterventionRecord | None]:
    """Ablate heads while the context is open.

    It yields None if ``ablated`` is None.

    Args:
        as_rules: Use the kernels of rules for every arm: in half precision, kernels round differently.
        about: Arguments of `headscan.intervene`.
    """
    with ExitStack() as context:
        if as_rules and (ablated is None or not ablated.needs_whole_input):
            context.enter_context(attention_hook(lm, lambda site, call: call.output()))
        yield None if ablated is None else context.enter_context(headscan.intervene(lm, ablated, **about))


def distinct_reads(requests: Sequence[Request], *, same_context: bool = False) -> list[Read]:
    """Return the distinct inputs of the requests.

    Args:
        same_context: Requests of one read also score equally many tokens, so their contexts are equal.
    """
    found: dict[tuple[tuple[int, ...], int], Read] = {}
    for index, (ids, scored) in enumerate(requests):
        key = (ids[:-1], scored if same_context else 0)
        found.setdefault(key, Read(ids[:-1], [])).requests.append((index, ids[-scored:]))
    return list(found.values())


def shareable_tokens(lm: LoadedModel, reads: Sequence[Read]) -> list[int]:
    """Return each read's number of tokens that may be shared.

    A prefix is shorter than the reads that share it, and must be read with the same rotary frequencies.
    """
    rope = lm.rope_lengths
    return [read.first_place if rope.group(len(read.ids)) == rope.group(1) else 0 for read in reads]


def by_request(reads: Sequence[Read], found: Mapping[int, ReadAnswer]) -> LikelihoodResult:
    """Return answers in the order of the requests.

    They come from the answers of the reads by index.
    """
    answers: dict[int, Likelihood] = {}
    shares: dict[int, float] = {}
    for index, read in enumerate(reads):
        for (request, _), likelihood in zip(read.requests, found[index].likelihoods, strict=True):
            answers[request], shares[request] = likelihood, found[index].zeroed_share
    order = range(len(answers))
    return LikelihoodResult(tuple(answers[i] for i in order), tuple(shares[i] for i in order))


def answers_to(
    lm: LoadedModel,
    reads: Sequence[Read],
    ablated: Ablation | None,
    batch_tokens: int,
    *,
    share_prefixes: bool = False,
    as_rules: bool = False,
) -> dict[int, ReadAnswer]:
    """Return the answers of all reads by index; ``share_prefixes`` requires `Ablation.may_share_prefix`."""
    with torch.no_grad(), ExitStack() as context:
        record = context.enter_context(ablating(lm, ablated, as_rules=as_rules))

        def answer(chosen: list[Read], start: int, prefix: Prefix | None) -> list[ReadAnswer]:
            return answer_reads(lm, chosen, start, prefix, record)

        return dict(walk(lm, reads, batch_tokens, share_prefixes, partial(read_prefix, lm), answer))


def walk(
    lm: LoadedModel,
    reads: Sequence[Read],
    batch_tokens: int,
    share_prefixes: bool,
    read_on: Callable[[Sequence[int], P | None], P],
    answer: Callable[[list[Read], int, P | None], list[A]],
) -> Iterator[tuple[int, A]]:
    """Run all reads in batches, common prefixes first.

    Args:
        read_on: Reads the tokens after a prefix (None starts at the first token) and returns the longer prefix.
        answer: Answers a batch of reads from a token position on, given the prefix before it or None.

    Yields:
        The index of a read, and its result of ``answer``.
    """
    cost, limit = pass_cost(lm), lm.limits["reads"]
    batch_tokens = pass_tokens(lm, batch_tokens)
    root = PrefixNode(0, (), rows=list(range(len(reads))))
    if share_prefixes:
        root = prefix_tree([read.ids for read in reads], shareable_tokens(lm, reads), cost)
    # A prefix stays in memory while reads or longer prefixes continue from it.
    todo: list[tuple[PrefixNode, P | None]] = [(root, None)]
    while todo:
        node, prefix = todo.pop()
        if node.tokens:
            tokens, parent = node.tokens, prefix

            def longer(_: list[int], tokens: Sequence[int] = tokens, parent: P | None = parent) -> P:
                return read_on(tokens, parent)

            [(_, prefix)] = run_halving([0], longer, [len(tokens)], limit)
        lengths = [_weight(len(reads[row].ids) - node.end, node.end) for row in node.rows]
        groups = [lm.rope_lengths.group(len(reads[row].ids)) for row in node.rows]

        def answers(chosen: list[int], node: PrefixNode = node, prefix: P | None = prefix) -> list[A]:
            return answer([reads[node.rows[i]] for i in chosen], node.end, prefix)

        for batch in batches(lengths, batch_tokens, pass_cost=cost, groups=groups):
            for chosen, found in run_halving(batch, answers, lengths, limit):
                yield from zip((node.rows[i] for i in chosen), found, strict=True)
        todo += [(child, prefix) for child in node.children]


def _weight(tokens: int, prefix: int) -> int:
    return max(tokens, -(-(prefix + tokens) // _PREFIX_WEIGHT)) if prefix else tokens


def answer_reads(
    lm: LoadedModel, reads: Sequence[Read], start: int, prefix: Prefix | None, record: InterventionRecord | None
) -> list[ReadAnswer]:
    """Answer a batch of reads from token ``start`` on."""
    ids, lengths = pad([read.ids[start:] for read in reads])
    if record is not None:
        record.lengths = lengths
        record.keys = [input_key(read.ids) for read in reads]
    places = [(row, place - start) for row, read in enumerate(reads) for place in read.places]
    cache: dict[str, Any] = {"use_cache": False}
    if prefix is not None:
        cache = {"use_cache": True, "past_key_values": prefix.continued(len(reads))}
    likelihoods = likelihoods_at(lm, reads, ids, places, **cache)
    shares = [0.0] * len(reads) if record is None else record.zeroed_shares.tolist()
    return [ReadAnswer(of_read, share) for of_read, share in zip(likelihoods, shares, strict=True)]


def likelihoods_at(
    lm: LoadedModel, reads: Sequence[Read], ids: Tensor, places: Sequence[tuple[int, int]], **kwargs: Any
) -> list[list[Likelihood]]:
    """Return likelihoods by read from one pass over ids (B, N).

    ``places`` are the (row, column) of `Read.places`.
    """
    rows, columns = ([place[axis] for place in places] for axis in (0, 1))
    likelihoods = iter(_likelihoods(logits_at(lm, ids, rows, columns, **kwargs), reads))
    return [[next(likelihoods) for _ in read.requests] for read in reads]


def _likelihoods(logits_MV: Tensor, reads: Sequence[Read]) -> list[Likelihood]:
    """Return the likelihoods of all requests of all reads, in order."""
    places: list[int] = []
    targets: list[int] = []
    sizes: list[int] = []
    end = 0
    for read in reads:
        end += len(read.ids) - read.first_place
        for _, target in read.requests:
            places += range(end - len(target), end)
            targets += target
            sizes.append(len(target))
    at = torch.tensor(places, device=logits_MV.device)
    target_ids = torch.tensor(targets, device=logits_MV.device)
    parts = logits_MV.split(_PLACES)
    norm_M = torch.cat([logits.float().logsumexp(-1) for logits in parts])
    best_M = torch.cat([logits.argmax(-1) for logits in parts])
    values = (logits_MV[at, target_ids].float() - norm_M[at]).cpu().double().split(sizes)
    greedy = (best_M[at] == target_ids).cpu().split(sizes)
    return [Likelihood(float(v.sum()), int(g.sum())) for v, g in zip(values, greedy, strict=True)]
