"""Rotary frequencies that depend on the length: batches change no number. Those without memory are halved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PreTrainedConfig

import headscan
from headscan.errors import MemoryLimitError, SequenceError
from headscan.layers.blocks import find_blocks
from headscan.layers.prefix_cache import read_prefix, shares_prefixes
from headscan.layers.shared_rows import SharedRow, can_share_rows, read_shared_row
from headscan.measure.behaviour_probes import NeedlePrompt, retrieval_scores
from headscan.models.loaded_model import LoadedModel
from headscan.models.model_facts import RopeLengths, restart_dynamic_frequencies
from headscan.models.token_batches import MemoryLimit, batches, pad, run_halving, run_halving_by_size, whole_batches
from tests.rope_models import LIMIT, ROPES, load_rope_model, make_rope_model

SHORT, LONG = 50, 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ropes")


@pytest.fixture(params=ROPES)
def lm(request: pytest.FixtureRequest, folder: Path) -> LoadedModel:
    return load_rope_model(request.param, folder)


def ids_of(sequences: int, tokens: int) -> Tensor:
    return torch.randint(2, 300, (sequences, tokens), generator=torch.Generator().manual_seed(3))


def assert_equal_rows(found: dict[str, Tensor], row: int, alone: dict[str, Tensor]) -> None:
    for name, values in alone.items():
        torch.testing.assert_close(found[name][row], values[0], rtol=1e-4, atol=1e-5, equal_nan=True, msg=name)


def test_a_batch_of_both_sides_is_refused(lm: LoadedModel) -> None:
    ids = ids_of(2, LONG)
    with pytest.raises(SequenceError, match=f"sequence 0 has {SHORT} tokens in a batch of width {LONG}"):
        headscan.collect(lm, ids, [SHORT, LONG])
    rule = headscan.HeadRule("output_norm_ln", threshold=0.9)
    with headscan.intervene(lm, rule, lengths=[SHORT, LONG]), pytest.raises(SequenceError, match="limit 64"):
        lm.model(input_ids=ids)
    prompts = [NeedlePrompt(tuple(row[:length].tolist()), 2, 4) for row, length in zip(ids, (SHORT, LONG), strict=True)]
    with pytest.raises(SequenceError, match="separate batches"):
        retrieval_scores(lm, prompts)


@pytest.mark.parametrize("lengths", [(50, 64, 3), (120, 120, 120)])
def test_a_batch_of_one_side_gives_the_numbers_of_each_alone(lm: LoadedModel, lengths: tuple[int, ...]) -> None:
    ids = ids_of(3, max(lengths))
    together = headscan.collect(lm, ids, lengths)
    threshold = headscan.score(together, "output_norm_ln").nanmedian().item()
    rule = headscan.HeadRule("output_norm_ln", threshold)
    with headscan.intervene(lm, rule, lengths=lengths) as record:
        logits = lm.model(input_ids=ids).logits
    for row, length in enumerate(lengths):
        own = ids[row : row + 1, :length]
        assert_equal_rows(together, row, headscan.collect(lm, own))
        with headscan.intervene(lm, rule) as alone:
            torch.testing.assert_close(logits[row, :length], lm.model(input_ids=own).logits[0], rtol=1e-4, atol=1e-4)
        assert torch.equal(record.ablated[row], alone.ablated[0])


def test_columns_that_are_padding_in_every_row_change_nothing(lm: LoadedModel) -> None:
    ids = ids_of(2, LONG)
    padded = headscan.collect(lm, ids, [SHORT, SHORT - 7])
    assert_equal_rows(padded, 0, headscan.collect(lm, ids[:1, :SHORT]))
    # A pass of the caller's own cannot be trimmed.
    with (
        headscan.intervene(lm, headscan.HeadRule("output_norm_ln", threshold=0.9), lengths=[SHORT, SHORT - 7]),
        pytest.raises(SequenceError, match="without padding beyond it"),
    ):
        lm.model(input_ids=ids)


def test_longrope_reads_different_long_sequences_together_and_dynamic_scaling_does_not(folder: Path) -> None:
    ids = ids_of(2, LONG)
    lm = load_rope_model("longrope", folder)
    together = headscan.collect(lm, ids, [LIMIT + 1, LONG])
    assert_equal_rows(together, 0, headscan.collect(lm, ids[:1, : LIMIT + 1]))
    with pytest.raises(SequenceError, match="by equal length"):
        headscan.collect(load_rope_model("dynamic", folder), ids, [LIMIT + 1, LONG])


def test_a_sequence_does_not_depend_on_earlier_passes(lm: LoadedModel) -> None:
    ids = ids_of(1, LONG)
    before = {length: headscan.collect(lm, ids[:, :length]) for length in (LIMIT, 100)}
    logits = lm.model(input_ids=ids[:, :LIMIT]).logits
    headscan.collect(lm, ids)
    for length, expected in before.items():
        assert_equal_rows(headscan.collect(lm, ids[:, :length]), 0, expected)
    lm.model(input_ids=ids)
    assert torch.equal(lm.model(input_ids=ids[:, :LIMIT]).logits, logits)


def test_the_lengths_above_the_limit_are_read_with_the_frequencies_of_transformers(lm: LoadedModel) -> None:
    ids = ids_of(1, LONG)
    [rope] = [rope for rope in ROPES if lm.source.endswith(rope)]
    for tokens in (LONG, 100, SHORT):
        fresh = make_rope_model(rope)(input_ids=ids[:, :tokens]).logits
        torch.testing.assert_close(lm.model(input_ids=ids[:, :tokens]).logits, fresh, rtol=1e-5, atol=1e-5)


def test_prefixes_are_shared_on_one_side_alone(lm: LoadedModel) -> None:
    assert shares_prefixes(lm) and can_share_rows(lm)
    ids = ids_of(1, LONG)[0].tolist()
    with pytest.raises(SequenceError, match=f"sequence 0 has {SHORT} tokens"):
        read_prefix(lm, [ids[SHORT:]], read_prefix(lm, [ids[:SHORT]]))
    row = SharedRow(tuple(ids[:40]), (tuple(ids[40:60]), tuple(ids[40:80])))
    with pytest.raises(SequenceError, match="sequence 0 has 60 tokens in a batch of width 80"):
        next(read_shared_row(find_blocks(lm), headscan.HeadRule("entropy_ln", 0.5), row, lambda *_: None))


def test_dynamic_scaling_is_made_for_more_tokens_than_the_configuration_names(folder: Path) -> None:
    assert load_rope_model("dynamic", folder).max_tokens == 4 * LIMIT
    assert load_rope_model("longrope", folder).max_tokens == 1024


def _layers_of_two_kinds() -> PreTrainedConfig:
    ropes = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    }
    return Gemma3TextConfig(
        vocab_size=300,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        rope_parameters=ropes,
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LlamaConfig(), RopeLengths()),
        (LlamaConfig(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}), RopeLengths()),
        (_layers_of_two_kinds(), RopeLengths(scaled_above=128, scaled_to=256)),
        (AutoConfig.for_model("gpt2"), RopeLengths()),
    ],
)
def test_the_lengths_are_found_in_the_configuration(config: PreTrainedConfig, expected: RopeLengths) -> None:
    assert RopeLengths.of(config) == expected


def test_layers_of_two_kinds_start_from_their_own_frequencies() -> None:
    torch.manual_seed(0)
    model, ids = AutoModelForCausalLM.from_config(_layers_of_two_kinds()).eval(), ids_of(1, 200)
    fresh = model(input_ids=ids[:, :128]).logits
    model(input_ids=ids)
    assert not torch.equal(model(input_ids=ids[:, :128]).logits, fresh)  # transformers remembers
    restart_dynamic_frequencies(model)
    assert torch.equal(model(input_ids=ids[:, :128]).logits, fresh)


def test_sequences_of_equal_groups_have_equal_frequencies() -> None:
    rope = RopeLengths(switches=(4, 8))
    assert [rope.group(tokens)[0] for tokens in (1, 4, 5, 8, 9)] == [0, 0, 1, 1, 2]
    rope = RopeLengths(scaled_above=4)
    assert rope.group(1) == rope.group(4) != rope.group(5) != rope.group(6)
    RopeLengths().check(9, [1, 9])


#: On both sides of the limit.
MIXED = (120, 10, 64, 65, 120, 63, 90, 3, 66, 90)
LENGTHS = [10, 10, 9, 8, 20, 20, 3]


def scarce(most: int, tried: list[list[int]]):  # type: ignore[no-untyped-def]
    """Work on a batch that fits if it has at most so many tokens."""

    def run(batch: list[int]) -> int:
        tried.append(batch)
        if len(batch) * max(LENGTHS[index] for index in batch) > most:
            raise torch.OutOfMemoryError("as if")
        return len(batch)

    return run


def test_sizes_that_ran_out_are_halved_at_once() -> None:
    limit, tried = MemoryLimit(), []
    assert run_halving([0, 1, 2, 3], scarce(20, tried), LENGTHS, limit) == [([0, 1], 2), ([2, 3], 2)]
    assert tried == [[0, 1, 2, 3], [0, 1], [2, 3]]
    tried.clear()
    assert run_halving([4, 5], scarce(20, tried), LENGTHS, limit) == [([4], 1), ([5], 1)]
    assert tried == [[4], [5]]
    tried.clear()
    run_halving([2, 3, 6], scarce(20, tried), LENGTHS, limit)  # 27 tokens have not been seen to run out
    assert tried == [[2, 3, 6], [2], [3, 6]]
    tried.clear()
    run_halving([0, 1, 6], scarce(20, tried), LENGTHS, limit)
    assert tried == [[0], [1, 6]]


def test_a_single_sequence_is_always_tried() -> None:
    limit, tried = MemoryLimit(), []
    with pytest.raises(MemoryLimitError):
        run_halving([4], scarce(15, tried), LENGTHS, limit)
    with pytest.raises(MemoryLimitError):
        run_halving([4, 5], scarce(15, tried), LENGTHS, limit)
    assert tried == [[4], [4, 5], [4]]


def test_a_caller_can_measure_batches_in_another_way() -> None:
    limit, tried = MemoryLimit(), []
    limit.ran_out(40)
    run_halving([4, 5], scarce(40, tried), LENGTHS, limit)
    assert tried == [[4], [5]]
    tried.clear()

    def shared_tokens(indices: list[int]) -> int:
        """The first 15 tokens are held once."""
        return 15 + sum(LENGTHS[index] - 15 for index in indices)

    run_halving_by_size([4, 5], scarce(40, tried), shared_tokens, limit)
    assert tried == [[4, 5]]


def test_batches_keep_groups_apart() -> None:
    rope = RopeLengths(switches=(LIMIT,))
    found = whole_batches(MIXED, 10_000, rope.group)
    sides = [sorted(MIXED[row] for row in batch.sequence_indices) for batch in found]
    assert sides == [[65, 66, 90, 90, 120, 120], [3, 10, 63, 64]]
    dynamic = whole_batches(MIXED, 10_000, RopeLengths(scaled_above=LIMIT).group)
    assert sorted(len(batch) for batch in dynamic) == [1, 1, 2, 2, 4]
    assert whole_batches(MIXED, 10_000, RopeLengths().group) == [
        replace(found[0], sequence_indices=(0, 4, 6, 9, 8, 3, 2, 5, 1, 7))
    ]
    assert list(batches([4, 4, 4], 100, groups=["a", "b", "b"])) == [[0], [1, 2]]


def test_sequences_are_padded_on_the_right() -> None:
    sequences = [(5, 6), np.array([7, 8, 9], dtype=np.int32)]
    ids, lengths = pad(sequences)
    assert ids.tolist() == [[5, 6, 0], [7, 8, 9]] and ids.dtype == torch.long and lengths.tolist() == [2, 3]
    assert pad(sequences, 4)[0].tolist() == [[5, 6, 0, 0], [7, 8, 9, 0]]
