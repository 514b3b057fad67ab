"""Log-likelihoods of continuations with heads ablated, on one replica.

Distinct inputs are read in batches, common prefixes first: those of one length as the sequences of one batch, before
what follows them. Logits are computed only at scored tokens. What rules and random heads ablate depends on the
whole input, so they share equal inputs only; `shared_row_likelihood` shares prefixes for rules.

Shapes: B sequences, N tokens (padded on the right), R prefixes, M scored positions, T target tokens, V vocabulary.
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
from headscan.models.token_batches import MemoryLimit, batches, pad, pass_cost, pass_tokens, run_halving
from headscan.texts.prefix_tree import PrefixNode, join_similar, prefix_tree
from headscan.texts.token_requests import LogLikelihood, Request, Responses, input_key


class DistinctInput(NamedTuple):
    """An input of the model, and the requests it answers by index and scored tokens. The last token of a continuation
    is predicted, never read, so the choices of a question are often one input.
    """

    ids: tuple[int, ...]
    requests: list[tuple[int, tuple[int, ...]]]

    @property
    def first_scored(self) -> int:
        """The first position whose logits are scored."""
        return len(self.ids) - max(len(target) for _, target in self.requests)

    @property
    def scored_positions(self) -> range:
        return range(self.first_scored, len(self.ids))


class InputResult(NamedTuple):
    """Log-likelihoods of the requests of an input, and its ablated share, 0 to 1."""

    likelihoods: list[LogLikelihood]
    ablated_share: float


def distinct_inputs(requests: Sequence[Request], *, same_context: bool = False) -> list[DistinctInput]:
    """Return the distinct inputs of requests; with ``same_context``, those of one input score equally many tokens."""
    inputs: dict[tuple[tuple[int, ...], int], DistinctInput] = {}
    for index, (ids, scored_tokens) in enumerate(requests):
        key = (ids[:-1], scored_tokens if same_context else 0)
        inputs.setdefault(key, DistinctInput(ids[:-1], [])).requests.append((index, ids[-scored_tokens:]))
    return list(inputs.values())


def by_request(inputs: Sequence[DistinctInput], results: Mapping[int, InputResult]) -> Responses[LogLikelihood]:
    """Return the results of the inputs, given by index, in the order of the requests."""
    likelihoods: dict[int, LogLikelihood] = {}
    shares: dict[int, float] = {}
    for index, one_input in enumerate(inputs):
        result = results[index]
        for (request_index, _), likelihood in zip(one_input.requests, result.likelihoods, strict=True):
            likelihoods[request_index], shares[request_index] = likelihood, result.ablated_share
    order = range(len(likelihoods))
    return Responses(tuple(likelihoods[i] for i in order), tuple(shares[i] for i in order))


P = TypeVar("P")
A = TypeVar("A")

#: A batch that continues a prefix holds the prefix once per sequence, but in one layer at a time: a prefix token takes
#: at most 1 / _PREFIX_WEIGHT of the memory of other tokens.
_PREFIX_WEIGHT = 4

#: Passes of this many times the cost of a pass gain little from further sequences.
_JOINT_PREFIX_COSTS = 8


@dataclass(frozen=True)
class Continued(Generic[P]):
    """What a batch of inputs continues: ``prefixes`` of ``start`` tokens that one pass has read (None if ``start`` is
    0), and the row of each input's prefix in that pass. Three inputs, the first two of which continue the first prefix
    of 40 tokens, have ``start`` 40 and ``prefix_rows`` (0, 0, 1).
    """

    start: int
    prefixes: P | None
    prefix_rows: tuple[int, ...]


def joint_prefix_tokens(device: str) -> int:
    """Return the most tokens of prefixes that are read in one batch on a type of device."""
    return _JOINT_PREFIX_COSTS * pass_cost(device)


def shareable_tokens(lm: LoadedModel, inputs: Sequence[DistinctInput]) -> list[int]:
    """Return how many tokens of each input may be shared: those before its first scored logit, or none if its rotary
    frequencies are not those of short inputs.
    """
    rope = lm.rope_lengths
    return [one_input.first_scored if rope.group(len(one_input.ids)) == rope.group(1) else 0 for one_input in inputs]


def answer_in_batches(
    lm: LoadedModel,
    inputs: Sequence[DistinctInput],
    batch_tokens: int,
    share_prefixes: bool,
    read_prefixes: Callable[[Sequence[Sequence[int]], P | None], P],
    answer_batch: Callable[[list[DistinctInput], Continued[P]], list[A]],
) -> Iterator[tuple[int, A]]:
    """Run all inputs in batches, common prefixes first; yield each input's index and its result of ``answer_batch``.

    Args:
        read_prefixes: Reads the tokens (R, N) after a prefix (None starts at the first token) and returns R longer
            prefixes.
        answer_batch: Answers the requests of a batch of inputs, from their prefixes on.
    """
    cost, limit = pass_cost(lm.device.type), lm.limits["inputs"]
    batch_tokens = pass_tokens(lm.device.type, batch_tokens)
    root = PrefixNode(0, [], [(index, 0) for index in range(len(inputs))])
    if share_prefixes:
        root = prefix_tree([one_input.ids for one_input in inputs], shareable_tokens(lm, inputs), cost)
        join_similar(root, cost, min(batch_tokens, joint_prefix_tokens(lm.device.type)))
    yield from _answer_after(lm, inputs, root, [0], None, batch_tokens, answer_batch)
    # A prefix stays in memory while inputs or longer prefixes continue from it.
    unread: list[tuple[PrefixNode, P | None]] = [(child, None) for child in root.children]
    while unread:
        node, parent = unread.pop()
        prefix_passes = _read_node(node, parent, read_prefixes, limit)
        for prefix_indices, prefixes in prefix_passes:
            yield from _answer_after(lm, inputs, node, prefix_indices, prefixes, batch_tokens, answer_batch)
        if node.children:
            # Only a node with a single prefix has children, so one pass has read it.
            [(_, prefix)] = prefix_passes
            unread += [(child, prefix) for child in node.children]


def _read_node(
    node: PrefixNode,
    parent: P | None,
    read_prefixes: Callable[[Sequence[Sequence[int]], P | None], P],
    limit: MemoryLimit,
) -> list[tuple[list[int], P]]:
    """Read the prefixes of a node after their parent, in one pass if memory allows; return each pass's prefixes, and
    their indices in the node.
    """

    def read(prefix_indices: list[int]) -> P:
        return read_prefixes([node.tokens[index] for index in prefix_indices], parent)

    return run_halving(list(range(len(node.tokens))), read, [len(ids) for ids in node.tokens], limit)


def _answer_after(
    lm: LoadedModel,
    inputs: Sequence[DistinctInput],
    node: PrefixNode,
    prefix_indices: Sequence[int],
    prefixes: P | None,
    batch_tokens: int,
    answer_batch: Callable[[list[DistinctInput], Continued[P]], list[A]],
) -> Iterator[tuple[int, A]]:
    """Answer the inputs that continue from ``prefixes``, those of a node with the given indices."""
    row_of = {prefix: row for row, prefix in enumerate(prefix_indices)}
    continuing = [(index, row_of[prefix]) for index, prefix in node.sequences if prefix in row_of]
    input_indices, prefix_rows = [index for index, _ in continuing], [row for _, row in continuing]
    lengths = [_weighted_tokens(len(inputs[index].ids) - node.end, node.end) for index in input_indices]
    groups = [lm.rope_lengths.group(len(inputs[index].ids)) for index in input_indices]

    def answer_rows(batch: list[int]) -> list[A]:
        after = Continued(node.end, prefixes, tuple(prefix_rows[i] for i in batch))
        return answer_batch([inputs[input_indices[i]] for i in batch], after)

    for batch in batches(lengths, batch_tokens, pass_cost=pass_cost(lm.device.type), groups=groups):
        for answered, results in run_halving(batch, answer_rows, lengths, lm.limits["inputs"]):
            yield from zip((input_indices[i] for i in answered), results, strict=True)


def _weighted_tokens(tokens: int, prefix_tokens: int) -> int:
    """Return the tokens of a batch that take as much memory as these tokens after a prefix."""
    return max(tokens, -(-(prefix_tokens + tokens) // _PREFIX_WEIGHT)) if prefix_tokens else tokens


#: Most scored positions whose logits are normalised at a time, so that no second copy of all logits exists.
_POSITIONS_AT_A_TIME = 512


def likelihoods(
    lm: LoadedModel,
    requests: Sequence[Request],
    change: Intervention | None,
    batch_tokens: int,
    share_prefixes: bool,
    headscan_kernels: bool = False,
) -> Responses[LogLikelihood]:
    """Answer requests under one change; headscan's attention kernels exclude ``share_prefixes``."""
    inputs = distinct_inputs(requests)
    share = share_prefixes and (change is None or change.may_share_prefix)
    with torch.no_grad(), intervening(lm, change, headscan_kernels=headscan_kernels) as record:
        answer_batch = partial(answer_inputs, lm, record=record)
        results = dict(answer_in_batches(lm, inputs, batch_tokens, share, partial(read_prefix, lm), answer_batch))
    return by_request(inputs, results)


