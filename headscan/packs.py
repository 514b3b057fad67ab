"""Sequences that begin alike, laid out as one row: what they begin with stands there once.

Only attention mixes tokens, so in a row of a prefix and several endings everything else runs as it is; the attention
door lets each ending see the prefix and itself. A mask silences the same heads in all of them. A rule looks at whole
sequences: its statistics of the prefix join with those of each ending, since attention is causal and they are means
over tokens. The prefix can stand there once for as long as the rule silences the same heads in all the sequences. In
the first layer where it does not, the pass breaks off, and from what enters that layer each group of sequences goes on
in a row of its own.

Shapes: N tokens of a row, P of the prefix, R endings, T tokens of the longest; E width of a hidden state, H query
heads, D width of a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headscan.attention import IMPLEMENTATION
from headscan.blocks import Blocks, find_blocks
from headscan.calls import AttentionCall, ScoredCall
from headscan.doors import attention_door, output_door
from headscan.entering import cannot_enter
from headscan.errors import InterventionError, UnsupportedModelError
from headscan.grid import AttentionSite
from headscan.inputs import run
from headscan.interventions import HeadMask, HeadRule, intervene
from headscan.loaded_model import LoadedModel
from headscan.prefixes import nearly_equal, shares_prefixes
from headscan.rule_statistics import RuleStatistics
from headscan.scores import score

#: Statistics that are no mean over tokens.
_OF_FIRST, _OF_LAST = frozenset({"first_value_norm"}), frozenset({"last_output_norm"})

#: Tokens of the pack on which a model is tried.
_TRIED_PREFIX, _TRIED_ENDING = 9, 5


@dataclass(frozen=True)
class Pack:
    """A row: tokens that sequences begin with, then what comes after them in each.

    Attributes:
        prefix: Token ids, at least one.
        endings: Token ids of each sequence's ending, at least one.

    Raises:
        InterventionError: One of them is empty.
    """

    prefix: tuple[int, ...]
    endings: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not self.prefix or not self.endings or not all(self.endings):
            raise InterventionError("a pack needs a prefix and endings, of one token or more each")

    def __len__(self) -> int:
        return len(self.prefix) + sum(map(len, self.endings))

    def inputs(self, device: torch.device) -> dict[str, Tensor]:
        """Arguments of a forward pass: ``input_ids`` (1, N), and where each stands in its sequence."""
        past = len(self.prefix)
        ids = [*self.prefix, *(token for ending in self.endings for token in ending)]
        positions = [*range(past), *(past + step for ending in self.endings for step in range(len(ending)))]
        return {
            "input_ids": torch.tensor([ids], device=device),
            "position_ids": torch.tensor([positions], device=device),
        }

    @property
    def starts(self) -> list[int]:
        """Where each ending begins in the row."""
        ends = torch.tensor([len(self.prefix), *map(len, self.endings)]).cumsum(0)
        return [int(end) for end in ends[:-1]]

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens of each ending (R,)."""
        return torch.tensor([len(ending) for ending in self.endings])

    @cached_property
    def places(self) -> Tensor:
        """Where the endings' tokens stand in the row (R, T), the last one's repeated behind an ending."""
        step = torch.arange(int(self.lengths.max())).expand(len(self.endings), -1)
        return torch.tensor(self.starts)[:, None] + step.minimum(self.lengths[:, None] - 1)

    @cached_property
    def sequence_of(self) -> Tensor:
        """Which ending each token after the prefix belongs to: (N - P,)."""
        return torch.arange(len(self.endings)).repeat_interleave(self.lengths)

    def of(self, chosen: Sequence[int]) -> tuple[Pack, Tensor]:
        """The pack of some of the endings, and where its tokens stand in this row."""
        kept = torch.isin(self.sequence_of, torch.tensor(chosen)).nonzero()[:, 0] + len(self.prefix)
        part = Pack(self.prefix, tuple(self.endings[index] for index in sorted(chosen)))
        return part, torch.cat([torch.arange(len(self.prefix)), kept])


class PackReading(NamedTuple):
    """What came of some sequences of a pack.

    Attributes:
        sequences: Their index.
        zeroed_share: Share of all heads that were silenced in each of them.
        value: What the forward pass gave.
    """

    sequences: list[int]
    zeroed_share: float
    value: Any


