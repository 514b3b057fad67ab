"""Pruning from the command line: models, controls, verdict, kills, and what a user can get wrong."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import headscan
from headscan.ablation.masks import HeadMask
from headscan.cli.main import main
from headscan.engine.prompt_losses import Prompts
from headscan.errors import PruningError
from headscan.export.decilm_folder import write_decilm
from headscan.grid import Unit
from headscan.kv.plan_cache import cache_bytes
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import LoadedModel
from headscan.pruning.edited_model import Edits
from headscan.pruning.repair import repair
from headscan.pruning.save_model import save_pruned
from headscan.runs.model_identity import identify
from headscan.settings.saving_settings import PruneTexts, RecallPrompts
from headscan.steps.prune.calibration_texts import decoded, read_texts
from headscan.steps.prune.held_out_losses import HeldOutLosses
from headscan.steps.prune.prune_step import Prune
from headscan.store.store import Store
from headscan.texts import CorpusSpec
from headscan.texts.held_out_text import HeldOutText, TextChunk
from headscan.texts.token_requests import Request
from tests.instrument.pruning.texts import random_texts
from tests.jobs.conftest import make_tokenizer
from tests.small_models import make_loaded, make_model
from tests.sources import ROOT

pytestmark = pytest.mark.usefixtures("own_tasks_alone")


@pytest.fixture
def command(model_folder: Path, corpus_folder: Path, task_folder: Path, tmp_path: Path) -> list[str]:
    words = ["prune", str(model_folder), "--corpus", str(corpus_folder), "--max-tokens", "64", "--sequences", "16"]
    words += ["--tasks", "counting", "--include-path", str(task_folder), "--no-recall", "--device", "cpu"]
    return [*words, "--store", str(tmp_path / "s.duckdb"), "--out", str(tmp_path / "smaller"), "--repair", "o"]


@pytest.fixture
def bare(command: list[str]) -> list[str]:
    """The command without a repair."""
    return [*command[:-1], "none"]


def without_tasks(command: list[str]) -> list[str]:
    """Leave out the tasks and their folder."""
    place = command.index("--tasks")
    return command[:place] + command[place + 4 :]


IDS = torch.arange(2, 34)[None]


def logits(lm: headscan.LoadedModel) -> torch.Tensor:
    with torch.no_grad():
        return lm.model(IDS).logits


def test_heads_named_by_hand_go_without_repair(
    command: list[str], model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The saved model is the original with the heads zeroed, and the verdict names both controls."""
    assert main([*command[:-1], "none", "--heads", "0:1,2:3,2:0"]) == 0
    out = capsys.readouterr().out
    smaller, lm = headscan.load(str(tmp_path / "smaller")), headscan.load(str(model_folder))
    with headscan.intervene(lm, HeadMask([(0, 1), (2, 3), (2, 0)])):
        assert torch.allclose(logits(lm), logits(smaller), atol=1e-5)
    store = Store(tmp_path / "s.duckdb")
    arms = store.query("select name, kind, ablated_share, config, mask_id from arms order by started_at").to_pylist()
    assert [arm["kind"] for arm in arms] == ["baseline", "pruned", "random_pruned", "layers_dropped"]
    total = lm.grid.total_heads
    assert [round(arm["ablated_share"] * total) for arm in arms[:3]] == [0, 3, 3]
    assert store.query("select layer, head from mask_heads where mask_id = ?", [arms[1]["mask_id"]]).num_rows == 3
    found = json.loads(arms[1]["config"])
    cache = smaller.model(IDS, use_cache=True).past_key_values
    measured = cache_bytes(cache) // IDS.shape[1]
    assert found["after"]["cache_bytes"] == found["after"]["measured_cache_bytes"] == measured
    assert found["cache_left"] == measured / found["before"]["cache_bytes"]
    assert found["after"]["query_heads"] == total - 3 and found["after"]["prefill_seconds"] > 0
    assert found["weights_left"] < 1 and found["after"]["parameters"] == smaller.model.num_parameters()
    assert "layer-drop" in out and "random 0" in out
    assert "\nwritten to " in out and "loss, nats" in out
    exports = re.findall(r"^headscan export (gguf|decilm) (\S+) --out", out, re.MULTILINE)
    assert exports == [("gguf", str(tmp_path / "smaller")), ("decilm", str(tmp_path / "smaller"))]
    card = (tmp_path / "smaller" / "README.md").read_text()
    assert "Dropping 1 whole attention layer (33.3 % of heads) with the same repair: " in card
    assert "Of 1 random choice with as many heads and the same repair" in card
    assert "headscan export gguf THIS_FOLDER --out" in card
    assert arms[1]["name"] in card and "- layer 2: 0, 3" in card and "import headscan" in card
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.duckdb", "smaller"]


