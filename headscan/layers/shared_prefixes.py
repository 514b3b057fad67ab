"""Prefixes that many sequences continue: their KV caches, and rows that hold one once, with ablated heads.

Only attention mixes tokens, so a row of a prefix and several endings runs through everything else unchanged; the
attention hook lets each ending attend to the prefix and itself. Masks are known before the pass. A rule needs
statistics of whole sequences: those of the prefix are joined with those of each ending, which is exact for causal
attention and means over tokens. Sequences share the row while their ablated heads agree. In the first layer in which
they differ the pass stops, and each group of sequences resumes at that layer in a row of its own.

Shapes: B sequences, N tokens or tokens of a row, P of the prefix, R prefixes or endings, T tokens of the longest; E
width of a hidden state, H query heads, K KV heads, D width of a head.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, LinearAttentionCacheLayerMixin

from headscan.ablation.ablation import Ablation, Filler, InterventionRecord, intervene
from headscan.ablation.masks import HeadMask
from headscan.ablation.rules import HeadRule, RuleStatistics
from headscan.attention.calls import AttentionCall, ScoredCall
from headscan.attention.hooks import IMPLEMENTATION, attention_hook, output_hook
from headscan.errors import InterventionError, UnsupportedModelError
from headscan.grid import AttentionSite
from headscan.layers.blocks import Blocks, cannot_resume, find_blocks, resuming_at
from headscan.measure.collect import score
from headscan.models.forward_inputs import input_device, run, wide_norm
from headscan.models.loaded_model import LoadedModel
from headscan.models.model_facts import MODEL_ERRORS, raise_if_out_of_memory

#: Tokens of the prefix and of its continuation in the check of `shares_prefixes`.
_CHECKED = (9, 5)


class Prefix:
    """The KV cache of one or several prefixes with equally many tokens."""

    def __init__(self, cache: Cache, tokens: int) -> None:
        self._cache = cache
        self.tokens = tokens

    def above(self, layer: int, lower: Prefix) -> Prefix:
        """Return this prefix from ``layer`` on, and another one below it. Both have the same tokens."""
        return Prefix(Cache(layers=[*lower._cache.layers[:layer], *self._cache.layers[layer:]]), lower.tokens)

    def continued(self, rows: Sequence[int]) -> Cache:
        """Return a cache for one pass over sequences that continue the prefixes ``rows``; it keeps none of them."""
        return _Continuation(self._cache.layers, rows)


def read_prefix(lm: LoadedModel, ids: Sequence[Sequence[int]], parent: Prefix | None = None) -> Prefix:
    """Read the first tokens (R, N), or those after one parent, which all continue, with all open interventions."""
    if parent is not None:
        lm.rope_lengths.check(parent.tokens + len(ids[0]), [parent.tokens])
    if parent is None:
        cache = _Filling(DynamicCache(config=lm.model.config).layers)
    else:
        cache = _Filling([_fork(layer, [0] * len(ids)) for layer in parent._cache.layers])
    inputs = {"input_ids": torch.tensor(ids, device=input_device(lm.model))}
    with suppress(_Filled):
        run(lm.model, {**inputs, "past_key_values": cache, "use_cache": True})
    return Prefix(cache, len(ids[0]) + (0 if parent is None else parent.tokens))


@torch.no_grad()
def shares_prefixes(lm: LoadedModel) -> bool:
    """Return True if a cached prefix of a short text reproduces the full-sequence hidden states.

    Models that cache other states than keys and values, or share them between layers, may fail. If the rotary
    frequencies depend on the length (`LoadedModel.rope_lengths`), the result holds for sequences with those of their
    prefix.
    """
    prefix, rest = _CHECKED
    vocabulary = lm.model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(vocabulary, 1000), (3, prefix + rest), generator=generator)
    half = prefix // 2
    ids[1:, :half] = ids[0, :half]
    ids[2, :prefix] = ids[0, :prefix]
    ids = ids.to(input_device(lm.model))
    # Outside the handler: a model that cannot read whole sequences must raise.
    whole = _hidden(run(lm.model, {"input_ids": ids}))[:, prefix:]
    try:
        first = read_prefix(lm, ids[:1, :half].tolist())
        shared = read_prefix(lm, ids[:2, half:prefix].tolist(), first)
        for _ in range(2):  # the second pass shows whether the first one changed the prefix
            out = run(
                lm.model,
                {"input_ids": ids[:, prefix:], "past_key_values": shared.continued([0, 1, 0]), "use_cache": True},
            )
            if not nearly_equal(_hidden(out), whole):
                return False
    except MODEL_ERRORS as problem:
        raise_if_out_of_memory(problem)
        return False
    return True


def _hidden(output: Any) -> Tensor:
    hidden: Tensor = output[0]
    return hidden


def nearly_equal(ours: Tensor, whole: Tensor) -> bool:
    """Return True if hidden states equal those of whole sequences."""
    # Kernels sum in another order for another shape, which costs a few roundings through all layers.
    tolerance = max(1e-4, 8 * torch.finfo(whole.dtype).eps)
    return bool(wide_norm(ours - whole) <= tolerance * wide_norm(whole))


class _Filled(Exception):
    """A cache has all its keys."""


class _Filling(Cache):
    """A cache that ends the pass with its last keys: nothing reads the hidden states of a prefix."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__(layers=layers)
        # A recurrent layer may still change its states.
        self._last = None if isinstance(layers[-1], LinearAttentionCacheLayerMixin) else len(layers) - 1

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        full: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx == self._last:
            raise _Filled
        return full


