"""The verb generate."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from headscan.cli.option_parser import Given
from headscan.cli.results import Json, Result
from headscan.cli.verb_base import Devices, ModelVerb
from headscan.cluster.placement_base import format_bytes
from headscan.options import Group, Option
from headscan.settings.saving_settings import GenerateConfig

if TYPE_CHECKING:
    from headscan.steps.run_generate import Generated, GenerationComparison


@dataclass(frozen=True, kw_only=True)
class _Text:
    plan: Annotated[str, Option("file of the plan")] = "head_plan.json"
    prompt_file: Annotated[str, Option("text file with the prompt; - reads standard input", metavar="FILE")]
    settings: Annotated[Given[GenerateConfig], Group()]


@dataclass(frozen=True, kw_only=True)
class Generate(ModelVerb):
    """generate text with the full KV cache and with a plan's, side by side

        headscan generate MODEL --plan head_plan.json --prompt-file long.txt
        headscan generate MODEL --plan head_plan.json --prompt-file long.txt --max-new-tokens 200 --prefill-chunk 4096
        cat question.txt | headscan generate CHAT_MODEL --plan head_plan.json --prompt-file - --apply-chat-template

    Both texts are greedy. Shown are the first token that differs, the bytes of both caches, and milliseconds per token.
    In Python: `lm.model.generate(**inputs, past_key_values=headscan.PlanCache(plan))`.
    """

    common: ClassVar = (
        "MODEL --plan --prompt-file --apply-chat-template --max-new-tokens --rounds --json --dtype --device"
    )

    devices: Annotated[Devices, Group("devices")]
    json: Json = False
    text: Annotated[_Text, Group("text")]

    def run(self) -> Result:
        from headscan.plans import load_plan

        plan = load_plan(self.text.plan)  # the imports below load torch, which takes seconds
        text = _read(self.text.prompt_file)
        from headscan.jobs import job_functions
        from headscan.steps.plan_arms import narrowest_window

        spec, identity = self.identified()
        config = self.text.settings.build(model=spec, plan=plan, prompt=text)
        found = job_functions.generate(config, **self.devices.job_options(identity, type(self)))
        rows = [{"cache": name, **asdict(one)} for name, one in _both(found).items()]
        facts = {name: getattr(found, name) for name in ("prompt_tokens", "first_difference")}
        narrowest = narrowest_window(plan.kept)
        no_gain = narrowest is None or found.prompt_tokens + len(found.full.tokens) <= narrowest
        return Result(rows, lambda: _comparison_text(found, no_gain=no_gain), {"plan": self.text.plan, **facts})


def _read(file: str) -> str:
    """Return the text of a file, or that of standard input."""
    from headscan.errors import HeadscanError, first_line
    from headscan.texts.documents import encoding_of

    name = "standard input" if file == "-" else file
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return content.decode(encoding_of(content))
    except (OSError, UnicodeDecodeError) as error:
        raise HeadscanError(f"cannot read {name} ({first_line(error)}). Name a UTF-8 text file") from error


def _both(comparison: GenerationComparison) -> dict[str, Generated]:
    return {"full cache": comparison.full, "plan": comparison.planned}


def _comparison_text(comparison: GenerationComparison, *, no_gain: bool) -> str:
    lines = [f"prompt of {comparison.prompt_tokens:,} tokens, {len(comparison.full.tokens)} new ones", ""]
    lines += [_costs(name, generated) for name, generated in _both(comparison).items()]
    lines.append(
        f"the plan's cache has {comparison.planned.cache_bytes / comparison.full.cache_bytes:.1%} of the bytes"
    )
    if no_gain:
        lines.append("the plan frees nothing here: the text is no longer than its narrowest window")
    at = comparison.first_difference
    lines.append("the texts are equal" if at is None else f"the texts differ from token {at + 1} on")
    for name, generated in _both(comparison).items():
        lines += ["", f"--- {name}", *generated.text.splitlines()]
    return "\n".join(lines)


def _costs(name: str, generated: Generated) -> str:
    step = "-" if generated.token_seconds is None else f"{1000 * generated.token_seconds:.1f} ms per token"
    peak = "" if generated.peak_bytes is None else f", peak memory {format_bytes(generated.peak_bytes)}"
    return (
        f"{name:<11}{format_bytes(generated.cache_bytes)} of KV cache, {generated.prefill_seconds:.2f} s to the"
        f" first token, {step}{peak}"
    )
