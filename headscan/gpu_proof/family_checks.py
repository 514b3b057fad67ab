"""Statistics of every architecture on the device, against a CPU reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import headscan
from headscan.attention.discovery import discover
from headscan.catalog import STATISTICS, panel_names
from headscan.errors import UnsupportedModelError
from headscan.gpu_proof.checks import Check, Comparer, Difference
from headscan.models.loaded_model import LoadedModel
from headscan.testing.decoders import FAMILIES
from headscan.testing.families import ENCODER_DECODERS, ENCODERS, make_model
from headscan.testing.family import VOCABULARY
from headscan.testing.reference import reference

GROUP = "families"
#: Representative families for a short run: fused attention, blockwise attention, and an encoder-decoder.
FEW = ("llama", "gemma2-softcap", "t5")
#: Real tokens of the sequences of a batch, and of the decoder's sequences in an encoder-decoder.
_LENGTHS = (70, 1, 37)
_WIDTHS = headscan.MassWidths(sink=3, recent=16)
#: Largest error in float32 relative to the statistic's largest number; the model's activations are rounded too.
_SINGLE = 3e-5
#: Mean error in bfloat16, in units of its epsilon: most families stay below one.
_HALF = 4
#: Largest share of arg-max offsets that may differ because of near ties.
_TIES = 0.02


def family_checks(device: torch.device, *, families: Sequence[str] | None = None) -> list[Check]:
    """Return one check a family; None checks all families."""
    chosen = [*FAMILIES, *ENCODERS, *ENCODER_DECODERS] if families is None else families
    return [Check(GROUP, name, partial(_check_family, name, device)) for name in chosen]


def _check_family(name: str, device: torch.device, compare: Comparer) -> Iterator[Difference]:
    sites = ("encoder", "self", "cross") if name in ENCODER_DECODERS else ("self",)
    for site in sites:
        yield from _check_single(name, site, device, compare)
    if name in FAMILIES:
        yield from _check_half(name, device, compare)


def _check_single(name: str, site: str, device: torch.device, compare: Comparer) -> Iterator[Difference]:
    """Compare all statistics and profiles of both panels in float32."""
    model = make_model(name)
    ids, sequences = _ragged(_LENGTHS)
    decoder: dict[str, Any] = {}
    decoder_sequences = None
    lengths = _LENGTHS
    if name in ENCODER_DECODERS:
        decoder_ids, decoder_sequences = _ragged(_LENGTHS[::-1])
        decoder = {"decoder_input_ids": decoder_ids.to(device), "decoder_lengths": _LENGTHS[::-1]}
        lengths = _LENGTHS if site == "encoder" else _LENGTHS[::-1]
    expected = reference(model, name, sequences, sink=3, recent=16, site=site, decoder_sequences=decoder_sequences)
    lm = _on(device, model, name)
    if name not in ENCODERS:
        lm = lm.at(site)
    for panel in ("fast", "full"):
        found = headscan.collect(lm, ids.to(device), _LENGTHS, statistics=panel_names(panel), widths=_WIDTHS, **decoder)
        for statistic, values in found.items():
            what = f"float32 {site} {statistic}, {panel} panel"
            if statistic == "argmax_offsets":
                yield _same_profile(compare, what, values, expected[statistic])
                continue
            for row, length in enumerate(lengths):
                yield compare.close(f"{what}, {length} tokens", values[row], expected[statistic][row], _SINGLE)


def _check_half(name: str, device: torch.device, compare: Comparer) -> Iterator[Difference]:
    """Compare the fast panel in bfloat16, with fused kernels."""
    model = make_model(name, dtype=torch.bfloat16)
    ids, sequences = _ragged(_LENGTHS)
    expected = reference(model, name, sequences, sink=3, recent=16)
    fused = _runs_fused(_on(torch.device("cpu"), make_model(name), name))
    lm = _on(device, model, name)
    yield compare.same("bfloat16: fused kernels serve", torch.tensor([_runs_fused(lm)]), torch.tensor([fused]))
    found = headscan.collect(lm, ids.to(device), _LENGTHS, widths=_WIDTHS)
    bound = _HALF * torch.finfo(torch.bfloat16).eps
    for statistic, values in found.items():
        reference_values, measured = expected[statistic], values.double()
        if STATISTICS[statistic].unit != "share":  # norms and entropies differ much from head to head
            scale = reference_values.abs().clamp_min(1e-3)
            measured, reference_values = measured / scale, reference_values / scale
        yield compare.close(f"bfloat16 {statistic}", measured, reference_values, bound, mean=True, smallest=1.0)


def _on(device: torch.device, model: Any, name: str) -> LoadedModel:
    model.set_experts_implementation("eager")  # the others have kernels of their own, which are not what is checked
    model.to(device)
    return LoadedModel(model, None, discover(model), name)


def _runs_fused(lm: LoadedModel) -> bool:
    try:
        headscan.collect(lm, _ragged((5,))[0].to(lm.device), statistics=["entropy"], path="fused")
    except UnsupportedModelError:
        return False
    return True


def _same_profile(compare: Comparer, what: str, found: Tensor, expected: Tensor) -> Difference:
    """Compare profiles; near ties may change an arg-max."""
    return compare.close(what, found, expected, _TIES, mean=True, smallest=1.0)


def _ragged(lengths: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """Return random ids (B, N), and each sequence alone."""
    generator = torch.Generator().manual_seed(sum(lengths) + lengths[0])
    ids = torch.randint(2, VOCABULARY, (len(lengths), max(lengths)), generator=generator)
    return ids, [row[:length] for row, length in zip(ids, lengths, strict=True)]
