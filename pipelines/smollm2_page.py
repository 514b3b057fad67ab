"""The page of `smollm2.py`, with its figures, from the stores and answers of the steps that have finished."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from plans import MEASURED
from scipy.stats import kendalltau

from headscan.catalog import DAMAGE, LAYER_DROP, RANDOM, RECALL_FAMILIES
from headscan.runs.progress import time_text
from headscan.steps.referee.referee_table import CriterionLoss, criterion_losses
from headscan.store.store import Store
from headscan.store.tables import ACCURACY, LOSS
from headscan.store.verdict_limits import MARGIN
from headscan.verdicts.arm_verdict import ArmVerdict
from headscan.verdicts.criterion_points import agreements, criterion_points
from headscan.verdicts.judge import judge
from headscan.verdicts.metrics import RATES, Increase, rate_increase, read_losses
from headscan.verdicts.paired import Interval
from headscan.verdicts.scope_verdicts import RecallVerdict

#: Options of the comparison: one half of the texts measures the criteria, the other one judges.
COMPARED = tuple("--shares 0.05,0.1,0.2,0.3,0.4 --controls 3 --max-tokens 256 --sequences 48 --no-recall".split())
#: Options of the comparison by accuracy, on the questions of the study.
ASKED = ("--shares", "0.05,0.1,0.2", *COMPARED[2:])
#: Options of the pruning; a random model and one without whole layers, both with the same repair, stand beside each.
PRUNED = tuple("--shares 0.1,0.2,0.3,0.4 --sequences 64 --recall-lengths 512".split())
#: Criteria with a colour in the figure, the best ones.
_COLOURED = 8
#: Behaviours whose strongest heads are looked up in the order of inactive heads.
BEHAVIOURS = ("induction_score", "previous_token_score", "retrieval_score")
_STRONGEST = 5
#: Characters of a line of the page.
_WIDTH = 130
#: Limit of the increase of the loss, in nats per token, as in the study.
_MAX_LOSS = 0.05


def write_page(options: argparse.Namespace) -> list[str]:
    """Write the page and its figures; return lines about them."""
    store = Store(options.out / "study" / "study.duckdb")
    files = [options.out / name / "answers.json" for name in ("study", "heads")]
    files = [file for file in files if file.exists()]
    found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    page: Path = options.page or options.out / "smollm2.md"
    figures = page.with_suffix("")
    figures.mkdir(parents=True, exist_ok=True)
    heads = _heads(store)
    parts = [_opening(found, store, options.beside), _answers(found), _sinks(heads, figures)]
    referee, accuracy = options.out / "referee.duckdb", options.out / "accuracy.duckdb"
    if referee.exists():
        parts.append(_criteria(Store(referee), heads, figures))
    if accuracy.exists():
        parts.append(_accuracies(Store(accuracy), heads))
    if models := judged_models(options.out / "pruned.duckdb"):
        parts.append(_pruning(models))
        if graded := judged_models(options.out / "pruned-accuracy.duckdb"):
            parts.append(_pruned_accuracy(graded, models))
    if plans := {int(file.stem.partition("-")[2]): file for file in options.out.glob("plans-*.json")}:
        parts.append(_plans({tokens: json.loads(plans[tokens].read_text("utf-8")) for tokens in sorted(plans)}))
    parts += [_choice(store, figures), _tail(heads), _commands(options, files)]
    page.write_text("\n\n".join(map(_wrapped, "\n\n".join(parts).split("\n\n"))) + "\n", encoding="utf-8")
    return [f"page     {page}", f"figures  {figures}"]


def _opening(studies: Sequence[Mapping[str, Any]], store: Store, beside: str) -> str:
    answers, asked = studies[0], " and ".join(f"{each['questions']:,}" for each in studies)
    runs = store.query(
        "SELECT kind, sum(epoch(finished_at - started_at)) AS seconds FROM runs"
        " WHERE finished_at IS NOT NULL GROUP BY kind ORDER BY kind"
    ).to_pylist()
    took = ", ".join(f"{row['kind']} {time_text(row['seconds'])}" for row in runs)
    devices = store.query("SELECT DISTINCT provenance ->> '$[#-1].device' AS name FROM runs ORDER BY name").to_pylist()
    machine = " and ".join(row["name"] or "unknown" for row in devices)
    return (
        f"# {answers['model']}: what can go\n\n"
        f"`headscan study` on a real model: {answers['layers']} layers, {answers['heads']} heads, judged on"
        f" {asked} questions and {answers['texts']} texts of up to {answers['tokens']:,} tokens."
        f" Device: {machine}; {beside}. Time by kind of run: {took}.\n\n"
        "The weights are a 4-bit checkpoint of a model with 135 million parameters, read as float32: its numbers are"
        " those of this checkpoint. They show what the methods do, and say nothing about the shares that larger models"
        " can lose."
    )


def _answers(studies: Sequence[Mapping[str, Any]]) -> str:
    changes = ("loss, nats per token", "accuracy, points", "expected accuracy, points")
    rows = [("saving", "share tried", "saves", *changes, *_recall_headings(), "verdict")]
    for answers in studies:
        asked = f", {answers['questions']:,} questions" * (len(studies) > 1)
        for saving in answers["savings"]:
            judged = {each["name"]: each for each in saving["judged"]}
            for number, (name, share) in enumerate(saving["tried"]):
                loss, verdict = answers["losses"][name], judged.get(name)
                kind = f"{saving['kind']}{asked}" if number == 0 else ""
                cells = ["", "", "", "", "loses (loss)" if (loss["low"] or 0) > answers["max_loss"] else "not asked"]
                if verdict is not None:
                    recall = {each["family"]: each["paired"]["retained"] for each in verdict["recall"]}
                    kept = [recall.get(family) for family in RECALL_FAMILIES]
                    paired = (verdict["accuracy"], verdict["expected"])
                    cells = [
                        *(f"{each['difference']:+.1f} {_range(each, '+.1f')}" if each else "" for each in paired),
                        *("" if each is None else f"{each['value']:.0f} {_range(each, '.0f')}" for each in kept),
                        verdict["label"] + (f": {verdict['why']}" if verdict["why"] else ""),
                    ]
                saved = [
                    f"{what} {100 * of_arm[name]:.1f} %"
                    for what, of_arm in (("cache", saving["cache_saved"]), ("weights", saving["weights_saved"]))
                    if name in of_arm
                ]
                change = f"{loss['difference']:+.3f} {_range(loss, '+.3f')}"
                rows.append((kind, f"{100 * share:.3g} %", ", ".join(saved), change, *cells))
    limits = (
        "[What *safe* and *loses* mean](study.md#how-it-decides), here with a limit of"
        f" {studies[0]['max_loss']:g} nats per token. The first share of a kind that is not safe ends the test."
        f" *Saves* counts the cache at {max(each['length'] for each in studies[0]['savings']):,} tokens. Expected"
        " accuracy is by the probability of the right choice, and decides."
        + " Both studies judge on the same texts, so for both together a wrong *safe* is at most twice as likely: 5 %."
        * (len(studies) > 1)
    )
    return f"## Answers\n\n{_table(rows)}\n\n{limits}"


def _recall_headings() -> list[str]:
    return [f"{family.heading}, %" for family in RECALL_FAMILIES.values()]


def _range(interval: Mapping[str, Any], digits: str) -> str:
    ends = (interval.get("low"), interval.get("high"))
    return "[" + ", ".join("" if end is None else f"{end:{digits}}" for end in ends) + "]"


def _heads(store: Store) -> list[dict[str, Any]]:
    """Return one row per head: scores, behaviours, and importance on the texts of the scan and with recall prompts."""
    return store.query(
        "SELECT h.*, b.* EXCLUDE (run_id, model, site, layer, head), i.importance, i.importance_recall"
        " FROM head_summary h"
        " JOIN behaviour_summary b USING (site, layer, head)"
        " JOIN all_importance_summary i USING (site, layer, head, corpus) ORDER BY layer, head"
    ).to_pylist()


def _sinks(heads: Sequence[Mapping[str, Any]], figures: Path) -> str:
    by_layer: dict[int, list[float]] = {}
    for head in heads:
        by_layer.setdefault(head["layer"], []).append(head["first_token_weight"])
    weights = [head["first_token_weight"] for head in heads]

    def draw(plt: Any) -> None:
        plt.imshow(list(by_layer.values()), aspect="auto", cmap="viridis", vmin=0, vmax=1)
        plt.xlabel("head"), plt.ylabel("layer")
        plt.colorbar(label="mean attention to the first token")

    image = _figure(figures / "sinks.svg", draw, "Attention to the first token, by layer and head", size=(5, 6))
    strongest = max(heads, key=lambda head: head["first_token_weight"])
    return (
        f"## Sinks\n\nMean attention to the first token: {sum(weights) / len(weights):.2f} over all heads;"
        f" {sum(weight > 0.5 for weight in weights)} of {len(weights)} heads give it more than half, most of all head"
        f" {strongest['layer']}.{strongest['head']} ({strongest['first_token_weight']:.2f}).\n\n{image}"
    )


def _referee(store: Store, heads: Sequence[tuple[int, int]]) -> tuple[list[CriterionLoss], dict[str, float]]:
    """Return the results of the newest comparison of criteria, and each criterion's tau with ``importance``."""
    rows = store.query(
        "SELECT DISTINCT run_id, runs.started_at FROM runs JOIN arms USING (run_id) WHERE runs.kind = 'evaluate'"
        " AND runs.finished_at IS NOT NULL AND arms.config->>'$.criterion' IS NOT NULL"
        " ORDER BY runs.started_at DESC LIMIT 1"
    ).to_pylist()
    verdict = judge(store, rows[0]["run_id"])
    points = criterion_points(store, verdict)
    controls = [arm for arm in verdict.by_name.values() if arm.kind.is_random]
    tau = {
        other: found.tau
        for found in agreements(points, heads)
        for this, other in ((found.first[0], found.second[0]), (found.second[0], found.first[0]))
        if this == "importance"
    }
    return criterion_losses(points, controls), tau


