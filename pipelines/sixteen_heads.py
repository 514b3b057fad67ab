"""Sixteen Heads (arXiv 1905.10650): effects of single heads, and layers with one head left.

    python pipelines/sixteen_heads.py --dry-run --gpus 1 --model my-bert-mnli --data mnli_dev.tsv
    python pipelines/sixteen_heads.py --model my-bert-mnli --data mnli_dev.tsv
    python pipelines/sixteen_heads.py --stand-in

The paper trained a translation model with fairseq and fine-tuned BERT on GLUE; use a fine-tuned model of your own.
"""

from __future__ import annotations

import argparse
import sys

from paper_run import FORWARD_AND_BACKWARD, Step, beside, parser, run

from headscan.store.store import Store
from headscan.verdicts.head_effects import effect_facts, read_effects

#: Heads of the encoder of the translation model, those with an effect, and those that are better removed.
PAPER_HEADS, PAPER_SIGNIFICANT, PAPER_HELPFUL = 96, 8, 4
#: Worst change of BLEU when a layer keeps its best head, by kind of attention.
PAPER_ALL_BUT_ONE = "-1.31 BLEU in encoder self-attention, -13.56 in the last encoder-decoder layer"
#: Share of heads that iterative removal takes without visible loss.
PAPER_PRUNABLE = "WMT about 20 %, MNLI 40 %, SST-2 60 %, CoLA and MRPC 50 %"

#: Tokens of the texts that are measured: sequences times length.
SEQUENCES, TOKENS = 256, 512
#: Heads of BERT base, for the hours that are foretold.
HEADS = 144


def steps(options: argparse.Namespace) -> list[Step]:
    """Return the importance, the effects of single heads, and of all but one head of a layer."""
    store = ["--store", str(options.out / "sixteen_heads.duckdb")]
    if options.stand_in:
        sequences, tokens, heads = 12, 128, 48
    else:
        sequences, tokens, heads = SEQUENCES, TOKENS, HEADS
    if options.data:
        texts = ["--data", options.data]
    else:
        corpus = "python-stdlib" if options.stand_in else options.corpus
        texts = ["--corpus", corpus, "--max-tokens", str(tokens)]
    limit = [] if options.data else ["--limit-sequences", str(sequences)]
    ablated = [] if options.data else ["--sequences", str(sequences)]
    size = sequences * tokens
    return [
        Step(("importance", options.model, *texts, *limit, *store), size, FORWARD_AND_BACKWARD),
        Step(("ablate", options.model, "--each", "--all-but-one", *texts, *ablated, *store), size * (2 * heads + 1)),
    ]


def compare(options: argparse.Namespace) -> list[str]:
    """Return significant heads, the worst layer with one head, and the correlation of effect and importance."""
    store = Store(options.out / "sixteen_heads.duckdb")
    run_id = store.resolve_run(kind="ablate")["run_id"]
    each = read_effects(store, run_id, "each")
    facts = effect_facts(each)
    left = read_effects(store, run_id, "all_but_one")
    worst = max(left, key=lambda effect: effect.harm)
    paper = f"{PAPER_SIGNIFICANT} of {PAPER_HEADS} heads"
    rows = [
        {"": "heads with a significant effect", "measured": f"{facts['significant']} of {len(each)}", "paper": paper},
        {"": "of these, better without", "measured": str(facts["helpful"]), "paper": f"{PAPER_HELPFUL}"},
        {
            "": "worst layer with its best head alone",
            "measured": f"layer {worst.layer}: {worst.effect:+.3g} {worst.metric}",
            "paper": PAPER_ALL_BUT_ONE,
        },
        {"": "prunable, most important heads last", "measured": "headscan referee", "paper": PAPER_PRUNABLE},
    ]
    return beside(f"Single heads of {options.model}", rows, "arXiv 1905.10650, WMT14 English-French and GLUE")


def main() -> int:
    """Run the script."""
    found = parser(__doc__, "bert-base-uncased")
    found.add_argument("--data", help="file of labelled texts, for a classifier or a translation model")
    found.add_argument(
        "--corpus", default="HuggingFaceFW/fineweb-edu", help="texts without labels (default: fineweb-edu)"
    )
    options = found.parse_args()
    if options.stand_in:
        options.model = "demo"
    return run(options, steps(options), lambda: compare(options))


if __name__ == "__main__":
    sys.exit(main())
