"""generate text with the full KV cache and with a plan's, side by side

    headscan generate MODEL --plan head_plan.json --prompt-file long.txt
    headscan generate MODEL --plan head_plan.json --prompt-file long.txt --max-new-tokens 200 --prefill-chunk 4096

Both texts are greedy. Shown are the first token that differs, the bytes of both caches, and milliseconds per token. In
Python: `lm.model.generate(**inputs, past_key_values=headscan.PlanCache(plan))`.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from headscan.pipelines.cli.shared import arguments, device_options
from headscan.pipelines.cli.shared import options as shared
from headscan.pipelines.cli.shared.json_output import Result, add_json

if TYPE_CHECKING:
    from headscan.pipelines.kv.compare_generation import Generated, GenerationComparison


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_model(parser)
    device_options.add_devices(parser)
    add_json(parser)
    group = parser.add_argument_group("text")
    group.add_argument("--plan", default="head_plan.json", help="file of the plan (default: head_plan.json)")
    group.add_argument("--prompt-file", required=True, metavar="FILE", help="text file with the prompt")
    group.add_argument(
        "--max-new-tokens", type=arguments.count, default=64, help="most tokens to generate (default: 64)"
    )
    group.add_argument(
        "--prefill-chunk",
        type=arguments.count,
        metavar="TOKENS",
        help="prompt tokens read at a time, which bounds the peak memory (default: all)",
    )
    group.add_argument(
        "--rounds", type=arguments.count, default=1, help="times that each text is generated (default: 1)"
    )


def run(options: argparse.Namespace) -> Result:
    from headscan.analysis.plans import load_plan
    from headscan.errors import HeadscanError

    plan = load_plan(options.plan)  # the imports below load torch, which takes seconds
    try:
        text = Path(options.prompt_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HeadscanError(f"cannot read {options.prompt_file} ({error}). Name a UTF-8 text file") from error
    from headscan.kv.kept_keys import KeptKeys
    from headscan.pipelines.kv.compare_generation import GenerationTask, compare_generation
    from headscan.pipelines.kv.plan_arms import KeptHeads, check_plan, narrowest_window
    from headscan.pipelines.runs.identity import identify
    from headscan.pipelines.runs.run_records import RunContext

    shared.quiet_libraries()
    spec = shared.model_spec(options)
    identity = identify(spec)
    prompt = tuple(identity.tokenizer(text)["input_ids"])
    task = GenerationTask(
        KeptHeads.of(plan.heads), prompt, options.max_new_tokens, options.prefill_chunk, options.rounds
    )
    placed = device_options.placement(options, spec, tokens=len(prompt) + options.max_new_tokens, evaluates=True)
    with device_options.open_replicas(options, spec, placed.placement) as pool:
        if pool.staged:
            raise HeadscanError(
                "text is generated token by token, which needs all layers of the model at once. Use --placement whole"
                " or sharded"
            )
        check_plan(plan, RunContext(identity, pool))
        found = pool.one(compare_generation, task)
    texts = {name: str(identity.tokenizer.decode(list(one.tokens))) for name, one in _both(found).items()}
    rows = [{"cache": name, **asdict(one), "text": texts[name]} for name, one in _both(found).items()]
    facts = {"plan": options.plan, "prompt_tokens": len(prompt), "first_difference": found.first_difference}
    narrowest = narrowest_window(KeptKeys.of_plan(plan))
    no_gain = narrowest is None or len(prompt) + len(found.full.tokens) <= narrowest
    return Result(rows, lambda: _text(found, texts, len(prompt), no_gain=no_gain), facts)


def _both(found: GenerationComparison) -> dict[str, Generated]:
    return {"full cache": found.full, "plan": found.planned}


def _text(found: GenerationComparison, texts: dict[str, str], prompt_tokens: int, *, no_gain: bool) -> str:
    lines = [f"prompt of {prompt_tokens:,} tokens, {len(found.full.tokens)} new ones", ""]
    lines += [_costs(name, generated) for name, generated in _both(found).items()]
    lines.append(f"the plan's cache has {found.planned.cache_bytes / found.full.cache_bytes:.1%} of the bytes")
    if no_gain:
        lines.append("the plan frees nothing here: the text is no longer than its narrowest window")
    at = found.first_difference
    lines.append("the texts are equal" if at is None else f"the texts differ from token {at + 1} on")
    for name, text in texts.items():
        lines += ["", f"--- {name}", *text.splitlines()]
    return "\n".join(lines)


def _costs(name: str, generated: Generated) -> str:
    step = "-" if generated.token_seconds is None else f"{1000 * generated.token_seconds:.1f} ms per token"
    peak = "" if generated.peak_bytes is None else f", peak memory {generated.peak_bytes / 2**20:,.0f} MiB"
    return (
        f"{name:<11}{generated.cache_bytes / 2**20:,.2f} MiB of KV cache, {generated.prefill_seconds:.2f} s to the"
        f" first token, {step}{peak}"
    )
