"""A model with removed heads and replaced weights, as a reversible context, its passes layer by layer, its divergence.

The model itself is not changed: the heads' outputs are zeroed, and the outputs of edited modules are corrected. So it
works on whole, sharded and offloaded models alike.

Shapes: B sequences, N tokens, M real tokens or counted predictions, E width of a hidden state, F columns of a
projection's input, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from headscan.ablation.intervention import intervene
from headscan.ablation.masks import HeadMask
from headscan.errors import UnsupportedModelError
from headscan.grid import AttentionSite, Head
from headscan.layers.blocks import Blocks, cannot_resume, find_blocks, resuming_at, running_range, short_text
from headscan.long_work import LongWork, WorkKey, hash_of
from headscan.models.forward_inputs import run_forward, without_autocast
from headscan.models.loaded_model import LoadedModel, logits_at
from headscan.pruning.calibration import Calibration, CalibrationBatch


@dataclass(frozen=True)
class Edits:
    """Removed heads, and new weights and biases of projections by parameter name; a bias may be added."""

    removed: tuple[Head, ...] = ()
    weights: Mapping[str, Tensor] = field(default_factory=dict)


NO_EDITS = Edits()


@contextmanager
def edited(lm: LoadedModel, edits: Edits) -> Iterator[None]:
    """Let a model run without heads and with new weights."""
    with ExitStack() as hooks:
        if edits.removed:
            hooks.enter_context(intervene(lm, HeadMask(edits.removed)))
        for name, weight in edits.weights.items():
            path, _, leaf = name.rpartition(".")
            module = lm.module(path)
            correction = _shift(module, weight) if leaf == "bias" else _correction(module, weight)
            hooks.callback(module.register_forward_hook(correction).remove)
        yield


def _correction(module: nn.Module, weight: Tensor) -> Any:
    """Return a hook that adds the product with the difference of the weights."""
    change_EF = turned(module, weight - read_weight(module).to(weight))

    def correct(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        return out + args[0] @ change_EF.to(args[0].device, args[0].dtype).T

    return correct


def _shift(module: nn.Module, bias: Tensor) -> Any:
    """Return a hook that adds the difference of the biases."""
    change = bias - read_bias(module, bias)
    return lambda _, __, out: out + change.to(out)


def read_bias(module: nn.Module, like: Tensor) -> Tensor:
    """Return a copy of a projection's bias, as ``like``; zeros if it has none."""
    with align_module_device(module), torch.no_grad():
        bias: Tensor | None = getattr(module, "bias", None)
        return torch.zeros_like(like) if bias is None else bias.detach().clone().to(like)


def read_weight(module: nn.Module) -> Tensor:
    """Return a copy of a projection's weight; offloaded weights are loaded for it."""
    if not isinstance(module, (nn.Linear, Conv1D)) or type(module) not in (nn.Linear, Conv1D):
        raise UnsupportedModelError(
            f"a {type(module).__name__} cannot be repaired: it is no plain matrix product. Load the model without "
            "quantisation or adapters"
        )
    with align_module_device(module), torch.no_grad():
        return module.weight.detach().clone()


def turned(module: nn.Module, weight: Tensor) -> Tensor:
    """Convert a projection's weight between the module's layout and (E, F), in either direction: a Conv1D stores the
    transpose.
    """
    return weight.T if isinstance(module, Conv1D) else weight


