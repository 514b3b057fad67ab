from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

from headscan.catalog import DISTANCE_BINS, MAX_OFFSET
from headscan.checkpoints.source_folder import DEMO_FOLDER, DEMO_MODEL
from headscan.errors import UnknownNameError
from headscan.plans import PlanError, load_plan, make_plan
from headscan.ranking.head_roles import read_roles
from headscan.report import page_parts
from headscan.report.answers import ABLATED_QUESTION, CACHE_QUESTION, Commands, ReportAnswer
from headscan.report.arm_chart import arms_figure, share_figure
from headscan.report.chart_style import KIND_COLOURS
from headscan.report.head_data import read_head_data
from headscan.report.profile_charts import profiles_figure
from headscan.report.write_report import ReportError, write_report
from headscan.store.records import ArmKind
from headscan.store.store import Store
from headscan.verdicts.judge import judge
from tests.numbers.conftest import answer_table
from tests.numbers.plan_fixtures import RECENT, SINK, evaluation_record, everything, site, write_evaluation, write_scan
from tests.stores import begin_arm

TOKENS = [40, 100, 200]
LAYERS, HEADS, KV_HEADS = 3, 8, 4
EVIL = "<script>alert('1')</script>"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, str, str]]:
    """A scan and an evaluation whose free texts are all hostile."""
    grid = [site(i, HEADS, KV_HEADS, window=32 if i == 2 else None) for i in range(LAYERS)]
    path = tmp_path_factory.mktemp("report") / "s.duckdb"
    stats = everything(LAYERS, HEADS, TOKENS)
    del stats["self_weight"]
    a_store, run_id = write_scan(
        path, grid, stats, TOKENS, corpus=EVIL, bos_policy=EVIL, model_revision=EVIL, packages={EVIL: EVIL}
    )
    evaluation = write_evaluation(a_store, seeds=2, prefix=EVIL)
    with a_store.reading():
        yield a_store, run_id, evaluation


class _Reader(HTMLParser):
    """Resources that a browser would fetch or run, and unclosed elements."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.fetched: list[str | None] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag not in ("meta", "br", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text += data


def head_data(html: str) -> dict[str, Any]:
    """The numbers of the map, as the page's script reads them."""
    packed = html.split('id="head-data">')[1].split("</script>")[0]
    return dict(json.loads(gzip.decompress(base64.b64decode(packed))))


def test_a_report_is_one_file_that_fetches_nothing(store: tuple[Store, str, str], tmp_path: Path) -> None:
    a_store, run_id, evaluation = store
    plan = make_plan(a_store, run_id, window_share=0.5, sink=SINK, recent=RECENT)
    path = write_report(a_store, tmp_path / "r" / "report.html", scan_run=run_id, evaluate_run=evaluation, plan=plan)
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]
    html = path.read_text(encoding="utf-8")
    reader = _Reader()
    reader.feed(html)
    assert reader.open == []
    assert all(link is not None and f'id="{link[1:]}"' in html for link in reader.fetched)  # links within the page
    assert html.count('class="plot"') == 1 + 1  # the overlap of the scores, and the arms
    assert html.count('id="plotly-source"') == html.count('id="head-data"') == 1
    assert "showSendToCloud: false" in html
    assert "default-src 'none'" in html
    assert EVIL not in html and EVIL in reader.text
    for title in (
        "Answers",
        "How many heads are inactive?",
        "What was measured",
        "Every head",
        "Inactive heads",
        "Do the scores agree?",
        "What ablating heads costs",
        "Head plan",
        "Definitions",
        "Provenance",
    ):
        assert title in reader.text
    assert "safe within one point" in reader.text
    assert "has not been validated" in reader.text
    assert re.search(r"131,072\s*\d+\.\d\d MiB", reader.text)


def test_a_report_of_a_scan_alone_names_missing_statistics(store: tuple[Store, str, str], tmp_path: Path) -> None:
    a_store, run_id, _ = store
    # Others were not measured.
    scores = ("self_weight", "induction_score", "effect", "entropy_ln")
    path = write_report(a_store, tmp_path / "r.html", scan_run=None, scores=scores)
    html = path.read_text(encoding="utf-8")
    reader = _Reader()
    reader.feed(html)
    assert head_data(html)["start"] == "entropy_ln"
    assert run_id in reader.text and "Head plan" not in reader.text
    for verb in ("evaluate", "prune", "plan", "probe", "importance"):
        assert f"headscan {verb} " in reader.text


