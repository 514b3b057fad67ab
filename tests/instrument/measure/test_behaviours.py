"""Behaviour probes: against slow references, and on weights and a model made to show the behaviours."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import headscan
from headscan.architectures import VOCABULARY
from headscan.attention.discovery import discover
from headscan.catalog import BEHAVIOURS
from headscan.errors import NotFiniteError, SequenceError, UnknownNameError, UnsupportedModelError
from headscan.measure.behaviour_probes import (
    Needle,
    NeedlePrompt,
    earlier_occurrences,
    mean_weight_on,
    needle_prompts,
    repeat_scores,
    repeated_tokens,
    retrieval_scores,
    share_of_hits,
)
from headscan.measure.probe_settings import BehaviourProbe
from headscan.models.loaded_model import LoadedModel
from tests.devices import on
from tests.small_models import make_loaded

NEEDLES = [Needle((40, 41, 42, 43, 44), (50, 51)), Needle((60, 61, 62), (63,))]
HAYSTACK = torch.randint(2, VOCABULARY, (200,), generator=torch.Generator().manual_seed(5)).tolist()
#: Grouped heads, plain ones, a window shorter than the sequences, layers without attention, no attention interface.
REFERENCED = ["llama", "gpt2", "mistral-sliding", "qwen3_5", "gptj", "bloom"]


def eager_weights(lm: LoadedModel, ids: list[int]) -> dict[int, Tensor]:
    """Weights (H, N, N) by layer in float64, as transformers' eager attention returns them."""
    oracle = copy.deepcopy(lm.model).double()
    oracle.set_attn_implementation("eager")
    out = oracle(input_ids=torch.tensor([ids], device=lm.device), output_attentions=True, use_cache=False)
    found = [attention[0].double().cpu() for attention in out.attentions if attention is not None]
    return {site.layer: weights for site, weights in zip(lm.grid.sites, found, strict=True)}


def slow_repeats(A: Tensor, ids: list[int]) -> dict[str, float]:
    """The three scores of one head, A (N, N), query by query."""
    after, same, before = [], [], []
    for q in range(1, len(ids)):
        before.append(float(A[q, q - 1]))
        earlier = [k for k in range(q) if ids[k] == ids[q]]
        if earlier:
            after.append(sum(float(A[q, k + 1]) for k in earlier))
            same.append(sum(float(A[q, k]) for k in earlier))
    mean = {"induction_score": after, "duplicate_token_score": same, "previous_token_score": before}
    return {name: sum(values) / len(values) for name, values in mean.items()}


def slow_retrieval(A: Tensor, prompt: NeedlePrompt) -> float:
    """Return the score of one head, A (N, N): an answer token is predicted one position earlier."""
    needle = prompt.ids[prompt.start : prompt.start + prompt.size]
    full = [*prompt.ids, needle[-1]]
    hits = 0
    for number in range(prompt.size):
        answer_at = len(full) - prompt.size + number
        assert full[answer_at] == needle[number]
        hits += int(A[answer_at - 1].argmax()) == prompt.start + number
    return hits / prompt.size


@pytest.mark.gpu
@pytest.mark.parametrize("family", REFERENCED)
def test_repeats_match_the_slow_reference(family: str, device: torch.device) -> None:
    lm = on(device, make_loaded(family))
    settings = BehaviourProbe(sequences=2, tokens=8, repeats=3)
    ids, abs_error = repeated_tokens(lm, settings), 2e-6 if device.type == "cpu" else 2e-5
    found = repeat_scores(lm, ids)
    whole = headscan.probe(lm, settings=settings)
    assert list(whole) == ["induction_score", "duplicate_token_score", "previous_token_score"]
    for row, sequence in enumerate(ids.tolist()):
        weights = eager_weights(lm, sequence)
        for layer in range(lm.grid.num_layers):
            for head in range(lm.grid.max_heads):
                got = {name: float(values[row, layer, head]) for name, values in found.items()}
                if layer in weights:
                    assert got == pytest.approx(slow_repeats(weights[layer][head], sequence), abs=abs_error)
                else:
                    assert all(value != value for value in got.values())
    for name, values in whole.items():
        assert values.dtype == torch.float32
        torch.testing.assert_close(values, found[name].mean(0), equal_nan=True)