@dataclass
class Seen:
    """Inputs and outputs of modules in the last pass, by module name."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)


@contextmanager
def watched_modules(blocks: Blocks, paths: Iterable[str]) -> Iterator[Seen]:
    """Keep the first input and the output of modules in each pass."""
    seen = Seen()
    with ExitStack() as hooks:
        for path in paths:

            def keep(_: nn.Module, args: tuple[Any, ...], out: Any, path: str = path) -> None:
                seen.inputs[path] = args[0]
                seen.outputs[path] = out[0] if isinstance(out, tuple) else out

            hooks.callback(blocks.lm.module(path).register_forward_hook(keep).remove)
        yield seen


def through_layer(blocks: Blocks, layer: int, batch: CalibrationBatch, hidden: Tensor | None) -> Tensor:
    """Return the output (B, N, E) of one layer for its input (B, N, E); None uses the embedding, for layer 0."""
    path = f"{blocks.path}.{layer}"
    with watched_modules(blocks, [path]) as seen, running_range(blocks.all, layer, layer + 1, hidden):
        run_forward(blocks.lm.model, {"input_ids": batch.ids})
    return seen.outputs[path]


class Reached(Exception):
    """Ends a pass in a hook, because the rest of the layer is not needed."""


def into_layer(blocks: Blocks, layer: int, batch: CalibrationBatch, hidden: Tensor | None) -> None:
    """Run one layer, at most until a hook raises `Reached`; see `through_layer`."""
    with suppress(Reached), running_range(blocks.all, layer, layer + 1, hidden):
        run_forward(blocks.lm.model, {"input_ids": batch.ids})


def projection_inputs(blocks: Blocks, layer: int, batch: CalibrationBatch, hidden: Tensor | None, path: str) -> Tensor:
    """Return the input of a projection of one layer (B, N, F); what follows it in the layer does not run."""
    inputs: list[Tensor] = []

    def stop(_: nn.Module, args: tuple[Any, ...]) -> None:
        inputs[:] = [batch.by_token(args[0])]
        raise Reached

    with blocks.lm.module(path).register_forward_pre_hook(stop):
        into_layer(blocks, layer, batch, hidden)
    return inputs[0]


def entering(blocks: Blocks, batch: CalibrationBatch, layer: int = 0) -> Tensor:
    """Return the hidden states (B, N, E) that enter a layer."""
    with blocks.keep_inputs([layer]) as kept, running_range(blocks.all, 0, layer + 1):
        run_forward(blocks.lm.model, {"input_ids": batch.ids})
    return kept[layer]


def logits(lm: LoadedModel, batch: CalibrationBatch) -> Tensor:
    """Return the model's logits (M, V) of the predictions that count, float32."""
    rows, columns = (each.tolist() for each in batch.scoring_BN.nonzero(as_tuple=True))
    with without_autocast(lm.device):
        return logits_at(lm, batch.ids, rows, columns, use_cache=False).float()


#: Tokens of the short text, and largest relative difference of equal hidden states.
_TOKENS, _TOLERANCE = 8, 1e-3


@dataclass(frozen=True)
class Writer:
    """A projection whose output reaches the residual stream; not ``additive`` if a norm or a factor follows."""

    path: str
    additive: bool
    old: Tensor
    bias: Tensor


class Writers(NamedTuple):
    """The writers of a layer; None if there is none that can be repaired."""

    attention: Writer | None
    mlp: Writer | None


def find_writers(blocks: Blocks, layer: int, site: AttentionSite | None) -> Writers:
    """Find the writers of a layer from short passes. The MLP's is the last plain projection that runs, outside the
    attention, with outputs as wide as a hidden state; layers of experts have none.
    """
    ids = short_text(blocks.lm, _TOKENS)
    batch = next(Calibration(ids, torch.full((len(ids),), ids.shape[1])).batches(ids.device))
    with torch.no_grad():
        hidden = entering(blocks, batch, layer)
        ran = _order_of_projections(blocks, layer, batch, hidden)
        attention = None
        if site is not None:
            path = site.output_projection
            attention = _writer(blocks, path, _adds_to_residual(blocks, layer, batch, hidden, path))
        prefix = "" if site is None else f"{site.path}."
        width = hidden.shape[-1]
        others = [path for path, out in ran if out == width and not (prefix and path.startswith(prefix))]
        mlp = None
        if others:
            mlp = _writer(blocks, others[-1], _adds_to_output(blocks, layer, batch, hidden, others[-1]))
    return Writers(attention, mlp)


def _writer(blocks: Blocks, path: str, additive: bool) -> Writer:
    module = blocks.lm.module(path)
    old_EF = turned(module, read_weight(module))
    return Writer(path, additive, old_EF, read_bias(module, old_EF[:, 0].float()))


def _order_of_projections(blocks: Blocks, layer: int, batch: CalibrationBatch, hidden: Tensor) -> list[tuple[str, int]]:
    """Return the plain projections of a layer in the order in which they run, with the widths of their outputs."""
    ran: list[tuple[str, int]] = []
    with ExitStack() as hooks:
        for name, module in blocks.all[layer].module.named_modules():
            if type(module) in (nn.Linear, Conv1D):

                def note(_: nn.Module, __: Any, out: Tensor, path: str = f"{blocks.path}.{layer}.{name}") -> None:
                    ran.append((path, out.shape[-1]))

                hooks.callback(module.register_forward_hook(note).remove)
        through_layer(blocks, layer, batch, hidden)
    return ran


