"""Fits find useless and harmful heads, resume bit by bit, and leave the model as it is. Gates follow their formulas."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headscan.architectures import VOCABULARY
from headscan.errors import GateError, SequenceError, UnsupportedModelError
from headscan.gates.fit_gates import (
    FitState,
    GateFit,
    batch_objective,
    expected_gates,
    fit_gates,
    fit_two_sided,
    gates_applied,
    gates_of,
    open_probability,
    sample_gates,
)
from headscan.gates.gate_settings import GateFitConfig
from headscan.gradients.backward import backward
from headscan.grid import Head
from headscan.models.loaded_model import LoadedModel
from headscan.pruning.calibration import Calibration
from tests.small_models import make_loaded

TOKENS, TEXTS = 12, 8
#: A head that adds nothing, and one that adds noise.
USELESS, HARMFUL = Head(1, 2), Head(0, 4)


def some_texts(seed: int = 0) -> Calibration:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(6, VOCABULARY, (TEXTS, TOKENS), generator=generator)
    return Calibration(ids, torch.tensor([TOKENS] * (TEXTS - 1) + [7]))


def quick(**settings: object) -> GateFitConfig:
    return replace(GateFitConfig(steps=6, batch_tokens=36), **settings)


def columns(lm: LoadedModel, head: Head) -> Tensor:
    """Return the part of the output projection that reads a head, which may be changed."""
    site = lm.grid.site_of(head.layer)
    weight = lm.module(site.output_projection).weight.data
    return weight[:, head.head * site.value_dim : (head.head + 1) * site.value_dim]


def reference_loss(lm: LoadedModel, ids_N: Tensor, gates: dict[int, Tensor]) -> Tensor:
    """Return the loss of one sequence, with the heads of each layer multiplied by (H,) gates in a plain hook."""
    handles = []
    for site in lm.grid.sites:

        def multiply(_, args, site=site):
            heads = args[0].unflatten(-1, (site.num_attention_heads, site.value_dim))
            return ((heads * gates[site.layer][:, None]).flatten(-2),)

        handles.append(lm.module(site.output_projection).register_forward_pre_hook(multiply))
    try:
        logits = lm.model(input_ids=ids_N[None], use_cache=False).logits[0, :-1]
    finally:
        for handle in handles:
            handle.remove()
    return torch.nn.functional.cross_entropy(logits, ids_N[1:])


@pytest.mark.parametrize("recompute", [True, False])
def test_derivatives_by_gates_equal_finite_differences(recompute: bool) -> None:
    lm = make_loaded("gpt2", dtype=torch.float64)  # norms of llama round to float32
    texts = some_texts()
    lengths = texts.lengths.tolist()[-2:]
    ids = texts.ids[-2:]
    generator = torch.Generator().manual_seed(1)
    log_a = torch.randn(lm.grid.shape, generator=generator, dtype=torch.float64)
    noise = torch.rand((2, *lm.grid.shape), generator=generator, dtype=torch.float64)
    sampled = sample_gates(log_a, noise)
    gates = {layer: sampled[:, layer].clone().requires_grad_() for layer in range(lm.grid.num_layers)}
    loss = batch_objective(lm, "loss", ids, lengths, [0, 1])
    with gates_applied(lm, gates):
        found = backward(lm, loss, gates=gates, recompute=recompute)
    step = 1e-5
    for row, layer, head in [(0, 0, 1), (1, 0, 3), (0, 1, 0), (1, 1, 5), (1, 2, 2)]:
        values = []
        for sign in (1, -1):
            moved = {each: gate[row].detach().clone() for each, gate in gates.items()}
            moved[layer][head] += sign * step
            with torch.no_grad():
                values.append(float(reference_loss(lm, ids[row, : lengths[row]], moved)))
        assert float(found[layer][row, head]) == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-4, abs=1e-8)


def own_texts(lm: LoadedModel) -> Calibration:
    """Return texts that a model continues greedily, so that its heads help to predict them."""
    ids = some_texts().ids[:, :2]
    for _ in range(TOKENS - 2):
        ids = torch.cat([ids, lm.model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return Calibration(ids, torch.full((TEXTS,), TOKENS))


def test_a_useless_head_and_a_harmful_one_are_found() -> None:
    lm = make_loaded("llama")
    lm.model.lm_head.weight.data *= 30  # confident predictions
    for head in (USELESS, HARMFUL):
        columns(lm, head).zero_()
    texts = own_texts(lm)
    weight = columns(lm, HARMFUL)
    weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)))
    found = fit_two_sided(lm, texts, GateFitConfig(share=0.25, steps=60, batch_tokens=TEXTS * TOKENS, rate=0.3))
    assert found.class_of(HARMFUL) == "interfering" and found.class_of(USELESS) == "irrelevant"
    assert {USELESS, HARMFUL} <= set(found.down.closed(4))
    assert list(found.classes().values()).count("facilitating") > 9
    assert found.down.penalty > 0 > found.up.penalty


def test_the_share_is_reached_and_the_model_is_unchanged() -> None:
    lm = make_loaded("llama")
    before = {name: weight.clone() for name, weight in lm.model.named_parameters()}
    found = fit_gates(lm, some_texts(), quick(share=0.5, steps=150, rate=0.2))
    assert float(found.open_probabilities.mean()) == pytest.approx(0.5, abs=0.05)
    assert all(torch.equal(weight, before[name]) for name, weight in lm.model.named_parameters())
    assert all(weight.requires_grad and weight.grad is None for weight in lm.model.parameters())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in lm.model.modules())
    assert len(found.mask(share=0.5).heads) == len(found.closed(9)) == 9
    # As everywhere, halves are rounded up, and a share is at least one head.
    assert [len(found.mask(share=share).heads) for share in (0.25, 0.01)] == [5, 1]
    least = found.log_a.flatten().sort().values[8]
    assert all(found.log_a[head] <= least for head in found.closed(9))


def test_a_fit_goes_on_until_its_share_is_closed() -> None:
    """A share whose heads the schedule does not close; the mask takes no head that the fit keeps open."""
    lm, config, steps = make_loaded("llama"), quick(share=0.7, steps=25, rate=0.1), list[int]()
    fit = GateFit(lm, some_texts(), config)
    at_end = gates_of(lm.grid, fit.advance(fit.start(), config.steps - 1))
    assert at_end.still_open(at_end.mask(share=0.7).heads)
    found = fit_gates(lm, some_texts(), config, every=10, progress=lambda now: steps.append(now.step))
    assert config.steps < steps[-1] < 4 * config.steps
    assert found.still_open(found.mask(share=0.7).heads) == ()
    assert len(found.still_open(found.ranked)) == 18 - round(0.7 * 18)
    # The number of steps between two saved states decides nothing.
    again = fit_gates(make_loaded("llama"), some_texts(), config, every=3)
    assert torch.equal(found.log_a, again.log_a)


def test_a_share_that_is_never_closed_ends_the_fit() -> None:
    lm, steps = make_loaded("llama"), list[int]()
    found = fit_gates(lm, some_texts(), quick(share=0.9, rate=1e-3), progress=lambda now: steps.append(now.step))
    assert steps[-1] == 4 * 6
    assert len(found.still_open(found.mask(share=0.9).heads)) == round(0.9 * 18)


@pytest.mark.parametrize("objective", ["loss", "divergence"])
def test_a_fit_resumes_bit_by_bit(objective: str) -> None:
    config = quick(objective=objective, share=None, penalty=0.01)
    expected = fit_gates(make_loaded("llama"), some_texts(), config)
    stopped, resumed = (GateFit(make_loaded("llama"), some_texts(), config) for _ in range(2))
    left = stopped.advance(stopped.start(), 4)
    state = FitState.of(left.numbers(), left.log_a.dtype)
    assert state.step == 4 and torch.equal(state.square, left.square)
    found = gates_of(make_loaded("llama").grid, resumed.advance(state, 100))
    assert torch.equal(found.log_a, expected.log_a) and found.penalty == expected.penalty


def test_seeds_decide_the_gates() -> None:
    first, again, other = (fit_gates(make_loaded("llama"), some_texts(), quick(seed=seed)).log_a for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize(("family", "site"), [("bart", "cross"), ("bart", "encoder"), ("gpt2", "self")])
def test_other_models_and_half_precision(family: str, site: str) -> None:
    lm = make_loaded(family, dtype=torch.bfloat16).at(site)
    fit = GateFit(lm, some_texts(), quick())
    state = fit.advance(fit.start(), 2)
    assert state.log_a.dtype == torch.float32 and state.log_a.isfinite().all()
    assert (state.log_a != fit.start().log_a).all()


def test_models_without_gates_are_refused() -> None:
    quantised = make_loaded("llama")
    quantised.model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(UnsupportedModelError, match="is quantised"):
        fit_gates(quantised, some_texts(), quick())
    training = make_loaded("llama")
    training.model.train()
    with pytest.raises(UnsupportedModelError, match="train mode"):
        fit_gates(training, some_texts(), quick())
    with pytest.raises(UnsupportedModelError, match="no mask token"):
        fit_gates(make_loaded("bert"), some_texts(), quick())
    with pytest.raises(UnsupportedModelError, match="no decoder"):
        fit_gates(make_loaded("bert"), some_texts(), quick(objective="divergence"))
    with pytest.raises(SequenceError, match="token ids"):
        fit_gates(make_loaded("llama"), Calibration(some_texts().ids + VOCABULARY, some_texts().lengths), quick())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"share": 0.0}, "`share=0` "),
        ({"share": 1.0}, "`share=1` "),
        ({"objective": "accuracy"}, "`objective='accuracy'` is unknown"),
        ({"steps": 0}, "steps=0"),
        ({"batch_tokens": 0}, "batch_tokens=0"),
        ({"seed": -1}, "seed=-1"),
        ({"rate": float("nan")}, "rate=nan"),
        ({"penalty": float("inf")}, "penalty=inf"),
        ({"start": float("nan")}, "start=nan"),
    ],
)
def test_settings_out_of_range(settings: dict[str, object], message: str) -> None:
    with pytest.raises(GateError, match=message):
        quick(**settings)


def test_masks_out_of_range() -> None:
    found = fit_gates(make_loaded("llama"), some_texts(), quick(steps=1))
    for settings in ({"count": 19}, {"count": -1}, {"share": 1.2}, {}, {"count": 1, "share": 0.5}):
        with pytest.raises(GateError):
            found.mask(**settings)


LOCATIONS = torch.tensor([-3.0, -1.0, 0.0, 0.7, 2.5], dtype=torch.float64)
SAMPLES = 200_000


def noise() -> torch.Tensor:
    # Midpoints of equal intervals: the mean over them is an integral over the uniform distribution.
    return ((torch.arange(SAMPLES, dtype=torch.float64) + 0.5) / SAMPLES)[:, None].expand(-1, len(LOCATIONS))


def test_probability_and_expectation_equal_those_of_samples() -> None:
    samples = sample_gates(LOCATIONS, noise())
    assert ((samples > 0).double().mean(0) - open_probability(LOCATIONS)).abs().max() < 1e-4
    assert (samples.mean(0) - expected_gates(LOCATIONS)).abs().max() < 1e-4
    assert samples.min() == 0 and samples.max() == 1


def test_probability_is_the_papers_formula() -> None:
    expected = [1 / (1 + math.exp(-(a - 0.33 * math.log(0.1 / 1.1)))) for a in LOCATIONS.tolist()]
    assert open_probability(LOCATIONS).tolist() == pytest.approx(expected, abs=1e-12)


def test_derivatives_equal_finite_differences() -> None:
    some = torch.tensor([[0.2, 0.6, 0.45, 0.3, 0.05]], dtype=torch.float64)
    locations = LOCATIONS.clone().requires_grad_()
    with torch.enable_grad():
        assert torch.autograd.gradcheck(lambda a: sample_gates(a, some), locations)
        assert torch.autograd.gradcheck(open_probability, locations)
