"""Shared rows: a row holds a prefix once, then each ending that continues it, and heads are ablated in all of them.

Three endings a, b and c, of which c has other ablated heads from layer 7 on::

    layers 0 to 6    | prefix | a | b | c |             a attends to the prefix and itself, and so do b and c
    layers 7 on      | prefix | a | b | prefix | c |    one row still: c has a copy of the prefix of its own

Only attention mixes tokens, so a row of a prefix and several endings runs through everything else unchanged; the
attention hook lets each ending attend to the prefix and itself. Masks are known before the pass. A `ScoredAblation`,
such as a rule, needs statistics of whole sequences: those of the prefix are joined with those of each ending, as each
statistic declares (`registry.JOINS`), which is exact for causal attention. Sequences share a copy of the prefix while
their ablated heads agree. In the first layer in which they differ the pass stops and resumes at that layer, with a copy
of the prefix for each group of sequences. All groups stay in one pass, because a pass for each would leave a GPU idle.
A pass waits for the GPU once a layer to compare ablated heads, and no longer once every sequence has a copy of its own.

Shapes: B sequences, N tokens of a row, P of the prefix, R endings, T tokens of the longest, G copies of the prefix that
several endings share, M tokens with padding; E width of a hidden state, H query heads, K KV heads, D width of a head.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from headscan.ablation.intervention import InterventionRecord, LayerwiseAblation, OutputReplacer, intervene
from headscan.ablation.masks import HeadMask
from headscan.ablation.rules import HeadRule, ScoreStatistics
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
        prefix_tokens = len(self.prefix)
        ids: list[int] = []
        positions: list[int] = []
        for group in self.groups:
            ids += self.prefix
            positions += range(prefix_tokens)
            for index in group:
                ids += self.endings[index]
                positions += range(prefix_tokens, prefix_tokens + len(self.endings[index]))
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
    def ending_starts(self) -> list[int]:
        """Index of each ending's first token in the row."""
        ending_starts = [0] * len(self.endings)
        for group, prefix_start in zip(self.groups, self.prefix_starts, strict=True):
            start = prefix_start + len(self.prefix)
            for index in group:
                ending_starts[index] = start
                start += len(self.endings[index])
        return ending_starts

    @cached_property
    def ending_lengths(self) -> Tensor:
        """Tokens of each ending (R,)."""
        return torch.tensor([len(ending) for ending in self.endings])

    def regrouped(self, groups: Sequence[Sequence[int]]) -> tuple[SharedRow, Tensor]:
        """Return the row of these groups of endings, each of which shares a prefix here, and its tokens' indices here.
        Endings keep their order; those in no group are left out.
        """
        kept = sorted(index for group in groups for index in group)
        new_index = {index: number for number, index in enumerate(kept)}
        prefix_start = {i: start for group, start in zip(self.groups, self.prefix_starts, strict=True) for i in group}
        token_ranges: list[Tensor] = []
        for group in groups:
            start = prefix_start[group[0]]
            token_ranges.append(torch.arange(start, start + len(self.prefix)))
            token_ranges += [
                torch.arange(self.ending_starts[i], self.ending_starts[i] + len(self.endings[i])) for i in group
            ]
        endings = tuple(self.endings[index] for index in kept)
        new_groups = tuple(tuple(new_index[index] for index in group) for group in groups)
        return SharedRow(self.prefix, endings, new_groups), torch.cat(token_ranges)


class HeadsDiffer(Exception):
    """Raised to stop the pass in a layer whose ablated heads, bool (R, H) on the CPU, differ between sequences of a
    group.
    """

    def __init__(self, layer: int, ablated_RH: Tensor) -> None:
        super().__init__(f"in layer {layer}")
        self.layer, self.ablated_RH = layer, ablated_RH