def _criteria(store: Store, heads: Sequence[Mapping[str, Any]], figures: Path) -> str:
    results, tau = _referee(store, [(head["layer"], head["head"]) for head in heads])
    losses = [row for row in results if row.measure == LOSS]
    curves: dict[str, list[CriterionLoss]] = {}
    for row in sorted(losses, key=lambda row: row.share):
        curves.setdefault(row.criterion, []).append(row)
    order = sorted(curves, key=lambda name: sum(row.value for row in curves[name]))
    shares = sorted({row.share for row in losses})

    def draw(plt: Any) -> None:
        for number, name in enumerate(order):
            style: dict[str, Any] = {"label": name}
            if "random" in name:
                style |= {"color": "black", "linestyle": ":"}
            elif number >= _COLOURED:  # the colours repeat after ten
                style = {"color": "lightgrey", "zorder": 1, "label": "other scores" if number == _COLOURED else None}
            rows = curves[name]
            plt.plot([100 * row.share for row in rows], [row.value for row in rows], marker=".", **style)
        plt.yscale("symlog", linthresh=0.1)
        plt.xlabel("heads zeroed, %"), plt.ylabel("increase of the loss, nats per token")
        plt.legend(fontsize=8)

    image = _figure(figures / "criteria.svg", draw, "Loss against the share of heads zeroed", size=(7, 5))
    table = [("criterion", *(f"{100 * share:g} %" for share in shares), "tau with importance")]
    for name in order:
        cells = {row.share: row for row in curves[name]}
        table.append(
            (
                f"`{name}`" if "random" not in name else name,
                *(_loss(cells[share]) if share in cells else "" for share in shares),
                f"{tau[name]:.2f}" if name in tau else "",
            )
        )
    best = {share: min((rows for rows in losses if rows.share == share), key=lambda row: row.value) for share in shares}
    wins = ", ".join(f"{100 * share:g} %: `{row.criterion}`" for share, row in best.items())
    least = f"{100 * shares[0]:g} %"
    return (
        "## Which heads can be zeroed\n\nIncrease of the loss on texts that chose nothing, in nats per token, when the"
        f" share of heads that a criterion ranks lowest is zeroed; best first by the mean. Least at {wins}. Shown to"
        f" stay below {_MAX_LOSS:g} nats: {_shown(losses)}; with the other criteria not even {least} of the heads."
        f" Recall is not part of it. `headscan referee {' '.join(COMPARED)}`, with these"
        f" criteria.\n\n{_table(table)}\n\n{image}"
    )