class _Continuation(Cache):
    """A cache that reads prefixes and new tokens, but keeps the prefixes, spread over the batch one layer at a time."""

    def __init__(self, layers: Sequence[Any], rows: Sequence[int]) -> None:
        super().__init__(layers=[_fork(layer, rows, spread=False) for layer in layers])
        self._rows = rows

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        layer: Any = self.layers[layer_idx]
        before = (layer.keys, layer.values)
        _spread(layer, self._rows)
        full: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layer.keys, layer.values = before
        return full


def _fork(layer: Any, rows: Sequence[int], *, spread: bool = True) -> Any:
    """Return a layer's cache for sequences that continue the prefixes ``rows``, with keys and values if ``spread``."""
    fork = copy.copy(layer)
    if spread:
        _spread(fork, rows)
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        # Recurrent states are updated in place.
        for name in ("conv_states", "recurrent_states"):
            states = getattr(layer, name)
            copies = {i: None if s is None else s[list(rows)] for i, s in states.items()}
            setattr(fork, name, copies)
        for name in ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state"):
            setattr(fork, name, dict(getattr(layer, name)))
    return fork


def _spread(layer: Any, rows: Sequence[int]) -> None:
    """Give every sequence the keys and values (R, K, N, D) of its prefix, maybe as views: new tokens go to copies."""
    if isinstance(layer, DynamicLayer) and layer.is_initialized:
        for name in ("keys", "values"):
            cached = getattr(layer, name)
            setattr(layer, name, cached.expand(len(rows), -1, -1, -1) if len(cached) == 1 else cached[list(rows)])


@dataclass(frozen=True)
class SharedRow:
    """A row: the token ids of a common prefix, followed by those of each sequence's ending; one or more each."""

    prefix: tuple[int, ...]
    endings: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not self.prefix or not self.endings or not all(self.endings):
            raise InterventionError("empty prefix or ending in a shared row. Pass one token or more of each")

    def __len__(self) -> int:
        return len(self.prefix) + sum(map(len, self.endings))

    def inputs(self, device: torch.device) -> dict[str, Tensor]:
        """Return the inputs of a forward pass: ``input_ids`` (1, N) and ``position_ids`` (1, N)."""
        past = len(self.prefix)
        ids = [*self.prefix, *(token for ending in self.endings for token in ending)]
        positions = [*range(past), *(past + step for ending in self.endings for step in range(len(ending)))]
        return {
            "input_ids": torch.tensor([ids], device=device),
            "position_ids": torch.tensor([positions], device=device),
        }

    @property
    def starts(self) -> list[int]:
        """Index of each ending's first token in the row."""
        ends = torch.tensor([len(self.prefix), *map(len, self.endings)]).cumsum(0)
        return [int(end) for end in ends[:-1]]

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens of each ending (R,)."""
        return torch.tensor([len(ending) for ending in self.endings])

    @cached_property
    def places(self) -> Tensor:
        """Indices of the endings' tokens in the row (R, T), padded with the ending's last index."""
        step = torch.arange(int(self.lengths.max())).expand(len(self.endings), -1)
        return torch.tensor(self.starts)[:, None] + step.minimum(self.lengths[:, None] - 1)

    @cached_property
    def sequence_of(self) -> Tensor:
        """Index of the ending of each token after the prefix (N - P,)."""
        return torch.arange(len(self.endings)).repeat_interleave(self.lengths)

    def subset(self, chosen: Sequence[int]) -> tuple[SharedRow, Tensor]:
        """Return the row of some endings, and its tokens' indices here."""
        kept = torch.isin(self.sequence_of, torch.tensor(chosen)).nonzero()[:, 0] + len(self.prefix)
        part = SharedRow(self.prefix, tuple(self.endings[index] for index in sorted(chosen)))
        return part, torch.cat([torch.arange(len(self.prefix)), kept])


