"""DuoAttention (arXiv 2410.10819): agreement of a measured KV-cache plan with a published pattern.

    python pipelines/duo_attention.py --dry-run --gpus 1 --pattern FOLDER
    python pipelines/duo_attention.py --pattern FOLDER --model gradientai/Llama-3-8B-Instruct-Gradient-1048k
    python pipelines/duo_attention.py --stand-in

FOLDER holds full_attention_heads.tsv and config.json. The authors publish patterns with their code
(github.com/mit-han-lab/duo-attention, MIT licence).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from paper_run import Step, beside, parser, run

from headscan.plans import HeadPlan, load_plan, read_pattern, write_pattern

#: Published at this share of KV heads with a full cache, for grouped heads; 0.25 for models without groups.
PAPER_FULL = 0.5
#: Memory and decoding speed at that share, on the authors' engine.
PAPER_SAVING = "1.67 x less memory, 1.50 x faster decoding (2.55 x and 2.18 x at 25 % without groups)"
#: Tokens of the prompts and texts of the measured plan, and passes over them: windows at four gates, with gradients.
TOKENS, PASSES = 40 * 2048, 24


def steps(options: argparse.Namespace) -> list[Step]:
    """Return the plan of method measured; the stand-in measures its pattern too, with another seed."""
    share = ["--window-share", f"{1 - PAPER_FULL:g}"]
    words = ("plan", options.model, "--method", "measured", *share, "--out", str(options.out / "measured.json"))
    if options.stand_in:
        small = ("--corpus", "python-stdlib", "--max-tokens", "256", "--sequences", "4", "--recall-prompts", "8")
        narrow = (*small, "--sink", "4", "--recent", "60", "--no-search")
        again = ("plan", options.model, "--method", "measured", *share, *narrow, "--seed", "1")
        return [
            Step((*words, *narrow), 12 * 256 * PASSES),
            Step((*again, "--out", str(options.out / "again.json")), 12 * 256 * PASSES),
        ]
    widths = ("--corpus", options.corpus, "--sink", "128", "--recent", "256")
    prompts = ("--max-tokens", "2048", "--sequences", "64", "--recall-prompts", "32")
    return [Step((*words, *widths, *prompts), TOKENS * PASSES)]


def agreement(plan: HeadPlan, values: np.ndarray) -> dict[str, float]:
    """Return how far a plan's heads with a full cache are those of a pattern.

    Args:
        values: (layers, KV heads), high = keeps its full cache.

    Returns:
        ``both``: share of the pattern's full heads that the plan keeps full; ``chance``: the same for random heads;
        ``rank correlation``: Spearman's, of the plan's scores and the pattern's numbers.
    """
    from scipy.stats import spearmanr

    heads = plan.heads
    own = np.array([head.window is None for head in heads])
    scores = np.array([head.keep_score for head in heads])
    theirs = np.array([values[head.layer, head.kv_head] for head in heads])
    full = np.zeros(len(heads), dtype=bool)
    full[np.argsort(-theirs, kind="stable")[: own.sum()]] = True
    return {
        "both": float((own & full).sum() / own.sum()),
        "chance": float(own.mean()),
        "rank correlation": float(spearmanr(scores, theirs).statistic),
    }


def compare(options: argparse.Namespace) -> list[str]:
    """Return the agreement beside that of random heads."""
    plan = load_plan(options.out / "measured.json")
    if options.stand_in:
        write_pattern(load_plan(options.out / "again.json"), options.out / "pattern")
    pattern = read_pattern(options.pattern or options.out / "pattern")
    if pattern.heads != "kv_head" or pattern.values.shape[0] != len(plan.model.layers):
        return [f"the pattern has {pattern.values.shape} numbers of {pattern.heads}s, not those of {options.model}"]
    found = agreement(plan, pattern.values)
    rows = [
        {"": "full heads of the pattern that the plan keeps", "measured": found["both"], "random": found["chance"]},
        {"": "rank correlation of the numbers", "measured": found["rank correlation"], "random": 0.0},
    ]
    lines = beside(f"Pattern and plan of {options.model}, half of the KV heads full", rows, "arXiv 2410.10819")
    return [*lines, f"Paper, at half of the KV heads: {PAPER_SAVING}"]


def main() -> int:
    """Run the script."""
    found = parser(__doc__, "gradientai/Llama-3-8B-Instruct-Gradient-1048k")
    found.add_argument("--pattern", type=Path, help="folder with the published pattern")
    found.add_argument("--corpus", default="HuggingFaceFW/fineweb-edu", help="texts (default: fineweb-edu)")
    options = found.parse_args()
    if options.stand_in:
        options.model = "demo"
    elif options.pattern is None and not options.dry_run:
        found.error("--pattern names the folder of the published pattern")
    return run(options, steps(options), lambda: compare(options))


if __name__ == "__main__":
    sys.exit(main())
