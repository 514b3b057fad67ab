"""Statistics that are norms of value vectors and of heads' outputs, and the factors of output projections, with which
norms of heads' contributions need no full matrix.

Shapes: B sequences, N tokens, S keys, H query heads, K KV heads, D width of a head's output, M width of a hidden state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from headscan.errors import UnsupportedModelError
from headscan.grid import AttentionSite
from headscan.models.forward_inputs import TokenMeans, at_last_token, on_cpu, widened
from headscan.models.loaded_model import LoadedModel
from headscan.statistics.weight_statistics import Joins
from headscan.text_tables import percent

_PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
#: Largest relative difference between a module and its matrix, and in half precision its multiple of the dtype's eps.
#: TF32 stays below the first; 8-bit quantisation of a float32 input does not.
_TOLERANCE, _HALF_EPSILONS = 2e-3, 4
#: Bytes of float64 copies that exist at one time.
_COPY_BYTES = 64 << 20


@dataclass(frozen=True)
class ValueVectors:
    """The value vectors of one attention call, in any floating dtype, and means over the real keys."""

    value_BKSD: Tensor
    over_keys: TokenMeans

    @cached_property
    def norm_BKS(self) -> Tensor:
        return widened(self.value_BKSD).norm(dim=-1)


class ValueStatistic(ABC):
    """A statistic of the value vectors, equal within a group; its name is that of the catalogue."""

    name: ClassVar[str]
    joins: ClassVar[Joins | None] = None

    @abstractmethod
    def reduce(self, values: ValueVectors) -> Tensor:
        """Return the statistic of the real keys: (B, K)."""


class FirstValueNorm(ValueStatistic):
    name = "first_value_norm"
    joins = "first"

    def reduce(self, values: ValueVectors) -> Tensor:
        return values.norm_BKS[..., 0]


class ValueNorm(ValueStatistic):
    name = "value_norm"
    joins = "mean"

    def reduce(self, values: ValueVectors) -> Tensor:
        return values.over_keys.mean(values.norm_BKS)


@dataclass(frozen=True)
class HeadOutputs:
    """The heads' outputs at the input of the output projection, float32 or wider. ``factor_HDD`` is that of
    `projection_factor`, with norm(O W) = norm(O L); None if no statistic needs it.
    """

    outputs_BNHD: Tensor
    over_tokens: TokenMeans
    factor_HDD: Tensor | None

    @cached_property
    def norm_BHN(self) -> Tensor:
        return self.outputs_BNHD.norm(dim=-1).transpose(1, 2)


class OutputStatistic(ABC):
    """A statistic of the heads' outputs; its name is that of the catalogue."""

    name: ClassVar[str]
    joins: ClassVar[Joins | None] = None
    needs_projection: ClassVar[bool] = False

    @abstractmethod
    def reduce(self, outputs: HeadOutputs) -> Tensor:
        """Return the statistic of the real tokens: (B, H)."""


class OutputNorm(OutputStatistic):
    name = "output_norm"
    joins = "mean"

    def reduce(self, outputs: HeadOutputs) -> Tensor:
        return outputs.over_tokens.mean(outputs.norm_BHN)


class LastOutputNorm(OutputStatistic):
    name = "last_output_norm"
    joins = "last"

    def reduce(self, outputs: HeadOutputs) -> Tensor:
        return at_last_token(outputs.norm_BHN, outputs.over_tokens.lengths)


class ProjectedOutputNorm(OutputStatistic):
    name = "projected_output_norm"
    joins = "mean"
    needs_projection = True

    def reduce(self, outputs: HeadOutputs) -> Tensor:
        assert outputs.factor_HDD is not None, "projected_output_norm needs the projection's factor"
        factor = outputs.factor_HDD.to(outputs.outputs_BNHD)
        norm_BHN = torch.einsum("bnhd,hde->bhne", outputs.outputs_BNHD, factor).norm(dim=-1)
        return outputs.over_tokens.mean(norm_BHN)


class OutputMeanNorm(OutputStatistic):
    name = "output_mean_norm"

    def reduce(self, outputs: HeadOutputs) -> Tensor:
        real = outputs.over_tokens.real(outputs.outputs_BNHD.shape[1])[..., None, None]
        total_BHD = torch.where(real, outputs.outputs_BNHD, 0.0).sum(1)
        mean_BHD = total_BHD / outputs.over_tokens.lengths[:, None, None]
        return mean_BHD.norm(dim=-1)