def read_pack(
    blocks: Blocks, silenced: HeadMask | HeadRule | None, pack: Pack, forward: Callable[[Pack, list[int]], Any]
) -> Iterator[PackReading]:
    """Read the sequences of a pack with heads silenced.

    Args:
        blocks: Those of a model that `can_pack`.
        silenced: A mask, or a rule that chooses anew for each sequence; None: no heads.
        pack: The row.
        forward: Makes a forward pass over a pack's `Pack.inputs`, without a KV cache; it is told the sequences by
            their index, and called again for fewer of them where they part.

    Yields:
        Every sequence once.

    Raises:
        HeadIndexError: The model lacks a head of the mask.
    """
    lm = blocks.lm
    heads = sum(site.num_attention_heads for site in lm.grid.sites)
    branches = [_Branch(list(range(len(pack.endings))), pack, 0, None, 0)]
    while branches:
        branch = branches.pop()
        visitor = _PackVisitor(lm, silenced, branch.pack)
        entered: dict[str, Tensor] = {}

        def keep(hidden: Tensor, _: object, entered: dict[str, Tensor] = entered) -> None:
            entered["last"] = hidden

        with ExitStack() as hooks:
            if branch.hidden is not None:
                hooks.enter_context(blocks.entering_at(branch.layer, branch.hidden))
            for block in blocks.all[branch.layer :]:
                hooks.enter_context(block.watched(keep))
            hooks.enter_context(attention_door(lm, visitor.attended))
            hooks.enter_context(output_door(lm, visitor.visited))
            try:
                value = forward(branch.pack, branch.sequences)
            except _Parting as parting:
                branches += branch.parted(parting, entered["last"], branch.zeroed + visitor.zeroed)
                continue
        yield PackReading(branch.sequences, (branch.zeroed + visitor.zeroed) / heads, value)


@torch.no_grad()
def can_pack(lm: LoadedModel) -> bool:
    """Whether a model comes, in packs, to what it comes to on whole sequences.

    Its attention has to show queries, keys and windows as they are, its blocks have to be such that a pass can begin
    at each, and nothing but attention may mix tokens. The last is tried, on a short pack whose sequences part.
    """
    grid = lm.grid
    shown = all(site.by_interface and site.causal for site in grid.sites) and grid.implementation == IMPLEMENTATION
    if not shown or not shares_prefixes(lm) or "position_ids" not in inspect.signature(lm.model.forward).parameters:
        return False
    try:
        blocks = find_blocks(lm)
        return not cannot_enter(blocks) and all(_packs_right(blocks, rule) for rule in _TRIED)
    except UnsupportedModelError:
        return False


#: Rules that are tried: one that silences nothing, and one by which heads of a layer part from each other.
_TRIED = (HeadRule("output_norm", -1.0), HeadRule("first_token_weight_ln", 1.0))


def _packs_right(blocks: Blocks, rule: HeadRule) -> bool:
    lm = blocks.lm
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(lm.vocab_size, 1000), (_TRIED_PREFIX + 2 * _TRIED_ENDING,), generator=generator).tolist()
    first, second = _TRIED_PREFIX, _TRIED_PREFIX + _TRIED_ENDING
    pack = Pack(tuple(ids[:first]), (tuple(ids[first:second]), tuple(ids[second:])))

    def hidden(pack: Pack, _: object) -> Tensor:
        found: Tensor = run(lm.model, pack.inputs(lm.device))[0]
        return found[0]

    for reading in read_pack(blocks, rule, pack, hidden):
        part, _ = pack.of(reading.sequences)
        for ending, start in zip(part.endings, part.starts, strict=True):
            whole_ids = torch.tensor([[*pack.prefix, *ending]], device=lm.device)
            with intervene(lm, rule):
                whole: Tensor = run(lm.model, {"input_ids": whole_ids})[0][0, len(pack.prefix) :]
            if not nearly_equal(reading.value[start : start + len(ending)], whole):
                return False
    return True


class _Parting(Exception):
    """The sequences of a pack do not have the same heads silenced in a layer.

    Attributes:
        layer: The layer.
        silenced: bool (R, H), what the rule silences there.
    """

    def __init__(self, layer: int, silenced: Tensor) -> None:
        super().__init__(f"in layer {layer}")
        self.layer, self.silenced = layer, silenced


