"""``projected_output_norm``: exact on badly conditioned projections, refused where a module does not use its matrix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.bitnet import AutoBitLinear
from transformers.pytorch_utils import Conv1D

import headscan
from headscan.architectures import VOCABULARY
from headscan.errors import NotFiniteError, UnsupportedModelError
from headscan.grid import AttentionSite
from headscan.models.forward_inputs import TokenMeans
from headscan.statistics.norm_statistics import projection_factor
from headscan.statistics.registry import output_statistics
from tests.small_models import make_loaded

H, D, M, TOKENS = 4, 64, 256, 50
SITE = AttentionSite("self", 0, "attn", "attn.o_proj", H, H, D, D)
NAME = "projected_output_norm"
IDS = torch.randint(5, VOCABULARY, (2, 30), generator=torch.Generator().manual_seed(0))


def badly_conditioned(condition: float, *, conv: bool = False) -> tuple[nn.Module, Tensor]:
    """A projection whose heads have singular values from 1 down, and outputs along the four smallest (1, N, H, D)."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    left, right = torch.linalg.qr(normal(H, D, D)).Q, torch.linalg.qr(normal(H, M, D)).Q
    values = torch.tensor(condition, dtype=torch.float64) ** -torch.linspace(0, 1, D, dtype=torch.float64)
    rows = (left * values @ right.mT).flatten(0, 1).float()
    module = Conv1D(M, H * D) if conv else nn.Linear(H * D, M)
    with torch.no_grad():
        module.weight.copy_(rows if conv else rows.T)
        module.bias.normal_(generator=generator)
    return module, torch.einsum("nhk,hdk->nhd", normal(TOKENS, H, 4), left[:, :, -4:]).float()[None]


def truth(module: nn.Module, outputs_BNHD: Tensor) -> Tensor:
    weight = module.weight.detach().double()
    rows_HDM = (weight if isinstance(module, Conv1D) else weight.T).unflatten(0, (H, D))
    return torch.einsum("bnhd,hdm->bnhm", outputs_BNHD.double(), rows_HDM).norm(dim=-1).mean(1)


@pytest.mark.parametrize("conv", [False, True])
@pytest.mark.parametrize(("condition", "bound"), [(1e2, 1e-6), (1e4, 1e-5), (1e6, 1e-3)])
def test_heads_that_write_into_small_singular_values(condition: float, bound: float, conv: bool) -> None:
    module, heads = badly_conditioned(condition, conv=conv)
    factor = projection_factor(module, SITE)
    assert factor.shape == (H, D, D) and factor.dtype == torch.float32
    lengths = torch.tensor([TOKENS])
    found = output_statistics(heads, TokenMeans(lengths), frozenset({NAME}), factor)[NAME].double()
    expected = truth(module, heads)
    assert (found / expected - 1).abs().max() < bound
    # As it was: the square of the matrix, in float32.
    weight = module.weight.detach()
    rows = (weight if conv else weight.T).unflatten(0, (H, D))
    square = torch.einsum("bnhd,hde,bnhe->bhn", heads, rows @ rows.mT, heads).clamp_min(0).sqrt().mean(-1)
    if condition == 1e4:
        assert (square / expected - 1).abs().max() > 0.02


def test_singular_projections_and_zero_ones() -> None:
    module, heads = badly_conditioned(10.0)
    assert isinstance(module, nn.Linear)
    with torch.no_grad():
        module.weight[:, :D] = 0.0  # head 0 writes nothing
        module.weight[:, D : 2 * D] = module.weight[:, D : D + 1]  # head 1 has rank 1
    lengths = torch.tensor([TOKENS])
    found = output_statistics(heads, TokenMeans(lengths), frozenset({NAME}), projection_factor(module, SITE))[
        NAME
    ].double()
    expected = truth(module, heads)
    assert found[0, 0] < 1e-6
    assert (found[0, 1:] / expected[0, 1:] - 1).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype_passes_the_check_of_the_module(dtype: torch.dtype) -> None:
    module, _ = badly_conditioned(100.0)
    factor = projection_factor(module.to(dtype), SITE)
    assert factor.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


