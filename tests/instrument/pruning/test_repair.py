"""Repairs against exact solutions."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

import headscan
from headscan.demo import MODEL_FOLDER
from headscan.errors import PruningError, UnsupportedModelError
from headscan.layers.blocks import find_blocks
from headscan.models.loaded_model import LoadedModel
from headscan.pruning.calibration import Calibration
from headscan.pruning.edited_model import (
    Divergence,
    Edits,
    edited,
    entering,
    find_writers,
    read_weight,
    through_layer,
    watched_modules,
)
from headscan.pruning.head_selection import HeadSelection
from headscan.pruning.repair import DistillConfig, RepairConfig, distill, divergences, repair
from headscan.pruning.value_repair import STRENGTHS, LeastSquares
from headscan.texts.stdlib_files import held_out_files, seen_modules
from tests.instrument.pruning.texts import random_texts
from tests.small_models import make_loaded, slow

REMOVED = (headscan.Head(0, 1), headscan.Head(0, 2), headscan.Head(1, 5))


def divergence(lm: LoadedModel, weights: dict[str, Tensor]) -> float:
    return Divergence(lm, random_texts(lm, sequences=8, seed=3)).of(Edits(REMOVED, weights))


def test_a_removed_copy_is_replaced_exactly() -> None:
    lm = make_loaded("llama-mha")
    width = lm.grid.sites[0].value_dim
    with torch.no_grad():
        attention = lm.module(lm.grid.sites[0].path)
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = attention.get_submodule(name).weight
            weight[4 * width : 5 * width] = weight[:width]
    texts = random_texts(lm, sequences=40)
    removed = (headscan.Head(0, 4),)
    scored = Divergence(lm, random_texts(lm, seed=5))
    weights = repair(lm, texts, removed, RepairConfig(("o",)))
    without, repaired = scored.of(Edits(removed)), scored.of(Edits(removed, weights))
    assert repaired < 0.01 * without  # the ridge leaves a little


def test_the_output_projection_is_the_least_squares_solution() -> None:
    """On the first layer: explicit matrices, float64, one sequence at a time."""
    lm = make_loaded("gpt2")
    texts = random_texts(lm, sequences=30)
    site = lm.grid.sites[0]
    removed = [(0, 1), (0, 2)]
    found = repair(lm, texts, removed, RepairConfig(("o",)))[f"{site.output_projection}.weight"].T.double()
    module = lm.module(site.output_projection)
    old = read_weight(module).T.double()
    rows: list[Tensor] = []
    handle = module.register_forward_hook(lambda _, args, __: rows.append(args[0].detach().reshape(-1, 48).double()))
    with torch.no_grad():
        for ids, length in zip(texts.ids, texts.lengths.tolist(), strict=True):
            lm.model(input_ids=ids[None, :length])
    handle.remove()
    judged = len(texts.split(texts.tokens // 4)[1].ids)
    inputs, others = torch.cat(rows[:-judged]), torch.cat(rows[-judged:])
    kept = [c for c in range(48) if c // 8 not in (1, 2)]
    gram = inputs[:, kept].T @ inputs[:, kept]
    solutions = {}
    for share in STRENGTHS:
        strength = share * gram.diagonal().mean()
        right = inputs[:, kept].T @ (inputs @ old.T) + strength * old[:, kept].T
        weight = torch.linalg.solve(gram + strength * torch.eye(len(kept), dtype=torch.float64), right).T
        solutions[float((others @ old.T - others[:, kept] @ weight.T).square().sum())] = weight
    torch.testing.assert_close(found[:, kept], solutions[min(solutions)], rtol=1e-3, atol=1e-4)
    assert not found[:, [c for c in range(48) if c not in kept]].any()


@pytest.mark.parametrize("texts", [2, *slow(4)])
def test_few_calibration_tokens_do_no_harm(texts: int) -> None:
    """On texts that neither fit the weights nor chose their strength, the repair is not worse than none."""
    lm = headscan.load(MODEL_FOLDER, device="cpu", dtype="float32")
    calibration = _beginnings(lm, sorted(seen_modules())[::3], texts, 128)
    others = Divergence(lm, _beginnings(lm, sorted(held_out_files()), 6, 128))
    removed = tuple(sorted(Random(0).sample(list(lm.grid.heads()), 12)))
    weights = repair(lm, calibration, removed)
    assert weights
    assert others.of(Edits(removed, weights)) < 0.95 * others.of(Edits(removed))


def _beginnings(lm: LoadedModel, paths: list[Path], count: int, tokens: int) -> Calibration:
    """Return the beginnings of modules as texts."""
    tokenizer = lm.require_tokenizer()
    read = (tokenizer(path.read_text(errors="replace")[:20000], add_special_tokens=False).input_ids for path in paths)
    texts = islice(([0, *ids[: tokens - 1]] for ids in read if len(ids) >= tokens), count)
    return Calibration(torch.tensor(list(texts)), torch.full((count,), tokens))


def test_a_projection_stays_if_no_strength_helps_on_other_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(4, 6, generator=generator)
    kept = torch.tensor([True] * 5 + [False])
    fitting, judging = LeastSquares(), LeastSquares()
    inputs = torch.randn(8, 6, generator=generator)
    fitting.add(inputs, torch.randn(8, 4, generator=generator), torch.ones(8))
    others = torch.randn(500, 6, generator=generator)
    judging.add(others, others[:, :5] @ old[:, :5].T, torch.ones(500))
    assert fitting.solve_for(judging, old, kept) is None
    judging.add(others, others @ old.T, torch.ones(500))
    fitting.add(others, others @ old.T, torch.ones(500))
    assert fitting.solve_for(judging, old, kept) is not None


def test_a_repair_that_diverges_more_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = make_loaded("llama")
    texts = random_texts(lm, sequences=40)
    judging = texts.split(texts.tokens // 4)[1]
    weights = repair(lm, texts, REMOVED)
    models = [Edits(REMOVED), Edits(REMOVED, weights)]
    found = divergences(lm, judging, models)
    assert found == pytest.approx([Divergence(lm, judging).of(edits) for edits in models], rel=1e-4)
    assert found[1] < found[0]
    monkeypatch.setattr("headscan.pruning.repair.divergences", lambda *_: found[::-1])
    assert repair(lm, texts, REMOVED) == {}


@pytest.mark.slow
def test_more_repair_leaves_less_damage() -> None:
    lm = make_loaded("llama")
    texts = random_texts(lm, sequences=150)
    kinds = ((), ("o",), ("o", "v"), ("o", "v", "down"))
    none, o, ov, all_three = (divergence(lm, repair(lm, texts, REMOVED, RepairConfig(each))) for each in kinds)
    assert o < 0.9 * none
    assert ov < o
    assert all_three < ov
    weights = repair(lm, texts, REMOVED, RepairConfig())
    assert divergence(lm, distill(lm, texts, REMOVED, weights, DistillConfig(steps=30, rate=1e-3))) < all_three


@pytest.mark.slow
def test_the_value_projection_is_the_least_squares_solution() -> None:
    """Enough steps of conjugate gradients give the solution of the explicit problem, shortened for other texts."""
    lm = make_loaded("llama")
    texts = replace(random_texts(lm, sequences=12, tokens=20), batch_tokens=400)
    fitting, judging = texts.split(texts.tokens // 4)
    site = lm.grid.sites[2]
    config = RepairConfig(("v",), rounds=1, value_steps=200)
    removed = [(2, 1), (2, 3)]
    name = f"{site.path}.v_proj.weight"
    found = repair(lm, texts, removed, config)[name]

    def output(weight: Tensor, keep_all: bool, texts: Calibration = fitting) -> Tensor:
        blocks, parts = find_blocks(lm), []
        edits = Edits(() if keep_all else tuple(lm.grid.check(removed)), {name: weight})
        for batch in texts.batches(lm.device):
            hidden = entering(blocks, batch, 2)
            with edited(lm, edits), watched_modules(blocks, [site.output_projection]) as seen:
                through_layer(blocks, 2, batch, hidden)
            parts.append(seen.outputs[site.output_projection][batch.real_BN])
        return torch.cat(parts)

    with torch.no_grad():
        old = read_weight(lm.module(f"{site.path}.v_proj"))
        target = output(old, keep_all=True)
        start = output(old, keep_all=False)
        jacobian = []
        for entry in range(old.numel()):
            moved = old.clone()
            moved.view(-1)[entry] += 1.0
            jacobian.append((output(moved, keep_all=False) - start).flatten())
        matrix = torch.stack(jacobian, 1).double()
        best = torch.linalg.lstsq(matrix, (target - start).flatten().double()).solution
        least = float(((target - start).flatten().double() - matrix @ best).square().sum())
        moved, error = (output(found, keep_all=False) - start).double(), (target - start).double()
        share = float((moved * moved).sum() / (moved * error).sum())
        reached = float((error - moved / share).square().sum())
        before = float(error.square().sum())
        others = output(old, keep_all=False, texts=judging)
        moved = output(old + (found - old) / share, keep_all=False, texts=judging) - others
        wanted = output(old, keep_all=True, texts=judging) - others
    assert least < 0.9 * before
    assert reached - least < 0.1 * (before - least)  # the ridge keeps it from the very minimum
    assert 0 < share < 1
    assert share == pytest.approx(float((moved * wanted).sum() / moved.square().sum()), rel=0.1)


@pytest.mark.parametrize(
    ("name", "attention_additive", "mlp_additive"),
    [
        ("llama", True, True),
        ("gpt2", True, True),
        ("gpt_neox", True, True),
        ("phi", True, True),
        ("gemma2-softcap", False, False),
        ("olmo2", False, False),
        ("granite", False, False),
    ],
)
def test_writers_of_the_residual_stream(name: str, attention_additive: bool, mlp_additive: bool) -> None:
    lm = make_loaded(name)
    if name == "granite":
        lm.model.config.residual_multiplier = 0.5
        for layer in lm.model.model.layers:
            layer.residual_multiplier = 0.5
    writers = find_writers(find_blocks(lm), 1, lm.grid.sites[1])
    assert writers.attention is not None and writers.mlp is not None
    assert (writers.attention.additive, writers.mlp.additive) == (attention_additive, mlp_additive)
    assert writers.mlp.path.rpartition(".")[2] in ("down_proj", "c_proj", "dense_4h_to_h", "fc2")


@pytest.mark.parametrize("name", ["gpt_neox", "gemma2-softcap", *slow("qwen3_moe", "phi3", "opt")])
def test_repair_helps_in_other_families(name: str) -> None:
    lm = make_loaded(name)
    texts = random_texts(lm, sequences=60)
    assert divergence(lm, repair(lm, texts, REMOVED)) < 0.9 * divergence(lm, {})


@pytest.mark.parametrize("target", ["o", "v", "down"])
def test_the_repair_of_each_projection_helps(target: str) -> None:
    lm = make_loaded("llama")
    weights = repair(lm, random_texts(lm, sequences=60), REMOVED, RepairConfig((target,)))  # type: ignore[arg-type]
    assert weights and divergence(lm, weights) < divergence(lm, {})


def test_the_residual_stream_is_recognised_in_half_precision() -> None:
    """A factor after the attention is seen although its output is small next to the stream."""
    lm = make_loaded("granite", dtype=torch.bfloat16)
    for layer in lm.model.model.layers:
        layer.residual_multiplier = 0.22
        layer.self_attn.o_proj.weight.data *= 0.05
    writers = find_writers(find_blocks(lm), 1, lm.grid.sites[1])
    assert writers.attention is not None and not writers.attention.additive
    writers = find_writers(find_blocks(lm16 := make_loaded("llama", dtype=torch.bfloat16)), 1, lm16.grid.sites[1])
    assert writers.attention is not None and writers.attention.additive


def test_models_that_were_pruned_before_are_repaired_again() -> None:
    lm = headscan.slice_heads(make_loaded("llama"), [(0, 0), (1, 3)])
    texts = random_texts(lm, sequences=60)
    removed = (headscan.Head(0, 1), headscan.Head(1, 4))
    weights = repair(lm, texts, removed, RepairConfig(("o", "v", "down")))
    scored = Divergence(lm, random_texts(lm, seed=3))
    without, repaired = scored.of(Edits(removed)), scored.of(Edits(removed, weights))
    assert repaired < 0.9 * without


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(PruningError, match="unknown target 'q'"):
        RepairConfig(("q",))  # type: ignore[arg-type]
    with pytest.raises(PruningError, match=r"`rounds=0` \(limit 1\)"):
        RepairConfig(rounds=0)
    lm = make_loaded("llama")
    lm.model.train()
    with pytest.raises(UnsupportedModelError, match="train mode"):
        repair(lm, random_texts(lm), REMOVED)


def test_repair_and_choice_run_in_inference_mode() -> None:
    lm = make_loaded("llama")
    texts = random_texts(lm)
    with torch.inference_mode():
        removed = HeadSelection(lm, texts).choose(count=2)
        weights = repair(lm, texts, removed, RepairConfig(("o", "v", "down")))
        weights = distill(lm, texts, removed, weights, DistillConfig(steps=2))
    assert all(torch.isfinite(weight).all() for weight in weights.values())
