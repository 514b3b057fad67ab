"""Masks, rules and random heads: ablated heads, their effect on logits, and removal of the hooks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import headscan
from headscan.ablation import rules
from headscan.ablation.intervention import Intervention, InterventionRecord
from headscan.architectures import ALL, FAMILIES, SITES, VOCABULARY
from headscan.attention.hooks import output_hook
from headscan.catalog import SCORES
from headscan.errors import HeadIndexError, HeadscanError, InterventionError, UnknownNameError
from headscan.grid import AttentionSite, HeadGrid
from headscan.models.loaded_model import LoadedModel
from tests.devices import assert_close, on
from tests.small_models import distinct_first, make_loaded


def ids_of(sequences: int, tokens: int) -> Tensor:
    return torch.randint(2, VOCABULARY, (sequences, tokens), generator=torch.Generator().manual_seed(3))


def test_a_mask_of_the_lowest_values() -> None:
    values = torch.tensor([[0.3, 0.1, float("nan")], [0.1, -2.0, 5.0]])
    assert headscan.HeadMask.of_lowest(values, 0.4).heads == ((0, 1), (1, 1))
    assert headscan.HeadMask.of_lowest(-values, 0.01).heads == ((1, 2),)
    assert len(headscan.HeadMask.of_lowest(values, 1.0).heads) == 5
    with pytest.raises(InterventionError, match=r"`values_LH` of shape \(2, 2, 3\) is no table of numbers"):
        headscan.HeadMask.of_lowest(torch.stack([values, values]), 0.4)
    with pytest.raises(InterventionError, match=r"^`share=10` \(limit above 0, at most 1\). Change `share`$"):
        headscan.HeadMask.of_lowest(values, 10)


def test_rows_of_heads_are_those_of_a_frame() -> None:
    lm = make_loaded("llama")
    stats = headscan.collect(lm, ids_of(2, 9), statistics=["entropy", "output_norm"])
    rows = lm.grid.rows(stats | {"ln": headscan.score(stats, "entropy")})
    assert list(rows[0]) == ["sequence", "layer", "head", "entropy", "output_norm", "ln"]
    assert [(row["layer"], row["head"]) for row in rows] == 2 * list(lm.grid.heads())
    assert rows[-1]["entropy"] == rows[-1]["ln"] == float(stats["entropy"][1, -1, -1]) and rows[-1]["sequence"] == 1
    assert list(lm.grid.rows({"entropy": stats["entropy"][0]})[0]) == ["layer", "head", "entropy"]
    with pytest.raises(HeadIndexError, match="Pass values of one call on this model"):
        lm.grid.rows({"entropy": stats["entropy"], "of_one": stats["entropy"][:1]})


def logits_of(lm: LoadedModel, ids: Tensor) -> Tensor:
    """In an encoder-decoder, the decoder reads the end of the encoder's input."""
    more = {"decoder_input_ids": ids[:, 5:]} if lm.is_encoder_decoder else {}
    with torch.no_grad():
        return lm.model(input_ids=ids, **more).logits