class SharedRowHooks:
    """Attention and ablation in one pass over a shared row. ``statistics`` are those of the ablations' score; None
    makes them. ``layer_input`` is the input (1, N, E) of the layer that runs.
    """

    def __init__(
        self,
        lm: LoadedModel,
        ablations: Sequence[LayerwiseAblation],
        row: SharedRow,
        statistics: ScoreStatistics | None = None,
    ) -> None:
        self._row = row
        numbers = {ablation: number for number, ablation in enumerate(dict.fromkeys(ablations))}
        self._ablations = list(numbers)
        self._ablation_index_R = torch.tensor([numbers[ablation] for ablation in ablations])
        for ablation in self._ablations:
            if not ablation.may_share_rows:
                raise InterventionError(
                    f"{ablation.label} needs whole inputs, not shared rows. Run each input in a row of its own"
                )
            ablation.check_replacement(lm.grid)
        replacements = {ablation.replacement for ablation in ablations}
        if len(replacements) > 1:
            raise InterventionError(
                f"values of ablated heads in a shared row: {', '.join(sorted(value.kind for value in replacements))} "
                "(limit 1). Use one value"
            )
        (replacement,) = replacements
        self._replacer = OutputReplacer(replacement, InterventionRecord(lm, None))
        statistics = _statistics_of(lm, self._ablations) if statistics is None else statistics
        self._score_name = statistics.score_name
        self._prefix_statistics = statistics.fresh()
        self._ending_statistics = statistics.fresh()
        self._single_statistics = statistics.fresh()
        self._layouts: dict[torch.device, _Layout] = {}
        self._ablated_counts: dict[torch.device, Tensor] = {}
        self.layer_input: Tensor | None = None

    @property
    def ablated_count_R(self) -> Tensor:
        """Number of heads ablated in each sequence (R,), on the CPU."""
        zeros_R = torch.zeros(len(self._row.endings), dtype=torch.long)
        return sum((counts.cpu() for counts in self._ablated_counts.values()), zeros_R)

    def on_layer_input(self, hidden: Tensor, _: object) -> None:
        """Keep the input of a layer, from which the pass can resume."""
        self.layer_input = hidden

    def on_attention(self, site: AttentionSite, call: AttentionCall) -> Tensor:
        """Let each ending attend to its prefix and itself, and measure the statistics of the score."""
        if not isinstance(call, ScoredCall) or call.bias is not None:
            raise UnsupportedModelError("attention with a position bias cannot run in shared rows. Run whole sequences")
        layout, outs = self._layout(call.device), []
        if (shared := layout.shared_copies) is not None:
            outs.append(
                self._prefix_statistics.attend(_as_sequences(call, shared.prefixes_GP), shared.prefix_lengths_G)
            )
            endings_call = _as_sequences(call, shared.endings_RT, shared.prefixes_GP[shared.group_R])
            prefix_tokens = shared.prefixes_GP.shape[1]
            outs.append(self._ending_statistics.attend(endings_call, shared.ending_lengths_R, prefix_tokens))
        if (single := layout.single_copies) is not None:
            outs.append(self._single_statistics.attend(_as_sequences(call, single.tokens_RT), single.lengths_R))
        flat_MHD = torch.cat([out.transpose(1, 2).flatten(0, 1) for out in outs])
        return flat_MHD[layout.flat_index_N].transpose(0, 1)[None]

    def on_outputs(self, site: AttentionSite, outputs_1NHD: Tensor) -> Tensor:
        """Score the heads of a layer for each sequence, and replace the outputs of those ablated. Raise HeadsDiffer if
        they differ between sequences that share a copy of the prefix.
        """
        layout = self._layout(outputs_1NHD.device)
        ablated_RH = self._ablated_heads(site, outputs_1NHD, layout)
        if ablated_RH.is_cpu or layout.shared_copies is not None:
            ablated_on_cpu = ablated_RH.cpu()  # The one time in a layer that a GPU is waited for.
            self._raise_if_heads_differ(site.layer, ablated_on_cpu)
            if not bool(ablated_on_cpu.any()):
                return outputs_1NHD
        ablated_RH = ablated_RH.to(outputs_1NHD.device, non_blocking=True)
        self._count(ablated_RH)
        # Each token as a sequence of its own.
        return self._replacer(site, outputs_1NHD.transpose(0, 1), ablated_RH[layout.sequence_N]).transpose(0, 1)

    def _raise_if_heads_differ(self, layer: int, ablated_RH: Tensor) -> None:
        for group in self._row.groups:
            if bool((ablated_RH[list(group)] != ablated_RH[group[0]]).any()):
                raise HeadsDiffer(layer, ablated_RH)

    def _count(self, ablated_RH: Tensor) -> None:
        ablated_count_R = ablated_RH.sum(1)
        counts = self._ablated_counts.get(ablated_count_R.device)
        self._ablated_counts[ablated_count_R.device] = ablated_count_R if counts is None else counts + ablated_count_R

    def _ablated_heads(self, site: AttentionSite, outputs_1NHD: Tensor, layout: _Layout) -> Tensor:
        """Return the ablated heads of each sequence, bool (R, H): on the CPU if no score decides."""
        if self._score_name is None:
            return torch.stack([ablation.heads_at(site, None) for ablation in self._ablations])[self._ablation_index_R]
        scores_RH = self._scores(self._score_name, site, outputs_1NHD, layout)
        ablated_RH = torch.zeros_like(scores_RH, dtype=torch.bool)
        for number, ablation in enumerate(self._ablations):
            by_ablation = ablation.heads_at(site, scores_RH).to(scores_RH.device, non_blocking=True)
            ablated_RH = torch.where((layout.ablation_index_R == number)[:, None], by_ablation, ablated_RH)
        return ablated_RH

    def _scores(self, name: str, site: AttentionSite, outputs_1NHD: Tensor, layout: _Layout) -> Tensor:
        """Return the scores of a layer's heads in each sequence, (R, H)."""
        outputs_NHD = outputs_1NHD[0]
        scores: list[Tensor] = []
        if (shared := layout.shared_copies) is not None:
            group_values = self._prefix_statistics.layer_statistics(
                site, outputs_NHD[shared.prefixes_GP], shared.prefix_lengths_G
            )
            prefix_values = {statistic: values[shared.group_R] for statistic, values in group_values.items()}
            ending_values = self._ending_statistics.layer_statistics(
                site, outputs_NHD[shared.endings_RT], shared.ending_lengths_R
            )
            prefix_tokens = shared.prefixes_GP.shape[1]
            scores.append(score(_joined(prefix_values, prefix_tokens, ending_values, shared.ending_lengths_R), name))
        if (single := layout.single_copies) is not None:
            values = self._single_statistics.layer_statistics(site, outputs_NHD[single.tokens_RT], single.lengths_R)
            scores.append(score(values, name))
        return torch.cat(scores)[layout.score_index_R]

    def _layout(self, device: torch.device) -> _Layout:
        if device not in self._layouts:
            self._layouts[device] = _Layout.of(self._row, self._ablation_index_R, device)
        return self._layouts[device]


