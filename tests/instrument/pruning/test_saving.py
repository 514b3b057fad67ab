"""Pruned models on disk: what loads them, and what refuses."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
import torch
from transformers import PreTrainedTokenizerFast

import headscan
from headscan.checkpoints.headers import read_headers
from headscan.errors import PruningError
from headscan.pruning.save_model import stock_config
from tests.instrument.pruning.test_slicing import heads_of_layer, prompts
from tests.instrument.pruning.test_slicing_families import SLICED, choices, logits
from tests.small_models import load_saved, make_loaded
from tests.sources import ROOT
from tests.warm_python import run_python

UNEVEN = [(0, 0), (0, 1), (1, 3), (1, 4), (1, 5)]

_LOAD = """
import sys
{imports}
import torch
saved = torch.load({logits!r})
model = AutoModelForCausalLM.from_pretrained({folder!r})
for weight in model.parameters():
    weight.data = weight.data.clone()
print(type(model).__name__, torch.equal(model(input_ids=saved["ids"]).logits, saved["logits"]))
"""
#: Loads models, each in a folder of its own, and prints the largest difference of their logits from the saved ones.
_LOAD_ALL = """
import json, sys
from pathlib import Path
{imports}
import torch
from transformers import AutoModelForCausalLM
found = {{}}
for folder in sorted(Path(sys.argv[1]).iterdir()):
    model, report = AutoModelForCausalLM.from_pretrained(folder / "model", output_loading_info=True, **{options})
    for weight in model.parameters():
        weight.data = weight.data.clone()  # products of experts depend on the alignment of their weights
    saved = torch.load(folder / "logits.pt")
    with torch.no_grad():
        error = float((model(input_ids=saved["ids"]).logits - saved["logits"]).abs().max())
    found[folder.name] = error if not any(report.values()) else str(report)
print(json.dumps(found))
"""
_LIGHT = "import headscan\nassert not {'torch', 'transformers'} & set(sys.modules)\n"
_NO_FINDER = "assert not [each for each in sys.meta_path if 'headscan' in type(each).__module__]\n"
_AUTO = "from transformers import AutoModelForCausalLM\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A pruned model with uneven groups, with its logits beside it."""
    return save(tmp_path, "llama", UNEVEN)


def save(tmp_path: Path, name: str, removed: list[tuple[int, int]], **options: bool) -> Path:
    sliced = headscan.slice_heads(load_saved(name, tmp_path / "whole"), removed)
    headscan.save_pruned(sliced, tmp_path / "model", card="# A card\n", **options)
    torch.save({"ids": prompts(2, 30), "logits": logits(sliced)}, tmp_path / "logits.pt")
    return tmp_path / "model"


def load_elsewhere(folder: Path, imports: str, *, new: bool) -> subprocess.CompletedProcess[str]:
    logits = str(folder.parent / "logits.pt")
    code = _LOAD.format(imports=imports, logits=logits, folder=str(folder))
    if not new:
        return run_python("-c", code)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, input="")


def test_headscan_loads_the_same_numbers(folder: Path) -> None:
    loaded = headscan.load(folder)
    want = torch.load(folder.parent / "logits.pt")["logits"]
    assert torch.equal(logits(loaded), want)
    assert loaded.grid.sites[0].kv_index == (0, 1, 1, 1)
    assert loaded.grid == headscan.slice_heads(make_loaded("llama"), UNEVEN).grid
    assert (folder / "README.md").read_text() == "# A card\n"
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("imports", [_LIGHT + _AUTO, _AUTO + "import headscan\n"], ids=["before", "after"])
def test_transformers_loads_it_with_headscan_imported(folder: Path, imports: str) -> None:
    found = load_elsewhere(folder, imports + _NO_FINDER, new=imports.startswith(_LIGHT))
    assert found.stdout == "PrunedLlamaForCausalLM True\n", found.stderr


def errors_elsewhere(folder: Path, imports: str, options: str = "{}") -> dict[str, float | str]:
    code = _LOAD_ALL.format(imports=imports, options=options)
    found = run_python("-c", code, str(folder))
    assert found.returncode == 0, found.stderr[-2000:]
    return json.loads(found.stdout.splitlines()[-1])