#: Statistics that are not a mean over tokens.
_OF_FIRST, _OF_LAST = frozenset({"first_value_norm"}), frozenset({"last_output_norm"})


class RowSplit(Exception):
    """Raised when the ablated heads of a layer, bool (R, H), differ between sequences of a shared row."""

    def __init__(self, layer: int, ablated: Tensor) -> None:
        super().__init__(f"in layer {layer}")
        self.layer, self.ablated = layer, ablated


class SharedRowHooks:
    """Attention and ablation in one pass over a shared row; ``zeroed`` counts the heads ablated in all sequences."""

    def __init__(self, lm: LoadedModel, ablated: Sequence[Ablation], row: SharedRow) -> None:
        self.zeroed = 0
        self._row = row
        rows: dict[Ablation, list[int]] = {}
        for row_number, ablation in enumerate(ablated):
            rows.setdefault(ablation, []).append(row_number)
        # A slice where all agree: an index list would be copied to the GPU in every layer.
        alike = len(rows) == 1
        self._rows = {ablation: slice(None) if alike else torch.tensor(numbers) for ablation, numbers in rows.items()}
        scores = sorted({ablation.score_name for ablation in ablated if ablation.score_name is not None})
        if len(scores) > 1:
            raise InterventionError(
                f"scores of the rules in a shared row: {', '.join(scores)} (limit 1). Use one score"
            )
        for ablation in rows:
            ablation.check_values(lm.grid)
        replacements = {ablation.replaces_by for ablation in ablated}
        if len(replacements) > 1:
            raise InterventionError(
                f"values of ablated heads in a shared row: {', '.join(sorted(value.value for value in replacements))} "
                "(limit 1). Use one value"
            )
        (replacement,) = replacements
        self._fill = Filler(replacement, InterventionRecord(lm, None))
        self._score = scores[0] if scores else None
        self._prefix, self._endings = RuleStatistics(lm, self._score), RuleStatistics(lm, self._score)
        self._layouts: dict[torch.device, _Layout] = {}

    def attended(self, site: AttentionSite, call: AttentionCall) -> Tensor:
        if not isinstance(call, ScoredCall) or call.bias is not None:
            raise UnsupportedModelError("attention with a position bias cannot run in shared rows. Run whole sequences")
        past, here = len(self._row.prefix), self._layout(call.device)
        out = self._prefix.attended(_as_sequences(call, here.first, 0), here.past)
        outs = self._endings.attended(_as_sequences(call, here.places, past), here.lengths, past)
        return torch.cat([out, outs.transpose(1, 2)[here.ending, here.step].transpose(0, 1)[None]], 2)

    def visited(self, site: AttentionSite, heads_BNHD: Tensor) -> Tensor:
        ablated_RH = self._chosen(site, heads_BNHD)
        if not bool((ablated_RH == ablated_RH[0]).all()):
            raise RowSplit(site.layer, ablated_RH)
        zeroed = int(ablated_RH[0].sum())
        self.zeroed += zeroed
        if not zeroed:
            return heads_BNHD
        return self._fill(site, heads_BNHD, ablated_RH[0])

    def _chosen(self, site: AttentionSite, heads_BNHD: Tensor) -> Tensor:
        """Return the ablated heads of each sequence, bool (R, H), on the CPU."""
        scores_RH = None if self._score is None else self._scores(self._score, site, heads_BNHD)
        ablated_RH = torch.zeros(len(self._row.endings), site.num_attention_heads, dtype=torch.bool)
        for ablation, rows in self._rows.items():
            ablated_RH[rows] = ablation.heads_at(site, None if scores_RH is None else scores_RH[rows]).cpu()
        return ablated_RH

    def _scores(self, name: str, site: AttentionSite, heads_BNHD: Tensor) -> Tensor:
        past, here = len(self._row.prefix), self._layout(heads_BNHD.device)
        before = self._prefix.visited(site, heads_BNHD[:, :past], here.past)
        after = self._endings.visited(site, heads_BNHD[0, here.places], here.lengths)
        return score(_joined(before, past, after, here.lengths), name)

    def _layout(self, device: torch.device) -> _Layout:
        if device not in self._layouts:
            self._layouts[device] = _Layout.of(self._row, device)
        return self._layouts[device]