def _statistics_of(lm: LoadedModel, ablations: Iterable[LayerwiseAblation]) -> ScoreStatistics:
    """Return the statistics of the score that decides, none if heads are fixed; raise if there are several scores."""
    scores = {ablation.scored_by for ablation in ablations if ablation.scored_by is not None}
    if len(scores) > 1:
        names = sorted(f"{name}{'' if widths == MassWidths() else f' with {widths}'}" for name, widths in scores)
        raise InterventionError(f"scores in a shared row: {', '.join(names)} (limit 1). Use one score")
    return ScoreStatistics(lm, *scores.pop()) if scores else ScoreStatistics(lm, None)


class _SharedCopies(NamedTuple):
    """Groups of several endings that share a copy of the prefix. R counts the endings of all groups.

    Attributes:
        prefixes_GP: Indices of the copies' tokens.
        prefix_lengths_G: Their lengths.
        group_R: The group of each ending.
        endings_RT: Indices of the endings' tokens, padded with the last one.
        ending_lengths_R: Tokens of each ending.
    """

    prefixes_GP: Tensor
    prefix_lengths_G: Tensor
    group_R: Tensor
    endings_RT: Tensor
    ending_lengths_R: Tensor


class _SingleCopies(NamedTuple):
    """Sequences that have a copy of the prefix to themselves: indices of their tokens, prefix included, padded with the
    last one, and their lengths.
    """

    tokens_RT: Tensor
    lengths_R: Tensor