def gated_logits(lm: LoadedModel, family: str, ids: Tensor, gates: Tensor, site: str = "self") -> Tensor:
    """Logits with a gate (B, L, H) on every head, put there by hand, one sequence at a time."""
    rows = []
    for sequence, gate in zip(ids, gates, strict=True):
        handles = []
        gate = gate.to(lm.device)
        for layer in ALL[family].layers:
            projection = lm.model.get_submodule(ALL[family].projection_of(layer, site))
            width = lm.grid.site_of(layer).value_dim

            def multiply(_: nn.Module, args: tuple[Tensor], g: Tensor = gate[layer], width: int = width) -> Any:
                heads = g[: args[0].shape[-1] // width]
                return (args[0] * heads.repeat_interleave(width), *args[1:])

            handles.append(projection.register_forward_pre_hook(multiply))
        rows.append(logits_of(lm, sequence[None])[0])
        for handle in handles:
            handle.remove()
    return torch.stack(rows)


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "site"), distinct_first(SITES))
def test_a_mask_is_a_zero_gate_at_the_output_projection(family: str, site: str, device: torch.device) -> None:
    lm = on(device, make_loaded(family)).at(site)
    ids = ids_of(2, 30).to(device)
    heads = [(0, 1), (2, 5), (2, 0)]
    gates = torch.ones(2, *lm.grid.shape)
    for layer, head in heads:
        gates[:, layer, head] = 0
    plain = logits_of(lm, ids)
    with headscan.intervene(lm, headscan.HeadMask(heads)) as record:
        masked = logits_of(lm, ids)
    assert_close(masked, gated_logits(lm, family, ids, gates, site), rtol=1e-5, atol=1e-5)
    assert (masked - plain).abs().max() > 1e-4
    assert torch.equal(record.ablated, gates == 0)
    assert torch.equal(logits_of(lm, ids), plain)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_a_mask_of_several_sites_is_one_mask_at_each(family: str) -> None:
    lm, ids = make_loaded(family), ids_of(2, 30)
    heads = {"encoder": [(1, 2), (0, 1)], "self": [], "cross": [(2, 0)]}
    mask = headscan.SiteMask(heads)
    assert mask.sites == (("cross", ((2, 0),)), ("encoder", ((0, 1), (1, 2))))
    assert mask == headscan.SiteMask({"cross": [(2, 0)], "encoder": [(0, 1), (1, 2)]})
    assert mask.fixed and mask.fixed_heads == ((2, 0), (0, 1), (1, 2)) and mask.kind == "zero"
    plain = logits_of(lm, ids)
    with (
        headscan.intervene(lm.at("encoder"), headscan.HeadMask(heads["encoder"])),
        headscan.intervene(lm.at("cross"), headscan.HeadMask(heads["cross"])),
    ):
        expected = logits_of(lm, ids)
    with headscan.intervene(lm, mask) as record:
        assert torch.equal(logits_of(lm, ids), expected)
    assert record.ablated is None and not torch.equal(expected, plain)
    assert torch.equal(logits_of(lm, ids), plain)
    with pytest.raises(HeadIndexError):
        headscan.intervene(lm, headscan.SiteMask({"encoder": [(0, 0)], "cross": [(9, 0)]})).__enter__()
    assert torch.equal(logits_of(lm, ids), plain)


def check_rule(family: str, score: str, device: torch.device) -> None:
    """A rule ablates the heads that its scores select, with the same effect as gates set by hand."""
    lm = on(device, make_loaded(family))
    ids, lengths = ids_of(3, 40).to(device), [40, 12, 29]
    stats = headscan.collect(lm, ids, lengths)
    threshold = headscan.score(stats, score).nanquantile(0.3 if SCORES[score].inactive == "low" else 0.7).item()
    rule = headscan.HeadRule(score, threshold=threshold)
    with headscan.intervene(lm, rule, lengths=lengths) as record:
        logits = logits_of(lm, ids)
    assert 0.05 < record.ablated_share < 0.95
    # Layer 0 sees nothing of the rule, so its verdicts follow from the plain statistics.
    assert torch.equal(record.ablated[:, 0], rule.ablates(headscan.score(stats, score))[:, 0])
    gates = (~record.ablated).float()
    for row, length in enumerate(lengths):
        alone = gated_logits(lm, family, ids[row : row + 1, :length], gates[row : row + 1])
        assert_close(logits[row, :length], alone[0], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("score", SCORES)
def test_a_rule_zeroes_heads_beyond_its_scores_threshold(score: str, device: torch.device) -> None:
    check_rule("llama", score, device)


@pytest.mark.gpu
@pytest.mark.parametrize("family", distinct_first(FAMILIES))
def test_rules_work_in_every_family(family: str, device: torch.device) -> None:
    """Those of outputs, too: `tests/instrument/models/test_padding.py`."""
    check_rule(family, "entropy_ln", device)


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "site"), [("llama", "self"), ("laguna", "self"), ("gptj", "self"), ("t5", "cross")])
def test_random_heads_are_zero_gates_at_the_output_projection(family: str, site: str, device: torch.device) -> None:
    lm = on(device, make_loaded(family)).at(site)
    ids = ids_of(3, 20).to(device)
    plain = logits_of(lm, ids)
    with headscan.intervene(lm, headscan.RandomHeads(0.4, seed=3), input_keys=[7, 2**60, 0]) as record:
        logits = logits_of(lm, ids)
    assert record.ablated is not None
    for layer in range(lm.grid.num_layers):
        heads = lm.grid.site_of(layer).num_attention_heads
        assert record.ablated[:, layer, :heads].any() and not record.ablated[:, layer, heads:].any()
    gates = (~record.ablated).float()
    assert_close(logits, gated_logits(lm, family, ids, gates, site), rtol=1e-5, atol=1e-5)
    assert torch.equal(logits_of(lm, ids), plain)


