"""Examples are read as they are written, and every fault is named with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from headscan.errors import UnsupportedModelError
from headscan.model_spec import ModelSpec
from headscan.pipelines.measure.labelled_texts import LabelledTexts, read_examples, read_labelled
from headscan.pipelines.runs.model_identity import identify
from headscan.pipelines.settings.corpus_settings import ExampleError, ExamplesSpec
from tests.pipelines.ablate.labelled_models import LABELLED, TRANSLATED, save_classifier, save_translator, write_lines


def written(folder: Path, *lines: str, name: str = "d.tsv") -> ExamplesSpec:
    return ExamplesSpec(str(write_lines(folder / name, list(lines))))


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("d.tsv", ["a b\tgood", "", "c\t0"]),
        ("d.tsv", ["id\tlabel\ttext", "7\tgood\ta b", "", "8\t0\tc"]),
        ("d.jsonl", ['{"text": "a b", "label": "good"}', "", '{"sentence": "c", "label": 0}']),
        ("d.jsonl", ['{"source": "a b", "target": "good", "n": 1}', "", '{"source": "c", "target": "0"}']),
    ],
)
def test_every_format_gives_the_same_examples(tmp_path: Path, name: str, lines: list[str]) -> None:
    found = read_examples(written(tmp_path, *lines, name=name))
    assert [(text, target) for _, text, target in found] == [("a b", "good"), ("c", "0")]
    assert [lines[line - 1] for line, _, _ in found] == [line for line in lines[-3:] if line]
    assert len(read_examples(ExamplesSpec(str(tmp_path / name), limit=1))) == 1


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("d.tsv", ["a b\tgood", "c"], r"line 2 of d.tsv has 1 columns \(limit 2: text and label\)"),
        ("d.tsv", ["text\tid", "a\t1"], "d.tsv has no label column: text, id. Name a column label or target"),
        ("d.tsv", ["a\t "], "line 1 of d.tsv has an empty label"),
        ("d.tsv", [""], r"d.tsv has 0 examples \(limit 1\)"),
        ("d.tsv", ["text\tlabel"], r"d.tsv has 0 examples \(limit 1\)"),
        ("d.csv", ["a,b"], r"format of .*d.csv: .csv \(limit .tsv, .jsonl\)"),
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
    with pytest.raises(ExampleError, match="not UTF-8: byte 0"):
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


def test_decoders_have_no_loss_on_labels(tmp_path: Path, model_folder: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM, which has no loss on labels"):
        labelled(tmp_path, model_folder, *LABELLED)


def test_targets_become_tokens(tmp_path: Path) -> None:
    folder = save_translator(tmp_path / "m")
    found = labelled(tmp_path, folder, *TRANSLATED)
    tokenizer = identify(ModelSpec(str(folder))).tokenizer
    assert found.texts[1].target_ids == tuple(tokenizer("1 to counts bo")["input_ids"])
    assert found.texts[1].target == "1 to counts bo" and found.classes == ()