@pytest.mark.slow
def test_a_curve_shares_one_run_and_its_models_load_in_a_new_process(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*command, "--shares", "0.2,0.4", "--method", "damage,random", "--unit", "group"]
    assert main(words) == 0
    table = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    assert [" ".join(line.split()[:3]) for line in table[2:]] == [
        "20 % damage", "20 % random", "20 % layer-drop", "20 % random",
        "40 % damage", "40 % random", "40 % layer-drop", "40 % random",
    ]  # fmt: skip
    folders = sorted(path.name for path in (tmp_path / "smaller").iterdir())
    assert folders == ["damage-0.2", "damage-0.4", "random-0.2", "random-0.4"]
    code = (
        "import headscan; from transformers import AutoModelForCausalLM as A;"
        f" print(A.from_pretrained({str(tmp_path / 'smaller' / 'damage-0.4')!r}).generate(max_new_tokens=3).shape[1])"
    )
    assert int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout) > 1


def test_losses_are_printed_without_a_verdict(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The original's, with the heads zeroed, and of the pruned model, on text and recall prompts."""
    words = [*without_tasks(command), "--recall", "--heads", "0:1,2:3,2:0", "--skip-verdict"]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert "needle@511 is left out: the unchanged model gets " in "".join(printed)
    assert "copying@511" not in printed.out and "repaired" in printed.out
    monkeypatch.setattr("headscan.engine.prompt_losses._ABLE", 0.0)
    words[words.index("--out") + 1] = str(tmp_path / "recall")
    assert main([*words, "--json"]) == 0
    (model,) = json.loads(capsys.readouterr().out)["rows"]
    assert list(model["losses"])[1:] == ["needle@511", "copying@511"]
    card = (tmp_path / "recall" / "README.md").read_text()
    assert "needle@511, copying@511 with weight 0.3" in card
    for task, losses in model["losses"].items():
        values = [losses[key] for key in ("original", "masked", "repaired")]
        assert len(set(values)) == 3
        assert f"| {task} | {' | '.join(f'{value:.3f}' for value in values)} |" in card


@torch.no_grad()
def test_held_out_losses_are_those_of_the_scored_tokens() -> None:
    lm = make_loaded("llama")
    texts = random_texts(lm, sequences=6)
    ids = [row[:length].tolist() for row, length in zip(texts.ids, texts.lengths.tolist(), strict=True)]
    text = HeldOutText("novel", tuple(TextChunk("one", tuple(each), 9) for each in ids[:3]))
    prompts = Prompts("copying", "copying@9", tuple(Request(tuple(each), 5) for each in ids[3:]))
    heads = (headscan.Head(0, 1), headscan.Head(1, 5))
    found = HeldOutLosses(lm, text, [prompts], 64).changes(Edits(heads, repair(lm, texts, heads)))

    def loss(scored: int | None, chosen: list[list[int]]) -> float:
        parts = []
        for each in chosen:
            predicted = lm.model(torch.tensor([each])).logits[0, :-1].log_softmax(-1)
            parts.append(-predicted.gather(1, torch.tensor(each[1:])[:, None])[-(scored or len(each)) :, 0])
        return float(torch.cat(parts).mean())

    expected = {"text of novel": (None, ids[:3]), "copying@9": (5, ids[3:])}
    assert list(found) == list(expected)
    for task, (scored, chosen) in expected.items():
        assert found[task].original == pytest.approx(loss(scored, chosen), rel=1e-4)
        with headscan.intervene(lm, HeadMask(heads)):
            assert found[task].masked == pytest.approx(loss(scored, chosen), rel=1e-4)
        assert found[task].repaired != found[task].masked


def test_bytes_count_the_layers_that_are_dropped(command: list[str], model_folder: Path, tmp_path: Path) -> None:
    words = ["--kv-bytes", "KV", "--at", "100", "--method", "layer-drop", "--skip-verdict"]
    whole = headscan.load(str(model_folder))
    cache = 100 * cache_bytes(whole.model(IDS, use_cache=True).past_key_values) // IDS.shape[1]
    words[1] = f"{cache // 3}B"
    assert main([*without_tasks(command), *words]) == 0
    smaller = headscan.load(str(tmp_path / "smaller"))
    assert len({head.layer for head in smaller.grid.heads()}) == 1


@pytest.fixture(scope="module")
def many_kv_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with 6 KV heads in each of 3 layers, which divisors of 6 remove in steps of 3, 1, 1 and 1."""
    folder = tmp_path_factory.mktemp("many") / "many-kv-heads"
    make_model("llama-mha", vocabulary=300).save_pretrained(folder)
    make_tokenizer(300).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("size", [["--share", "0.55"], ["--kv-bytes", "KV", "--at", "100"]])
def test_counts_that_divide_are_served_without_padding(
    size: list[str], command: list[str], many_kv_heads: Path, tmp_path: Path
) -> None:
    whole = headscan.load(str(many_kv_heads))
    cache = 100 * cache_bytes(whole.model(IDS, use_cache=True).past_key_values) // IDS.shape[1]
    words = ["prune", str(many_kv_heads), *without_tasks(command)[2:], *size, "--skip-verdict", "--unit", "group"]
    words = [f"{cache * 8 // 18}B" if word == "KV" else word for word in words]
    assert main([*words, "--kv-counts", "divisors"]) == 0
    lm = headscan.load(str(tmp_path / "smaller"))
    counts = [site.num_key_value_heads for site in lm.grid.sites]
    assert sum(counts) == 8 and set(counts) <= {0, 1, 2, 3, 6} and counts[0]
    _, own, served = write_decilm(lm, tmp_path / "served").sizes
    assert served.kv_heads == own.kv_heads == 8


def test_a_share_below_the_smallest_step_is_refused(
    command: list[str], many_kv_heads: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["prune", str(many_kv_heads), *without_tasks(command)[2:], "--unit", "group", "--kv-counts", "divisors"]
    words += ["--method", "random", "--skip-verdict", "--share"]
    assert main([*words, "0.1"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "10 % with --kv-counts divisors removes 0 KV groups (limit 3, the smallest step of a layer)." in error


@pytest.mark.slow
def test_a_pruned_model_is_evaluated_and_pruned_again(
    command: list[str], task_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = without_tasks(command)
    assert main([*command, "--share", "0.2", "--skip-verdict"]) == 0
    once = tmp_path / "smaller"
    assert [run["kind"] for run in Store(tmp_path / "s.duckdb").runs()] == ["prune"]
    assert "Not judged." in (once / "README.md").read_text()
    heads = headscan.load(str(once)).grid.total_heads
    again = ["prune", str(once), *command[2:], "--share", "0.2", "--skip-verdict", "--out", str(tmp_path / "twice")]
    assert main(again) == 0
    assert headscan.load(str(tmp_path / "twice")).grid.total_heads == heads - round(0.2 * heads)
    asked = ["--tasks", "counting", "--include-path", str(task_folder), "--no-recall"]
    store = ["--store", str(tmp_path / "s.duckdb"), "--device", "cpu"]
    assert main(["evaluate", str(once), *asked, "--models", str(tmp_path / "twice"), *store]) == 0
    assert "model twice " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--share", "0.99"], "--share 0.99 removes all"),
        (["--share", "0.4", "--sequences", "2", "--repair", "o+v+down"], "calibration tokens of"),
        (["--heads", "9:0"], "no head 9:0"),
        (["--kv-bytes", "1KiB"], "--kv-bytes and --at go together"),
        (["--kv-bytes", "1B", "--at", "1000"], "with one unit left). Raise --kv-bytes"),
        (["--kv-bytes", "1B", "--at", "1000", "--unit", "head"], "single query heads free no KV cache"),
        (["--mask", "absent"], "no mask absent"),
        (["--heads", "0:1", "--unit", "group"], "--unit has no effect with --heads"),
        (["--heads", "0:1", "--kv-counts", "divisors"], "--kv-counts has no effect with --heads"),
        (["--share", "0.3", "--kv-counts", "divisors"], "--kv-counts divisors goes with --unit group: add it"),
        (["--share", "0.2", "--method", "entropy"], "has no finished scan"),
        (["--share", "0.2", "--tasks", "contin"], "did you mean counting"),
        (["--share", "0.2", "--run", "abc"], "--run has no effect on --method damage (only on "),
        (["--share", "0.2", "--skip-verdict"], "--tasks has no effect with --skip-verdict"),
        (["--share", "0.2", "--repair", "none", "--distill", "3"], "Repair a projection, too"),
    ],
)
def test_bad_input_leaves_nothing_behind(
    options: list[str], words: str, command: list[str], store: Store, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert main([*command, *options]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert words in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.duckdb"]


def test_recall_settings_of_a_pruning(tmp_path: Path) -> None:
    with pytest.raises(PruningError, match=r"^`prompts=12` \(limit a multiple of 8\)"):
        RecallPrompts(prompts=12)
    with pytest.raises(PruningError, match=r"^`weight=-1` \(limit 0\)"):
        RecallPrompts(weight=-1.0)
    texts = PruneTexts(CorpusSpec("texts/"))
    without = Prune(ModelSpec("model"), out=tmp_path, share=0.3, texts=texts, recall_prompts=RecallPrompts(weight=0.0))
    assert without.recall_prompts.prompts == 0
    assert Prune(ModelSpec("model"), recall=None, out=tmp_path, share=0.3, texts=texts).recall_prompts.prompts == 0


def test_a_folder_in_use_is_refused_before_any_work(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "smaller").mkdir()
    (tmp_path / "smaller" / "mine.txt").write_text("kept")
    monkeypatch.setattr("headscan.steps.open_run.identify", None)
    assert main([*command, "--share", "0.2"]) == 2
    assert "smaller is not empty. Choose a new folder" in capsys.readouterr().err
    assert (tmp_path / "smaller" / "mine.txt").read_text() == "kept"


def test_texts_that_choose_and_texts_that_judge_share_no_document(
    spec: ModelSpec, corpus_folder: Path, tmp_path: Path
) -> None:
    identity = identify(spec)
    config = PruneTexts(CorpusSpec(str(corpus_folder)), sequences=12, max_tokens=32)
    texts, held_out = read_texts(config, identity, 0)
    assert len(texts.lengths) == 6 and len(held_out.chunks) == 6
    chosen = {tuple(row[:n].tolist()) for row, n in zip(texts.ids, texts.lengths, strict=True)}
    judging = {chunk.ids for chunk in held_out.chunks}
    assert not chosen & judging
    names = {chunk.document for chunk in held_out.chunks}
    assert 1 < len(names) < len(list(corpus_folder.iterdir()))
    (tmp_path / "one.txt").write_text(" ".join(f"word{number}" for number in range(60)))
    one = PruneTexts(CorpusSpec(str(tmp_path / "one.txt")), sequences=4, max_tokens=16)
    texts, held_out = read_texts(one, identity, 32)
    assert len(texts.lengths) == len(held_out.chunks) == 2
    with pytest.raises(
        PruningError, match=r"32 calibration tokens of .* \(limit 100, .* Set `sequences` to 14 or more"
    ):
        read_texts(one, identity, 100)


def test_texts_that_judge_are_no_near_copies_of_those_that_choose(spec: ModelSpec, tmp_path: Path) -> None:
    draw = random.Random(0)
    stories = [" ".join(f"w{draw.randrange(90)}" for _ in range(40)) for _ in range(12)]
    folders = {"corpus": stories, "copies": [f"{story[:60]} other {story[60:]}" for story in stories], "mixed": []}
    folders["mixed"] = folders["copies"][:10] + [story[::-1] for story in stories[:2]]
    for name, texts in folders.items():
        (tmp_path / name).mkdir()
        for number, text in enumerate(texts):
            (tmp_path / name / f"{number}.txt").write_text(text)
    corpora = {name: CorpusSpec(str(tmp_path / name)) for name in folders}
    config = PruneTexts(corpora["corpus"], corpora["copies"], sequences=24, max_tokens=200)
    with pytest.raises(PruningError, match=r"every held-out text of .* has more than 5 % of its runs"):
        read_texts(config, identify(spec), 0)
    lines: list[str] = []
    _, held_out = read_texts(replace(config, held_out=corpora["mixed"]), identify(spec), 0, lines.append)
    assert {chunk.document for chunk in held_out.chunks} == {"10.txt", "11.txt"}
    assert lines[0].endswith("which share at most 0 % of their runs of 20 words with these (limit 5 %)")
    # Near copies in one corpus, too: of each pair one half has a text, and the other none.
    for number, text in enumerate(folders["copies"]):
        (tmp_path / "corpus" / f"copy {number}.txt").write_text(text)
    texts, held_out = read_texts(replace(config, held_out=None, sequences=48), identify(spec), 0)
    chosen = {text.split(" other ")[0][:50] for text in texts.decoded(identify(spec).tokenizer)}
    judged = {decoded(identify(spec).tokenizer, [np.array(chunk.ids)])[0][:50] for chunk in held_out.chunks}
    assert chosen and judged and not chosen & judged


def test_the_default_number_of_texts_follows_from_the_widest_repaired_projection(spec: ModelSpec) -> None:
    identity = identify(spec)
    config = PruneTexts(CorpusSpec("texts/"))
    tokens = config.longest(identity)
    assert config.half(tokens, 0) == config.half(tokens, 8 * tokens) == 64
    assert config.half(tokens, 14336) == -(-8 * 14336 // tokens) > 64
    assert replace(config, sequences=20).half(tokens, 14336) == 10


def test_a_long_document_leaves_the_next_ones_to_the_other_half(spec: ModelSpec, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, words in enumerate((600, 60, 60, 60, 60, 60)):
        (folder / f"{number}.txt").write_text(" ".join(f"{number}word{i}" for i in range(words)))
    lines: list[str] = []
    config = PruneTexts(CorpusSpec(str(folder)), sequences=2000, max_tokens=32)
    texts, held_out = read_texts(config, identify(spec), 0, lines.append)
    assert {chunk.document for chunk in held_out.chunks} == {f"{number}.txt" for number in range(1, 6)}
    assert f"{len(texts.lengths)} texts from 1 document of" in lines[0] and "from 5 documents of" in lines[0]
    with pytest.raises(PruningError, match="Choose a larger corpus"):
        read_texts(config, identify(spec), texts.tokens + 1)


@pytest.mark.parametrize(
    ("methods", "unit", "size", "expected"),
    [
        (("damage", "entropy"), "head", {"share": 0.2}, [(2, True), (0, False)]),
        (("random", "damage"), "head", {"share": 0.2}, [(0, True), (2, False)]),
        (("layer-drop", "damage"), "head", {"share": 0.2}, [(0, False), (2, True)]),
        (("random", "layer-drop"), "head", {"share": 0.2}, [(0, True), (2, False)]),
        (("layer-drop",), "head", {"share": 0.2}, [(2, False)]),
        (("random", "entropy"), "layer", {"share": 0.2}, [(0, True), (2, False)]),
        (("random", "damage"), "layer", {"share": 0.2}, [(0, False), (2, False)]),
        (("damage", "entropy", "random"), "head", {"max_divergence": 0.1}, [(2, True), (2, True), (0, True)]),
        (("damage", "layer-drop"), "group", {"kv_bytes": 1000, "at": 10}, [(2, True), (2, False)]),
    ],
)
def test_every_size_has_its_controls(
    methods: tuple[str, ...], unit: Unit, size: dict[str, Any], expected: list[tuple[int, bool]], tmp_path: Path
) -> None:
    texts = PruneTexts(CorpusSpec("texts/"))
    step = Prune(ModelSpec("model"), out=tmp_path, methods=methods, texts=texts, unit=unit, controls=2, **size)
    wanted = step.wanted(tmp_path / "scratch")
    assert [(len(each.random_folders), each.layers_folder is not None) for each in wanted] == expected


def test_a_control_as_large_as_the_model_is_left_out(
    bare: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of three layers, 90 % of the heads are three layers."""
    assert main([*bare, "--share", "0.9", "--method", "random"]) == 0
    assert "no control without whole attention layers: " in "".join(capsys.readouterr())
    assert (tmp_path / "smaller" / "config.json").exists()


def test_an_interrupted_evaluation_names_the_saved_models_and_resumes(
    bare: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("headscan.steps.prune.run_prune.run_evaluation", interrupt)
        assert main([*bare, "--heads", "0:1"]) != 0
    said = "".join(capsys.readouterr())
    assert f"the pruned models are saved: {tmp_path / 'smaller'}. Judge them" in said
    assert ".smaller-pruning keeps what is finished; the same command resumes" in said
    assert "Not judged." in (tmp_path / "smaller" / "README.md").read_text()
    assert (tmp_path / ".smaller-pruning" / "0-layers").is_dir()
    assert main([*bare, "--heads", "0:2"]) == 2
    assert "an unfinished run with other settings" in capsys.readouterr().err

    with monkeypatch.context() as patched:
        patched.setattr("headscan.steps.prune.work_folder.save_pruned", interrupt)
        patched.setattr("headscan.steps.prune.work_folder.check_reload", interrupt)
        assert main([*bare, "--heads", "0:1"]) == 0  # nothing is built again
    assert "Not judged." not in (tmp_path / "smaller" / "README.md").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.duckdb", "smaller"]
    assert main([*bare, "--heads", "0:1"]) == 2
    assert "smaller holds a finished pruned model. `headscan report` shows its verdict" in capsys.readouterr().err


@pytest.mark.parametrize("loaded_in", ["a forked process", pytest.param("a new process", marks=pytest.mark.slow)])
def test_a_model_that_computes_something_else_stays_in_the_work_folder(
    loaded_in: str,
    bare: list[str],
    new_python: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def damage(lm: LoadedModel, folder: Path, **_: object) -> None:
        save_pruned(lm, folder)
        file = folder / "model.safetensors"
        weights = load_file(file)
        weights["model.norm.weight"] *= 1.5
        weights["model.norm.weight"][::2] *= -1
        save_file(weights, file, {"format": "pt"})

    monkeypatch.setattr("headscan.steps.prune.work_folder.save_pruned", damage)
    if loaded_in == "a new process":
        monkeypatch.setattr("headscan.pruning.save_model.run_python", new_python)
    place = bare.index("--tasks")
    assert main([*bare[:place], *bare[place + 4 :], "--heads", "0:1", "--skip-verdict"]) == 2
    assert "loaded in a fresh process, has other logits: relative error" in capsys.readouterr().err
    assert not (tmp_path / "smaller").exists()


#: Kills the process at the first call of a function in a module, if its first argument fits.
_KILLED = """
import importlib, os, signal, sys
from headscan.cli.main import main
module, name, which = sys.argv[1:4]
owner = importlib.import_module(module)
*outer, name = name.split(".")
for each in outer:
    owner = getattr(owner, each)
original = getattr(owner, name)
def dies(*args, **kwargs):
    if which == "after":
        original(*args, **kwargs)
    if which != "control" or args[1].is_control:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **kwargs)
setattr(owner, name, dies)
main(sys.argv[4:])
"""
_PRUNING = "headscan.steps.prune"
#: By moment: the module and function at whose call the process dies, and when.
MOMENTS = {
    "calibration": (f"{_PRUNING}.build_models", "repair", "before"),
    "saving": ("headscan.pruning.save_model", "_write", "after"),
    "controls": (f"{_PRUNING}.build_models", "write_model", "control"),
    "before the rename": (f"{_PRUNING}.work_folder", "check_reload", "after"),
    "after the rename": (f"{_PRUNING}.run_prune", "pruned_arm", "before"),
    "evaluation": ("headscan.runs.run_context", "Run.on", "before"),
}


@pytest.mark.slow
def test_a_killed_run_resumes_to_equal_files(bare: list[str], tmp_path: Path) -> None:
    """The same command is killed at six moments, one after the other, and then ends."""
    words = [*bare[:-1], "o", "--shares", "0.2,0.4", "--controls", "2"]
    undisturbed = [*words, "--out", str(tmp_path / "whole"), "--store", str(tmp_path / "whole.duckdb")]
    assert main(undisturbed) == 0
    for moment, (module, name, when) in MOMENTS.items():
        dying = [sys.executable, "-c", _KILLED, module, name, when, *words]
        done = subprocess.run(dying, capture_output=True, text=True, cwd=ROOT, input="", check=False)
        assert done.returncode == -signal.SIGKILL, f"{moment}: {done.stderr}"
    assert main(words) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.duckdb", "smaller", "whole", "whole.duckdb"]
    whole = tmp_path / "whole"
    files = [path.relative_to(whole) for path in whole.rglob("*") if path.is_file()]
    assert len(files) > 8
    for file in files:
        if file.name not in ("README.md", "pruning.json"):  # with times
            assert (tmp_path / "smaller" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    query = "select arms.name, answers.* exclude (arm_id) from answers join arms using (arm_id) order by all"
    rows = [Store(tmp_path / name).query(query).to_pylist() for name in ("s.duckdb", "whole.duckdb")]
    assert rows[0] == rows[1] and len({row["name"] for row in rows[0]}) == 9
