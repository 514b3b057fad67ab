"""Repairs of models without some heads, on the activations of the layers that were repaired before.

In closed form, layer by layer: each layer's output projection is solved by least squares so that the residual stream
after the attention is again the original one; then the value projection, in turn with it, and last the second matrix of
the MLP. Nothing is trained. The simplest repair adds the mean output of removed heads to the output projection's bias.
Distillation takes a few gradient steps towards the predictions of the original model. It trains only the weights that
the repair solved; linear repair cannot recover a lost attention pattern, and these steps recover a part of it.

Shapes: B sequences, N tokens, E width of a hidden state, F columns of a projection's input, M real tokens or counted
predictions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from math import cos, pi
from typing import Annotated, Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from headscan.ablation.masks import HeadMask
from headscan.attention.hooks import refuse_training
from headscan.errors import PruningError
from headscan.gradients.backward import frozen_weights
from headscan.grid import AttentionSite, Head
from headscan.layers.blocks import Blocks, find_blocks
from headscan.models.forward_inputs import run_forward
from headscan.models.loaded_model import LoadedModel
from headscan.options import Count, Limits, check_limits
from headscan.pruning.calibration import Calibration, CalibrationBatch
from headscan.pruning.edited_model import (
    ROWS,
    Edits,
    Writer,
    edited,
    entering,
    find_writers,
    logits,
    projection_inputs,
    read_bias,
    read_weight,
    through_layer,
    turned,
    watched_modules,
)
from headscan.pruning.value_repair import AttentionGoal, LeastSquares, ValueRepair

Target = Literal["o", "v", "down"]

#: The last part of the calibration, one over this and at most so many tokens, chooses the strength of the repair.
_JUDGING_SHARE, _MOST_JUDGING = 4, 16384


@dataclass(frozen=True)
class RepairConfig:
    """Settings of the closed-form repair.

    Attributes:
        targets: ``o`` the output projection, ``v`` the value projection, ``down`` the second matrix of the MLP.
        rounds: Times that the value projection is solved, each time after and before the output projection.
        value_steps: Steps of conjugate gradients for a value projection.
        value_tokens: Tokens on which value projections are solved.
    """

    targets: tuple[Target, ...] = ("o", "down")
    rounds: Count = 1
    value_steps: Count = 6
    value_tokens: Count = 65536

    def __post_init__(self) -> None:
        if unknown := [target for target in self.targets if target not in get_args(Target)]:
            raise PruningError(f"unknown target {unknown[0]!r}. Choose of {', '.join(get_args(Target))}")
        check_limits(self, PruningError)


@dataclass(frozen=True)
class Repaired:
    """A repaired model: its edits, and by layer the sums of the output projection's least squares, if they were kept.
    Their inputs are the outputs of all heads, the removed ones included, so that other choices in this layer can be
    solved too.
    """

    edits: Edits
    sums: dict[int, LeastSquares]


def repair(
    lm: LoadedModel,
    calibration: Calibration,
    removed: Iterable[tuple[int, int]],
    config: RepairConfig = RepairConfig(),
    *,
    progress: Callable[[int], None] = lambda layer: None,
) -> dict[str, Tensor]:
    """Return new weights by parameter name, float32 with the shape of the old ones.

    The first sequences of the calibration fit the weights; the last ones, a quarter, choose the strength of the repair
    for each projection. A projection keeps its old weight if every strength makes its outputs worse there, and all do
    if the repaired model diverges more from the original there than the model that only lacks the heads.
    """
    edits = repaired_model(lm, calibration, removed, config, progress=progress).edits
    if not edits.weights:
        return {}
    masked, repaired = divergences(lm, _parts(calibration)[1], [Edits(edits.removed), edits])
    return dict(edits.weights) if repaired < masked else {}


@torch.inference_mode(False)
@torch.no_grad()
def repaired_model(
    lm: LoadedModel,
    calibration: Calibration,
    removed: Iterable[tuple[int, int]],
    config: RepairConfig = RepairConfig(),
    *,
    all_layers: bool = False,
    progress: Callable[[int], None] = lambda layer: None,
) -> Repaired:
    """Return the repaired model, even if it diverges more; see `repair`. With ``all_layers``, those below the first
    removed head are solved, too, and the sums of every layer are kept.
    """
    refuse_training(lm.model)
    heads = lm.grid.check(removed)
    if not heads or not config.targets:
        return Repaired(Edits(heads), {})
    blocks = find_blocks(lm)
    lowest = 0 if all_layers else heads[0].layer
    fitting, judging = (list(part.batches(lm.device)) for part in _parts(calibration))
    batches = [*fitting, *judging]
    original = [entering(blocks, batch, lowest) for batch in batches]
    pruned = list(original)
    sites = {site.layer: site for site in lm.grid.sites}
    weights: dict[str, Tensor] = {}
    sums: dict[int, LeastSquares] = {}
    for layer in range(lowest, len(blocks.all)):
        removed_here = [head for head in heads if head.layer == layer]
        work = _LayerRepair(blocks, layer, sites.get(layer), removed_here, config, batches, len(fitting), pruned)
        original, pruned = work.run(original)
        weights |= work.weights
        if all_layers and work.sums is not None:
            sums[layer] = work.sums
        progress(layer)
    return Repaired(Edits(heads, weights), sums)


def _parts(calibration: Calibration) -> tuple[Calibration, Calibration]:
    """Return the sequences that fit weights, and those that choose the strength of the repair."""
    return calibration.split(min(calibration.tokens // _JUDGING_SHARE, _MOST_JUDGING))


@torch.inference_mode(False)
@torch.no_grad()
def divergences(lm: LoadedModel, calibration: Calibration, models: Sequence[Edits]) -> list[float]:
    """Return the mean divergence of edited models from the original, without keeping its predictions in memory."""
    totals, weight = [0.0] * len(models), 0.0
    for batch in calibration.for_logits.batches(lm.device):
        weights = batch.weights_M
        weight += float(weights.sum())
        expected = logits(lm, batch)
        for index, edits in enumerate(models):
            with edited(lm, edits):
                predicted = logits(lm, batch)
            pairs = zip(expected.split(ROWS), predicted.split(ROWS), strict=True)
            each = torch.cat([_divergence(*rows) for rows in pairs])
            totals[index] += float((each * weights.to(each)).sum(dtype=torch.float64))
    return [total / weight for total in totals]


def _divergence(expected_MV: Tensor, predicted_MV: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence of each prediction (M,) from logits."""
    expected, predicted = expected_MV.log_softmax(-1), predicted_MV.log_softmax(-1)
    return torch.linalg.vecdot(expected.exp(), expected - predicted)


