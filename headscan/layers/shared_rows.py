"""Shared rows: a row holds a prefix once, then each ending that continues it, and heads are ablated in all of them.

Three endings a, b and c, of which c has other ablated heads from layer 7 on::

    layers 0 to 6    | prefix | a | b | c |             a attends to the prefix and itself, and so do b and c
    layers 7 on      | prefix | a | b | prefix | c |    one row still: c has a copy of the prefix of its own

Only attention mixes tokens, so a row of a prefix and several endings runs through everything else unchanged; the
attention hook lets each ending attend to the prefix and itself. Masks are known before the pass. A rule needs
statistics of whole sequences: those of the prefix are joined with those of each ending, as each statistic declares
(`registry.JOINS`), which is exact for causal attention. Sequences share a copy of the prefix while their ablated heads
agree. In the first layer in which they differ the pass stops and resumes at that layer, with a copy of the prefix for
each group of sequences. All groups stay in one pass, because a pass for each would leave a GPU idle. A pass waits for
the GPU once a layer to compare ablated heads, and no longer once every sequence has a copy of its own.

Shapes: B sequences, N tokens of a row, P of the prefix, R endings, T tokens of the longest, G copies of the prefix that
several endings share, M tokens with padding; E width of a hidden state, H query heads, K KV heads, D width of a head.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headscan.ablation.intervention import InterventionRecord, LayerwiseAblation, OutputReplacer, intervene
from headscan.ablation.masks import HeadMask
from headscan.ablation.rules import HeadRule, RuleStatistics
from headscan.attention.calls import AttentionCall, ScoredCall
from headscan.attention.hooks import IMPLEMENTATION, attention_hook, output_hook
from headscan.catalog import MassWidths
from headscan.errors import InterventionError, UnsupportedModelError
from headscan.grid import AttentionSite
from headscan.layers.blocks import Blocks, cannot_resume, find_blocks, resuming_at
from headscan.layers.prefix_cache import nearly_equal, shares_prefixes
from headscan.models.forward_inputs import run_forward
from headscan.models.loaded_model import LoadedModel
from headscan.statistics.registry import JOINS
from headscan.statistics.scores import score


@dataclass(frozen=True)
class SharedRow:
    """A row: for each group the token ids of a common prefix, followed by those of each ending; one or more each. Each
    of the ``groups`` has the indices of the endings that share a copy of the prefix; empty: one group for all.
    """

    prefix: tuple[int, ...]
    endings: tuple[tuple[int, ...], ...]
    groups: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if not self.prefix or not self.endings or not all(self.endings):
            raise InterventionError("empty prefix or ending in a shared row. Pass one token or more of each")
        if not self.groups:
            object.__setattr__(self, "groups", (tuple(range(len(self.endings))),))
        if sorted(index for group in self.groups for index in group) != list(range(len(self.endings))):
            raise InterventionError(
                f"groups of a shared row: {self.groups} (limit: each of the {len(self.endings)} endings once). Correct "
                "them"
            )

    def __len__(self) -> int:
        return len(self.groups) * len(self.prefix) + sum(map(len, self.endings))

    def inputs(self, device: torch.device) -> dict[str, Tensor]:
        """Return the inputs of a forward pass, (1, N) each: ``input_ids``, ``position_ids`` and ``attention_mask``.

        A model without a mask takes positions that jump for several sequences, and makes an N x N mask that
        nothing reads.
        """
        past = len(self.prefix)
        ids: list[int] = []
        positions: list[int] = []
        for group in self.groups:
            ids += self.prefix
            positions += range(past)
            for index in group:
                ids += self.endings[index]
                positions += range(past, past + len(self.endings[index]))
        return {
            "input_ids": torch.tensor([ids], device=device),
            "position_ids": torch.tensor([positions], device=device),
            "attention_mask": torch.ones(1, len(ids), dtype=torch.long, device=device),
        }

    @cached_property
    def prefix_starts(self) -> list[int]:
        """Index of the first token of each group in the row."""
        tokens = [len(self.prefix) + sum(len(self.endings[index]) for index in group) for group in self.groups]
        return [0, *accumulate(tokens)][:-1]

    @cached_property
    def starts(self) -> list[int]:
        """Index of each ending's first token in the row."""
        starts = [0] * len(self.endings)
        for group, at in zip(self.groups, self.prefix_starts, strict=True):
            place = at + len(self.prefix)
            for index in group:
                starts[index] = place
                place += len(self.endings[index])
        return starts

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens of each ending (R,)."""
        return torch.tensor([len(ending) for ending in self.endings])

    def regrouped(self, groups: Sequence[Sequence[int]]) -> tuple[SharedRow, Tensor]:
        """Return the row of these groups of endings, each of which shares a prefix here, and its tokens' indices here.
        Endings keep their order; those in no group are left out.
        """
        past = len(self.prefix)
        chosen = sorted(index for group in groups for index in group)
        new = {index: place for place, index in enumerate(chosen)}
        own_prefix = {i: at for group, at in zip(self.groups, self.prefix_starts, strict=True) for i in group}
        runs: list[Tensor] = []
        for group in groups:
            runs.append(torch.arange(own_prefix[group[0]], own_prefix[group[0]] + past))
            runs += [torch.arange(self.starts[i], self.starts[i] + len(self.endings[i])) for i in group]
        endings = tuple(self.endings[index] for index in chosen)
        return SharedRow(self.prefix, endings, tuple(tuple(new[i] for i in group) for group in groups)), torch.cat(runs)


class RowSplit(Exception):
    """Raised when the ablated heads of a layer, bool (R, H) on the CPU, differ between sequences of a group."""

    def __init__(self, layer: int, ablated: Tensor) -> None:
        super().__init__(f"in layer {layer}")
        self.layer, self.ablated = layer, ablated


class SharedRowHooks:
    """Attention and ablation in one pass over a shared row. ``statistics`` are those of the rules' score; None makes
    them.
    """

    def __init__(
        self,
        lm: LoadedModel,
        ablated: Sequence[LayerwiseAblation],
        row: SharedRow,
        statistics: RuleStatistics | None = None,
    ) -> None:
        self._row = row
        kinds = {ablation: number for number, ablation in enumerate(dict.fromkeys(ablated))}
        self._ablations = list(kinds)
        self._ablation_R = torch.tensor([kinds[ablation] for ablation in ablated])
        for ablation in kinds:
            if not ablation.may_share_rows:
                raise InterventionError(
                    f"{ablation.label} needs whole inputs, not shared rows. Run each input in a row of its own"
                )
            ablation.check_replacement(lm.grid)
        replacements = {ablation.replacement for ablation in ablated}
        if len(replacements) > 1:
            raise InterventionError(
                f"values of ablated heads in a shared row: {', '.join(sorted(value.kind for value in replacements))} "
                "(limit 1). Use one value"
            )
        (replacement,) = replacements
        self._replacer = OutputReplacer(replacement, InterventionRecord(lm, None))
        statistics = _statistics_of(lm, kinds) if statistics is None else statistics
        self._score = statistics.score
        self._prefix, self._endings, self._alone = (statistics.fresh() for _ in range(3))
        self._layouts: dict[torch.device, _Layout] = {}
        self._ablated: dict[torch.device, Tensor] = {}

    @property
    def ablated_R(self) -> Tensor:
        """Number of heads ablated in each sequence (R,), on the CPU."""
        counts = torch.zeros(len(self._row.endings), dtype=torch.long)
        return sum((count.cpu() for count in self._ablated.values()), counts)

    def on_attention(self, site: AttentionSite, call: AttentionCall) -> Tensor:
        if not isinstance(call, ScoredCall) or call.bias is not None:
            raise UnsupportedModelError("attention with a position bias cannot run in shared rows. Run whole sequences")
        here, outs = self._layout(call.device), []
        if (shared := here.shared) is not None:
            outs.append(self._prefix.on_attention(_as_sequences(call, shared.prefixes), shared.past))
            after = _as_sequences(call, shared.endings, shared.prefixes[shared.group])
            outs.append(self._endings.on_attention(after, shared.lengths, shared.prefixes.shape[1]))
        if (alone := here.alone) is not None:
            outs.append(self._alone.on_attention(_as_sequences(call, alone.places), alone.lengths))
        flat_MHD = torch.cat([out.transpose(1, 2).flatten(0, 1) for out in outs])
        return flat_MHD[here.order].transpose(0, 1)[None]

    def on_outputs(self, site: AttentionSite, outputs_BNHD: Tensor) -> Tensor:
        here = self._layout(outputs_BNHD.device)
        ablated_RH = known_RH = self._ablated_heads(site, outputs_BNHD, here)
        if here.shared is not None:
            known_RH = ablated_RH.cpu()  # The one time in a layer that a GPU is waited for.
            for group in self._row.groups:
                if len(group) > 1 and bool((known_RH[list(group)] != known_RH[group[0]]).any()):
                    raise RowSplit(site.layer, known_RH)
        if known_RH.is_cpu and not bool(known_RH.any()):
            return outputs_BNHD
        ablated_RH = ablated_RH.to(outputs_BNHD.device, non_blocking=True)
        ablated_R = ablated_RH.sum(1)
        before = self._ablated.get(ablated_R.device)
        self._ablated[ablated_R.device] = ablated_R if before is None else before + ablated_R
        # Each token as a sequence of its own.
        return self._replacer(site, outputs_BNHD.transpose(0, 1), ablated_RH[here.owner]).transpose(0, 1)

    def _ablated_heads(self, site: AttentionSite, outputs_BNHD: Tensor, here: _Layout) -> Tensor:
        """Return the ablated heads of each sequence, bool (R, H): on the CPU if no score decides."""
        if self._score is None:
            return torch.stack([ablation.heads_at(site, None) for ablation in self._ablations])[self._ablation_R]
        scores_RH = self._scores(self._score, site, outputs_BNHD, here)
        ablated_RH = torch.zeros_like(scores_RH, dtype=torch.bool)
        for number, ablation in enumerate(self._ablations):
            by_this = ablation.heads_at(site, scores_RH).to(scores_RH.device, non_blocking=True)
            ablated_RH = torch.where((here.ablation == number)[:, None], by_this, ablated_RH)
        return ablated_RH

    def _scores(self, name: str, site: AttentionSite, outputs_BNHD: Tensor, here: _Layout) -> Tensor:
        scores: list[Tensor] = []
        if (shared := here.shared) is not None:
            before = self._prefix.on_outputs(site, outputs_BNHD[0, shared.prefixes], shared.past)
            after = self._endings.on_outputs(site, outputs_BNHD[0, shared.endings], shared.lengths)
            of_own = {statistic: values[shared.group] for statistic, values in before.items()}
            scores.append(score(_joined(of_own, shared.prefixes.shape[1], after, shared.lengths), name))
        if (alone := here.alone) is not None:
            scores.append(score(self._alone.on_outputs(site, outputs_BNHD[0, alone.places], alone.lengths), name))
        return torch.cat(scores)[here.sequence]

    def _layout(self, device: torch.device) -> _Layout:
        if device not in self._layouts:
            self._layouts[device] = _Layout.of(self._row, self._ablation_R, device)
        return self._layouts[device]


def _statistics_of(lm: LoadedModel, ablated: Iterable[LayerwiseAblation]) -> RuleStatistics:
    """Return the statistics of the rules' score, none without rules; raise if there are several scores."""
    scores = {(each.score, each.widths) for each in ablated if isinstance(each, HeadRule)}
    if len(scores) > 1:
        names = sorted(f"{name}{'' if widths == MassWidths() else f' with {widths}'}" for name, widths in scores)
        raise InterventionError(f"scores of the rules in a shared row: {', '.join(names)} (limit 1). Use one score")
    return RuleStatistics(lm, *scores.pop()) if scores else RuleStatistics(lm, None)


