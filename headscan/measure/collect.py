"""Every statistic of every head, from one pass over a batch.

Shapes: B sequences, N tokens (padded on the right), L layers, H query heads of the widest layer, D width of a head's
output.
"""

from __future__ import annotations

import inspect
import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headscan.attention.calls import AttentionCall
from headscan.attention.hooks import attention_hook, output_hook
from headscan.catalog import PROFILES, SCORES, STATISTICS, MassWidths, check_statistics
from headscan.errors import NamedValues, NotFiniteError, SequenceError, UnsupportedModelError, check_type
from headscan.grid import AttentionSite, HeadGrid
from headscan.models.forward_inputs import batch_kwargs, on_cpu, real_tokens, run_forward
from headscan.models.loaded_model import LoadedModel, check_loaded
from headscan.models.token_batches import PADDING, integers, pad
from headscan.statistics.norm_statistics import ProjectionFactors
from headscan.statistics.registry import OUTPUT_STATISTICS, key_masks, needs_projection, output_statistics, undefined
from headscan.statistics.weight_statistics import AttentionPath, AttentionRequest

#: Token ids (B, N), or B texts or lists of ids of any lengths.
TokenIds = Tensor | np.ndarray | Sequence[str] | Sequence[Sequence[int]]

#: Tokens that a tokenizer adds to a text, at most.
_MOST_ADDED = 4


def token_ids(
    lm: LoadedModel, inputs: TokenIds, lengths: Tensor | Sequence[int] | None
) -> tuple[Tensor, Tensor | Sequence[int] | None]:
    """Return token ids (B, N), padded on the right, and lengths (B,); texts get the model's own special tokens."""
    if isinstance(inputs, str):
        raise SequenceError(f"input_ids is one text: {inputs[:20]!r}. Pass a list of texts")
    if isinstance(inputs, np.ndarray) and inputs.dtype.kind in "iu":
        inputs = torch.from_numpy(inputs.astype(np.int64, copy=False))
    if isinstance(inputs, Tensor):
        return inputs, lengths
    kinds = (str, Sequence, Tensor, np.ndarray)
    if not isinstance(inputs, Sequence) or not inputs or not all(isinstance(each, kinds) for each in inputs):
        raise SequenceError(
            "input_ids is no integer array of shape (sequences, tokens). Pass torch.tensor(ids) or a list of texts"
        )
    if lengths is not None:
        raise SequenceError("lengths are given next to texts or lists, which have their own. Leave out lengths")
    sequences: list[list[int]] = []
    for index, text in enumerate(inputs):
        ids = lm.require_tokenizer()(text)["input_ids"] if isinstance(text, str) else _listed(index, text)
        ids_of_text = ids
        if isinstance(text, str) and len(ids) <= _MOST_ADDED:
            ids_of_text = lm.require_tokenizer()(text, add_special_tokens=False)["input_ids"]
        if not ids_of_text:
            raise SequenceError(f"sequence {index} has no token of its own: {text!r}. Leave it out")
        sequences.append(ids)
    return pad(sequences)


def _listed(index: int, ids: Any) -> list[int]:
    """Return a sequence of token ids as a list."""
    listed = np.asarray([] if isinstance(ids, bytes) else ids)
    if listed.ndim == 1 and (listed.dtype.kind in "iu" or not len(ids)):
        return listed.tolist()
    raise SequenceError(
        f"sequence {index} is neither a text nor a list of token ids: {reprlib.repr(ids)}. Pass the ids of a pair of "
        "texts, and its types as token_type_ids"
    )


def find_nonfinite(
    grid: HeadGrid, values: Mapping[str, Tensor], lengths: Tensor, key_lengths: Tensor
) -> dict[str, Tensor]:
    """Return where statistics (B, L, H) and profiles (B, L, H, bins) are unexpectedly not finite: bool (B, L, H)."""
    exists_LH = torch.zeros(grid.shape, dtype=torch.bool)
    for site in grid.sites:
        exists_LH[site.layer, : site.num_attention_heads] = True
    undefined_B = undefined(values.keys(), lengths, key_lengths, cross=grid.reads_encoder)
    nonfinite = {}
    for name, statistic in values.items():
        finite_BLH = statistic.isfinite() if statistic.ndim == 3 else statistic.isfinite().all(-1)
        nonfinite[name] = ~finite_BLH & exists_LH
        if name in undefined_B:
            nonfinite[name] &= ~undefined_B[name][:, None, None]
    return nonfinite