@contextmanager
def intervening(
    lm: LoadedModel, intervention: Intervention | None, *, headscan_kernels: bool, **about: Any
) -> Iterator[InterventionRecord | None]:
    """Apply an intervention while the context is open; None yields None. ``headscan_kernels`` uses headscan's
    attention kernels for every arm, because kernels round differently in half precision; ``about`` goes to
    `headscan.intervene`.
    """
    with ExitStack() as context:
        if headscan_kernels and (intervention is None or not intervention.needs_whole_input):
            context.enter_context(attention_hook(lm, lambda site, call: call.output()))
        yield None if intervention is None else context.enter_context(headscan.intervene(lm, intervention, **about))


def answer_inputs(
    lm: LoadedModel, inputs: Sequence[DistinctInput], after: Continued[Prefix], record: InterventionRecord | None
) -> list[InputResult]:
    """Answer inputs from their prefixes on, in one pass; ``record`` is that of the open intervention."""
    ids, lengths = pad([one_input.ids[after.start :] for one_input in inputs])
    if record is not None:
        record.lengths = lengths
        record.input_keys = [input_key(one_input.ids) for one_input in inputs]
    positions = [
        (row, position - after.start) for row, one_input in enumerate(inputs) for position in one_input.scored_positions
    ]
    cache: dict[str, Any] = {"use_cache": False}
    if after.prefixes is not None:
        cache = {"use_cache": True, "past_key_values": after.prefixes.continued(after.prefix_rows)}
    likelihoods = likelihoods_at(lm, inputs, ids, positions, **cache)
    shares = [0.0] * len(inputs) if record is None else record.ablated_shares.tolist()
    return [InputResult(*result) for result in zip(likelihoods, shares, strict=True)]