class _Shared(NamedTuple):
    """Endings of which several share a copy of the prefix.

    Attributes:
        prefixes: Indices of the copies' tokens (G, P).
        past: Their lengths (G,).
        group: The copy of each ending (R,).
        endings: Indices of the endings' tokens (R, T), padded with the last one.
        lengths: Tokens of each ending (R,).
    """

    prefixes: Tensor
    past: Tensor
    group: Tensor
    endings: Tensor
    lengths: Tensor


class _Alone(NamedTuple):
    """Sequences that have a copy of the prefix to themselves: indices of their tokens (R, T), padded with the last one,
    and their numbers (R,).
    """

    places: Tensor
    lengths: Tensor


class _Layout(NamedTuple):
    """Where the sequences of a row are, copied to a device once.

    Attributes:
        shared: Groups of several sequences; None if there are none.
        alone: Groups of one sequence; None if there are none.
        order: Index of each token of the row (N,) in the tokens of prefixes, endings and sequences alone, in this
            order, padding included.
        owner: A sequence that each token (N,) belongs to.
        sequence: Place of each sequence (R,) among those that share a prefix, followed by those alone.
        ablation: Number of each sequence's ablation (R,).
    """

    shared: _Shared | None
    alone: _Alone | None
    order: Tensor
    owner: Tensor
    sequence: Tensor
    ablation: Tensor

    @classmethod
    def of(cls, row: SharedRow, ablation_R: Tensor, device: torch.device) -> _Layout:
        past = len(row.prefix)
        owner, order = torch.empty(len(row), dtype=torch.long), torch.empty(len(row), dtype=torch.long)
        groups = [(at, group) for at, group in zip(row.prefix_starts, row.groups, strict=True) if len(group) > 1]
        apart = [(at, group[0]) for at, group in zip(row.prefix_starts, row.groups, strict=True) if len(group) == 1]
        shared: _Shared | None = None
        alone: _Alone | None = None
        flat = 0  # tokens before the next part
        if groups:
            members = [index for _, group in groups for index in group]
            prefixes, full = _places([at for at, _ in groups], torch.full((len(groups),), past))
            endings, real = _places([row.starts[index] for index in members], row.lengths[members])
            copy_of = [number for number, (_, group) in enumerate(groups) for _ in group]
            owner[prefixes] = torch.tensor([group[0] for _, group in groups])[:, None].expand_as(prefixes)
            owner[endings[real]] = torch.tensor(members)[:, None].expand_as(endings)[real]
            order[prefixes] = torch.arange(prefixes.numel()).view_as(prefixes)
            order[endings[real]] = (prefixes.numel() + torch.arange(endings.numel()).view_as(endings))[real]
            flat = prefixes.numel() + endings.numel()
            parts = (prefixes, full.sum(1), torch.tensor(copy_of), endings, row.lengths[members])
            shared = _Shared(*(part.to(device) for part in parts))
        if apart:
            indices = [index for _, index in apart]
            lengths = past + row.lengths[indices]
            places, real = _places([at for at, _ in apart], lengths)
            owner[places[real]] = torch.tensor(indices)[:, None].expand_as(places)[real]
            order[places[real]] = (flat + torch.arange(places.numel()).view_as(places))[real]
            alone = _Alone(places.to(device), lengths.to(device))
        of_part = [*(index for _, group in groups for index in group), *(index for _, index in apart)]
        sequence = torch.tensor(of_part).argsort()
        return cls(shared, alone, *(part.to(device) for part in (order, owner, sequence, ablation_R)))


