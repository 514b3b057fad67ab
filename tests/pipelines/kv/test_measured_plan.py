"""Plans by measured damage: budgets, loss limits, widths, the command line, and the bar on the demo model."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from headscan.analysis.plans import HeadPlan, PlanError, WindowHeads, WindowShare, load_plan, make_plan
from headscan.analysis.store.store import Store
from headscan.attention.attention_request import MassWidths
from headscan.cluster.pools.in_process import InProcessPool
from headscan.errors import HeadscanError, PlanMismatchError
from headscan.kv.kept_keys import KeptKeys, Window
from headscan.model_spec import ModelSpec
from headscan.pipelines.cli.main import main
from headscan.pipelines.corpora import CorpusSpec, TokenPlan
from headscan.pipelines.demo import MODEL_FOLDER
from headscan.pipelines.kv.calibration_prompts import recall_prompts, text_prompts
from headscan.pipelines.kv.masked_losses import ALL_KEYS, masked_losses
from headscan.pipelines.kv.measured_plan import LossLimit, MeasureConfig, measured_plan
from headscan.pipelines.runs.identity import identify
from headscan.pipelines.runs.run_context import RunContext
from headscan.pipelines.scan.run_scan import ScanConfig, scan
from tests.pipelines.conftest import THREADS

SPEC = ModelSpec(str(MODEL_FOLDER), "float32")
SMALL = MeasureConfig(
    CorpusSpec("python-stdlib-heldout"), recents=(16,), max_tokens=96, sequences=4, recall_prompts=8, batch_tokens=2048
)
BOOKS = Path("/work/shared/corpora/gutenberg")


@pytest.fixture(scope="module")
def context():
    with InProcessPool(SPEC, THREADS) as pool:
        yield RunContext(identify(SPEC), pool)


def test_a_share_gives_windows_evidence_and_a_held_out_loss(context: RunContext) -> None:
    plan = measured_plan(context, SMALL, WindowShare(0.5))
    assert (plan.method, plan.budget.window_heads) == ("measured", 12)
    assert all(head.evidence.damage is not None and head.evidence.damage.text is not None for head in plan.heads)
    confirmed = [
        head for head in plan.heads if head.evidence.damage and head.evidence.damage.confirmed_text is not None
    ]
    assert len(confirmed) == 8
    assert plan.validation is not None and plan.validation["loss_increase"].keys() >= {"text"}
    assert "on held-out prompts" in plan.notes[0]
    assert plan.model.config_hash == context.identity.config_hash


def test_a_loss_limit_gives_as_many_windows_as_it_allows(context: RunContext) -> None:
    config = MeasureConfig(**{**vars(SMALL), "recall_prompts": 0, "confirm": False})
    counts = []
    for limit in (1e-6, 0.05, 50.0):
        plan = measured_plan(context, config, LossLimit(limit))
        counts.append(plan.budget.window_heads)
        assert plan.validation is not None
        assert plan.validation["max_loss"] == limit
        assert plan.validation["loss_increase"]["text"] <= limit
    assert counts == sorted(counts)
    assert counts[-1] == 24


def test_heads_may_get_windows_of_different_widths(context: RunContext) -> None:
    config = MeasureConfig(**{**vars(SMALL), "recents": (48, 16), "recall_prompts": 0, "confirm": False})
    plan = measured_plan(context, config, WindowShare(1.0))
    assert {head.recent for head in plan.heads} <= {16, 48}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"recents": ()}, "recent names no width"),
        ({"recents": (0,)}, "limit sink 0, recent 1"),
        ({"sequences": 1}, "sequences=1"),
        ({"recall_prompts": 12}, "recall_prompts=12"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises((PlanError, PlanMismatchError), match=words):
        MeasureConfig(**{**vars(SMALL), **changes})  # type: ignore[arg-type]


def test_texts_shorter_than_the_window_are_refused(context: RunContext) -> None:
    with pytest.raises(HeadscanError, match=r"max_tokens=96 \(at least 261"):
        measured_plan(context, MeasureConfig(**{**vars(SMALL), "recents": (256,)}), WindowShare(0.5))


def test_the_command_writes_a_plan_without_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    words = "plan demo --method measured --corpus python-stdlib-heldout --max-tokens 64 --sequences 2 --recent 16"
    more = ["--recall-prompts", "0", "--no-confirm", "--max-loss", "0.5", "--device", "cpu", "--out", str(out)]
    main([*words.split(), *more])
    assert load_plan(out).method == "measured"
    assert "nats per token" in capsys.readouterr().out
    assert not Path("headscan.duckdb").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("plan --method measured --corpus x", "--method measured and MODEL go together"),
        ("plan demo --method measured", "--method measured and --corpus go together"),
        ("plan --max-loss 0.1", "--max-loss is a budget of --method measured"),
        ("plan --recent 16,64", "--recent with several widths"),
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
def test_measured_plans_lose_less_than_plans_by_attention_and_random_ones(context: RunContext, tmp_path: Path) -> None:
    """The bar: 0.6 x the text loss and 0.4 x the recall loss of distant_mass at 21 of 24; better than random always."""
    corpus, identity = CorpusSpec(str(BOOKS)), context.identity
    config = MeasureConfig(corpus, recents=(60,), max_tokens=512, sequences=32, batch_tokens=2048)
    measured = measured_plan(context, config, WindowHeads(21))
    store = Store(tmp_path / "s.duckdb")
    tokens = TokenPlan(512, mode="chunk", min_tokens=65, limit_sequences=32)
    scan(
        ScanConfig(SPEC, corpus, tokens, widths=MassWidths(4, 60), batch_tokens=2048),
        store,
        lambda: nullcontext(context.pool),
    )
    distant = make_plan(store, None, method="distant_mass", budget=WindowHeads(21), sink=4, recent=60)
    orders = {"measured": _order(measured), "distant_mass": _order(distant)}
    for seed in range(5):
        orders[f"random {seed}"] = [orders["measured"][i] for i in np.random.default_rng(seed).permutation(24)]
    prompts = [text_prompts(corpus, identity, 512, 32, 64), *recall_prompts(identity, 512, 32, 0)]
    sets = [
        KeptKeys.of([(*place, Window(4, 60)) for place in order[:count]])
        for count in (12, 18, 21)
        for order in orders.values()
    ]
    found = {}
    for each in prompts:
        nats = masked_losses(context.pool, each.halves()[1].requests, [ALL_KEYS, *sets], batch_tokens=2048).nats
        found[each.task] = (nats[1:] - nats[:1]).mean(1).reshape(3, len(orders))
    for row, count in enumerate((12, 18, 21)):
        for column, name in enumerate(orders):
            print(count, name, *(f"{task} {values[row, column]:+.4f}" for task, values in found.items()))
    for task in ("text", "copying"):
        assert (found[task][:, :1] < found[task][:, 2:]).all()
    assert found["text"][2, 0] <= 0.6 * found["text"][2, 1]
    assert found["copying"][2, 0] <= 0.4 * found["copying"][2, 1]


def _order(plan: HeadPlan) -> list[tuple[int, int]]:
    return [(head.layer, head.kv_head) for head in sorted(plan.heads, key=lambda head: head.score)]
