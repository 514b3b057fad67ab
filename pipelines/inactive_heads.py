"""Inactive heads (arXiv 2504.03889): how many heads can be zeroed within one point of MMLU, by each score.

python pipelines/inactive_heads.py --dry-run --gpus 8
python pipelines/inactive_heads.py --model meta-llama/Llama-3.1-8B
python pipelines/inactive_heads.py --stand-in
"""

from __future__ import annotations

import argparse
import sys

from paper_run import Step, beside, parser, run

import headscan
from headscan.texts import held_out_files, write_task

#: The 13 scores of the paper's main table.
SCORES = (
    "first_token_weight",
    "first_token_weight_ln",
    "entropy",
    "entropy_ln",
    "first_value_norm",
    "first_value_norm_ln",
    "value_norm",
    "value_norm_ln",
    "last_output_norm",
    "last_output_norm_ln",
    "last_output_norm_hn",
    "output_norm",
    "output_norm_ln",
)

#: % of heads zeroed within one point, by model: with first_token_weight, and with the best other score.
PAPER = {
    "Llama-3.2-3B": (8.34, 8.05),
    "Llama-3.2-3B-Instruct": (6.87, 13.04),
    "Llama-3.1-8B": (8.56, 17.11),
    "Llama-3.1-8B-Instruct": (1.01, 10.97),
    "OLMo-2-1124-7B": (0.42, 8.34),
    "OLMo-2-1124-7B-SFT": (1.70, 18.95),
    "OLMo-2-1124-7B-DPO": (2.14, 20.60),
    "OLMo-2-1124-7B-Instruct": (1.46, 19.54),
    "Qwen2.5-0.5B": (7.43, 14.42),
    "Qwen2.5-1.5B": (7.55, 7.49),
    "Qwen2.5-3B": (5.67, 8.78),
    "Qwen2.5-7B": (1.25, 7.54),
    "Qwen2.5-7B-Instruct": (1.13, 5.76),
    "Qwen2.5-14B": (11.04, 9.88),
}

#: The same by score, mean over the 14 models, computed from the authors' published accuracies.
PAPER_MEANS = {
    "output_norm_ln": 11.03,
    "last_output_norm_ln": 8.34,
    "first_token_weight": 4.61,
    "first_value_norm_ln": 4.49,
    "output_norm": 3.07,
    "value_norm_ln": 2.73,
    "last_output_norm_hn": 2.54,
    "first_value_norm": 2.06,
    "last_output_norm": 1.86,
    "entropy": 1.56,
    "first_token_weight_ln": 1.52,
    "random": 1.18,
    "entropy_ln": 0.76,
    "value_norm": 0.35,
}

#: Questions of MMLU, and mean tokens of a question with five examples: 2,918 characters at 4 characters per token.
QUESTIONS, TOKENS = 14_042, 730
SHARES = 6
#: Task of the stand-in.
STAND_IN_TASK = "which_passage"
#: The models whose prompts use the chat template.
TUNED = ("Instruct", "SFT", "DPO")


def steps(options: argparse.Namespace) -> list[Step]:
    """Return the sweep: the recording, and every score and a random control at every share."""
    store = str(options.out / "inactive_heads.duckdb")
    words = [
        "sweep",
        options.model,
        "--store",
        store,
        "--masks",
        "none",
        "--controls",
        "1",
        "--no-recall",
        "--no-confirm",
    ]
    if options.stand_in:
        task = options.out / "task"
        if not options.dry_run:
            write_task(task, held_out_files(), 48, name=STAND_IN_TASK)
        words += [
            "--tasks",
            STAND_IN_TASK,
            "--include-path",
            str(task),
            "--scores",
            "output_norm_ln,first_token_weight",
        ]
        return [Step((*words, "--shares", "0.1,0.3"), 48 * 8 * 160 * 8)]
    words += ["--tasks", "mmlu", "--num-fewshot", "5", "--scores", ",".join(SCORES)]
    if options.model.endswith(TUNED):
        words.append("--apply-chat-template")
    passes = 2 + (len(SCORES) + 1) * SHARES
    return [Step(tuple(words), QUESTIONS * TOKENS * passes, downloads="MMLU, as lm-eval names it")]


def compare(options: argparse.Namespace) -> list[str]:
    """Return the share of heads within one point by score, beside the paper's mean and the paper's model."""
    found = headscan.open_store(options.out / "inactive_heads.duckdb").query(
        "SELECT coalesce(criterion, 'random') AS score, share_within_point FROM score_curves"
        " WHERE run_id = (SELECT run_id FROM runs WHERE kind = 'evaluate' AND status = 'finished'"
        " ORDER BY started_at DESC LIMIT 1)"
        " AND kind IN ('rule', 'random_rule') ORDER BY share_within_point DESC, score"
    )
    rows = [
        {"score": score, "measured %": 100 * share, "paper % (14 models)": PAPER_MEANS.get(score)}
        for score, share in found.fetchall()
    ]
    lines = beside(f"Heads zeroed within one point, {options.model}", rows, "arXiv 2504.03889, published accuracies")
    name = options.model.rpartition("/")[2]
    if name in PAPER:
        first, other = PAPER[name]
        lines.append(f"Paper, {name}: {first} % by first_token_weight, {other} % by the best other score")
    return lines


def main() -> int:
    """Run the script."""
    options = parser(__doc__, "meta-llama/Llama-3.1-8B").parse_args()
    if options.stand_in:
        options.model = "demo"
    return run(options, steps(options), lambda: compare(options))


if __name__ == "__main__":
    sys.exit(main())
