"""Windows of whole layers in the configuration of a model: read by transformers, and by a plain float64 computation."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM, MinistralForCausalLM

import headscan
from headscan.cli.main import main
from headscan.errors import ExportError
from headscan.export.decilm_folder import write_decilm
from headscan.export.layer_types_folder import write_layer_types
from headscan.export.servable_model import command_lines, serving_commands
from headscan.kv.kv_windows import KvWindows
from headscan.models.loaded_model import LoadedModel
from headscan.plans import HeadPlan, PlanError, load_plan
from tests.jobs.export import test_vllm_overrides as by_head
from tests.jobs.export.test_decilm_folder import DecilmModel, ids
from tests.small_models import make_loaded

WINDOW = 5
PLAN = "--method measured --unit layer --recent 16 --max-tokens 64 --sequences 2 --recall-prompts 0 --device cpu"


def plan_of(lm: LoadedModel, layers: Collection[int], *, sink: int = 0) -> HeadPlan:
    """Return a plan with windows on whole layers of a model."""
    heads = {
        (site.layer, head) for site in lm.grid.sites if site.layer in layers for head in range(site.num_key_value_heads)
    }
    return by_head.plan_of(lm, heads, sink=sink, recent=WINDOW, granularity="layer")


@torch.no_grad()
def masked(lm: LoadedModel, plan: HeadPlan, tokens: Tensor) -> Tensor:
    """Return the logits (N, V) under the masks of a plan's arm."""
    with headscan.intervene(lm, KvWindows(plan.kept)):
        found: Tensor = lm.model(tokens, use_cache=False).logits[0]
    return found