def likelihoods_at(
    lm: LoadedModel,
    inputs: Sequence[DistinctInput],
    input_ids: Tensor,
    positions: Sequence[tuple[int, int]],
    **arguments: Any,
) -> list[list[LogLikelihood]]:
    """Return the log-likelihoods of each input's requests, from one pass over ids (B, N) with further ``arguments``.
    ``positions`` are the scored ones of all inputs, as (row, column) of ``input_ids``.
    """
    rows, columns = [row for row, _ in positions], [column for _, column in positions]
    likelihoods = iter(_likelihoods_of_logits(logits_at(lm, input_ids, rows, columns, **arguments), inputs))
    return [[next(likelihoods) for _ in one_input.requests] for one_input in inputs]


def _likelihoods_of_logits(logits_MV: Tensor, inputs: Sequence[DistinctInput]) -> list[LogLikelihood]:
    """Return the log-likelihoods of all requests, input by input, from the logits of their scored positions."""
    rows: list[int] = []  # of the logits that predict each target token
    targets: list[int] = []
    request_indices: list[int] = []  # the request of each target token
    end = request_count = 0
    for one_input in inputs:
        end += len(one_input.scored_positions)
        for _, target in one_input.requests:
            rows += range(end - len(target), end)
            targets += target
            request_indices += [request_count] * len(target)
            request_count += 1
    row_T = torch.tensor(rows, device=logits_MV.device)
    target_T = torch.tensor(targets, device=logits_MV.device)
    request_T = torch.tensor(request_indices)
    log_likelihood_T = torch.empty(len(row_T), device=logits_MV.device)
    greedy_T = torch.empty(len(row_T), dtype=torch.bool, device=logits_MV.device)
    starts = range(0, len(logits_MV), _POSITIONS_AT_A_TIME)
    for start, logits in zip(starts, logits_MV.split(_POSITIONS_AT_A_TIME), strict=True):
        tokens = ((row_T >= start) & (row_T < start + _POSITIONS_AT_A_TIME)).nonzero()[:, 0]
        logit_rows, target_ids = row_T[tokens] - start, target_T[tokens]
        log_likelihood_T[tokens] = logits.float().log_softmax(-1)[logit_rows, target_ids]
        greedy_T[tokens] = _greedy(logits, logit_rows, target_ids)
    sums = torch.zeros(request_count, dtype=torch.float64).index_add_(0, request_T, log_likelihood_T.cpu().double())
    counts = torch.zeros(request_count, dtype=torch.long).index_add_(0, request_T, greedy_T.cpu().long())
    return [LogLikelihood(*request) for request in zip(sums.tolist(), counts.tolist(), strict=True)]


def _greedy(logits_MV: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    """Return whether each id is the first one with the largest logit of its row."""
    greedy = logits_MV[rows, ids] == logits_MV.amax(-1)[rows]
    # On a CPU, argmax takes 20 times as long as the maximum: it decides only between equal logits.
    largest = greedy.nonzero()[:, 0]
    greedy[largest] = logits_MV[rows[largest]].float().argmax(-1) == ids[largest]
    return greedy