def test_random_heads_follow_from_seed_and_key_alone() -> None:
    lm = make_loaded("llama")
    ids = ids_of(4, 10)

    def zeroed(what: headscan.RandomHeads, rows: list[int], keys: list[int] | Tensor | None) -> Tensor:
        with headscan.intervene(lm, what) as record:
            record.input_keys = keys
            lm.model(input_ids=ids[rows])
        assert record.ablated is not None
        return record.ablated

    some = headscan.RandomHeads(0.5, seed=1)
    together = zeroed(some, [0, 1, 2, 3], [11, 12, 13, 14])
    assert torch.equal(zeroed(some, [3, 1], torch.tensor([14, 12])), together[[3, 1]])
    assert torch.equal(zeroed(some, [0, 1], None), zeroed(some, [2, 3], [0, 1]))
    assert not torch.equal(zeroed(headscan.RandomHeads(0.5, seed=2), [0, 1, 2, 3], [11, 12, 13, 14]), together)
    fewer = zeroed(headscan.RandomHeads(0.3, seed=1), [0, 1, 2, 3], [11, 12, 13, 14])
    assert fewer.any() and not (fewer & ~together).any() and not torch.equal(fewer, together)


def test_the_requested_number_of_random_heads_is_zeroed() -> None:
    shape, keys = (24, 16), range(200)
    for share in (0.0, 0.05, 0.3, 1.0):
        drawn = torch.stack([headscan.RandomHeads(share, seed=5).draw(key, shape) for key in keys])
        deviation = (share * (1 - share) / drawn.numel()) ** 0.5
        assert abs(drawn.double().mean() - share) <= 4 * deviation
        # Independently: neither a sequence nor a head has more than its share.
        for dims in ((1, 2), (0,)):
            shares = drawn.double().mean(dims)
            size = drawn.numel() / shares.numel()
            assert (shares - share).abs().max() <= 5 * (share * (1 - share) / size) ** 0.5


def test_random_heads_stay_the_same_over_the_steps_of_a_kv_cache() -> None:
    lm = make_loaded("llama")
    ids = ids_of(2, 9)
    with headscan.intervene(lm, headscan.RandomHeads(0.4, seed=1), input_keys=[5, 6]):
        whole = lm.model(input_ids=ids).logits
        cache = lm.model(input_ids=ids[:, :4], use_cache=True).past_key_values
        rest = lm.model(input_ids=ids[:, 4:], past_key_values=cache).logits
    torch.testing.assert_close(rest, whole[:, 4:], rtol=1e-5, atol=1e-5)


def test_a_rule_scores_activations_already_changed_below() -> None:
    lm = make_loaded("llama")
    ids = ids_of(1, 30)
    with headscan.intervene(lm, headscan.HeadRule("output_norm_ln", threshold=1.0)) as record:
        lm.model(input_ids=ids)
    # Ablating the rule's heads in the layers below, and measuring, must give its heads in the next layer.
    below = [(0, int(h)) for h in record.ablated[0, 0].nonzero()] + [
        (1, int(h)) for h in record.ablated[0, 1].nonzero()
    ]
    with headscan.intervene(lm, headscan.HeadMask(below)):
        stats = headscan.collect(lm, ids, statistics=["output_norm"])
    assert torch.equal(record.ablated[0, 2], headscan.score(stats, "output_norm_ln")[0, 2] < 1.0)


