"""Repair of the value projection by conjugate gradients, without its normal matrix.

The attention's output is linear in the value projection while its weights (the softmax) stay. The normal matrix of an
8B model would have 69 GB; conjugate gradients need its products only, each a forward and a backward pass through the
attention of one layer.

Shapes: B sequences, N tokens, E width of a hidden state, K KV heads, Dv width of a value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headscan.grid import AttentionSite
from headscan.layers.blocks import Blocks
from headscan.models.loaded_model import LoadedModel
from headscan.pruning.calibration import CalibrationBatch
from headscan.pruning.edited_model import Reached, into_layer, read_weight, turned

#: Ridge of a regression, as a share of the mean diagonal of its Gram matrix.
RIDGE = 0.01


#: Ridges of which a repair takes the best; another choice is no repair.
STRENGTHS = (0.001, 0.01, 0.1, 1.0, 10.0)


def ridge(gram: Tensor, strength: float = RIDGE) -> Tensor:
    """Return a Gram matrix with a share of its mean diagonal added to the diagonal, float64."""
    wide = gram.double()
    added = strength * wide.diagonal().mean().clamp_min(1e-12)
    return wide + added * torch.eye(len(wide), dtype=wide.dtype, device=wide.device)


class LeastSquares:
    """The weight (E, F) that reproduces targets from inputs, summed batch by batch in float32."""

    def __init__(self) -> None:
        self._gram: Any = 0.0
        self._cross: Any = 0.0
        self._total = 0.0

    def add(self, inputs_MF: Tensor, targets_ME: Tensor, weights_M: Tensor) -> None:
        inputs, targets = inputs_MF.float(), targets_ME.float()
        weighted = inputs.T * weights_M.to(inputs)
        self._gram = self._gram + weighted @ inputs
        self._cross = self._cross + (weighted @ targets.to(inputs)).T
        self._total += float(weights_M.sum())

    @property
    def gram(self) -> Tensor:
        """Second moments of the inputs as means over tokens (F, F)."""
        mean: Tensor = self._gram / self._total
        return mean

    def solve(self, old_EF: Tensor, kept: Tensor | None = None, strength: float = RIDGE) -> Tensor:
        """Return the weight in float64 arithmetic, as float32; columns (F,) that are not kept are zero. The ridge, a
        share of the mean diagonal, pulls to the old weight.
        """
        gram, residual, weight, kept = self._of_kept(old_EF, kept)
        weight[:, kept] += torch.linalg.solve(ridge(gram, strength), residual.T).T
        return weight.float()

    def solve_for(self, judging: LeastSquares, old_EF: Tensor, kept: Tensor | None = None) -> Tensor | None:
        """Return the weight of the ridge that is best on other tokens; None if the old weight is as good there. The
        squared error on them is a quadratic function of the weight, which their sums determine.
        """
        gram, residual, weight, kept = self._of_kept(old_EF, kept)
        other_gram, other_residual, _, _ = judging._of_kept(old_EF, kept)
        most, best = 0.0, None
        for strength in STRENGTHS:
            change = torch.linalg.solve(ridge(gram, strength), residual.T).T
            gain = float((change * (2 * other_residual - change @ other_gram)).sum())
            if gain > most:
                most, best = gain, change
            elif best is not None:  # stronger ridges only shrink the change further
                break
        if best is None:
            return None
        weight[:, kept] += best
        return weight.float()

    def _of_kept(self, old_EF: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the sums that a change of the old weight (E, F) needs, in float64: the Gram matrix of the kept
        columns, their cross sums with the old weight's error, the old weight with zeros in the other columns, and the
        kept columns.
        """
        gram, cross = self._gram.double(), self._cross.double()
        kept = torch.ones(len(gram), dtype=torch.bool, device=gram.device) if kept is None else kept.to(gram.device)
        weight = old_EF.to(gram) * kept
        gram = gram[kept][:, kept]
        return gram, cross[:, kept] - weight[:, kept] @ gram, weight, kept


#: Ridge, as a share of the mean diagonal of the normal matrix, which has few large and many small directions.
_RIDGE = 1e-3


