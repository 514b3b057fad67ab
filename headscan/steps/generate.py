"""The step generate."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Unpack

from headscan.cluster.placement_base import format_bytes
from headscan.errors import HeadscanError, ModelLoadError, first_line
from headscan.options import Option, check_limits, short
from headscan.steps.results import Result
from headscan.steps.step import Step
from headscan.text_tables import counted, percent

if TYPE_CHECKING:
    from headscan.plans import HeadPlan
    from headscan.runs.model_identity import ModelIdentity
    from headscan.runs.run_context import ModelContext
    from headscan.steps.open_run import JobOptions
    from headscan.steps.run_generate import Generated, GenerationComparison
    from headscan.store.store import Store


def _read(file: str) -> str:
    """Return the text of a file, or that of standard input."""
    from headscan.texts.documents import encoding_of

    name = "standard input" if file == "-" else file
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return content.decode(encoding_of(content))
    except (OSError, UnicodeDecodeError) as error:
        raise HeadscanError(f"cannot read {name} ({first_line(error)}). Name a UTF-8 text file") from error


@short
@dataclass(frozen=True)
class Generate(Step["GenerationComparison"]):
    """generate text with the full KV cache and with a plan's, side by side

        headscan generate MODEL --plan head_plan.json --prompt-file long.txt
        headscan generate MODEL --plan head_plan.json --prompt-file long.txt --max-new-tokens 200 --prefill-chunk 4096
        cat question.txt | headscan generate CHAT_MODEL --plan head_plan.json --prompt-file - --apply-chat-template

    Both texts are greedy. Shown are the first token that differs, the bytes of both caches, and milliseconds per token.
    In Python: `lm.model.generate(**inputs, past_key_values=headscan.PlanCache(plan))`.

    Attributes:
        plan: Plan of the model, or its file.
        prompt: Text to continue greedily; with ``apply_chat_template`` a user's message, which the model answers. None
            reads ``prompt_file``.

    Raises:
        PlanError: The plan is of another model, or an option of a store is given, although nothing is stored.
        SequenceError: The prompt is empty, or longer than the model's context with the new tokens.
    """

    common: ClassVar = (
        "MODEL --plan --prompt-file --apply-chat-template --max-new-tokens --rounds --json --dtype --device"
    )
    keeps_rows: ClassVar = False
    stores: ClassVar = ()
    evaluates: ClassVar = True

    prompt: str | None = None
    prompt_file: Annotated[
        str | None, Option("text file with the prompt; - reads standard input", metavar="FILE", required=True)
    ] = None
    plan: Annotated[Any, Option("file of the plan")] = "head_plan.json"
    apply_chat_template: Annotated[bool, Option("the prompt as a user's message, in the tokenizer's chat template")] = (
        False
    )
    max_new_tokens: Annotated[int, Option("most tokens to generate", least=1)] = 64
    prefill_chunk: Annotated[
        int | None, Option("prompt tokens read at a time, which bounds the peak memory (default: all)", least=1)
    ] = None
    rounds: Annotated[int, Option("times that each text is generated", least=1)] = 1

    def __post_init__(self) -> None:
        from headscan.plans import PlanError, check_is_plan

        check_limits(self, PlanError)
        if not isinstance(self.plan, str | Path):
            check_is_plan(self.plan)
        if (self.prompt is None) == (self.prompt_file is None):
            raise PlanError("`prompt` or `prompt_file` is required: give one of them")

    @cached_property
    def text(self) -> str:
        """The prompt, whose file is read once."""
        return self.prompt if self.prompt is not None else _read(str(self.prompt_file))

    @cached_property
    def head_plan(self) -> HeadPlan:
        """The plan, which is read once."""
        from headscan.plans import load_plan

        loaded: HeadPlan = load_plan(str(self.plan)) if isinstance(self.plan, str | Path) else self.plan
        return loaded

    def prompt_ids(self, identity: ModelIdentity) -> tuple[int, ...]:
        """Return the tokens of the prompt."""
        tokenizer = identity.tokenizer
        if not self.apply_chat_template:
            return tuple(tokenizer(self.text)["input_ids"])
        if not tokenizer.chat_template:
            raise ModelLoadError(
                f"the tokenizer of {identity.name} has no chat template. Load a chat model, or leave out "
                "`apply_chat_template`"
            )
        from jinja2.exceptions import TemplateError

        message = [{"role": "user", "content": self.text}]
        try:
            written = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        # A tokenizer may have several templates without a default, or a broken one.
        except (ValueError, TypeError, TemplateError) as problem:
            raise ModelLoadError(
                f"the chat template of {identity.name} cannot be used: {first_line(problem)}. Correct it, or leave out "
                "`apply_chat_template`"
            ) from problem
        return tuple(tokenizer(written, add_special_tokens=False)["input_ids"])  # the template has the special tokens

    def longest(self, identity: ModelIdentity) -> int:
        """Return the length of the whole text."""
        return len(self.prompt_ids(identity)) + self.max_new_tokens

    def run(self, store: str | Path | None = None, **options: Unpack[JobOptions]) -> GenerationComparison:
        if store is not None:
            from headscan.plans import PlanError

            raise PlanError(f"`store={store}`: a comparison of texts is not stored. Leave out `store`")
        return super().run(None, **options)

    def execute(self, run: ModelContext) -> GenerationComparison:
        from headscan.steps.run_generate import run_generate

        return run_generate(self, run)

    def check_inputs(self, store: Store) -> None:
        for read in ("head_plan", "text"):
            getattr(self, read)

    def shown(self, result: GenerationComparison, store: Store) -> Result:
        from headscan.steps.plan_arms import narrowest_window

        rows = [{"cache": name, **asdict(one)} for name, one in _both(result).items()]
        file = str(self.plan) if isinstance(self.plan, str | Path) else None
        facts = {"plan": file} | {name: getattr(result, name) for name in ("prompt_tokens", "first_difference")}
        narrowest = narrowest_window(self.head_plan.kept)
        no_gain = narrowest is None or result.prompt_tokens + len(result.full.tokens) <= narrowest
        return Result(rows, lambda: _comparison_text(result, no_gain=no_gain), facts)


def _both(comparison: GenerationComparison) -> dict[str, Generated]:
    return {"full cache": comparison.full, "plan": comparison.planned}


def _comparison_text(comparison: GenerationComparison, *, no_gain: bool) -> str:
    lines = [f"prompt of {counted(comparison.prompt_tokens, 'token')}, {len(comparison.full.tokens)} new", ""]
    lines += [_costs(name, generated) for name, generated in _both(comparison).items()]
    lines.append(
        f"the plan's cache has {percent(comparison.planned.cache_bytes / comparison.full.cache_bytes)} of the bytes"
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