def first_nonfinite(nonfinite: Mapping[str, Tensor]) -> tuple[str, int, int] | None:
    """Return name, layer and sequence of the lowest marked layer, or None; later layers compute with its numbers."""
    if not nonfinite:
        return None
    in_layer_BL = torch.stack([marks_BLH.any(2) for marks_BLH in nonfinite.values()]).any(0)
    if not in_layer_BL.any():
        return None
    layer = int(in_layer_BL.any(0).nonzero()[0])
    sequence = int(in_layer_BL[:, layer].nonzero()[0])
    name = next(name for name, marks_BLH in nonfinite.items() if marks_BLH[sequence, layer].any())
    return name, layer, sequence


def collect(
    lm: LoadedModel,
    input_ids: TokenIds,
    lengths: Tensor | Sequence[int] | None = None,
    *,
    statistics: Iterable[str] | None = None,
    widths: MassWidths | None = None,
    path: AttentionPath = "auto",
    keep_nonfinite: bool = False,
    decoder_input_ids: TokenIds | None = None,
    decoder_lengths: Tensor | Sequence[int] | None = None,
    token_type_ids: Tensor | None = None,
) -> dict[str, Tensor]:
    """Measure every attention head on a batch of sequences.

    Args:
        lm: A model from `headscan.load`; `LoadedModel.at` chooses the site of an encoder-decoder.
        input_ids: Token ids (B, N), padded on the right with any id, as a tensor or NumPy array; or B texts, or B
            lists of ids.
        lengths: Real tokens of each sequence (B,); None means all N. Texts and lists have their own.
        statistics: Names of statistics and profiles from the catalogue; None measures the fast panel
            (`headscan.catalog.panel_names` lists a panel).
        widths: Widths of sink and recent mass; None uses the defaults.
        path: ``auto``, ``fused`` or ``blockwise`` attention; all give the same statistics.
        keep_nonfinite: Return NaN and infinite statistics instead of raising.
        decoder_input_ids: Token ids (B, M) or texts of the decoder; None uses ``input_ids``. Encoder-decoders only.
        decoder_lengths: Real tokens of the decoder's sequences (B,); None means all M.
        token_type_ids: Types of the tokens (B, N), which tell the two texts of a pair apart; None uses the model's
            default, one text.

    Returns:
        For each statistic float32 (B, L, H), for each profile (B, L, H, bins), on the CPU. NaN where a layer lacks the
        head, and where the statistic is undefined.

    Raises:
        SequenceError: Invalid ids or lengths, or sequences that need different rotary frequencies.
        UnsupportedModelError: The model is compiled or in train mode.
        UnknownNameError: A name is not in the catalogue.
        NotFiniteError: A statistic is NaN or infinite.
    """
    wanted = check_statistics(statistics)
    check_type("widths", widths, MassWidths | None, "a MassWidths", SequenceError)
    model_inputs = _ModelInputs.checked(lm, input_ids, lengths, decoder_input_ids, decoder_lengths, token_type_ids)
    collector = _Collector(lm, model_inputs, wanted, widths or MassWidths(), path, keep_nonfinite)
    with torch.no_grad(), ExitStack() as hooks:
        if wanted - OUTPUT_STATISTICS.keys():
            hooks.enter_context(attention_hook(lm, collector.on_attention))
        if wanted & OUTPUT_STATISTICS.keys():
            hooks.enter_context(output_hook(lm, collector.on_outputs))
        run_forward(lm.model, model_inputs.inputs, model_inputs.for_hooks)
    advice = dict.fromkeys((*STATISTICS, *PROFILES), "Name it in the argument statistics of collect")
    advice |= dict.fromkeys(SCORES.keys() - advice, "Call headscan.score, which derives scores from statistics")
    return NamedValues("statistic", collector.stacked(), advice)