def test_cards_suggest_what_the_scan_shows(store: tuple[Store, str, str], tmp_path: Path) -> None:
    a_store, run_id, _ = store
    spreads = read_head_data(a_store, a_store.resolve_run(run_id, "scan")).sites[0].spreads["output_norm_ln"]
    assert spreads.inactive is not None
    inactive = int((spreads.inactive >= 0.5).sum())
    cards = answer_cards(write_report(a_store, tmp_path / "r.html", scan_run=run_id))
    ablated, removed, cache = (
        cards[f"How {ask}?"]
        for ask in ("many heads can be ablated", "many heads can be removed for good", "much KV cache can go")
    )
    assert inactive and f"Perhaps {inactive} of {LAYERS * HEADS}" in ablated
    assert f"--score output_norm_ln --share {inactive / (LAYERS * HEADS):.2g} " in ablated
    assert f"--share {inactive / (LAYERS * HEADS):.2g} " in removed
    # The third layer has a sliding window, so its KV heads are no candidates; the window is that of the scan.
    assert "4 of 8 KV heads" in cache and f"beyond the first {SINK} and the last {RECENT} tokens" in cache
    assert f"plan tiny --corpus CORPUS --recent {RECENT} " in cache and "--plan head_plan.json" in cache


def test_every_kind_of_arms_has_a_colour() -> None:
    assert KIND_COLOURS.keys() == set(ArmKind) - {ArmKind.BASELINE}
    assert len(set(KIND_COLOURS.values())) == len(KIND_COLOURS)


def test_a_scan_of_short_texts_suggests_a_window_that_they_exceed(tmp_path: Path) -> None:
    grid = [site(i, HEADS, KV_HEADS) for i in range(LAYERS)]
    short = [10, SINK + RECENT]
    store, run_id = write_scan(tmp_path / "s.duckdb", grid, everything(LAYERS, HEADS, short), short)
    cache = answer_cards(write_report(store, tmp_path / "r.html", scan_run=run_id))["How much KV cache can go?"]
    assert f"at most {SINK + RECENT} tokens, so they show nothing beyond" in cache
    assert "plan tiny --corpus CORPUS --recent 4 " in cache


def answer_cards(path: Path) -> dict[str, str]:
    """The text of each card, by its question."""
    cards = {}
    for card in re.findall("<article.*?</article>", path.read_text(encoding="utf-8"), re.DOTALL):
        words = unescape(re.sub("<[^>]+>", "", card)).split("\n")
        cards[words[1]] = " ".join(words)
    return cards


def test_a_plan_s_validation_is_shown(store: tuple[Store, str, str], tmp_path: Path) -> None:
    a_store, run_id, _ = store
    said = {"mode": "split decode", "after": [88.5, 91.0], "task": EVIL}
    plan = make_plan(a_store, run_id, window_share=0.5, sink=SINK, recent=RECENT, validation=said)
    reader = _Reader()
    reader.feed(write_report(a_store, tmp_path / "r.html", scan_run=run_id, plan=plan, scores=()).read_text("utf-8"))
    assert "not been validated" not in reader.text
    assert all(text in reader.text for text in ("split decode", "88.5, 91", EVIL))


def test_control_characters_never_reach_the_page(store: tuple[Store, str, str], tmp_path: Path) -> None:
    a_store, run_id, _ = store
    said = {"mode": "decode\x1b]0;owned\x07", "task": "a\x9b2Jb\x00\x7f\rc\td"}
    plan = make_plan(a_store, run_id, window_share=0.5, sink=SINK, recent=RECENT, validation=said)
    plan = replace(plan, notes=("a note\x1b[31m of\x07 red", *plan.notes), score="need\x1b")
    plan = load_plan(plan.save(tmp_path / "plan.json"))
    page = write_report(a_store, tmp_path / "r.html", scan_run=run_id, plan=plan, scores=()).read_text("utf-8")
    assert "decode\N{REPLACEMENT CHARACTER}]0;owned\N{REPLACEMENT CHARACTER}" in page and "[31m of" in page
    assert re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", page) is None


