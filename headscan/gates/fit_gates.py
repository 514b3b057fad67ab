"""Hard concrete gates on the heads of a frozen model, fitted by gradient steps (arXiv 1905.09418, section 6).

The hard concrete distribution (arXiv 1712.01312; temperature and stretch of arXiv 1905.09418) is a stretched and
clipped binary concrete variable: exactly 0 or exactly 1 with a probability above 0, and differentiable in its
location ``log_a`` in between.

Each step samples a gate for every sequence and head, multiplies the heads' outputs by them at the input of the output
projection, and moves the locations of the gates against the derivative of the objective plus a penalty on the
expected number of open gates. With a share, the penalty is the multiplier that lets this number follow a schedule.

Shapes: B sequences, N tokens, M real tokens, V vocabulary, A heads of all layers, L layers, H query heads of the widest
layer, Dv width of a head's output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import log
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from headscan.ablation.masks import HeadMask
from headscan.attention.hooks import output_hook, refuse_compiled, refuse_training
from headscan.catalog import head_count
from headscan.errors import GateError, NotFiniteError, SequenceError, UnsupportedModelError
from headscan.gates.gate_settings import GateFitConfig, Objective
from headscan.gradients.backward import backward
from headscan.gradients.head_importance import default_loss, must_recompute
from headscan.gradients.losses import Loss
from headscan.grid import AttentionSite, Head, HeadGrid
from headscan.layers.blocks import find_blocks
from headscan.measure.collect import refuse_left_padding
from headscan.models.forward_inputs import widened, without_autocast
from headscan.models.loaded_model import LoadedModel, logits_at
from headscan.pruning.calibration import Calibration

#: Temperature of the concrete variable.
TEMPERATURE = 0.33
#: Ends of the interval to which the concrete variable is stretched before it is clipped to 0 and 1.
LOW, HIGH = -0.1, 1.1

#: Points of the integral over a gate's values.
_POINTS = 64


def sample_gates(log_a: Tensor, noise: Tensor) -> Tensor:
    """Return gates from 0 to 1, differentiable in ``log_a``, from uniform noise above 0 and below 1 (..., *log_a)."""
    concrete = torch.sigmoid((torch.logit(noise) + log_a) / TEMPERATURE)
    return (concrete * (HIGH - LOW) + LOW).clamp(0, 1)


def open_probability(log_a: Tensor) -> Tensor:
    """Return the probability that a gate is above 0, differentiable: sigmoid(log_a - 0.33 ln(0.1 / 1.1))."""
    return torch.sigmoid(log_a - TEMPERATURE * log(-LOW / HIGH))


def expected_gates(log_a: Tensor) -> Tensor:
    """Return the expectation of gates: the integral over t from 0 to 1 of the probability that a gate is above t."""
    nodes, weights = np.polynomial.legendre.leggauss(_POINTS)
    at = torch.from_numpy((nodes + 1) / 2)
    share = torch.from_numpy(weights / 2)
    above = torch.sigmoid(log_a.double()[..., None] - TEMPERATURE * torch.logit((at - LOW) / (HIGH - LOW)))
    return (above @ share).clamp(0, 1).to(log_a.dtype)


#: Class of a head by its gates in two fits (arXiv 2505.13737).
GateClass = Literal["facilitating", "interfering", "irrelevant", "undecided"]
#: A gate above this value counts as open.
_OPEN = 0.5


@dataclass(frozen=True)
class Gates:
    """Fitted gates of one site.

    Attributes:
        log_a: Locations of the gates (L, H), NaN where a layer lacks the head.
        penalty: Penalty per open gate at the end, in nats; negative if it opened gates.
    """

    site: str
    log_a: Tensor
    penalty: float

    @cached_property
    def values(self) -> Tensor:
        """Expected gates (L, H), 0 to 1."""
        return expected_gates(self.log_a)

    @cached_property
    def open_probabilities(self) -> Tensor:
        """Probabilities that gates are above 0 (L, H)."""
        return open_probability(self.log_a)

    @property
    def ranked(self) -> tuple[Head, ...]:
        """All heads, the most closed first; layer and head break ties."""
        return tuple(sorted(self._heads, key=lambda head: (float(self.log_a[head]), head)))

    def closed(self, count: int) -> tuple[Head, ...]:
        """Return the ``count`` most closed heads, sorted by layer."""
        if not 0 <= count <= len(self._heads):
            raise GateError(f"closed heads: {count} (limit 0 to {len(self._heads)}). Change `count`")
        return tuple(sorted(self.ranked[:count]))

    def still_open(self, heads: Iterable[tuple[int, int]]) -> tuple[Head, ...]:
        """Return those of the heads whose gates the fit keeps open, above a half, sorted by layer."""
        return tuple(sorted(Head(*head) for head in heads if self.values[head] > _OPEN))

    def mask(self, *, count: int | None = None, share: float | None = None) -> HeadMask:
        """Return the mask of the most closed heads: a ``count``, or a ``share`` of all heads (`head_count`)."""
        if (count is None) == (share is None):
            raise GateError(f"`count={count}` and `share={share}` (limit one of them). Give exactly one")
        return HeadMask(self.closed(head_count(share or 0, len(self._heads)) if count is None else count))

    @cached_property
    def _heads(self) -> tuple[Head, ...]:
        return tuple(Head(layer, head) for layer, head in self.log_a.isfinite().nonzero().tolist())


@dataclass(frozen=True)
class TwoSidedGates:
    """Gates of two fits: ``down`` with a penalty on open gates, ``up`` with the opposite penalty."""

    down: Gates
    up: Gates

    def class_of(self, head: tuple[int, int]) -> GateClass:
        """Return the class of a head: facilitating if open in both fits, interfering if closed in both, irrelevant if
        it follows the penalty, undecided if it moves against both.
        """
        open_down, open_up = (bool(gates.values[head] > _OPEN) for gates in (self.down, self.up))
        if open_down == open_up:
            return "facilitating" if open_down else "interfering"
        return "irrelevant" if open_up else "undecided"

    def classes(self) -> dict[Head, GateClass]:
        return {head: self.class_of(head) for head in sorted(self.down.ranked)}


#: The settings of a fit by default.
DEFAULTS = GateFitConfig()
#: Numbers of each weight that its fingerprint reads.
_SAMPLES = 256


def check_model(lm: LoadedModel) -> None:
    quantised = getattr(lm.model.config, "quantization_config", None) is not None
    if quantised or getattr(lm.model, "is_quantized", False):
        raise UnsupportedModelError(
            f"{lm.source} is quantised, and gates need derivatives through its weights. Load the model without "
            "quantisation"
        )
    if not lm.grid.sites:
        raise UnsupportedModelError(f"{lm.source} has 0 attention heads (limit 1). Load another model")
    refuse_compiled(lm)
    refuse_training(lm.model)


@contextmanager
def gates_applied(lm: LoadedModel, gates: Mapping[int, Tensor]) -> Iterator[None]:
    """Multiply heads' outputs by gates (B, H) by layer, float32 or wider; differentiable in the gates."""

    def multiply(site: AttentionSite, outputs_BNHD: Tensor) -> Tensor | None:
        if site.layer not in gates:
            return None
        gate_B1H1 = gates[site.layer][:, None, :, None].to(outputs_BNHD.device)
        wide = torch.promote_types(outputs_BNHD.dtype, gate_B1H1.dtype)
        return (outputs_BNHD.to(wide) * gate_B1H1).to(outputs_BNHD.dtype)

    with output_hook(lm, multiply):
        yield