@dataclass(frozen=True)
class _ModelInputs:
    """A checked batch on the model's input device: real queries and keys of the measured sites (B,), tokens of the keys
    (B, S). ``for_hooks`` has padding masks that the model itself does not need: a causal decoder is right without them,
    but a rule that is open around it reads them, because it must not count padding.
    """

    inputs: dict[str, Tensor]
    for_hooks: dict[str, Tensor]
    lengths: Tensor
    key_lengths: Tensor
    key_ids: Tensor
    real_keys: Tensor | None = None

    @classmethod
    def checked(
        cls,
        lm: LoadedModel,
        input_ids: TokenIds,
        lengths: Tensor | Sequence[int] | None,
        decoder_input_ids: TokenIds | None,
        decoder_lengths: Tensor | Sequence[int] | None,
        token_type_ids: Tensor | None,
    ) -> _ModelInputs:
        ids, lengths = check_ids(lm, input_ids, lengths)
        types = {} if token_type_ids is None else {"token_type_ids": _checked_types(lm, ids, token_type_ids)}
        causal = all(site.causal for site in lm.grid.sites)
        if decoder_lengths is not None and decoder_input_ids is None:
            raise SequenceError("decoder_lengths without decoder_input_ids. Pass both or neither")
        if not lm.is_encoder_decoder:
            if decoder_input_ids is not None:
                raise SequenceError(f"decoder_input_ids for {lm.source}, which is not an encoder-decoder. Omit them")
            inputs = batch_kwargs(ids, lengths, causal=causal) | types
            for_hooks = {"attention_mask": _mask(ids, lengths)} if causal else {}
            return cls(inputs, for_hooks, lengths, lengths, ids)
        if decoder_input_ids is None:
            decoder_ids, real_decoder_lengths = ids, lengths
        else:
            decoder_ids, real_decoder_lengths = check_ids(lm, decoder_input_ids, decoder_lengths, decoder=True)
            if len(decoder_ids) != len(ids):
                raise SequenceError(
                    f"batch sizes of encoder and decoder differ: {len(ids)}, {len(decoder_ids)}. Pass equal ones"
                )
        inputs = batch_kwargs(ids, lengths, causal=False, decoder_input_ids=decoder_ids)
        for_hooks = {"decoder_attention_mask": _mask(decoder_ids, real_decoder_lengths)}
        if lm.grid.kind == "encoder":
            return cls(inputs, for_hooks, lengths, lengths, ids)
        if lm.grid.kind == "cross":
            return cls(inputs, for_hooks, real_decoder_lengths, lengths, ids)
        if lm.grid.kind == "merged":
            real_sides = real_tokens(real_decoder_lengths, decoder_ids.shape[1]), real_tokens(lengths, ids.shape[1])
            key_ids, real_keys = torch.cat([decoder_ids, ids], 1), torch.cat(real_sides, 1)
            return cls(inputs, for_hooks, real_decoder_lengths, real_keys.sum(1), key_ids, real_keys)
        return cls(inputs, for_hooks, real_decoder_lengths, real_decoder_lengths, decoder_ids)


def _checked_types(lm: LoadedModel, ids: Tensor, token_type_ids: Tensor) -> Tensor:
    """Return token types as wide as ids (B, N), on their device."""
    if "token_type_ids" not in inspect.signature(lm.model.forward).parameters:
        raise SequenceError(f"token_type_ids for {lm.source}, whose tokens have no types. Leave them out")
    types = integers("token_type_ids", token_type_ids)
    if types.ndim != 2 or len(types) != len(ids) or types.shape[1] < ids.shape[1] or not _holds_integers(types):
        raise SequenceError(
            f"token_type_ids has shape {tuple(types.shape)} and dtype {types.dtype}. Pass integers of the shape of "
            "input_ids"
        )
    return types[:, : ids.shape[1]].to(ids.device)


def _mask(ids: Tensor, lengths: Tensor) -> Tensor:
    return real_tokens(lengths, ids.shape[1]).long()


