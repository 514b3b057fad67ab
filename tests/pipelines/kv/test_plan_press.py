"""The kvpress press of a plan against PlanCache, in environments with kvpress installed."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest
import torch

import headscan
from headscan.errors import PlanMismatchError
from headscan.pipelines.kv.plan_press import KvpressError, plan_press
from headscan.testing.families import make_model
from tests.pipelines.kv.press_job import Heads, generate, load, plan_of
from tests.sources import ROOT

#: What kvpress imports and this environment lacks. Nothing is resolved, since kvpress would replace transformers.
_ALONE = ("cachetools==5.5.2", "fire==0.6.0", "termcolor==3.3.0")

#: Versions of kvpress; 0.5.5 excludes this environment's transformers, but runs with it.
_VERSIONS = ["0.5.5", "0.5.2"]


def windows(layers: int, kv_heads: int) -> Heads:
    """Windows of several widths, a layer with full heads between them, and a layer without full heads."""
    return [
        (layer, k, *((None, None) if layer and (layer + k) % 3 == 0 else (k, 5 + 2 * layer + k)))
        for layer in range(layers)
        for k in range(kv_heads)
    ]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Models, plans and prompts; one batch has padding in its second row."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    make_model("llama").save_pretrained(folder)
    ids = torch.randint(3, 90, (2, 30), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    padded = mask.clone()
    padded[1, :9] = 0
    demo = str(ROOT / "pipelines" / "demo" / "demo-5m")
    return {
        "llama": {"folder": str(folder), "heads": windows(3, 2), "ids": ids, "mask": mask},
        "llama with padding": {"folder": str(folder), "heads": windows(3, 2), "ids": ids, "mask": padded},
        "demo": {"folder": demo, "heads": windows(6, 4), "ids": ids, "mask": mask},
    }


@pytest.fixture(scope="module", params=_VERSIONS)
def pressed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, jobs: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Results of `press_job` in an environment with kvpress over this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    packages.joinpath("below.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    _install(python, "--no-deps", f"kvpress=={request.param}", *_ALONE)
    torch.save(jobs, folder / "jobs.pt")
    command = [python, "-m", "tests.pipelines.kv.press_job", folder / "jobs.pt", folder / "results.pt"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = torch.load(folder / "results.pt")
    assert Path(results["kvpress"]).is_relative_to(folder)
    return results


def _install(python: Path, *what: str) -> None:
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--retries", "1", *what]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip cannot install {what}: {done.stderr.strip().splitlines()[-1]}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "llama with padding", "demo"])
def test_press_and_cache_agree(pressed: dict[str, Any], jobs: dict[str, dict[str, Any]], name: str) -> None:
    job = jobs[name]
    model = load(job["folder"])
    cache = headscan.PlanCache(plan_of(job["heads"]), prefill="full")
    tokens, logits = generate(model, job["ids"], job["mask"], past_key_values=cache)
    of_press, logits_of_press = pressed[name]
    assert torch.equal(of_press, tokens)
    torch.testing.assert_close(logits_of_press, logits, atol=1e-4, rtol=0)
    # The prompt is longer than the windows, so the second token shows that keys were masked.
    _, full = generate(model, job["ids"], job["mask"])
    torch.testing.assert_close(full[0], logits[0], atol=1e-4, rtol=0)
    assert (full[1] - logits[1]).abs().max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "demo"])
def test_the_mask_of_the_context_outlives_the_hooks(
    pressed: dict[str, Any], jobs: dict[str, dict[str, Any]], name: str
) -> None:
    job = jobs[name]
    model, ids = load(job["folder"]), job["ids"]
    cache = headscan.PlanCache(plan_of(job["heads"]), prefill="full")
    with torch.no_grad():
        model(input_ids=ids[:, :-1], past_key_values=cache)
        logits = model(input_ids=ids[:, -1:], past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(pressed[f"{name} in the context only"], logits, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_passes_that_the_press_cannot_express_are_refused(pressed: dict[str, Any]) -> None:
    refused = pressed["llama refused"]
    assert refused["chunks"].startswith(
        "PlanMismatchError: a pass of 14 tokens that continues a cache reaches token 30"
    )
    assert refused["heads"].startswith("PlanMismatchError: layer 2 caches 2 heads (limit 1")
    assert refused["layers"].startswith("PlanMismatchError: layer 99 of the plan does not exist (limit 2)")
    assert refused["static"].startswith("PlanMismatchError: layer 0 has windows in the plan, but a StaticLayer")
    assert refused["eager"].startswith("UnsupportedModelError: kvpress does not mask keys in attention implementation")


def test_a_dropped_head_is_refused() -> None:
    plan = plan_of([(0, 0, 4, 8), (0, 1, None, None)])
    plan.heads[1].action = "drop"
    with pytest.raises(PlanMismatchError, match=r"drops KV head 1 of layer 0.* Use headscan\.PlanCache"):
        plan_press(plan)


def test_missing_kvpress_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvpress", None)
    monkeypatch.delitem(sys.modules, "headscan.pipelines.kv.masked_keys_press", raising=False)
    with pytest.raises(KvpressError, match=r"^kvpress cannot be imported \(.*\)\. Run pip install") as caught:
        plan_press(plan_of([(0, 0, 4, 8)]))
    assert "\n" not in str(caught.value)
