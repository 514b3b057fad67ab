"""Sequences that share a prefix in one row give the results of each alone, under any ablation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import headscan
from headscan.ablation.rules import ScoredAblation
from headscan.architectures import FAMILIES, VOCABULARY
from headscan.attention.calls import ScoredCall
from headscan.attention.discovery import discover
from headscan.catalog import SCORES
from headscan.errors import HeadIndexError, InterventionError
from headscan.grid import AttentionSite
from headscan.layers.blocks import find_blocks
from headscan.layers.shared_rows import SharedRow, SharedRowHooks, can_share_rows, read_shared_row
from headscan.models.forward_inputs import run_forward
from headscan.models.loaded_model import LoadedModel
from tests.devices import assert_close, assert_near, on
from tests.small_models import distinct_first, make_loaded

#: Longer than the families' sliding windows.
PREFIX, ENDINGS = 24, (7, 1, 4, 12)
#: Something else than attention mixes their tokens.
RECURRENT = {"qwen3_next", "qwen3_5", "granitemoehybrid", "jamba", "bamba", "lfm2", "falcon_h1", "nemotron_h"}
#: Their attention does not go through transformers' interface.
WATCHED = {"gpt_neo", "gptj", "codegen", "bloom", "falcon-mqa", "falcon-gqa", "falcon-alibi", "mpt", "xglm"}
#: Their layers give each other more than hidden states, or their calls do not name the window that they mean.
OTHERWISE = {"gemma3n", "gemma4", "llama4"}
WHOLE = RECURRENT | WATCHED | OTHERWISE


def make_row(seed: int = 0) -> SharedRow:
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(5, VOCABULARY, (count,), generator=generator).tolist())

    return SharedRow(draw(PREFIX), tuple(draw(count) for count in ENDINGS))


#: What may be ablated in a shared row: by a rule, or by a mask for each sequence.
Ablated = headscan.HeadRule | Sequence[headscan.HeadMask | headscan.HeadRule]


def read_apart(lm: LoadedModel, ablated: Ablated, row: SharedRow) -> list[tuple[Tensor, float]]:
    """Hidden states of each ending, and the share of heads that is ablated, from whole sequences."""
    found = []
    for index, ending in enumerate(row.endings):
        with headscan.intervene(lm, ablated if isinstance(ablated, headscan.HeadRule) else ablated[index]) as record:
            hidden = run_forward(lm.model, {"input_ids": torch.tensor([[*row.prefix, *ending]], device=lm.device)})[0][
                0, len(row.prefix) :
            ]
        found.append((hidden, record.ablated_share))
    return found


def check(lm: LoadedModel, ablated: Ablated, row: SharedRow) -> int:
    """Hold a shared row against whole sequences; returns how many copies of the prefix it ended with. Half precision
    rounds on the way: there the mean error is compared.
    """
    whole = read_apart(lm, ablated, row)

    def forward(part: SharedRow, sequences: Sequence[int]) -> Tensor:
        assert part.endings == tuple(row.endings[index] for index in sequences)
        return run_forward(lm.model, part.inputs(lm.device))[0][0]

    seen: list[int] = []
    copies = 0
    for reading in read_shared_row(find_blocks(lm), ablated, row, forward):
        copies += len(reading.row.groups)
        parts = zip(reading.sequences, reading.row.ending_starts, reading.ablated_shares, strict=True)
        for index, start, zeroed in parts:
            hidden, share = whole[index]
            found = reading.value[start : start + len(hidden)]
            if hidden.dtype == torch.float32:
                assert_close(found, hidden, rtol=1e-4, atol=1e-5)
            else:
                assert_near(found, hidden, 2 * torch.finfo(hidden.dtype).eps, f"ending {index}", mean=True)
            assert zeroed == pytest.approx(share)
        seen += reading.sequences
    assert sorted(seen) == list(range(len(row.endings)))
    return copies


def middle(lm: LoadedModel, score: str, row: SharedRow) -> float:
    """A threshold with about as many scores on one side as on the other, and none near it."""
    ids = torch.tensor([[*row.prefix, *row.endings[0]]], device=lm.device)
    scores = headscan.score(headscan.collect(lm, ids), score)
    ordered = scores[scores.isfinite()].sort().values
    central = ordered[len(ordered) // 3 : 2 * len(ordered) // 3]
    widest = int(central.diff().argmax())
    return float(central[widest : widest + 2].mean())


@pytest.mark.gpu
@pytest.mark.parametrize("family", distinct_first(FAMILIES))
def test_a_model_reads_shared_rows_rightly_or_is_found_out(family: str, device: torch.device) -> None:
    lm = on(device, make_loaded(family))
    assert can_share_rows(lm) == (family not in WHOLE)
    if family not in WHOLE:
        row = make_row()
        check(lm, headscan.HeadRule("entropy_ln", middle(lm, "entropy_ln", row)), row)
        first, last = lm.grid.sites[0], lm.grid.sites[-1]
        none, one = headscan.HeadMask([]), headscan.HeadMask([(first.layer, 0)])
        other = headscan.HeadMask([(first.layer, 0), (last.layer, last.num_attention_heads - 1)])
        assert check(lm, [none] * 4, row) == check(lm, [other] * 4, row) == 1
        assert check(lm, [one, none, other, one], row) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("score", [name for name in SCORES if headscan.HeadRule(name, 0.0).may_share_rows])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_every_score_judges_a_shared_row_as_whole_sequences(family: str, score: str, device: torch.device) -> None:
    lm, row = on(device, make_loaded(family)), make_row(1)
    check(lm, headscan.HeadRule(score, middle(lm, score, row)), row)


@pytest.mark.gpu
def test_shared_rows_in_half_precision(device: torch.device) -> None:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config).eval().to(device, torch.bfloat16)
    lm, row = LoadedModel(model, None, discover(model), "llama"), make_row()
    assert can_share_rows(lm)
    check(lm, headscan.HeadRule("output_norm_ln", middle(lm, "output_norm_ln", row)), row)
    masks = [headscan.HeadMask(heads) for heads in ([], [(0, 0)], [(0, 0), (2, 1)], [(0, 0)])]
    check(lm, masks, row)


def test_sequences_split_where_a_rule_ablates_different_heads() -> None:
    lm = make_loaded("llama")
    rows = {
        check(lm, headscan.HeadRule("last_output_norm_ln", threshold), make_row(seed))
        for threshold in (0.0, 0.8, 1.0)
        for seed in range(3)
    }
    assert 1 in rows and len(ENDINGS) in rows


def test_hooks_are_removed_when_sequences_split_and_when_a_pass_fails() -> None:
    lm, row = make_loaded("llama"), make_row()

    def hooks() -> int:
        return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in lm.model.modules())

    before = hooks()
    check(lm, headscan.HeadRule("last_output_norm_ln", 1.0), row)
    assert hooks() == before

    def broken(part: SharedRow, sequences: Sequence[int]) -> None:
        run_forward(lm.model, part.inputs(lm.device))
        raise KeyError("broken")

    with pytest.raises(KeyError):
        list(read_shared_row(find_blocks(lm), headscan.HeadRule("output_norm", -1.0), row, broken))
    assert hooks() == before


def test_a_mask_of_heads_that_are_not_there_is_refused() -> None:
    lm = make_loaded("llama")
    with pytest.raises(HeadIndexError, match="no head 99 in layer 0"):
        list(
            read_shared_row(
                find_blocks(lm), [headscan.HeadMask([(0, 99)])] * 4, make_row(), lambda part, sequences: None
            )
        )
    with pytest.raises(InterventionError, match="1 ablations for 4 sequences"):
        list(read_shared_row(find_blocks(lm), [headscan.HeadMask([])], make_row(), lambda part, sequences: None))
    two = [headscan.HeadRule(score, 0.5) for score in ("entropy", "output_norm", "entropy", "entropy")]
    with pytest.raises(InterventionError, match=r"entropy, output_norm \(limit 1\)"):
        list(read_shared_row(find_blocks(lm), two, make_row(), lambda part, sequences: None))


def test_masks_and_rules_share_a_row() -> None:
    lm, rule, mask = make_loaded("llama"), headscan.HeadRule("output_norm_ln", 0.95), headscan.HeadMask([(1, 2)])
    check(lm, [rule, mask, rule, headscan.HeadMask([])], make_row())


class Opposite(ScoredAblation):
    """An ablation of a class of its own: the heads that a rule leaves."""

    def __init__(self, rule: headscan.HeadRule) -> None:
        self.rule = rule

    label = "the opposite of a rule"
    scored_by = property(lambda self: self.rule.scored_by)

    def heads_at(self, site: AttentionSite, scores_BH: Tensor | None) -> Tensor:
        return ~self.rule.heads_at(site, scores_BH)


def test_another_class_is_scored_in_a_shared_row_as_a_rule_is() -> None:
    lm, row, rule = make_loaded("llama"), make_row(), headscan.HeadRule("output_norm_ln", -1.0)

    def forward(part: SharedRow, sequences: Sequence[int]) -> None:
        run_forward(lm.model, part.inputs(lm.device))

    for ablation, expected in ((rule, 0.0), (Opposite(rule), 1.0)):
        (result,) = read_shared_row(find_blocks(lm), ablation, row, forward)
        assert result.ablated_shares == [expected] * len(row.endings)


@pytest.mark.parametrize(("prefix", "endings"), [((), ((1,),)), ((1,), ()), ((1,), ((2,), ()))])
def test_an_empty_part_of_a_row_is_refused(prefix: tuple[int, ...], endings: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(InterventionError, match="one token or more"):
        SharedRow(prefix, endings)


@pytest.mark.parametrize("groups", [(), ((0, 1), (2,), (3,)), ((0,), (1,), (2,), (3,))])
def test_no_layer_looks_for_the_endings_in_a_mask(groups: tuple[tuple[int, ...], ...]) -> None:
    """A GPU would be waited for; on the meta device nothing can be found."""
    lm, row = make_loaded("llama"), replace(make_row(), groups=groups)
    heads = torch.empty(1, 6, len(row), 8, device="meta")
    call = ScoredCall(heads, heads, heads, 0.35, causal=True, softcap=30.0)
    row_hooks = SharedRowHooks(lm, [headscan.HeadMask([])] * len(ENDINGS), row)
    assert row_hooks.on_attention(lm.grid.sites[0], call).shape == heads.shape


def test_sequences_alone_are_judged_without_waiting_for_the_device() -> None:
    """Numbers on the meta device cannot be copied to the CPU."""
    lm, rule = make_loaded("llama"), headscan.HeadRule("output_norm_ln", 0.9)
    alone = replace(make_row(), groups=((0,), (1,), (2,), (3,)))
    for row in (alone, make_row()):
        heads = torch.empty(1, len(row), 6, 8, device="meta")
        row_hooks = SharedRowHooks(lm, [rule] * len(ENDINGS), row)
        if row is alone:
            assert row_hooks.on_outputs(lm.grid.sites[0], heads).shape == heads.shape
        else:  # They may part, which is decided on the CPU.
            with pytest.raises(NotImplementedError, match="meta"):
                row_hooks.on_outputs(lm.grid.sites[0], heads)


class Passes:
    """Tokens of each pass that reaches the last layer's MLP, and whether the model made a mask."""

    def __init__(self, lm: LoadedModel) -> None:
        self.tokens: list[int] = []
        self.masked = False
        layers: Any = lm.model.base_model.layers
        layers[-1].mlp.register_forward_pre_hook(lambda _, args: self.tokens.append(args[0].shape[1]))
        layers[0].self_attn.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, _: torch.nn.Module, args: object, kwargs: dict[str, Any]) -> None:
        self.masked |= kwargs["attention_mask"] is not None


