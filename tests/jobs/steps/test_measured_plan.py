"""Plans by measured damage: budgets, loss limits, widths, the command line, resuming, and the bar on the demo model."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import headscan
from headscan.catalog import RECALL_FAMILIES, MassWidths
from headscan.cli.main import main
from headscan.cluster.pool import InProcessPool
from headscan.demo import MODEL_FOLDER
from headscan.engine.prompt_losses import ALL_KEYS, PromptPool, recall_prompts, text_prompts
from headscan.errors import HeadscanError, ResumeError, SequenceError
from headscan.kv.kv_windows import KvWindows
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import LoadedModel
from headscan.plans import HeadPlan, LossLimit, PlanError, WindowHeads, WindowShare, load_plan, make_plan, random_plan
from headscan.plans.window_search import smallest_windows
from headscan.runs import code_version
from headscan.runs.run_context import ModelContext, Run
from headscan.settings.evaluation_settings import RecallQuestions
from headscan.settings.saving_settings import RecallPrompts
from headscan.steps.damage_measurement import DamagePool, Measurement
from headscan.steps.plan import Plan
from headscan.steps.run_plan import own_loss, run_plan, shown_loss
from headscan.steps.scan import Scan
from headscan.store.store import Store
from headscan.texts import CorpusSpec, TokenConfig, open_corpus, sequences
from headscan.texts.recall_tasks import recall_questions
from headscan.texts.token_requests import Request
from headscan.windows import KeptKeys, Window
from tests.jobs.conftest import THREADS
from tests.sources import SHARED
from tests.stores import copy_store

SPEC = ModelSpec(str(MODEL_FOLDER), "float32")
CORPUS = CorpusSpec("python-stdlib-heldout")
SMALL = Plan(SPEC, method="measured", corpus=CORPUS, recent=(16,), max_tokens=72, sequences=4, recall_prompts=8)
BOOKS = SHARED / "corpora/gutenberg"


@pytest.fixture(scope="module")
def context():
    with InProcessPool(SPEC, THREADS) as pool:
        yield ModelContext(SPEC, lambda _: pool, batch_tokens=2048)


def scanning(context: ModelContext, store: Store) -> Run:
    """Return a run that scans with the pool of another job."""
    return Run(SPEC, store, lambda _: context.pool, batch_tokens=context.batch_tokens)


def test_a_share_gives_windows_evidence_and_a_held_out_loss(context: ModelContext) -> None:
    plan = run_plan(SMALL, context, WindowShare(0.5))
    assert (plan.method, plan.budget.window_heads) == ("measured", 12)
    assert all(head.damage is not None and head.damage.text is not None for head in plan.heads)
    confirmed = [head for head in plan.heads if head.damage and head.damage.confirmed_text is not None]
    assert len(confirmed) == 8
    assert plan.validation is not None and plan.validation["loss_increase"].keys() >= {"text"}
    assert "on held-out prompts" in plan.notes[0]
    assert plan.model.config_hash == context.identity.config_hash


@pytest.mark.slow
def test_a_loss_limit_gives_as_many_windows_as_it_allows(context: ModelContext) -> None:
    config = replace(SMALL, recall_prompts=0)
    counts = []
    for limit in (1e-6, 0.05, 50.0):
        plan = run_plan(config, context, LossLimit(limit))
        counts.append(plan.budget.window_heads)
        assert plan.validation is not None
        assert plan.validation["max_loss"] == limit
        measurement = Measurement.of(config, context)
        full, windows = measurement.nats(measurement.ranking, [ALL_KEYS, plan.kept])["text"].mean(1)
        assert windows - full <= limit
    assert counts == sorted(counts)
    assert counts[-1] == 24


def test_the_other_methods_order_is_that_of_a_store(context: ModelContext, tmp_path: Path) -> None:
    tokens = TokenConfig(96, mode="chunk", min_tokens=21, limit_sequences=3)
    store = Store(tmp_path / "s.duckdb")
    Scan(SPEC, CORPUS, tokens, widths=MassWidths(4, 16)).execute(scanning(context, store))
    plan = make_plan(store, None, method="distant_mass", budget=WindowHeads(12), sink=4, recent=16)
    texts = [each.ids.tolist() for each in sequences(open_corpus(CORPUS), context.identity.tokenizer, tokens)]
    heads = [(head.layer, head.kv_head) for head in plan.heads]
    needs = DamagePool(context.pool).needs([Request(tuple(ids), 1) for ids in texts], Window(4, 16), heads)
    np.testing.assert_allclose(needs / needs.max(), [head.score for head in plan.heads], rtol=1e-3)


#: Loss that each window adds to a request.
AddedLoss = Callable[[Request], float]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[[AddedLoss], None]:
    """Replace the losses of windows; the model gets every answer right."""

    def install(added: AddedLoss) -> None:
        def losses(
            _: PromptPool, requests: Sequence[Request], sets: Sequence[KeptKeys], __: KeptKeys
        ) -> tuple[np.ndarray, np.ndarray]:
            nats = np.array([[len(kept.windows) * added(request) for request in requests] for kept in sets])
            return nats, np.ones_like(nats)

        monkeypatch.setattr(PromptPool, "losses", losses)

    return install


def test_recall_that_the_model_cannot_do_is_named(context: ModelContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headscan.engine.prompt_losses._ABLE", 1.1)
    plan = run_plan(replace(SMALL, search=False), context, WindowShare(0.5))
    assert plan.validation is not None and plan.validation["recall_unknown"] == list(RECALL_FAMILIES)
    assert (
        "Recall is unknown (needle, copying): their prompts were left out, so the windows may cost it" in plan.notes[0]
    )
    assert sum("is left out: the unchanged model gets" in note for note in plan.notes) == 2


def test_held_out_prompts_decide_nothing(context: ModelContext, pretend: Callable[[AddedLoss], None]) -> None:
    config = replace(SMALL, recall_prompts=0)
    held_out = text_prompts(CORPUS, context.identity, config.max_tokens or 0, config.sequences, 20).halves()[1].requests
    pretend(lambda request: 0.5 if request in held_out else 0.125)
    plan = run_plan(config, context, LossLimit(1.0))
    assert plan.budget.window_heads == 8
    assert plan.validation is not None and plan.validation["loss_increase"] == {"text": 4.0}
    assert "in nats per token: text +4.0000 [+4.0000, +4.0000]; this exceeds the limit of 1" in plan.notes[0]


def test_the_held_out_loss_has_the_paired_interval_of_its_prompts(
    context: ModelContext, pretend: Callable[[AddedLoss], None]
) -> None:
    config = replace(SMALL, recall_prompts=0, sequences=12, search=False)
    held_out = text_prompts(CORPUS, context.identity, config.max_tokens or 0, config.sequences, 20).halves()[1].requests
    pretend(lambda request: 0.01 * (sum(request.ids) % 11))
    plan = run_plan(config, context, WindowShare(0.5))
    assert plan.validation is not None and plan.validation["answers_left"] == {}
    changes = [12 * 0.01 * (sum(request.ids) % 11) for request in held_out]
    assert len({*changes}) > 2
    expected = stats.t.interval(0.95, len(changes) - 1, loc=np.mean(changes), scale=stats.sem(changes))
    assert plan.validation["interval"]["text"] == pytest.approx(expected)
    assert own_loss(plan) in plan.notes[0]


@pytest.mark.parametrize(
    ("increase", "interval", "left", "lost"),
    [
        ({"text": 0.2}, {"text": [0.06, 0.34]}, {}, True),
        ({"text": 0.2}, {"text": [0.04, 0.36]}, {}, False),  # perhaps within the limit of 0.05
        ({"text": 0.2}, {}, {}, True),  # one text has no interval
        ({"text": 0.0, "copying": 0.76}, {"copying": [0.3, 1.2]}, {"copying": 0.71}, True),
        ({"text": 0.0, "copying": 0.76}, {"copying": [-0.1, 1.6]}, {"copying": 0.71}, False),  # perhaps by chance
        ({"text": 0.0, "copying": 0.76}, {"copying": [0.3, 1.2]}, {"copying": 0.9}, False),  # 90 % are recall enough
        ({"text": 0.0, "copying": -0.1}, {"copying": [-0.3, -0.02]}, {"copying": 0.8}, False),
        ({}, {}, {}, False),
    ],
)
def test_a_plan_is_condemned_by_what_its_held_out_prompts_show(
    increase: dict[str, float], interval: dict[str, list[float]], left: dict[str, float], lost: bool
) -> None:
    measured = {"loss_increase": increase, "interval": interval, "answers_left": left}
    plan: Any = SimpleNamespace(validation=measured)
    assert bool(shown_loss(plan, 0.05)) == lost
    if lost and left:
        words = "copying +0.7600 nats per token [+0.3000, +1.2000] with 71 % of the right answer tokens left"
        assert shown_loss(plan, 0.05) == words
    assert shown_loss(SimpleNamespace(validation=None), 0.05) == ""  # type: ignore[arg-type]


def test_each_recall_task_keeps_the_loss_limit(context: ModelContext, pretend: Callable[[AddedLoss], None]) -> None:
    copied = 16
    pretend(lambda request: 0.25 if request.scored_tokens == copied else -0.25)
    plan = run_plan(SMALL, context, LossLimit(1.0))
    assert plan.validation is not None
    assert plan.validation["loss_increase"] == {"text": -1.0, "needle": -1.0, "copying": 1.0}
    assert plan.budget.window_heads == 4


def test_heads_get_windows_of_different_widths(context: ModelContext) -> None:
    config = replace(SMALL, recent=(48, 16), recall_prompts=0, search=False)
    plan = run_plan(config, context, WindowHeads(12))
    measurement = Measurement.of(config, context)
    damages = {window: measurement.damages(window)["text"] for window in config.windows}
    chosen = smallest_windows({window: [values] for window, values in damages.items()})
    assert {window.recent for window in chosen} == {16, 48}
    for head, window, *values in zip(plan.heads, chosen, *damages.values(), strict=True):
        damage = head.damage
        assert damage is not None and damage.recent == window.recent
        assert damage.text == pytest.approx(values[config.windows.index(window)])
        assert head.window in (None, window)


def test_damages_of_layers_are_those_of_masks_opened_by_hand(context: ModelContext) -> None:
    config = replace(SMALL, sink=0, unit="layer", search=False)
    plan = run_plan(config, context, WindowShare(0.5))
    measurement = Measurement.of(config, context)
    lm, window = context.pool.one(lambda lm, _: lm, None), Window(0, 16)
    found: dict[int, dict[str, list[float]]] = {layer: {} for layer in range(6)}
    for prompts in measurement.ranking:
        for ids, scored in prompts.requests:
            full = _loss(lm, ids, scored, None)
            for layer, damages in found.items():
                kept = KeptKeys.of([(layer, kv_head, window) for kv_head in range(4)])
                damages.setdefault(prompts.task, []).append(_loss(lm, ids, scored, kept) - full)
    for head in plan.heads:
        damages, damage = {task: np.mean(each) for task, each in found[head.layer].items()}, head.damage
        assert damage is not None
        assert damage.text == pytest.approx(damages.pop("text"), abs=2e-5)
        assert damage.recall == pytest.approx(np.mean(list(damages.values())), abs=2e-5)
    by_layer = [next(head for head in plan.heads if head.layer == layer) for layer in range(6)]
    low = sorted(by_layer, key=lambda head: head.score)[:3]
    assert {head.layer for head in low} == {layer for layer, _ in plan.window_heads}
    assert plan.budget.window_heads == 12 and plan.granularity == "layer"
    assert plan.calibration.kind == "damage" and {each.gate_points for each in plan.calibration.texts} == {()}


@torch.no_grad()
def _loss(lm: LoadedModel, ids: Sequence[int], scored: int, kept: KeptKeys | None) -> float:
    tokens = torch.tensor([ids])
    with nullcontext() if kept is None else headscan.intervene(lm, KvWindows(kept)):
        log_probabilities = lm.model(tokens[:, :-1]).logits[0, -scored:].double().log_softmax(-1)
    return -float(log_probabilities.gather(1, tokens[0, -scored:, None]).mean())


def test_a_plan_by_layer_is_searched_and_limited_in_whole_layers(context: ModelContext) -> None:
    config = replace(SMALL, unit="layer", recall_prompts=0)
    plan = run_plan(config, context, WindowShare(0.5))
    assert "of 3 layers with windows are not among the lowest estimates" in plan.notes[1]
    confirmed = {head.layer for head in plan.heads if head.damage and head.damage.confirmed_text is not None}
    assert confirmed == set(range(6))
    limited = run_plan(config, context, LossLimit(0.01))
    for each in (plan, limited):
        windowed = {layer for layer, _ in each.window_heads}
        assert each.window_heads == [(layer, kv_head) for layer in sorted(windowed) for kv_head in range(4)]
    measurement = Measurement.of(config, context)
    full, windows = measurement.nats(measurement.ranking, [ALL_KEYS, limited.kept])["text"].mean(1)
    assert windows - full <= 0.01 and 0 < len(limited.window_heads) < 24


def test_lengths_above_the_context_are_refused(context: ModelContext) -> None:
    limit = context.identity.max_tokens
    assert limit is not None
    with pytest.raises(SequenceError, match=rf"`max_tokens={limit + 1}` \(limit {limit} positions of .*\). Lower"):
        replace(SMALL, max_tokens=limit + 1).longest(context.identity)
    assert replace(SMALL, max_tokens=None).longest(context.identity) == min(limit, 1024)
    unlimited = replace(context.identity, max_tokens=None)
    assert replace(SMALL, max_tokens=5000).longest(unlimited) == 5000
    assert replace(SMALL, max_tokens=None).longest(unlimited) == 1024


def test_recall_prompts_are_no_questions_of_an_evaluation(context: ModelContext) -> None:
    questions = recall_questions(context.identity.tokenizer, RecallQuestions((256,), 8), None, bos="auto")
    asked = {request.ids for question in questions for request in question.requests}
    prompts = [request.ids for each in recall_prompts(context.identity, 257, 8, 0) for request in each.requests]
    assert len(prompts) == 16 and asked.isdisjoint(prompts)
    assert {len(ids) for ids in prompts} == {257} == {len(ids) for ids in asked}
    most = 2**32 - 1
    for setting in (RecallQuestions, RecallPrompts, partial(replace, SMALL)):
        assert setting(seed=most).seed == most
        with pytest.raises(HeadscanError, match=rf"^`seed={2**32}` \(limit below {2**32}\)\. Lower `seed`"):
            setting(seed=2**32)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"recent": (0,)}, r"`recent=0` \(limit 1\)"),
        ({"gates": ()}, "`gates` is empty"),
        ({"sequences": 1}, "sequences=1"),
        ({"recall_prompts": 12}, "recall_prompts=12"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        replace(SMALL, **changes)  # type: ignore[arg-type]


def test_texts_shorter_than_the_window_are_refused(context: ModelContext) -> None:
    with pytest.raises(HeadscanError, match=r"`max_tokens=72` \(at least 261"):
        run_plan(replace(SMALL, recent=(256,)), context, WindowShare(0.5))


@pytest.mark.parametrize(("tokens", "recent"), [(None, 128), (64, 16), (3, 1)])
def test_the_usual_window_is_a_quarter_of_a_short_text(tokens: int | None, recent: int, context: ModelContext) -> None:
    """256 tokens need texts of 1,024; the bundled model reads 512, so `headscan plan demo` measures 128."""
    usual = replace(SMALL, recent=(), max_tokens=tokens)
    assert usual.with_widths(context.identity).recent == (recent,)
    longer = replace(context.identity, max_tokens=4096)
    assert replace(usual, max_tokens=None).with_widths(longer).recent == (256,)
    assert replace(usual, recent=(64, 16)).with_widths(longer).recent == (64, 16)


def test_the_command_writes_a_plan_and_keeps_the_damages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, store = tmp_path / "plan.json", tmp_path / "s.duckdb"
    words = "plan demo --method measured --corpus python-stdlib-heldout --max-tokens 64 --sequences 2 --recent 16"
    more = ["--recall-prompts", "0", "--no-search", "--max-loss", "0.5", "--device", "cpu", "--out", str(out)]
    main([*words.split(), *more, "--store", str(store)])
    plan = load_plan(out)
    assert plan.method == "measured" and plan.validation is not None
    assert plan.validation["recall_unknown"] == list(RECALL_FAMILIES)
    assert "Recall is unknown (needle, copying): no recall prompts were asked" in plan.notes[0]
    assert "nats per token" in capsys.readouterr().out
    (run,) = Store(store).runs()
    assert (run["kind"], run["status"]) == ("plan", "finished")
    assert "damage of a window on KV heads" in Store(store).query("FROM units")["what"].to_pylist()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("plan --method measured --corpus x", "--method measured needs a model, and texts as --corpus"),
        ("plan some/model --method measured", "--method measured measures windows on texts. Name them as --corpus"),
        (
            "plan --method distant_mass --max-loss 0.1",
            "--max-loss has no effect on --method distant_mass (only on measured): leave it out",
        ),
        ("plan --method distant_mass --sequences 64", "--sequences has no effect on --method distant_mass"),
        ("plan --no-search --method retrieval_score", "--no-search has no effect on --method retrieval_score"),
        (
            "plan --method distant_mass --seed 0",
            "--seed has no effect on --method distant_mass (only on measured, random)",
        ),
        ("plan --method distant_mass --dtype float32", "--dtype has no effect on --method distant_mass"),
        ("plan --device cpu --method random", "--device has no effect on --method random"),
        ("plan demo --method measured --corpus x --run abc", "--run has no effect on --method measured"),
        ("plan demo --method measured --corpus x --inverted", "--inverted has no effect on --method measured"),
        ("plan --method distant_mass --recent 16,64", "--recent with several widths"),
    ],
)
def test_options_that_do_not_go_together(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(words.split())
    except SystemExit as left:
        code = left.code
    assert code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not BOOKS.exists(), reason="the books are not there")
def test_measured_plans_lose_less_than_plans_by_attention_and_random_ones(
    context: ModelContext, tmp_path: Path
) -> None:
    """The bar: 0.6 x the text loss and 0.4 x the recall loss of distant_mass at 21 of 24; better than random always."""
    corpus, identity = CorpusSpec(str(BOOKS)), context.identity
    config = Plan(SPEC, method="measured", corpus=corpus, recent=(60,), max_tokens=512, sequences=32)
    counts = (12, 18, 21)
    store = Store(tmp_path / "s.duckdb")
    tokens = TokenConfig(512, mode="chunk", min_tokens=65, limit_sequences=32)
    Scan(SPEC, corpus, tokens, widths=MassWidths(4, 60)).execute(scanning(context, store))
    names = ["measured", "distant_mass", *(f"random {seed}" for seed in range(5))]
    plans = []
    for count in counts:
        measured = run_plan(config, context, WindowHeads(count))
        distant = make_plan(store, None, method="distant_mass", budget=WindowHeads(count), sink=4, recent=60)
        plans += [measured, distant, *(random_plan(measured, seed) for seed in range(5))]
    prompts = [text_prompts(corpus, identity, 512, 32, 64), *recall_prompts(identity, 512, 32, 0)]
    sets = [plan.kept for plan in plans]
    found = {}
    for each in prompts:
        nats, _ = PromptPool(context.pool, 2048).losses(each.halves()[1].requests, [ALL_KEYS, *sets])
        found[each.task] = (nats[1:] - nats[:1]).mean(1).reshape(len(counts), len(names))
    for row, count in enumerate(counts):
        for column, name in enumerate(names):
            print(count, name, *(f"{task} {values[row, column]:+.4f}" for task, values in found.items()))
    for task in ("text", "copying"):
        assert (found[task][:, :1] < found[task][:, 2:]).all()
    assert found["text"][2, 0] <= 0.6 * found["text"][2, 1]
    assert found["copying"][2, 0] <= 0.4 * found["copying"][2, 1]


#: Resuming does not depend on how much is measured.
FEW = replace(SMALL, sequences=2, recall_prompts=0)

#: Tasks whose items are kept.
MEASURING = ("measure_damages", "measure_needs", "AnswerTask")


class Stopped(Exception):
    pass


class CountingPool(InProcessPool):
    """Notes every measured item, and stops before number ``most``."""

    def __init__(self, most: int | None = None) -> None:
        super().__init__(SPEC, THREADS)
        self.most, self.measured = most, list[Any]()

    def map(self, task, items):  # type: ignore[no-untyped-def]
        name = getattr(task, "__name__", type(task).__name__)
        if name not in MEASURING:
            yield from super().map(task, items)
            return
        for item in items:
            if len(self.measured) == self.most:
                raise Stopped
            for done in super().map(task, [item]):
                self.measured.append((name, vars(item)))
                yield done


def made(store: Path | None, most: int | None = None, count: int = 2, **options: Any) -> tuple[HeadPlan, list[Any]]:
    """Return a plan, of which few exchanges are tried, and what was measured."""
    with CountingPool(most) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr("headscan.plans.window_search._ROUNDS", 1)
        patch.setattr("headscan.plans.window_search._TRIES", 2)
        context = ModelContext(SPEC, lambda _: pool, batch_tokens=2048)
        if store is not None:
            context = Run(SPEC, Store(store), lambda _: pool, batch_tokens=2048, **options)
        return run_plan(FEW, context, WindowHeads(count)), pool.measured


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of `undisturbed`."""
    return tmp_path_factory.mktemp("finished") / "s.duckdb"