@dataclass(frozen=True)
class _Branch:
    """Sequences that share a row from a layer on.

    Attributes:
        sequences: Their index.
        hidden: What enters the layer (1, N, E); None: the pass begins with the tokens.
        zeroed: How many heads are silenced in the layers below.
    """

    sequences: list[int]
    pack: Pack
    layer: int
    hidden: Tensor | None
    zeroed: int

    def parted(self, parting: _Parting, hidden: Tensor, zeroed: int) -> list[_Branch]:
        """The branches that go on where sequences part, from what enters the layer."""
        groups: dict[bytes, list[int]] = {}
        for index, silenced in enumerate(parting.silenced):
            groups.setdefault(silenced.numpy().tobytes(), []).append(index)
        found = []
        for group in groups.values():
            pack, places = self.pack.of(group)
            own = hidden[:, places.to(hidden.device)]
            found.append(_Branch([self.sequences[index] for index in group], pack, parting.layer, own, zeroed))
        return found


class _PackVisitor:
    """Attention and silencing in one pass over a pack; ``zeroed`` counts the heads that it has silenced."""

    def __init__(self, lm: LoadedModel, silenced: HeadMask | HeadRule | None, pack: Pack) -> None:
        self.zeroed = 0
        self._silenced, self._pack = silenced, pack
        self._masked = lm.grid.check(silenced.heads) if isinstance(silenced, HeadMask) else []
        score = silenced.score if isinstance(silenced, HeadRule) else None
        self._prefix, self._endings = RuleStatistics(lm, score), RuleStatistics(lm, score)

    def attended(self, site: AttentionSite, call: AttentionCall) -> Tensor:
        if not isinstance(call, ScoredCall) or call.bias is not None:
            raise UnsupportedModelError("attention that adds biases by position cannot be read in packs")
        past, device = len(self._pack.prefix), call.device
        first = torch.arange(past, device=device)[None]
        places, lengths = self._pack.places.to(device), self._pack.lengths.to(device)
        out = self._prefix.attended(_as_sequences(call, first, 0), torch.tensor([past], device=device))
        outs = self._endings.attended(_as_sequences(call, places, past), lengths, past)
        real = torch.arange(places.shape[1], device=device) < lengths[:, None]
        return torch.cat([out, outs.transpose(1, 2)[real].transpose(0, 1)[None]], 2)

    def visited(self, site: AttentionSite, heads_BNHD: Tensor) -> Tensor:
        silenced_RH = self._chosen(site, heads_BNHD)
        if not bool((silenced_RH == silenced_RH[0]).all()):
            raise _Parting(site.layer, silenced_RH)
        self.zeroed += int(silenced_RH[0].sum())
        return heads_BNHD.masked_fill(silenced_RH[0].to(heads_BNHD.device)[:, None], 0.0)

    def _chosen(self, site: AttentionSite, heads_BNHD: Tensor) -> Tensor:
        """What is silenced in each sequence, bool (R, H), or (1, H) where it is the same in all; on the CPU."""
        if not isinstance(self._silenced, HeadRule):
            silenced_1H = torch.zeros(1, site.num_attention_heads, dtype=torch.bool)
            silenced_1H[0, [head for layer, head in self._masked if layer == site.layer]] = True
            return silenced_1H
        past, device = len(self._pack.prefix), heads_BNHD.device
        places, lengths = self._pack.places.to(device), self._pack.lengths.to(device)
        before = self._prefix.visited(site, heads_BNHD[:, :past], torch.tensor([past], device=device))
        after = self._endings.visited(site, heads_BNHD[0, places], lengths)
        scores_RH = score(_joined(before, past, after, lengths), self._silenced.score)
        return self._silenced.silences(scores_RH).cpu()


def _as_sequences(call: ScoredCall, places_RT: Tensor, past: int) -> ScoredCall:
    """The queries at ``places`` of a row as sequences of their own, each behind the row's first ``past`` keys.

    The mask is left out: it is the model's idea of the row, which is none of ours. Causality and window say it all.
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
    """Statistics of whole sequences from those of the prefix (1, H) and of the endings (R, H)."""
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
