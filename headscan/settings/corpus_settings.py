"""Settings of corpora, of their token sequences, and of files of labelled examples."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from headscan.errors import HeadscanError, SequenceError
from headscan.options import Option, check_limits, short

if TYPE_CHECKING:
    from headscan.runs.model_identity import ModelIdentity


#: Built-in corpora: the standard library of the running interpreter, its single-file modules that the demo model has
#: read, and modules that the demo model has not read.
BUILT_IN_CORPORA = ("python-stdlib", "python-stdlib-modules", "python-stdlib-heldout")
#: Corpus of the bundled model unless one is named: modules of the standard library that it has not read.
DEMO_CORPUS = "python-stdlib-heldout"

TokenMode = Literal["truncate", "chunk", "pack"]
BosPolicy = Literal["auto", "always", "never"]


#: Shortest text whose loss is measured or minimised, in tokens: predictions after few tokens say little.
SHORTEST = 16
#: Longest text by default, in tokens.
LONGEST_TEXT = 2048


class CorpusError(HeadscanError):
    """A corpus cannot be found, read or tokenised."""


@short
@dataclass(frozen=True)
class CorpusSpec:
    """Settings of a corpus: a built-in corpus, a file or folder, or a hub data set, tried in this order.
    ``limit_documents`` counts documents with text; None reads all.
    """

    name: Annotated[
        str,
        Option(
            "file or folder (.txt, .py, .jsonl, .parquet, .csv, ...; text and JSON also .gz or .zst), data set on the "
            f"hub, or a built-in corpus: {', '.join(BUILT_IN_CORPORA)}",
            flag="--corpus",
        ),
    ]
    config: Annotated[
        str | None, Option("configuration of a hub data set (default: its own)", flag="--corpus-config")
    ] = None
    split: Annotated[str, Option("split of a hub data set")] = "train"
    column: Annotated[str | None, Option("text column (default: `text`, or the only string column)")] = None
    revision: Annotated[
        str | None, Option("commit of a hub data set (default: the newest)", flag="--corpus-revision")
    ] = None
    limit_documents: Annotated[int | None, Option("number of documents, the first ones (default: all)", least=1)] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", os.fspath(self.name))
        for field in ("name", "config", "split", "column", "revision"):
            value = getattr(self, field)
            if value is not None and not value.strip():
                raise CorpusError(f"corpus {field} is {value!r}. Give a non-empty name")
        check_limits(self, CorpusError)


@short
@dataclass(frozen=True)
class TokenConfig:
    """Settings for making token sequences from documents.

    Attributes:
        max_tokens: Longest sequence, in tokens, special tokens included; None follows the model (`within`).
        mode: ``truncate`` makes one sequence from the beginning of each document. ``chunk`` cuts each document into
            consecutive sequences. ``pack`` joins documents (with EOS between them if the tokenizer has it) and cuts
            them into full sequences, as in training; queries then attend to earlier documents of their sequence.
        bos: ``auto`` adds the special tokens that the tokenizer puts around a text. ``always`` adds BOS before every
            sequence and no other special token. ``never`` adds none.
        min_tokens: Shortest sequence, in tokens, special tokens included; shorter ones are counted and dropped.
        limit_sequences: Number of sequences that are drawn from all files; None reads all.
    """

    max_tokens: Annotated[
        int | None, Option(f"maximum sequence length (default: the model's context, at most {LONGEST_TEXT})", least=1)
    ] = None
    mode: Annotated[
        TokenMode,
        Option(
            "truncate: the first tokens of a document; chunk: every document in pieces; pack: documents joined into "
            "full sequences, where queries also attend to earlier documents"
        ),
    ] = "truncate"
    bos: Annotated[BosPolicy, Option("BOS token before each sequence; auto follows the tokenizer")] = "auto"
    min_tokens: Annotated[int, Option("minimum sequence length in tokens", least=1)] = 2
    limit_sequences: Annotated[
        int | None, Option("number of sequences, drawn from all files by a hash of their text (default: all)", least=1)
    ] = None

    def __post_init__(self) -> None:
        check_limits(self, CorpusError)
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise CorpusError(
                f"`max_tokens={self.max_tokens}` is below `min_tokens={self.min_tokens}`. Raise `max_tokens`"
            )

    @property
    def longest(self) -> int:
        """The longest sequence of settings that have one."""
        if self.max_tokens is None:
            raise CorpusError("`max_tokens=None`: no length. Set `max_tokens`")
        return self.max_tokens

    def within(self, identity: ModelIdentity) -> TokenConfig:
        """Return the settings with the longest sequence of a model; raise SequenceError if theirs is longer."""
        return replace(self, max_tokens=longest_text(identity, self.max_tokens))

    @property
    def attention_across_documents(self) -> bool:
        """True if queries attend to the tokens of other documents."""
        return self.mode == "pack"


def check_length(identity: ModelIdentity, max_tokens: int) -> None:
    """Raise SequenceError if texts of so many tokens exceed the context of a model."""
    limit = identity.max_tokens
    if limit is not None and max_tokens > limit:
        raise SequenceError(
            f"`max_tokens={max_tokens}` (limit {limit} positions of {identity.name}). Lower `max_tokens`"
        )


def longest_text(identity: ModelIdentity, max_tokens: int | None, longest: int = LONGEST_TEXT) -> int:
    """Return the tokens of the longest text; ``max_tokens`` None uses the model's context, at most ``longest``."""
    if max_tokens is None:
        return min(identity.max_tokens or longest, longest)
    check_length(identity, max_tokens)
    return max_tokens