class _Layout(NamedTuple):
    """Where the sequences of a row are, copied to a device once.

    A prefix p of 2 tokens and the endings a of 2 tokens and b of 1 token, in one group and as two groups::

        index in the row           0   1   2   3   4          0   1   2   3   4   5   6
        token                      p0  p1  a0  a1  b0         p0  p1  a0  a1  p0  p1  b0

        shared_copies.prefixes_GP  [[0, 1]]                   (shared_copies is None)
        shared_copies.endings_RT   [[2, 3], [4, 4]]
        single_copies.tokens_RT    (single_copies is None)    [[0, 1, 2, 3], [4, 5, 6, 6]]
        flattened                  p0  p1  a0  a1  b0  b0     p0  p1  a0  a1  p0  p1  b0  b0
        flat_index_N               [0, 1, 2, 3, 4]            [0, 1, 2, 3, 4, 5, 6]
        sequence_N                 [0, 0, 0, 0, 1]            [0, 0, 0, 0, 1, 1, 1]
        score_index_R              [0, 1]                     [0, 1]

    Attributes:
        shared_copies: None if no endings share a copy of the prefix.
        single_copies: None if all do.
        flat_index_N: Index of each token of the row in the flattened tokens of the shared copies, of their endings and
            of the single copies, in this order, padding included.
        sequence_N: A sequence that each token belongs to: of a shared copy, the first one.
        score_index_R: Index of each sequence in the endings of shared copies, followed by those of single copies.
        ablation_index_R: Number of each sequence's ablation.
    """

    shared_copies: _SharedCopies | None
    single_copies: _SingleCopies | None
    flat_index_N: Tensor
    sequence_N: Tensor
    score_index_R: Tensor
    ablation_index_R: Tensor

    @classmethod
    def of(cls, row: SharedRow, ablation_index_R: Tensor, device: torch.device) -> _Layout:
        """Return the layout of a row, with the number of each sequence's ablation."""
        starts = dict(zip(row.groups, row.prefix_starts, strict=True))
        shared = [group for group in row.groups if len(group) > 1]
        endings = [index for group in shared for index in group]
        single = [group[0] for group in row.groups if len(group) == 1]
        shared_copies: _SharedCopies | None = None
        single_copies: _SingleCopies | None = None
        # Indices of tokens, which of them are no padding, and the sequence of each line.
        tables: list[tuple[Tensor, Tensor, list[int]]] = []
        if shared:
            prefix_lengths_G = torch.full((len(shared),), len(row.prefix))
            prefixes_GP, is_prefix_GP = _token_indices([starts[group] for group in shared], prefix_lengths_G)
            ending_lengths_R = row.ending_lengths[endings]
            endings_RT, is_ending_RT = _token_indices([row.ending_starts[index] for index in endings], ending_lengths_R)
            tables.append((prefixes_GP, is_prefix_GP, [group[0] for group in shared]))
            tables.append((endings_RT, is_ending_RT, endings))
            group_R = torch.tensor([number for number, group in enumerate(shared) for _ in group])
            shared_copies = _SharedCopies(
                prefixes_GP.to(device),
                prefix_lengths_G.to(device),
                group_R.to(device),
                endings_RT.to(device),
                ending_lengths_R.to(device),
            )
        if single:
            lengths_R = len(row.prefix) + row.ending_lengths[single]
            tokens_RT, is_token_RT = _token_indices([starts[(index,)] for index in single], lengths_R)
            tables.append((tokens_RT, is_token_RT, single))
            single_copies = _SingleCopies(tokens_RT.to(device), lengths_R.to(device))
        flat_index_N = torch.empty(len(row), dtype=torch.long)
        sequence_N = torch.empty(len(row), dtype=torch.long)
        flat_tokens = 0  # of the tables before
        for indices, is_token, sequences in tables:
            flat_index = flat_tokens + torch.arange(indices.numel()).view_as(indices)
            flat_index_N[indices[is_token]] = flat_index[is_token]
            sequence_N[indices[is_token]] = torch.tensor(sequences)[:, None].expand_as(indices)[is_token]
            flat_tokens += indices.numel()
        score_index_R = torch.tensor([*endings, *single]).argsort()
        return cls(
            shared_copies,
            single_copies,
            flat_index_N=flat_index_N.to(device),
            sequence_N=sequence_N.to(device),
            score_index_R=score_index_R.to(device),
            ablation_index_R=ablation_index_R.to(device),
        )