#: Families whose weights have other names, or are merged, in checkpoints.
RENAMED = (
    "gpt_neox mixtral qwen2_moe qwen3_moe qwen3_next olmoe phimoe granitemoe granitemoehybrid glm4_moe jamba "
    "nemotron_h afmoe laguna mimo_v2_flash minimax_m2"
).split()


#: Plain, with fused projections, with state-space layers, and half of the renamed ones.
FEW = ("llama", "gemma2-softcap", "falcon-gqa", "phi3", "gpt2", "gpt_oss", "bamba", *RENAMED[::2])


@pytest.mark.parametrize("names", [FEW, pytest.param(tuple(SLICED), marks=pytest.mark.slow)], ids=["few", "every"])
def test_pruned_checkpoints_of_families_load_in_another_process(names: tuple[str, ...], tmp_path: Path) -> None:
    renamed = set(RENAMED) & set(names)
    for name in names:
        removed = choices(name, make_loaded(name))[-1]
        save(tmp_path / name, name, removed, remote_code=name in RENAMED)
    found = errors_elsewhere(tmp_path, "import headscan")
    assert found == dict.fromkeys(sorted(names), 0.0)
    for name in set(names) - renamed:
        shutil.rmtree(tmp_path / name)
    found = errors_elsewhere(tmp_path, "sys.modules['headscan'] = None", "{'trust_remote_code': True}")
    assert found == dict.fromkeys(sorted(renamed), 0.0)


@pytest.mark.parametrize("name", ["gpt_neox", "mixtral", "nemotron_h"])
def test_a_loaded_model_that_is_saved_by_transformers_loads_again(name: str, tmp_path: Path) -> None:
    first = headscan.load(save(tmp_path, name, choices(name, make_loaded(name))[-1]))
    first.model.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(headscan.load(tmp_path / "again")), torch.load(tmp_path / "logits.pt")["logits"])


def test_a_stock_result_keeps_the_names_of_the_original_checkpoint(tmp_path: Path) -> None:
    folder = save(tmp_path, "mixtral", STOCK["mixtral"][0])
    names = set(read_headers(str(folder)))
    assert names == set(read_headers(str(tmp_path / "whole")))
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in names


#: By family: removed heads that leave equal counts, and the class that loads the result.
STOCK = {
    "llama": ([(layer, head) for layer in range(3) for head in (0, 5)], "LlamaForCausalLM"),
    "llama-mha": ([(layer, layer) for layer in range(3)], "MistralForCausalLM"),
    "mistral-sliding": ([(layer, head) for layer in range(3) for head in (0, 1, 2)], "MistralForCausalLM"),
    "qwen2": ([(layer, head) for layer in range(3) for head in (1, 3)], "Qwen2ForCausalLM"),
    "qwen3": ([(layer, head) for layer in range(3) for head in (1, 3)], "Qwen3ForCausalLM"),
    "granite": ([(layer, head) for layer in range(3) for head in (1, 3)], "GraniteForCausalLM"),
    "mixtral": ([(layer, head) for layer in range(3) for head in (1, 3)], "MixtralForCausalLM"),
    "gpt_oss": ([(layer, head) for layer in range(3) for head in (1, 3)], "GptOssForCausalLM"),
    "cohere2": ([(layer, head) for layer in range(3) for head in (1, 3)], "Cohere2ForCausalLM"),
}


#: Loads models in a process that has no headscan; a line for each.
_WITHOUT_HEADSCAN = """
import sys
sys.modules["headscan"] = None
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM
for folder in sorted(Path(sys.argv[1]).iterdir()):
    code = {"trust_remote_code": True} if folder.name == "with-code" else {}
    try:
        model = AutoModelForCausalLM.from_pretrained(folder / "model", **code)
    except ValueError as problem:
        print(folder.name, "fails" if "headscan_pruned" in str(problem) else problem)
        continue
    for weight in model.parameters():
        weight.data = weight.data.clone()
    saved = torch.load(folder / "logits.pt")
    print(folder.name, type(model).__name__, torch.equal(model(input_ids=saved["ids"]).logits, saved["logits"]))
"""