VALUE_NORMS: tuple[ValueStatistic, ...] = (FirstValueNorm(), ValueNorm())
OUTPUT_NORMS: tuple[OutputStatistic, ...] = (OutputNorm(), LastOutputNorm(), ProjectedOutputNorm(), OutputMeanNorm())


class ProjectionFactors:
    """The factors of a model's output projections, kept in ``LoadedModel.projection_factors`` until a weight changes.

    A checksum detects that, because writing to ``.data`` leaves no other trace. Weights that accelerate offloads cannot
    be changed in place and have none.
    """

    def __init__(self, lm: LoadedModel) -> None:
        self._lm, self._cached = lm, lm.projection_factors
        multipliers: dict[object, Tensor] = {}
        tensors = {
            site.output_projection: _checksum(
                lm.module(site.output_projection), site.num_attention_heads * site.value_dim, multipliers
            )
            for site in lm.grid.sites
        }
        self._checksums: dict[str, float | None] = dict.fromkeys(tensors)
        of_weights_in_memory = {path: checksum for path, checksum in tensors.items() if checksum is not None}
        self._checksums |= {path: float(checksum) for path, checksum in on_cpu(of_weights_in_memory).items()}
        for path, checksum in self._checksums.items():
            if path in self._cached and self._cached[path][0] != checksum:
                del self._cached[path]

    def of(self, site: AttentionSite) -> Tensor:
        """Return the factor of a site's projection (H, D, D), see `projection_factor`."""
        path = site.output_projection
        if path not in self._cached:
            # A factor made in inference mode could not be used in a later pass that takes gradients.
            with torch.inference_mode(False), torch.no_grad():
                self._cached[path] = (self._checksums[path], projection_factor(self._lm.module(path), site))
        return self._cached[path][1]