@pytest.fixture(scope="module")
def undisturbed(finished: Path) -> tuple[str, list[Any]]:
    plan, measured = made(finished)
    assert {name for name, _ in measured} == set(MEASURING)
    return plan.to_json(), measured


@pytest.mark.parametrize("share", [0.1, pytest.param(0.9, marks=pytest.mark.slow)])
def test_a_stopped_plan_resumes_with_the_same_numbers(
    undisturbed: tuple[str, list[Any]], tmp_path: Path, share: float
) -> None:
    expected, measured = undisturbed
    store, first = tmp_path / "s.duckdb", int(share * len(measured))
    with pytest.raises(Stopped):
        made(store, first)
    assert [run["status"] for run in Store(store).runs("plan")] == ["failed"]
    plan, rest = made(store)
    assert plan.to_json() == expected
    assert len(rest) == len(measured) - first
    assert [run["status"] for run in Store(store).runs("plan")] == ["finished"]


def test_a_finished_plan_is_not_measured_again_and_other_budgets_share_its_damages(
    undisturbed: tuple[str, list[Any]], finished: Path, tmp_path: Path
) -> None:
    store = copy_store(finished, tmp_path / "s.duckdb")
    again, measured = made(store)
    assert (again.to_json(), measured) == (undisturbed[0], [])
    other, measured = made(store, count=1)
    alone, _ = made(None, count=1)
    assert other.to_json() == alone.to_json()
    assert {name for name, _ in measured} == {"AnswerTask"}
    (run,) = Store(store).runs("plan")
    assert run["status"] == "finished"


