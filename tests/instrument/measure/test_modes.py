"""Dropout, autocast, and a BOS with the id of EOS change no number; token ids decide which keys count."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import headscan
from headscan.ablation.rules import ScoreStatistics
from headscan.architectures import VOCABULARY
from headscan.attention.calls import AttentionCall
from headscan.attention.hooks import attention_hook, output_hook
from headscan.catalog import STATISTICS, Statistic
from headscan.errors import UnsupportedModelError
from headscan.grid import AttentionSite
from headscan.statistics.registry import KEY_MASKS, QUERY_NUMBERS, WEIGHT_STATISTICS
from headscan.statistics.weight_statistics import MeanOverQueries, WeightBlock
from tests.small_models import make_loaded

HALF = torch.bfloat16


def ids_of(sequences: int, tokens: int) -> Tensor:
    return torch.randint(5, VOCABULARY, (sequences, tokens), generator=torch.Generator().manual_seed(3))


def eager_confidence(lm: headscan.LoadedModel, ids: Tensor, ignored: Tensor) -> Tensor:
    """Mean over queries of the largest weight on a key that is not ignored (L, H), for one sequence (1, N)."""
    model = copy.deepcopy(lm.model)
    model.set_attn_implementation("eager")
    weights = torch.stack(model(input_ids=ids, output_attentions=True).attentions)[:, 0]
    return weights.masked_fill(ignored, 0.0).amax(-1).mean(-1)


@pytest.mark.parametrize("family", ["gpt2", "opt", "gpt_neox"])
def test_sink_tokens_are_no_keys_of_confidence(family: str) -> None:
    """Neither the first token nor those that end a sequence."""
    lm, ids = make_loaded(family), ids_of(1, 20)
    end = lm.model.config.eos_token_id
    ids[0, [9, 19]] = end
    ignored = torch.arange(20)[None] == torch.tensor([[0], [9], [19]])
    found = headscan.collect(lm, ids, statistics=["confidence"])["confidence"][0]
    torch.testing.assert_close(found, eager_confidence(lm, ids, ignored.any(0)), rtol=1e-5, atol=1e-6)


class PunctuationMass(MeanOverQueries):
    """The example of CONTRIBUTING.md (arXiv 1906.04341, section 3.2)."""

    name = "punctuation_mass"
    fused = False
    reads_keys = "punctuation"

    def of_block(self, block: WeightBlock) -> Tensor:
        return (block.weights_BHRC * block.key_mask("punctuation")).sum(-1)


def punctuation(lm: headscan.LoadedModel, ids: Tensor) -> Tensor:
    tokens = ids.unique()
    texts = [text.strip() for text in lm.require_tokenizer().batch_decode(tokens[:, None])]
    return torch.isin(ids, tokens[[text != "" and not any(map(str.isalnum, text)) for text in texts]])


def test_a_statistic_reads_a_key_mask_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding included: the mask is made of a padded batch, on the device of the ids."""
    name, statistic = PunctuationMass.name, PunctuationMass()
    monkeypatch.setitem(STATISTICS, name, Statistic(name, "-", "share", "attention", "arXiv 1906.04341", "full"))
    monkeypatch.setitem(WEIGHT_STATISTICS, name, statistic)
    monkeypatch.setitem(QUERY_NUMBERS, name, statistic)
    monkeypatch.setitem(KEY_MASKS, "punctuation", punctuation)
    lm = headscan.load("demo", device="cpu", dtype="float32")
    texts = ["def f(x):\n    return x + 1", "one, two; three ... and then all of the other numbers up to eleven."]
    found = headscan.collect(lm, texts, statistics=[name, "confidence"], path="blockwise")[name]
    model = copy.deepcopy(lm.model)
    model.set_attn_implementation("eager")
    for text, of_text in zip(texts, found, strict=True):
        ids = lm.require_tokenizer()(text, return_tensors="pt")["input_ids"]
        marks = punctuation(lm, ids)
        assert 0 < marks.sum() < ids.numel()
        weights = torch.stack(model(input_ids=ids, output_attentions=True).attentions)[:, 0]
        torch.testing.assert_close(of_text, weights[..., marks[0]].sum(-1).mean(-1), rtol=1e-5, atol=1e-6)


