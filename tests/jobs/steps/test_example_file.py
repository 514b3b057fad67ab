"""Examples are read as they are written, and every fault is named with its line."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import processors
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

import headscan
from headscan.architectures import ENCODERS
from headscan.errors import SequenceError, UnsupportedModelError
from headscan.model_spec import ModelSpec
from headscan.runs.model_identity import identify
from headscan.settings.corpus_settings import ExampleError, ExamplesSpec
from headscan.texts.labelled_texts import (
    PAIR_COLUMNS,
    Answers,
    LabelledTexts,
    labelled_loss,
    read_examples,
    read_labelled,
)
from tests.jobs.steps.labelled_models import LABELLED, TRANSLATED, save_classifier, save_translator, write_lines


def written(folder: Path, *lines: str, name: str = "d.tsv") -> ExamplesSpec:
    return ExamplesSpec(str(write_lines(folder / name, list(lines))))


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("d.tsv", ["a b\tgood", "", "c\t0"]),
        ("d.tsv", ["id\tlabel\ttext", "7\tgood\ta b", "", "8\t0\tc"]),
        ("d.jsonl", ['{"text": "a b", "label": "good"}', "", '{"sentence": "c", "label": 0}']),
        ("d.jsonl", ['{"source": "a b", "target": "good", "n": 1}', "", '{"source": "c", "target": "0"}']),
        ("d.csv", ["a b,good", "", "c,0"]),
        ("d.tsv", ["source\tlabel\ttext", "wiki\tgood\ta b", "", "web\t0\tc"]),
        ("d.csv", ["Text,id,label", "a b,7,good", "", '"c",8,0']),
        ("d.ndjson", ['{"text": "a b", "label": "good"}', "", '{"text": "c", "label": 0}']),
    ],
)
def test_every_format_gives_the_same_examples(tmp_path: Path, name: str, lines: list[str]) -> None:
    found = read_examples(written(tmp_path, *lines, name=name))
    assert [(texts, target) for _, texts, target in found] == [(("a b",), "good"), (("c",), "0")]
    assert [lines[line - 1] for line, _, _ in found] == [line for line in lines[-3:] if line]
    assert len(read_examples(ExamplesSpec(str(tmp_path / name), limit=1))) == 1


def test_a_limit_draws_examples_by_their_content(tmp_path: Path) -> None:
    """A file that is sorted by label gives examples of both labels."""
    lines = [f"text {number}\t{number // 50}" for number in range(100)]
    before: set[str] = set()
    for limit in (2, 20, 60, 100):
        found = []
        for name, rows in (("one.tsv", lines), ("other.tsv", lines[::-1])):
            path = written(tmp_path, *rows, name=name)
            examples = read_examples(ExamplesSpec(path.path, limit=limit))
            assert [each.line for each in examples] == sorted(each.line for each in examples)
            found.append({each.texts[0] for each in examples})
        assert found[0] == found[1] > before and len(found[0]) == limit
        before = found[0]
    assert sum(int(text.split()[1]) < 50 for text in before if text in found[0]) > 5 and len(before) == 100


PAIRS = [("a b", 'c "d', "good"), ("e", "f, g", "0")]


def write_pairs(path: Path, *names: str, encoding: str = "utf-8") -> ExamplesSpec:
    """Write the pairs as a file of the format of its suffix, with these names of columns."""
    records = [dict(zip(names, row, strict=True)) for row in PAIRS]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    elif path.suffix == ".tsv":
        path.write_text("\n".join("\t".join(row) for row in (names, *PAIRS)), encoding=encoding)
    elif path.suffix == ".csv":
        with path.open("w", encoding=encoding, newline="") as file:
            csv.writer(file).writerows([names, *PAIRS])
    elif path.suffix == ".json":
        path.write_text(json.dumps(records), encoding=encoding)
    else:
        path.write_text("\n".join(map(json.dumps, records)), encoding=encoding)
    return ExamplesSpec(str(path))


@pytest.mark.parametrize("suffix", ["tsv", "csv", "jsonl", "ndjson", "json", "parquet"])
@pytest.mark.parametrize("names", [("premise", "hypothesis", "label"), ("Sentence1", "sentence2", "gold_label")])
def test_every_format_gives_the_same_pairs(tmp_path: Path, suffix: str, names: tuple[str, ...]) -> None:
    found = read_examples(write_pairs(tmp_path / f"d.{suffix}", *names))
    assert [(*texts, target) for _, texts, target in found] == PAIRS


@pytest.mark.parametrize("suffix", ["tsv", "csv", "jsonl", "json"])
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_files_with_a_byte_order_mark_are_read(tmp_path: Path, suffix: str, encoding: str) -> None:
    found = read_examples(write_pairs(tmp_path / f"d.{suffix}", "question", "sentence", "label", encoding=encoding))
    assert [(*texts, target) for _, texts, target in found] == PAIRS


@pytest.mark.parametrize("pair", PAIR_COLUMNS)
def test_the_texts_of_a_pair_have_the_order_of_their_names(tmp_path: Path, pair: tuple[str, str]) -> None:
    record = {"label": 1, pair[1]: "second", "id": 7, pair[0]: "first"}
    [found] = read_examples(written(tmp_path, json.dumps(record), name="d.jsonl"))
    assert found.texts == ("first", "second")


def test_columns_can_be_named(tmp_path: Path) -> None:
    spec = write_pairs(tmp_path / "d.tsv", "#1 String", "#2 String", "Quality")
    found = read_examples(replace(spec, text_columns=("#1 String", "#2 String"), label_column="Quality"))
    assert [(*texts, target) for _, texts, target in found] == PAIRS
    [first, _] = read_examples(replace(spec, text_columns=("#2 String",), label_column="Quality"))
    assert first.texts == ('c "d',)
    with pytest.raises(ExampleError, match=r"line 2: d.tsv has no column 'title': #1 string, #2 string, quality"):
        read_examples(replace(spec, text_columns=("title",)))
    for wrong in ((), ("a", "b", "c"), ("a", "a")):
        with pytest.raises(ExampleError, match=r"`text_columns=.*limit 1 column, or 2 different ones of a pair"):
            replace(spec, text_columns=wrong)


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("d.tsv", ["a b\tgood", "c"], r"line 2 of d.tsv has 1 columns \(limit 2: text, label\)"),
        ("d.tsv", ["text\tid", "a\t1"], "d.tsv has no label column: text, id. Name a column label or target"),
        ("d.tsv", ["a\t "], "line 1 of d.tsv has an empty label"),
        ("d.tsv", [""], r"d.tsv has 0 examples \(limit 1\)"),
        ("d.tsv", ["text\tlabel"], r"d.tsv has 0 examples \(limit 1\)"),
        ("d.txt", ["a,b"], r"format of .*d.txt: .txt \(limit .tsv, .csv, .jsonl, .ndjson, .json, .parquet\)"),
        ("d.tsv", ["a\tb\tgood"], "line 1 of d.tsv has 3 columns .*add a header if there are more, such as premise"),
        ("d.jsonl", ['{"text": "a", "hypothesis": "b", "label": 1}'], "has texts in text and hypothesis: unclear"),
        ("d.jsonl", ['{"text": "a", "sentence": "b", "label": 1}'], "has texts in text and sentence: unclear"),
        ("d.jsonl", ['{"question": "a", "label": 1}'], "has texts in question: unclear which form an example"),
        (
            "d.jsonl",
            ['{"premise": "a", "hypothesis": "b", "question": "c", "label": 1}'],
            "has texts in premise and hypothesis and question: unclear",
        ),
        (
            "d.jsonl",
            ['{"text": "a", "text_pair": "b", "label": 1}', '{"text": "a", "text_pair": null, "label": 1}'],
            "line 2 of d.jsonl has one text, and line 1 has two texts",
        ),
        ("d.jsonl", ['{"premise": "a", "hypothesis": " ", "label": 1}'], "line 1 of d.jsonl has an empty hypothesis"),
        ("d.jsonl", ['{"text": ["a", "b"], "label": 1}'], "text of line 1 of d.jsonl holds list, not a text"),
        ("d.json", ['{"text": "a"}'], "line 1: d.json has no label column|holds no list of JSON objects"),
        ("d.json", ["[7]"], "line 1 of d.json is not a JSON object: 7"),
        ("d.parquet", ["PAR1"], "d.parquet cannot be read: "),
        ("d.jsonl", ['{"text": "a"}'], "line 1: d.jsonl has no label column: text"),
        ("d.jsonl", ['{"label": "a"}'], "line 1: d.jsonl has no text column: label"),
        ("d.jsonl", ['{"text": "a", "label": 1}', "{"], "line 2 of d.jsonl is not JSON"),
        ("d.jsonl", ["[1]"], "line 1 of d.jsonl is not a JSON object"),
    ],
)
def test_faults_are_named(tmp_path: Path, name: str, lines: list[str], message: str) -> None:
    with pytest.raises(ExampleError, match=message):
        read_examples(written(tmp_path, *lines, name=name))


def test_absent_files_and_other_encodings_are_named(tmp_path: Path) -> None:
    with pytest.raises(ExampleError, match=r"no file .*e.tsv"):
        read_examples(ExamplesSpec(str(tmp_path / "e.tsv")))
    (tmp_path / "l.tsv").write_bytes("é\t1\n".encode("latin-1"))
    with pytest.raises(ExampleError, match=r"l.tsv is not text: not UTF-8 at byte 0"):
        read_examples(ExamplesSpec(str(tmp_path / "l.tsv")))


def labelled(folder: Path, model: Path, *lines: str) -> LabelledTexts:
    spec = ModelSpec(str(model))
    return read_labelled(written(folder, *lines), spec, identify(spec), 12)


def test_examples_become_tokens_and_classes(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "m")
    found = labelled(tmp_path, folder, *LABELLED, "one more " * 20 + "\t2", LABELLED[0])
    tokenizer = identify(ModelSpec(str(folder))).tokenizer
    assert found.classes == ("bad", "fine", "good") and found.truncated == 1
    assert found.texts[1].ids == tuple(tokenizer("bo counts to 1")["input_ids"])
    assert [text.target_ids for text in found.texts[:3]] == [(0,), (1,), (2,)]
    assert (found.texts[12].target, len(found.texts[12].ids)) == ("good", 12)
    first, second = found.halves()
    assert sorted(text.index for text in (*first, *second)) == list(range(14))
    assert abs(len(first) - len(second)) <= 2
    assert not {text.document for text in first} & {text.document for text in second}
    with pytest.raises(ExampleError, match=r"label of line 2 of d.tsv: 'so' \(limit bad, fine, good, or 0 to 2\)"):
        labelled(tmp_path, folder, LABELLED[0], "a\tso")


def test_models_without_a_loss_on_labels_are_refused(tmp_path: Path, model_folder: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM, which has no loss on labels"):
        labelled(tmp_path, model_folder, *LABELLED)
    folder = save_translator(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["BartForSequenceClassification"]}))
    with pytest.raises(UnsupportedModelError, match="is a BartForSequenceClassification, which has no loss on labels"):
        labelled(tmp_path, folder, *LABELLED)


def test_targets_become_tokens(tmp_path: Path) -> None:
    folder = save_translator(tmp_path / "m")
    found = labelled(tmp_path, folder, *TRANSLATED)
    tokenizer = identify(ModelSpec(str(folder))).tokenizer
    assert found.texts[1].target_ids == tuple(tokenizer("1 to counts bo")["input_ids"])
    assert found.texts[1].target == "1 to counts bo" and found.classes == ()


def save_pair_classifier(folder: Path, family: str) -> Path:
    """Save a random classifier with a tokenizer that separates the texts of a pair, and gives them types 0 and 1."""
    save_classifier(folder, family)
    types = ["token_type_ids"] if family in ("bert", "electra") else []
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, model_input_names=["input_ids", *types])
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ENCODERS)
def test_a_pair_is_read_as_transformers_reads_it(tmp_path: Path, family: str) -> None:
    folder = save_pair_classifier(tmp_path / "m", family)
    rows = [("ada counts to 4", "4 is even", 2), ("bo", "bo counts to 11 and on", 0)]
    lines = [json.dumps({"premise": a, "hypothesis": b, "label": label}) for a, b, label in rows]
    data, spec = written(tmp_path, *lines, name="d.jsonl"), ModelSpec(str(folder))
    found = read_labelled(data, spec, identify(spec))
    tokenizer = identify(spec).tokenizer
    assert [text.ids for text in found.texts] == [tuple(tokenizer(a, b)["input_ids"]) for a, b, _ in rows]
    lm = headscan.load(folder)
    has_types = family in ("bert", "electra")
    assert [any(text.token_types) for text in found.texts] == [has_types, has_types]
    loss = labelled_loss(lm, Answers.CLASS, found.texts)
    entropies = headscan.importance(lm, lm_ids := loss.texts["input_ids"], loss.lengths, loss=loss)["entropy"]
    assert lm_ids.shape[0] == 2
    plain = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    for row, (a, b, label) in enumerate(rows):
        kept = ["input_ids", "token_type_ids"] if has_types else ["input_ids"]
        inputs = {name: torch.tensor([tokenizer(a, b)[name]]) for name in kept}
        with torch.no_grad():
            out = plain(**inputs, output_attentions=True)
        expected = torch.nn.functional.cross_entropy(out.logits, torch.tensor([label]))
        assert loss.losses(lm)[row].item() == pytest.approx(expected.item(), abs=1e-5)
        for layer, weights in enumerate(out.attentions):
            plainly = -torch.special.xlogy(weights, weights).sum(-1).mean(-1)[0]
            torch.testing.assert_close(entropies[row, layer], plainly, atol=2e-5, rtol=1e-4)


def test_a_pair_is_cut_at_its_longer_text(tmp_path: Path) -> None:
    folder = save_pair_classifier(tmp_path / "m", "bert")
    rows = [("one more " * 20, "ada", 0), ("ada", "one more " * 20, 1), ("one more " * 20, "two less " * 30, 2)]
    lines = ["premise\thypothesis\tlabel", *("\t".join(map(str, row)) for row in rows)]
    spec = ModelSpec(str(folder))
    found = read_labelled(written(tmp_path, *lines), spec, identify(spec), 25)
    short = len(identify(spec).tokenizer("ada", add_special_tokens=False)["input_ids"])
    seconds = [sum(text.token_types) - 1 for text in found.texts]  # the last separator has the second type
    assert found.truncated == 3 and {len(text.ids) for text in found.texts} == {25}
    assert seconds[0] == short and seconds[1] == 22 - short and seconds[2] == 11
    with pytest.raises(ExampleError, match=r"`max_tokens=4` for line 2 of d.tsv \(limit 5: 3 special tokens, and 1 of"):
        read_labelled(written(tmp_path, *lines), spec, identify(spec), 4)


def test_the_second_text_of_a_pair_counts(tmp_path: Path) -> None:
    """Examples that differ in their second text are other examples, in the half of their first text."""
    folder = save_pair_classifier(tmp_path / "m", "bert")
    spec = ModelSpec(str(folder))
    header = "premise\thypothesis\tlabel"

    def texts(*lines: str) -> LabelledTexts:
        return read_labelled(written(tmp_path, header, *lines), spec, identify(spec))

    assert texts("a\tb\t0").fingerprint() != texts("a\tc\t0").fingerprint()
    shared = texts("a\tb\t0", "a\tc\t1", "d\te\t2")
    assert sorted(len(half) for half in shared.halves()) == [1, 2]


def test_token_types_are_checked(tmp_path: Path) -> None:
    lm = headscan.load(save_pair_classifier(tmp_path / "m", "bert"))
    ids = torch.tensor([[0, 5, 1, 6, 1, 0]])
    with pytest.raises(SequenceError, match=r"token_type_ids has shape \(6,\) and dtype torch.int64"):
        headscan.collect(lm, ids, token_type_ids=torch.tensor([0, 0, 0, 1, 1, 0]))
    padded = headscan.collect(lm, ids, [5], token_type_ids=torch.tensor([[0, 0, 0, 1, 1, 9]]))["entropy"]
    whole = headscan.collect(lm, ids[:, :5], token_type_ids=torch.tensor([[0, 0, 0, 1, 1]]))["entropy"]
    assert torch.equal(padded, whole) and not torch.allclose(whole, headscan.collect(lm, ids[:, :5])["entropy"])
    other = headscan.load(save_classifier(tmp_path / "other", "distilbert"))
    with pytest.raises(SequenceError, match=r"whose tokens have no types. Leave them out"):
        headscan.collect(other, ids, token_type_ids=torch.zeros_like(ids))
