"""Models that are bundled, in memory or adapted, and texts instead of token ids.

PEFT itself is not needed by most tests: its wrappers are imitated.
"""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import headscan
from headscan.checkpoints import source_folder
from headscan.errors import HeadIndexError, ModelLoadError, SequenceError, UnknownNameError, UnsupportedModelError
from headscan.measure.collect import check_ids
from tests.small_models import make_loaded, make_model
from tests.sources import re_exports

TEXTS = ["def area(x):\n    return x * x", "import os"]


@pytest.fixture(scope="module")
def demo() -> headscan.LoadedModel:
    return headscan.load("demo", device="cpu", dtype="float32")


class Adapted(nn.Module):
    """A projection with a low-rank addition, as PEFT adds it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base(hidden) + self.up(self.down(hidden))


def test_the_bundled_model_needs_no_hub(demo: headscan.LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert headscan.load("demo", device="cpu").grid == demo.grid
    assert demo.tokenizer is not None


def test_a_model_in_memory_is_measured_with_its_edits(demo: headscan.LoadedModel) -> None:
    edited = copy.deepcopy(demo.model).train()
    attention = edited.get_submodule("model.layers.2.self_attn")
    torch.manual_seed(0)
    attention.q_proj = Adapted(attention.q_proj)
    plain = headscan.collect(demo, TEXTS)["entropy"]
    for given in (edited, Wrapper(edited)):
        lm = headscan.load(given, tokenizer=demo.tokenizer)
        assert lm.model is edited and not edited.training
        found = headscan.collect(lm, TEXTS)["entropy"]
        assert torch.equal(found[:, :2], plain[:, :2])
        assert (found[:, 2] - plain[:, 2]).abs().max() > 1e-3


def test_a_model_in_memory_is_not_moved_or_cast() -> None:
    for option in ({"dtype": "float16"}, {"device": "cpu"}, {"trust_remote_code": True}, {"safetensors": False}):
        with pytest.raises(
            ModelLoadError, match=r"have no effect on a model in memory: leave them out, and move or cast"
        ):
            headscan.load(make_model("llama"), **option)  # type: ignore[arg-type]
    with pytest.raises(ModelLoadError, match="Linear is not a model of transformers"):
        headscan.load(nn.Linear(2, 2))


def test_texts_arrays_and_lists_are_the_same_tokens(demo: headscan.LoadedModel) -> None:
    assert demo.tokenizer is not None
    rows = [demo.tokenizer(text)["input_ids"] for text in TEXTS]
    lengths = [len(row) for row in rows]
    ids = torch.zeros(2, max(lengths), dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    expected = headscan.collect(demo, ids, lengths)["output_norm"]
    for given in (
        headscan.collect(demo, TEXTS),
        headscan.collect(demo, rows),
        headscan.collect(demo, ids.numpy(), np.array(lengths)),
    ):
        assert torch.equal(given["output_norm"], expected)
    expected = headscan.importance(demo, ids, lengths)["importance"]
    for found in (headscan.importance(demo, TEXTS), headscan.importance(demo, ids.numpy(), lengths)):
        assert torch.equal(found["importance"], expected)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.int32, np.dtype(">u2")])
def test_ids_of_every_integer_type_are_read(demo: headscan.LoadedModel, dtype: np.typing.DTypeLike) -> None:
    ids = np.array([[5, 6, 7]])
    expected = headscan.collect(demo, ids)["output_norm"]
    given = ids.astype(dtype)
    assert torch.equal(headscan.collect(demo, given)["output_norm"], expected)
    if given.dtype.isnative:
        assert torch.equal(headscan.collect(demo, torch.from_numpy(given))["output_norm"], expected)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_lengths_that_are_no_integers_are_refused(demo: headscan.LoadedModel, dtype: torch.dtype) -> None:
    with pytest.raises(headscan.HeadscanError, match=rf"^lengths has shape \(1,\) and dtype {dtype}\. Pass 1 integers"):
        headscan.collect(demo, torch.tensor([[5, 6, 7]]), torch.ones(1, dtype=dtype))
    short = headscan.collect(demo, torch.tensor([[5, 6, 7]]), np.array([2], dtype=np.uint16))
    assert torch.equal(short["entropy"], headscan.collect(demo, torch.tensor([[5, 6]]))["entropy"])


def test_ids_of_int64_are_not_copied(demo: headscan.LoadedModel) -> None:
    ids = np.array([[5, 6, 7]])
    for given in (ids, torch.from_numpy(ids)):
        assert check_ids(demo, given, None)[0].data_ptr() == ids.ctypes.data


@pytest.mark.parametrize(
    ("given", "lengths", "message"),
    [
        ("one text", None, "Pass a list of texts"),
        (["a", "b"], [1, 1], "Leave out lengths"),
        ([[1, 2], []], None, "sequence 1 has no token"),
        (["some text", ""], None, "sequence 1 has no token of its own: ''. Leave it out"),
        (np.ones((2, 3)), None, "no integer array"),
        (np.ones((2, 3), dtype=bool), None, "no integer array"),
        (torch.ones(2, 3, dtype=torch.bool), None, r"not an integer tensor: it has the dtype torch\.bool\. Pass"),
        ([1, 2], None, "no integer array"),
    ],
)
def test_other_inputs_are_refused(demo: headscan.LoadedModel, given: object, lengths: object, message: str) -> None:
    with pytest.raises(SequenceError, match=message):
        headscan.collect(demo, given, lengths)  # type: ignore[arg-type]


def test_the_public_names_are_listed() -> None:
    assert set(headscan.__all__) <= set(dir(headscan))
    assert all(getattr(headscan, name) is not None for name in dir(headscan))


def test_type_checkers_find_every_public_name_at_its_home() -> None:
    found = re_exports(headscan)
    assert found.keys() == {*headscan.__all__}
    for name, path in found.items():
        assert getattr(headscan, name) is resolve_name(path)


def test_a_missing_name_proposes_the_nearest(demo: headscan.LoadedModel) -> None:
    found = headscan.collect(demo, TEXTS)
    with pytest.raises(UnknownNameError, match=r"^unknown statistic 'entropi'; did you mean entropy, entropy_ln\?$"):
        found["entropi"]
    with pytest.raises(UnknownNameError, match=r"^statistic 'confidence' is not among these values\. Name it in"):
        found["confidence"]
    with pytest.raises(UnknownNameError, match=r"Call headscan\.score"):
        found["output_norm_ln"]
    assert found.get("entropi") is None and "entropi" not in found
    again = pickle.loads(pickle.dumps(found))
    with pytest.raises(UnknownNameError, match="did you mean entropy"):
        again["entropi"]
    with pytest.raises(UnknownNameError, match="unknown importance 'importanc'; did you mean importance"):
        headscan.importance(demo, TEXTS)["importanc"]
    with pytest.raises(UnknownNameError, match="unknown behaviour 'inducton_score'; did you mean induction_score"):
        headscan.probe(demo, ["induction_score"])["inducton_score"]


def test_one_text_is_no_list_of_names(demo: headscan.LoadedModel) -> None:
    with pytest.raises(UnknownNameError, match=r"^`statistics='entropy'` is one text\. .* such as \['entropy'\]$"):
        headscan.collect(demo, TEXTS, statistics="entropy")
    with pytest.raises(UnknownNameError, match=r"^`behaviours='induction_score'` is one text"):
        headscan.probe(demo, "induction_score")


@pytest.mark.parametrize("heads", [["3.5"], [3], [(1.5, 2)], [(1, 2, 3)]])
def test_what_is_not_a_head_is_named(heads: list[object]) -> None:
    with pytest.raises(HeadIndexError, match=r"^not a head: .* Pass \(layer, head\) pairs of integers"):
        headscan.HeadMask(heads)  # type: ignore[arg-type]


def test_heads_of_arrays_are_heads() -> None:
    assert headscan.HeadMask(np.array([[1, 2], [0, 3]])).heads == ((0, 3), (1, 2))
    assert headscan.HeadMask(torch.tensor([[1, 2]])).heads == ((1, 2),)


def test_a_grid_is_shown_in_one_short_line(demo: headscan.LoadedModel) -> None:
    assert repr(demo.grid) == "HeadGrid(self: 48 query heads, 24 KV heads in 6 of 6 layers)"
    assert repr(make_loaded("t5").grid).count(";") == 2


IDS = torch.arange(5, 25).view(2, 10)


class Wrapper(nn.Module):
    """What headscan reads of a PEFT model. ``prefix`` holds virtual tokens in front of each text; None adds none."""

    def __init__(self, model: Any, prefix: Tensor | None = None, **fields: object) -> None:
        super().__init__()
        self.inner, self.prefix = model, prefix
        self.peft_config = {"default": SimpleNamespace(peft_type=SimpleNamespace(value="PROMPT_TUNING"), **fields)}

    def get_base_model(self) -> nn.Module:
        return self.inner

    def forward(self, input_ids: Tensor) -> Any:
        if self.prefix is None:
            return self.inner(input_ids=input_ids)
        words = self.inner.get_input_embeddings()(input_ids)
        return self.inner(inputs_embeds=torch.cat([self.prefix.expand(len(words), -1, -1), words], 1))


def test_virtual_tokens_are_refused() -> None:
    model = make_model("llama")
    wrapper = Wrapper(model, torch.randn(1, 3, 48))
    with pytest.raises(
        UnsupportedModelError, match=r"^Wrapper computes more than its base .*\(PROMPT_TUNING\), such as"
    ):
        headscan.load(wrapper)  # type: ignore[arg-type]


def test_choices_by_the_input_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="computes more than its base model"):
        headscan.load(Wrapper(make_model("llama"), alora_invocation_tokens=[3]))  # type: ignore[arg-type]


@pytest.fixture
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADSCAN_CACHE", str(tmp_path / "cache"))
    make_model("llama").save_pretrained(tmp_path / "base")
    folder = tmp_path / "adapter"
    folder.mkdir()
    facts = {"base_model_name_or_path": str(tmp_path / "base"), "peft_type": "LORA", "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    return folder


def test_an_adapter_without_peft_names_the_package(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_folder, "find_spec", lambda name: None)
    with pytest.raises(
        ModelLoadError, match=r"holds an adapter of .*base, which needs the package peft\. Run `pip inst"
    ):
        headscan.load(adapter)


def test_an_adapter_without_a_base_model_is_refused(adapter: Path) -> None:
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"adapter_config\.json names no base model"):
        headscan.load(adapter)


def test_an_adapter_is_merged_once(adapter: Path) -> None:
    peft = pytest.importorskip("peft")
    base = make_model("llama")
    targets = ["q_proj", "v_proj", "o_proj"]
    config = peft.LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False)
    base.config.name_or_path = base.name_or_path = str(adapter.parent / "base")
    adapted = peft.get_peft_model(base, config).eval()
    adapted.save_pretrained(adapter)
    expected = headscan.collect(headscan.load(adapted), IDS)
    lm = headscan.load(adapter)
    for name, values in headscan.collect(lm, IDS).items():
        torch.testing.assert_close(values, expected[name], rtol=1e-4, atol=1e-5, msg=name)
    assert headscan.load(adapter).source == lm.source != str(adapter)


def test_an_adapter_of_virtual_tokens_is_refused(adapter: Path) -> None:
    peft = pytest.importorskip("peft")
    base = make_model("llama")
    base.config.name_or_path = base.name_or_path = str(adapter.parent / "base")
    config = peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    peft.get_peft_model(base, config).save_pretrained(adapter)
    with pytest.raises(ModelLoadError, match=r"adds virtual tokens to .*base \(PREFIX_TUNING\)"):
        headscan.load(adapter)