class AttentionGoal(NamedTuple):
    """What a layer's attention should compute for a batch: its wanted output for an input, (B, N, E) both."""

    batch: CalibrationBatch
    hidden: Tensor
    target: Tensor


@dataclass(frozen=True)
class ValueRepair:
    """The value projection of one layer, whose query heads ``kept``, bool (H,), remain."""

    site: AttentionSite
    path: str
    kept: Tensor

    @classmethod
    def of(cls, lm: LoadedModel, site: AttentionSite, kept: Tensor) -> ValueRepair | None:
        """Return the repair; None if the layer has no value projection of its own."""
        path = f"{site.path}.v_proj"
        try:
            module = lm.module(path)
        except AttributeError:
            return None
        width = site.num_key_value_heads * site.value_dim
        if type(module) is not nn.Linear or module.out_features != width or site.kv_shared_from is not None:
            return None
        return cls(site, path, kept)

    @property
    def rows(self) -> Tensor:
        """Rows of the KV heads that remain, bool (K Dv,)."""
        used = torch.zeros(self.site.num_key_value_heads, dtype=torch.bool)
        used[torch.tensor(self.site.kv_head_of)[self.kept]] = True
        return used.repeat_interleave(self.site.value_dim)

    def inverses(self, output_EF: Tensor) -> Tensor:
        """Return the inverse of what the output projection makes of each KV head's values (K, Dv, Dv)."""
        by_head = output_EF.double().unflatten(1, (self.site.num_attention_heads, self.site.value_dim))
        squares = torch.einsum("ehd,ehc->hdc", by_head, by_head)
        squares[~self.kept.to(squares.device)] = 0.0
        inverses = squares.new_zeros(self.site.num_key_value_heads, self.site.value_dim, self.site.value_dim)
        inverses.index_add_(0, torch.tensor(self.site.kv_head_of, device=inverses.device), squares)
        return torch.stack([torch.linalg.inv(ridge(each)) for each in inverses])

    def solve(
        self,
        blocks: Blocks,
        layer: int,
        fitting: Sequence[AttentionGoal],
        judging: Sequence[AttentionGoal],
        weights: Mapping[str, Tensor],
        *,
        steps: int,
    ) -> dict[str, Tensor]:
        """Return the value projection that brings the attention's outputs closest to targets; nothing if none does.
        Call it in the context of the layer's other edits, the starting point. The batches ``fitting`` give the
        direction of the change, in ``steps`` steps of conjugate gradients; the batches ``judging`` choose the share of
        the change that is applied, 0 to 1.
        """
        name = f"{self.path}.weight"
        start = weights[name] if name in weights else read_weight(blocks.lm.module(self.path)).float()
        projection = self.site.output_projection
        module = blocks.lm.module(projection)
        output = weights.get(f"{projection}.weight")
        output_EF = turned(module, read_weight(module) if output is None else output)
        change = _Problem(self, blocks, layer, fitting, output_EF).change(start.shape, steps)
        share = _Problem(self, blocks, layer, judging, output_EF).best_share(change)
        return {name: start + share * change.to(start)} if share > 0 else {}


#: Arguments of a call, and those by name.
_Call = tuple[tuple[Any, ...], dict[str, Any]]


def _attention_call(blocks: Blocks, layer: int, site: AttentionSite, batch: CalibrationBatch, hidden: Tensor) -> _Call:
    """Return the arguments with which a layer calls its attention."""
    calls: list[_Call] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[:] = [(args, kwargs)]
        raise Reached

    with blocks.lm.module(site.path).register_forward_pre_hook(keep, with_kwargs=True):
        into_layer(blocks, layer, batch, hidden)
    return calls[0]


