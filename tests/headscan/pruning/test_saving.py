"""Pruned models on disk: what loads them, and what refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import headscan
from headscan.errors import PruningError
from tests.headscan.pruning.test_slicing import prompts
from tests.small_models import make_loaded
from tests.sources import ROOT

UNEVEN = [(0, 0), (0, 1), (1, 3), (1, 4), (1, 5)]

_LOAD = """
import sys
{imports}
import torch
saved = torch.load({logits!r})
model = AutoModelForCausalLM.from_pretrained({folder!r}{options})
print(type(model).__name__, torch.equal(model(input_ids=saved["ids"]).logits, saved["logits"]))
"""
_HIDDEN = "sys.modules['headscan'] = None\n"
_AUTO = "from transformers import AutoModelForCausalLM\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A pruned model with uneven groups, with its logits beside it."""
    return save(tmp_path, "llama", UNEVEN)


def save(tmp_path: Path, name: str, removed: list[tuple[int, int]], **options: bool) -> Path:
    sliced = headscan.slice_heads(make_loaded(name), removed)
    headscan.save_pruned(sliced, tmp_path / "model", card="# A card\n", **options)
    with torch.no_grad():
        logits = sliced.model(input_ids=prompts()).logits
    torch.save({"ids": prompts(), "logits": logits}, tmp_path / "logits.pt")
    return tmp_path / "model"


def load_elsewhere(folder: Path, imports: str, options: str = "") -> subprocess.CompletedProcess[str]:
    logits = str(folder.parent / "logits.pt")
    code = _LOAD.format(imports=imports, logits=logits, folder=str(folder), options=options)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, input="")


def test_headscan_loads_the_same_numbers(folder: Path) -> None:
    loaded = headscan.load(folder)
    want = torch.load(folder.parent / "logits.pt")["logits"]
    assert torch.equal(loaded.model(input_ids=prompts()).logits, want)
    assert loaded.grid.sites[0].kv_index == (0, 1, 1, 1)
    assert loaded.grid == headscan.slice_heads(make_loaded("llama"), UNEVEN).grid
    assert (folder / "README.md").read_text() == "# A card\n"
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("imports", ["import headscan\n" + _AUTO, _AUTO + "import headscan\n"])
def test_transformers_loads_it_after_import_headscan(folder: Path, imports: str) -> None:
    assert load_elsewhere(folder, imports).stdout == "PrunedLlamaForCausalLM True\n"


def test_transformers_alone_fails_loudly(folder: Path) -> None:
    found = load_elsewhere(folder, _HIDDEN + _AUTO)
    assert found.returncode != 0
    assert "headscan_pruned" in found.stderr


def test_the_copied_code_loads_it_without_headscan(tmp_path: Path) -> None:
    folder = save(tmp_path, "llama", UNEVEN, remote_code=True)
    found = load_elsewhere(folder, _HIDDEN + _AUTO, ", trust_remote_code=True")
    assert found.stdout == "PrunedLlamaForCausalLM True\n", found.stderr
    assert type(headscan.load(folder).model.config).__module__ == "headscan.pruning.pruned_model"


def test_a_folder_that_is_not_empty_is_refused(folder: Path) -> None:
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(PruningError, match="not empty"):
        headscan.save_pruned(make_loaded("llama"), folder)
    assert sorted(path.name for path in folder.iterdir()) == before