@dataclass(frozen=True)
class DivergenceLoss(Loss):
    """The divergence of a decoder's predictions from given ones, log-probabilities (M, V) after the real tokens."""

    ids: Tensor
    lengths: tuple[int, ...]
    expected: Tensor

    @classmethod
    def of(cls, lm: LoadedModel, ids: Tensor, lengths: Sequence[int]) -> DivergenceLoss:
        """Take the predictions of the model as it is now."""
        if not lm.grid.predicts_next_token:
            raise UnsupportedModelError(f"{lm.source} is no decoder, so it has no predictions. Use `objective='loss'`")
        with torch.no_grad(), without_autocast(lm.device):
            return cls(ids, tuple(lengths), _log_probabilities(lm, ids, lengths))

    @property
    def scale(self) -> float:
        return max(self.lengths)

    def losses(self, lm: LoadedModel) -> Tensor:
        log_probabilities = _log_probabilities(lm, self.ids, self.lengths)
        each_M = F.kl_div(log_probabilities, self.expected, reduction="none", log_target=True).sum(-1)
        return torch.stack([part.mean() for part in each_M.split(self.lengths)])


def batch_objective(lm: LoadedModel, name: Objective, ids: Tensor, lengths: Sequence[int], keys: Sequence[int]) -> Loss:
    """Return the objective of a batch, a mean over each sequence's tokens; keys seed an encoder's masked tokens."""
    if name == "divergence":
        return DivergenceLoss.of(lm, ids, lengths)
    return default_loss(lm, ids, lengths, input_keys=keys)