def _accuracies(store: Store, heads: Sequence[Mapping[str, Any]]) -> str:
    results, _ = _referee(store, [(head["layer"], head["head"]) for head in heads])
    rows = [row for row in results if row.measure == ACCURACY]
    losses = {(row.criterion, row.share): row.value for row in results if row.measure == LOSS}
    shares = sorted({row.share for row in rows})
    curves: dict[str, dict[float, CriterionLoss]] = {}
    for row in rows:
        curves.setdefault(row.criterion, {})[row.share] = row
    order = sorted(curves, key=lambda name: -sum(row.value for row in curves[name].values()))
    table = [("criterion", *(f"{100 * share:g} %" for share in shares))]
    for name in order:
        cells = [
            f"{row.value:+.1f}" + ("" if row.low is None else f" [{row.low:+.1f}, {row.high:+.1f}]")
            for row in (curves[name][share] for share in shares)
        ]
        table.append((name if "random" in name else f"`{name}`", *cells))
    (asked,) = store.query(
        "SELECT count(*) AS questions, 100 * avg(correct) AS accuracy FROM answers JOIN arms USING (arm_id)"
        " WHERE kind = 'baseline' AND NOT recall AND correct IS NOT NULL"
    ).to_pylist()
    lost, kept, taus = [], [], []
    for share in shares:
        ranked = [row for row in rows if row.share == share and row.low is not None]
        size = f"{100 * share:g} %"
        lost.append(f"{sum((row.high or 0) < -MARGIN for row in ranked)} of {len(ranked)} at {size}")
        kept += [f"`{row.criterion}` at {size}" for row in ranked if (row.low or 0) > -MARGIN]
        of_loss = [losses[row.criterion, share] for row in ranked]
        taus.append(f"{-kendalltau([row.value for row in ranked], of_loss).statistic:.2f} at {size}")
    return (
        f"### By accuracy\n\nChange of accuracy in points, with 95 % intervals, on {asked['questions']:,} of the"
        f" study's questions, of which the whole model answers {asked['accuracy']:.1f} % right (25 % by guessing); best"
        f" first by the mean. Criteria shown to lose more than one point, each by its own interval: {', '.join(lost)};"
        f" shown not to: {', '.join(kept) or 'none'}. Kendall's tau between the orders of criteria by accuracy and by"
        f" loss: {', '.join(taus)}. `headscan referee --tasks continuation {' '.join(ASKED)}"
        f" --limit {asked['questions']}`.\n\n{_table(table)}"
    )


