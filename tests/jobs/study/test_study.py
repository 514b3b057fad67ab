"""A study of the demo model to its end, its settings and its texts."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headscan.ablation.masks import HeadMask
from headscan.catalog import RECALL_FAMILIES
from headscan.cli.main import main, read_command
from headscan.cluster.pool import InProcessPool, Pool
from headscan.engine.arms import Arm
from headscan.errors import HeadscanError, PruningError
from headscan.model_spec import ModelSpec
from headscan.plans import load_plan
from headscan.plans.window_search import search_passes
from headscan.runs.head_orders import imported_heads
from headscan.runs.progress import time_text
from headscan.runs.run_context import Run
from headscan.settings.evaluation_settings import TaskConfig
from headscan.steps.prune.prune_step import Prune
from headscan.steps.prune.run_prune import run_prune
from headscan.store.output_files import write_text
from headscan.store.records import ArmKind
from headscan.store.store import Store
from headscan.study import study_time
from headscan.study.question_costs import limits_per_task, question_costs
from headscan.study.run_study import _Study, run_study
from headscan.study.study_answer import ABLATED, CACHED, REMOVED, Saving, StudyAnswer
from headscan.study.study_candidates import write_heads
from headscan.study.study_clock import StudyClock
from headscan.study.study_step import Study, StudyError, read_study, resumed, write_study
from headscan.study.study_texts import _PARTS, document_of, split_texts
from headscan.study.study_time import PassCosts, QuestionCosts, decided, harmless_change, study_seconds
from headscan.texts import CorpusSpec
from headscan.texts.continuation_task import write_task
from headscan.texts.tasks import Tasks
from headscan.verdicts.judge import judge
from headscan.verdicts.metrics import Increase
from headscan.verdicts.ordered_shares import Outcome, ShareVerdict, judge_shares, largest_safe
from tests.jobs.conftest import THREADS

SPEC = ModelSpec("demo", "float32")
#: The run of a study's questions.
_ASKED = "SELECT DISTINCT run_id FROM answers JOIN arms USING (arm_id) WHERE task = 'continuation'"


def tiny(out: Path, **changes: object) -> Study:
    settings = {
        "max_tokens": 88,
        "criteria": ("output_norm_ln", "importance_recall"),
        "shares": (0.02, 0.5),
        "window_shares": (0.5,),
        "prune_shares": (0.05,),
        "sequences": 8,
        "judged_texts": 24,
        "questions": 8,
        "recall_questions": 8,
        "search": False,
        "prune_by": "criterion",
    }
    return Study(SPEC, CorpusSpec("python-stdlib-modules"), out, **settings | changes)  # type: ignore[arg-type]


def open_study(out: Path, **settings: Any) -> Study:
    """Return a study in which most is left to the time."""
    return Study(SPEC, CorpusSpec("texts/"), out, max_tokens=256, **settings)


def run(config: Study, lines: list[str]) -> StudyAnswer:
    def opened(spec: ModelSpec) -> Pool:
        return InProcessPool(spec, THREADS)

    with Run(SPEC, Store(Path(config.out) / "study.duckdb"), opened, say=lines.append) as model_run:
        return run_study(config, model_run)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Study, StudyAnswer, list[str]]]:
    config, lines = tiny(tmp_path_factory.mktemp("study") / "out"), list[str]()
    yield config, run(config, lines), lines


def test_a_study_ends_with_answers_and_files(found: tuple[Study, StudyAnswer, list[str]]) -> None:
    config, answer, lines = found
    out = Path(config.out)
    assert [each.kind for each in answer.savings] == [ABLATED, CACHED, REMOVED]
    assert any("tokens per second" in line for line in lines)
    assert any(line.startswith("\n3. importance, criterion: ") for line in lines)
    heads = answer.savings[0]
    # Half of the heads cost far more than the limit: the loss alone says so, and no question is asked.
    assert answer.losses[heads.tried[-1][0]].low > config.max_loss
    for saving in answer.savings:
        assert all(each.outcome is Outcome.SAFE for each in saving.judged[:-1])
        assert (saving.safe is None) == (not saving.file)
    # With 8 questions nothing can be shown.
    assert all(each.safe is None for each in answer.savings)
    assert {each.judged[-1].outcome for each in answer.savings} <= {Outcome.NOT_SHOWN, Outcome.LOSES}
    text = str(answer)
    assert "none shown to be safe" in text and "too few questions" in text and "loses (loss)" in text
    written = json.loads((out / "answers.json").read_text())
    assert written["questions"] == 8
    assert [each["kind"] for each in written["savings"]] == ["heads ablated", "KV cache", "heads removed"]
    labels = [[verdict["label"] for verdict in each["judged"]] for each in written["savings"]]
    assert labels == [[verdict.label for verdict in each.judged] for each in answer.savings]
    report = (out / "report.html").read_text()
    assert "<html" in report[:200].lower()
    # Its sentences follow the rule of the answers, which counts the loss of another run, for three kinds of savings.
    store = Store(out / "study.duckdb")
    (asked,) = store.query(_ASKED).to_pylist()
    verdict = judge(store, asked["run_id"])
    outcomes = verdict.by_name
    assert all(escape(sentence) in report for sentence in verdict.sentences())
    judged = [each for saving in answer.savings for each in saving.judged if each.accuracy is not None]
    assert judged
    for each in judged:
        arm = outcomes[each.name]
        assert (arm.outcome, arm.why) == (each.outcome, each.why) and arm.value("loss") is not None
    plan = load_plan(out / "plans" / "0.5.json")
    assert len(plan.window_heads) == 12
    # The default engine is vLLM, which has windows in blocks, and takes two of four KV groups of a layer at once.
    assert (answer.engine, plan.block) == ("vllm", 32)
    assert [share for _, share in answer.savings[2].tried] == [4 / 48]
    assert (out / "pruned" / "model.safetensors").is_file()


def test_the_same_command_measures_nothing_again(found: tuple[Study, StudyAnswer, list[str]]) -> None:
    config, answer, _ = found
    store = Store(Path(config.out) / "study.duckdb")
    rows = store.query("SELECT count(*) FROM answers")[0][0].as_py()
    lines: list[str] = []
    again = run(config, lines)
    assert any("resuming" in line for line in lines)
    assert again.savings == answer.savings and again.losses == answer.losses
    assert store.query("SELECT count(*) FROM answers")[0][0].as_py() == rows


def test_a_plan_that_its_own_held_out_prompts_condemn_is_not_asked(
    found: tuple[Study, StudyAnswer, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, answer, _ = found
    out = tmp_path / "out"
    shutil.copytree(config.out, out)
    lost = "copying +0.7600 [+0.3000, +1.2000] with 71 % of the right answer tokens left"
    for module in ("run_study", "study_candidates"):
        monkeypatch.setattr(f"headscan.study.{module}.shown_loss", lambda plan, max_loss: lost)
    store, lines = Store(out / "study.duckdb"), list[str]()
    rows = store.query("SELECT count(*) FROM answers")[0][0].as_py()
    again = run(replace(config, out=out), lines)
    assert store.query("SELECT count(*) FROM answers")[0][0].as_py() == rows
    cache = next(saving for saving in again.savings if saving.kind == CACHED)
    [verdict] = cache.judged
    assert (verdict.outcome, verdict.label) == (Outcome.LOSES, "loses (held-out prompts)")
    assert verdict.accuracy is None and verdict.why == f"{lost}, on the plan's own held-out prompts"
    assert cache.next() == f"50 % loses {verdict.why}"
    assert f"It loses {lost}, so no questions are asked" in "\n".join(lines)
    others = [saving.judged for saving in answer.savings if saving.kind != CACHED]
    assert [saving.judged for saving in again.savings if saving.kind != CACHED] == others


def test_the_plan_that_was_tried_is_kept_named_and_reported(found: tuple[Study, StudyAnswer, list[str]]) -> None:
    config, answer, lines = found
    cache = next(saving for saving in answer.savings if saving.kind == CACHED)
    tried = Path(config.out) / "plans" / "0.5.json"
    assert (cache.file, cache.tried_file) == ("", str(tried))
    assert f"{tried} (tried, not safe)" in str(answer)
    [(name, words)] = cache.own_losses.items()
    assert words.startswith("text ") and "copying " in words and name == cache.tried[0][0]
    assert f"KV cache 50 %, on the held-out prompts of its plan, in nats per token: {words}" in str(answer)
    assert any(
        line.startswith(f"plan of 0.5, on its own held-out prompts, in nats per token: {words}") for line in lines
    )
    plan, report = load_plan(tried), (Path(config.out) / "report.html").read_text()
    layer = plan.window_heads[0][0]
    assert f">{' '.join(str(head) for at, head in plan.window_heads if at == layer)}</td>" in report
    assert f"The file of the tried share, which is not safe: {tried}" in report
    removed = next(saving for saving in answer.savings if saving.kind == REMOVED)
    assert Path(removed.tried_file).is_dir()


def test_heads_that_recall_needs_are_important(found: tuple[Study, StudyAnswer, list[str]]) -> None:
    """The criterion is the larger importance on texts and on recall prompts, each over its mean."""
    config, _, _ = found
    store = Store(Path(config.out) / "study.duckdb")
    (measured,) = store.query("SELECT run_id, corpus FROM runs WHERE kind = 'importance'").to_pylist()
    assert measured["corpus"].endswith("measure")
    counts = store.query(
        "SELECT recall_task, count(*) AS count FROM sequences WHERE run_id = ? GROUP BY 1 ORDER BY 1 NULLS LAST",
        [measured["run_id"]],
    ).to_pylist()
    tokens = config.max_tokens - 1 if config.max_tokens else 0
    assert [(row["recall_task"], row["count"]) for row in counts] == [
        (f"copying@{tokens}", 16),
        (f"needle@{tokens}", 16),
        (None, config.sequences),
    ]
    both = store.query(
        "SELECT layer, head, avg(token_gradient) FILTER (recall_task IS NULL) AS texts,"
        " avg(token_gradient) FILTER (recall_task IS NOT NULL) AS prompts"
        " FROM head_importance JOIN sequences USING (run_id, sequence) GROUP BY ALL ORDER BY ALL"
    ).to_pylist()
    shares = [
        {(row["layer"], row["head"]): row[kind] / sum(each[kind] for each in both) for row in both}
        for kind in ("texts", "prompts")
    ]
    expected = sorted(shares[0], key=lambda place: max(share[place] for share in shares))
    masked = store.query(
        "SELECT layer, head FROM arms JOIN mask_heads USING (mask_id) WHERE arms.criterion = 'importance_recall'"
        " AND arms.share = 0.5"
    ).to_pylist()
    assert {(row["layer"], row["head"]) for row in masked} == set(expected[:24])
    # The two importances do not agree, or the criterion would say nothing new.
    alone = [set(sorted(share, key=share.__getitem__)[:24]) for share in shares]
    assert alone[0] != set(expected[:24])


def test_the_order_ends_with_a_loss_that_is_not_shown_to_be_within_the_limit(
    found: tuple[Study, StudyAnswer, list[str]],
) -> None:
    config, answer, _ = found
    store = Store(Path(config.out) / "study.duckdb")
    (asked,) = store.query(_ASKED).to_pylist()
    first = next(each.judged[0] for each in answer.savings if each.judged[0].outcome is Outcome.NOT_SHOWN)
    assert "texts" not in first.why
    name, share = first.name, first.share
    wide = {name: Increase("nats per token", 8, 0.01, -0.1, 0.2)}
    (verdict,) = judge_shares(judge(store, asked["run_id"], loss_increases=wide), [(name, share)])
    label = first.label if first.label == "probably loses" else "too few texts"
    assert (verdict.outcome, verdict.label) == (Outcome.NOT_SHOWN, label)
    assert "texts: the loss may rise by 0.2 nats per token (limit 0.05); " + first.why in verdict.why
    assert largest_safe([verdict]) is None


def test_other_settings_need_another_folder(found: tuple[Study, StudyAnswer, list[str]]) -> None:
    config, _, _ = found
    with pytest.raises(StudyError, match="differing: max_loss"):
        run(tiny(Path(config.out), max_loss=0.1), [])


def test_settings_come_back_from_their_file(tmp_path: Path) -> None:
    config = tiny(tmp_path, tasks=TaskConfig(("mmlu",), limit=3))
    write_study(tmp_path / "study.yaml", config)
    assert read_study(tmp_path / "study.yaml") == config
    (tmp_path / "short.yaml").write_text("model: demo\ncorpus: texts/\nshares: [0.2, 0.1]\nhours: 1\n")
    short = read_study(tmp_path / "short.yaml")
    assert (short.corpus.name, short.shares, short.hours) == ("texts/", (0.1, 0.2), 1.0)


def test_a_recorded_study_is_a_file_of_options(tmp_path: Path) -> None:
    """Its decisions are settings then."""
    recorded = tmp_path / "study.yaml"
    for changes in ({}, {"tasks": TaskConfig(("mmlu",), limit=3), "judge": CorpusSpec("others/", column="text")}):
        config = tiny(tmp_path, **changes)
        write_study(recorded, config)
        assert read_command(["study", "--config-file", str(recorded)]).step == config


def test_repeated_values_count_once(tmp_path: Path) -> None:
    repeated: dict[str, Any] = dict.fromkeys(("shares", "window_shares", "prune_shares"), (0.2, 0.1, 0.2))
    config = tiny(tmp_path, criteria=("importance", "output_norm_ln", "importance"), **repeated)
    assert config.shares == config.window_shares == config.prune_shares == (0.1, 0.2)
    assert config.criteria == ("importance", "output_norm_ln")


def test_a_study_resumes_in_another_installation(tmp_path: Path) -> None:
    """The record has the name of the bundled model, and not its folder."""
    path, config = tmp_path / "study.yaml", tiny(tmp_path)
    write_study(path, config)
    assert "source: demo\n" in path.read_text() and resumed(path, config) == config
    with pytest.raises(StudyError, match="differing: model"):
        resumed(path, replace(config, model=ModelSpec("demo", "bfloat16")))


def test_a_study_resumes_where_its_folder_and_texts_were_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, config = tmp_path / "out" / "study.yaml", replace(tiny(tmp_path / "out"), judge=CorpusSpec("others/"))
    write_study(path, config)
    monkeypatch.chdir(tmp_path)
    moved = replace(config, out="out", corpus=CorpusSpec("/elsewhere/texts"), judge=CorpusSpec("/elsewhere/others"))
    assert resumed(Path("out") / "study.yaml", moved) == moved
    assert resumed(path, replace(config, judge=None)) == config
    write_study(path, replace(config, judge=None))
    with pytest.raises(StudyError, match="differing: judge"):
        resumed(path, config)


def test_a_study_of_other_weights_needs_another_folder(tmp_path: Path) -> None:
    """Its plans and pruned models are files, which other weights would be judged by."""
    lines, config = list[str](), tiny(tmp_path / "out")
    with Run(SPEC, Store(tmp_path / "s.duckdb"), lambda spec: InProcessPool(spec, THREADS), say=lines.append) as opened:
        _Study.begin(config, opened)
        _Study.begin(config, opened)
        other = replace(opened.identity, weights_hash="0" * 64)
        with (
            Run(SPEC, opened.store, lambda spec: opened.pool, identity=other, say=lines.append) as changed,
            pytest.raises(StudyError, match=r"out holds a study of another model \(differing: weights\)"),
        ):
            _Study.begin(config, changed)


def test_a_study_may_get_more_hours(tmp_path: Path) -> None:
    path, config = tmp_path / "study.yaml", tiny(tmp_path)
    write_study(path, config)
    longer = resumed(path, replace(config, hours=10 * config.hours))
    assert longer is not None and longer.hours == 10 * config.hours and replace(longer, hours=config.hours) == config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"modle": "demo"}, "unknown option 'modle'; did you mean model?"),
        ({"corpus": "a"}, "the following arguments are required: MODEL"),
        ({"hours": "two"}, "hours: 'two' is not a number"),
        ({"hours": 0}, r"hours: 0 \(limit above 0\)\. Raise it"),
        ({"hours": [1, 2]}, "is a list; give one value"),
        ({"shares": [1.5]}, "limit below 1"),
        ({"prune_by": "luck"}, "prune-by: 'luck' is unknown. Choose damage or criterion"),
        ({"criteria": ["first_token"]}, "unknown criterion"),
        ({"recall_questions": 10}, "multiple of 4"),
        ({"tasks": {"names": ["mmlu"], "limits": 1}}, r"unknown option 'tasks\.limits'; did you mean tasks\.limit"),
        ({"tasks": {"limits": 1}}, "tasks: {'limits': 1} is a dict; give one value"),
        ({"judge": {"names": "a"}}, "judge: unknown option 'names'; did you mean name"),
        ({"judge": {"column": "a"}}, "judge: the following arguments are required: --corpus"),
        ({"sequences": True}, "sequences: 'True' is not a whole number"),
        ({"tasks": {"bos": "never"}}, "^`bos` has no effect without `tasks`"),
        ({"tasks": {"limit": 4}}, "^`limit` has no effect without `tasks`"),
        ({"tasks": {"include_path": "."}}, "^--include-path has no effect without --tasks"),
        ({"common": "MODEL"}, "unknown option 'common'"),
        ({"shares": [], "prune_by": "criterion"}, "needs `shares` of heads"),
        ({"judged_texts": 19}, r"judged-texts: 19 \(limit 20"),
        ({"max_tokens": 15}, r"max-tokens: 15 \(limit 16"),
        ({"max_tokens": 64, "recent": 60}, r"`recent=60` \(limit 59 in texts of 64 tokens"),
        ({"recall_questions": 0, "criteria": ["importance_recall"]}, "needs recall questions"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, object], message: str, tmp_path: Path) -> None:
    whole = settings if "corpus" in settings or "modle" in settings else {"model": "demo", "corpus": "a"} | settings
    (tmp_path / "study.json").write_text(json.dumps(whole))
    with pytest.raises(HeadscanError, match=message):
        read_study(tmp_path / "study.json")


def test_equal_documents_go_to_one_part(tmp_path: Path) -> None:
    for number in range(60):
        text = f"file {number % 30} has a text of its own\n" * 100
        (tmp_path / f"{number}.txt").write_text(text)
    split_texts(CorpusSpec(str(tmp_path)), tmp_path / "parts")
    files = [file.read_text() for file in (tmp_path / "parts").glob("*/*.txt")]
    assert len(files) == len(set(files)) == 30


@pytest.mark.parametrize("documents", [1, 3, 40])
def test_parts_share_no_text(tmp_path: Path, documents: int) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(documents):
        lines = [f"line {number} {line} of a text that is long enough\n" for line in range(40_000 // documents)]
        (folder / f"{number}.txt").write_text("".join(lines))
    texts = split_texts(CorpusSpec(str(folder)), tmp_path / "parts")
    seen: dict[str, set[str]] = {}
    for part in ("measure", "choose", "judge"):
        files = sorted((tmp_path / "parts" / part).glob("*.txt"))
        seen[part] = {line for file in files for line in file.read_text().splitlines()}
        assert len(seen[part]) > 0.1 * 40_000
    assert not (seen["measure"] & seen["judge"] or seen["choose"] & seen["judge"] or seen["measure"] & seen["choose"])
    assert len(set.union(*seen.values())) >= 0.99 * (40_000 // documents) * documents
    assert split_texts(CorpusSpec(str(folder)), tmp_path / "parts") == texts


def test_a_short_corpus_is_refused(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number}.txt").write_text(f"{number} is too short\n" * 50)
    (tmp_path / "2.txt").write_text(" \n" * 50)
    message = r"too short for 3 parts of a study: documents with text: 2 \(limit 3, or one of 5,000 characters\)"
    with pytest.raises(StudyError, match=message):
        split_texts(CorpusSpec(str(tmp_path)), tmp_path / "parts")
    assert not (tmp_path / "parts").exists()


@pytest.mark.parametrize("long", [0, 260_000])
def test_a_few_short_documents_lose_no_text(tmp_path: Path, long: int) -> None:
    """They go whole to a part, next to one that is long enough to be cut."""
    folder = tmp_path / "texts"
    folder.mkdir()
    documents = [f"document {number} has this line\n" * 160 for number in range(19)]
    documents[3] = "".join(f"line {line}\n" for line in range(long // 10)) or documents[3]
    for number, text in enumerate(documents):
        (folder / f"{number:02}.txt").write_text(text)
    split_texts(CorpusSpec(str(folder)), tmp_path / "parts")
    files = {part: sorted((tmp_path / "parts" / part).iterdir()) for part in ("measure", "choose", "judge")}
    sizes = {part: sum(len(file.read_text()) for file in of_part) for part, of_part in files.items()}
    whole = sum(map(len, documents))
    assert sum(sizes.values()) == whole
    for part, share in (("measure", 0.4), ("choose", 0.2), ("judge", 0.4)):
        assert abs(sizes[part] / whole - share) < 0.06, (part, sizes)
    # A block of a part counts as a document, so it is no shorter than half of 20,000 characters.
    assert len(files["judge"]) == (8 if not long else 12)


def test_an_interrupted_split_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(f"document {number} has this line\n" * 100)
    written: list[Path] = []

    def stopped(path: Path, text: str) -> None:
        if len(written) == 30:
            raise KeyboardInterrupt
        write_text(path, text)
        written.append(path)

    corpus, parts = CorpusSpec(str(folder)), tmp_path / "parts"
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("headscan.study.study_texts.write_text", stopped)
        split_texts(corpus, parts)
    for number in range(0, 40, 2):
        (folder / f"{number:02}.txt").unlink()
    split_texts(corpus, parts)
    files = [file.read_text() for file in parts.glob("*/*.txt")]
    assert len(files) == len(set(files)) == 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts", "texts"]


def test_questions_of_blocks_name_the_document_that_these_are_cut_from(tmp_path: Path) -> None:
    rng, folder = np.random.default_rng(0), tmp_path / "texts"
    folder.mkdir()
    for name in ("one", "two", "three"):
        lines = (" ".join(map(str, rng.integers(0, 10_000, 12))) for _ in range(3_000))
        (folder / f"{name}.txt").write_text("\n".join(lines))
    files = split_texts(CorpusSpec(str(folder)), tmp_path / "parts").judged_files
    assert len(files) > 3 and {document_of(file) for file in files} == {"0", "1", "2"}
    assert document_of("book.txt") == "book.txt"
    write_task(tmp_path / "task", files, 30, name="asked", document_of=document_of)
    rows = [json.loads(line) for line in (tmp_path / "task" / "asked.jsonl").read_text().splitlines()]
    assert {row["document"] for row in rows} == {"0", "1", "2"} and len({row["module"] for row in rows}) > 3


def test_a_corpus_that_changed_is_no_longer_the_study_s(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number:02}.txt").write_text(f"document {number} has this line\n" * 100)
    corpus = CorpusSpec(str(folder))
    texts = split_texts(corpus, tmp_path / "parts")
    assert split_texts(corpus, tmp_path / "parts") == texts
    (folder / "20.txt").write_text("one document more\n" * 100)
    with pytest.raises(StudyError, match=r"`corpus` or `judge` changed\. Restore them, or choose another folder"):
        split_texts(corpus, tmp_path / "parts")


def test_texts_that_judge_are_not_those_that_measure(tmp_path: Path) -> None:
    for folder, first in (("measure", 0), ("judge", 29), ("others", 30)):
        (tmp_path / folder).mkdir()
        for number in range(first, first + 30):
            text = f"file {number} has a text of its own\n" * 100
            (tmp_path / folder / f"{number} of {folder}.txt").write_text(text)
        (tmp_path / folder / "heading.txt").write_text("Notes\n")
    corpus, judge, others = (CorpusSpec(str(tmp_path / name)) for name in ("measure", "judge", "others"))
    message = r"1 of 31 documents of `judge` .*: 29 of judge\.txt has 100 % of its runs .*\(limit 5 %\)\. Remove"
    with pytest.raises(StudyError, match=message):
        split_texts(corpus, tmp_path / "parts", judge)
    assert not (tmp_path / "parts").exists()
    with pytest.raises(StudyError, match="30 of 31 documents"):
        split_texts(corpus, tmp_path / "parts", corpus)
    assert len(split_texts(corpus, tmp_path / "parts", others).judged_files) == 31


def words(seed: int, lines: int) -> str:
    """Return lines of random words."""
    draw = random.Random(seed)
    return "".join(" ".join(f"word{draw.randrange(5_000)}" for _ in range(12)) + "\n" for _ in range(lines))


def corpus_of(folder: Path, texts: list[str]) -> CorpusSpec:
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_text(text)
    return CorpusSpec(str(folder))


def runs_of(text: str) -> set[tuple[str, ...]]:
    found = re.findall(r"\w+|[^\w\s]", text)
    return {tuple(found[at : at + 20]) for at in range(len(found) - 19)}


def largest_share(parts: Path) -> float:
    """Return the largest share of the runs of a file that are in another part, as a set of tuples counts them."""
    runs = {part: [runs_of(file.read_text()) for file in (parts / part).iterdir()] for part in _PARTS}
    measured, chosen = (set().union(*runs[part]) for part in ("measure", "choose"))
    shares = [len(each & (measured | chosen)) / max(1, len(each)) for each in runs["judge"]]
    return max(shares + [len(each & measured) / max(1, len(each)) for each in runs["choose"]])


@pytest.mark.parametrize("documents", [6, 40])
@pytest.mark.parametrize("kind", ["line break", "added line", "joined", "half"])
def test_near_copies_go_to_one_part(tmp_path: Path, documents: int, kind: str) -> None:
    texts = [words(number, 1_200 if documents < 20 else 120) for number in range(documents)]
    lines = texts[0].splitlines(keepends=True)
    copies = {
        "line break": ["".join([*lines[:at], "\n", *lines[at:]]) for at in range(4)],
        "added line": [f"a line of its own, number {number}\n{texts[0]}" for number in range(4)],
        "joined": ["".join(texts[:2])],
        "half": ["".join(lines[: len(lines) // 2]) + words(99 + n, len(lines) // 2) for n in range(4)],
    }[kind]
    said: list[str] = []
    split_texts(corpus_of(tmp_path / "texts", texts + copies), tmp_path / "parts", say=said.append)
    assert largest_share(tmp_path / "parts") <= 0.05
    found = re.fullmatch(
        r"texts that judge share at most (\S+) % of their runs of 20 words with the other parts \(limit 5 %\)"
        r"(; blocks that shared more and measure instead: \d+ of \d+)?(; copies of blocks that are left out: \d+)?",
        said[0],
    )
    assert found is not None and (found[2] or found[3])
    # No copy counts as another text.
    for part in _PARTS:
        of_part = [runs_of(file.read_text()) for file in (tmp_path / "parts" / part).iterdir()]
        assert all(len(one & other) < 0.6 * len(one) for one in of_part for other in of_part if one is not other)
    # What is not copied stays in its part.
    sizes = {part: sum(len(file.read_text()) for file in (tmp_path / "parts" / part).iterdir()) for part in _PARTS}
    assert sizes["judge"] > 0.15 * sum(sizes.values())


@pytest.mark.parametrize("kind", ["added line", "joined", "chapter"])
def test_texts_that_judge_are_no_near_copies_of_the_corpus(tmp_path: Path, kind: str) -> None:
    texts = [words(number, 150) for number in range(24)]
    judging = {
        "added line": [f"another heading\n{text}" for text in texts],
        "joined": ["\n\n".join(texts)],
        # Two percent of the text, and most of one block.
        "chapter": [words(50, 4_000) + texts[3] + words(51, 4_000)],
    }[kind]
    corpus, judge = corpus_of(tmp_path / "texts", texts), corpus_of(tmp_path / "judge", judging)
    message = rf"{len(judging)} of {len(judging)} documents of `judge` .* has [\d.]+ % of its runs of 20 words there"
    with pytest.raises(StudyError, match=message):
        split_texts(corpus, tmp_path / "parts", judge)
    others = corpus_of(tmp_path / "others", [words(100 + number, 150) for number in range(24)])
    said: list[str] = []
    split_texts(corpus, tmp_path / "parts", others, say=said.append)
    assert said == ["texts that judge share at most 0 % of their runs of 20 words with the other parts (limit 5 %)"]


def test_a_licence_in_every_document_is_no_copy(tmp_path: Path) -> None:
    licence = words(1_000, 20)
    texts = [licence + words(number, 120) for number in range(40)]
    said: list[str] = []
    split_texts(corpus_of(tmp_path / "texts", texts), tmp_path / "parts", say=said.append)
    assert " 0 % " in said[0] and "measure instead" not in said[0]
    # Copies in more than half of the documents are no licence.
    copied = [f"{number}\n{texts[0]}" for number in range(30)] + texts[1:20]
    split_texts(corpus_of(tmp_path / "copies", copied), tmp_path / "others", say=said.append)
    assert "blocks that shared more and measure instead" in said[1]
    with pytest.raises(StudyError, match=r"every block .* that would choose shares more than 5 % of its runs"):
        split_texts(corpus_of(tmp_path / "all", copied[:30]), tmp_path / "none")


def test_parts_do_not_depend_on_names(tmp_path: Path) -> None:
    texts = [words(number, 120) for number in range(30)]
    found = []
    for name, order in (("one", texts), ("other", texts[::-1])):
        split_texts(corpus_of(tmp_path / name, order), tmp_path / f"{name} parts")
        files = {part: (tmp_path / f"{name} parts" / part).iterdir() for part in _PARTS}
        found.append({part: {file.read_text() for file in of_part} for part, of_part in files.items()})
    assert found[0] == found[1] and [len(found[0][part]) for part in _PARTS] == [12, 6, 12]


def test_a_large_corpus_is_read_of_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headscan.study.study_texts._MOST", 200_000)
    corpus = corpus_of(tmp_path / "texts", [words(number, 1_000) for number in range(6)])
    split_texts(corpus, tmp_path / "parts")
    blocks = [file.read_text() for part in _PARTS for file in (tmp_path / "parts" / part).iterdir()]
    assert 180_000 < sum(map(len, blocks)) < 240_000
    for number in range(6):
        text = (tmp_path / "texts" / f"{number:03}.txt").read_text()
        assert any(block[:200] in text for block in blocks), number


def test_the_safe_heads_are_a_file_that_prune_reads(tmp_path: Path) -> None:
    arm = Arm("b", ArmKind.MASK, HeadMask([(2, 3), (0, 1)]))
    assert imported_heads(write_heads(arm, tmp_path / "heads.json")) == [(0, 1), (2, 3)]


def test_a_stop_right_after_the_pruning_loses_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(tmp_path, prune_shares=(0.05, 0.1))
    texts = split_texts(config.texts, tmp_path / "texts")

    def stopped(pruning: Prune, pruning_run: Run) -> None:
        run_prune(pruning, pruning_run)
        raise KeyboardInterrupt

    monkeypatch.setattr("headscan.steps.prune.work_folder.check_reload", lambda folders: None)
    monkeypatch.setattr("headscan.steps.prune.build_models.repair", lambda *_, **__: {})
    monkeypatch.setattr(_Study, "_order", lambda study, criterion: [(1, 2), (0, 1), (2, 3), (0, 0), (1, 0)])
    with Run(SPEC, Store(tmp_path / "s.duckdb"), lambda spec: InProcessPool(spec, THREADS)) as study_run:
        a_study = _Study(config, study_run, texts, 88, StudyClock(Path(config.out)))
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr("headscan.steps.prune.run_prune.run_prune", stopped)
            a_study._pruned("output_norm_ln")
        with monkeypatch.context() as patched:
            patched.setattr("headscan.steps.prune.run_prune.run_prune", pytest.fail)
            small, large = a_study._pruned("output_norm_ln")
        assert set(small.removed) < set(large.removed) and (small.share, large.share) == (0.05, 0.1)
        (large.folder / "model.safetensors").unlink()
        with pytest.raises(PruningError, match="pruned is not empty"):
            a_study._pruned("output_norm_ln")


def test_a_file_and_options_become_one_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "study.yaml"
    file.write_text("model: demo\ncorpus: texts/\nshares: [0.1]\nbatch_tokens: 4096\n")
    in_file = ["study", "--config-file", str(file)]
    verb = read_command([*in_file, "--hours", "1", "--judge", "others/"])
    found = verb.step
    assert (found.hours, found.shares, verb.devices.request.batch_tokens) == (1.0, (0.1,), 4096)
    assert found.judge is not None and found.judge.name == "others/"
    assert (found.search, found.prune_by) == (None, None)
    chosen = read_command([*in_file, "--no-search", "--prune-by", "criterion"]).step
    assert (chosen.search, chosen.prune_by) == (False, "criterion")
    named = read_command(["study", "demo", *in_file[1:], "--tasks", "mmlu", "--limit", "5"]).step
    assert named.tasks == TaskConfig(("mmlu",), limit=5) and named.model.dtype == "float32"
    assert read_command([*in_file, "--dtype", "float16"]).step.model == ModelSpec("demo", "float16")
    file.write_text("model: demo\ncorpus: texts/\ntasks: [arc_easy, hellaswag]\n")
    assert read_command(in_file).step.tasks == TaskConfig(("arc_easy", "hellaswag"))
    words = ["study", "demo", "--corpus", "texts/", "--window-shares", "none", "--shares", "0.1,0.2"]
    alone = read_command(words).step
    assert (alone.shares, alone.window_shares, alone.prune_shares, alone.kind_count) == ((0.1, 0.2), (), None, 2)
    file.write_text("model: demo\ncorpus: texts/\n")
    assert main([*in_file, "--limit", "5"]) == 2
    assert "--limit has no effect without --tasks" in capsys.readouterr().err
    file.write_text("corpus: texts/\n")
    assert main(in_file) == 2
    assert "MODEL" in capsys.readouterr().err


def test_a_study_has_a_corpus_and_a_store_of_its_own(tmp_path: Path) -> None:
    assert Study(SPEC).texts.name == "python-stdlib-heldout"
    with pytest.raises(StudyError, match=r"^`corpus` is required: name a file"):
        Study(ModelSpec(str(tmp_path)))
    with pytest.raises(StudyError, match=r"^`store=s\.duckdb`: a study has its own store, `study\.duckdb` in `out`"):
        tiny(tmp_path / "out").run("s.duckdb")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_answers_hold_no_infinity(found: tuple[Study, StudyAnswer, list[str]], tmp_path: Path) -> None:
    """The loss of one document has no interval."""
    _, answer, _ = found
    name, loss = next(iter(answer.losses.items()))
    unknown = replace(answer, losses={**answer.losses, name: replace(loss, low=-math.inf, high=math.inf)})
    unknown.save(tmp_path / "answers.json")
    assert json.loads((tmp_path / "answers.json").read_text())["losses"][name]["low"] is None


def test_an_open_share_has_the_label_of_the_table() -> None:
    """More questions do not help against what makes this share open."""
    loss = Increase("nats per token", 64, 0.02, 0.01, 0.03)
    share = ShareVerdict("arm", 0.1, loss, Outcome.NOT_SHOWN, "not shown", "may lose more than one point")
    saving = Saving(ABLATED, (share,), (("arm", 0.1),), units=48)
    assert saving.next() == "10 % not shown: may lose more than one point"
    card = saving.card()
    assert (card.headline, card.state) == ("None shown to be safe", "open")
    assert card.detail == (
        "10 % not shown: may lose more than one point. At 10 %: loss +0.0200 [+0.0100, +0.0300] nats per token."
    )
    open_share = replace(share, label="too few questions", why="needs about 900 questions")
    few = replace(saving, judged=(open_share,))
    assert few.next() == "10 % too few questions: needs about 900 questions"
    assert few.card().headline == "Too few questions"


COSTS = QuestionCosts(
    280.0, 300.0, False, enough=(3_000, 3_500), available=2_500, enough_recall=(500, 600), recalls="copying 60 %"
)


def test_the_time_decides_texts_and_shares(tmp_path: Path) -> None:
    """Open settings become smaller with the hours; given ones stay."""
    settings = open_study(tmp_path, hours=1, window_shares=(0.5,))
    found = [decided(settings, speed, COSTS, lambda line: None) for speed in (100_000.0, 1_000.0, 50.0)]
    assert [each.sequences for each in found] == sorted((each.sequences for each in found), reverse=True)
    assert found[0].sequences == 64 and found[-1].sequences == 8
    assert len(found[0].shares or ()) == 6
    assert len(found[-1].shares or ()) == 2 and {each.window_shares for each in found} == {(0.5,)}
    assert (found[0].questions or 0) > (found[-1].questions or 0)


def test_each_step_is_listed_with_its_time(tmp_path: Path) -> None:
    lines: list[str] = []
    decided(open_study(tmp_path), 1_000.0, COSTS, lines.append)
    steps = [line.split("  ")[1] for line in lines if line.startswith("  ")]
    assert steps == [
        "1. scan",
        "2. probe",
        "3. importance, criterion",
        "4. plans",
        "5. pruning",
        "6. loss",
        "7. questions",
    ]


def test_the_time_of_a_step_follows_from_the_costs_of_its_passes(tmp_path: Path) -> None:
    """A text of 256 tokens takes 0.256 s at this speed; the two searches are decided, so they count."""
    settings = open_study(tmp_path, hours=20)
    lines: list[str] = []
    config = decided(settings, 1_000.0, COSTS, lines.append)
    assert (config.sequences, config.search, config.prune_by) == (64, True, "damage")
    own = study_seconds(config, COSTS, 1_000.0)
    assert [f"  {name}" in line for name, line in zip(own, lines[1:], strict=False)] == [True] * 7
    assert f"about {time_text(sum(own.values()))} in all" in lines[0]
    assert own["7. questions"] == pytest.approx(
        7 * ((config.questions or 0) * 280 + (config.recall_questions or 0) * 300) / 1_000
    )
    texts, prompts, kinds, repairs = 64, 16, len(RECALL_FAMILIES), 4
    of_cost = {
        "scan": ("1. scan", texts),
        "importance": ("3. importance, criterion", texts + kinds * prompts),
        "derivatives": ("4. plans", texts / 2 + prompts),
        "repair": ("5. pruning", repairs * (2 * texts + 4 * prompts)),
        "damage": ("5. pruning", repairs * texts),
    }
    for cost, (step, passes) in of_cost.items():
        more = replace(PassCosts(), **{cost: getattr(PassCosts(), cost) + 1})
        changed = study_seconds(config, COSTS, 1_000.0, more)
        assert {name for name in own if changed[name] != own[name]} == {step}
        assert changed[step] - own[step] == pytest.approx(0.256 * passes)


def test_a_search_takes_the_passes_of_the_largest_models() -> None:
    assert study_time._SEARCHES == sum(search_passes(1_000)) >= sum(search_passes(24))


def test_importance_takes_time_only_if_a_criterion_needs_it(tmp_path: Path) -> None:
    def third_step(**changed: Any) -> str:
        lines: list[str] = []
        settings = open_study(tmp_path, **changed)
        decided(settings, 1_000.0, COSTS, lines.append)
        return next(line.split("  ")[-1] for line in lines if "3. importance" in line)

    assert third_step(criteria=("output_norm_ln",)) == third_step(shares=()) == time_text(0.0)
    assert third_step(criteria=("importance",)) != time_text(0.0)


def test_without_ablated_heads_pruning_is_by_damage_and_its_time_counts(tmp_path: Path) -> None:
    """No criterion is chosen, however little time there is."""

    def fifth_step(**changed: Any) -> tuple[str | None, str]:
        lines: list[str] = []
        settings = open_study(tmp_path, hours=0.1, prune_shares=(0.05,), **changed)
        found = decided(settings, 300.0, COSTS, lines.append)
        assert found.sequences == 8
        return found.prune_by, next(line.split("  ")[-1] for line in lines if "5. pruning" in line)

    by_criterion, short = fifth_step()
    alone, long = fifth_step(shares=())
    assert (by_criterion, alone) == ("criterion", "damage")
    assert long == fifth_step(prune_by="damage")[1] != short


def test_questions_are_as_many_as_they_must_be_or_as_the_time_allows(tmp_path: Path) -> None:
    settings = open_study(tmp_path, hours=1)
    lines: list[str] = []
    rich = decided(settings, 100_000.0, COSTS, lines.append)
    assert (rich.questions, rich.recall_questions) == (COSTS.available, 500)
    assert (rich.max_questions, rich.max_recall_questions) == (COSTS.available, 500)
    assert "takes 3,000 questions and 500 of each recall task (the whole model: copying 60 %)" in lines[-1]
    enough = decided(settings, 100_000.0, replace(COSTS, available=9_000), lines.append)
    assert enough.questions == enough.max_questions == 3_000 and "harmless" not in lines[-1]
    # An hour at this speed reads less than the questions need: recall has at most half of their time.
    costs = replace(COSTS, enough_recall=(1_500, 1_800))
    poor = decided(settings, 2_500.0, costs, lines.append)
    assert 600 < (poor.questions or 0) < 2_500 and 40 < (poor.recall_questions or 0) < 1_500
    assert (poor.recall_questions or 0) * 300 <= 1.01 * (poor.questions or 0) * 280
    # More hours may ask as many as are enough with half of the error, where the tasks have them.
    assert (poor.max_questions, poor.max_recall_questions) == (2_500, 1_800)
    given = decided(replace(settings, questions=700), 2_500.0, costs, lines.append)
    assert given.questions == given.max_questions == 700
    later = decided(replace(settings, questions=700, max_questions=2_000), 2_500.0, costs, lines.append)
    assert (later.questions, later.max_questions) == (700, 2_000)
    unable = decided(settings, 100_000.0, replace(COSTS, enough_recall=(0, 0)), lines.append)
    assert unable.recall_questions == 40 and "recall task (" not in lines[-2]
    assert "hardly solves the recall tasks (copying 60 %): what is safe may still cost recall" in lines[-1]


def test_the_first_lines_say_what_can_be_shown_and_what_would(tmp_path: Path) -> None:
    lines: list[str] = []
    costs = replace(COSTS, available=9_000)
    poor = decided(open_study(tmp_path, hours=1), 600.0, costs, lines.append)
    # Fewer than show equal answers to be safe are not asked, and loss and recall alone judge.
    assert poor.questions == 0 and poor.max_questions == 3_500
    assert lines[-1].startswith("0 questions and ") and "could not show that anything is safe" in lines[-1]
    hours = float(re.search(r"--hours ([\d.]+)", lines[-1])[1])  # type: ignore[index]
    rich = decided(open_study(tmp_path, hours=hours), 600.0, costs, lines.append)
    assert rich.questions == 3_000 and "harmless" not in lines[-1]
    # Given numbers are asked, and the line says what they show.
    few = decided(open_study(tmp_path, hours=1, questions=300), 600.0, costs, lines.append)
    assert few.questions == 300 and "300 questions and " in lines[-1] and "cannot show" in lines[-1]
    assert "--max-points" in lines[-1] and "--shares none" in lines[-1]
    of_choices = replace(costs, by_probability=True, enough=(4_000, 4_500))
    decided(open_study(tmp_path, hours=hours, questions=1_500), 600.0, of_choices, lines.append)
    changes = re.findall(r"changes the probability of the right choice by up to ([\d.]+)", lines[-1])
    assert len(changes) == 2 and 0 < float(changes[0]) < float(changes[1])
    assert float(changes[1]) == pytest.approx(harmless_change(by_probability=True) ** 0.5)
    with pytest.raises(StudyError, match=r"asks nothing\. Set `questions` or"):
        decided(
            open_study(tmp_path, hours=1, questions=0, recall_questions=0, criteria=("entropy",)), 1e4, costs, print
        )


def test_costs_follow_from_the_questions_and_the_recall_of_the_whole_model(tmp_path: Path) -> None:
    """The demo model copies, so copying questions have a number that is enough; given numbers ask nothing."""
    texts = split_texts(CorpusSpec("python-stdlib-heldout"), tmp_path / "parts")
    config = tiny(tmp_path, recall_questions=None)
    lines: list[str] = []
    with Run(SPEC, Store(tmp_path / "s.duckdb"), lambda spec: InProcessPool(spec, THREADS), say=lines.append) as run_:
        costs = question_costs(config, run_, texts)
        given = question_costs(replace(config, recall_questions=8), run_, texts)
    # A context of 400 characters, and four passages of 80 with and without it.
    assert 400 / 5 < costs.tokens < (400 + 8 * 80) / 1.5
    # A needle and a copy; four of each share a text of 87 tokens.
    assert 87 / 2 <= costs.recall_tokens <= 2 * 87
    assert "copying" in costs.recalls and all(number % 4 == 0 for number in costs.enough_recall)
    assert (given.enough_recall, given.recalls) == ((0, 0), "")


def test_a_study_without_recall_questions(tmp_path: Path) -> None:
    """Texts of 40 tokens hold none; everything else is measured on texts, and no table claims that recall is kept."""
    config, lines = tiny(tmp_path / "out", max_tokens=40, recall_questions=None, shares=(0.02,)), list[str]()
    with pytest.raises(
        StudyError, match=r"`recall_questions=8` do not fit `max_tokens=40` .*Raise `max_tokens`, or set"
    ):
        run(replace(config, recall_questions=8), [])
    answer = run(config, lines)
    assert any("no recall question is asked" in line for line in lines)
    assert read_study(tmp_path / "out" / "study.yaml").recall_questions == 0
    assert [each.kind for each in answer.savings] == [ABLATED, CACHED, REMOVED]
    assert answer.savings[0].criterion == "output_norm_ln"
    assert all(each.judged[0].recall == () for each in answer.savings if each.judged[0].outcome is Outcome.NOT_SHOWN)
    rows = Store(tmp_path / "out" / "study.duckdb").query("SELECT count(*) FROM answers WHERE recall").to_pylist()
    assert rows == [{"count_star()": 0}]
    assert run(config, lines).savings == answer.savings


def test_texts_and_tasks_without_questions_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number}.txt").write_text(f"document {number} has this short line\n" * 6)
    config = replace(tiny(tmp_path / "out"), corpus=CorpusSpec(str(folder)))
    with pytest.raises(StudyError, match="no question can be made of the texts that judge"):
        run(config, [])
    # Nothing was decided, so another model may have the folder.
    assert not (tmp_path / "out" / "model.json").exists()


def test_tasks_that_grade_no_answer_are_refused_at_the_start(tmp_path: Path, task_folder: Path) -> None:
    """One of Brier scores, and one of perplexities."""
    ungraded = TaskConfig(("graded", "reading"), include_path=str(task_folder))
    assert Tasks(ungraded).available == {}
    with pytest.raises(StudyError, match="the tasks have no question with a right answer, so they cannot judge"):
        run(tiny(tmp_path / "out", tasks=ungraded), [])
    assert Tasks(replace(ungraded, names=("graded", "telling", "informed"))).available == {"telling": 12, "informed": 5}


def test_equal_documents_use_up_no_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headscan.study.study_texts._MOST", 60_000)
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(12):
        name = max(9, number)  # ten equal documents, and two others
        (folder / f"{number:02}.txt").write_text("".join(f"{name} has line {line}\n" for line in range(1_000)))
    split_texts(CorpusSpec(str(folder)), tmp_path / "parts")
    files = [file for part in ("measure", "choose", "judge") for file in (tmp_path / "parts" / part).iterdir()]
    assert {line.split()[0] for file in files for line in file.read_text().splitlines()} == {"9", "10", "11"}


def test_few_blocks_of_text_are_named_at_the_start(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(20):
        lines = [f"line {line} of document {number} is of text\n" for line in range(50)]
        (folder / f"{number}.txt").write_text("".join(lines))
    config, said = replace(tiny(tmp_path / "out"), corpus=CorpusSpec(str(folder))), list[str]()
    with Run(SPEC, Store(tmp_path / "s.duckdb"), lambda spec: InProcessPool(spec, THREADS), say=said.append) as opened:
        _Study.begin(config, opened)
    assert any("of 8 documents or blocks of 20,000 characters (limit 20): no share can" in line for line in said)


def test_the_limit_of_each_task_gives_the_number_of_questions(tmp_path: Path) -> None:
    texts = split_texts(CorpusSpec("python-stdlib-heldout"), tmp_path / "parts")
    for name, number in (("few", 5), ("many", 30)):
        write_task(tmp_path / "tasks", texts.judged_files, number, name=name)
    tasks = TaskConfig(("few", "many"), include_path=str(tmp_path / "tasks"))
    assert limits_per_task(tasks, (0, 1, 2, 9, 10, 20, 34, 35, 99)) == [0, 1, 1, 4, 5, 15, 29, 30, 30]