def test_contexts_nest_and_undo_themselves_after_an_exception() -> None:
    lm = make_loaded("llama")
    ids = ids_of(1, 20)
    plain = lm.model(input_ids=ids).logits
    with headscan.intervene(lm, headscan.HeadMask([(0, 0), (1, 2)])):
        expected = lm.model(input_ids=ids).logits
    with headscan.intervene(lm, headscan.HeadMask([(0, 0)])):
        with headscan.intervene(lm, headscan.HeadMask([(1, 2)])):
            assert torch.equal(lm.model(input_ids=ids).logits, expected)
        assert not torch.equal(lm.model(input_ids=ids).logits, expected)
    with (
        pytest.raises(RuntimeError, match="inside"),
        headscan.intervene(lm, headscan.HeadRule("entropy", threshold=1.0)),
        headscan.intervene(lm, headscan.HeadRule("first_token_weight", threshold=0.5)),
    ):
        raise RuntimeError("inside")
    assert lm.model.config._attn_implementation == "sdpa"
    assert torch.equal(lm.model(input_ids=ids).logits, plain)


def test_collect_inside_a_mask_measures_the_masked_model() -> None:
    lm = make_loaded("llama")
    with headscan.intervene(lm, headscan.HeadMask([(1, 4)])):
        stats = headscan.collect(lm, ids_of(2, 20))
    assert (stats["output_norm"][:, 1, 4] == 0).all()
    assert (stats["value_norm"][:, 1, 4] > 0).all()


@pytest.mark.parametrize("family", ["llama", "gemma2-softcap", "gpt_oss", "gptj", "mistral-sliding"])
def test_gradients_pass_through_a_rule(family: str) -> None:
    lm = make_loaded(family)
    with torch.enable_grad(), headscan.intervene(lm, headscan.HeadRule("entropy_ln", threshold=0.9)) as record:
        lm.model(input_ids=ids_of(1, 25)).logits.square().mean().backward()
    assert record.ablated is not None and record.ablated.any()
    gradient = lm.model.get_input_embeddings().weight.grad
    assert gradient is not None and gradient.isfinite().all() and gradient.abs().sum() > 0


class Negated(Intervention):
    """An ablation from outside the library: it negates head 1 of every layer."""

    @property
    def label(self) -> str:
        return "negated"

    def hooks(self, lm: LoadedModel, record: InterventionRecord) -> AbstractContextManager[object]:
        def visit(site: AttentionSite, outputs_BNHD: Tensor) -> Tensor:
            changed_BH = torch.zeros(len(outputs_BNHD), site.num_attention_heads, dtype=torch.bool)
            changed_BH[:, 1] = True
            record.note(site, changed_BH)
            return torch.where(changed_BH[:, None, :, None], -outputs_BNHD, outputs_BNHD)

        return output_hook(lm, visit)


def test_another_ablation_is_a_class_of_its_own() -> None:
    lm, ids = make_loaded("llama"), ids_of(2, 20)
    plain = logits_of(lm, ids)
    with headscan.intervene(lm, Negated()) as record:
        assert not torch.equal(logits_of(lm, ids), plain)
    assert record.ablated is not None and record.ablated[:, :, 1].all() and int(record.ablated.sum()) == 2 * 3
    assert torch.equal(logits_of(lm, ids), plain)
    negated = Negated()
    assert not (negated.fixed or negated.needs_whole_input or negated.may_share_prefix)
    assert negated.within(0, 1) is negated and negated.first_layer is None


def test_mistakes_are_named() -> None:
    lm = make_loaded("llama")
    with pytest.raises(HeadIndexError, match=r"no head 6 in layer 1 \(limit 5\)"):
        headscan.intervene(lm, headscan.HeadMask([(1, 6)])).__enter__()
    with pytest.raises(HeadIndexError, match=r"layer 9 has no attention heads. .*: 0 to 2"):
        headscan.intervene(lm, headscan.HeadMask([(9, 0)])).__enter__()
    with pytest.raises(UnknownNameError, match="did you mean output_norm"):
        headscan.HeadRule("output_nrom", threshold=1.0)
    for threshold in (float("nan"), "0.5", None, True):
        with pytest.raises(InterventionError, match=r"^`threshold=\S+` of entropy is not a number"):
            headscan.HeadRule("entropy", threshold=threshold)  # type: ignore[arg-type]
    headscan.HeadRule("entropy", threshold=np.float32(0.5))  # type: ignore[arg-type]
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(InterventionError, match=r"share=\S+ \(limit (0|1|finite numbers)\)"):
            headscan.RandomHeads(share, seed=0)
    with pytest.raises(InterventionError, match="seed=-1"):
        headscan.RandomHeads(0.5, seed=-1)
    for keys in ([1], [1, -1]):
        random = headscan.RandomHeads(0.5, seed=0)
        with pytest.raises(InterventionError, match="do not fit"), headscan.intervene(lm, random, input_keys=keys):
            lm.model(input_ids=ids_of(2, 20))
    rule = headscan.HeadRule("entropy", threshold=1.0)
    with pytest.raises(InterventionError, match="do not fit"), headscan.intervene(lm, rule, lengths=[5, 30]):
        lm.model(input_ids=ids_of(2, 20))


