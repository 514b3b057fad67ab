"""Arms that share prefixes in rows answer as if every input was read whole, with fewer tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import headscan
from headscan.ablation.intervention import Intervention
from headscan.ablation.rules import ScoredAblation
from headscan.catalog import SCORES, STATISTICS, Score, statistics_for
from headscan.engine import answer as answers_of
from headscan.engine.answer import AnsweringSettings, answer
from headscan.engine.likelihood import likelihoods
from headscan.engine.shared_row_likelihood import RowPacker, shared_row_likelihoods
from headscan.errors import InterventionError
from headscan.layers.shared_rows import SharedRow, SharedRowHooks, can_share_rows
from headscan.statistics.registry import masks_read
from headscan.texts.prefix_tree import prefix_tree
from headscan.texts.token_requests import LogLikelihood, Request, Responses
from tests.jobs.engine.test_bundles import BATCH_TOKENS, REQUESTS, close
from tests.jobs.engine.test_prefix_tree import random_sequences
from tests.small_models import make_loaded
from tests.test_docs import blocks
from tests.test_readme import PAGES

#: Some that ablate hardly anything, and some under which sequences part.
RULES = [
    headscan.HeadRule("output_norm_ln", 0.8),
    headscan.HeadRule("entropy_ln", 1.0),
    headscan.HeadRule("last_output_norm_hn", 0.9),
]
MASK = headscan.HeadMask([(0, 1), (1, 0), (1, 2)])
RANDOM = headscan.RandomHeads(0.3, 0)
#: Ablates nothing, so nothing parts.
IDLE = headscan.HeadRule("output_norm", -1.0)


class Tokens:
    """Counts the tokens that the blocks of a model read, padding included."""

    def __init__(self, lm: headscan.LoadedModel) -> None:
        self.read = 0
        self._sites = [lm.module(site.output_projection) for site in lm.grid.sites]
        for module in self._sites:
            module.register_forward_pre_hook(self._count)

    def _count(self, _: torch.nn.Module, args: tuple[Tensor]) -> None:
        self.read += args[0].shape[0] * args[0].shape[1]

    def take(self) -> int:
        read, self.read = self.read, 0
        return read


def whole(
    lm: headscan.LoadedModel, ablated: Intervention | None, headscan_kernels: bool = False
) -> Responses[LogLikelihood]:
    return likelihoods(lm, REQUESTS, ablated, BATCH_TOKENS, False, headscan_kernels)


def read_in_rows(lm: headscan.LoadedModel, ablated: Intervention | None) -> Responses[LogLikelihood]:
    return shared_row_likelihoods(lm, REQUESTS, ablated, BATCH_TOKENS)


@pytest.mark.parametrize("ablated", [*RULES, MASK, RANDOM, None], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3", "gpt2"])
def test_shared_rows_give_the_answers_of_whole_inputs(family: str, ablated: Intervention | None) -> None:
    lm = make_loaded(family)
    assert can_share_rows(lm)
    expected, ours = whole(lm, ablated), read_in_rows(lm, ablated)
    assert close(ours.values, expected.values)
    assert ours.ablated_shares == pytest.approx(expected.ablated_shares)


def test_an_ablation_of_one_s_own_shares_rows_as_a_rule_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The class of the documentation, as an evaluation reads its arm."""
    lm, namespace = make_loaded("llama"), {"__name__": __name__}
    exec(blocks(PAGES["howto/own_ablation.md"], "python")[0], namespace)
    ablation: Any = namespace["LeastOfEachLayer"]
    monkeypatch.setattr(answers_of, "likelihoods", None)  # only shared rows are left
    expected, [ours] = whole(lm, ablation()), answer(lm, REQUESTS, [ablation()], AnsweringSettings(BATCH_TOKENS))
    assert close(ours.values, expected.values)
    assert set(ours.ablated_shares) == set(expected.ablated_shares) == {1 / lm.grid.shape[1]}
    assert whole(lm, None).values != expected.values


@pytest.mark.parametrize("ablated", [IDLE, MASK, None])
def test_shared_rows_are_fewer_tokens(ablated: Intervention | None) -> None:
    lm = make_loaded("llama")
    tokens = Tokens(lm)
    whole(lm, ablated)
    of_whole = tokens.take()
    read_in_rows(lm, ablated)
    assert tokens.take() < 0.75 * of_whole