@pytest.mark.parametrize(
    ("name", "layers"), [("llama", (0,)), ("llama", (1, 2)), ("llama-mha", (0, 1, 2)), ("mistral", (1, 2))]
)
def test_ministral_computes_the_masks_of_the_plan(name: str, layers: tuple[int, ...], tmp_path: Path) -> None:
    lm = make_loaded(name)
    plan, tokens = plan_of(lm, layers), ids(lm)
    written = write_layer_types(lm, plan, tmp_path / "served", architecture="ministral")
    model = AutoModelForCausalLM.from_pretrained(written.folder, attn_implementation="eager")
    assert type(model) is MinistralForCausalLM and written.windows["sliding_window"] == WINDOW
    with torch.no_grad():
        found, whole = model(tokens).logits[0], lm.model(tokens).logits[0]
    expected = masked(lm, plan, tokens)
    assert (found - expected).abs().max() < 1e-5
    assert (found[:WINDOW] - whole[:WINDOW]).abs().max() < 1e-5
    assert (whole - expected).abs().max() > 1e-2
    assert (whole - expected)[WINDOW].abs().max() > 1e-4, "token WINDOW is the first that loses a key"
    again = headscan.load(written.folder, device="cpu")
    assert [site.sliding_window for site in again.grid.sites] == [WINDOW if at in layers else None for at in range(3)]


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2"])
def test_a_llama_folder_has_the_weights_and_the_fields_that_vllm_reads(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lm = make_loaded(name)
    plan, tokens = plan_of(lm, (0, 2)), ids(lm)
    write_layer_types(lm, plan, tmp_path / "served")
    config = json.loads((tmp_path / "served/config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]
    assert config["sliding_window"] == WINDOW
    with caplog.at_level("WARNING", "headscan"):
        headscan.load(tmp_path / "served", device="cpu")
    assert "transformers ignores layer_types of a Llama" in caplog.text
    model = LlamaForCausalLM.from_pretrained(tmp_path / "served")
    with torch.no_grad():
        assert (model(tokens).logits - lm.model(tokens).logits).abs().max() < 1e-5, "transformers ignores the windows"
    if name != "qwen2":  # its biases are not those of the reader below
        reader = DecilmModel(write_decilm(lm, tmp_path / "decilm", plan=plan).folder)
        assert (reader.logits(tokens) - masked(lm, plan, tokens)).abs().max() < 1e-5


@pytest.mark.parametrize(
    "removed", [[(1, 0), (1, 1), (1, 2)], [(0, 0), (2, 1), (2, 2), (2, 5)], [(1, head) for head in range(6)]]
)
def test_pruned_and_windowed_in_one_folder(removed: list[tuple[int, int]], tmp_path: Path) -> None:
    lm = headscan.slice_heads(make_loaded("llama"), removed)
    plan, tokens = plan_of(lm, (0, 2)), ids(lm)
    written = write_decilm(lm, tmp_path / "served", plan=plan)
    reader = DecilmModel(written.folder)
    assert reader.config["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]
    found, expected = reader.logits(tokens), masked(lm, plan, tokens)
    assert (found - expected).abs().max() < 1e-5
    with torch.no_grad():
        assert (lm.model(tokens).logits[0] - expected).abs().max() > 1e-2


def test_models_and_plans_without_a_place_are_refused(tmp_path: Path) -> None:
    lm, out = make_loaded("llama"), tmp_path / "served"
    pruned = headscan.slice_heads(make_loaded("llama"), [(1, 0), (1, 1), (1, 2)])
    other = make_loaded("llama-mha")
    for action, error, words in (
        (lambda: write_layer_types(pruned, plan_of(pruned, (0,)), out), ExportError, "layer 1 of .* Write a DeciLM"),
        (lambda: write_layer_types(lm, plan_of(other, (0,)), out), PlanError, "another head grid"),
        (lambda: write_decilm(lm, out, plan=plan_of(pruned, (0,))), PlanError, "another head grid"),
        (lambda: write_layer_types(lm, plan_of(lm, (0,), sink=4), out), PlanError, "windows keep 4 first tokens"),
        (lambda: write_decilm(lm, out, plan=plan_of(lm, ())), PlanError, "has no windows"),
    ):
        with pytest.raises(error, match=words) as caught:
            action()
        assert "\n" not in str(caught.value) and not out.exists()
    biased = make_loaded("qwen2")
    with pytest.raises(ExportError, match="biases, which Ministral lacks"):
        write_layer_types(biased, plan_of(biased, (0,)), out, architecture="ministral")


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plans by layer of the demo model, without and with sinks, made by the command."""
    folder = tmp_path_factory.mktemp("plans")
    for sink in (0, 4):
        out = str(folder / f"sink{sink}.json")
        words = ["--no-search", "--sink", str(sink), "--out", out, "--store", str(folder / "s.duckdb")]
        assert main(["plan", "demo", *PLAN.split(), *words]) == 0
    return folder


def test_the_commands_write_folders_and_the_configuration_of_tensorrt(
    plans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    without, with_sinks = (plans / f"sink{sink}.json" for sink in (0, 4))
    plan = load_plan(without)
    layers = sorted({layer for layer, _ in plan.window_heads})
    assert plan.granularity == "layer" and len(layers) == 3 and len(plan.window_heads) == 12
    (tmp_path := tmp_path / "two words").mkdir()
    out = tmp_path / "served"
    assert main(["export", "layer-types", "demo", "--plan", str(without), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert (
        f"a window of 16 tokens in 3 of 6 layers: {', '.join(map(str, layers))}" in said
        and f"`vllm serve '{out}'`" in said
    )
    words = ["--architecture", "ministral", "--plan", str(without)]
    assert main(["export", "layer-types", "demo", *words, "--out", str(tmp_path / "ministral")]) == 0
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "ministral")) is MinistralForCausalLM
    assert main(["export", "decilm", "demo", "--plan", str(without), "--out", str(tmp_path / "decilm")]) == 0
    assert f"`vllm serve '{tmp_path / 'decilm'}' --trust-remote-code`" in capsys.readouterr().out
    configs = [json.loads((tmp_path / f"{name}/config.json").read_text()) for name in ("served", "ministral", "decilm")]
    fields = tmp_path / "fields.json"
    assert main(["export", "layer-types", "--plan", str(without), "--out", str(fields)]) == 0
    assert f"--hf-overrides \"$(cat '{fields}')\"`" in capsys.readouterr().out
    configs.append(json.loads(fields.read_text()))
    assert configs[-1].keys() == {"layer_types", "sliding_window"}
    assert len({json.dumps([config["layer_types"], config["sliding_window"]]) for config in configs}) == 1
    capsys.readouterr()
    yaml = tmp_path / "kv.yaml"
    assert main(["export", "tensorrt-llm", "--plan", str(with_sinks), "--out", str(yaml)]) == 0
    said, arguments = capsys.readouterr().out, json.loads(yaml.read_text())["kv_cache_config"]
    windowed = {layer for layer, _ in load_plan(with_sinks).window_heads}
    assert arguments["max_attention_window"] == [20 if layer in windowed else 512 for layer in range(6)]
    assert arguments["sink_token_length"] == 4 and "sink_token_length=4)" in said and "C++ backend" in said
    assert f"--extra_llm_api_options '{yaml}'`" in said


def test_commands_for_a_folder_with_spaces_are_shell_words() -> None:
    commands = serving_commands("my models/small/", serves_itself=True)
    assert [shlex.split(command) for of_engine in commands.values() for command in of_engine] == [
        ["headscan", "export", "gguf", "my models/small", "--out", "my models/small.gguf"],
        ["llama-server", "-m", "my models/small.gguf"],
        ["headscan", "export", "decilm", "my models/small", "--out", "my models/small-served"],
        ["vllm", "serve", "my models/small-served", "--trust-remote-code"],
        ["vllm", "serve", "my models/small", "--trust-remote-code", "--model-impl", "transformers"],
    ]
    assert command_lines(commands)[:2] == ["# llama.cpp", commands["llama.cpp"][0]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("layer-types demo --plan SINKS --out x", "windows keep 4 first tokens"),
        ("decilm demo --plan SINKS --out x", "windows keep 4 first tokens"),
        ("layer-types --plan SINKS --out x", "windows keep 4 first tokens"),
        ("layer-types --plan SINKS --architecture ministral --out x", "--architecture has no effect without MODEL"),
        ("decilm --plan SINKS --out x", "MODEL goes with a format of models"),
        ("tensorrt-llm demo --plan SINKS --out x", "MODEL has no effect on tensorrt-llm"),
        ("gguf demo --plan SINKS --out x", "--plan has no effect on gguf"),
        ("decilm demo --architecture ministral --out x", "--architecture has no effect on decilm"),
        ("layer-types demo --out x", "cannot read head_plan.json"),
    ],
)
def test_commands_that_are_refused(
    words: str,
    message: str,
    plans: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export", *words.replace("SINKS", str(plans / "sink4.json")).split()]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert message in said[-1] and not Path("x").exists()


def test_a_plan_of_other_weights_is_refused(plans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = load_plan(plans / "sink0.json")
    replace(plan, model=replace(plan.model, weights_hash="beef")).save(tmp_path / "other.json")
    words = ["demo", "--plan", str(tmp_path / "other.json"), "--out", str(tmp_path / "x")]
    assert main(["export", "layer-types", *words]) == 2
    assert "another weights hash" in capsys.readouterr().err