#: Columns of a pruned model's sizes and time.
_SIZES = ("weights, %", "KV cache, %", "prefill, %")
#: What chose the heads of a pruned model, by its method.
_CHOSEN = {DAMAGE: "damage", RANDOM: "chance", LAYER_DROP: "damage, whole layers"}


@dataclass(frozen=True)
class _PrunedModel:
    """A pruned model or a control: its arm in the store with its settings, how it was judged, and the loss of text,
    minus that of the original and of the model without the heads of least damage. Intervals are over texts, which may
    be parts of one document.
    """

    arm: Mapping[str, Any]
    heads: frozenset[tuple[int, int]]
    outcome: ArmVerdict
    loss: Increase
    minus_damage: Increase | None


def judged_models(file: Path) -> list[_PrunedModel]:
    """Return the pruned models of finished evaluations, by share; none if there is no such run."""
    if not file.exists():
        return []
    store = Store(file)
    arms = store.query(
        "SELECT run_id, arm_id, mask_id, name, criterion, share, arms.config, provenance ->> '$[#-1].device' AS device"
        " FROM arms JOIN runs USING (run_id)"
        " WHERE arms.kind IN ('pruned', 'random_pruned', 'layers_dropped') AND runs.finished_at IS NOT NULL"
        " ORDER BY share, list_position(?, criterion)",
        [list(_CHOSEN)],
    ).to_pylist()
    verdicts = {run_id: judge(store, run_id) for run_id in {arm["run_id"] for arm in arms}}
    originals = store.query("SELECT run_id, arm_id FROM arms WHERE kind = 'baseline'").to_pylist()
    original = {row["run_id"]: row["arm_id"] for row in originals}
    by_damage = {arm["share"]: arm["arm_id"] for arm in arms if arm["criterion"] == DAMAGE}
    models = []
    for arm in arms:
        other = by_damage.get(arm["share"], arm["arm_id"])
        models.append(
            _PrunedModel(
                arm,
                frozenset(store.mask(arm["mask_id"]).heads),
                verdicts[arm["run_id"]].by_name[arm["name"]],
                _increase_by_text(store, arm["arm_id"], original[arm["run_id"]]),
                _increase_by_text(store, arm["arm_id"], other) if other != arm["arm_id"] else None,
            )
        )
    return models