@pytest.mark.parametrize(
    "rule", [headscan.HeadRule("last_output_norm_ln", 1.0), headscan.HeadRule("output_norm_ln", 1.0)]
)
def test_sequences_that_part_early_are_few_tokens_more_than_whole_inputs(rule: headscan.HeadRule) -> None:
    lm = make_loaded("llama")
    tokens = Tokens(lm)
    expected = whole(lm, rule)
    of_whole = tokens.take()
    assert close(read_in_rows(lm, rule).values, expected.values)
    assert tokens.take() < 1.1 * of_whole


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_in_half_precision_arms_round_as_arms_with_rules(family: str, dtype: torch.dtype) -> None:
    lm = make_loaded(family)
    lm.model.to(dtype)
    assert can_share_rows(lm)
    assert read_in_rows(lm, None).values == read_in_rows(lm, IDLE).values
    assert whole(lm, None, headscan_kernels=True).values == whole(lm, IDLE).values
    assert whole(lm, None).values != whole(lm, IDLE).values  # another kernel, which rounds otherwise


def test_a_row_for_which_memory_is_short_is_cut_in_half() -> None:
    lm = make_loaded("llama")
    expected = read_in_rows(lm, RULES[0])
    widths: list[int] = []

    def narrow(_: torch.nn.Module, args: tuple[Tensor]) -> None:
        widths.append(args[0].shape[1])
        if args[0].shape[1] > 170:
            raise torch.OutOfMemoryError("out of memory")

    lm.model.get_input_embeddings().register_forward_pre_hook(narrow)
    assert close(read_in_rows(lm, RULES[0]).values, expected.values)
    assert max(widths) > 170


def test_a_long_prefix_of_many_short_endings_is_one_row_after_a_row_of_more_tokens_ran_out() -> None:
    lm = make_loaded("llama")
    random = Random(0)

    def requests_after(prefix_tokens: int, endings: int, ending_tokens: int) -> tuple[Request, ...]:
        prefix = tuple(random.randrange(1, 90) for _ in range(prefix_tokens))
        return tuple(
            Request((*prefix, *(random.randrange(1, 90) for _ in range(ending_tokens + 1))), 1) for _ in range(endings)
        )

    row_tokens: list[int] = []

    def narrow(_: torch.nn.Module, args: tuple[Tensor]) -> None:
        row_tokens.append(args[0].numel())
        if args[0].numel() > 190:
            raise torch.OutOfMemoryError("out of memory")

    lm.model.get_input_embeddings().register_forward_pre_hook(narrow)
    shared_row_likelihoods(lm, requests_after(100, 2, 50), IDLE, BATCH_TOKENS)
    assert max(row_tokens) == 200
    assert lm.limits["shared rows"].allows(199)
    row_tokens.clear()
    shared_row_likelihoods(lm, requests_after(100, 20, 4), IDLE, BATCH_TOKENS)
    assert max(row_tokens) == row_tokens[-1] == 180


@pytest.mark.parametrize("seed", range(40))
def test_every_sequence_has_a_place_in_one_row(seed: int) -> None:
    random = Random(seed)
    sequences = random_sequences(random)
    shareable = [random.randint(0, len(sequence)) for sequence in sequences]
    lengths = [len(sequence) for sequence in sequences]
    best = random.randint(1, 40)
    most = best + random.randint(0, 40)
    found = RowPacker(lengths, best, most).rows(prefix_tree(sequences, shareable, random.randint(0, 6)))
    assert Counter(member for row in found for member in row.members) == Counter(range(len(sequences)))
    for row in found:
        tokens = row.prefix_tokens + sum(lengths[member] - row.prefix_tokens for member in row.members)
        assert len({sequences[member][: row.prefix_tokens] for member in row.members}) == 1
        assert all(row.prefix_tokens <= shareable[member] for member in row.members)
        assert len(row.members) == 1 or tokens <= most
        assert (len(row.members) == 1) == (row.prefix_tokens == 0)
    assert sum(row.prefix_tokens + sum(lengths[m] - row.prefix_tokens for m in row.members) for row in found) <= sum(
        lengths
    )


def test_long_questions_on_one_text_share_the_text_and_not_each_a_copy_of_it() -> None:
    text = tuple(range(1000))
    sequences = [text + (2000 + question,) * 50 + (choice,) for question in range(4) for choice in range(4)]
    tree = prefix_tree(sequences, [1049] * 16, pass_cost=10)
    [row] = RowPacker(list(map(len, sequences)), best_tokens=500, most_tokens=4000).rows(tree)
    assert row.prefix_tokens == 1000 and len(row.members) == 16


