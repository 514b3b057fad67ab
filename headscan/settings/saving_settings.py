"""Settings of savings: pruned models and plans of the KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from headscan.catalog import RANKED_CRITERIA, RECALL_NAMES, SET_METHODS
from headscan.errors import PruningError
from headscan.model_spec import ModelSpec
from headscan.options import Count, Group, Limits, Option, Seed, check_limits, short
from headscan.settings.corpus_settings import DEMO_CORPUS, SHORTEST, CorpusSpec, longest_text

if TYPE_CHECKING:
    from headscan.runs.model_identity import ModelIdentity


#: Longest texts of a pruning by default, in tokens; their least number; and the tokens for each column of the widest
#: repaired projection, because least squares need many more tokens than columns.
PRUNE_TOKENS, _LEAST_TEXTS, _PER_COLUMN = 512, 128, 8


@short
@dataclass(frozen=True)
class PruneTexts:
    """Texts of a pruning.

    Attributes:
        corpus: Texts like those that the model will read: what they do not need is removed first. None names those of
            the bundled model; other models need a corpus.
        held_out: Text that judges the result; None splits the documents of ``corpus`` into halves with about as many
            texts. A corpus of one document is split in the middle.
        sequences: Number of texts; one half chooses and repairs, the other judges. None takes 128, or as many as give
            the repair 8 tokens for each column of the widest projection that is solved.
    """

    corpus: Annotated[CorpusSpec | None, Group()] = None
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
        Option(f"length of texts in tokens (default: the model's context, at most {PRUNE_TOKENS})", least=SHORTEST),
    ] = None

    def __post_init__(self) -> None:
        check_limits(self, PruningError)

    def of_model(self, model: ModelSpec, sequences: int) -> PruneTexts:
        """Return the texts; the bundled model has its own, as many as ``sequences`` if no number is given."""
        if self.corpus is not None:
            return self
        if not model.is_demo:
            raise PruningError("`corpus` is required: name a text to calibrate on")
        # The model has read the standard library, but not the modules that judge.
        corpus, held_out = CorpusSpec("python-stdlib-modules"), CorpusSpec(DEMO_CORPUS)
        return replace(self, corpus=corpus, held_out=held_out, sequences=self.sequences or sequences)

    def longest(self, identity: ModelIdentity) -> int:
        return longest_text(identity, self.max_tokens, PRUNE_TOKENS)

    def half(self, tokens: int, columns: int) -> int:
        """Return the number of texts of ``tokens`` tokens in one half, if a repair solves projections with at most so
        many columns.
        """
        if self.sequences is not None:
            return self.sequences // 2
        return max(_LEAST_TEXTS // 2, -(-_PER_COLUMN * columns // tokens))


@short
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
    weight: Annotated[
        float,
        Option(
            f"weight of recall prompts ({RECALL_NAMES}) in choice and repair, next to 1 for the texts; 0 or "
            "--no-recall: texts alone",
            flag="--recall-weight",
            least=0,
            most=1e3,
        ),
    ] = 0.3
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_limits(self, PruningError)


#: Types of the matrices in an exported GGUF file.
GgufType = Literal["f16", "bf16", "f32", "q8_0"]
#: Architectures of exported folders with layer types: Llama for vLLM, Ministral for transformers.
Architecture = Literal["llama", "ministral"]

#: Serving engines that a study can be for, by their names in options and in text.
Engine = Literal["vllm", "llama.cpp", "transformers"]
ENGINES: Mapping[str, str] = {"vllm": "vLLM", "llama.cpp": "llama.cpp", "transformers": "transformers"}

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