def test_without_headscan_equal_counts_and_copied_code_load_and_nothing_else(tmp_path: Path) -> None:
    for name, (removed, _) in STOCK.items():
        save(tmp_path / name, name, removed)
    save(tmp_path / "without-code", "llama", UNEVEN)
    copied = save(tmp_path / "with-code", "llama", UNEVEN, remote_code=True)
    found = run_python("-c", _WITHOUT_HEADSCAN, str(tmp_path))
    expected = {name: f"{name} {kind} True" for name, (_, kind) in STOCK.items()}
    expected |= {"with-code": "with-code PrunedLlamaForCausalLM True", "without-code": "without-code fails"}
    assert found.stdout.splitlines() == [line for _, line in sorted(expected.items())], found.stderr
    assert type(headscan.load(copied).model.config).__module__ == "headscan.pruning.format.pruned_model"


_BODY = """
import sys
sys.modules["headscan"] = None
import torch
from transformers import AutoModel, AutoModelForCausalLM
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    body = AutoModel.from_pretrained(folder, trust_remote_code=True)
    ids = torch.arange(20)[None] + 5
    print(torch.equal(body(ids).last_hidden_state, model.base_model(ids).last_hidden_state), type(body).__name__)
"""


def test_copied_code_gives_the_decoder_without_its_head(tmp_path: Path) -> None:
    """vLLM's transformers backend builds this model."""
    names = {"llama": "PrunedLlamaModel", "gpt_neox": "PrunedGPTNeoXModel", "qwen3": "PrunedQwen3Model"}
    folders = [str(save(tmp_path / name, name, UNEVEN, remote_code=True)) for name in names]
    found = run_python("-c", _BODY, *folders)
    assert found.stdout.splitlines() == [f"True {name}" for name in names.values()], found.stderr[-2000:]


_SAVE_AGAIN = """
import sys
sys.modules["headscan"] = None
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).save_pretrained(sys.argv[2])
"""


def test_models_with_copied_code_keep_it_when_they_are_saved_again(tmp_path: Path) -> None:
    folder = save(tmp_path / "with-code", "gpt_neox", UNEVEN, remote_code=True)
    for again in ("again", "with-headscan"):
        (tmp_path / "saved" / again).mkdir(parents=True)
        shutil.copy(folder.parent / "logits.pt", tmp_path / "saved" / again)
    run_python("-c", _SAVE_AGAIN, str(folder), str(tmp_path / "saved" / "again" / "model")).check_returncode()
    headscan.load(folder).model.save_pretrained(tmp_path / "saved" / "with-headscan" / "model")
    found = errors_elsewhere(tmp_path / "saved", "sys.modules['headscan'] = None", "{'trust_remote_code': True}")
    assert found == {"again": 0.0, "with-headscan": 0.0}


def test_code_of_the_original_is_not_named(tmp_path: Path) -> None:
    lm = load_saved("llama", tmp_path / "whole")
    lm.model.config.auto_map = {"AutoConfig": "configuration_llama.LlamaConfig"}
    headscan.save_pruned(headscan.slice_heads(lm, UNEVEN), tmp_path / "model")
    assert "auto_map" not in (tmp_path / "model" / "config.json").read_text()
    assert not list((tmp_path / "model").glob("*.py"))


@pytest.mark.parametrize(
    "removed",
    [[(0, 0)], UNEVEN, [(layer, head) for layer in range(3) for head in (0, 1)]],
    ids=["one layer", "several layers", "unequal groups in all layers"],
)
def test_unequal_counts_have_no_stock_architecture(removed: list[tuple[int, int]]) -> None:
    assert stock_config(headscan.slice_heads(make_loaded("llama"), removed).model) is None


def test_biases_that_mistral_lacks_keep_their_own_type() -> None:
    lm = make_loaded("llama-mha")
    lm.model.config.mlp_bias = True
    assert stock_config(headscan.slice_heads(lm, STOCK["llama-mha"][0]).model) is None


