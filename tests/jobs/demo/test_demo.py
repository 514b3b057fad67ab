"""The bundled model matches its card, and its task is fair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import headscan
from headscan.cli.main import main
from headscan.demo import MODEL_FOLDER
from headscan.models.token_batches import pad
from headscan.store.store import Store
from headscan.texts import CorpusSpec, TokenConfig, open_corpus, sequences
from headscan.texts.continuation_task import make_questions
from headscan.texts.shared_runs import MOST_SHARED, shares_with
from headscan.texts.stdlib_files import HELD_OUT_MODULES, held_out_files, seen_modules, standard_library_files
from pipelines.demo_model.training_files import training_files


@pytest.fixture(scope="module")
def lm() -> headscan.LoadedModel:
    return headscan.load(MODEL_FOLDER, device="cpu", dtype="float32")


def held_out_batch(lm: headscan.LoadedModel, every: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every so many-th sequence of the held-out modules."""
    corpus = open_corpus(CorpusSpec("python-stdlib-heldout"))
    rows = [s.ids for s in sequences(corpus, lm.require_tokenizer(), TokenConfig(512, mode="chunk", min_tokens=256))]
    return pad(rows[::every])


def test_the_model_is_the_one_of_its_card(lm: headscan.LoadedModel) -> None:
    facts = json.loads((MODEL_FOLDER / "training.json").read_text())
    assert sum(p.numel() for p in lm.model.parameters()) == facts["parameters"]
    assert lm.grid.shape == (6, 8)
    assert lm.grid.sites[0].num_key_value_heads == 4
    assert lm.require_tokenizer()("x = 1")["input_ids"][0] == lm.require_tokenizer().bos_token_id
    size = sum(path.stat().st_size for path in MODEL_FOLDER.iterdir())
    assert size < 16_000_000
    card = (MODEL_FOLDER / "README.md").read_text()
    assert f"{facts['history'][-1]['loss']:.3f}" in card
    assert all(name in card for name in HELD_OUT_MODULES)


def test_the_model_predicts_modules_it_never_saw(lm: headscan.LoadedModel) -> None:
    ids, lengths = held_out_batch(lm, 30)
    facts = json.loads((MODEL_FOLDER / "training.json").read_text())
    with torch.no_grad():
        logits = lm.model(input_ids=ids).logits[:, :-1]
    real = torch.arange(ids.shape[1] - 1) < lengths[:, None] - 1
    loss = torch.nn.functional.cross_entropy(logits[real], ids[:, 1:][real])
    assert abs(loss - facts["history"][-1]["loss"]) < 0.3


def test_heads_differ_as_trained_heads_do(lm: headscan.LoadedModel) -> None:
    ids, lengths = held_out_batch(lm, 60)
    stats = headscan.collect(lm, ids, lengths)
    norms = headscan.score(stats, "output_norm_ln").mean(0)
    assert norms.min() < 0.75
    assert norms.max() > 1.5
    assert stats["entropy"].mean(0).max() > 2 * stats["entropy"].mean(0).min()
    assert stats["previous_token_weight"].mean(0).max() > 0.3


def test_training_and_the_built_in_corpus_never_see_a_held_out_module() -> None:
    held_out = held_out_files()
    assert len(held_out) >= 20
    names = {path.name for path in held_out}
    seen = [path for package, path in training_files(packages=["pip"]) if package == "stdlib"]
    assert len(seen) > 300
    assert not names & {path.name for path in seen if path.parent == held_out[0].parent}
    assert set(held_out) < set(standard_library_files())
    seen, held_out = ({path.name for path in files()} for files in (seen_modules, held_out_files))
    assert len(seen) > 80
    assert len(held_out) > 20
    assert not seen & held_out
    shares = shares_with(
        *([path.read_text(errors="replace") for path in files()] for files in (held_out_files, seen_modules))
    )
    assert max(shares) <= MOST_SHARED


def test_questions_are_deterministic_and_fair() -> None:
    modules = held_out_files()[-8:]
    questions = make_questions(modules, 150)
    assert questions == make_questions(modules, 150)
    assert len(questions) == 150
    texts = {path.name: path.read_text() for path in modules}
    for question in questions:
        text, choices = texts[question["module"]], question["choices"]
        assert len(set(choices)) == 4
        assert {len(choice) for choice in choices} == {80}
        assert question["context"] + choices[question["answer"]] in text
        assert not any(question["context"] + c in text for i, c in enumerate(choices) if i != question["answer"])
        assert len({len(choice[1:]) - len(choice[1:].lstrip(" ")) for choice in choices}) == 1
    counts = [sum(q["answer"] == i for q in questions) for i in range(4)]
    assert min(counts) > 20


@pytest.mark.slow
def test_the_demo_finds_a_safe_saving(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--out", str(tmp_path)]) == 0
    assert "largest safe" in capsys.readouterr().out
    answers = json.loads((tmp_path / "answers.json").read_text())
    assert any(saving["safe"] is not None for saving in answers["savings"])
    assert (tmp_path / "report.html").stat().st_size > 100_000
    store = Store(tmp_path / "study.duckdb")
    accuracy = store.query("select accuracy from arm_summary where arm = 'baseline' and task = '(all)'").to_pylist()
    assert accuracy[0]["accuracy"] > 0.6