def test_a_model_in_train_mode_is_refused() -> None:
    lm, ids = make_loaded("gpt2"), ids_of(2, 20)
    rule = headscan.HeadRule("output_norm_ln", 0.9)
    lm.model.transformer.h[1].train()
    refused = pytest.raises(UnsupportedModelError, match=r"transformer.h.1 is in train mode.*Call lm.model.eval\(\)")
    for statistics in (["entropy"], ["output_norm"]):
        with refused:
            headscan.collect(lm, ids, statistics=statistics)
    with refused:
        headscan.probe(lm)
    for what in (headscan.HeadMask([(0, 0)]), rule, headscan.RandomHeads(0.5)):
        with refused, headscan.intervene(lm, what):
            pass
    # What was put into train mode inside of a context is noticed by the next pass.
    lm.model.eval()
    for what in (headscan.HeadMask([(0, 0)]), rule):
        with headscan.intervene(lm, what):
            lm.model(input_ids=ids)
            lm.model.train()
            with pytest.raises(UnsupportedModelError, match="train mode"):
                lm.model(input_ids=ids)
            lm.model.eval()


@pytest.mark.parametrize("family", ["llama", "gemma2-softcap", "gptj", "bert"])
def test_collect_and_probe_are_not_changed_by_autocast(family: str) -> None:
    lm, ids, lengths = make_loaded(family), ids_of(2, 40), [40, 21]
    names = headscan.catalog.panel_names("full")
    plain = headscan.collect(lm, ids, lengths, statistics=names)
    behaviours = {} if family == "bert" else headscan.probe(lm)
    with torch.autocast("cpu", dtype=HALF):
        found = headscan.collect(lm, ids, lengths, statistics=names)
        probed = {} if family == "bert" else headscan.probe(lm)
        assert torch.is_autocast_enabled("cpu")
    for name, values in plain.items():
        torch.testing.assert_close(found[name], values, rtol=0, atol=0, equal_nan=True)
    for name, values in behaviours.items():
        torch.testing.assert_close(probed[name], values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("score", ["entropy_ln", "projected_output_norm_ln"])
def test_a_rule_s_statistics_are_float32_under_autocast(score: str) -> None:
    """The model's own products are in half precision, and a rule's statistics are not."""
    lm, ids = make_loaded("llama"), ids_of(2, 40)
    lengths = torch.tensor([40, 21])
    statistics, again = ScoreStatistics(lm, score), ScoreStatistics(lm, score)
    calls: dict[int, AttentionCall] = {}
    seen: dict[int, tuple[Tensor, dict[str, Tensor]]] = {}

    def on_attention(site: AttentionSite, call: AttentionCall) -> Tensor:
        calls[site.layer] = call
        return statistics.attend(call, lengths)

    def on_outputs(site: AttentionSite, outputs_BNHD: Tensor) -> None:
        seen[site.layer] = (outputs_BNHD, statistics.layer_statistics(site, outputs_BNHD, lengths))

    with attention_hook(lm, on_attention), output_hook(lm, on_outputs), torch.autocast("cpu", dtype=HALF):
        lm.model(input_ids=ids)
    value = calls[0].value_BKSD
    assert torch.equal(value.to(HALF).to(value.dtype), value)  # the model rounded its own product
    for site in lm.grid.sites:
        outputs_BNHD, found = seen[site.layer]
        again.attend(calls[site.layer], lengths)
        for name, values in again.layer_statistics(site, outputs_BNHD, lengths).items():
            assert torch.equal(found[name], values)


def test_a_rule_runs_under_autocast() -> None:
    lm, ids = make_loaded("llama"), ids_of(2, 40)
    with headscan.intervene(lm, headscan.HeadRule("output_norm_ln", 0.9)) as record:
        plain = lm.model(input_ids=ids).logits
        with torch.autocast("cpu", dtype=HALF):
            logits = lm.model(input_ids=ids).logits
    assert record.ablated is not None and record.ablated.any()
    assert logits.dtype == HALF and not torch.equal(logits.float(), plain)