def _places(starts: Sequence[int], lengths_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices (R, T) of tokens that follow each other, padded with the last one, and which are real."""
    step = torch.arange(int(lengths_R.max())).expand(len(starts), -1)
    last = lengths_R[:, None] - 1
    return torch.tensor(starts)[:, None] + step.minimum(last), step <= last


def _as_sequences(call: ScoredCall, places_RT: Tensor, before_RP: Tensor | None = None) -> ScoredCall:
    """Return the queries at ``places`` as separate sequences, each after the keys at ``before``. Causality and window
    replace the model's mask, which treats the row as one sequence.
    """
    keys_RS = places_RT if before_RP is None else torch.cat([before_RP, places_RT], 1)

    def chosen(x_1HND: Tensor, places: Tensor) -> Tensor:
        return x_1HND[0][:, places].transpose(0, 1)

    sinks = call.sinks_BHN
    return replace(
        call,
        query_BHND=chosen(call.query_BHND, places_RT),
        key_BKSD=chosen(call.key_BKSD, keys_RS),
        value_BKSD=chosen(call.value_BKSD, keys_RS),
        causal=True,
        mask=None,
        window=call.sliding_window,
        sinks_BHN=sinks if sinks is None or sinks.shape[2] == 1 else chosen(sinks, places_RT),
    )


def _joined(before: Mapping[str, Tensor], past: int, after: Mapping[str, Tensor], lengths: Tensor) -> dict[str, Tensor]:
    """Return statistics of whole sequences from those of their prefixes and endings, (R, H) each."""
    share = (past / (past + lengths.double()))[:, None]
    joined = {}
    for name, values in after.items():
        if JOINS[name] == "last":
            joined[name] = values
        elif JOINS[name] == "first":
            joined[name] = before[name]
        else:
            assert JOINS[name] == "mean", f"{name} of a whole sequence needs the whole sequence"
            joined[name] = (share * before[name].double() + (1.0 - share) * values.double()).float()
    return joined


#: Tokens of the row that checks a model.
_TRIED_PREFIX, _TRIED_ENDING = 9, 5


class SharedRowResult(NamedTuple):
    """The result of ``forward`` for some sequences of a shared row, the row in which they were read, and the share of
    heads ablated in each.
    """

    sequences: list[int]
    row: SharedRow
    ablated_shares: list[float]
    value: Any


def read_shared_row(
    blocks: Blocks,
    ablated: LayerwiseAblation | Sequence[LayerwiseAblation],
    row: SharedRow,
    forward: Callable[[SharedRow, list[int]], Any],
    *,
    most_tokens: float = math.inf,
    pass_cost: int = 0,
) -> Iterator[SharedRowResult]:
    """Read the sequences of a shared row with heads ablated; results contain every sequence once.

    Args:
        blocks: The blocks of a model that `can_share_rows`.
        ablated: One ablation for all sequences, or one for each of them.
        forward: Runs a pass over `SharedRow.inputs`, without a KV cache. It takes the row and the indices of its
            sequences, and is called again for rows with more copies of the prefix if the ablated heads differ.
        most_tokens: Limit of a pass, in tokens. If the copies exceed it, the row is cut.
        pass_cost: Cost of one more pass, in tokens. Where sequences part, only those that save more by sharing the
            prefix in the layers left go on sharing it: each further parting costs a pass.
    """
    lm = blocks.lm
    lengths = (len(row.prefix) + row.lengths).tolist()
    lm.rope_lengths.check(max(lengths), lengths)
    ablations = [ablated] * len(row.endings) if isinstance(ablated, LayerwiseAblation) else list(ablated)
    if len(ablations) != len(row.endings):
        raise InterventionError(f"{len(ablations)} ablations for {len(row.endings)} sequences. Pass one for each")
    for ablation in set(ablations):
        lm.grid.check(ablation.fixed_heads or ())
    statistics = _statistics_of(lm, ablations)
    none_yet = torch.zeros(len(row.endings), dtype=torch.long)
    branches = [_Branch(list(range(len(row.endings))), row, 0, None, none_yet)]
    while branches:
        branch = branches.pop()
        here = [ablations[index] for index in branch.sequences]
        visitor = SharedRowHooks(lm, here, branch.row, statistics)
        inputs: dict[str, Tensor] = {}

        def keep(hidden: Tensor, _: object, inputs: dict[str, Tensor] = inputs) -> None:
            inputs["last"] = hidden

        with ExitStack() as hooks:
            if branch.hidden is not None:
                hooks.enter_context(resuming_at(blocks, branch.layer, branch.hidden))
            for block in blocks.all[branch.layer :]:
                hooks.enter_context(block.watched(keep))
            hooks.enter_context(attention_hook(lm, visitor.on_attention))
            hooks.enter_context(output_hook(lm, visitor.on_outputs))
            try:
                value = forward(branch.row, branch.sequences)
            except RowSplit as split:
                left = 1 - split.layer / len(blocks.all)
                groups = branch.parted(split.ablated, pass_cost / left)
                branches += branch.split(split.layer, groups, inputs["last"], visitor.ablated_R, most_tokens)
                continue
        shares = ((branch.ablated_R + visitor.ablated_R).double() / lm.grid.total_heads).tolist()
        yield SharedRowResult(branch.sequences, branch.row, shares, value)


@torch.no_grad()
def can_share_rows(lm: LoadedModel) -> bool:
    """Return True if shared rows reproduce the hidden states of whole sequences.

    The attention interface must receive queries, keys and windows, passes must resume at each block, and only attention
    may mix tokens, which short rows show whose sequences differ in their ablated heads.
    """
    grid = lm.grid
    shown = all(site.by_interface and site.causal for site in grid.sites) and grid.implementation == IMPLEMENTATION
    if not shown or not shares_prefixes(lm) or "position_ids" not in inspect.signature(lm.model.forward).parameters:
        return False
    try:
        blocks = find_blocks(lm)
        # A mask of a middle head in one of three sequences. A rule would depend on rounding if its threshold were
        # close to a score.
        middle = grid.sites[len(grid.sites) // 2].layer
        parted = (HeadMask([]), HeadMask([(middle, 0)]), HeadMask([]))
        return (
            not cannot_resume(blocks)
            and _shared_rows_are_exact(blocks, (_IDLE, _IDLE, _IDLE))
            and _shared_rows_are_exact(blocks, parted)
        )
    except UnsupportedModelError:
        return False


#: A rule that ablates nothing but measures attention weights.
_IDLE = HeadRule("entropy_ln", -1.0)


def _shared_rows_are_exact(blocks: Blocks, ablated: Sequence[LayerwiseAblation]) -> bool:
    lm = blocks.lm
    generator = torch.Generator().manual_seed(0)
    tokens = _TRIED_PREFIX + len(ablated) * _TRIED_ENDING
    ids = torch.randint(min(lm.vocab_size, 1000), (tokens,), generator=generator).tolist()
    ends = range(_TRIED_PREFIX, tokens, _TRIED_ENDING)
    row = SharedRow(tuple(ids[:_TRIED_PREFIX]), tuple(tuple(ids[end : end + _TRIED_ENDING]) for end in ends))

    def hidden(row: SharedRow, _: object) -> Tensor:
        states: Tensor = run_forward(lm.model, row.inputs(lm.device))[0]
        return states[0]

    for reading in read_shared_row(blocks, ablated, row, hidden):
        for index, start in zip(reading.sequences, reading.row.starts, strict=True):
            ending = row.endings[index]
            whole_ids = torch.tensor([[*row.prefix, *ending]], device=lm.device)
            with intervene(lm, ablated[index]):
                whole: Tensor = run_forward(lm.model, {"input_ids": whole_ids})[0][0, len(row.prefix) :]
            if not nearly_equal(reading.value[start : start + len(ending)], whole):
                return False
    return True


@dataclass(frozen=True)
class _Branch:
    """Sequences read in one row from a layer on, whose input is ``hidden`` (1, N, E); None starts at the embedding.
    ``ablated_R`` counts the heads ablated in each below the layer.
    """

    sequences: list[int]
    row: SharedRow
    layer: int
    hidden: Tensor | None
    ablated_R: Tensor

    def parted(self, ablated_RH: Tensor, least_saved: float) -> list[list[int]]:
        """Return groups of sequences with equal ablated heads. A group is kept together if sharing the prefix saves
        more than ``least_saved`` tokens; otherwise each of its sequences is a group.
        """
        groups: list[list[int]] = []
        for group in self.row.groups:
            equal: dict[bytes, list[int]] = {}
            for index in group:
                equal.setdefault(ablated_RH[index].numpy().tobytes(), []).append(index)
            for part in equal.values():
                saves = (len(part) - 1) * len(self.row.prefix) > least_saved
                groups += [part] if saves else [[index] for index in part]
        return groups

    def split(
        self, layer: int, groups: Sequence[list[int]], hidden: Tensor, ablated_R: Tensor, most_tokens: float
    ) -> list[_Branch]:
        """Return the branches that continue at a layer with these groups, in rows of at most ``most_tokens`` tokens."""
        cut: list[list[list[int]]] = []
        used = math.inf
        for group in groups:
            tokens = len(self.row.prefix) + int(self.row.lengths[group].sum())
            if used + tokens > most_tokens or not cut:
                cut.append([])
                used = 0
            cut[-1].append(group)
            used += tokens
        branches = []
        for part in cut:
            row, places = self.row.regrouped(part)
            own = hidden[:, places.to(hidden.device)]
            chosen = sorted(index for group in part for index in group)
            zeroed = (self.ablated_R + ablated_R)[chosen]
            branches.append(_Branch([self.sequences[index] for index in chosen], row, layer, own, zeroed))
        return branches