def _increase_by_text(store: Store, arm: str, other: str) -> Increase:
    """Return the difference of two arms in the loss of held-out text, with texts instead of documents as independent
    units.
    """
    sums = store.query(
        "SELECT a.question,"
        " (a.metrics ->> '$.loss[0]')::DOUBLE AS arm, (b.metrics ->> '$.loss[0]')::DOUBLE AS other,"
        " (b.metrics ->> '$.loss[1]')::DOUBLE AS tokens FROM answers a JOIN answers b USING (task, question)"
        " WHERE a.arm_id = ? AND b.arm_id = ? AND a.metrics ->> '$.loss[0]' IS NOT NULL ORDER BY a.question",
        [arm, other],
    )
    columns = (sums[name].to_numpy() for name in ("other", "arm", "tokens", "question"))
    return rate_increase(RATES[LOSS], *columns)


def _pruning(models: Sequence[_PrunedModel]) -> str:
    asked = max(each.paired.questions for each in models[0].outcome.recall)
    return (
        "## What pruning removes\n\nModels without heads, their other projections repaired, on"
        f" {models[0].loss.documents} texts that neither chose nor repaired and {asked} recall questions of each kind:"
        " what is left of the original's recall. Intervals of the loss are over texts, which are parts of few"
        " documents. Random heads are one draw. *Minus damage* is the paired difference to the loss without as many"
        " heads of least damage. *Prefill* is the time to read a prompt; controls are not timed."
        f" `{_prune_command(models)}`.\n\n{_pruned_table(models)}"
    )


def _pruned_accuracy(graded: Sequence[_PrunedModel], others: Sequence[_PrunedModel]) -> str:
    """Return the accuracy of models of another run of the same command; ``others`` are the models above."""
    removed = {(each.arm["criterion"], each.arm["share"]): each.heads for each in others}
    pairs = [(each.heads, removed.get((each.arm["criterion"], each.arm["share"]), frozenset())) for each in graded]
    differing = [(len(ours & theirs), len(ours)) for ours, theirs in pairs if ours != theirs]
    same = (
        "They remove the same heads as the models above"
        if not differing
        else f"{len(graded) - len(differing)} of the {len(graded)} models remove the same heads as those above, and the"
        f" others share {', '.join(f'{both} of {count}' for both, count in differing)} with them: rounding decides"
        " between heads of about equal damage"
    )
    accuracy = graded[0].outcome.paired
    halves = [(each.outcome.paired.high - each.outcome.paired.low) / 2 for each in graded]
    device = graded[0].arm["device"].upper()
    return (
        f"### By accuracy\n\nThe same command with {accuracy.questions:,} of the study's questions, of which the whole"
        f" model answers {accuracy.baseline:.1f} % right (25 % by guessing), on {device}. The intervals reach about"
        f" {min(halves):.0f} to {max(halves):.0f} points to each side, so smaller differences do not show. {same}."
        f" `{_prune_command(graded)}`.\n\n{_pruned_table(graded, graded=True)}"
    )


