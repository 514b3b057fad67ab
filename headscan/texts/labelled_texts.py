"""Labelled examples from a file, one text or a pair each, tokenised for a model, and their losses."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from headscan.errors import UnsupportedModelError, one_line
from headscan.gradients.losses import ClassificationLoss, Loss, TargetTextLoss
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import LoadedModel
from headscan.models.model_facts import is_classifier
from headscan.models.token_batches import pad
from headscan.runs.model_identity import ModelIdentity, fingerprint
from headscan.settings.corpus_settings import CorpusError, ExampleError, ExamplesSpec, longest_text
from headscan.text_tables import counted
from headscan.texts.documents import decoded
from headscan.texts.drawing import draw_items

#: Columns of one text, and of the two texts of a pair, in the order in which the model reads them.
TEXT_COLUMNS = ("text", "sentence", "source")
PAIR_COLUMNS = (
    ("premise", "hypothesis"),
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("question", "passage"),
    ("question", "context"),
    ("query", "passage"),
    ("query", "document"),
    ("claim", "evidence"),
    ("text", "text_pair"),
    ("text1", "text2"),
    ("text_a", "text_b"),
    ("sentence_a", "sentence_b"),
)
LABEL_COLUMNS = ("label", "target", "gold_label")
#: Columns of texts; next to a text, ``source`` often names where it is from.
_TEXTS = frozenset(chain(TEXT_COLUMNS, *PAIR_COLUMNS)) - {"source"}

#: A record of a file: its line or row, from 1, and its values by the name of the column.
_Record = tuple[int, Mapping[str, object]]


class RawExample(NamedTuple):
    """One example and its line in the file, from 1: a text, or a pair of them, with its label or target text."""

    line: int
    texts: tuple[str, ...]
    target: str


def read_examples(spec: ExamplesSpec) -> list[RawExample]:
    """Return the examples of a file in order, or as many as a limit draws by a hash; empty lines are skipped."""
    spec.check_file()
    suffix = Path(spec.path).suffix.lower()
    if suffix not in _RECORDS:
        raise ExampleError(f"format of {spec.path}: {suffix or 'none'} (limit {', '.join(_RECORDS)}). Convert it")
    rows = (_example(spec, line, record) for line, record in _RECORDS[suffix](spec))
    examples = list(rows)
    if spec.limit is not None:
        examples = [examples[at] for at in draw_items((repr(each[1:]) for each in examples), spec.limit)]
    if not examples:
        raise ExampleError(f"{spec.name} has 0 examples (limit 1). Add a line with a text and its label")
    if singles := [each.line for each in examples if len(each.texts) != len(examples[0].texts)]:
        one, two = ("one text", "two texts")[:: 1 if len(examples[0].texts) == 2 else -1]
        raise ExampleError(
            f"line {singles[0]} of {spec.name} has {one}, and line {examples[0].line} has {two}. Give both texts of "
            "every pair, or name one column with `text_columns`"
        )
    return examples


def _text_of(spec: ExamplesSpec) -> str:
    try:
        return "".join(decoded(Path(spec.path)))
    except CorpusError as problem:
        raise ExampleError(str(problem)) from problem


def _filled_lines(spec: ExamplesSpec) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(_text_of(spec).split("\n"), 1) if line.strip())


def _tab_records(spec: ExamplesSpec) -> Iterator[_Record]:
    # A quote in this format is a character of the text.
    return _with_header(spec, ((number, line.split("\t")) for number, line in _filled_lines(spec)))


def _comma_records(spec: ExamplesSpec) -> Iterator[_Record]:
    reader = csv.reader(io.StringIO(_text_of(spec), newline=""))
    return _with_header(spec, ((reader.line_num, cells) for cells in reader if "".join(cells).strip()))


def _with_header(spec: ExamplesSpec, rows: Iterator[tuple[int, list[str]]]) -> Iterator[_Record]:
    """Yield the records of rows of cells; without a header, a row has a text and its label."""
    names = ["text", "label"]
    known = {*TEXT_COLUMNS, *_TEXTS}
    for row, (line, cells) in enumerate(rows):
        header = [name.strip().lower() for name in cells]
        if not row and (spec.names_columns or (known & {*header} and all(name.isidentifier() for name in header))):
            names = header
        elif len(cells) != len(names):
            raise ExampleError(
                f"line {line} of {spec.name} has {len(cells)} columns (limit {len(names)}: {', '.join(names)[:80]}). "
                "Separate them by one tab or comma, and add a header if there are more, such as premise, hypothesis, "
                "label; name other columns with `text_columns`"
            )
        else:
            yield line, dict(zip(names, cells, strict=True))


def _line_records(spec: ExamplesSpec) -> Iterator[_Record]:
    for line, text in _filled_lines(spec):
        try:
            record = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as problem:
            reason = getattr(problem, "msg", "nested too deeply")
            raise ExampleError(f"line {line} of {spec.name} is not JSON: {reason}. Fix the line") from problem
        yield line, _object(spec, line, record)


def _json_records(spec: ExamplesSpec) -> Iterator[_Record]:
    try:
        records = json.loads(_text_of(spec))
    except (json.JSONDecodeError, RecursionError):
        yield from _line_records(spec)  # some tools write JSON Lines under this name
        return
    if not isinstance(records, list):
        raise ExampleError(f"{spec.name} holds no list of JSON objects. Write a list, or one object per line")
    for row, record in enumerate(records, 1):
        yield row, _object(spec, row, record)


def _object(spec: ExamplesSpec, line: int, record: object) -> Mapping[str, object]:
    if not isinstance(record, dict):
        raise ExampleError(f"line {line} of {spec.name} is not a JSON object: {str(record)[:20]}. Fix the line")
    return {name.strip().lower(): value for name, value in record.items() if value is not None}


def _parquet_records(spec: ExamplesSpec) -> Iterator[_Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(spec.path).to_pylist()
    except (pa.ArrowException, OSError) as problem:
        raise ExampleError(f"{spec.name} cannot be read: {one_line(problem)}. Write it again") from problem
    for row, record in enumerate(rows, 1):
        yield row, _object(spec, row, record)


#: What reads the records of a file, by its suffix.
_RECORDS: Mapping[str, Callable[[ExamplesSpec], Iterator[_Record]]] = {
    ".tsv": _tab_records,
    ".csv": _comma_records,
    ".jsonl": _line_records,
    ".ndjson": _line_records,
    ".json": _json_records,
    ".parquet": _parquet_records,
}


def _example(spec: ExamplesSpec, line: int, record: Mapping[str, object]) -> RawExample:
    texts = tuple(_value(spec, line, record, name, "text") for name in _text_columns(spec, line, record))
    asked = None if spec.label_column is None else spec.label_column.lower()
    label = asked or next((name for name in LABEL_COLUMNS if name in record), None)
    if label is None or label not in record:
        raise ExampleError(f"line {line}: {_no_column(spec, 'label', asked, LABEL_COLUMNS, record)}")
    return RawExample(line, texts, _value(spec, line, record, label, "label"))


def _text_columns(spec: ExamplesSpec, line: int, record: Mapping[str, object]) -> tuple[str, ...]:
    """Return the columns with the text, or with the two texts, of a record."""
    if spec.text_columns is not None:
        for name in (asked := tuple(name.lower() for name in spec.text_columns)):
            if name not in record:
                raise ExampleError(f"line {line}: {_no_column(spec, 'text', name, (), record)}")
        return asked
    label = None if spec.label_column is None else spec.label_column.lower()
    held = {*record} - {label}
    pairs = [pair for pair in PAIR_COLUMNS if held >= {*pair}]
    read = pairs[0] if pairs else tuple(name for name in TEXT_COLUMNS if name in held)[:1]
    others = [name for name in record if name in held & _TEXTS and name not in read]
    if not read and not others:
        raise ExampleError(f"line {line}: {_no_column(spec, 'text', None, TEXT_COLUMNS, record)}")
    if others:
        raise ExampleError(
            f"line {line} of {spec.name} has texts in {' and '.join([*read, *others])[:80]}: unclear which form an "
            "example. Name one column, or the two of a pair, with `text_columns`"
        )
    return read


def _value(spec: ExamplesSpec, line: int, record: Mapping[str, object], name: str, kind: str) -> str:
    value = record[name]
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError as problem:
            raise ExampleError(
                f"{name} of line {line} of {spec.name} is not UTF-8: byte {problem.start}. Convert it"
            ) from problem
    if not isinstance(value, str | int | float) or (kind == "text" and not isinstance(value, str)):
        raise ExampleError(
            f"{name} of line {line} of {spec.name} holds {type(value).__name__}, not a {kind}. Write it as one string"
        )
    if not (written := str(value).strip()):
        raise ExampleError(f"line {line} of {spec.name} has an empty {name}. Fill it in, or remove the line")
    return written


def _no_column(
    spec: ExamplesSpec, kind: str, asked: str | None, known: Sequence[str], record: Mapping[str, object]
) -> str:
    columns = ", ".join(record)[:80]
    if asked is not None:
        return f"{spec.name} has no column {asked!r}: {columns}. Choose one of its columns"
    return (
        f"{spec.name} has no {kind} column: {columns}. Name a column {' or '.join(known)}, or choose one with "
        f"`{'text_columns' if kind == 'text' else 'label_column'}`"
    )


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
        document: Hash of the text, of a pair of the first one: equal texts are one document.
        token_types: Token type id of each token (0 and 1 in the texts of a pair); empty if the model has no types, or
            all are 0.
    """

    index: int
    ids: tuple[int, ...]
    target_ids: tuple[int, ...]
    target: str
    document: str
    token_types: tuple[int, ...] = ()

    @property
    def longest(self) -> int:
        return max(len(self.ids), len(self.target_ids))

    @property
    def tokens(self) -> tuple[tuple[int, ...], ...]:
        """Ids and target ids, and token types if there are some, so that stored runs on plain texts resume."""
        return (self.ids, self.target_ids, *((self.token_types,) if self.token_types else ()))