def test_runs_of_different_models_are_refused(store: tuple[Store, str, str], tmp_path: Path) -> None:
    a_store, run_id, _ = store
    target = tmp_path / "r.html"
    with pytest.raises(UnknownNameError, match="unknown score 'entrpy'"):
        write_report(a_store, target, scan_run=run_id, scores=("entrpy",))
    stats = everything(LAYERS, HEADS, TOKENS)
    other, other_id = write_scan(
        tmp_path / "o.duckdb", [site(i, HEADS, 2) for i in range(LAYERS)], stats, TOKENS, model_config_hash="decaf"
    )
    plan = make_plan(other, other_id, window_share=0.5, sink=SINK, recent=RECENT)
    with pytest.raises(PlanError, match="another configuration hash"):
        write_report(a_store, target, scan_run=run_id, plan=plan)
    assert not target.exists()


def test_models_of_the_hub_with_equal_configurations_differ(tmp_path: Path) -> None:
    """Weights on the hub have no hash; the name tells two models of one configuration apart."""
    grid, stats = [site(0, HEADS, KV_HEADS)], everything(1, HEADS, TOKENS)
    a_store, run_id = write_scan(tmp_path / "s.duckdb", grid, stats, TOKENS, weights_hash=None)
    ours = evaluation_record(a_store, "ours")
    other = a_store.begin_run(replace(ours, fingerprint="other", model="tiny-instruct")).run_id
    with pytest.raises(ReportError, match=r"evaluated another model \(tiny-instruct\) than run .* scanned \(tiny\)"):
        write_report(a_store, tmp_path / "r.html", scan_run=run_id, evaluate_run=other)
    assert not (tmp_path / "r.html").exists()


def profiles() -> dict[str, np.ndarray]:
    """Layer 1 has three heads that look one token back, layer 2 one; layer i spends all its weight in bin i."""
    shape = (len(TOKENS), LAYERS, HEADS)
    offsets = np.full((*shape, 2 * MAX_OFFSET + 3), 1 / (2 * MAX_OFFSET + 3))
    for layer, head in ((1, 0), (1, 3), (1, 7), (2, 5)):
        offsets[:, layer, head] = np.eye(2 * MAX_OFFSET + 3)[MAX_OFFSET]
    distances = np.broadcast_to(np.eye(DISTANCE_BINS)[:LAYERS, None], (*shape, DISTANCE_BINS))
    return {"argmax_offsets": offsets, "mass_by_distance": distances}


def test_profiles_are_drawn_by_layer(tmp_path: Path) -> None:
    grid = [site(i, HEADS, KV_HEADS) for i in range(LAYERS)]
    stats = everything(LAYERS, HEADS, TOKENS)
    store, run_id = write_scan(tmp_path / "s.duckdb", grid, stats | profiles(), TOKENS)
    figure = profiles_figure(store, run_id)
    assert figure is not None
    bars, distances = figure.data
    assert list(bars.y) == list(distances.y) == ["0", "1", "2"]
    assert list(bars.x) == pytest.approx([0, 3 / HEADS, 1 / HEADS])
    assert "head 3: offset -1 in 100 % of queries" in bars.hovertext[1]
    # Bins beyond the longest distance are left out.
    np.testing.assert_allclose(np.array(distances.z, dtype=float), np.eye(LAYERS), atol=1e-7)
    assert list(distances.x) == ["0", "1", "2-3"]
    reader = _Reader()
    reader.feed(write_report(store, tmp_path / "r.html", scan_run=run_id, scores=()).read_text("utf-8"))
    assert "Where heads look" in reader.text and "4 at offset -1." in reader.text
    for layer, head in ((1, 0), (1, 3), (1, 7), (2, 5)):
        assert re.search(rf"self\s*{layer}\s*{head}\s*-1\s*100 %", reader.text)


@pytest.mark.parametrize(("measured", "drawn"), [("argmax_offsets", "bar"), ("mass_by_distance", "heatmap")])
def test_one_profile_is_drawn_alone(tmp_path: Path, measured: str, drawn: str) -> None:
    grid = [site(i, HEADS, KV_HEADS) for i in range(LAYERS)]
    store, run_id = write_scan(tmp_path / "s.duckdb", grid, {measured: profiles()[measured]}, TOKENS)
    figure = profiles_figure(store, run_id)
    assert figure is not None
    assert [trace.type for trace in figure.data] == [drawn]
    text = write_report(store, tmp_path / "r.html", scan_run=run_id, scores=()).read_text("utf-8")
    assert ("4 at offset -1." in text) == (drawn == "bar")
    assert "No head is positional" not in text
    assert "Do the scores agree?" not in text  # there is none