def test_sequences_that_part_stay_in_one_pass_of_limited_tokens() -> None:
    lm, row = make_loaded("llama"), make_row()
    blocks, passes = find_blocks(lm), Passes(lm)
    masks = [headscan.HeadMask([(layer, head)]) for layer, head in ((0, 0), (0, 1), (1, 0), (2, 0))]
    whole = 4 * PREFIX + sum(ENDINGS)

    def copies(**limits: int) -> list[int]:
        passes.tokens.clear()
        readings = [*read_shared_row(blocks, masks, row, forward, **limits)]
        assert sorted(i for reading in readings for i in reading.sequences) == [0, 1, 2, 3]
        return [len(reading.row.groups) for reading in readings]

    def forward(part: SharedRow, sequences: Sequence[int]) -> None:
        run_forward(lm.model, part.inputs(lm.device))

    assert copies() == [4] and passes.tokens == [whole]
    limited = copies(most_tokens=70)
    assert len(limited) > 1 and sum(limited) == 4
    assert max(passes.tokens) <= 70 and sum(passes.tokens) == whole
    assert not passes.masked


@pytest.mark.parametrize(("pass_cost", "expected"), [(0, 3), (PREFIX // 2, 3), (PREFIX, 4)])
def test_prefixes_go_on_being_shared_if_that_saves_more_than_a_pass(pass_cost: int, expected: int) -> None:
    lm, row = make_loaded("llama"), make_row()
    masks = [headscan.HeadMask(heads) for heads in ([], [(0, 0)], [(0, 1)], [(0, 0)])]
    [reading] = read_shared_row(
        find_blocks(lm), masks, row, lambda part, _: run_forward(lm.model, part.inputs(lm.device)), pass_cost=pass_cost
    )
    assert len(reading.row.groups) == expected
    assert check(lm, masks, row) == 3


@pytest.mark.parametrize("groups", [((0, 1), (2,)), ((0, 1), (1, 2, 3)), ((0, 1, 2, 4),)])
def test_groups_without_each_ending_once_are_refused(groups: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(InterventionError, match="each of the 4 endings once"):
        replace(make_row(), groups=groups)


def test_heads_at_their_mean_share_rows() -> None:
    lm, row = make_loaded("llama"), make_row()
    ids = torch.randint(2, VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(1))
    means = headscan.head_means(lm, ids)
    assert check(lm, [headscan.HeadMask([(0, 1), (2, 3)], means)] * len(ENDINGS), row) == 1
    rule = headscan.HeadRule("output_norm_ln", middle(lm, "output_norm_ln", row), means)
    check(lm, rule, row)
    with pytest.raises(InterventionError, match=r"mean, zero \(limit 1\)"):
        SharedRowHooks(lm, [headscan.HeadMask([(0, 1)]), headscan.HeadMask([(0, 1)], means)], row)
    with pytest.raises(InterventionError, match="no mean outputs of layer 0"):
        SharedRowHooks(lm, [headscan.HeadMask([(0, 1)], headscan.HeadMeans({}, "self"))], row)