class ExampleRequest(NamedTuple):
    """A labelled example to answer: with the log-likelihood of its target if ``scored``, otherwise with the name of one
    of ``classes``, or with a text of up to ``new_tokens``.
    """

    example: LabelledText
    answers: Answers
    scored: bool
    classes: tuple[str, ...]
    new_tokens: int

    @property
    def ids(self) -> tuple[int, ...]:
        return self.example.ids


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
        """Return a hash of all tokens with their types, targets and documents."""
        texts = [(text.ids, text.target_ids, text.target, text.document) for text in self.texts]
        types = [text.token_types for text in self.texts]
        return fingerprint({"texts": texts, "file": self.spec.name, **({"token_types": types} if any(types) else {})})

    def halves(self) -> tuple[tuple[LabelledText, ...], tuple[LabelledText, ...]]:
        """Return two halves, split by the hashes of texts: equal texts are in the same half."""
        order = {text: place for place, text in enumerate(sorted({text.document for text in self.texts}))}
        if len(order) < 2:
            raise ExampleError(f"{self.spec.name} has {counted(len(order), 'different text')} (limit 2). Add examples")
        first, second = (tuple(t for t in self.texts if order[t.document] % 2 == half) for half in (0, 1))
        return first, second


def answers_of(spec: ModelSpec) -> Answers:
    config = spec.config()
    classifies = any(name.endswith("ForSequenceClassification") for name in config.architectures or ())
    if config.is_encoder_decoder and not classifies:
        return Answers.TEXT
    if is_classifier(config):
        return Answers.CLASS
    saved = ", ".join(config.architectures or ()) or config.model_type
    raise UnsupportedModelError(
        f"{spec.folder} is a {saved}, which has no loss on labels. Load an encoder with a classification head or an "
        "encoder-decoder that writes text, or measure it on a text with `corpus`"
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
    types_of_model = getattr(config.get_text_config(), "type_vocab_size", None) or 0
    texts, cut = [], 0
    for index, example in enumerate(raw):
        read_as = dict(zip(("text", "text_pair"), example.texts, strict=False))
        encoded, long = _encode(data, example, identity.tokenizer, limit, **read_as)
        ids = tuple(encoded["input_ids"])
        types = tuple(encoded.get("token_type_ids") or ())
        # A model with one type, as RoBERTa, tells the texts of a pair apart by the separators between them.
        token_types = types if 0 < max(types, default=0) < types_of_model else ()
        if classes:
            target_ids: tuple[int, ...] = (_class_of(data, example, classes),)
            target, long_target = classes[target_ids[0]], False
        else:
            target = example.target
            encoded_target, long_target = _encode(data, example, identity.tokenizer, limit, text_target=target)
            target_ids = tuple(encoded_target["input_ids"])
        if not ids or not target_ids:
            raise ExampleError(f"line {example.line} of {data.name} has 0 tokens (limit 1). Remove the line")
        document = hashlib.sha256(example.texts[0].encode()).hexdigest()[:16]
        texts.append(LabelledText(index, ids, target_ids, target, document, token_types))
        cut += long or long_target
    return LabelledTexts(data, answers, tuple(texts), classes, cut)


def _encode(
    data: ExamplesSpec, example: RawExample, tokenizer: Any, limit: int, **texts: str
) -> tuple[Mapping[str, Any], bool]:
    """Return a tokenizer's output with special tokens, and True if a text was cut. Of a pair, the longer text is cut
    until both are equally long.
    """
    encoded = tokenizer(**texts)
    if len(encoded["input_ids"]) <= limit:
        return encoded, False
    added = tokenizer.num_special_tokens_to_add(pair=len(texts) > 1)
    if limit < added + len(texts):
        raise ExampleError(
            f"`max_tokens={limit}` for line {example.line} of {data.name} (limit {added + len(texts)}: {added} special "
            f"tokens, and 1 of each text). Raise `max_tokens`"
        )
    return tokenizer(**texts, truncation="longest_first", max_length=limit), True


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
        types = None
        if any(text.token_types for text in texts):
            types, _ = pad([text.token_types or (0,) * len(text.ids) for text in texts])
        return ClassificationLoss.of(lm, ids, lengths.tolist(), [target for (target,) in targets], token_type_ids=types)
    labels, label_lengths = pad(targets)
    return TargetTextLoss.of(lm, ids, lengths.tolist(), labels, label_lengths.tolist(), summed=summed)
