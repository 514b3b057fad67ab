"""Derivatives of a loss by tensors of every layer, from one forward and one backward pass.

The forward pass of a decoder keeps the input of every block, and the backward pass runs one block at a time again, so
memory is linear in the length and about that of one block. Other models, and those whose layers exchange more than
hidden states, are differentiated as a whole.

Shapes: B sequences, N tokens, H query heads, Dv width of a head's output, E width of a hidden state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headscan.attention.hooks import output_hook
from headscan.errors import UnsupportedModelError
from headscan.gradients.losses import Loss
from headscan.grid import AttentionSite
from headscan.layers.blocks import Blocks, find_blocks
from headscan.models.forward_inputs import run_forward, wide_norm, widened, without_autocast
from headscan.models.loaded_model import Block, LoadedModel

#: Called with a site, a tensor of its layer, and the derivative of the loss by it: float32 or wider, unscaled.
Visit = Callable[[AttentionSite, Tensor, Tensor], None]


@contextmanager
def watched_layers(
    lm: LoadedModel, on_heads: Visit | None, on_outputs: Visit | None, *, scale: float, top: int | None = None
) -> Iterator[None]:
    """Call visitors in backward passes of the forward passes that run with gradients; all kinds of sites.

    Args:
        on_heads: Receives the heads' outputs (B, N, H, Dv); None takes no derivative by them.
        on_outputs: Receives the output projection's output (B, N, E); None takes no derivative by it.
        scale: Factor of the loss, by which derivatives are divided.
        top: The highest layer to visit; None visits all.
    """

    def watch(site: AttentionSite, tensor: Tensor, visit: Visit) -> None:
        if not torch.is_grad_enabled() or (top is not None and site.layer > top):
            return
        if not tensor.requires_grad:
            tensor.requires_grad_()  # no layer below takes derivatives, so the backward pass ends here
        values = tensor.detach()  # keeping the tensor itself would keep its graph alive

        def receive(gradient: Tensor) -> None:
            wide = widened(gradient)
            visit(site, values, wide / scale if scale != 1 else wide)

        tensor.register_hook(receive)

    grids = [lm.at(kind) for kind in lm.grid.kinds]
    sites = [site for each in grids for site in each.grid.sites]

    def left(visit: Visit, site: AttentionSite, _: nn.Module, __: Any, out: Tensor) -> None:
        watch(site, out, visit)

    def entered(visit: Visit, site: AttentionSite, outputs_BNHD: Tensor) -> Tensor:
        watch(site, outputs_BNHD, visit)
        return outputs_BNHD

    with ExitStack() as hooks:
        if on_outputs is not None:
            for site in sites:
                hook = partial(left, on_outputs, site)
                hooks.callback(lm.module(site.output_projection).register_forward_hook(hook).remove)
        if on_heads is not None:
            for each in grids:
                hooks.enter_context(output_hook(each, partial(entered, on_heads)))
        yield


@dataclass(frozen=True)
class BlockCall:
    """A call of a block, which can be repeated on its input ``hidden`` (B, N, E)."""

    block: Block
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden: Tensor

    def again(self, hidden: Tensor) -> Tensor:
        """Return the block's output (B, N, E) for another input."""
        name = self.block.argument
        if name in self.kwargs:
            out = self.block.module(*self.args, **(self.kwargs | {name: hidden}))
        else:
            out = self.block.module(hidden, *self.args[1:], **self.kwargs)
        return out[0] if isinstance(out, tuple) else out


