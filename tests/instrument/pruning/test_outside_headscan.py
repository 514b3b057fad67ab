"""Folders of pruned models as other programs read them, and pruned models in other processes."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, DynamicCache, PreTrainedConfig, PreTrainedTokenizerFast

import headscan
from headscan.models.loaded_model import LoadedModel
from tests.instrument.pruning.test_slicing import heads_of_layer, prompts
from tests.instrument.pruning.test_slicing_families import SLICED, choices
from tests.small_models import distinct_first, make_loaded
from tests.warm_python import run_python

HEADS = ("SequenceClassification", "TokenClassification", "QuestionAnswering")


def pruned(name: str) -> LoadedModel:
    lm = make_loaded(name)
    return headscan.slice_heads(lm, choices(name, lm)[-1])


def with_tokenizer(lm: LoadedModel) -> LoadedModel:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return LoadedModel(lm.model, PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?"), lm.grid, lm.source)


def saved(folder: Path, name: str = "llama", **options: Any) -> Path:
    """Save a model whose layers have 4 of 6, 3 of 6 and no query heads, in uneven groups, one group, and none."""
    lm = with_tokenizer(make_loaded(name))
    removed = [(0, 0), (0, 1), (1, 3), (1, 4), (1, 5), *heads_of_layer(lm, 2)]
    headscan.save_pruned(headscan.slice_heads(lm, removed), folder, **options)
    return folder


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=prompts(2, 20)).logits
    return found


@pytest.mark.parametrize("name", distinct_first(SLICED))
def test_readers_without_the_code_of_pruned_models(name: str, tmp_path: Path) -> None:
    """Also engines, which find the width of heads in every layer."""
    whole = make_loaded(name)
    lm = headscan.slice_heads(whole, choices(name, whole)[-1])
    for site in whole.grid.sites:
        own = lm.model.config.per_layer_config[site.layer]
        width = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads  # the rule of vLLM
        columns = whole.module(site.output_projection).weight.numel() // whole.model.config.hidden_size
        assert width == (site.head_dim or columns // site.num_attention_heads)
    headscan.save_pruned(lm, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    if json.loads(file.read_text())["model_type"] != "headscan_pruned":
        pytest.skip("a stock architecture")
    read = PreTrainedConfig.from_json_file(file)  # as the tokenizer's auto class and a resuming trainer do
    assert read.num_hidden_layers == lm.model.config.num_hidden_layers
    with pytest.raises(ValueError, match=r"headscan_pruned: the model of this folder is a .* without") as error:
        type(whole.model).from_pretrained(tmp_path / "model")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon-gqa"])
def test_other_heads_have_the_weights_of_the_decoder(name: str, tmp_path: Path) -> None:
    headscan.save_pruned(pruned(name), tmp_path / "model")
    decoder = headscan.load(tmp_path / "model").model
    for kind in HEADS:
        auto = getattr(transformers, f"AutoModelFor{kind}")
        if type(make_loaded(name).model.config) not in auto._model_mapping:
            continue
        model = auto.from_pretrained(tmp_path / "model").eval()
        with torch.no_grad():
            want, got = (each.base_model(input_ids=prompts(2, 20))[0] for each in (decoder, model))
        assert torch.equal(got, want)
        model.save_pretrained(tmp_path / kind)
        again = auto.from_pretrained(tmp_path / kind)
        assert type(again) is type(model)
        for key, weight in model.state_dict().items():
            assert torch.equal(again.state_dict()[key], weight)


def test_the_body_alone_is_saved_and_loaded(tmp_path: Path) -> None:
    body = transformers.AutoModel.from_pretrained(saved(tmp_path / "model"))
    body.save_pretrained(tmp_path / "body")
    again = transformers.AutoModel.from_pretrained(tmp_path / "body")
    assert torch.equal(again(prompts())[0], body(prompts())[0])


#: Uses a folder with its code, and pickles of its model, in a process without headscan; prints the differences.
_ELSEWHERE = """
import sys
sys.modules["headscan"] = None
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, LlamaForCausalLM
folder, pickled, first = sys.argv[1:4]
ids = torch.arange(20)[None] + 5
if first == "read":
    print(AutoTokenizer.from_pretrained(folder, trust_remote_code=False)("b a").input_ids)
    try:
        LlamaForCausalLM.from_pretrained(folder)
    except ValueError as problem:
        print("headscan_pruned: the model of this folder" in str(problem), "trust_remote_code=True" in str(problem))
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    print(type(AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)).__name__)
    torch.save({"model": model, "config": model.config, "logits": model(ids).logits}, pickled)
else:
    saved = torch.load(pickled, weights_only=False)
    print(torch.equal(saved["model"](ids).logits, saved["logits"]))
    print(saved["config"].to_dict() == saved["model"].config.to_dict(), saved["config"].per_layer_config[1].head_dim)