@pytest.mark.parametrize("family", REFERENCED)
def test_retrieval_matches_the_slow_reference(family: str) -> None:
    lm = make_loaded(family)
    prompts = [
        prompt for length in (24, 40) for prompt in needle_prompts(length, (0.0, 0.4, 1.0), HAYSTACK, NEEDLES, [0])
    ]
    assert {len(prompt.ids) for prompt in prompts} == {24, 40}
    together = retrieval_scores(lm, prompts)
    for row, prompt in enumerate(prompts):
        torch.testing.assert_close(retrieval_scores(lm, [prompt])[0], together[row], equal_nan=True)
        for layer, weights in eager_weights(lm, list(prompt.ids)).items():
            expected = [slow_retrieval(weights[head], prompt) for head in range(lm.grid.max_heads)]
            assert together[row, layer].tolist() == pytest.approx(expected)
    settings = BehaviourProbe(lengths=(24, 40), depths=(0.0, 0.4, 1.0))
    whole = headscan.probe(lm, ["retrieval_score"], settings=settings, haystack=HAYSTACK, needles=NEEDLES)
    torch.testing.assert_close(whole["retrieval_score"], together.mean(0), equal_nan=True)


def test_scores_of_weights_made_by_hand() -> None:
    ids = torch.tensor([[9, 1, 2, 3, 1, 2, 3, 1, 2, 3]])
    N = ids.shape[1]
    heads = torch.zeros(1, 4, N, N)
    for q in range(N):
        heads[0, 0, q, q - 2 if q > 3 else 0] = 1  # the key after the last occurrence: a period of three, less one
        heads[0, 1, q, q - 3 if q > 3 else 0] = 1  # the last occurrence itself
        heads[0, 2, q, max(q - 1, 0)] = 1
        heads[0, 3, q, 0] = 1
    occurrence = earlier_occurrences(ids)
    assert occurrence[0, 9].nonzero().flatten().tolist() == [3, 6]
    assert mean_weight_on(heads, occurrence).tolist() == [[0, 1, 0, 0]]
    assert mean_weight_on(heads, occurrence.roll(1, -1)).tolist() == [[1, 0, 0, 0]]
    # Half of the weight on each of two earlier occurrences counts whole, and queries without any count not at all.
    halves = torch.zeros(1, 1, N, N)
    halves[0, 0, 7:, 1:7] = 0.5 * occurrence[0, 7:, 1:7]
    halves[0, 0, :7, 0] = 1
    assert mean_weight_on(halves, occurrence).item() == pytest.approx(0.5)
    target = torch.tensor([[2, 3, 4, -1]])
    rows = torch.zeros(1, 2, 4, N)
    rows[0, 0, [0, 1, 2, 3], [2, 3, 4, 0]] = 0.4
    rows[0, 1, [0, 1, 2, 3], [2, 4, 3, 0]] = 0.4
    assert share_of_hits(rows, target).tolist() == [[1.0, pytest.approx(1 / 3)]]


@pytest.fixture(scope="module")
def induction_model() -> LoadedModel:
    """Two layers written by hand: an induction head and what it needs.

    Layer 0, head 0 looks one token back and carries what it finds there upwards; layer 0, head 1 looks at equal tokens;
    layer 1, head 0 looks where the token before is the present one.

    The residual stream is three one-hot parts: the token (64), the token before (64), the position (128).
    """
    width, token, carried, position = 256, slice(0, 64), slice(64, 128), slice(128, 256)
    config = GPT2Config(
        vocab_size=64, n_positions=128, n_embd=width, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1
    )
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if ".ln_" in name and name.endswith("weight") else 0.0)
        model.transformer.wte.weight[:, token] = torch.eye(64)
        model.transformer.wpe.weight[:, position] = torch.eye(128)
        below, above = (block.attn for block in model.transformer.h)
        # Columns of c_attn: queries of both heads (128 each), then keys, then values.
        below.c_attn.weight[position, 0:128] = 5 * torch.eye(128)
        below.c_attn.weight[position, 256:384] = 5 * torch.eye(128).roll(1, 1)  # key j answers to query j + 1
        below.c_attn.weight[token, 128:192] = 5 * torch.eye(64)
        below.c_attn.weight[token, 384:448] = 5 * torch.eye(64)
        for block in (below, above):  # also of heads whose output goes nowhere: a model is searched for outputs
            for values in (512, 640):
                block.c_attn.weight[token, values : values + 64] = torch.eye(64)
        below.c_proj.weight[0:64, carried] = torch.eye(64)
        above.c_attn.weight[token, 0:64] = 5 * torch.eye(64)
        above.c_attn.weight[carried, 256:320] = 5 * torch.eye(64)
    return LoadedModel(model, None, discover(model), "by hand")


