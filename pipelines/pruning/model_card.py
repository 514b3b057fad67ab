"""Model card of a pruned model: what was removed, what it costs, and the verdict."""

from __future__ import annotations

import json
from collections.abc import Sequence

from headscan.pipelines.pruning.held_out_losses import loss_rows
from headscan.pipelines.pruning.pruned_arms import BuiltModel, skipped_layers
from headscan.pipelines.pruning.pruning_table import cost_rows


def model_card(
    built: BuiltModel,
    *,
    model: str,
    revision: str | None,
    calibration: str,
    version: str,
    remote_code: bool = False,
    verdict: Sequence[str] = (),
) -> str:
    """Return the text of ``README.md``.

    Args:
        model: Name of the pruned model.
        revision: Its commit on the hub; None for a folder.
        calibration: What chose the heads and repaired the projections.
        version: Version of headscan.
        remote_code: The folder holds the code of pruned models.
        verdict: Sentences of the evaluation; empty if it was not judged.
    """
    before, after = built.costs.before, built.costs.after
    head = [
        "---",
        f"base_model: {json.dumps(model)}",
        "library_name: transformers",
        "tags: [headscan, pruned]",
        "---",
        "",
        f"# {model} without {before.query_heads - after.query_heads} of {before.query_heads} attention heads",
        "",
        f"Made with headscan {version} from `{model}`{f' at `{revision}`' if revision else ''}. Method"
        f" `{built.method}`, unit {built.unit}, repaired: {built.repair}. Calibration: {calibration}. The licence is"
        " that of the original model.",
        "",
    ]
    if note := skipped_layers(built.skipped):
        head += [f"{note[0].upper()}{note[1:]}.", ""]
    rows = ["| | before | after |", "| --- | ---: | ---: |"]
    rows += [f"| {name} | {one} | {other} |" for name, one, other in cost_rows(built.costs)]
    if losses := loss_rows(built.losses):
        columns = list(losses[0])
        rows += ["", f"| {' | '.join(columns)} |", "| --- | ---: | ---: | ---: |"]
        rows += [f"| {' | '.join(row.values())} |" for row in losses]
    judged = [f"- {sentence}" for sentence in verdict] or ["Not judged."]
    loading = ["## Load", "", "```python", *_loading(remote_code), "```", ""]
    gone = ["## Removed heads", "", _heads(built), ""]
    return "\n".join([*head, *rows, "", "## Verdict", "", *judged, "", *loading, *gone])


def _loading(remote_code: bool) -> list[str]:
    lines = ["from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
    if not remote_code:
        lines.insert(0, "import headscan  # registers pruned models with transformers")
    trust = ", trust_remote_code=True" if remote_code else ""
    return [
        *lines,
        f'model = AutoModelForCausalLM.from_pretrained("THIS_FOLDER"{trust})',
        'tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER")',
    ]


def _heads(built: BuiltModel) -> str:
    layers = sorted({head[0] for head in built.removed})
    return "\n".join(
        f"- layer {layer}: {', '.join(str(head) for each, head in built.removed if each == layer)}" for layer in layers
    )