@contextmanager
def keep_call(block: Block, layer: int, calls: dict[int, BlockCall]) -> Iterator[None]:
    """Put the call of a block in the next pass into ``calls[layer]``."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[layer] = BlockCall(block, args, kwargs, block.hidden(args, kwargs))

    with block.module.register_forward_pre_hook(hook, with_kwargs=True):
        yield


@contextmanager
def last_output(blocks: Blocks) -> Iterator[list[Tensor]]:
    """Keep the output of the last block in the next pass."""
    kept: list[Tensor] = []

    def hook(_: nn.Module, __: Any, out: Any) -> None:
        kept[:] = [out[0] if isinstance(out, tuple) else out]

    with blocks.all[-1].module.register_forward_hook(hook):
        yield kept


def same_output(out: Tensor, after: Tensor) -> bool:
    """Return True if two hidden states differ by at most 64 roundings, and by at most 2 % of their norm."""
    if out.shape != after.shape:
        return False
    bound = min(64 * torch.finfo(out.dtype).eps, 0.02) * wide_norm(out.detach())
    return bool(wide_norm(out.detach() - after.to(out.device)) <= bound)


@contextmanager
def frozen_weights(model: nn.Module) -> Iterator[None]:
    """Take no derivatives by the weights."""
    weights = dict(model.named_parameters())
    names = [name for name, weight in weights.items() if weight.requires_grad]
    try:
        for name in names:
            weights[name].requires_grad_(False)
        yield
    finally:
        # Accelerate replaces the weights of offloaded modules.
        weights = dict(model.named_parameters())
        for name in names:
            weights[name].requires_grad_(True)


def backward(
    lm: LoadedModel,
    loss: Loss,
    *,
    on_heads: Visit | None = None,
    on_outputs: Visit | None = None,
    gates: Mapping[int, Tensor] | None = None,
    recompute: bool = True,
) -> dict[int, Tensor]:
    """Visit the derivatives of the summed loss of a batch from the last layer to the first; return those by the gates.

    A visitor's tensors are released after its call, which may run in a thread of autograd.

    Args:
        gates: By layer, a leaf tensor that requires a gradient and that an open hook uses in this layer.
        recompute: Run the blocks of a decoder again one at a time; False keeps the graph of all blocks, which takes a
            third less time and the memory of all of them.
    """
    leaves = dict(gates or {})
    pass_ = _Pass(lm, loss, on_heads, on_outputs, leaves)
    with torch.inference_mode(False), frozen_weights(lm.model):
        refuse_lost_derivatives(lm)
        if not lm.grid.predicts_next_token:
            pass_.whole_model()
        else:
            blocks = find_blocks(lm)
            shares_keys = any(site.kv_shared_from is not None for site in lm.grid.sites)
            whole = shares_keys or not recompute
            top = len(blocks.all) - 1 if whole else pass_.block_by_block(blocks)
            if top is not None:
                pass_.from_last_block(blocks, top)
    return pass_.found


#: Dtypes of weights that have derivatives.
_DIFFERENTIABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def refuse_lost_derivatives(lm: LoadedModel) -> None:
    """Raise if a quantised module passes no derivative on to its input. Such kernels cut the graph without an error.

    One module of each kind is tried on random numbers: it is linear, so the derivative follows from its outputs.
    """
    kinds: dict[tuple[object, ...], tuple[str, nn.Module]] = {}
    for name, module in lm.model.named_modules():
        own = [*module._parameters.values(), *module._buffers.values()]
        tensors = [tensor for tensor in own if tensor is not None and not tensor.is_meta]
        facts = {(type(tensor), tensor.dtype) for tensor in tensors}
        quantised = any(kind not in (Tensor, nn.Parameter) or dtype not in _DIFFERENTIABLE for kind, dtype in facts)
        if quantised and hasattr(module, "in_features"):
            kinds.setdefault((type(module), frozenset(facts)), (name, module))
    for name, module in kinds.values():
        if _loses_derivative(module, lm.model.dtype):
            raise UnsupportedModelError(
                f"{name}, a {type(module).__name__}, has quantised weights through which no derivatives pass. Load the "
                "model without quantisation"
            )


def _loses_derivative(module: Any, dtype: torch.dtype) -> bool:
    device = next(iter((*module.parameters(), *module.buffers()))).device
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(1, 4, module.in_features, generator=generator).to(device, dtype).requires_grad_()
    with torch.enable_grad():
        out = module.forward(values)
        if not out.requires_grad:
            return True
        weights = torch.randn(out.shape, generator=generator).to(out)
        (gradient,) = torch.autograd.grad((out * weights).sum(), values, allow_unused=True)
    if gradient is None:
        return True
    with torch.no_grad():
        expected = (weights * (out - module.forward(torch.zeros_like(values)))).double()
        found = (values * gradient).double()
        return bool((found.sum() - expected.sum()).abs() > 0.1 * expected.norm())


@dataclass
class _Pass:
    """One backward pass; ``found`` holds the derivatives by the gates."""

    lm: LoadedModel
    loss: Loss
    on_heads: Visit | None
    on_outputs: Visit | None
    gates: dict[int, Tensor]

    def __post_init__(self) -> None:
        self.found: dict[int, Tensor] = {}

    def block_by_block(self, blocks: Blocks) -> int | None:
        """Repeat one block at a time; return the highest layer that differs and was not visited, or None."""
        lowest, count = self._lowest(), len(blocks.all)
        calls: dict[int, BlockCall] = {}
        with torch.no_grad(), ExitStack() as hooks, last_output(blocks) as last:
            for layer in range(lowest, count):
                hooks.enter_context(keep_call(blocks.all[layer], layer, calls))
            run_forward(self.lm.model, dict(self.loss.inputs))
        after = last.pop()
        gradient = self.loss.gradient(blocks, after)
        for layer in reversed(range(lowest, count)):
            call = calls.pop(layer)
            hidden = call.hidden.detach().requires_grad_(layer > lowest)
            with torch.enable_grad(), self._watched(), without_autocast(self.lm.device):
                out = call.again(hidden)
            if not same_output(out, after):
                return layer
            torch.autograd.backward(out, gradient.to(out.device))
            self._take_gates(layer, layer)
            if layer > lowest:
                assert hidden.grad is not None
                gradient, after = hidden.grad, call.hidden
            del out, hidden
        return None

    def from_last_block(self, blocks: Blocks, top: int) -> None:
        """Differentiate all blocks in one graph, and visit the layers from ``top`` down."""
        with torch.enable_grad(), last_output(blocks) as last, self._watched(top):
            run_forward(self.lm.model, dict(self.loss.inputs))
        after = last.pop()
        torch.autograd.backward(after, self.loss.gradient(blocks, after))
        self._take_gates(0, top)

    def whole_model(self) -> None:
        """Differentiate the losses in one graph of the whole model."""
        with torch.enable_grad(), self._watched(), without_autocast(self.lm.device):
            total = self.loss.losses(self.lm).sum() * self.loss.scale
        total.backward()
        self._take_gates(0, self.lm.grid.num_layers - 1)

    def _watched(self, top: int | None = None) -> AbstractContextManager[None]:
        return watched_layers(self.lm, self.on_heads, self.on_outputs, scale=self.loss.scale, top=top)

    def _lowest(self) -> int:
        """Return the lowest layer with a derivative."""
        visited = self.on_heads is not None or self.on_outputs is not None
        return min([*self.gates, *((site.layer for site in self.lm.grid.sites) if visited else ())])

    def _take_gates(self, first: int, last: int) -> None:
        """Move the derivatives of the gates of these layers to ``found``."""
        for layer, gate in self.gates.items():
            if first <= layer <= last:
                assert gate.grad is not None
                self.found[layer], gate.grad = gate.grad / self.loss.scale, None
            else:
                gate.grad = None