KILLED = """
import os, signal, sys
from headscan.store.store import Store
from headscan.runs import ledger
from tests.jobs.steps.test_measured_plan import made

ledger.WRITE_SECONDS = 0.0
add = ledger.Ledger.add
left = int(sys.argv[2])

def added(self, unit, numbers):
    global left
    add(self, unit, numbers)
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)

ledger.Ledger.add = added
made(sys.argv[1])
"""


@pytest.mark.slow
def test_a_killed_plan_resumes(undisturbed: tuple[str, list[Any]], tmp_path: Path) -> None:
    expected, measured = undisturbed
    store, first = tmp_path / "s.duckdb", len(measured) // 2
    ended = subprocess.run([sys.executable, "-c", KILLED, str(store), str(first)], check=False, capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    (left,) = Store(store).runs("plan")
    assert left["status"] == "interrupted"
    assert Store(store).query("FROM units").num_rows == first
    plan, rest = made(store)
    assert (plan.to_json(), len(rest)) == (expected, len(measured) - first)


@pytest.mark.slow
def test_other_software(undisturbed: tuple[str, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unfinished plan of other software is refused, a finished one is measured again."""
    _, measured = undisturbed
    store = tmp_path / "s.duckdb"
    with pytest.raises(Stopped):
        made(store, 3)
    monkeypatch.setattr(code_version, "package_versions", lambda: {"torch": "0.1"})
    with pytest.raises(ResumeError, match="torch"):
        made(store)
    _, rest = made(store, resume_anyway=True)
    assert len(rest) == len(measured) - 3
    monkeypatch.setattr(code_version, "package_versions", lambda: {"torch": "0.2"})
    lines: list[str] = []
    _, all_again = made(store, say=lines.append)
    assert len(all_again) == len(measured)
    assert any("measured again with" in line for line in lines)
    (run,) = Store(store).runs("plan")
    assert [each["packages"] for each in run["provenance"]] == [{"torch": "0.2"}]


def test_a_plan_without_a_store_reports_that_it_keeps_nothing() -> None:
    lines: list[str] = []
    with CountingPool(0) as pool, pytest.raises(Stopped):
        run_plan(FEW, ModelContext(SPEC, lambda _: pool, say=lines.append), WindowShare(0.5))
    assert lines[0] == "without a store, a job that stops keeps nothing of what it measured"
