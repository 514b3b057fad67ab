"""Arguments of the public API that are easily confused: those with one meaning are read, others are one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headscan
from headscan.ablation.intervention import ZERO
from headscan.architectures import make_loaded
from headscan.errors import HeadscanError

IDS = torch.arange(2, 22)[None].repeat(2, 1)
MASK = headscan.HeadMask([(0, 1), (2, 3)])


@pytest.fixture(scope="module")
def lm() -> headscan.LoadedModel:
    return make_loaded("llama")


def table() -> np.ndarray:
    heads = np.zeros((3, 6), dtype=bool)
    heads[0, 1] = heads[2, 3] = True
    return heads


@pytest.mark.parametrize(
    "heads",
    [
        [(0, 1), (2, 3)],
        {2: [3], 0: (1,)},
        MASK,
        table(),
        torch.from_numpy(table()),
        np.array([[2, 3], [0, 1]]),
        torch.tensor([[2, 3], [0, 1]]),
        {(0, 1), (2, 3)},
        [(np.int64(0), np.int32(1)), (torch.tensor(2), 3)],
    ],
    ids=["pairs", "by layer", "mask", "table", "tensor table", "array", "tensor", "set", "numbers"],
)
def test_heads_in_every_form_with_one_meaning_are_the_same(lm: headscan.LoadedModel, heads: Any) -> None:
    assert headscan.HeadMask(heads) == MASK
    assert headscan.SiteMask({"self": heads}).fixed_heads == MASK.heads
    assert lm.grid.check(heads) == MASK.heads


@pytest.mark.parametrize(
    ("heads", "problem"),
    [
        (3, r"no heads: an object of type int 3\. Pass \(layer, head\) pairs, such as \[\(3, 5\)\], or \{layer"),
        (None, "no heads: an object of type NoneType"),
        ("0:1", "no heads: an object of type str '0:1'"),
        (Path("heads.json"), "no heads: an object of type PosixPath"),
        ({0: 1}, "no heads: an object of type dict"),
        (headscan.HeadRule("entropy", threshold=1.0), "no heads: an object of type HeadRule"),
        (headscan.SiteMask({"self": [(0, 1)]}), "no heads: an object of type SiteMask"),
        ((0, 1), "not a head: 0"),
        (["0:1"], "not a head: '0:1'"),
        ([(True, False)], r"not a head: \(True, False\)"),
    ],
)
def test_other_heads_are_one_line(lm: headscan.LoadedModel, heads: Any, problem: str) -> None:
    for use in (headscan.HeadMask, lambda given: headscan.slice_heads(lm, given)):
        with pytest.raises(HeadscanError, match=problem):
            use(heads)


def test_a_mask_can_be_sliced_away(lm: headscan.LoadedModel) -> None:
    assert headscan.slice_heads(lm, MASK).grid.total_heads == lm.grid.total_heads - 2
    means = headscan.head_means(lm, IDS)
    with pytest.raises(HeadscanError, match="a mask with other outputs than zero"):
        headscan.slice_heads(lm, headscan.HeadMask(MASK, means))
    assert headscan.HeadMask(MASK).replacement is ZERO


#: Calls with a wrong argument, and the beginning of their error.
WRONG: dict[str, tuple[Callable[[headscan.LoadedModel], Any], str]] = {
    "a model's name": (lambda lm: headscan.collect("gpt2", IDS), "`lm` is of type str 'gpt2'. Pass a model from"),
    "a model of transformers": (lambda lm: headscan.collect(lm.model, IDS), "`lm` is of type LlamaForCausalLM"),
    "importance of a path": (lambda lm: headscan.importance(Path("x"), IDS), "`lm` is of type PosixPath"),
    "probe of None": (lambda lm: headscan.probe(None), "`lm` is of type NoneType"),
    "slice of a model": (lambda lm: headscan.slice_heads(lm.model, [(0, 1)]), "`lm` is of type LlamaForCausalLM"),
    "save of a model": (lambda lm: headscan.save_pruned(lm.model, "x"), "`lm` is of type LlamaForCausalLM"),
    "damage of a model": (lambda lm: headscan.kv_damage(lm.model, IDS), "`lm` is of type LlamaForCausalLM"),
    "means of a model": (lambda lm: headscan.head_means(lm.model, IDS), "`lm` is of type LlamaForCausalLM"),
    "intervene with pairs": (lambda lm: intervened(lm, [(0, 1)]), "`intervention` is of type list. Pass a HeadMask"),
    "intervene with a dict": (lambda lm: intervened(lm, {0: [1]}), "`intervention` is of type dict"),
    "intervene with a score": (lambda lm: intervened(lm, "entropy"), "`intervention` is of type str 'entropy'"),
    "intervene in a path": (lambda lm: intervened("x", MASK), "`lm` is of type str"),
    "lengths of a rule": (
        lambda lm: intervened(lm, headscan.HeadRule("entropy", threshold=1.0), lengths="20"),
        "lengths are of type str",
    ),
    "replacement": (lambda lm: headscan.HeadMask([(0, 1)], "mean"), "`replacement` is of type str 'mean'"),
    "sites": (lambda lm: headscan.SiteMask("self"), "`sites` is of type str 'self'. Pass heads by site"),
    "values": (lambda lm: headscan.HeadMask.of_lowest("entropy", 0.5), "`values_LH` of shape (0,) is no table"),
    "share": (lambda lm: headscan.HeadMask.of_lowest(torch.ones(3, 6), "half"), "`share` is of type str 'half'"),
    "rule": (lambda lm: headscan.HeadRule(["entropy"], threshold=1.0), "unknown score ['entropy']"),
    "pairs of texts": (lambda lm: headscan.collect(lm, [("a", "b")]), "sequence 0 is neither a text nor a list of"),
    "bytes": (lambda lm: headscan.collect(lm, [b"abc"]), "sequence 0 is neither a text nor a list of token ids"),
    "fractions": (lambda lm: headscan.collect(lm, [[0.5, 1.0]]), "sequence 0 is neither a text nor a list of"),
    "lists of lists": (lambda lm: headscan.collect(lm, [[[1], [2]]]), "sequence 0 is neither a text nor a list of"),
    "lengths": (lambda lm: headscan.collect(lm, IDS, {0: 20}), "lengths are of type dict. Pass one integer per"),
    "statistics": (lambda lm: headscan.collect(lm, IDS, statistics=5), "`statistics=5` is no list of names"),
    "no statistic": (lambda lm: headscan.collect(lm, IDS, statistics=[None]), "unknown statistic None"),
    "widths": (lambda lm: headscan.collect(lm, IDS, widths={"sink": 1}), "`widths` is of type dict. Pass a MassWidths"),
    "loss": (lambda lm: headscan.importance(lm, IDS, loss="mean"), "`loss` is of type str 'mean'"),
    "score of a tensor": (lambda lm: headscan.score(torch.ones(2), "entropy"), "`statistics` is of type Tensor"),
    "score by a list": (lambda lm: headscan.score({}, ["entropy"]), "unknown score ['entropy']"),
    "rows": (lambda lm: lm.grid.rows(5), "`values` are no tensors by name"),
    "needle": (lambda lm: headscan.Needle("a text", "a cue"), "`tokens` of a needle are no token ids: 'a text'"),
    "windows": (lambda lm: headscan.KvWindows("plan.json"), "`kept` is of type str 'plan.json'. Pass a KeptKeys"),
    "kept": (lambda lm: headscan.KeptKeys({0: 1}), "no window of a KV head: {0: 1}"),
    "weights": (lambda lm: headscan.slice_heads(lm, MASK, {"x": [1.0]}), "`weights['x']` is of type list"),
    "a configuration": (lambda lm: headscan.load(lm.model.config), "`source` is of type LlamaConfig"),
    "a loaded model": (lambda lm: headscan.load(lm), "`source` is of type LoadedModel"),
    "no device": (lambda lm: headscan.load("demo", device=None), "unknown device None. Choose auto, cpu"),
    "a tokenizer's name": (lambda lm: headscan.load("demo", tokenizer="gpt2"), "`tokenizer` is of type str 'gpt2'"),
    "a folder": (lambda lm: headscan.save_pruned(lm, 5), "`folder` is of type int"),
    "ranges": (lambda lm: headscan.Sharding("cpu", 3), "no layer ranges on devices: 3 on 'cpu'"),
    "offload": (lambda lm: headscan.Sharding(("cpu",), ((0, 3),), "gpu"), "`offload='gpu'` is unknown"),
}


def intervened(lm: Any, intervention: Any, **arguments: Any) -> None:
    with headscan.intervene(lm, intervention, **arguments):
        lm.model(input_ids=IDS)


@pytest.mark.parametrize("call", WRONG)
def test_a_wrong_type_is_one_line(lm: headscan.LoadedModel, call: str) -> None:
    use, problem = WRONG[call]
    with pytest.raises(HeadscanError) as found:
        use(lm)
    assert str(found.value).startswith(problem) and "\n" not in str(found.value)
    assert len(str(found.value)) < 400


def test_types_with_one_meaning_are_read(lm: headscan.LoadedModel) -> None:
    statistics = headscan.collect(lm, IDS)
    by_tensors = headscan.collect(lm, list(IDS))
    assert torch.equal(statistics["entropy"], by_tensors["entropy"])
    arrays = {name: values.numpy() for name, values in statistics.items()}
    assert torch.equal(headscan.score(arrays, "output_norm_ln"), headscan.score(statistics, "output_norm_ln"))
    one = headscan.collect(lm, IDS[:1], 12)["entropy"]
    assert torch.equal(one, headscan.collect(lm, IDS[:1], [12])["entropy"])
    assert headscan.load("demo", device=torch.device("cpu"), dtype=torch.float32).dtype == "float32"
    assert headscan.Sharding(["cpu"], [[0, 3]]) == headscan.Sharding(("cpu",), ((0, 3),))