def check_ids(
    lm: LoadedModel, input_ids: TokenIds, lengths: Tensor | Sequence[int] | None, *, decoder: bool = False
) -> tuple[Tensor, Tensor]:
    """Return token ids (B, N), as wide as the longest sequence, and lengths (B,) on the model's input device. With
    ``decoder``, the decoder of an encoder-decoder reads them.
    """
    check_loaded(lm)
    padded_here = not isinstance(input_ids, Tensor | np.ndarray)
    input_ids, lengths = token_ids(lm, input_ids, lengths)
    if not _holds_integers(input_ids):
        raise SequenceError(
            f"input_ids is not an integer tensor: it has the dtype {input_ids.dtype}. Pass torch.tensor(ids) of shape "
            "(sequences, tokens)"
        )
    input_ids = input_ids.long()  # embeddings accept int32 and int64 only
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise SequenceError(f"input_ids has shape {tuple(input_ids.shape)}. Pass (sequences, tokens), both at least 1")
    B, N = input_ids.shape
    lengths = torch.full((B,), N) if lengths is None else integers("lengths", lengths)
    if lengths.shape != (B,) or not _holds_integers(lengths):
        raise SequenceError(
            f"lengths has shape {tuple(lengths.shape)} and dtype {lengths.dtype}. Pass {B} integers, one per sequence"
        )
    lengths = lengths.long()
    if int(lengths.min()) < 1 or int(lengths.max()) > N:
        raise SequenceError(
            f"lengths are out of range: {int(lengths.min())} to {int(lengths.max())} (limit 1 to {N}). Correct them"
        )
    if not padded_here:
        refuse_left_padding(lm, input_ids, lengths, decoder=decoder)
    longest = int(lengths.max())
    if not lm.keeps_padding:
        input_ids = input_ids[:, :longest]  # the other columns are padding in every row
    if lm.max_tokens is not None and lm.max_tokens < longest:
        raise SequenceError(
            f"sequences are too long for {lm.source}: {longest} tokens (limit {lm.max_tokens}). Shorten them"
        )
    if int(input_ids.min()) < 0 or int(input_ids.max()) >= lm.vocab_size:
        real = real_tokens(lengths.to(input_ids.device), input_ids.shape[1])
        least, most = int(input_ids[real].min()), int(input_ids[real].max())
        if least < 0 or most >= lm.vocab_size:
            raise SequenceError(
                f"token ids are out of range: {least} to {most} (limit 0 to {lm.vocab_size - 1}). "
                f"Use the tokenizer of {lm.source}"
            )
        input_ids = input_ids.where(real, PADDING)  # the model has no embedding for ids such as -100
    lm.rope_lengths.check(longest, lengths.tolist())
    return input_ids.to(lm.device), lengths.to(lm.device)


def refuse_left_padding(lm: LoadedModel, ids: Tensor, lengths: Tensor, *, decoder: bool = False) -> None:
    """Raise if a sequence of a batch (B, N) with lengths (B,) is padded on the left: it begins with as many padding ids
    as it has tokens to spare, and ends with tokens. A text that begins with padding ids itself has to be padded on the
    right by the same id, by `PADDING` or by no id of the vocabulary. The first token of a decoder, which often is the
    padding id, does not count.
    """
    lengths = lengths.to(ids.device)
    if decoder and lm.decoder_start_id is not None and bool((ids[:, 0] == lm.decoder_start_id).all()):
        ids, lengths = ids[:, 1:], lengths - 1
    tokens = ids.shape[1]
    padded = lengths < tokens
    if not bool(padded.any()):
        return
    in_front, behind = real_tokens(tokens - lengths, tokens), ~real_tokens(lengths, tokens)
    for padding in _padding_ids(lm):
        is_padding = ids == padding
        is_no_token = is_padding | (ids == PADDING) | (ids < 0) | (ids >= lm.vocab_size)
        left = padded & (is_padding | ~in_front).all(1) & ~(is_no_token | ~behind).all(1)
        if bool(left.any()):
            row = int(left.nonzero()[0])
            raise SequenceError(
                f"sequence {row} is padded on the left: it begins with {tokens - int(lengths[row])} padding ids "
                f"({padding}) and has {int(lengths[row])} tokens. Pad on the right (tokenizer.padding_side = 'right')"
            )


def _padding_ids(lm: LoadedModel) -> set[int]:
    """Return the padding ids of a model's tokenizer and configuration."""
    holders = (lm.tokenizer, lm.model.config, lm.model.config.get_text_config(decoder=True))
    ids = (getattr(holder, "pad_token_id", None) for holder in holders)
    return {each for each in ids if isinstance(each, int)}