class _Layout(NamedTuple):
    """Token positions of a row's sequences, copied to a device once.

    Attributes:
        first: Indices of the prefix (1, P).
        past: Its length (1,).
        ending, step: Indices into ``places`` of the row's tokens after the prefix (N - P,).
    """

    first: Tensor
    past: Tensor
    places: Tensor
    lengths: Tensor
    ending: Tensor
    step: Tensor

    @classmethod
    def of(cls, row: SharedRow, device: torch.device) -> _Layout:
        past, places, lengths = len(row.prefix), row.places, row.lengths
        real = torch.arange(places.shape[1]) < lengths[:, None]
        # Indices instead of a mask: with a mask every layer would wait for the GPU to count its elements.
        ending, step = real.nonzero(as_tuple=True)
        parts = (torch.arange(past)[None], torch.tensor([past]), places, lengths, ending, step)
        return cls(*(part.to(device) for part in parts))


def _as_sequences(call: ScoredCall, places_RT: Tensor, past: int) -> ScoredCall:
    """Return the queries at ``places`` as separate sequences, each after the row's first ``past`` keys. Causality and
    window replace the model's mask, which treats the row as one sequence.
    """

    def chosen(x_1HND: Tensor) -> Tensor:
        return x_1HND[0][:, places_RT].transpose(0, 1)

    def behind(x_1KSD: Tensor) -> Tensor:
        return torch.cat([x_1KSD[:, :, :past].expand(len(places_RT), -1, -1, -1), chosen(x_1KSD)], 2)

    sinks = call.sinks_BHN
    return replace(
        call,
        query_BHND=chosen(call.query_BHND),
        key_BKSD=behind(call.key_BKSD),
        value_BKSD=behind(call.value_BKSD),
        causal=True,
        mask=None,
        window=call.sliding_window,
        sinks_BHN=sinks if sinks is None or sinks.shape[2] == 1 else chosen(sinks),
    )


def _joined(before: Mapping[str, Tensor], past: int, after: Mapping[str, Tensor], lengths: Tensor) -> dict[str, Tensor]:
    """Return statistics of whole sequences from those of the prefix (1, H) and the endings (R, H)."""
    share = (past / (past + lengths.double()))[:, None]
    joined = {}
    for name, values in after.items():
        if name in _OF_LAST:
            joined[name] = values
        elif name in _OF_FIRST:
            joined[name] = before[name].expand_as(values)
        else:
            joined[name] = (share * before[name].double() + (1.0 - share) * values.double()).float()
    return joined


#: Tokens of the row that checks a model.
_TRIED_PREFIX, _TRIED_ENDING = 9, 5


class SharedRowReading(NamedTuple):
    """The result of ``forward`` for some sequences of a shared row, and the share of heads ablated in each."""

    sequences: list[int]
    zeroed_share: float
    value: Any


def read_shared_row(
    blocks: Blocks,
    ablated: Ablation | Sequence[Ablation],
    row: SharedRow,
    forward: Callable[[SharedRow, list[int]], Any],
) -> Iterator[SharedRowReading]:
    """Read the sequences of a shared row with heads ablated; results contain every sequence once.

    Args:
        blocks: The blocks of a model that `can_share_rows`.
        ablated: One ablation for all sequences, or one for each of them.
        forward: Runs a pass over `SharedRow.inputs`, without a KV cache. It takes the row and the indices of its
            sequences, and is called again for subsets of them if the ablated heads differ.
    """
    lm = blocks.lm
    lengths = (len(row.prefix) + row.lengths).tolist()
    lm.rope_lengths.check(max(lengths), lengths)
    ablations = [ablated] * len(row.endings) if isinstance(ablated, Ablation) else list(ablated)
    if len(ablations) != len(row.endings):
        raise InterventionError(f"{len(ablations)} ablations for {len(row.endings)} sequences. Pass one for each")
    for ablation in set(ablations):
        lm.grid.check(ablation.fixed_heads or ())
    heads = lm.grid.total_heads
    branches = [_Branch(list(range(len(row.endings))), row, 0, None, 0)]
    while branches:
        branch = branches.pop()
        here = [ablations[index] for index in branch.sequences]
        visitor = SharedRowHooks(lm, here, branch.row)
        inputs: dict[str, Tensor] = {}

        def keep(hidden: Tensor, _: object, inputs: dict[str, Tensor] = inputs) -> None:
            inputs["last"] = hidden

        with ExitStack() as hooks:
            if branch.hidden is not None:
                hooks.enter_context(resuming_at(blocks, branch.layer, branch.hidden))
            for block in blocks.all[branch.layer :]:
                hooks.enter_context(block.watched(keep))
            hooks.enter_context(attention_hook(lm, visitor.attended))
            hooks.enter_context(output_hook(lm, visitor.visited))
            try:
                value = forward(branch.row, branch.sequences)
            except RowSplit as split:
                branches += branch.split(split, inputs["last"], branch.zeroed + visitor.zeroed)
                continue
        yield SharedRowReading(branch.sequences, (branch.zeroed + visitor.zeroed) / heads, value)


