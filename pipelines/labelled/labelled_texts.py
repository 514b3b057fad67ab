"""Tokenised examples of a model: a class for classifiers, target tokens for encoder-decoders."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from headscan.checkpoints.sources import load_config
from headscan.errors import UnsupportedModelError
from headscan.model_spec import ModelSpec
from headscan.models.model_class import is_classifier
from headscan.pipelines.labelled.example_file import DataSpec, ExampleError, RawExample, read_examples
from headscan.pipelines.runs.identity import ModelIdentity, fingerprint
from headscan.pipelines.runs.text_lengths import longest_text


class Answers(Enum):
    """What a model answers to a text."""

    CLASS = "class"
    TEXT = "text"


@dataclass(frozen=True)
class LabelledText:
    """One example in tokens.

    Attributes:
        index: Position in the file, from 0.
        ids: Token ids of the text.
        target_ids: Token ids of the target text; of a classifier, the number of the class alone.
        target: Target text, or name of the class.
        document: Hash of the text: equal texts are one document.
    """

    index: int
    ids: tuple[int, ...]
    target_ids: tuple[int, ...]
    target: str
    document: str

    @property
    def longest(self) -> int:
        """Tokens of the text or of its target, whichever has more."""
        return max(len(self.ids), len(self.target_ids))


@dataclass(frozen=True)
class LabelledTexts:
    """The examples of a file, ready for a model.

    Attributes:
        spec: The file.
        answers: Kind of the targets.
        texts: The examples.
        classes: Names of the classes by number; none for target texts.
        truncated: Number of texts or targets that were cut.
    """

    spec: DataSpec
    answers: Answers
    texts: tuple[LabelledText, ...]
    classes: tuple[str, ...]
    truncated: int

    @property
    def longest(self) -> int:
        """Tokens of the longest text or target."""
        return max(text.longest for text in self.texts)

    def fingerprint(self) -> str:
        """Return a hash of all tokens, targets and documents."""
        texts = [(text.ids, text.target_ids, text.target, text.document) for text in self.texts]
        return fingerprint({"texts": texts, "file": self.spec.name})

    def halves(self) -> tuple[tuple[LabelledText, ...], tuple[LabelledText, ...]]:
        """Return two halves, split by the hashes of texts: equal texts are in the same half.

        Raises:
            ExampleError: There are fewer than two texts.
        """
        order = {text: place for place, text in enumerate(sorted({text.document for text in self.texts}))}
        if len(order) < 2:
            raise ExampleError(f"{self.spec.name} has {len(order)} different texts (limit 2). Add examples")
        first, second = (tuple(t for t in self.texts if order[t.document] % 2 == half) for half in (0, 1))
        return first, second


def answers_of(spec: ModelSpec) -> Answers:
    """Return what a model answers, from its configuration.

    Raises:
        UnsupportedModelError: It is neither a classifier nor an encoder-decoder.
    """
    config = load_config(spec.source, spec.revision, spec.trust_remote_code)
    if config.is_encoder_decoder:
        return Answers.TEXT
    if is_classifier(config):
        return Answers.CLASS
    saved = ", ".join(config.architectures or ()) or config.model_type
    raise UnsupportedModelError(
        f"{spec.source} is a {saved}, which has no loss on labels. Load an encoder with a classification head or an "
        "encoder-decoder, or measure it on a text with `corpus`"
    )


def read_labelled(
    data: DataSpec, model: ModelSpec, identity: ModelIdentity, max_tokens: int | None = None
) -> LabelledTexts:
    """Read and tokenise the examples of a file.

    Args:
        max_tokens: Longest text and target, the rest is cut; None uses the model's context, at most 2,048 tokens.

    Raises:
        ExampleError: The file cannot be read, or a label is no class of the model.
        UnsupportedModelError: The model is neither a classifier nor an encoder-decoder.
        SequenceError: ``max_tokens`` exceeds the model's context.
    """
    raw = read_examples(data)
    answers = answers_of(model)
    limit = longest_text(identity, max_tokens)
    config = load_config(model.source, model.revision, model.trust_remote_code)
    classes = tuple(name for _, name in sorted((config.id2label or {}).items())) if answers is Answers.CLASS else ()
    encode = _encoder(identity, limit)
    texts, cut = [], 0
    for index, example in enumerate(raw):
        ids, long = encode(text=example.text)
        if classes:
            target_ids: tuple[int, ...] = (_class_of(data, example, classes),)
            target, long_target = classes[target_ids[0]], False
        else:
            target = example.target
            target_ids, long_target = encode(text_target=target)
        if not ids or not target_ids:
            raise ExampleError(f"line {example.line} of {data.name} has 0 tokens (limit 1). Remove the line")
        document = hashlib.sha256(example.text.encode()).hexdigest()[:16]
        texts.append(LabelledText(index, ids, target_ids, target, document))
        cut += long or long_target
    return LabelledTexts(data, answers, tuple(texts), classes, cut)


def _encoder(identity: ModelIdentity, limit: int) -> Callable[..., tuple[tuple[int, ...], bool]]:
    tokenizer: Any = identity.tokenizer

    def encode(**text: str) -> tuple[tuple[int, ...], bool]:
        """Return ids with special tokens, and True if the text was cut."""
        ids = tokenizer(**text)["input_ids"]
        if len(ids) <= limit:
            return tuple(ids), False
        return tuple(tokenizer(**text, truncation=True, max_length=limit)["input_ids"]), True

    return encode


def _class_of(data: DataSpec, example: RawExample, classes: Sequence[str]) -> int:
    """Return the number of an example's class; its label is a name or a number."""
    numbers: Mapping[str, int] = {
        **{str(number): number for number in range(len(classes))},
        **{name: number for number, name in enumerate(classes)},
    }
    if example.target not in numbers:
        known = ", ".join(classes[:8]) + (", ..." if len(classes) > 8 else "")
        raise ExampleError(
            f"label of line {example.line} of {data.name}: {example.target[:40]!r} (limit {known}, or 0 to "
            f"{len(classes) - 1}). Correct it, or set id2label in config.json"
        )
    return numbers[example.target]