"""


def test_a_folder_with_its_code_and_its_pickles_need_no_headscan(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", remote_code=True)
    found = run_python("-c", _ELSEWHERE, str(folder), str(tmp_path / "pickle"), "read")
    want = ["[1, 0]", "True True", "PrunedLlamaForSequenceClassification"]
    assert found.stdout.splitlines() == want, found.stderr[-2000:]
    found = run_python("-c", _ELSEWHERE, str(folder), str(tmp_path / "pickle"), "unpickle")
    assert found.stdout.splitlines() == ["True", "True 8"], found.stderr[-2000:]


@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon-alibi", "mixtral"])
def test_models_and_configurations_are_pickled_and_copied(name: str) -> None:
    model = pruned(name).model
    for again in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert type(again) is type(model) and type(again.config) is type(model.config)
        assert again.config.to_dict() == model.config.to_dict()
        assert torch.equal(logits(again), logits(model))
    shallow = copy.copy(model.config)
    assert type(shallow) is type(model.config) and shallow == model.config


_UNPICKLE = """
import sys, torch
saved = torch.load(sys.argv[1], weights_only=False)
print(torch.equal(saved["model"](saved["ids"]).logits, saved["logits"]))
"""


def test_a_pickle_of_uneven_groups_runs_in_a_process_that_only_reads_it(tmp_path: Path) -> None:
    model, ids = headscan.slice_heads(make_loaded("llama"), [(0, 0)]).model, prompts()
    torch.save({"model": model, "ids": ids, "logits": model(ids).logits}, tmp_path / "pickle")
    found = run_python("-c", _UNPICKLE, str(tmp_path / "pickle"))
    assert found.stdout.split() == ["True"], found.stderr[-2000:]


def test_configurations_of_earlier_versions_load(tmp_path: Path) -> None:
    file = saved(tmp_path / "model") / "config.json"
    fields = json.loads(file.read_text())
    added = "original_model kept_heads kept_heads_crc32 original_heads original_kv_heads has_added_bias".split()
    file.write_text(json.dumps({name: value for name, value in fields.items() if name not in added}))
    model = headscan.load(tmp_path / "model").model
    model.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == fields
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("b").input_ids == [1]


#: By method: the tensors that stand for a weight, made from it.
QUANTISED = {
    "bitsandbytes": lambda weight: {"weight": torch.zeros(weight.numel() // 2, 1, dtype=torch.uint8)},
    "torchao": lambda weight: {"_weight_qdata": weight.to(torch.int8), "_weight_scale": weight[:, :1].contiguous()},
    "gptq": lambda weight: {"qweight": torch.zeros(weight.shape[1] // 8, weight.shape[0], dtype=torch.int32)},
    "compressed-tensors": lambda weight: {
        "weight_packed": torch.zeros(weight.shape[0], weight.shape[1] // 8, dtype=torch.int32),
        "weight_shape": torch.tensor(weight.shape),
    },
}


@pytest.mark.parametrize("method", QUANTISED)
def test_quantised_weights_are_not_taken_for_whole_ones(method: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    tensors = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        path, _, leaf = name.rpartition(".")
        made = QUANTISED[method](weight) if path.endswith("_proj") and leaf == "weight" else {leaf: weight}
        tensors |= {f"{path}.{part}": value for part, value in made.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert AutoConfig.from_pretrained(folder).per_layer_config[1].num_attention_heads == 3
    fields = json.loads((folder / "config.json").read_text())
    fields["per_layer_config"]["2"].update(kept_heads=[0], kept_heads_crc32=4108050209, num_attention_heads=1, skip=[])
    fields["per_layer_config"]["2"]["num_key_value_heads"] = 1
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"layer 2: kept_heads in config\.json"):
        AutoConfig.from_pretrained(folder)


@pytest.mark.parametrize("kind", ["torchao", "bitsandbytes"])
def test_a_pruned_model_is_quantised_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    pytest.importorskip(kind)
    if kind == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig

        settings: Any = transformers.TorchAoConfig(Int8WeightOnlyConfig())
    else:
        settings = transformers.BitsAndBytesConfig(load_in_8bit=True)
    auto = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(saved(tmp_path / "model"), quantization_config=settings, device_map="cpu")
    model.save_pretrained(tmp_path / "quantised")
    again = auto.from_pretrained(tmp_path / "quantised", device_map="cpu")
    assert torch.equal(logits(again), logits(model))
    assert torch.equal(logits(headscan.load(tmp_path / "quantised", device="cpu").model), logits(model))


@pytest.mark.parametrize("removed", [[(1, 0), (1, 1), (1, 2)], [(1, 0)], [(1, head) for head in range(6)]])
def test_continuous_batching_is_refused_where_the_cache_differs_by_layer(removed: list[tuple[int, int]]) -> None:
    model: Any = headscan.slice_heads(make_loaded("llama"), removed).model
    with pytest.raises(
        ValueError, match=r"continuous batching needs .* layer 1 has groups of .* Use generate\(\)"
    ) as error:
        model.generate_batch([[5, 6, 7]])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("removed", [[(1, 0), (1, 1), (1, 2)], [(1, head) for head in range(6)]])
def test_a_cache_of_the_original_is_refused(removed: list[tuple[int, int]]) -> None:
    lm = make_loaded("llama")
    sliced = headscan.slice_heads(lm, removed).model
    past = lm.model(prompts(), past_key_values=DynamicCache(config=lm.model.config)).past_key_values
    with pytest.raises(ValueError, match=r"past_key_values have 2 KV heads in layer 1 \(limit [01]"):
        sliced(prompts(), past_key_values=past)
    own = sliced(prompts(), past_key_values=DynamicCache(config=sliced.config)).past_key_values
    assert sliced(prompts(), past_key_values=own).logits.shape[1] == prompts().shape[1]


def test_prefix_tuning_fits_no_other_kv_heads_and_prompt_tuning_does() -> None:
    peft = pytest.importorskip("peft")
    sizes = {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"}
    sliced = headscan.slice_heads(make_loaded("llama"), [(1, 0), (1, 1), (1, 2)]).model
    adapted = peft.get_peft_model(copy.deepcopy(sliced), peft.PrefixTuningConfig(**sizes))
    with pytest.raises(ValueError, match="tune prompts or adapters instead of a prefix"):
        adapted(input_ids=prompts())
    prompted = peft.get_peft_model(sliced, peft.PromptTuningConfig(**sizes))
    assert prompted(input_ids=prompts()).logits.isfinite().all()