#: Narrow enough that short sequences have keys in the sink, recent ones and distant ones.
WIDTHS = headscan.MassWidths(2, 5)


def add_score(patch: pytest.MonkeyPatch, statistic: str, over: Literal["layer"] | None = None) -> str:
    """Declare a score, as a user would in the catalogue; with a denominator it is the layer's mean."""
    normaliser = statistic if over else None
    added = Score(
        "added", paper_name="-", statistic=statistic, normaliser=normaliser, over=over, inactive="low", source="test"
    )
    patch.setitem(SCORES, "added", added)
    return "added"


def widest_gap(values: Tensor) -> float:
    """Return a threshold in the middle third of all values, far from each of them."""
    ordered = values.unique()
    central = ordered[len(ordered) // 3 : 2 * len(ordered) // 3 + 2]
    return float(central[int(central.diff().argmax()) :][:2].mean()) if len(central) > 1 else float(central[0])


@pytest.mark.parametrize("over", [None, "layer"])
@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_rules_on_any_statistic_are_refused_or_measure_what_scans_do(
    family: str, statistic: str, over: Literal["layer"] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule on a score that nobody has declared yet ablates the heads that `collect` names, in shared rows too."""
    lm, added = make_loaded(family), add_score(monkeypatch, statistic, over)
    assert can_share_rows(lm)
    longest = sorted({request.ids for request in REQUESTS}, key=len)[-8:]
    lengths = torch.tensor([len(ids) for ids in longest])
    ids = torch.zeros(len(longest), int(lengths.max()), dtype=torch.long)
    for row, sequence in zip(ids, longest, strict=True):
        row[: len(sequence)] = torch.tensor(sequence)
    needed = statistics_for([added])
    scores_BLH = headscan.score(headscan.collect(lm, ids, lengths, statistics=needed, widths=WIDTHS), added)
    finite = scores_BLH[scores_BLH.isfinite()]
    threshold = widest_gap(finite) if len(finite) else 0.0
    try:
        rule = headscan.HeadRule(added, threshold, widths=WIDTHS)
    except InterventionError as refusal:
        assert statistic in str(refusal) and masks_read(needed)
        return
    with torch.no_grad(), headscan.intervene(lm, rule, lengths=lengths) as record:
        lm.model(input_ids=ids)
    assert record.ablated is not None
    assert torch.equal(record.ablated[:, 0], rule.ablates(scores_BLH[:, 0]))
    expected, ours = whole(lm, rule), read_in_rows(lm, rule)
    assert close(ours.values, expected.values)
    assert ours.ablated_shares == pytest.approx(expected.ablated_shares)
    varies = len(finite.unique()) > 1
    assert not varies or 0 < sum(ours.ablated_shares) < len(ours.ablated_shares)


def test_rules_share_rows_if_all_their_statistics_join(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(rule.may_share_rows for rule in RULES)
    for statistic in ("self_weight", "output_mean_norm"):
        rule = headscan.HeadRule(add_score(monkeypatch, statistic), 0.5)
        assert not rule.may_share_rows
        row = SharedRow((2, 3, 4), ((5, 6), (7, 8)))
        with pytest.raises(InterventionError, match=r"rule by added needs whole inputs.* Run each input"):
            SharedRowHooks(make_loaded("llama"), [rule] * 2, row)
    divided = replace(SCORES["added"], statistic="output_norm", normaliser="output_mean_norm", over="head")
    monkeypatch.setitem(SCORES, "added", divided)
    assert not headscan.HeadRule("added", 0.5).may_share_rows


def test_a_rule_that_needs_token_ids_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    added = add_score(monkeypatch, "confidence")
    with pytest.raises(InterventionError, match=r"no score on confidence.*: added\. Use another score, or a mask"):
        headscan.HeadRule(added, 0.5)
    for read in (whole, read_in_rows):
        with pytest.raises(InterventionError, match=r"no score on confidence.*: added\. Use another score, or a mask"):
            read(make_loaded("llama"), ByAdded())


@dataclass(frozen=True)
class ByAdded(ScoredAblation):
    """An ablation of a class of its own by a score that tests add."""

    label = "by the added score"
    scored_by = ("added", headscan.MassWidths())  # type: ignore[assignment]

    def heads_at(self, site: headscan.AttentionSite, scores_BH: Tensor | None) -> Tensor:
        raise AssertionError("the score cannot be measured")