def _adds_to_residual(blocks: Blocks, layer: int, batch: CalibrationBatch, hidden: Tensor, path: str) -> bool:
    """Return True if the residual stream after the attention is the plain sum of its input and its output."""
    sums: list[Tensor] = []
    module = blocks.all[layer].module
    with ExitStack() as hooks, watched_modules(blocks, [path]) as seen:
        for name, child in module.named_children():
            if path.startswith(f"{blocks.path}.{layer}.{name}."):
                continue

            def keep(_: nn.Module, args: tuple[Any, ...]) -> None:
                sums.extend(each for each in args[:1] if isinstance(each, Tensor))

            hooks.callback(child.register_forward_pre_hook(keep).remove)
        through_layer(blocks, layer, batch, hidden)
    out = batch.by_token(seen.outputs[path])
    hidden_here = hidden.to(out.device)
    for each in sums:
        # The change of the residual stream is compared, because the output may be small next to the stream itself.
        if each.shape == out.shape and _equal(each.to(out.device).float() - hidden_here.float(), out, hidden_here):
            return True
    return _adds_to_output(blocks, layer, batch, hidden, path)


def _adds_to_output(blocks: Blocks, layer: int, batch: CalibrationBatch, hidden: Tensor, path: str) -> bool:
    """Return True if a change of a projection's output changes the layer's output as much."""
    before = through_layer(blocks, layer, batch, hidden)
    generator = torch.Generator().manual_seed(0)
    change = (torch.randn(before.shape, generator=generator) * float(before.float().std())).to(before)
    with blocks.lm.module(path).register_forward_hook(lambda _, __, out: out + change.to(out.device).view_as(out)):
        after = through_layer(blocks, layer, batch, hidden)
    return _equal(after.float() - before.float(), change, before)


def _equal(change: Tensor, expected: Tensor, stream: Tensor) -> bool:
    """Return True if two changes of the residual stream are equal, up to the rounding of the stream."""
    wide = expected.float()
    bound = max(_TOLERANCE * float(wide.norm()), 2 * torch.finfo(stream.dtype).eps * float(stream.float().norm()))
    # Rounding must not hide the change itself.
    return bound < 0.5 * float(wide.norm()) and float((change.float() - wide).norm()) <= bound


class LayerEdits(NamedTuple):
    """A model with edits from one layer on: the removed heads of that layer, and a function that returns all edits. In
    the layer they may remove heads and change the output projection. New weights exist while they are measured only,
    because those of all layers may not fit into memory.
    """

    removed: tuple[Head, ...]
    edits: Callable[[], Edits]


def _key(batch: str, layer: int, candidate: LayerEdits, below: Edits) -> WorkKey:
    return "cross-entropy of a batch without heads", batch, layer, candidate.removed, below.removed


#: Predictions that are summed over the vocabulary together: copies of all logits would need more memory and time.
ROWS = 256


