"""Forms of saved models, held against exported files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf import GGUFReader
from safetensors import safe_open

import headscan
from headscan.export.decilm_folder import write_decilm
from headscan.export.gguf_file import write_gguf
from headscan.models.loaded_model import LoadedModel
from headscan.steps.prune.form_sizes import FormSize, form_sizes
from headscan.steps.prune.model_costs import compare_costs
from tests.jobs.export.test_gguf_export import REMOVED, small


def saved(whole: LoadedModel, removed: list[tuple[int, int]], folder: Path) -> tuple[LoadedModel, dict[str, FormSize]]:
    """Return a model that was saved without some heads, and its forms by name."""
    smaller = headscan.slice_heads(whole, removed)
    headscan.save_pruned(smaller, folder)
    cost = compare_costs(whole, smaller, removed, None).after
    return smaller, {each.form: each for each in form_sizes(folder, cost)}


def stored(folder: Path) -> tuple[int, int]:
    """Return the numbers and bytes of the tensors in a folder."""
    numbers = nbytes = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            for tensor in map(weights.get_tensor, weights.keys()):
                numbers += tensor.numel()
                nbytes += tensor.numel() * tensor.element_size()
    return numbers, nbytes


@pytest.mark.parametrize(
    ("name", "case"),
    [
        *(("llama", case) for case in REMOVED),
        ("llama-mha", "equal"),
        ("llama-mha", "no attention"),
        ("qwen2", "none"),
        ("qwen2", "uneven"),
    ],
)
def test_sizes_are_those_of_the_exported_files(name: str, case: str, tmp_path: Path) -> None:
    lm, forms = saved(small(name), REMOVED[case], tmp_path / "smaller")
    own, decilm, gguf = (forms[form] for form in ("headscan", "DeciLM", "GGUF"))
    assert (own.parameters, own.bytes) == stored(tmp_path / "smaller")
    kv_heads = sum(site.num_key_value_heads for site in lm.grid.sites)
    assert (own.kv_heads, own.kv_bytes) == (kv_heads, 2 * 2 * 8 * kv_heads)

    folder = write_decilm(lm, tmp_path / "served").folder
    assert (decilm.parameters, decilm.bytes) == stored(folder)
    config = json.loads((folder / "config.json").read_text())
    groups = [each["attention"]["n_heads_in_group"] for each in config["block_configs"]]
    counts = [config["num_attention_heads"] // group if group else 0 for group in groups]
    assert (decilm.kv_heads, decilm.kv_bytes) == (sum(counts), 2 * 2 * 8 * sum(counts))
    assert decilm.query_heads == config["num_attention_heads"] * sum(count > 0 for count in counts)

    file = GGUFReader(write_gguf(lm, tmp_path / "model.gguf").file)
    assert gguf.parameters == sum(int(each.n_elements) for each in file.tensors)
    assert gguf.bytes == sum(int(each.n_bytes) for each in file.tensors)
    assert gguf.architecture == file.get_field("general.architecture").contents()
    names = ("head_count", "head_count_kv")
    rows = [file.get_field(f"{gguf.architecture}.attention.{name}").contents() for name in names]
    queries, keys = ([row] * 3 if isinstance(row, int) else row for row in rows)
    assert (gguf.query_heads, gguf.kv_heads, gguf.kv_bytes) == (sum(queries), sum(keys), 2 * 2 * 8 * sum(keys))


def test_models_without_a_place_have_dashes(tmp_path: Path) -> None:
    _, forms = saved(small("qwen3"), [(1, 0)], tmp_path / "smaller")
    own = forms.pop("headscan")
    assert own.parameters and own.kv_heads == 6
    assert {*forms} >= {"DeciLM", "GGUF"}
    for name, form in forms.items():
        assert form == FormSize(name)
        assert set(list(form.row().values())[1:]) == {"-"}
