"""Logits at chosen places are the model's own there, in every family of decoders."""

from __future__ import annotations

import pytest
import torch

from headscan.architectures import FAMILIES, VOCABULARY
from headscan.models.loaded_model import logits_at
from tests.small_models import DISTINCT, distinct_first, make_loaded

#: In addition to those of other attention: families whose logits are scaled, or whose head has a bias.
OWN_LOGITS = {"phi", "codegen", "cohere", "cohere2", "granite", "granitemoe", "nanochat"}
CASES = distinct_first(FAMILIES, DISTINCT | OWN_LOGITS)

ROWS, COLUMNS = [0, 0, 1, 2, 2], [3, 8, 5, 0, 8]


@pytest.mark.parametrize("family", CASES)
@torch.no_grad()
def test_logits_are_the_models_own(family: str) -> None:
    lm = make_loaded(family)
    ids = torch.randint(5, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(1))
    whole = lm.model(input_ids=ids, use_cache=False).logits[ROWS, COLUMNS]
    torch.testing.assert_close(logits_at(lm, ids, ROWS, COLUMNS, use_cache=False), whole, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_head_is_computed_for_those_places_alone_and_let_go() -> None:
    lm = make_loaded("llama")
    head = lm.model.get_output_embeddings()
    seen: list[tuple[int, ...]] = []
    handle = head.register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape)))
    try:
        logits_at(lm, torch.ones(3, 9, dtype=torch.long), ROWS, COLUMNS)
        lm.model(input_ids=torch.ones(3, 9, dtype=torch.long))
    finally:
        handle.remove()
    assert [shape[:2] for shape in seen] == [(1, len(ROWS)), (3, 9)]
