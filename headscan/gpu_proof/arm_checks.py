"""Checks of ablations and partial passes on the device, against the CPU.

Models are small, random and float32, so that both devices must agree up to rounding. Cached prefixes and shared rows
are also compared in bfloat16, with whole sequences on the same device.

Shapes: B sequences, N tokens, L layers, H query heads, E width of a hidden state.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import headscan
from headscan.ablation.ablation import Ablation
from headscan.ablation.intervene import intervene
from headscan.ablation.masks import HeadMask
from headscan.ablation.random_heads import RandomHeads
from headscan.ablation.rules import HeadRule
from headscan.attention.discovery import discover
from headscan.catalog import SCORES
from headscan.gpu_proof.checks import Check, Comparer, Difference
from headscan.layers.blocks import find_blocks
from headscan.layers.layer_range_pass import cannot_resume, resuming_at
from headscan.layers.prefix_cache import read_prefix, shares_prefixes
from headscan.layers.shared_rows import SharedRow, can_share_rows, read_shared_row
from headscan.models.forward_inputs import run
from headscan.models.layout import Sharding
from headscan.models.loaded_model import LoadedModel
from headscan.partial.layer_ranges import ablation_here, open_layers
from headscan.testing.families import make_model
from headscan.testing.family import VOCABULARY

GROUP = "arms"
#: Grouped heads, windows, learned sinks, latent attention, one KV head, learned positions, no attention interface, a
#: hybrid with layers that have no heads.
_FAMILIES = ("llama", "gemma3", "gpt_oss", "deepseek_v3", "falcon-mqa", "gpt2", "gptj", "qwen3_next")
_RULES = ("entropy_ln", "output_norm_ln")
_SHARING = ("llama", "gemma3", "gpt_oss", "deepseek_v3", "gpt2")
_LENGTHS = (60, 7, 33)
#: Largest error of logits, hidden states and statistics: in float32, and the mean in bfloat16.
_SINGLE, _HALF = 1e-4, 2 * torch.finfo(torch.bfloat16).eps
#: Tokens of a shared row's prefix and endings; longer than the families' windows.
_PREFIX, _ENDINGS = 24, (7, 1, 4, 12)


def arm_checks(device: torch.device, *, small: bool) -> list[Check]:
    """Return the checks of ablations and of partial passes.

    Args:
        small: Fewer families and scores, for a CPU.
    """
    families = _FAMILIES[:1] if small else _FAMILIES
    sharing = _SHARING[:1] if small else _SHARING
    scores = list(SCORES)[::5] if small else list(SCORES)
    found = []

    def add(name: str, run_check: Any, *args: object) -> None:
        found.append(Check(GROUP, name, partial(run_check, device, *args)))

    for family in families:
        add(f"masks, random heads and rules, {family}", _check_ablations, family)
    add(f"rules by {len(scores)} scores, llama", _check_scores, scores)
    for family in sharing:
        add(f"prefixes and shared rows, {family}", _check_sharing, family)
    add("prefixes and shared rows in bfloat16", _check_sharing_in_half)
    for family in families[:2]:
        add(f"passes that begin at a layer, {family}", _check_resuming, family)
        add(f"layer ranges, {family}", _check_stages, family)
        add(f"offloaded layers, {family}", _check_offloading, family)
    add("behaviour probe, llama", _check_probe)
    return found


def _check_ablations(device: torch.device, family: str, compare: Comparer) -> Iterator[Difference]:
    """Compare logits and ablated heads in a ragged batch."""
    here, there = _pair(family, device)
    ids = _ids(len(_LENGTHS), max(_LENGTHS))
    first, last = here.grid.sites[0], here.grid.sites[-1]
    mask = HeadMask([(first.layer, 0), (first.layer, 2), (last.layer, last.num_attention_heads - 1)])
    ways: list[Ablation] = [mask, RandomHeads(0.4, seed=1)]
    ways += [HeadRule(score, _threshold(here, score, ids[:1])) for score in _RULES]
    for what in ways:
        yield from _same_pass(compare, here, there, what, ids, torch.tensor(_LENGTHS), what.label)


def _check_scores(device: torch.device, scores: Sequence[str], compare: Comparer) -> Iterator[Difference]:
    here, there = _pair("llama", device)
    ids = _ids(len(_LENGTHS), max(_LENGTHS), seed=5)
    for score in scores:
        rule = HeadRule(score, _threshold(here, score, ids[:1]))
        yield from _same_pass(compare, here, there, rule, ids, torch.tensor(_LENGTHS), score)


def _same_pass(
    compare: Comparer,
    here: LoadedModel,
    there: LoadedModel,
    what: Ablation,
    ids: Tensor,
    lengths: Tensor,
    name: str,
) -> Iterator[Difference]:
    """Compare logits of real tokens, statistics below the ablation, and ablated heads."""
    found = []
    for lm in (here, there):
        with intervene(lm, what, lengths=lengths) as record:
            logits = lm.model(input_ids=ids.to(lm.device), use_cache=False).logits
        with intervene(lm, what, lengths=lengths):
            stats = headscan.collect(lm, ids.to(lm.device), lengths)
        assert record.zeroed is not None
        found.append((logits, record.zeroed, stats))
    (expected, expected_zeroed, expected_stats), (logits, zeroed, stats) = found
    yield compare.same(f"{name}: ablated heads", zeroed, expected_zeroed)
    for row, length in enumerate(lengths.tolist()):
        yield compare.close(f"{name}: logits, {length} tokens", logits[row, :length], expected[row, :length], _SINGLE)
    for statistic, values in stats.items():
        yield compare.close(f"{name}: {statistic}", values, expected_stats[statistic], _SINGLE)


def _check_sharing(device: torch.device, family: str, compare: Comparer) -> Iterator[Difference]:
    here, there = _pair(family, device)
    yield compare.same("shares prefixes", torch.tensor(shares_prefixes(there)), torch.tensor(shares_prefixes(here)))
    yield compare.same("reads shared rows", torch.tensor(can_share_rows(there)), torch.tensor(can_share_rows(here)))
    yield from _shared_as_whole(compare, here, there, _SINGLE, mean=False)


def _check_sharing_in_half(device: torch.device, compare: Comparer) -> Iterator[Difference]:
    """Compare with whole sequences on the same device.

    In half precision devices differ by rounding.
    """
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config).eval()
    model.to(device, torch.bfloat16)
    lm = LoadedModel(model, None, discover(model), "llama")
    yield compare.same("reads shared rows", torch.tensor(can_share_rows(lm)), torch.tensor(True))
    yield from _shared_as_whole(compare, lm, lm, _HALF, mean=True)


def _shared_as_whole(
    compare: Comparer, here: LoadedModel, there: LoadedModel, bound: float, *, mean: bool
) -> Iterator[Difference]:
    """Compare hidden states of prefixes and shared rows with whole sequences."""
    row = _row()
    site = here.grid.sites[-1]
    masks = [HeadMask([]), HeadMask([(0, 0)]), HeadMask([(0, 0), (site.layer, 1)]), HeadMask([(0, 0)])]
    rule = HeadRule("output_norm_ln", _threshold(here, "output_norm_ln", torch.tensor([[*row.prefix]])))
    for mask in (masks[0], masks[2]):
        expected = [_whole(here, mask, row, index)[0] for index in range(len(row.endings))]
        for index, hidden in enumerate(_behind_prefix(there, mask, row)):
            what = f"prefix, {len(mask.heads)} heads ablated"
            yield compare.close(what, hidden, expected[index], bound, mean=mean)
    for ablated in (masks, rule):
        name = f"shared row, {'masks' if isinstance(ablated, list) else 'rule'}"
        readings = read_shared_row(find_blocks(there), ablated, row, partial(_hidden_of_row, there))
        for reading in readings:
            part, _ = row.subset(reading.sequences)
            for index, ending, start in zip(reading.sequences, part.endings, part.starts, strict=True):
                here_ablated = ablated[index] if isinstance(ablated, list) else ablated
                whole, share = _whole(here, here_ablated, row, index)
                hidden = reading.value[start : start + len(ending)]
                yield compare.close(f"{name}: hidden states", hidden, whole, bound, mean=mean)
                yield compare.close(f"{name}: ablated share", torch.tensor(reading.zeroed_share), share, 1e-6)


def _behind_prefix(lm: LoadedModel, mask: HeadMask, row: SharedRow) -> list[Tensor]:
    """Return hidden states (T, E) after a prefix cached in two parts."""
    half = len(row.prefix) // 2
    longest = max(map(len, row.endings))
    ids = torch.tensor([[*ending, *[5] * (longest - len(ending))] for ending in row.endings], device=lm.device)
    with intervene(lm, mask):
        prefix = read_prefix(lm, [row.prefix[half:]], read_prefix(lm, [row.prefix[:half]]))
        for _ in range(2):  # the second time shows whether the first one changed the prefix
            cache = prefix.continued([0] * len(ids))
            hidden = run(lm.model, {"input_ids": ids, "past_key_values": cache, "use_cache": True})[0]
    return [rows[: len(ending)] for rows, ending in zip(hidden, row.endings, strict=True)]


def _whole(lm: LoadedModel, what: Ablation, row: SharedRow, index: int) -> tuple[Tensor, Tensor]:
    """Return hidden states (T, E) and ablated share of a whole sequence."""
    ids = torch.tensor([[*row.prefix, *row.endings[index]]], device=lm.device)
    with intervene(lm, what) as record:
        hidden = run(lm.model, {"input_ids": ids})[0][0, len(row.prefix) :]
    return hidden, torch.tensor(record.zeroed_share)


def _hidden_of_row(lm: LoadedModel, part: SharedRow, _: list[int]) -> Tensor:
    hidden: Tensor = run(lm.model, part.inputs(lm.device))[0][0]
    return hidden


def _check_resuming(device: torch.device, family: str, compare: Comparer) -> Iterator[Difference]:
    here, there = _pair(family, device)
    blocks, ids = find_blocks(there), _ids(2, 40)
    yield compare.same("layers at which no pass can begin", torch.tensor(len(cannot_resume(blocks))), torch.tensor(0))
    expected = here.model(input_ids=ids, use_cache=False).logits
    with blocks.keep_inputs(range(len(blocks.all))) as kept:
        there.model(input_ids=ids.to(device), use_cache=False)
    for layer, hidden in dict(kept).items():
        with resuming_at(blocks, layer, hidden):
            logits = there.model(input_ids=ids.to(device), use_cache=False).logits
        yield compare.close(f"logits from layer {layer} on", logits, expected, _SINGLE)


def _check_stages(device: torch.device, family: str, compare: Comparer) -> Iterator[Difference]:
    """Compare a model in two layer ranges with the whole model.

    It compares statistics and logits, under a mask and under a rule.
    """
    ids, lengths = _ids(len(_LENGTHS), max(_LENGTHS)), torch.tensor(_LENGTHS)
    with tempfile.TemporaryDirectory() as folder:
        make_model(family).save_pretrained(folder)
        whole = headscan.load(folder, device="cpu")
        layers = open_layers(folder, device=str(device))
        last = whole.grid.num_layers
        for what in (HeadMask([(0, 1), (last - 1, 0)]), HeadRule("output_norm_ln", 0.95)):
            with intervene(whole, what, lengths=lengths):
                expected = headscan.collect(whole, ids, lengths)
                logits = whole.model(input_ids=ids, use_cache=False).logits
            hidden = None
            for start, stop in ((0, 1), (1, last)):
                with layers.at(start, stop) as stage, stage.running_range(hidden) as range_pass:
                    here = ablation_here(stage.lm, what)
                    with intervene(stage.lm, here, lengths=lengths):
                        found = headscan.collect(stage.lm, ids.to(device), lengths)
                        if stage.is_last:
                            ours = stage.lm.model(input_ids=ids.to(device), use_cache=False).logits
                    hidden = range_pass.hidden_out
                for name, values in found.items():
                    of_stage = (values[:, start:stop], expected[name][:, start:stop])
                    yield compare.close(f"{name}, layers {start} to {stop - 1}", *of_stage, _SINGLE)
            for row, length in enumerate(_LENGTHS):
                yield compare.close("logits", ours[row, :length], logits[row, :length], _SINGLE)


def _check_offloading(device: torch.device, family: str, compare: Comparer) -> Iterator[Difference]:
    """Compare a model that has one block on the device.

    The others are in RAM, or on disk if the device is a CPU.
    """
    index = device.index or 0
    spread = Sharding((index,), ((0, 1),), "cpu") if device.type == "cuda" else Sharding(("cpu",), ((0, 1),), "disk")
    ids, lengths = _ids(len(_LENGTHS), max(_LENGTHS)), torch.tensor(_LENGTHS)
    with tempfile.TemporaryDirectory() as folder:
        make_model(family).save_pretrained(folder)
        here, there = headscan.load(folder, device="cpu"), headscan.load(folder, device=spread)
        rules = (HeadRule("projected_output_norm_ln", 0.95), HeadRule("entropy_ln", 0.95))
        for what in (HeadMask([(0, 1), (2, 0)]), *rules):
            yield from _same_pass(compare, here, there, what, ids, lengths, what.label)


def _check_probe(device: torch.device, compare: Comparer) -> Iterator[Difference]:
    here, there = _pair("llama", device)
    wanted = ["induction_score", "duplicate_token_score", "previous_token_score"]
    expected, found = (headscan.probe(lm, wanted) for lm in (here, there))
    for name, values in found.items():
        yield compare.close(name, values, expected[name], _SINGLE)


def _pair(family: str, device: torch.device) -> tuple[LoadedModel, LoadedModel]:
    """Return the same random model on the CPU and on the device."""
    found = []
    for where in (torch.device("cpu"), device):
        model: Any = make_model(family)
        model.set_experts_implementation("eager")
        model.to(where)
        found.append(LoadedModel(model, None, discover(model), family))
    return found[0], found[1]


def _ids(sequences: int, tokens: int, seed: int = 3) -> Tensor:
    return torch.randint(5, VOCABULARY, (sequences, tokens), generator=torch.Generator().manual_seed(seed))


def _row() -> SharedRow:
    ids = _ids(1, _PREFIX + sum(_ENDINGS), seed=0)[0].split([_PREFIX, *_ENDINGS])
    prefix, *endings = (tuple(part.tolist()) for part in ids)
    return SharedRow(prefix, tuple(endings))


def _threshold(lm: LoadedModel, score: str, ids: Tensor) -> float:
    """Return a threshold that is safe from rounding.

    It is in the widest gap of the middle third of a text's scores.
    """
    scores = headscan.score(headscan.collect(lm, ids.to(lm.device)), score)
    ordered = scores[scores.isfinite()].sort().values
    central = ordered[len(ordered) // 3 : 2 * len(ordered) // 3 + 1]
    widest = int(central.diff().argmax())
    return float(central[widest : widest + 2].mean())
