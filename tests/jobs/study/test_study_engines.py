"""What a study tries for each engine, what a saving is there, and the commands that serve its files."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

import headscan
from headscan.cli.main import main, read_command
from headscan.cluster.pool import InProcessPool
from headscan.export.decilm_folder import write_decilm
from headscan.export.gguf_file import write_gguf
from headscan.grid import HeadGrid, find_units
from headscan.model_spec import ModelSpec
from headscan.plans import load_plan
from headscan.runs.run_context import Run
from headscan.steps.prune.model_costs import compare_costs
from headscan.steps.prune.pruned_arms import BuiltModel
from headscan.store.store import Store
from headscan.study.study_answer import StudyAnswer
from headscan.study.study_candidates import Candidates, ablations, caches, mask_arms, removals
from headscan.study.study_engines import for_engine, plan_block, recent_tokens, removed_shares, saved_by
from headscan.study.study_step import Study, StudyError
from headscan.text_tables import percent
from headscan.texts import CorpusSpec
from headscan.verdicts.metrics import Increase
from headscan.verdicts.ordered_shares import Outcome, ShareVerdict
from tests.jobs.conftest import THREADS
from tests.jobs.export.test_vllm_overrides import plan_of

SPEC = ModelSpec("demo", "float32")


def settled(kind: str, **settings: Any) -> tuple[Study, str]:
    """Return the settings of a study of a model of some type for its engine, and the line that it says."""
    names = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "gpt2": "GPT2LMHeadModel"}
    model = AutoConfig.for_model(kind, architectures=[names[kind]])
    lines: list[str] = []
    run: Any = SimpleNamespace(model=SimpleNamespace(config=lambda: model, source="small"), say=lines.append)
    found = for_engine(Study(SPEC, CorpusSpec("texts/"), **{"max_tokens": 256} | settings), run)
    (line,) = lines
    return found, line


def test_vllm_is_the_default_where_it_serves_all_that_is_tried() -> None:
    found, line = settled("llama")
    assert (found.engine, found.window_shares, found.prune_shares) == ("vllm", None, None)
    assert line == (
        "for vLLM: whole KV groups are removed, in numbers that vLLM holds; windows are in blocks of 32 tokens"
    )
    found, line = settled("qwen3")
    assert (found.engine, found.window_shares, found.prune_shares) == ("transformers", None, None)
    assert "for transformers: whole KV groups are removed; vLLM serves no pruned models: " in line
    assert "qwen3 has norms of queries and keys" in line
    assert settled("qwen3", prune_shares=())[0].engine == "vllm"
    found, line = settled("gpt2", prune_shares=())
    assert found.engine == "transformers" and "small has architecture GPT2LMHeadModel" in line
    # The window of a head fills a short text with its blocks.
    assert [settled("llama", max_tokens=tokens)[0].engine for tokens in (71, 72)] == ["transformers", "vllm"]


def test_savings_that_an_engine_does_not_serve_are_not_tried() -> None:
    found, line = settled("llama", engine="llama.cpp", prune_shares=(0.1,))
    assert (found.window_shares, found.prune_shares, found.kind_count) == ((), (0.1,), 2)
    assert "; no windows are tried: llama.cpp has no windows by KV head" in line
    found, line = settled("qwen3", engine="vllm")
    assert (found.window_shares, found.prune_shares) == (None, ()) and "no pruned models are tried" in line
    for asked in ({"window_shares": (0.1,)}, {"recent": 8}, {"search": True}):
        message = rf"^`{min(asked)}` has no effect for llama\.cpp: llama\.cpp has no windows by KV head\. Leave it out"
        with pytest.raises(StudyError, match=message):
            settled("llama", engine="llama.cpp", **asked)
    with pytest.raises(
        StudyError, match=r"^`prune_shares` has no effect for vLLM: serving engines hold models of type"
    ):
        settled("qwen3", engine="vllm", prune_shares=(0.1,))
    with pytest.raises(StudyError, match=r"^nothing to study for llama\.cpp; no windows are tried"):
        settled("llama", engine="llama.cpp", shares=(), prune_shares=())
    with pytest.raises(StudyError, match=r"^`unit` has no effect without `prune_shares`"):
        settled("llama", unit="head", prune_shares=())


def demo_study(out: Path, **settings: Any) -> Study:
    return Study(SPEC, CorpusSpec("texts/"), out, max_tokens=192, **{"engine": "vllm"} | settings)


def test_removals_are_whole_groups_in_numbers_that_the_engine_holds(tmp_path: Path) -> None:
    """A layer of the demo model has 4 KV heads with 2 query heads each: 3 KV heads divide no 8 query heads."""
    grid, lines = headscan.load("demo").grid, list[str]()

    def shares(*of: float, **settings: Any) -> tuple[str, tuple[float, ...]]:
        return removed_shares(demo_study(tmp_path, prune_shares=of, **settings), grid, lines.append)

    assert shares(0.05, 0.07, 0.2) == ("group", (2 / 24, 0.2))
    assert lines == ["vLLM holds no model that lacks fewer than 2 of 24 KV groups"]
    for engine in ("llama.cpp", "transformers"):
        assert shares(0.05, 0.06, 0.07, engine=engine) == ("group", (0.05, 0.07))
    assert shares(0.02, 0.05, unit="head") == ("head", (0.02, 0.05))
    assert shares(0.05, 0.2, unit="layer") == ("layer", (0.05,))


def built(folder: Path, removed: list[tuple[int, int]], share: float = 0.1) -> BuiltModel:
    """Return the demo model without some heads, saved without a repair."""
    whole = headscan.load("demo", dtype="float32")
    smaller = headscan.slice_heads(whole, removed)
    headscan.save_pruned(smaller, folder)
    costs = compare_costs(whole, smaller, removed, None)
    return BuiltModel(folder, "damage", share, "group", "none", whole.grid.check(removed), (), costs)


def groups(grid: HeadGrid, *places: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the heads of KV groups (layer, group)."""
    units = find_units(grid, "group")
    return [(head.layer, head.head) for layer, group in places for head in units[layer][group]]