def _token_indices(starts: Sequence[int], lengths_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return indices (R, T) of consecutive tokens, padded with the last one, and a mask that is False at padding."""
    step = torch.arange(int(lengths_R.max())).expand(len(starts), -1)
    last = lengths_R[:, None] - 1
    return torch.tensor(starts)[:, None] + step.minimum(last), step <= last


def _as_sequences(call: ScoredCall, tokens_RT: Tensor, before_RP: Tensor | None = None) -> ScoredCall:
    """Return the queries of these tokens (indices) as separate sequences, each after the keys of ``before_RP``.
    Causality and window replace the model's mask, which treats the row as one sequence.
    """
    keys_RS = tokens_RT if before_RP is None else torch.cat([before_RP, tokens_RT], 1)

    def select(x_1HND: Tensor, tokens: Tensor) -> Tensor:
        return x_1HND[0][:, tokens].transpose(0, 1)

    sinks = call.sinks_BHN
    return replace(
        call,
        query_BHND=select(call.query_BHND, tokens_RT),
        key_BKSD=select(call.key_BKSD, keys_RS),
        value_BKSD=select(call.value_BKSD, keys_RS),
        causal=True,
        mask=None,
        window=call.sliding_window,
        sinks_BHN=sinks if sinks is None or sinks.shape[2] == 1 else select(sinks, tokens_RT),
    )


def _joined(
    prefix_values: Mapping[str, Tensor],
    prefix_tokens: int,
    ending_values: Mapping[str, Tensor],
    ending_lengths_R: Tensor,
) -> dict[str, Tensor]:
    """Return statistics of whole sequences from those of their prefixes and endings, (R, H) each."""
    prefix_share = (prefix_tokens / (prefix_tokens + ending_lengths_R.double()))[:, None]
    joined = {}
    for name, values in ending_values.items():
        if JOINS[name] == "last":
            joined[name] = values
        elif JOINS[name] == "first":
            joined[name] = prefix_values[name]
        else:
            assert JOINS[name] == "mean", f"{name} of a whole sequence needs the whole sequence"
            mean = prefix_share * prefix_values[name].double() + (1.0 - prefix_share) * values.double()
            joined[name] = mean.float()
    return joined


V = TypeVar("V")


class SharedRowResult(NamedTuple, Generic[V]):
    """The result of ``forward`` for some sequences of a shared row, the row in which they were read, and the share of
    heads ablated in each.
    """

    sequences: list[int]
    row: SharedRow
    ablated_shares: list[float]
    value: V


def read_shared_row(
    blocks: Blocks,
    ablations: LayerwiseAblation | Sequence[LayerwiseAblation],
    row: SharedRow,
    forward: Callable[[SharedRow, list[int]], V],
    *,
    most_tokens: float = math.inf,
    pass_cost: int = 0,
) -> Iterator[SharedRowResult[V]]:
    """Read the sequences of a shared row with heads ablated; results contain every sequence once. A row of a prefix and
    endings a, b and c, of which c has other ablated heads, gives one result, for ``sequences`` [0, 1, 2], whose ``row``
    has the groups ((0, 1), (2,)).

    Args:
        blocks: The blocks of a model that `can_share_rows`.
        ablations: One ablation for all sequences, or one for each of them.
        forward: Runs a pass over `SharedRow.inputs`, without a KV cache. It takes the row and the indices of its
            sequences, and is called again for rows with more copies of the prefix if the ablated heads differ.
        most_tokens: Limit of a pass, in tokens. If the copies exceed it, the row is cut.
        pass_cost: Cost of one more pass, in tokens. Where sequences part, only those that save more by sharing the
            prefix in the layers left go on sharing it: each further parting costs a pass.
    """
    lm = blocks.lm
    lengths = (len(row.prefix) + row.ending_lengths).tolist()
    lm.rope_lengths.check(max(lengths), lengths)
    if isinstance(ablations, LayerwiseAblation):
        ablations = [ablations] * len(row.endings)
    if len(ablations) != len(row.endings):
        raise InterventionError(f"{len(ablations)} ablations for {len(row.endings)} sequences. Pass one for each")
    for ablation in set(ablations):
        lm.grid.check(ablation.fixed_heads or ())
    statistics = _statistics_of(lm, ablations)
    zeros_R = torch.zeros(len(row.endings), dtype=torch.long)
    pending_passes = [_PendingPass(list(range(len(row.endings))), row, 0, None, zeros_R)]
    while pending_passes:
        pending = pending_passes.pop()
        row_hooks = SharedRowHooks(lm, [ablations[index] for index in pending.sequences], pending.row, statistics)
        try:
            with pending.hooked(blocks, row_hooks):
                value = forward(pending.row, pending.sequences)
        except HeadsDiffer as stop:
            share_of_layers_left = 1 - stop.layer / len(blocks.all)
            groups = pending.equal_groups(stop.ablated_RH, pass_cost / share_of_layers_left)
            pending_passes += pending.resumed_at(stop.layer, groups, row_hooks, most_tokens)
        else:
            shares = ((pending.ablated_count_R + row_hooks.ablated_count_R).double() / lm.grid.total_heads).tolist()
            yield SharedRowResult(pending.sequences, pending.row, shares, value)


@dataclass(frozen=True)
class _PendingPass:
    """Sequences read in one row from a layer on, whose input is ``hidden`` (1, N, E); None starts at the embedding.
    ``ablated_count_R`` counts the heads ablated in each below the layer.
    """

    sequences: list[int]
    row: SharedRow
    layer: int
    hidden: Tensor | None
    ablated_count_R: Tensor

    @contextmanager
    def hooked(self, blocks: Blocks, row_hooks: SharedRowHooks) -> Iterator[None]:
        """Let a forward pass in this context start at the layer, with the hooks open; they raise HeadsDiffer where it
        stops.
        """
        with ExitStack() as hooks:
            if self.hidden is not None:
                hooks.enter_context(resuming_at(blocks, self.layer, self.hidden))
            for block in blocks.all[self.layer :]:
                hooks.enter_context(block.watched(row_hooks.on_layer_input))
            hooks.enter_context(attention_hook(blocks.lm, row_hooks.on_attention))
            hooks.enter_context(output_hook(blocks.lm, row_hooks.on_outputs))
            yield

    def equal_groups(self, ablated_RH: Tensor, least_saved: float) -> list[list[int]]:
        """Return groups of sequences with equal ablated heads. A group is kept together if sharing the prefix saves
        more than ``least_saved`` tokens; otherwise each of its sequences is a group.
        """
        groups: list[list[int]] = []
        for group in self.row.groups:
            by_heads: dict[bytes, list[int]] = {}
            for index in group:
                by_heads.setdefault(ablated_RH[index].numpy().tobytes(), []).append(index)
            for equal_group in by_heads.values():
                saved_tokens = (len(equal_group) - 1) * len(self.row.prefix)
                groups += [equal_group] if saved_tokens > least_saved else [[index] for index in equal_group]
        return groups

    def resumed_at(
        self, layer: int, groups: Sequence[list[int]], row_hooks: SharedRowHooks, most_tokens: float
    ) -> list[_PendingPass]:
        """Return the passes that resume at a layer with these groups, in rows of at most ``most_tokens`` tokens;
        ``row_hooks`` are those of the pass that stopped in this layer.
        """
        groups_of_rows: list[list[list[int]]] = []
        row_tokens = 0
        for group in groups:
            group_tokens = len(self.row.prefix) + int(self.row.ending_lengths[group].sum())
            if not groups_of_rows or row_tokens + group_tokens > most_tokens:
                groups_of_rows.append([])
                row_tokens = 0
            groups_of_rows[-1].append(group)
            row_tokens += group_tokens
        hidden, ablated_count_R = row_hooks.layer_input, self.ablated_count_R + row_hooks.ablated_count_R
        assert hidden is not None
        pending_passes: list[_PendingPass] = []
        for row_groups in groups_of_rows:
            row, token_indices = self.row.regrouped(row_groups)
            kept = sorted(index for group in row_groups for index in group)
            sequences = [self.sequences[index] for index in kept]
            row_hidden = hidden[:, token_indices.to(hidden.device)]
            pending_passes.append(_PendingPass(sequences, row, layer, row_hidden, ablated_count_R[kept]))
        return pending_passes


#: Tokens of the row that checks a model.
_CHECKED_PREFIX, _CHECKED_ENDING = 9, 5


@torch.no_grad()
def can_share_rows(lm: LoadedModel) -> bool:
    """Return True if shared rows reproduce the hidden states of whole sequences.

    The attention interface must receive queries, keys and windows, passes must resume at each block, and only attention
    may mix tokens, which short rows show whose sequences differ in their ablated heads.
    """
    grid = lm.grid
    hooked = all(site.by_interface and site.causal for site in grid.sites) and grid.implementation == IMPLEMENTATION
    if not hooked or not shares_prefixes(lm) or "position_ids" not in inspect.signature(lm.model.forward).parameters:
        return False
    try:
        blocks = find_blocks(lm)
        # A mask of a middle head in one of three sequences. A rule would depend on rounding if its threshold were
        # close to a score.
        middle = grid.sites[len(grid.sites) // 2].layer
        masks = (HeadMask([]), HeadMask([(middle, 0)]), HeadMask([]))
        return (
            not cannot_resume(blocks)
            and _shared_rows_are_exact(blocks, (_IDLE, _IDLE, _IDLE))
            and _shared_rows_are_exact(blocks, masks)
        )
    except UnsupportedModelError:
        return False


#: A rule that ablates nothing but measures attention weights.
_IDLE = HeadRule("entropy_ln", -1.0)


def _shared_rows_are_exact(blocks: Blocks, ablations: Sequence[LayerwiseAblation]) -> bool:
    """Return True if a row with one ablation for each sequence gives the hidden states of whole sequences."""
    lm = blocks.lm
    generator = torch.Generator().manual_seed(0)
    tokens = _CHECKED_PREFIX + len(ablations) * _CHECKED_ENDING
    ids = torch.randint(min(lm.vocab_size, 1000), (tokens,), generator=generator).tolist()
    ending_starts = range(_CHECKED_PREFIX, tokens, _CHECKED_ENDING)
    endings = tuple(tuple(ids[start : start + _CHECKED_ENDING]) for start in ending_starts)
    row = SharedRow(tuple(ids[:_CHECKED_PREFIX]), endings)

    def forward(row: SharedRow, _: object) -> Tensor:
        hidden_BNE: Tensor = run_forward(lm.model, row.inputs(lm.device))[0]
        return hidden_BNE[0]

    for result in read_shared_row(blocks, ablations, row, forward):
        for index, start in zip(result.sequences, result.row.ending_starts, strict=True):
            ending = row.endings[index]
            whole_ids = torch.tensor([[*row.prefix, *ending]], device=lm.device)
            with intervene(lm, ablations[index]):
                whole: Tensor = run_forward(lm.model, {"input_ids": whole_ids})[0][0, len(row.prefix) :]
            if not nearly_equal(result.value[start : start + len(ending)], whole):
                return False
    return True