def test_a_rule_looks_at_the_lengths_once_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, ids, rule = make_loaded("llama"), ids_of(2, 20), headscan.HeadRule("output_norm_ln", threshold=0.9)

    def zeroed(lengths: list[int]) -> Tensor | None:
        with headscan.intervene(lm, rule, lengths=lengths) as record:
            logits_of(lm, ids)
        return record.ablated

    batches = ([20, 7], [3, 20], [11, 12])
    expected = [zeroed(lengths) for lengths in batches]
    looked: list[object] = []
    look = rules._rule_lengths
    monkeypatch.setattr(rules, "_rule_lengths", lambda *batch: looked.append(batch) or look(*batch))
    with headscan.intervene(lm, rule) as record:
        logits_of(lm, ids)
        for number, (lengths, ablated) in enumerate(zip(batches, expected, strict=True)):
            if number == 1 and record.lengths is not None:
                record.lengths[:] = torch.tensor(lengths)  # the same tensor with other values
            else:
                record.lengths = torch.tensor(lengths)
            logits_of(lm, ids)
            assert record.ablated is not None and ablated is not None and torch.equal(record.ablated, ablated)
    assert len(looked) == 4


def test_rules_need_queries_and_keys_of_one_sequence() -> None:
    lm = make_loaded("t5")
    with pytest.raises(InterventionError, match="cross attention"):
        headscan.intervene(lm.at("cross"), headscan.HeadRule("entropy", threshold=1.0)).__enter__()


@pytest.mark.parametrize("family", ["llama", "gptj", "falcon-mqa"])
def test_a_rule_refuses_the_steps_of_a_kv_cache(family: str) -> None:
    lm = make_loaded(family)
    with (
        headscan.intervene(lm, headscan.HeadRule("output_norm_ln", threshold=1.0)),
        pytest.raises(HeadscanError, match="KV cache"),
    ):
        lm.model.generate(ids_of(1, 6), max_new_tokens=3, do_sample=False)


def test_the_ablated_share_counts_heads_that_exist() -> None:
    lm = make_loaded("llama")
    first, *rest = lm.grid.sites
    record = InterventionRecord(
        LoadedModel(lm.model, None, HeadGrid((first, rest[0]), 3, "headscan"), "two layers"), None
    )
    record.note(first, torch.ones(2, 6, dtype=torch.bool))
    record.note(rest[0], torch.zeros(2, 6, dtype=torch.bool))
    assert record.ablated_share == 0.5


def test_the_names_of_the_published_interface() -> None:
    """A script that uses each name once, with ids and lengths by hand."""
    lm = make_loaded("llama")
    ids, lengths = ids_of(2, 9), torch.tensor([9, 5])
    stats = headscan.collect(lm, ids, lengths)
    assert stats["entropy"].shape == headscan.score(stats, "output_norm_ln").shape == (2, *lm.grid.shape)
    assert headscan.probe(lm)["induction_score"].shape == lm.grid.shape
    with headscan.intervene(lm, headscan.HeadMask([(1, 5), (2, 0)])) as record:
        logits_of(lm, ids)
    assert record.zeroed is not None and record.zeroed.nonzero().tolist() == [
        [row, *at] for row in (0, 1) for at in ((1, 5), (2, 0))
    ]
    with headscan.intervene(lm, headscan.HeadRule("output_norm_ln", threshold=0.9), lengths=lengths) as record:
        assert record.zeroed is None
        logits_of(lm, ids)
    first_layer = headscan.score(stats, "output_norm_ln")[:, 0] < 0.9  # ablated heads change the layers above
    assert record.zeroed[:, 0].equal(first_layer) and first_layer.any()