def test_a_scan_without_profiles_has_no_such_section(store: tuple[Store, str, str], tmp_path: Path) -> None:
    a_store, run_id, _ = store
    assert profiles_figure(a_store, run_id) is None
    assert "Where heads look" not in write_report(a_store, tmp_path / "r.html", scan_run=run_id).read_text("utf-8")


def test_arms_are_drawn_with_their_intervals(store: tuple[Store, str, str]) -> None:
    a_store, _, evaluation = store
    verdict = judge(a_store, evaluation)
    masks, randoms = arms_figure(verdict).data
    assert (masks.name, randoms.name) == ("mask", "random mask")
    assert masks.marker.color != randoms.marker.color and (len(masks.x), len(randoms.x)) == (2, 4)
    paired = verdict.arms[1].paired
    assert masks.x[1] + masks.error_x.array[1] == pytest.approx(paired.high)
    assert masks.x[1] - masks.error_x.arrayminus[1] == pytest.approx(paired.low)
    assert list(share_figure(verdict).data[0].x) == pytest.approx([5, 10])
    assert EVIL not in arms_figure(verdict).to_json()


def test_names_of_sites_cannot_end_an_attribute() -> None:
    hostile = 'profiles-x"><script>document.title = 1</script>'
    for made in (page_parts.figure(go.Figure(), hostile), page_parts.section("title", ["text"], hostile)):
        assert '"><script>document' not in made and "&quot;&gt;&lt;script&gt;document" in made


def test_commands_name_the_bundled_model_as_a_user_does() -> None:
    def named(model: str) -> str:
        return Commands.of({"model": model}, Path("s")).on_model("sweep")

    assert named(DEMO_FOLDER.name) == f"headscan sweep {DEMO_MODEL} --store s"
    assert named("SmolLM2-135M-Instruct.Q4_1") == "headscan sweep smollm2 --store s"
    assert named("my model") == "headscan sweep 'my model' --store s"


def test_commands_repeat_how_the_scan_named_model_and_texts() -> None:
    loaded = {"source": "models/my model", "dtype": "bfloat16", "revision": None, "trust_remote_code": True}
    corpus = {"name": "a b.parquet", "config": None, "split": "train", "column": "body", "revision": None}
    run = {"model": "my model", "config": {"model": loaded | {"safetensors": True}, "corpus": corpus}}
    commands = Commands.of(run, Path("s t"), "plans/mine.json")
    assert commands.on_model("gates", *commands.own_texts) == (
        "headscan gates 'models/my model' --dtype bfloat16 --trust-remote-code --corpus 'a b.parquet' --column body"
        " --store 's t'"
    )
    assert commands.plan == "plans/mine.json"
    assert Commands.of({"model": "m"}, Path("s")).own_texts == ("--corpus", "CORPUS")


def test_a_loss_of_accuracy_has_one_sign(store: tuple[Store, str, str], tmp_path: Path) -> None:
    a_store, run_id, evaluation = store
    reader = _Reader()
    path = write_report(a_store, tmp_path / "r.html", scan_run=run_id, evaluate_run=evaluation)
    reader.feed(path.read_text(encoding="utf-8"))
    assert re.search(r"of heads ablated change accuracy by [+-]\d+\.\d\d points \[", reader.text)
    assert not re.search(r"costs? -\d", reader.text)


def shown_text(path: Path) -> str:
    reader = _Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    return " ".join(reader.text.split())


def test_a_study_shows_its_answers_and_the_roles_alone(store: tuple[Store, str, str], tmp_path: Path) -> None:
    a_store, run_id, evaluation = store
    answers = [ReportAnswer(CACHE_QUESTION, "a", "b", "known"), ReportAnswer(ABLATED_QUESTION, "c", "d", "open")]
    path = write_report(a_store, tmp_path / "r.html", scan_run=run_id, evaluate_run=evaluation, answers=answers)
    assert list(answer_cards(path)) == [ABLATED_QUESTION, CACHE_QUESTION, "What do the heads do?"]


def test_the_card_of_roles_counts_what_headscan_roles_prints(store: tuple[Store, str, str], tmp_path: Path) -> None:
    a_store, run_id, _ = store
    path = write_report(a_store, tmp_path / "r.html", scan_run=run_id)
    found = read_roles(a_store, [run_id]).found
    card = answer_cards(path)["What do the heads do?"]
    assert found and all(f"{of.role} {len(of.heads)}" in card for of in found)
    assert "Not measured: " in card and "headscan probe " in card
    holders = {(each.layer, each.head) for of in found for each in of.heads}
    assert f"{len(holders)} of {LAYERS * HEADS} have a role" in card
    text = shown_text(path)
    assert all(of.strongest() in text for of in found)