def projection_factor(projection: nn.Module, site: AttentionSite) -> Tensor:
    """Return L (H, D, D) with ``norm(o @ L) == norm(o @ W)`` for each head's rows W of the matrix, offloaded or not.

    L is the Cholesky factor of ``W W^T`` in float64: in float32 that square loses singular values below 3e-4 of the
    largest. L itself is stored as float32 (float64 for a float64 weight); ``o @ L`` is as exact as ``o @ W``.
    """
    with align_module_device(projection):
        rows_HDM = _head_rows(projection, site)
        wide_dtype = torch.promote_types(rows_HDM.dtype, torch.float32)
        heads = max(1, _COPY_BYTES // (8 * rows_HDM[0].numel()))
        probe_HD = torch.randn(rows_HDM.shape[:2], generator=torch.Generator().manual_seed(0)).to(rows_HDM)
        with torch.autocast(rows_HDM.device.type, enabled=False):
            factors = [_factor(some_heads_HDM.double()) for some_heads_HDM in rows_HDM.split(heads)]
            factor_HDD = torch.cat(factors).to(wide_dtype)
            expected_HM = torch.einsum("hd,hdm->hm", probe_HD.to(wide_dtype), rows_HDM.to(wide_dtype))
    _check_module(projection, site, probe_HD, expected_HM)
    return factor_HDD


def _factor(rows_HDM: Tensor) -> Tensor:
    gram_HDD = rows_HDM @ rows_HDM.mT
    factor_HDD, failed = torch.linalg.cholesky_ex(gram_HDD)
    if failed.any():
        # The matrix is singular. QR works there too, but is slow on a GPU.
        factor_HDD = torch.linalg.qr(rows_HDM.mT, mode="r").R.mT
    return factor_HDD


def _is_plain(projection: nn.Module) -> bool:
    """Return True for a module that multiplies by a matrix of floating-point numbers that it keeps as such."""
    weight: Any = getattr(projection, "weight", None)
    is_matrix = type(weight) in (Tensor, nn.Parameter) and weight.dtype in _PLAIN
    return is_matrix and isinstance(projection, (nn.Linear, Conv1D))


def _head_rows(projection: nn.Module, site: AttentionSite) -> Tensor:
    """Return each head's rows of the matrix, (H, D, M); a view of it unless the weight is quantised or has adapters."""
    if not _is_plain(projection):
        return _computed_rows(projection, site)
    weight = projection.get_parameter("weight").detach()
    # A Linear keeps (out, in); GPT-2's Conv1D keeps (in, out).
    rows = weight.T if isinstance(projection, nn.Linear) else weight
    return rows.unflatten(0, (site.num_attention_heads, site.value_dim))


def _computed_rows(projection: nn.Module, site: AttentionSite) -> Tensor:
    """Return each head's rows of the matrix of a linear module (H, D, M), from its outputs for unit vectors."""
    H, D = site.num_attention_heads, site.value_dim
    like = _input_like(projection)
    units_HDC = torch.eye(H * D, dtype=like.dtype, device=like.device).view(H, D, H * D)
    bias_M = projection.forward(torch.zeros_like(units_HDC[:1, :1]))[0, 0]
    return torch.cat([projection.forward(units_DC[None]) - bias_M for units_DC in units_HDC])


def _input_like(projection: nn.Module) -> Tensor:
    """Return a tensor with the device of a module and the dtype of its inputs, empty."""
    tensors = [*projection.parameters(), *projection.buffers()]
    # Packed numbers are integers, and their scales may have more bits than the inputs.
    dtypes = [tensor.dtype for tensor in tensors if tensor.dtype in _PLAIN]
    return torch.empty(
        0, dtype=min(dtypes, key=lambda each: each.itemsize, default=torch.float32), device=tensors[0].device
    )


def _check_module(projection: nn.Module, site: AttentionSite, probe_HD: Tensor, expected_HM: Tensor) -> None:
    """Raise if the module differs from its matrix on one random vector per head, as a quantised Linear does."""
    heads = len(probe_HD)
    inputs = torch.block_diag(*probe_HD)  # row h: head h alone
    inputs = torch.cat([inputs, torch.zeros_like(inputs[:1])])[None]
    with torch.autocast(inputs.device.type, enabled=False):
        # Calling the module itself would run hooks, which may be those of an open measurement.
        out = projection.forward(inputs)[0].to(expected_HM)
    computed_HM, bias = out[:heads] - out[heads], out[heads]
    bound = _HALF_EPSILONS * torch.finfo(probe_HD.dtype).eps if probe_HD.dtype.itemsize < 4 else _TOLERANCE
    error = (computed_HM - expected_HM).norm(dim=-1)
    size = (expected_HM.norm(dim=-1) + bias.norm()).clamp_min(torch.finfo(expected_HM.dtype).tiny)
    relative_error = error / size
    worst_head = int(relative_error.argmax())
    # A zero matrix gives a zero error; NaN weights make the statistic itself NaN.
    if relative_error[worst_head] > bound:
        raise UnsupportedModelError(
            f"projected_output_norm needs an output projection that multiplies by its weight: "
            f"{site.output_projection}, a {type(projection).__name__}, differs from it by "
            f"{percent(float(relative_error[worst_head]))} on head {worst_head} (limit {percent(bound)}). Measure the "
            "other statistics, or load the model without quantisation"
        )


def _checksum(projection: nn.Module, width: int, multipliers: dict[object, Tensor]) -> Tensor | None:
    """Return a number that changes with the weight; None for offloaded weights. ``multipliers`` keeps those that layers
    of one width share.
    """
    if any(tensor.is_meta for tensor in (*projection.parameters(), *projection.buffers())):
        return None
    if not _is_plain(projection):
        like = _input_like(projection)
        with torch.no_grad():
            out = projection.forward(torch.arange(1, width + 1, device=like.device).cos().to(like)[None, None])
        return widened(out[0, 0]) @ torch.arange(1, out.shape[-1] + 1, device=out.device).to(widened(out)).cos()
    weight = projection.get_parameter("weight")
    output_axis = 0 if isinstance(projection, nn.Linear) else 1
    input_sums = weight.detach().sum(output_axis, dtype=torch.promote_types(weight.dtype, torch.float32))
    key = (len(input_sums), input_sums.dtype, input_sums.device)
    if key not in multipliers:
        # Unequal multipliers, so that swapping two heads changes the sum.
        multipliers[key] = torch.arange(1, len(input_sums) + 1, device=weight.device).to(input_sums).cos()
    return input_sums @ multipliers[key]