def _prune_command(models: Sequence[_PrunedModel]) -> str:
    asked, accuracy = max(each.paired.questions for each in models[0].outcome.recall), models[0].outcome.accuracy
    graded = "" if accuracy is None else f" --tasks continuation --limit {accuracy.questions}"
    return f"headscan prune {' '.join(PRUNED)} --recall-questions {asked}{graded}"


def _pruned_table(models: Sequence[_PrunedModel], *, graded: bool = False) -> str:
    has_accuracy = any(model.outcome.accuracy is not None for model in models)
    rows = [
        (
            "heads removed",
            "chosen by",
            "loss, nats per token",
            *(["accuracy, points"] if has_accuracy else []),
            *([] if graded else ["minus damage", *_recall_headings(), *_SIZES]),
        )
    ]
    for number, model in enumerate(models):
        share = f"{100 * model.arm['share']:g} %: {len(model.heads)}"
        rows.append(
            (
                share if number == 0 or models[number - 1].arm["share"] != model.arm["share"] else "",
                _CHOSEN[model.arm["criterion"]],
                _increased(model.loss),
                *([_points(model.outcome.value(ACCURACY))] if has_accuracy else []),
                *([] if graded else _costs(model)),
            )
        )
    return _table(rows)


def _costs(model: _PrunedModel) -> list[str]:
    """Return the cells of a model that follow its loss: loss against damage, recall, sizes and time."""
    details = json.loads(model.arm["config"])
    kept = {each.family: each.paired.retained for each in model.outcome.recall}
    return [
        _increased(model.minus_damage) if model.minus_damage else "",
        *(_left(kept.get(family)) for family in RECALL_FAMILIES),
        f"{100 * details['weights_left']:.1f}",
        f"{100 * details['cache_left']:.1f}",
        _prefill(details),
    ]


def _prefill(details: Mapping[str, Any]) -> str:
    """Return the time of a prefill as a share of the original's; empty for controls, which are not timed."""
    before, after = (details[which].get("prefill_seconds") for which in ("before", "after"))
    return f"{100 * after / before:.0f}" if before and after else ""


def _points(accuracy: Interval | None) -> str:
    return "" if accuracy is None else f"{accuracy.value:+.1f} [{accuracy.low:+.1f}, {accuracy.high:+.1f}]"


def _increased(loss: Increase) -> str:
    return f"{loss.difference:+.3f} {_range(asdict(loss), '+.3f')}"


def _plans(lost: Mapping[int, Sequence[Mapping[str, Any]]]) -> str:
    """Return a table of what plans cost, by length in tokens; ``lost`` holds the rows of plans.py."""
    names = list(dict.fromkeys(row["plan"] for losses in lost.values() for row in losses))
    rows = [("tokens", "judged on", *(f"`{name}`" for name in names))]
    for tokens, losses in lost.items():
        found = {(row["judged_on"], row["plan"]): row for row in losses}
        for number, judged_on in enumerate(dict.fromkeys(row["judged_on"] for row in losses)):
            family, prompts = judged_on.partition("@")[0], found[judged_on, MEASURED]["prompts"]
            heading = RECALL_FAMILIES[family].heading if family in RECALL_FAMILIES else "text"
            cells = [_plan_loss(found[judged_on, name]) for name in names]
            rows.append((f"{tokens:,}" if number == 0 else "", f"{heading} ({prompts})", *cells))
        differ = {row["plan"]: f"{row['heads_differ']}" for row in losses}
        rows.append(("", f"heads that differ, of {losses[0]['windows']}", *(differ[name] for name in names)))
    return (
        "## What windows on KV heads cost\n\nPlans with windows on the same number of KV heads, on texts and prompts"
        " that neither ranked heads nor chose a plan. A window has 4 first tokens, and as many last ones as make it an"
        " eighth of the length. Increases of the loss in nats per token, and after each its difference to that of"
        f" `{MEASURED}`, with paired 95 % intervals (t, over texts or prompts).\n\n" + _table(rows)
    )