class Divergence:
    """The divergence of edited models from the original, whose predictions (M, V) stay in memory, on the same texts.
    The Kullback-Leibler divergence has far less noise than a difference of losses, so a few thousand tokens are enough.
    Numbers that ``work`` knows, which must be of this model, are not measured again by `of_layers`.
    """

    def __init__(self, lm: LoadedModel, calibration: Calibration, work: LongWork | None = None) -> None:
        self._lm, self._work = lm, work or LongWork()
        self._blocks = find_blocks(lm)
        attending = {site.layer for site in lm.grid.sites}
        self._behind_attention = attending - cannot_resume(self._blocks, attending, behind_attention=True).keys()
        self._batches = list(calibration.for_logits.batches(lm.device))
        self._hashes = [hash_of(tuple(each.tolist() for each in vars(batch).values())) for batch in self._batches]
        self._expected: list[Tensor] = []
        self._entropy = 0.0
        with torch.no_grad(), self._work.steps("predictions of the whole model", len(self._batches), "batch") as done:
            for batch in self._batches:
                expected = logits(lm, batch)
                negated_entropies = []
                for rows in expected.split(ROWS):
                    log_probabilities = rows.log_softmax(-1)
                    torch.exp(log_probabilities, out=rows)
                    negated_entropies.append(torch.linalg.vecdot(rows, log_probabilities))
                self._entropy -= self._weighted(batch, torch.cat(negated_entropies))
                self._expected.append(expected)
                done()
        self._total = float(sum(batch.weights_M.sum() for batch in self._batches))

    @torch.no_grad()
    def of(self, edits: Edits) -> float:
        """Return the mean divergence of an edited model in nats per token."""
        total = -self._entropy
        for batch, expected in zip(self._batches, self._expected, strict=True):
            with edited(self._lm, edits):
                total += self._cross_entropy(batch, expected)
        return total / self._total

    @torch.no_grad()
    def of_layers(
        self, candidates: Mapping[int, Sequence[LayerEdits]], below: Edits = NO_EDITS
    ) -> dict[int, list[float]]:
        """Return the mean divergences in nats per token of models that are edited from a layer on. The layers below,
        with their own edits, run once for all, and so does the attention of the layer. The candidates, by layer, must
        follow from ``below`` and their heads.
        """
        known = self._work.known
        totals = {layer: [-self._entropy] * len(of_layer) for layer, of_layer in candidates.items()}
        missing = [self._missing(batch, candidates, below) for batch in self._hashes]
        count = sum(len(of_layer) for of_batch in missing for of_layer in of_batch.values())
        with self._work.steps("damage of removed heads", count, "measurement") as done:
            for number, (batch, of_batch) in enumerate(zip(self._hashes, missing, strict=True)):
                for key, value in self._measured(number, of_batch, below):
                    known.add(key, value)
                    done()
                for layer, of_layer in candidates.items():
                    for index, each in enumerate(of_layer):
                        numbers = known.get(_key(batch, layer, each, below))
                        assert numbers is not None
                        totals[layer][index] += float(numbers[0])
        return {layer: [total / self._total for total in of_layer] for layer, of_layer in totals.items()}

    def _missing(
        self, batch: str, candidates: Mapping[int, Sequence[LayerEdits]], below: Edits
    ) -> dict[int, list[LayerEdits]]:
        """Return the candidates by layer that were not measured on a batch."""
        missing = {
            layer: [each for each in of_layer if self._work.known.get(_key(batch, layer, each, below)) is None]
            for layer, of_layer in candidates.items()
        }
        return {layer: of_layer for layer, of_layer in missing.items() if of_layer}

    def _measured(
        self, number: int, candidates: Mapping[int, Sequence[LayerEdits]], below: Edits
    ) -> Iterator[tuple[WorkKey, float]]:
        """Yield the summed cross-entropy of each candidate on a batch."""
        if not candidates:
            return
        batch, expected = self._batches[number], self._expected[number]
        with (
            self._blocks.keep_heads(self._behind_attention & candidates.keys()) as heads,  # before any are removed
            edited(self._lm, below),
            self._blocks.keep_inputs(candidates) as kept,
            running_range(self._blocks.all, 0, max(candidates) + 1),
        ):
            run_forward(self._lm.model, {"input_ids": batch.ids})
        for layer, of_layer in candidates.items():
            attention = self._blocks.with_heads(layer, heads[layer]) if layer in heads else nullcontext()
            with resuming_at(self._blocks, layer, kept[layer]), attention:
                for each in of_layer:
                    with edited(self._lm, each.edits()):
                        value = self._cross_entropy(batch, expected)
                    yield _key(self._hashes[number], layer, each, below), value

    def _cross_entropy(self, batch: CalibrationBatch, expected: Tensor) -> float:
        """Return the summed cross-entropy of the model's predictions to those of the original."""
        predicted = logits(self._lm, batch)
        pairs = zip(predicted.split(ROWS), expected.to(predicted.device).split(ROWS), strict=True)
        return self._weighted(batch, torch.cat([p.logsumexp(-1) - torch.linalg.vecdot(e, p) for p, e in pairs]))

    @staticmethod
    def _weighted(batch: CalibrationBatch, values_M: Tensor) -> float:
        """Return the weighted sum of one value for each counted prediction."""
        return float((values_M * batch.weights_M.to(values_M.device)).sum(dtype=torch.float64))