def test_a_model_made_to_show_the_behaviours_shows_them(induction_model: LoadedModel) -> None:
    needles = [Needle(tuple(range(40, 52)), (60, 61))]
    haystack = [2 + i % 35 for i in range(200)]
    scores = headscan.probe(
        induction_model, settings=BehaviourProbe(lengths=(80, 120)), haystack=haystack, needles=needles
    )
    assert list(scores) == list(BEHAVIOURS)
    assert scores["previous_token_score"][0, 0] > 0.99
    assert scores["induction_score"][1, 0] > 0.99
    # Of equal tokens the query's own is one: in the three repeats 1/2, 2/3 and 3/4 of the weight is on earlier ones.
    assert scores["duplicate_token_score"][0, 1] == pytest.approx((1 / 2 + 2 / 3 + 3 / 4) / 3, abs=0.01)
    # All but the first token of the answer: what stands before that one in the haystack is not the cue.
    assert scores["retrieval_score"][1, 0] == pytest.approx(11 / 12)
    for name, values in scores.items():
        others = values.clone()
        others[{"previous_token_score": (0, 0), "duplicate_token_score": (0, 1)}.get(name, (1, 0))] = 0
        assert others.max() < 0.15, name


def test_ablated_heads_stay_ablated_in_a_probe(induction_model: LoadedModel) -> None:
    """Without the head below, the one above has nothing to match."""
    with headscan.intervene(induction_model, headscan.HeadMask([(0, 0)])):
        scores = headscan.probe(induction_model, ["induction_score"])
    assert scores["induction_score"][1, 0] < 0.1


def test_random_tokens_are_ordinary_repeated_and_follow_the_seed() -> None:
    lm = make_loaded("llama")
    ids = repeated_tokens(lm, BehaviourProbe(sequences=3))
    assert ids.shape == (3, 101)
    assert (ids[:, 0] == 0).all()
    assert not torch.isin(ids[:, 1:], torch.tensor([0, 1])).any()
    assert torch.equal(ids[:, 1:26], ids[:, 76:])
    assert all(len(set(row[1:26].tolist())) == 25 for row in ids)
    assert torch.equal(ids, repeated_tokens(lm, BehaviourProbe(sequences=3)))
    assert not torch.equal(ids, repeated_tokens(lm, BehaviourProbe(sequences=3, seed=1)))


def test_prompts_hold_the_needle_at_its_position() -> None:
    depths = (0.0, 0.5, 1.0)
    for depth, prompt in zip(depths, needle_prompts(30, depths, HAYSTACK, NEEDLES[:1], [0]), strict=True):
        room = 30 - 1 - 5 - 2 - 4
        cut = round(depth * room)
        assert prompt.start == 1 + cut
        assert list(prompt.ids) == [0, *HAYSTACK[:cut], *range(40, 45), *HAYSTACK[cut:room], 50, 51, *range(40, 44)]


def test_mistakes_are_named() -> None:
    lm = make_loaded("llama")
    retrieval = ["retrieval_score"]
    with pytest.raises(UnknownNameError, match="did you mean induction_score"):
        headscan.probe(lm, ["inductive_score"])
    with pytest.raises(SequenceError, match="needs a needle"):
        headscan.probe(lm, retrieval, haystack=HAYSTACK)
    with pytest.raises(SequenceError, match=r"16 \(limit 17\)"):
        headscan.probe(lm, retrieval, settings=BehaviourProbe(lengths=(16,)), haystack=HAYSTACK, needles=NEEDLES)
    assert needle_prompts(17, (0.5,), HAYSTACK, NEEDLES[:1], [0])
    with pytest.raises(SequenceError, match="haystack is too short: 200 tokens"):
        headscan.probe(lm, retrieval, settings=BehaviourProbe(lengths=(300,)), haystack=HAYSTACK, needles=NEEDLES)
    with pytest.raises(SequenceError, match=r"1500 tokens \(limit 1024\)"):
        long = BehaviourProbe(lengths=(1500,))
        headscan.probe(lm, retrieval, settings=long, haystack=HAYSTACK * 10, needles=NEEDLES)
    with pytest.raises(SequenceError, match="token ids are out of range: 500"):
        headscan.probe(lm, retrieval, settings=BehaviourProbe(lengths=(30,)), haystack=[500] * 99, needles=NEEDLES)
    with pytest.raises(SequenceError, match=r"96 \(limit 95, the tokens"):
        headscan.probe(lm, settings=BehaviourProbe(tokens=96))
    for wrong in ({"repeats": 1}, {"seed": -1}, {"depths": (1.5,)}, {"lengths": ()}, {"lengths": (0,)}):
        with pytest.raises(SequenceError, match=r"Raise|Lower|Pass"):
            BehaviourProbe(**wrong)
    for family in ("bert", "t5"):
        with pytest.raises(UnsupportedModelError, match="not a causal decoder"):
            headscan.probe(make_loaded(family))
    broken = make_loaded("llama")
    broken.model.get_input_embeddings().weight.fill_(float("nan"))
    with pytest.raises(NotFiniteError, match="not finite in layer 0"):
        headscan.probe(broken)