def _log_probabilities(lm: LoadedModel, ids: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return predictions (M, V) after the real tokens, sequence by sequence, float32 or wider."""
    places = [(row, column) for row, length in enumerate(lengths) for column in range(length)]
    logits_MV = logits_at(lm, ids, [row for row, _ in places], [column for _, column in places], use_cache=False)
    return widened(logits_MV).log_softmax(-1)


@dataclass(frozen=True)
class FitState:
    """Everything that the next step depends on, in addition to the model, the texts and the settings.

    Attributes:
        log_a: Locations of the gates of all heads of the site, layer by layer.
        mean, square: Moments of Adam, of the same shape.
        penalty: Integral part of the penalty per open gate, in nats.
        applied: Running mean of the whole penalty per open gate, in nats.
    """

    step: int
    log_a: Tensor
    mean: Tensor
    square: Tensor
    penalty: float
    applied: float

    def numbers(self) -> Tensor:
        """Return all of it as one float64 tensor."""
        numbers = torch.tensor([self.step, self.penalty, self.applied], dtype=torch.float64)
        return torch.cat([numbers, *(each.double() for each in (self.log_a, self.mean, self.square))])

    @classmethod
    def of(cls, numbers: Tensor, dtype: torch.dtype) -> FitState:
        """Return the state from its `numbers`; ``dtype`` is that of a fit."""
        step, penalty, applied = numbers[:3].tolist()
        log_a, mean, square = numbers[3:].to(dtype).chunk(3)
        return cls(int(step), log_a, mean, square, penalty, applied)


#: Decay of the moments of Adam, and the smallest root of the second one.
_BETAS, _EPSILON = (0.9, 0.99), 1e-8
#: Share of the steps in which the target moves to the wanted share, and the learning rate is constant.
_RAMP = 0.6
#: Part of the learning rate that remains at the end of the schedule.
_LAST_RATE = 0.1
#: Most steps of a fit that has not closed its share of heads, as a multiple of those of the schedule.
_LONGEST = 4
#: Proportional and integral gain of the penalty, in nats per open gate, by the error of the share of open gates.
_GAIN, _INTEGRAL = 0.5, 0.01
#: Decay of the running mean of the penalty.
_MEMORY = 0.95
#: Smallest penalty that opens gates in the second of two fits, in nats.
_LEAST_PENALTY = 1e-4


class GateFit:
    """A fit of gates on one model and its texts, step by step."""

    def __init__(self, lm: LoadedModel, calibration: Calibration, config: GateFitConfig) -> None:
        check_model(lm)
        if not 0 <= int(calibration.ids.min()) <= int(calibration.ids.max()) < lm.vocab_size:
            raise SequenceError(
                f"token ids from {int(calibration.ids.min())} to {int(calibration.ids.max())} (limit 0 to "
                f"{lm.vocab_size - 1}). Use the model's tokenizer"
            )
        refuse_left_padding(lm, calibration.ids, calibration.lengths)
        if lm.grid.predicts_next_token:
            find_blocks(lm)  # it runs another batch, which would not fit the gates
        self._lm, self._texts, self._config = lm, calibration, config
        self._rows = max(1, config.batch_tokens // calibration.ids.shape[1])
        self._target = None if config.share is None else 1 - config.share

    def start(self) -> FitState:
        dtype = torch.promote_types(self._lm.model.dtype, torch.float32)
        zeros, penalty = torch.zeros(self._lm.grid.total_heads, dtype=dtype), self._config.penalty
        return FitState(0, torch.full_like(zeros, self._config.start), zeros, zeros.clone(), penalty, penalty)

    def advance(self, state: FitState, steps: int) -> FitState:
        """Return the state after at most so many steps; it stops where the fit is done."""
        with torch.inference_mode(False), torch.enable_grad():
            for _ in range(steps):
                if is_done(self._config, state):
                    break
                state = self._step(state)
        return state

    def _step(self, state: FitState) -> FitState:
        batch = self._batch_rows(state.step)
        log_a = state.log_a.clone().requires_grad_()
        open_A = open_probability(log_a)
        sampled_BA = sample_gates(log_a, self._noise(state, len(batch)))
        by_gate_BA = self._derivatives(batch, sampled_BA.detach())
        integral, penalty = self._penalties(state, float(open_A.detach().mean()))
        objective_and_penalty = [sampled_BA, open_A.sum()]
        (slope,) = torch.autograd.grad(objective_and_penalty, log_a, [by_gate_BA, open_A.new_tensor(penalty)])
        if not slope.isfinite().all():
            raise NotFiniteError(
                f"NaN or infinite derivatives at step {state.step}: {int((~slope.isfinite()).sum())} of {len(slope)} "
                "(limit 0). Load the model in another dtype"
            )
        done = state.step + 1
        mean = torch.lerp(slope, state.mean, _BETAS[0])
        square = torch.lerp(slope**2, state.square, _BETAS[1])
        scaled = (mean / (1 - _BETAS[0] ** done)) / ((square / (1 - _BETAS[1] ** done)).sqrt() + _EPSILON)
        return replace(
            state,
            step=done,
            log_a=state.log_a - self._rate(state.step) * scaled,
            mean=mean,
            square=square,
            penalty=integral,
            applied=_MEMORY * state.applied + (1 - _MEMORY) * penalty,
        )

    def _derivatives(self, batch: Tensor, sampled_BA: Tensor) -> Tensor:
        """Return the derivatives of a batch's mean objective by the sampled gates (B, A)."""
        lm, texts = self._lm, self._texts
        lengths = texts.lengths[batch]
        ids = texts.ids[batch, : int(lengths.max())].long().to(lm.device)
        loss = batch_objective(lm, self._config.objective, ids, lengths.tolist(), batch.tolist())
        gates = {layer: part.clone().requires_grad_() for layer, part in by_layer(lm.grid, sampled_BA).items()}
        with gates_applied(lm, gates):
            gradients = backward(lm, loss, gates=gates, recompute=must_recompute(lm, loss))
        by_gate = torch.cat([gradients[layer] for layer in gates], 1) / len(batch)
        return by_gate.to(sampled_BA)

    def _penalties(self, state: FitState, is_open: float) -> tuple[float, float]:
        """Return the integral part of the penalty, and the whole penalty per open gate."""
        if self._target is None:
            return state.penalty, state.penalty
        at_start = float(open_probability(state.log_a.new_tensor(self._config.start)))
        ramp = min(1.0, (state.step + 1) / (_RAMP * self._config.steps))
        error = is_open - (at_start + ramp * (self._target - at_start))
        integral = state.penalty + _INTEGRAL * error
        return integral, integral + _GAIN * error

    def _rate(self, step: int) -> float:
        if step >= self._config.steps:  # gates that have to close are far from it
            return self._config.rate
        flat = _RAMP * self._config.steps
        left = min(1.0, (self._config.steps - step) / (self._config.steps - flat))
        return self._config.rate * (_LAST_RATE + (1 - _LAST_RATE) * left)

    def _batch_rows(self, step: int) -> Tensor:
        """Return the sequences of a step; each pass over the texts has its own order."""
        count = len(self._texts.ids)
        round_, place = divmod(step, -(-count // self._rows))
        order = torch.randperm(count, generator=self._generator(0, round_))
        return order[place * self._rows : (place + 1) * self._rows]

    def _noise(self, state: FitState, rows: int) -> Tensor:
        """Return uniform numbers (B, A), never 0 or 1."""
        noise = torch.rand((rows, len(state.log_a)), generator=self._generator(1, state.step), dtype=torch.float64)
        tiny = torch.finfo(torch.float32).eps
        return noise.clamp(tiny, 1 - tiny).to(state.log_a)

    def _generator(self, stream: int, number: int) -> torch.Generator:
        """Return a generator that depends on the seed, the stream and a number only, so that fits can be resumed."""
        entropy = np.random.SeedSequence([self._config.seed, stream, number]).generate_state(1, np.uint64)[0]
        return torch.Generator().manual_seed(int(entropy >> np.uint64(1)))


def is_done(config: GateFitConfig, state: FitState) -> bool:
    """Return True if the schedule is over and the share is closed, or four times as many steps have not closed it."""
    if state.step < config.steps or config.share is None:
        return state.step >= config.steps
    # By symmetry, the expectation of a gate is at most a half if its location is at most 0.
    closed = int((state.log_a <= 0).sum())
    return closed >= head_count(config.share, len(state.log_a)) or state.step >= _LONGEST * config.steps


def fit_gates(
    lm: LoadedModel,
    calibration: Calibration,
    config: GateFitConfig = DEFAULTS,
    *,
    every: int = 10,
    progress: Callable[[FitState], None] = lambda state: None,
) -> Gates:
    """Fit gates on the heads of a model, whose weights stay as they are.

    With a share, the fit goes on after ``config.steps`` until so many gates are closed, for four times as many steps at
    most; `Gates.still_open` then counts those that a mask of the share takes nevertheless.

    Args:
        lm: A model from `headscan.load`, on any devices; `LoadedModel.at` chooses the site.
        every: Steps between two calls of ``progress``.
    """
    if every < 1:
        raise GateError(f"`every={every}` (limit 1). Raise `every`")
    fit = GateFit(lm, calibration, config)
    now = fit.start()
    while not is_done(config, now):
        now = fit.advance(now, every)
        progress(now)
    return gates_of(lm.grid, now)


def gates_of(grid: HeadGrid, state: FitState) -> Gates:
    table = torch.full(grid.shape, float("nan"), dtype=state.log_a.dtype)
    for layer, own in by_layer(grid, state.log_a).items():
        table[layer, : len(own)] = own
    return Gates(grid.kind, table, state.applied)


def by_layer(grid: HeadGrid, values: Tensor) -> dict[int, Tensor]:
    """Split values (..., A) of all heads by layer."""
    widths = [site.num_attention_heads for site in grid.sites]
    return {site.layer: part for site, part in zip(grid.sites, values.split(widths, -1), strict=True)}


def fit_two_sided(
    lm: LoadedModel,
    calibration: Calibration,
    config: GateFitConfig = DEFAULTS,
    *,
    every: int = 10,
    progress: Callable[[FitState], None] = lambda state: None,
) -> TwoSidedGates:
    """Fit gates twice, with opposite penalties (arXiv 2505.13737); arguments and errors as for `fit_gates`. The second
    fit opens gates with the penalty that the first one ended with.
    """
    down = fit_gates(lm, calibration, config, every=every, progress=progress)
    up = fit_gates(lm, calibration, opposite(config, down), every=every, progress=progress)
    return TwoSidedGates(down, up)


def opposite(config: GateFitConfig, down: Gates) -> GateFitConfig:
    """Return the settings of the fit that opens gates, after the one that closed them."""
    return replace(config, share=None, penalty=-max(abs(down.penalty), _LEAST_PENALTY))