@pytest.mark.parametrize("engine", ["vllm", "llama.cpp", "transformers"])
def test_a_saving_is_that_of_the_exported_file(engine: Any, tmp_path: Path) -> None:
    grid = headscan.load("demo").grid
    allowed = built(tmp_path / "allowed", groups(grid, (2, 0), (2, 3)))
    single = built(tmp_path / "single", [(1, 0), (3, 5), (4, 2), (5, 7)])
    cache, weights = saved_by(allowed, engine)
    assert cache == pytest.approx(2 / 24) and weights > 0
    assert saved_by(single, engine)[0] == 0
    if engine == "transformers":
        return
    lm = headscan.load(tmp_path / "allowed")
    sizes = (write_decilm if engine == "vllm" else write_gguf)(lm, tmp_path / "out").sizes
    original, _, held = sizes
    assert cache == pytest.approx(1 - held.kv_bytes / original.kv_bytes)
    assert weights == pytest.approx(1 - held.parameters / original.parameters)


def verdict(name: str, share: float) -> ShareVerdict:
    return ShareVerdict(name, share, Increase("nats per token", 64, 0.0, 0.0, 0.0), Outcome.SAFE, "safe")


def test_the_answer_says_what_is_saved_and_how_each_file_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its commands are run as they are, those of engines excepted."""
    monkeypatch.chdir(tmp_path)
    config = demo_study(Path("my study"))
    Path("my study").mkdir()
    Path("PROMPT.txt").write_text("import os\n" * 40)
    with Run(SPEC, Store(tmp_path / "s.duckdb"), lambda spec: InProcessPool(spec, THREADS)) as run:
        grid = run.facts.grid
        removed = groups(grid, (2, 0), (2, 3))
        models = [built(Path("my study") / name, removed, share) for name, share in (("a", 0.09), ("b", 0.1))]
        plan = replace(plan_of(headscan.load("demo"), {(0, 1), (3, 2)}, recent=20), block=32)
        found: list[Candidates] = [
            ablations(mask_arms("entropy", [(0, 1), (1, 2)], (0.5,)), "entropy", config, run),
            caches([plan], 192, Path("my study/head_plan.json"), (), config, run),
            removals(models, config, run),
        ]
        savings = tuple(each.saving_of([verdict(*each.saving.tried[0])]) for each in found)
    heads, cache, gone = savings
    # Both shares remove the same heads.
    assert gone.tried == ((found[2].arms[0].name, 4 / 48),)
    assert heads.saves() == "nothing by itself"
    # 2 of 24 KV heads keep 2 of 6 blocks.
    assert cache.saves() == f"cache {percent(2 / 24 * 4 / 6)}, {1 / (1 - 2 / 24 * 4 / 6):.2f} times the tokens"
    assert gone.saves().startswith("cache 8.33 %, weights 0.61 %, 1.09 times the tokens")
    losses = {each.judged[0].name: each.judged[0].loss for each in savings}
    answer = StudyAnswer("demo", "c", 6, 48, 9, 9, 192, 0.05, 1.0, savings, losses, "r", "s", 1.0, engine="vllm")  # type: ignore[arg-type]
    text = str(answer)
    assert "saves: shares of the KV cache (plans: at 192 tokens) and of the weights in vLLM, and how many" in text
    written = answer.as_dict()["savings"]
    assert [each["saves"] for each in written] == [each.saves() for each in savings]
    assert written[1]["tokens_fit"] == pytest.approx({cache.judged[0].name: 18 / 17})
    assert json.loads(json.dumps(written))[2]["commands"]["llama.cpp"][1] == "llama-server -m 'my study/a.gguf'"

    commands = [line for each in savings for of_engine in each.commands.values() for line in of_engine]
    assert all(line in text for line in commands)
    others = []
    for line in commands:
        words = shlex.split(line)
        if words[0] != "headscan":
            others.append(words)
        elif words[1] == "prune":
            assert read_command(words[1:]).step.import_heads == "my study/heads.json"
        elif words[1] == "export" and words[2] == "vllm":
            # The plan of this test is of no checkpoint.
            assert read_command(words[1:]) is not None
        elif words[1] == "generate":
            assert str(read_command(words[1:]).step.plan) == "my study/head_plan.json"
        else:
            assert main(words[1:]) == 0
            assert "saved in the engine: 8.33 % of the KV cache" in capsys.readouterr().out
    served = [words for words in others if words[0] == "vllm"]
    assert served[0][2] == SPEC.folder and served[0][3:5] == ["--block-size", "32"]
    assert served[1] == ["vllm", "serve", "my study/a-served", "--trust-remote-code"]
    assert (tmp_path / "my study/a-served/config.json").is_file() and (tmp_path / "my study/a.gguf").is_file()
    program = next(words for words in others if words[0] == "python")
    compile(program[2], "command", "exec")
    assert load_plan("my study/head_plan.json").block == plan_block(config) == 32
    assert recent_tokens(config) == 20