class _Problem:
    """The least squares of a change of the value projection."""

    def __init__(
        self, values: ValueRepair, blocks: Blocks, layer: int, goals: Sequence[AttentionGoal], output_weight: Tensor
    ) -> None:
        self._values, self._lm, lm = values, blocks.lm, blocks.lm
        self._batches = [goal.batch for goal in goals]
        self._calls = [_attention_call(blocks, layer, values.site, goal.batch, goal.hidden) for goal in goals]
        weight = read_weight(lm.module(values.path))
        self._rows = values.rows.to(weight.device)
        self._gram = torch.zeros(2 * [weight.shape[1]], device=weight.device)
        with lm.module(values.path).register_forward_pre_hook(lambda _, args: self._add_inputs(args[0])):
            self._now = [self._output(call, torch.zeros_like(weight, dtype=torch.float32)) for call in self._calls]
        self._right = torch.linalg.inv(ridge(self._gram)).float()
        self._left = values.inverses(output_weight).to(self._right)
        self._wanted = [goal.target.view_as(now) - now for goal, now in zip(goals, self._now, strict=True)]

    def _add_inputs(self, inputs: Tensor) -> None:
        flat = inputs.flatten(0, -2).float()
        self._gram += flat.T @ flat

    def _output(self, call: _Call, change: Tensor) -> Tensor:
        """Return the output of the attention, float32, after a change of the value projection."""
        args, kwargs = call
        kept: list[Tensor] = []

        def add(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
            return out + args[0] @ change.to(args[0].device, args[0].dtype).T

        def keep(_: nn.Module, __: Any, out: Tensor) -> None:
            kept[:] = [out]

        with ExitStack() as hooks:
            hooks.callback(self._lm.module(self._values.path).register_forward_hook(add).remove)
            hooks.callback(self._lm.module(self._values.site.output_projection).register_forward_hook(keep).remove)
            self._lm.module(self._values.site.path)(*args, **kwargs)
        return kept[0].float()

    def _products(self, change: Tensor, wanted: Sequence[Tensor] | None) -> tuple[Tensor, float]:
        """Return ``J' J change``, or ``J' wanted``, and the sum of squares of ``J change``."""
        total, squares = torch.zeros_like(change), 0.0
        for index, (call, now, batch) in enumerate(zip(self._calls, self._now, self._batches, strict=True)):
            with torch.enable_grad():
                leaf = change.clone().requires_grad_()
                out = self._output(call, leaf)
                moved = (out.detach() - now) if wanted is None else wanted[index]
                real = batch.real_BN[..., None].to(moved.device)
                moved = (batch.by_token(moved) * real).view_as(moved)
                (gradient,) = torch.autograd.grad(out, [leaf], moved)
            squares += float(moved.square().sum())
            total += gradient.to(total)
        total[~self._rows] = 0.0
        return total, squares

    def best_share(self, change: Tensor) -> float:
        """Return the share of a change, 0 to 1, with the least squared error."""
        along, squares = 0.0, 0.0
        for call, now, wanted, batch in zip(self._calls, self._now, self._wanted, self._batches, strict=True):
            moved = batch.by_token(self._output(call, change) - now)
            real = batch.real_BN.to(moved.device)
            along += float((moved * batch.by_token(wanted))[real].sum(dtype=torch.float64))
            squares += float(moved[real].square().sum(dtype=torch.float64))
        return min(max(along / squares, 0.0), 1.0) if squares > 0 else 0.0

    def _preconditioned(self, residual: Tensor) -> Tensor:
        """Return a residual times the inverse of the normal matrix, as if attention did not mix tokens."""
        by_head = residual.unflatten(0, (len(self._left), -1))
        return (self._left @ by_head @ self._right).flatten(0, 1)

    def change(self, shape: torch.Size, steps: int) -> Tensor:
        """Return the change after some steps of preconditioned conjugate gradients, with a ridge."""
        x = torch.zeros(shape, dtype=torch.float32, device=self._rows.device)
        residual, _ = self._products(x, self._wanted)
        probe = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(x)
        probe[~self._rows] = 0.0
        _, squares = self._products(probe, None)
        strength = _RIDGE * squares / float(probe.square().sum())
        scaled = self._preconditioned(residual)
        direction, size = scaled.clone(), float((residual * scaled).sum())
        for _ in range(steps):
            if size <= 0:
                break
            product, _ = self._products(direction, None)
            product = product + strength * direction
            step = size / float((direction * product).sum())
            x += step * direction
            residual -= step * product
            scaled = self._preconditioned(residual)
            new = float((residual * scaled).sum())
            direction = scaled + (new / size) * direction
            size = new
        return x