#: Sums of the batches that fit, and of those that choose the strength.
_Sums = tuple[LeastSquares, LeastSquares]


class _LayerRepair:
    """The repair of one layer: ``fits`` of the batches fit the weights, those after them choose the strength.
    ``pruned`` are the hidden states that enter the layer in the repaired model.
    """

    def __init__(
        self,
        blocks: Blocks,
        layer: int,
        site: AttentionSite | None,
        removed: list[Head],
        config: RepairConfig,
        batches: list[CalibrationBatch],
        fits: int,
        pruned: list[Tensor],
    ) -> None:
        self.blocks, self.layer, self.site, self.removed, self.config = blocks, layer, site, tuple(removed), config
        self.batches, self.fits, self.pruned = batches, fits, pruned
        self.weights: dict[str, Tensor] = {}
        self.sums: LeastSquares | None = None

    def run(self, original: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Solve the layer's weights; return the hidden states of the original and of the repaired model after it."""
        attention, mlp = find_writers(self.blocks, self.layer, self.site)
        if "down" not in self.config.targets:
            mlp = None
        wanted = [each.path for each in (attention, mlp) if each is not None]
        residual: list[Tensor] = []  # targets of the attention's output, in the repaired model
        down: list[Tensor | None] = []  # outputs of the MLP's projection, if a norm or a factor follows it
        original_out: list[Tensor] = []
        for batch, hidden, own in zip(self.batches, original, self.pruned, strict=True):
            with watched_modules(self.blocks, wanted) as seen:
                original_out.append(through_layer(self.blocks, self.layer, batch, hidden))
            if attention is not None:
                output = batch.by_token(seen.outputs[attention.path]).float()
                drift = (hidden.float() - own.float()).to(output.device)
                residual.append(output + drift if attention.additive else output)
            down.append(None if mlp is None or mlp.additive else batch.by_token(seen.outputs[mlp.path]))
        if attention is not None and self.site is not None:
            self._repair_attention(attention, self.site, residual)
        del residual
        with edited(self.blocks.lm, Edits(self.removed, self.weights)):
            pruned_out = self._outputs() if mlp is None else self._repair_mlp(mlp, original_out, down)
        return original_out, pruned_out

    def _repair_attention(self, writer: Writer, site: AttentionSite, targets: list[Tensor]) -> None:
        kept = ~HeadMask(self.removed).heads_at(site)
        columns = kept.repeat_interleave(site.value_dim)
        values = ValueRepair.of(self.blocks.lm, site, kept) if "v" in self.config.targets and kept.any() else None
        rounds = 0 if values is None else self.config.rounds
        for turn in range(rounds + 1):
            if "o" in self.config.targets:
                sums: _Sums = LeastSquares(), LeastSquares()
                # Removed heads do not change the input of the projection, so their outputs are summed, too.
                with edited(self.blocks.lm, Edits((), self.weights)):
                    of_batch = zip(self.batches, self.pruned, targets, strict=True)
                    for index, (batch, own, target) in enumerate(of_batch):
                        inputs = projection_inputs(self.blocks, self.layer, batch, own, writer.path)
                        self._add(sums, index, batch, inputs, target - writer.bias)
                self.sums = sums[0]
                # Without heads there is nothing to solve; the sums still serve other choices in this layer.
                if kept.any():
                    self._set(writer, sums[0].solve_for(sums[1], writer.old, columns))
            if values is not None and turn < rounds:
                self._repair_values(values, targets)

    def _repair_values(self, values: ValueRepair, targets: list[Tensor]) -> None:
        goals = [AttentionGoal(*each) for each in zip(self.batches, self.pruned, targets, strict=True)]
        read, fitting = 0, goals[: self.fits]
        for used, goal in enumerate(fitting, 1):
            read += goal.batch.ids.numel()
            if read >= self.config.value_tokens:
                fitting = fitting[:used]
                break
        with edited(self.blocks.lm, Edits(self.removed, self.weights)):
            self.weights |= values.solve(
                self.blocks, self.layer, fitting, goals[self.fits :], self.weights, steps=self.config.value_steps
            )

    def _repair_mlp(self, writer: Writer, goals: list[Tensor], outputs: Sequence[Tensor | None]) -> list[Tensor]:
        """Solve the projection of the MLP, in the context of the edits of the attention, so that the layer returns the
        goals; return what it then returns. ``outputs`` are those of the projection in the original by batch; None if it
        adds to the residual stream.
        """
        sums: _Sums = LeastSquares(), LeastSquares()
        kept: list[Tensor] = []
        outs: list[Tensor] = []
        with watched_modules(self.blocks, [writer.path]) as seen:
            for index, (batch, own, goal, original) in enumerate(
                zip(self.batches, self.pruned, goals, outputs, strict=True)
            ):
                out = through_layer(self.blocks, self.layer, batch, own)
                own_output = batch.by_token(seen.outputs[writer.path])
                target = own_output.float() + (goal.float() - out.float()) if original is None else original.float()
                inputs = batch.by_token(seen.inputs[writer.path])
                self._add(sums, index, batch, inputs, target - writer.bias)
                outs.append(out)
                if writer.additive:
                    kept.append(inputs)
        weight = sums[0].solve_for(sums[1], writer.old)
        self._set(writer, weight)
        if weight is None:
            return outs
        if writer.additive:
            # The output follows from the inputs of the projection, without a further pass.
            change = weight - writer.old.to(weight)
            moved = (inputs @ change.to(inputs).T for inputs in kept)
            return [out + each.view_as(out).to(out.device) for out, each in zip(outs, moved, strict=True)]
        with edited(self.blocks.lm, Edits((), {f"{writer.path}.weight": self.weights[f"{writer.path}.weight"]})):
            return self._outputs()

    def _outputs(self) -> list[Tensor]:
        return [through_layer(self.blocks, self.layer, *each) for each in zip(self.batches, self.pruned, strict=True)]

    def _add(self, sums: _Sums, index: int, batch: CalibrationBatch, inputs: Tensor, targets: Tensor) -> None:
        """Add the real tokens of a batch to the sums that fit, or to those that choose."""
        real = batch.real_BN.to(targets.device)
        sums[index >= self.fits].add(inputs[real], targets[real], batch.weights_BN.to(targets.device)[real])

    def _set(self, writer: Writer, weight_EF: Tensor | None) -> None:
        """Take a new weight; None keeps the old one."""
        if weight_EF is None:
            self.weights.pop(f"{writer.path}.weight", None)
            return
        module = self.blocks.lm.module(writer.path)
        self.weights[f"{writer.path}.weight"] = turned(module, weight_EF).contiguous()


@torch.no_grad()
def mean_outputs(lm: LoadedModel, calibration: Calibration, removed: Iterable[tuple[int, int]]) -> dict[str, Tensor]:
    """Return new biases of output projections by parameter name, float32. The model without the heads then computes
    what the original does with their outputs replaced by their means over the tokens of texts and recall prompts (mean
    ablation). Tokens have the weights that they have in the least squares of `repair`, of which the mean is the
    solution if only the bias may change.
    """
    heads = lm.grid.check(removed)
    blocks = find_blocks(lm)
    sites = [site for site in lm.grid.sites if site.layer in {head.layer for head in heads}]
    sums: dict[str, Any] = dict.fromkeys((site.output_projection for site in sites), 0.0)
    total = 0.0
    for batch in calibration.batches(lm.device):
        with watched_modules(blocks, sums) as seen:
            run_forward(lm.model, {"input_ids": batch.ids})
        for path, inputs in seen.inputs.items():
            real, weights_BN = batch.real_BN.to(inputs.device), batch.weights_BN.to(inputs.device)
            weighted = batch.by_token(inputs)[real] * weights_BN[real][:, None]
            sums[path] = sums[path] + weighted.sum(0, dtype=torch.float32)
        total += float(batch.weights_BN.sum(dtype=torch.float64))
    means = {}
    for site in sites:
        module = lm.module(site.output_projection)
        weight = turned(module, read_weight(module)).float()
        mean = sums[site.output_projection].to(weight.device) / total
        gone = HeadMask(heads).heads_at(site).repeat_interleave(site.value_dim).to(weight.device)
        change = weight[:, gone] @ mean[gone]
        means[f"{site.output_projection}.bias"] = read_bias(module, change) + change
    return means


@dataclass(frozen=True)
class DistillConfig:
    """Gradient steps after the repair, each on a batch; the rate of Adam falls to zero along a cosine."""

    steps: Count = 100
    rate: Annotated[float, Limits(above=0)] = 3e-4
    batch_tokens: Count = 4096

    def __post_init__(self) -> None:
        check_limits(self, PruningError)


def distill(
    lm: LoadedModel,
    calibration: Calibration,
    removed: Iterable[tuple[int, int]],
    weights: Mapping[str, Tensor],
    config: DistillConfig = DistillConfig(),
    *,
    progress: Callable[[float], None] = lambda loss: None,
) -> dict[str, Tensor]:
    """Return trained weights by name, float32; ``progress`` gets the divergence of each batch in nats per token."""
    if not weights:
        raise PruningError("nothing to distill: 0 repaired weights (limit 1). Repair a projection first")
    heads = tuple(Head(*head) for head in removed)
    refuse_training(lm.model)
    batches = list(replace(calibration, batch_tokens=config.batch_tokens).batches(lm.device))
    with torch.inference_mode(False), frozen_weights(lm.model):
        trained = {name: weight.detach().float().clone().requires_grad_() for name, weight in weights.items()}
        adam = torch.optim.Adam(trained.values(), lr=config.rate, betas=(0.9, 0.95))
        for step, batch in enumerate(islice(cycle(batches), config.steps)):
            for group in adam.param_groups:
                group["lr"] = config.rate * 0.5 * (1 + cos(pi * step / config.steps))
            with torch.no_grad():
                expected = logits(lm, batch).log_softmax(-1)
            with torch.enable_grad(), edited(lm, Edits(heads, trained)):
                log_probabilities = logits(lm, batch).log_softmax(-1)
                each = F.kl_div(
                    log_probabilities, expected.to(log_probabilities.device), reduction="none", log_target=True
                ).sum(-1)
                shares = batch.weights_M.to(each)
                loss = (each * shares).sum() / shares.sum()
                loss.backward()
            if not torch.isfinite(loss):
                raise PruningError(f"the divergence at step {step} is {loss.item():g}. Lower `rate`")
            adam.step()
            adam.zero_grad()
            progress(loss.item())
        return {name: weight.detach() for name, weight in trained.items()}