def test_a_pruned_model_can_be_loaded_pruned_and_saved_again(folder: Path, tmp_path: Path) -> None:
    again = headscan.slice_heads(headscan.load(folder), [(0, 3), (2, 0)])
    headscan.save_pruned(again, tmp_path / "again")
    want = headscan.slice_heads(make_loaded("llama"), [*UNEVEN, (0, 5), (2, 0)])
    loaded = headscan.load(tmp_path / "again")
    assert torch.equal(logits(loaded), logits(want))
    assert loaded.grid == want.grid


def test_tokenizer_generation_settings_and_ties_are_kept(tmp_path: Path) -> None:
    lm = make_loaded("gpt2")
    assert lm.model.get_output_embeddings().weight is lm.model.get_input_embeddings().weight
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    lm = replace(lm, tokenizer=PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?"))
    lm.model.generation_config.max_new_tokens = 7
    sliced = headscan.slice_heads(lm, [(0, 0)])
    assert sliced.model.get_output_embeddings().weight is lm.model.get_input_embeddings().weight
    headscan.save_pruned(sliced, tmp_path / "model", max_shard_size="50KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    loaded = headscan.load(tmp_path / "model")
    assert loaded.require_tokenizer()("b a c")["input_ids"] == [1, 0, 2]
    assert loaded.model.generation_config.max_new_tokens == 7
    assert loaded.model.get_output_embeddings().weight is loaded.model.get_input_embeddings().weight
    assert torch.equal(logits(loaded), logits(sliced))


def test_an_original_model_is_saved_as_it_is(tmp_path: Path) -> None:
    headscan.save_pruned(make_loaded("llama"), tmp_path / "empty" / "model", remote_code=True)
    assert type(headscan.load(tmp_path / "empty" / "model").model).__name__ == "LlamaForCausalLM"
    assert not list((tmp_path / "empty" / "model").glob("*.py"))


def test_half_precision_stays(tmp_path: Path) -> None:
    make_loaded("llama", dtype=torch.bfloat16).model.save_pretrained(tmp_path / "whole")
    sliced = headscan.slice_heads(headscan.load(tmp_path / "whole"), UNEVEN)
    headscan.save_pruned(sliced, tmp_path / "model")
    loaded = headscan.load(tmp_path / "model")
    assert loaded.dtype == "bfloat16"
    assert torch.equal(logits(loaded), logits(sliced))


@pytest.mark.parametrize(
    ("name", "target"), [("llama", ["o_proj"]), ("llama", "all-linear"), ("gpt2", ["c_attn", "c_proj"])]
)
def test_adapters_fit_a_model_with_a_layer_without_heads(name: str, target: list[str] | str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    folder = save(tmp_path, name, [*UNEVEN, *heads_of_layer(make_loaded(name), 2)])
    lora = peft.LoraConfig(r=2, target_modules=target, task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = peft.get_peft_model(headscan.load(folder).model, lora)
    with torch.enable_grad():
        adapted(input_ids=prompts(), labels=prompts()).loss.backward()
    adapted.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(headscan.load(folder).model, tmp_path / "adapter").eval()
    want = again(input_ids=prompts()).logits
    assert (want - headscan.load(folder).model(input_ids=prompts()).logits).abs().max() > 1e-3
    again.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = headscan.load(tmp_path / "merged").model(input_ids=prompts()).logits
    torch.testing.assert_close(merged, want, rtol=1e-4, atol=1e-4)


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    sliced = headscan.slice_heads(make_loaded("llama"), UNEVEN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # no file can grow further, as on a full disk
    try:
        with pytest.raises(PruningError, match="cannot be written") as caught:
            headscan.save_pruned(sliced, tmp_path / "model", card="x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_generation_settings_that_transformers_refuses_are_an_error(tmp_path: Path) -> None:
    lm = make_loaded("llama")
    lm.model.generation_config.top_k = 7  # without sampling
    with pytest.raises(PruningError, match="top_k") as caught:
        headscan.save_pruned(lm, tmp_path / "model")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_empty_is_refused(folder: Path) -> None:
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(PruningError, match="not empty"):
        headscan.save_pruned(make_loaded("llama"), folder)
    assert sorted(path.name for path in folder.iterdir()) == before