def _holds_integers(x: Tensor) -> bool:
    return not (x.dtype == torch.bool or x.is_floating_point() or x.is_complex())


class _Collector:
    """The statistics of all layers of one forward pass."""

    def __init__(
        self,
        lm: LoadedModel,
        model_inputs: _ModelInputs,
        wanted: frozenset[str],
        widths: MassWidths,
        path: AttentionPath,
        keep_nonfinite: bool,
    ) -> None:
        self.lm, self.model_inputs, self.wanted, self.keep_nonfinite = lm, model_inputs, wanted, keep_nonfinite
        self.lengths = model_inputs.lengths.cpu(), model_inputs.key_lengths.cpu()
        request = AttentionRequest(
            wanted - OUTPUT_STATISTICS.keys(),
            model_inputs.lengths,
            model_inputs.key_lengths,
            widths,
            path,
            key_masks(lm, model_inputs.key_ids, wanted),
            shortest=int(self.lengths[0].min()),
            real_keys=model_inputs.real_keys,
        )
        self._requests = {request.lengths.device: request}
        self.undefined = undefined(wanted, *self.lengths, cross=lm.grid.reads_encoder)
        self.factors = ProjectionFactors(lm) if needs_projection(wanted) else None
        self.measured: dict[tuple[str, int], Tensor] = {}

    def on_attention(self, site: AttentionSite, call: AttentionCall) -> Tensor:
        output, statistics = call.measure(self._request(call.device))
        self._keep(site, statistics)
        return output

    def on_outputs(self, site: AttentionSite, outputs_BNHD: Tensor) -> None:
        device = outputs_BNHD.device
        factor_HDD = None if self.factors is None else self.factors.of(site).to(device)
        over_tokens = self._request(device).over_queries
        self._keep(site, output_statistics(outputs_BNHD, over_tokens, self.wanted, factor_HDD))

    def stacked(self) -> dict[str, Tensor]:
        """Return all statistics as (B, L, H) or (B, L, H, bins)."""
        B, (L, H) = len(self.model_inputs.lengths), self.lm.grid.shape
        measured = on_cpu(self.measured)
        defined_for_all_B = torch.zeros(B, dtype=torch.bool)
        stacked: dict[str, Tensor] = {}
        for name in (*STATISTICS, *PROFILES):
            if name not in self.wanted:
                continue
            bins = (len(PROFILES[name].bins),) if name in PROFILES else ()
            no_heads = torch.full((B, H, *bins), float("nan"))
            undefined_B = self.undefined.get(name, defined_for_all_B)
            layers = [no_heads] * L
            for site in self.lm.grid.sites:
                values = measured.get((name, site.layer))
                if values is not None:
                    missing_heads = no_heads[:, site.num_attention_heads :]
                    layers[site.layer] = torch.cat([values, missing_heads], 1) if missing_heads.numel() else values
                elif not undefined_B.all():
                    raise UnsupportedModelError(
                        f"layer {site.layer} did not run, so it has no {name}. Load a model that runs all layers"
                    )
            stacked[name] = torch.stack(layers, 1)
        if not self.keep_nonfinite:
            self._refuse_nonfinite(stacked)
        return stacked

    def _refuse_nonfinite(self, stacked: dict[str, Tensor]) -> None:
        # A finite sum proves that all values are finite. Layers with fewer heads hold NaN, so their sum proves nothing.
        if all(math.isfinite(float(values.sum())) for values in stacked.values()):
            return
        first = first_nonfinite(find_nonfinite(self.lm.grid, stacked, *self.lengths))
        if first is not None:
            name, layer, sequence = first
            raise NotFiniteError(
                f"{name} is not finite: NaN or infinite in layer {layer}, sequence {sequence} of the batch. Load the "
                "model in another dtype, or pass `keep_nonfinite=True`"
            )

    def _request(self, device: torch.device) -> AttentionRequest:
        """Return the request on a device; its masks are made once for all layers there."""
        if device not in self._requests:
            self._requests[device] = next(iter(self._requests.values())).on(device)
        return self._requests[device]

    def _keep(self, site: AttentionSite, statistics: dict[str, Tensor]) -> None:
        self.measured.update({(name, site.layer): values for name, values in statistics.items()})