def test_stored_settings_and_sentences_stand_in_words_and_once(store: tuple[Store, str, str], tmp_path: Path) -> None:
    a_store, run_id, evaluation = store
    said = {"recall_unknown": [], "max_loss": None, "held_out": [{"name": "needle@64", "prompts": 8}], "tried": True}
    plan = make_plan(a_store, run_id, window_share=0.5, sink=SINK, recent=RECENT, validation=said)
    path = write_report(a_store, tmp_path / "r.html", scan_run=run_id, evaluate_run=evaluation, plan=plan)
    text = shown_text(path)
    assert "held out needle@64 (prompts 8)" in text.replace("outneedle", "out needle") and "yes" in text
    for raw in ("recall_unknown", "max_loss", "null", "None", "[]", "{}", "True", "nothing against"):
        assert raw not in text, raw
    for sentence in re.split(r"(?<=[.:]) ", text):
        assert len(sentence) < 60 or re.search(r"\d", sentence) or text.count(sentence) == 1, sentence


def test_a_window_as_long_as_the_texts_is_named(tmp_path: Path) -> None:
    grid = [site(i, HEADS, KV_HEADS) for i in range(LAYERS)]
    a_store, run_id = write_scan(
        tmp_path / "s.duckdb", grid, everything(LAYERS, HEADS, [20, 30]), [20, 30], config={"sink": 4, "recent": 64}
    )
    text = shown_text(write_report(a_store, tmp_path / "r.html", scan_run=run_id))
    why = (
        "distant_mass is 0 for every head: the longest text has 30 tokens, and the window of 4 first and 64 last tokens"
    )
    assert f"Not shown: {why} covers it." in text
    assert "distant_mass" not in text.split("Not shown: ")[1].split("covers it.")[1].split("Definitions")[0]


@pytest.mark.parametrize(
    ("lost", "title", "said"),
    [
        (0, "Head plan", "Evaluated, forward: safe, recall unknown (recall is unknown: it was not asked)."),
        (200, "Head plan, tried and not safe", "Evaluated, forward: loses"),
        (None, "Head plan, tried and not safe", "Evaluated, loses +0.300 nats per token (limit 0.05) on held-out text"),
    ],
)
def test_the_plan_says_whether_its_evaluation_shows_it_to_be_safe(
    tmp_path: Path, lost: int | None, title: str, said: str
) -> None:
    grid = [site(i, HEADS, KV_HEADS) for i in range(LAYERS)]
    a_store, run_id = write_scan(tmp_path / "s.duckdb", grid, everything(LAYERS, HEADS, TOKENS), TOKENS)
    plan = make_plan(a_store, run_id, window_share=0.5, sink=SINK, recent=RECENT)
    name = f"plan distant_mass 50% {plan.digest}, forward"
    evaluation = a_store.begin_run(evaluation_record(a_store, "e0")).run_id
    arms = {"baseline": ("baseline", 0, {})}
    if lost is not None:
        arms[name] = (
            "plan",
            lost,
            {"selection": "forward", "config": {"mode": "forward", "method": "random", "plan": plan.digest}},
        )
    for arm, (kind, count, fields) in arms.items():
        correct = np.ones(1000)
        correct[:count] = 0
        arm_id = begin_arm(a_store, evaluation, arm, kind, **fields)
        a_store.finish_arm(arm_id, answer_table(np.repeat("sums", 1000), correct), ablated_share=0.0)
    loss = {} if lost is not None else {name: "+0.300 nats per token (limit 0.05)"}
    half = (1000, {name: 0.5})
    arguments = {"scan_run": run_id, "plan": plan, "lost": loss, "cache": half}
    arguments["evaluate_run"] = None if lost is None else evaluation
    path = write_report(a_store, tmp_path / "r.html", **arguments)
    html, text = path.read_text(encoding="utf-8"), shown_text(path)
    assert f"<h2>{title}</h2>" in html and said in text
    assert "not been validated" not in text
    # Its heads by layer, and its bytes at the length of the answers.
    row = " ".join(str(head) for layer, head in plan.window_heads if layer == 0)
    assert f">{row}</td>" in html and '<td class="n">1,000</td>' in html
    assert ("KV cache left at 1,000 tokens" in text) == (lost is not None)
