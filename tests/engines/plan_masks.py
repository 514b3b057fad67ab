"""Plans by KV head as explicit masks in transformers: what vLLM with the plugin has to compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM

#: Tokens of a block of vLLM's cache in all checks.
BLOCK = 32


class MaskedModel:
    """A model of transformers in float32 whose KV heads see what the fields of a plan allow, at every position."""

    def __init__(self, folder: Path, fields: Mapping[str, Any] | None) -> None:
        name = f"served_plan_{id(self)}"
        AttentionInterface.register(name, self._attention)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.model.set_attn_implementation(name)
        self.plan = None if fields is None else fields["head_plan"]

    def _attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        group, count = query.shape[1] // key.shape[1], key.shape[2]
        at = torch.arange(count)
        visible = (at[None] <= at[:, None]).repeat(query.shape[1], 1, 1)
        kept = self.plan["heads"][module.layer_idx] if self.plan else ()
        for head in [head for head, number in enumerate(kept) if number]:
            sink, recent = self.plan["windows"][kept[head] - 1]  # type: ignore[index]
            first = -(-sink // BLOCK) * BLOCK
            chunk = self.plan.get("chunk", 1)  # type: ignore[union-attr]
            start = (at // chunk * chunk - recent + 1) // BLOCK * BLOCK
            window = (at[None] < first) | (at[None] >= start[:, None])
            visible[head * group : (head + 1) * group] &= window
        key, value = (each.repeat_interleave(group, 1) for each in (key, value))
        weights = (query @ key.mT * scaling).masked_fill(~visible, -torch.inf).softmax(-1)
        return (weights @ value).transpose(1, 2).contiguous(), None

    @torch.no_grad()
    def log_probabilities(self, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Return those after the prompt and after each of the tokens but the last, (tokens, vocabulary)."""
        ids = torch.tensor([[*prompt, *tokens]])
        found: Tensor = self.model(ids, logits_to_keep=len(tokens) + 1).logits[0, :-1].log_softmax(-1)
        return found


def difference(masked: MaskedModel, prompt: Sequence[int], answer: Mapping[str, Any]) -> tuple[float, int]:
    """Return the largest difference of the log-probabilities in an answer of vLLM, and from which token on its greedy
    tokens are others, counted from 1; 0 if none is. A token that is as likely as the largest within 1e-4 is equal.
    """
    expected = masked.log_probabilities(prompt, answer["tokens"])
    largest = max(
        abs(expected[place, int(token)].item() - value)
        for place, row in enumerate(answer["log_probabilities"])
        for token, value in row.items()
    )
    chosen = expected.gather(1, torch.tensor(answer["tokens"])[:, None])[:, 0]
    others = (expected.max(-1).values - chosen > 1e-4).nonzero()
    return largest, int(others[0]) + 1 if len(others) else 0
