"""The example that reads an exported plan with kvpress, in an environment with kvpress and its own transformers."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import torch

import headscan
from headscan.demo import MODEL_FOLDER
from headscan.model_spec import ModelSpec
from headscan.plans import write_pattern
from headscan.windows import KeptKeys, Window
from tests.jobs.steps.kv_plans import model_of, plan_for
from tests.sources import ROOT

#: kvpress excludes this environment's transformers, which in turn excludes older versions of what it imports. Packages
#: are chosen by hand, since a resolver would bring another torch.
_ALONE = (
    *("kvpress==0.5.5", "cachetools==5.5.2", "fire==0.6.0", "termcolor==3.3.0", "transformers==5.2.0"),
    *("tokenizers==0.22.2", "huggingface_hub==1.3.0", "datasets==4.5.0", "shellingham==1.5.4", "typer-slim==0.21.1"),
)
_WITH_DEPENDENCIES = ("httpx==0.28.1",)

#: Reads a prompt with the press of the example, then one token without its hooks, as kvpress's own pipeline does.
_JOB = """
import sys, torch, kvpress
from transformers import AutoModelForCausalLM
sys.path.insert(0, sys.argv[1])
from read_with_kvpress import exported_press
model = AutoModelForCausalLM.from_pretrained(sys.argv[2], attn_implementation="sdpa", dtype=torch.float32).eval()
ids = torch.load(sys.argv[4])
with torch.no_grad(), exported_press(sys.argv[3])(model):
    first = model(input_ids=ids[:, :-1], use_cache=True)
with torch.no_grad():
    second = model(input_ids=ids[:, -1:], past_key_values=first.past_key_values)
logits = torch.stack([first.logits[:, -1], second.logits[:, -1]])
torch.save({"kvpress": kvpress.__file__, "logits": logits}, sys.argv[5])
"""


@pytest.fixture(scope="module")
def kvpress_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with kvpress over this environment's packages."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    packages.joinpath("below.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    for what in (("--no-deps", *_ALONE), _WITH_DEPENDENCIES):
        command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--retries", "1"]
        done = subprocess.run([*map(str, command), "--ignore-installed", *what], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"pip cannot install {what}: {done.stderr.strip().splitlines()[-1]}")
    return python


@pytest.mark.slow
def test_kvpress_masks_the_windows_of_an_exported_plan(kvpress_python: Path, tmp_path: Path) -> None:
    lm = headscan.load(MODEL_FOLDER, device="cpu", dtype="float32")
    plan = plan_for(model_of(ModelSpec(str(MODEL_FOLDER), "float32"), lm), 12, recent=12)
    write_pattern(plan, tmp_path / "pattern")
    ids = torch.randint(3, 90, (2, 60), generator=torch.Generator().manual_seed(0))
    torch.save(ids, tmp_path / "ids.pt")
    out = tmp_path / "out.pt"
    paths = [ROOT / "pipelines", MODEL_FOLDER, tmp_path / "pattern", tmp_path / "ids.pt", out]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(kvpress_python), "-c", _JOB, *map(str, paths)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = torch.load(out)
    assert Path(found["kvpress"]).is_relative_to(kvpress_python.parents[1])
    # kvpress counts the last tokens of the context; the next token's own key comes in addition.
    windows = [(layer, head, Window(kept.sink, kept.recent + 1)) for layer, head, kept in plan.kept.windows]
    wider = KeptKeys.of(windows, plan.kept.kv_heads)
    cache = headscan.PlanCache(wider, prefill="full")
    with torch.no_grad():
        expected = [lm.model(part, past_key_values=cache).logits[:, -1] for part in (ids[:, :-1], ids[:, -1:])]
        full = lm.model(ids).logits[:, -1]
    torch.testing.assert_close(found["logits"], torch.stack(expected), atol=1e-4, rtol=0)
    assert (found["logits"][1] - full).abs().max() > 0.1
