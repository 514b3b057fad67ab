"""Write the demo model's card.

headscan demo --out DIR && python pipelines/demo_model/card.py --store DIR/study.duckdb
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from training_files import TRAINING_PACKAGES

import headscan
from headscan.demo import MODEL_FOLDER
from headscan.report.notebook_tables import StoreTables
from headscan.text_tables import percent
from headscan.texts import held_out_files

_HEADS = {
    "first_token_weight": "First-token weight (mean attention on token 0, which is BOS)",
    "entropy": "Entropy (nats)",
    "output_norm_ln": "Layer-normalised output norm",
}


def write_card(tables: StoreTables, folder: Path) -> Path:
    """Write ``README.md`` from the newest scan and evaluation."""
    training = json.loads((folder / "training.json").read_text())
    lines = [*_front(training), *_heads(tables), *_ablation_cost(tables)]
    path = folder / "README.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _front(training: dict[str, Any]) -> list[str]:
    recipe, last = training["recipe"], training["history"][-1]
    arguments = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in recipe.items())
    history = [
        f"| {point['step']} | {point['tokens'] / 1e6:.1f} M | {point['train_loss']:.3f} | {point['loss']:.3f} "
        f"| {100 * point['accuracy']:.1f} % | {point['first_token_weight_max']:.3f} |"
        for point in training["history"]
    ]
    return [
        "# The demo model",
        "",
        f"A Llama-type decoder with grouped-query attention: {training['parameters']:,} parameters,",
        f"{recipe['layers']} layers, {recipe['heads']} query and {recipe['kv_heads']} KV heads a layer, hidden size",
        f"{recipe['hidden_size']}, tied embeddings, {recipe['context']} tokens of context, byte-level BPE of",
        f"{recipe['vocabulary']} entries. It continues Python source. It exists so that every step of headscan runs on",
        "real attention within minutes; it is good for nothing else.",
        "",
        "## Data",
        "",
        f"The standard library of Python {training['python']} {recipe['stdlib_epochs']} times, without its tests, and",
        "the source of installed packages. Files that share more than a tenth of their long lines with a held-out one",
        "are dropped. Every sequence begins with BOS.",
        "",
        f"Packages: {', '.join(TRAINING_PACKAGES)}.",
        "",
        f"Held out by name, and never seen: {', '.join(path.stem for path in held_out_files())}.",
        "",
        "## Training",
        "",
        f"{recipe['steps']} steps of {recipe['batch']} x {recipe['context']} tokens ({last['tokens'] / 1e6:.1f} M),",
        f"the first {100 * recipe['short_share']:g} % of them on sequences of half that length. Muon (learning rate",
        f"{recipe['matrix_learning_rate']}) for the blocks' matrices, AdamW ({recipe['learning_rate']}) for the rest;",
        f"warm-up {recipe['warmup']}, constant, linear decay over the last {100 * recipe['decay_share']:g} %;",
        f"weight decay {recipe['weight_decay']}; bfloat16 autocast; seed {recipe['seed']};",
        f"{training['seconds'] / 60:.0f} minutes on 2 CPU cores shared with other work, torch {training['torch']}.",
        "",
        f"    python pipelines/demo_model/train.py --out DIR --compile {arguments}",
        "",
        "Loss in nats a token and next-token accuracy on every eighth sequence of the held-out modules:",
        "",
        "| step | tokens | training loss | held-out loss | accuracy | strongest first-token weight |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
        *history,
        "",
    ]


def _heads(tables: StoreTables) -> list[str]:
    heads = tables.heads()
    [(run_id,)] = heads.project("run_id").distinct().fetchall()
    [(count,)] = tables.query("select count(*) from sequences where run_id = ?", [run_id]).fetchall()
    lines = ["## Every head", "", f"Means over {count} sequences of held-out modules.", ""]
    for name, title in _HEADS.items():
        rows = heads.aggregate(f"layer, list({name} order by head)", "layer").order("layer").fetchall()
        width = len(rows[0][1])
        lines += [f"{title}:", "", "| layer | " + " | ".join(f"head {h}" for h in range(width)) + " |"]
        lines += ["| ---: |" + " ---: |" * width]
        lines += [f"| {layer} | " + " | ".join(f"{value:.3f}" for value in values) + " |" for layer, values in rows]
        lines.append("")
    return lines


def _ablation_cost(tables: StoreTables) -> list[str]:
    verdict = tables.verdict()
    baseline = verdict.arms[0].paired
    return [
        "## What ablating heads costs",
        "",
        f"On the demo task ({baseline.questions} questions, four passages, chance 25 %) the model answers "
        f"{baseline.baseline:.1f} % rightly. With heads ablated, in points, with 95 % intervals:",
        "",
        "| arm | heads ablated | accuracy | difference | 95 % interval |",
        "| :--- | ---: | ---: | ---: | :--- |",
        *(
            f"| {arm.name} | {percent(arm.arm.ablated_share or 0)} | {arm.paired.arm:.1f} % "
            f"| {arm.paired.difference:+.1f} | {arm.paired.low:+.1f} to {arm.paired.high:+.1f} |"
            for arm in verdict.arms
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True)
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER)
    options = parser.parse_args()
    print(write_card(headscan.open_store(options.store), options.model))


if __name__ == "__main__":
    main()