class ExampleError(HeadscanError):
    """A file of labelled examples cannot be read, or does not fit the model."""


#: Metrics of labelled examples; the kind of their targets decides which of them there are.
LabelledMetric = Literal["accuracy", "bleu", "loss"]
#: Option of steps on labelled examples.
Metric = Annotated[
    LabelledMetric | None,
    Option("metric on --data (default: accuracy for classifiers, bleu for encoder-decoders)", needs="--data"),
]


@short
@dataclass(frozen=True)
class ExamplesSpec:
    """Settings of a file of labelled examples, one text or a pair of texts each: tables (``.tsv``, ``.csv``,
    ``.parquet``) and JSON objects (``.jsonl``, ``.json``).

    Attributes:
        limit: Number of examples, drawn by a hash; None reads all.
        text_columns: The column of the text, or the two of a pair in the order in which the model reads them; None
            finds them by their names.
        label_column: None finds it by its name.
    """

    path: Annotated[
        str,
        Option(
            "labelled examples instead of a corpus: .tsv, .csv, .jsonl, .json or .parquet with the columns text and "
            "label, source and target, or two texts and label, such as premise, hypothesis and label; two columns "
            "without a header are text and label",
            flag="--data",
            metavar="FILE",
        ),
    ]
    limit: Annotated[
        int | None, Option("number of examples, drawn by a hash (default: all)", flag="--limit-examples", least=1)
    ] = None
    text_columns: Annotated[
        tuple[str, ...] | None,
        Option(
            "column of the text, or the two columns of a pair, of --data (default: by known names)",
            metavar="NAME[,NAME]",
        ),
    ] = None
    label_column: Annotated[
        str | None, Option("column of the label of --data (default: by known names)", metavar="NAME")
    ] = None

    def __post_init__(self) -> None:
        check_limits(self, ExampleError)
        object.__setattr__(self, "path", os.fspath(self.path))
        columns = self.text_columns
        if columns is not None and not (1 <= len(columns) <= 2 and len({*columns}) == len(columns)):
            raise ExampleError(
                f"`text_columns={','.join(columns)}` (limit 1 column, or 2 different ones of a pair). Change "
                "`text_columns`"
            )

    @property
    def names_columns(self) -> bool:
        """True if a table must have a header with the names of its columns."""
        return self.text_columns is not None or self.label_column is not None

    def check_file(self) -> None:
        """Raise ExampleError if there is no such file."""
        if not Path(self.path).is_file():
            raise ExampleError(f"no file {self.path}. Give a file of examples, such as .tsv or .jsonl")

    @property
    def name(self) -> str:
        return Path(self.path).name