@torch.no_grad()
def can_share_rows(lm: LoadedModel) -> bool:
    """Return True if shared rows reproduce the hidden states of whole sequences.

    The attention interface must receive queries, keys and windows, passes must resume at each block, and only attention
    may mix tokens, which a short row shows whose sequences differ in their ablated heads.
    """
    grid = lm.grid
    shown = all(site.by_interface and site.causal for site in grid.sites) and grid.implementation == IMPLEMENTATION
    if not shown or not shares_prefixes(lm) or "position_ids" not in inspect.signature(lm.model.forward).parameters:
        return False
    try:
        blocks = find_blocks(lm)
        # A mask of one middle head in one of two sequences. A rule would depend on rounding if its threshold were close
        # to a score.
        middle = grid.sites[len(grid.sites) // 2].layer
        parted = (HeadMask([]), HeadMask([(middle, 0)]))
        return (
            not cannot_resume(blocks)
            and _shared_rows_are_exact(blocks, (_IDLE, _IDLE))
            and _shared_rows_are_exact(blocks, parted)
        )
    except UnsupportedModelError:
        return False


#: A rule that ablates nothing but measures attention weights.
_IDLE = HeadRule("entropy_ln", -1.0)


def _shared_rows_are_exact(blocks: Blocks, ablated: tuple[Ablation, Ablation]) -> bool:
    lm = blocks.lm
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(lm.vocab_size, 1000), (_TRIED_PREFIX + 2 * _TRIED_ENDING,), generator=generator).tolist()
    first, second = _TRIED_PREFIX, _TRIED_PREFIX + _TRIED_ENDING
    row = SharedRow(tuple(ids[:first]), (tuple(ids[first:second]), tuple(ids[second:])))

    def hidden(row: SharedRow, _: object) -> Tensor:
        states: Tensor = run(lm.model, row.inputs(lm.device))[0]
        return states[0]

    for reading in read_shared_row(blocks, ablated, row, hidden):
        part, _ = row.subset(reading.sequences)
        for index, ending, start in zip(reading.sequences, part.endings, part.starts, strict=True):
            whole_ids = torch.tensor([[*row.prefix, *ending]], device=lm.device)
            with intervene(lm, ablated[index]):
                whole: Tensor = run(lm.model, {"input_ids": whole_ids})[0][0, len(row.prefix) :]
            if not nearly_equal(reading.value[start : start + len(ending)], whole):
                return False
    return True


@dataclass(frozen=True)
class _Branch:
    """Sequences that share a row from a layer on, whose input is ``hidden`` (1, N, E); None starts at the embedding."""

    sequences: list[int]
    row: SharedRow
    layer: int
    hidden: Tensor | None
    zeroed: int

    def split(self, split: RowSplit, hidden: Tensor, zeroed: int) -> list[_Branch]:
        """Return the branches that continue where the ablated heads differ."""
        groups: dict[bytes, list[int]] = {}
        for index, ablated in enumerate(split.ablated):
            groups.setdefault(ablated.numpy().tobytes(), []).append(index)
        branches = []
        for group in groups.values():
            row, places = self.row.subset(group)
            own = hidden[:, places.to(hidden.device)]
            branches.append(_Branch([self.sequences[index] for index in group], row, split.layer, own, zeroed))
        return branches