def _plan_loss(row: Mapping[str, Any]) -> str:
    value, low, high = row["minus_measured"]
    difference = "" if row["plan"] == MEASURED else f"; {value:+.3f} [{low:+.3f}, {high:+.3f}]"
    return f"{row['loss']:+.3f}{difference}"


def _left(kept: Interval | None) -> str:
    return "" if kept is None else f"{kept.value:.0f} [{kept.low:.0f}, {kept.high:.0f}]"


def _shown(losses: Sequence[CriterionLoss]) -> str:
    """Return the criteria whose heads are shown to cost less than the limit, each with its largest share."""
    kept = [row for row in losses if row.high is not None and row.high < _MAX_LOSS]
    largest = {row.criterion: row.share for row in sorted(kept, key=lambda row: row.share)}
    named = [f"`{name}` at {100 * share:g} %" for name, share in sorted(largest.items(), key=lambda each: -each[1])]
    return ", ".join(named) or "none"


def _loss(row: CriterionLoss) -> str:
    if row.low is None or row.high is None:
        return f"{row.value:+.3f}"
    return f"{row.value:+.3f} [{row.low:+.3f}, {row.high:+.3f}]"


def _choice(store: Store, figures: Path) -> str:
    """Return what each criterion of the study keeps of loss and recall, on the texts that chose between them."""
    run_id = store.query(
        "SELECT run_id FROM arms WHERE selection = 'study' GROUP BY run_id"
        " ORDER BY count(DISTINCT criterion) DESC, run_id"
    )[0][0].as_py()
    verdict, losses = judge(store, run_id), read_losses(store, run_id)
    kept = {arm.name: {each.family: each for each in arm.recall} for arm in verdict.by_name.values()}
    arms = store.query(
        "SELECT name, criterion, share FROM arms WHERE run_id = ? AND criterion IS NOT NULL ORDER BY criterion, share",
        [run_id],
    ).to_pylist()
    found = {(arm["criterion"], arm["share"]): _loss_and_recall(losses[arm["name"]], kept[arm["name"]]) for arm in arms}
    names = list(dict.fromkeys(arm["criterion"] for arm in arms))
    rows = [("heads zeroed, %", *(f"`{name}`" for name in names))]
    for share in sorted({arm["share"] for arm in arms}):
        rows.append((f"{100 * share:g}", *(found.get((name, share), "") for name in names)))
    first = {family: each.paired for family, each in kept[arms[0]["name"]].items()}
    asked = max(paired.questions for paired in first.values())
    image = _copying_figure(arms, kept, figures)
    return (
        "## Which criterion keeps copying\n\nThe study's choice of a criterion, on texts and"
        f" {asked} recall questions of each kind that judge nothing. The whole model "
        + " and ".join(RECALL_FAMILIES[family].does.format(paired.baseline) for family, paired in first.items())
        + ". `importance_recall` is the larger of the importance on texts"
        " and on needle and copying prompts, each over its mean; the other criteria see text alone. Each cell has the"
        " increase of the loss in nats per token, and what the model still does of"
        f" {' and '.join(family.heading for family in RECALL_FAMILIES.values())}, in percent.\n\n"
        f"{_table(rows)}\n\n{image}"
    )


def _loss_and_recall(loss: Increase, recall: Mapping[str, RecallVerdict]) -> str:
    left = [f"{recall[family].paired.arm:.0f}" for family in RECALL_FAMILIES if family in recall]
    return "; ".join([_increased(loss), *left])


