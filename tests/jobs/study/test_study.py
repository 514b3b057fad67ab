"""A study of the demo model to its end, and its settings."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import pytest

from headscan.ablation.masks import HeadMask
from headscan.cli.main import main, read_command
from headscan.cluster.pool import InProcessPool, Pool
from headscan.engine.arms import Arm
from headscan.errors import HeadscanError, PruningError
from headscan.model_spec import ModelSpec
from headscan.plans import load_plan
from headscan.runs.head_orders import imported_heads
from headscan.runs.run_context import Run
from headscan.settings.evaluation_settings import TaskConfig
from headscan.steps.prune.prune_step import Prune
from headscan.steps.prune.run_prune import run_prune
from headscan.store.records import ArmKind
from headscan.store.store import Store
from headscan.study.run_study import _Study, run_study
from headscan.study.study_answer import ABLATED, CACHED, REMOVED, Saving, StudyAnswer
from headscan.study.study_candidates import write_heads
from headscan.study.study_clock import StudyClock
from headscan.study.study_step import Study, StudyError, read_study, resumed, write_study
from headscan.study.study_texts import split_texts
from headscan.texts import CorpusSpec
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
