"""One block of a decoder, with hooks on its input and its forward.

Shapes: B sequences, N tokens, E width of a hidden state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.cache_utils import Cache

#: Called with the input of a block and the KV cache; returns a replacement of the input, or None to keep it.
HiddenHook = Callable[[Tensor, Cache | None], Tensor | None]


@dataclass(frozen=True)
class Block:
    """One block, or its attention, which takes hidden states (B, N, E) and returns new ones.

    Attributes:
        module: The module that the model calls.
        argument: Name of its first argument, the hidden states.
        extras: Number of further values that it returns; None means that it returns the hidden states, not a tuple.
    """

    module: nn.Module
    argument: str
    extras: int | None

    def hidden(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the hidden states among the arguments of a call."""
        return kwargs[self.argument] if self.argument in kwargs else args[0]

    @contextmanager
    def watched(self, hidden_hook: HiddenHook) -> Iterator[None]:
        """Call a hook with each pass's input, which it may replace."""

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
            cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
            changed = hidden_hook(self.hidden(args, kwargs), cache)
            if changed is None:
                return None
            if self.argument in kwargs:
                return args, kwargs | {self.argument: changed}
            return (changed, *args[1:]), kwargs

        handle = self.module.register_forward_pre_hook(hook, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def skipped(self) -> AbstractContextManager[None]:
        """Let the block return its input."""
        return self.replaced(lambda hidden: hidden)

    @contextmanager
    def replaced(self, compute: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Let the block return ``compute`` of its input.

        The module stays in the model, so the model's loop can read its attributes. Accelerate keeps the forward of an
        offloaded module in the same attribute, so it loads no weights for a replaced block.
        """

        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden = compute(self.hidden(args, kwargs))
            return hidden if self.extras is None else (hidden, *[None] * self.extras)

        own = vars(self.module)
        before = own.get("forward")
        own["forward"] = forward
        try:
            yield
        finally:
            del own["forward"]
            if before is not None:
                own["forward"] = before


class FoundBlocks(NamedTuple):
    """The blocks, and the attention that can be replaced, by layer."""

    all: tuple[Block, ...]
    attention: Mapping[int, Block]
