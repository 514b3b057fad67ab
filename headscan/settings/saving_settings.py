"""Settings of savings: pruned models and plans of the KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from headscan.catalog import DEFAULT_RECENT, DEFAULT_SINK, RANKED_CRITERIA, RECALL_NAMES, SET_METHODS
from headscan.errors import ModelLoadError, PruningError, first_line
from headscan.model_spec import ModelSpec
from headscan.options import BATCH_TOKENS, Count, Limits, Option, Seed, check_limits
from headscan.settings.corpus_settings import SHORTEST, CorpusSpec, longest_text
from headscan.windows import Window

if TYPE_CHECKING:
    from headscan.plans import HeadPlan
    from headscan.runs.model_identity import ModelIdentity


#: Longest texts of a pruning by default, in tokens; their least number; and the tokens for each column of the widest
#: repaired projection, because least squares need many more tokens than columns.
_PRUNE_TOKENS, _LEAST_TEXTS, _PER_COLUMN = 512, 128, 8


@dataclass(frozen=True)
class PruneTexts:
    """Texts of a pruning.

    Attributes:
        corpus: Texts like those that the model will read: what they do not need is removed first.
        held_out: Text that judges the result; None splits the documents of ``corpus`` into halves with about as many
            texts. A corpus of one document is split in the middle.
        sequences: Number of texts; one half chooses and repairs, the other judges. None takes 128, or as many as give
            the repair 8 tokens for each column of the widest projection that is solved.
    """

    corpus: CorpusSpec
    held_out: CorpusSpec | None = None
    sequences: Annotated[
        int | None,
        Option(
            "number of texts; one half chooses and repairs, the other is held out to measure the loss (default: "
            f"{_LEAST_TEXTS}, or as many as give {_PER_COLUMN} tokens to each column of a repaired projection)",
            least=2,
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        Option(f"length of texts in tokens (default: the model's context, at most {_PRUNE_TOKENS})", least=SHORTEST),
    ] = None

    def __post_init__(self) -> None:
        check_limits(self, PruningError)

    def longest(self, identity: ModelIdentity) -> int:
        return longest_text(identity, self.max_tokens, _PRUNE_TOKENS)

    def half(self, tokens: int, columns: int) -> int:
        """Return the number of texts of ``tokens`` tokens in one half, if a repair solves projections with at most so
        many columns.
        """
        if self.sequences is not None:
            return self.sequences // 2
        return max(_LEAST_TEXTS // 2, -(-_PER_COLUMN * columns // tokens))


@dataclass(frozen=True)
class RecallPrompts:
    """Recall prompts of a pruning, in addition to its texts: text alone does not show which heads copy and retrieve.

    Attributes:
        prompts: Number of prompts of each recall task, a multiple of 8; one half chooses and repairs, the other judges.
            0 uses texts only.
        max_tokens: Longest prompt; shorter if the model's context is.
        weight: w in ``m(text) + w / T * (m(task 1) + ... + m(task T))``, which choice and repair minimise, with T
            recall tasks; m is a mean over predictions.
    """

    prompts: Annotated[int, Limits(least=0, multiple=8)] = 32
    max_tokens: Count = 512
    weight: Annotated[float, Limits(above=0)] = 0.3
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_limits(self, PruningError)


#: Types of the matrices in an exported GGUF file.
GgufType = Literal["f16", "bf16", "f32", "q8_0"]
#: Architectures of exported folders with layer types: Llama for vLLM, Ministral for transformers.
Architecture = Literal["llama", "ministral"]

#: Numbers of KV heads that the layers of a pruned model may have.
KvCounts = Literal["any", "divisors"]

#: Methods that choose heads: those that choose a set, and criteria by which a run in a store orders heads.
PRUNE_METHODS = (*SET_METHODS, *RANKED_CRITERIA)

#: Projections that each repair solves; ``mean`` adds the mean outputs of removed heads instead.
REPAIRS: Mapping[str, tuple[Literal["o", "v", "down"], ...]] = {
    "none": (),
    "mean": (),
    "o": ("o",),
    "o+v": ("o", "v"),
    "o+down": ("o", "down"),
    "o+v+down": ("o", "v", "down"),
}


#: Longest prompts of a damage measurement by default, in tokens.
_PLAN_TOKENS = 1024


@dataclass(frozen=True)
class PlanConfig:
    """Settings of the measured damage of windows, from which a plan is made.

    Attributes:
        corpus: Ordinary text.
        sink: First tokens of a window.
        recents: Widths of recent tokens; each KV head gets the narrowest that costs hardly more than the widest.
        gates: Values of the gates of `kv_damages_by_sequence`.
        granularity: ``layer`` measures windows on whole layers, one layer at a time.
        block: Tokens of a block of the serving engine, as in a `HeadPlan`; windows are measured in whole blocks. None
            keeps single tokens.
        chunk: Tokens that see the same window, as in a `HeadPlan`; only the finished plan is measured with it, because
            it widens windows. None gives each token its own.
        seed: Seed of the recall prompts.
        batch_tokens: Tokens of one pass, padding included.

    Raises:
        PlanError: A number is out of range.
    """

    model: ModelSpec
    corpus: CorpusSpec
    sink: Annotated[int, Limits(least=0)] = DEFAULT_SINK
    recents: Annotated[tuple[int, ...], Limits(least=1)] = (DEFAULT_RECENT,)
    max_tokens: Annotated[
        int | None,
        Option(
            f"length of texts and recall prompts in tokens (default: the model's context, at most {_PLAN_TOKENS})",
            least=1,
        ),
    ] = None
    sequences: Annotated[int, Option("number of texts; one half is held out to measure the plan", least=2)] = 16
    recall_prompts: Annotated[
        int,
        Option(
            f"number of prompts of each recall task ({RECALL_NAMES}), a multiple of 8; 0 measures text only",
            metavar="N",
            least=0,
            multiple=8,
        ),
    ] = 8
    gates: Annotated[tuple[float, ...], Limits(least=0, most=1)] = (0.5,)
    confirm: Annotated[
        bool, Option("choose the KV heads or layers near the budget's edge by their loss with real window masks")
    ] = True
    granularity: Literal["kv_head", "layer"] = "kv_head"
    block: Annotated[int | None, Limits(least=1)] = None
    chunk: Annotated[int | None, Limits(least=1)] = None
    seed: Seed = 0
    batch_tokens: Count = BATCH_TOKENS

    def __post_init__(self) -> None:
        from headscan.plans import PlanError, check_chunk

        check_limits(self, PlanError)
        check_chunk(self.chunk, self.block)
        for name in ("recents", "gates"):
            if not getattr(self, name):
                raise PlanError(f"`{name}` is empty (limit 1 value). Set `{name}`")

    @property
    def windows(self) -> tuple[Window, ...]:
        """Windows, narrowest first."""
        return tuple(Window(self.sink, recent, self.block or 1) for recent in sorted(set(self.recents)))

    @property
    def unit_names(self) -> str:
        """What gets a window, in words."""
        return "KV heads" if self.granularity == "kv_head" else "layers"

    def longest(self, identity: ModelIdentity) -> int:
        return longest_text(identity, self.max_tokens, _PLAN_TOKENS)


@dataclass(frozen=True)
class GenerateConfig:
    """Settings of a text that is generated with the full KV cache and with a plan's.

    Attributes:
        plan: Plan of the model, as `headscan.plans.load_plan` reads it.
        prompt: Text to continue greedily; with ``apply_chat_template`` a user's message, which the model
            answers.
    """

    model: ModelSpec
    plan: HeadPlan
    prompt: str
    apply_chat_template: Annotated[bool, Option("the prompt as a user's message, in the tokenizer's chat template")] = (
        False
    )
    max_new_tokens: Annotated[int, Option("most tokens to generate", least=1)] = 64
    prefill_chunk: Annotated[
        int | None,
        Option("prompt tokens read at a time, which bounds the peak memory (default: all)", metavar="TOKENS", least=1),
    ] = None
    rounds: Annotated[int, Option("times that each text is generated", least=1)] = 1

    def __post_init__(self) -> None:
        from headscan.plans import PlanError, check_is_plan

        check_limits(self, PlanError)
        check_is_plan(self.plan)

    def prompt_ids(self, identity: ModelIdentity) -> tuple[int, ...]:
        """Return the tokens of the prompt."""
        tokenizer = identity.tokenizer
        if not self.apply_chat_template:
            return tuple(tokenizer(self.prompt)["input_ids"])
        if not tokenizer.chat_template:
            raise ModelLoadError(
                f"the tokenizer of {identity.name} has no chat template. Load a chat model, or leave out "
                "`apply_chat_template`"
            )
        from jinja2.exceptions import TemplateError

        message = [{"role": "user", "content": self.prompt}]
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