class Scaled(nn.Linear):
    """Multiplies by something else than its weight."""

    def forward(self, input: Tensor) -> Tensor:
        return 1.5 * super().forward(input)


#: AutoBitLinear takes 20 s to compile.
@pytest.mark.parametrize("kind", [pytest.param(AutoBitLinear, marks=pytest.mark.slow), Scaled])
def test_modules_that_do_not_multiply_by_their_weight_are_refused(kind: type[nn.Linear]) -> None:
    lm = make_loaded("llama")
    old = lm.module("model.layers.1.self_attn.o_proj")
    options = {"online_quant": True} if kind is AutoBitLinear else {}
    new = kind(old.in_features, old.out_features, bias=False, **options).eval()
    new.weight = old.weight
    lm.model.model.layers[1].self_attn.o_proj = new.eval()
    message = rf"model\.layers\.1\.self_attn\.o_proj, a {kind.__name__}, differs from it by .* \(limit 0\.2 %\)"
    with pytest.raises(UnsupportedModelError, match=message):
        headscan.collect(lm, IDS, statistics=[NAME])
    with (
        pytest.raises(UnsupportedModelError, match=message),
        headscan.intervene(lm, headscan.HeadRule(NAME, threshold=1.0)),
    ):
        lm.model(IDS)
    assert headscan.collect(lm, IDS, statistics=["output_norm"])["output_norm"].isfinite().all()


def test_autocast_of_the_caller_is_not_taken_for_quantisation() -> None:
    module, _ = badly_conditioned(10.0)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(projection_factor(module, SITE), projection_factor(module, SITE))
    assert torch.allclose(projection_factor(module, SITE) @ projection_factor(module, SITE).mT, _gram(module))


def _gram(module: nn.Module) -> Tensor:
    rows = module.weight.detach().T.unflatten(0, (H, D))
    return rows @ rows.mT


def test_factors_are_computed_once_and_again_when_a_weight_changes() -> None:
    lm = make_loaded("gpt2")
    path = lm.grid.sites[1].output_projection
    before = headscan.collect(lm, IDS, statistics=[NAME])[NAME]
    kept = {path: factor for path, (_, factor) in lm.projection_factors.items()}
    assert len(kept) == 3
    assert torch.equal(headscan.collect(lm, IDS, statistics=[NAME])[NAME], before)
    assert all(lm.projection_factors[path][1] is factor for path, factor in kept.items())
    lm.module(path).weight.data.mul_(2.0)  # type: ignore[union-attr]
    after = headscan.collect(lm, IDS, statistics=[NAME])[NAME]
    assert torch.equal(after[:, 0], before[:, 0])
    torch.testing.assert_close(after[:, 1], 2 * before[:, 1])
    assert lm.projection_factors[lm.grid.sites[0].output_projection][1] is kept[lm.grid.sites[0].output_projection]
    # Heads that change places change nothing but their order.
    with torch.no_grad():
        weight = lm.module(path).weight
        weight.copy_(weight.unflatten(0, (6, 8)).flip(0).flatten(0, 1))  # type: ignore[operator, arg-type]
    assert not torch.allclose(headscan.collect(lm, IDS, statistics=[NAME])[NAME][:, 1], after[:, 1])


def test_weights_that_are_not_finite_are_named() -> None:
    lm = make_loaded("llama")
    lm.module("model.layers.1.self_attn.o_proj").weight.data[3, 2] = float("nan")  # type: ignore[index, union-attr]
    with pytest.raises(NotFiniteError):
        headscan.collect(lm, IDS, statistics=[NAME])


def test_factors_made_in_inference_mode_serve_passes_that_take_gradients() -> None:
    lm = make_loaded("llama")
    with torch.inference_mode():
        headscan.collect(lm, IDS, statistics=[NAME])
    with torch.enable_grad(), headscan.intervene(lm, headscan.HeadRule(f"{NAME}_ln", threshold=0.9)):
        lm.model(IDS).logits.sum().backward()
    assert lm.module("model.layers.0.self_attn.v_proj").weight.grad is not None