def _copying_figure(
    arms: Sequence[Mapping[str, Any]], kept: Mapping[str, Mapping[str, RecallVerdict]], figures: Path
) -> str:
    """Draw the copying that is left against the share of heads zeroed, by criterion."""

    def draw(plt: Any) -> None:
        for score in dict.fromkeys(arm["criterion"] for arm in arms):
            of_score = [arm for arm in arms if arm["criterion"] == score]
            first = kept[of_score[0]["name"]]["copying"].paired
            left = [first.baseline, *(kept[arm["name"]]["copying"].paired.arm for arm in of_score)]
            plt.plot([0, *(100 * arm["share"] for arm in of_score)], left, marker="o", label=score)
        plt.ylim(bottom=0)
        plt.xlabel("heads zeroed, %"), plt.ylabel("tokens copied, %")
        plt.legend()

    return _figure(figures / "copying.svg", draw, "Copying left, by the criterion that chooses the heads", size=(6, 4))


def _ordered(heads: Sequence[Mapping[str, Any]], score: str, sign: int) -> list[Mapping[str, Any]]:
    return sorted(heads, key=lambda head: sign * (head[score] or 0))


def _tail(heads: Sequence[Mapping[str, Any]]) -> str:
    """Return where the strongest heads of each behaviour stand among the inactive ones."""
    ranks: dict[str, dict[tuple[int, int], int]] = {}
    for score, sign in (("output_norm_ln", 1), ("first_token_weight", -1), ("importance", 1), ("importance_recall", 1)):
        order = _ordered(heads, score, sign)
        ranks[score] = {(head["layer"], head["head"]): number for number, head in enumerate(order, 1)}
    rows = [("behaviour", "head", "score", *(f"place by `{score}`" for score in ranks))]
    for behaviour in BEHAVIOURS:
        strongest = _ordered(heads, behaviour, -1)[:_STRONGEST]
        for number, head in enumerate(strongest):
            place = (head["layer"], head["head"])
            rows.append(
                (
                    behaviour.removesuffix("_score").replace("_", " ") if number == 0 else "",
                    f"{place[0]}.{place[1]}",
                    f"{head[behaviour]:.2f}",
                    *(f"{found[place]}" for found in ranks.values()),
                )
            )
    return (
        "## Do induction and retrieval heads look inactive?\n\nPlaces among"
        f" {len(heads)} heads: 1 is the head that the criterion removes first. On prose these heads have little to do,"
        " so a score that is measured on prose can call them inactive.\n\n" + _table(rows)
    )


def _commands(options: argparse.Namespace, answers: Sequence[Path]) -> str:
    """Return the command that writes the page, and what each study ran with."""
    asked = ""
    if options.questions is not None:
        asked = f" --questions {options.questions} --recall-questions {options.recall_questions}"
    command = f"python pipelines/smollm2.py --corpus texts/ --hours {options.hours:g}{asked}"
    parts = [f"## Settings\n\n`{command}`; texts: {options.texts or options.corpus}."]
    for file in answers:
        settings = yaml.safe_load((file.parent / "study.yaml").read_text(encoding="utf-8"))
        plain = {name: value for name, value in settings.items() if name not in ("model", "corpus", "out", "judge")}
        shown = yaml.safe_dump(plain, sort_keys=False, default_flow_style=None)
        parts.append(f"`{file.parent.name}/study.yaml`:\n\n```yaml\n{shown}```")
    return "\n\n".join(parts)


def _wrapped(paragraph: str) -> str:
    """Return a paragraph with the line width of the other pages; tables and figures stay."""
    if paragraph.startswith(("|", "#", "!", "```")):
        return paragraph
    return textwrap.fill(paragraph, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def _figure(path: Path, draw: Callable[[Any], None], title: str, size: tuple[float, float]) -> str:
    """Draw a figure, and return the line of the page that shows it."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = path.stem  # the same numbers give the same file
    from matplotlib import pyplot as plt

    plt.figure(figsize=size)
    draw(plt)
    plt.title(title, fontsize=10)
    plt.tight_layout()
    plt.savefig(path, metadata={"Date": None})
    plt.close()
    return f"![{title}]({path.parent.name}/{path.name})"
