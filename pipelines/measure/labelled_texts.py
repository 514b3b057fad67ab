"""Labelled examples from a TSV or JSONL file, tokenised for a model, and their losses."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from headscan.errors import UnsupportedModelError
from headscan.gradients.losses import ClassificationLoss, Loss, TargetTextLoss
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import LoadedModel
from headscan.models.model_facts import is_classifier
from headscan.models.token_batches import pad
from headscan.pipelines.runs.model_identity import ModelIdentity, fingerprint
from headscan.pipelines.settings.corpus_settings import ExampleError, ExamplesSpec, longest_text

#: Names of the two columns in headers and JSON objects; the first that exists is read.
TEXT_COLUMNS = ("text", "sentence", "source")
LABEL_COLUMNS = ("label", "target")
_FORMATS = (".tsv", ".jsonl")


class RawExample(NamedTuple):
    """One example and its line in the file, from 1: a text with its label, or source and target text."""

    line: int
    text: str
    target: str


def read_examples(spec: ExamplesSpec) -> list[RawExample]:
    """Return the examples of a file in order; empty lines are skipped."""
    spec.check_file()
    path = Path(spec.path)
    if path.suffix not in _FORMATS:
        raise ExampleError(f"format of {spec.path}: {path.suffix or 'none'} (limit {', '.join(_FORMATS)}). Convert it")
    try:
        lines = [(number, line) for number, line in enumerate(path.read_text("utf-8-sig").split("\n"), 1)]
    except UnicodeDecodeError as problem:
        raise ExampleError(f"{spec.name} is not UTF-8: byte {problem.start}. Convert it to UTF-8") from problem
    filled = [(number, line.removesuffix("\r")) for number, line in lines if line.strip()]
    rows = _json_rows(spec, filled) if path.suffix == ".jsonl" else _tab_rows(spec, filled)
    examples = list(islice(rows, spec.limit or len(filled)))
    if not examples:
        raise ExampleError(f"{spec.name} has 0 examples (limit 1). Add a line with a text and its label")
    return examples


def _tab_rows(spec: ExamplesSpec, lines: list[tuple[int, str]]) -> Iterator[RawExample]:
    text, label = 0, 1
    header = [] if not lines else [name.strip().lower() for name in lines[0][1].split("\t")]
    columns = [next((name for name in names if name in header), None) for names in (TEXT_COLUMNS, LABEL_COLUMNS)]
    fields = 2
    if columns[0] is not None and all(name.isidentifier() for name in header):
        if columns[1] is None:
            raise ExampleError(_no_column(spec, LABEL_COLUMNS, header))
        text, label = header.index(columns[0]), header.index(columns[1])
        fields, lines = len(header), lines[1:]
    for number, line in lines:
        cells = line.split("\t")
        if len(cells) != fields:
            raise ExampleError(
                f"line {number} of {spec.name} has {len(cells)} columns (limit {fields}: text and label). Separate "
                "them by one tab, and add a header if there are more"
            )
        yield _example(spec, number, cells[text], cells[label])


def _json_rows(spec: ExamplesSpec, lines: list[tuple[int, str]]) -> Iterator[RawExample]:
    for number, line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError as problem:
            raise ExampleError(f"line {number} of {spec.name} is not JSON: {problem.msg}. Fix the line") from problem
        if not isinstance(row, dict):
            raise ExampleError(f"line {number} of {spec.name} is not a JSON object: {line[:20]}. Fix the line")
        values = []
        for names in (TEXT_COLUMNS, LABEL_COLUMNS):
            name = next((name for name in names if row.get(name) is not None), None)
            if name is None:
                raise ExampleError(f"line {number}: {_no_column(spec, names, list(row))}")
            values.append(str(row[name]))
        yield _example(spec, number, *values)


def _example(spec: ExamplesSpec, line: int, text: str, target: str) -> RawExample:
    for name, value in (("text", text), ("label", target)):
        if not value.strip():
            raise ExampleError(f"line {line} of {spec.name} has an empty {name}. Fill it in, or remove the line")
    return RawExample(line, text.strip(), target.strip())


def _no_column(spec: ExamplesSpec, names: tuple[str, ...], columns: list[str]) -> str:
    kind = "text" if names is TEXT_COLUMNS else "label"
    return f"{spec.name} has no {kind} column: {', '.join(columns)[:80]}. Name a column {' or '.join(names)}"


class Answers(Enum):
    """What a model answers to a text."""

    CLASS = "class"
    TEXT = "text"


@dataclass(frozen=True)
class LabelledText:
    """One example in tokens.

    Attributes:
        index: Position in the file, from 0.
        target_ids: Token ids of the target text; of a classifier, the number of the class alone.
        document: Hash of the text: equal texts are one document.
    """

    index: int
    ids: tuple[int, ...]
    target_ids: tuple[int, ...]
    target: str
    document: str

    @property
    def longest(self) -> int:
        return max(len(self.ids), len(self.target_ids))


@dataclass(frozen=True)
class LabelledTexts:
    """The examples of a file, ready for a model. ``classes`` are empty for target texts; ``truncated`` is the number of
    texts or targets that were cut.
    """

    spec: ExamplesSpec
    answers: Answers
    texts: tuple[LabelledText, ...]
    classes: tuple[str, ...]
    truncated: int

    @property
    def longest(self) -> int:
        return max(text.longest for text in self.texts)

    def fingerprint(self) -> str:
        """Return a hash of all tokens, targets and documents."""
        texts = [(text.ids, text.target_ids, text.target, text.document) for text in self.texts]
        return fingerprint({"texts": texts, "file": self.spec.name})

    def halves(self) -> tuple[tuple[LabelledText, ...], tuple[LabelledText, ...]]:
        """Return two halves, split by the hashes of texts: equal texts are in the same half."""
        order = {text: place for place, text in enumerate(sorted({text.document for text in self.texts}))}
        if len(order) < 2:
            raise ExampleError(f"{self.spec.name} has {len(order)} different texts (limit 2). Add examples")
        first, second = (tuple(t for t in self.texts if order[t.document] % 2 == half) for half in (0, 1))
        return first, second


def answers_of(spec: ModelSpec) -> Answers:
    config = spec.config()
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
    data: ExamplesSpec, model: ModelSpec, identity: ModelIdentity, max_tokens: int | None = None
) -> LabelledTexts:
    """Read and tokenise the examples of a file. Texts and targets are cut after ``max_tokens`` tokens; None uses the
    model's context, at most 2,048 tokens.
    """
    raw = read_examples(data)
    answers = answers_of(model)
    limit = longest_text(identity, max_tokens)
    config = model.config()
    classes = tuple(name for _, name in sorted((config.id2label or {}).items())) if answers is Answers.CLASS else ()
    encode = partial(_encode, identity.tokenizer, limit)
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


def _encode(tokenizer: Any, limit: int, **text: str) -> tuple[tuple[int, ...], bool]:
    """Return ids with special tokens, and True if the text was cut."""
    ids = tokenizer(**text)["input_ids"]
    if len(ids) <= limit:
        return tuple(ids), False
    return tuple(tokenizer(**text, truncation=True, max_length=limit)["input_ids"]), True


def _class_of(data: ExamplesSpec, example: RawExample, classes: Sequence[str]) -> int:
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


def labelled_loss(lm: LoadedModel, answers: Answers, texts: Sequence[LabelledText], *, summed: bool = False) -> Loss:
    """Return the loss of each example of a batch; that of a target text is the mean over its tokens, or ``summed``."""
    ids, lengths = pad([text.ids for text in texts])
    ids = ids.to(lm.device)
    targets = [text.target_ids for text in texts]
    if answers is Answers.CLASS:
        return ClassificationLoss.of(lm, ids, lengths.tolist(), [target for (target,) in targets])
    labels, label_lengths = pad(targets)
    return TargetTextLoss.of(lm, ids, lengths.tolist(), labels, label_lengths.tolist(), summed=summed)
