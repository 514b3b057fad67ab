"""``headscan place``: plans of real shapes for imagined machines, from a configuration alone."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from headscan.cli.main import main
from headscan.store.store import Store
from headscan.study.job_costs import GPU_FLOPS
from headscan.study.study_time import PassCosts

# As published beside the weights: the numbers that shapes follow from.
LLAMA_405B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
QWEN3_235B = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
CLUSTER = ["--nodes", "8", "--gpus", "8", "--gpu-memory", "80GB"]


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert main(["place", *map(str, arguments)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "billions", "gibibytes", "placement"),
    [
        (LLAMA_405B, 405.85, 756, r"pipeline, \d replicas of 1[12] stages on cuda"),
        (DEEPSEEK_V3, 671.03, 627, r"pipeline, \d replicas of (9|10) stages on cuda"),  # 8-bit weights
        (QWEN3_235B, 235.09, 438, r"sharded, 8 replicas over 7 GPUs each"),
    ],
)
def test_large_shapes_on_eight_times_eight_gpus(
    config: dict[str, Any],
    billions: float,
    gibibytes: float,
    placement: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    started = time.perf_counter()
    out = shown(capsys, tmp_path, *CLUSTER)
    assert time.perf_counter() - started < 300  # seconds, where weights would take hours
    model = re.search(r"model: ([\d,.]+) million parameters, ([\d.]+) GiB; (\d+) layers", out)
    assert model is not None
    assert float(model[1].replace(",", "")) / 1000 == pytest.approx(billions, rel=0.001)
    assert float(model[2]) == pytest.approx(gibibytes, rel=0.01)
    assert int(model[3]) == config["num_hidden_layers"]
    assert "machines: 8 nodes with 8 GPUs of 70.8 GiB" in out
    assert re.search(placement, out), out
    assert "whole: " in out.partition("Rejected:")[2]
    # Every layer once, in order, and no device fuller than it is large.
    ranges = [tuple(map(int, found)) for found in re.findall(r"^(?:GPU|stage) \d+ +(\d+)-(\d+) ", out, re.MULTILINE)]
    assert [layer for first, last in ranges for layer in range(first, last + 1)] == list(range(int(model[3])))
    filled = re.findall(r"([\d.]+) GiB +([\d.]+) GiB$", out, re.MULTILINE)
    assert len(filled) == len(ranges)
    assert all(float(together) <= float(usable) for together, usable in filled)
    assert shown(capsys, path, *CLUSTER) == out.replace(str(tmp_path), str(path))


def test_a_plan_of_this_machine(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, model_folder, "--device", "cpu", "--max-tokens", 64)
    assert "placement: whole, 1 replica on cpu" in out
    assert "sequences of up to 64" in out
    assert "machines: this machine with no GPU" in out
    assert "Rejected" not in out
    half = shown(capsys, model_folder, "--device", "cpu", "--dtype", "bfloat16")
    sizes = [float(re.findall(r"parameters, ([\d.]+) KiB", text)[0]) for text in (out, half)]
    assert sizes[0] == pytest.approx(2 * sizes[1], abs=0.1)


def test_every_choice_can_be_made_by_hand(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on = ["--nodes", 2, "--gpus", 4, "--gpu-memory", "1GiB"]
    assert "whole, 3 replicas on cuda" in shown(capsys, model_folder, *on, "--replicas", 3)
    assert "sharded, 4 replicas over 2 GPUs each" in shown(capsys, model_folder, *on, "--gpus-per-replica", 2)
    assert "pipeline, 2 replicas of 3 stages on cuda, layers 0-0 1-1 2-2" in shown(
        capsys, model_folder, *on, "--placement", "pipeline", "--stages", 3, "--replicas", 2
    )
    assert "streamed, on cpu within 0.02 GiB" in shown(
        capsys, model_folder, *on, "--device", "cpu", "--memory", "20MiB", "--max-tokens", 64, "--batch-tokens", 64
    )
    small = ["--nodes", 1, "--gpus", 1, "--max-tokens", 16, "--offload", "disk"]
    offloaded = shown(capsys, model_folder, *small, "--gpu-memory", "400KB")
    assert "the other layers on disk" in offloaded
    assert re.search(r"^disk +2-2", offloaded, re.MULTILINE), offloaded
    assert "disk" not in shown(capsys, model_folder, *small, "--gpu-memory", "1MB")
    assert "KV cache" in shown(capsys, model_folder, *on, "--job", "evaluate")


def test_hours_follow_from_operations(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on = ["--nodes", 1, "--gpus", 3, "--gpu-memory", "1GiB", "--max-tokens", 8, "--tokens", 10**9, "--flops", "2T"]
    found = json.loads(shown(capsys, model_folder, *on, "--json"))
    time, model = found["time"], AutoModelForCausalLM.from_pretrained(model_folder)
    config = model.config
    # By hand: 2 operations per weight of the blocks; attention over 4.5 of 8 keys on average.
    weights = sum(p.numel() for p in model.base_model.parameters()) - model.get_input_embeddings().weight.numel()
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 2 * config.num_hidden_layers * config.num_attention_heads * 2 * dim * 4.5
    seconds = PassCosts.scan * 10**9 * (2 * weights + attention) / (3 * 2e12)
    assert (found["replicas"], time["at_once"]) == (3, 1)
    assert time["hours"] == pytest.approx(seconds / 3600)
    assert f"= {seconds / 3600:.3g}" in shown(capsys, model_folder, *on)
    staged = [*on, "--placement", "pipeline", "--stages", 3, "--replicas", 1, "--json"]
    assert json.loads(shown(capsys, model_folder, *staged))["time"]["hours"] == pytest.approx(seconds / 3600)
    assert [row["name"] for row in found["rows"]] == ["GPU"] and found["rejected"] == []
    # The speed of a pass is that of the same text on one device.
    logits = config.vocab_size * config.hidden_size
    of_pass = 2e12 / (2 * (weights + logits) + attention)
    speeds = (["--flops", "2T"], ["--pass-speed", of_pass])
    asked = ["--nodes", 1, "--gpus", 1, "--max-tokens", 8, "--tokens", 10**6, "--job", "importance", "--json"]
    flops, given = (json.loads(shown(capsys, model_folder, *asked, *speed))["time"]["hours"] for speed in speeds)
    assert flops == pytest.approx(given) == pytest.approx(PassCosts.importance * 10**6 / of_pass / 3600)


LLAMA_8B = {
    **LLAMA_405B,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}


def test_jobs_on_an_8b_at_32k(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    on = ["--nodes", 1, "--gpus", 1, "--gpu-memory", "141GB", "--max-tokens", 32768, "--flops", "H200", "--json"]
    plan, prune, study = (json.loads(shown(capsys, tmp_path, "--job", job, *on)) for job in ("plan", "prune", "study"))
    for found in (plan, prune, study):
        assert found["sequence_tokens"] == found["time"]["sequence"] == 32768
        assert found["time"]["flops"] == GPU_FLOPS["H200"]
    # One forward pass: the quadratic part is a third of the operations.
    assert plan["time"]["attention"] == pytest.approx(2 * 32 * 32 * 256 * 16384.5)
    # 16 of 32 texts and prompts rank the heads.
    assert plan["time"]["steps"]["damage"] == PassCosts.derivatives * 16 * 32768
    assert 0.2 < plan["time"]["hours"] < 0.4 and 1 < study["time"]["hours"] <= 2
    # Inputs of 32 blocks alone are 8 GiB; removing heads keeps moments and repaired weights, too.
    assert 30 < plan["peak_bytes"] / 2**30 < 40
    assert prune["peak_bytes"] > plan["peak_bytes"] + 12 * 2**30
    halved = json.loads(shown(capsys, tmp_path, "--job", "plan", *on, "--sequences", 8))["time"]
    assert halved["steps"]["damage"] == PassCosts.derivatives * 12 * 32768


def test_a_job_never_takes_another_length(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limit = AutoModelForCausalLM.from_pretrained(model_folder).config.max_position_embeddings
    assert main(["place", str(model_folder), "--max-tokens", str(limit + 1)]) == 2
    assert f"--max-tokens: {limit + 1} (limit {limit} positions of" in capsys.readouterr().err
    longest = json.loads(shown(capsys, model_folder, "--device", "cpu", "--json"))["sequence_tokens"]
    assert longest == min(limit, 2048)
    of_plan = json.loads(shown(capsys, model_folder, "--device", "cpu", "--job", "plan", "--json"))["sequence_tokens"]
    assert of_plan == min(limit, 1024)


def test_a_pass_is_timed_here(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, model_folder, "--device", "cpu", "--job", "plan", "--max-tokens", 32, "--time-pass")
    assert re.search(r"at [\d,.]+ [GMT]FLOP/s, [\d,]+ tokens per second and device", out), out
    without = shown(capsys, model_folder, "--device", "cpu", "--job", "plan", "--max-tokens", 32)
    assert "hours: give a speed" in without


def test_a_finished_scan_gives_the_speed(
    model_folder: Path, corpus_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = ["--store", tmp_path / "s.duckdb"]
    scan = ["scan", model_folder, "--corpus", corpus_folder, *store, "--max-tokens", 16, "--limit-sequences", 8]
    assert main(list(map(str, scan))) == 0
    [speed] = Store(tmp_path / "s.duckdb").query("select sum(tokens) / sum(seconds) as rate from shards").to_pylist()
    on = ["--device", "cpu", "--max-tokens", 16, "--tokens", 10**6, "--measured", "", *store, "--json"]
    hours = json.loads(shown(capsys, model_folder, *on))["time"]["hours"]
    # The same model on texts that are nearly as long takes as long per token.
    assert hours == pytest.approx(10**6 / speed["rate"] / 3600, rel=0.05)
    assert main(["place", "demo", *map(str, on)]) == 2
    assert "name a scan of this model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokens", "5"], "--tokens needs a speed"),
        (["--flops", "4T"], "the hours of --job scan need --tokens"),
        (["--job", "plan", "--tokens", "5", "--flops", "4T"], "--tokens has no effect on --job plan"),
        (["--sequences", "8"], "--sequences has no effect on --job scan (only on plan, prune)"),
        (["--job", "plan", "--hours", "3"], "--hours has no effect on --job plan (only on study)"),
        (["--job", "study", "--time-pass", "--nodes", "1"], "--time-pass times this machine"),
        (
            ["--job", "prune", "--placement", "pipeline", "--nodes", "2", "--gpus", "1"],
            "needs all layers in one process",
        ),
        (["--flops", "fast", "--tokens", "5"], "write 400T, 4e14, or a measured GPU (H200)"),
        (["--nodes", "1", "--gpus", "2", "--gpu-memory", "100KiB"], "missing). Use larger devices"),
        (["--nodes", "1", "--gpus", "1", "--gpu-memory", "100KiB", "--placement", "whole"], "Set --placement auto"),
        (["--nodes", "1", "--gpus", "1", "--gpu-memory", "a lot"], "such as 80GiB"),
        (["--nodes", "0"], "--nodes: 0 (limit 1)"),
        (["--nodes", "99999999", "--gpus", "8"], "799,999,992 devices (limit 100,000)"),
        (["--nodes", "2", "--gpu-memory", "80"], "has no unit: write 80GiB"),
        (["--gpus", "8"], "--gpus has no effect without --nodes"),
        (["--nodes", "2", "--ray-address", "localhost:1"], "Leave out one of them"),
        (["--ray-address", "localhost:1"], "no Ray cluster answers at localhost:1"),
        (["--max-tokens", "0"], "--max-tokens: 0 (limit 1)"),
        (["--stages", "2", "--memory", "1GiB"], "--memory is only for --placement streamed"),
    ],
)
def test_plans_that_cannot_be(
    arguments: list[str], words: str, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["place", str(model_folder), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1
