"""Losses of a pruned model by its calibration: with and without recall prompts, by effort, and by number of texts.

    python -m tests.benchmarks.bench_calibration [--model demo --corpus A --held-out B --heads 19 --weights 0,0.3]
    python -m tests.benchmarks.bench_calibration --weights 0.3 --curve-tokens 1024,3072 --tries 0,4 --repair-texts 12,48

Heads are chosen by damage and the projections repaired on the same texts, with each weight of the recall prompts (0:
texts alone) and each effort, and repaired on each number of texts. The losses are those of texts and prompts that
neither chose nor repaired, and of a random block that is repeated. Intervals are 95 % (t, over texts or prompts) of the
increase.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from itertools import product

import numpy as np
import torch
from scipy import stats
from torch.nn import functional as F

from headscan.cluster.placements import WholePlacement
from headscan.cluster.pool import InProcessPool
from headscan.engine.prompt_losses import recall_prompts
from headscan.long_work import LongWork
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import LoadedModel
from headscan.models.token_batches import pad
from headscan.pruning.calibration import Calibration
from headscan.pruning.edited_model import NO_EDITS, Edits, edited, logits
from headscan.pruning.head_selection import HeadSelection
from headscan.pruning.repair import RepairConfig, repair
from headscan.pruning.selection_settings import SelectionConfig
from headscan.runs.model_identity import identify
from headscan.steps.prune.calibration_texts import CalibrationPrompts
from headscan.steps.prune.held_out_losses import as_calibration
from headscan.texts import CorpusSpec
from headscan.texts.held_out_text import chunks
from headscan.texts.recall_tasks import recall_series
from headscan.texts.sequences import read_spread, spread
from headscan.texts.token_requests import Request
from tests.benchmarks.measuring import Table, numbers, processor, show

#: Tokens of the repeated block.
_BLOCK = 200


def main() -> None:
    options = _options()
    spec = ModelSpec(options.model, "float32")
    print(f"{processor('cpu')}, {vars(options)}\n", flush=True)
    with InProcessPool(spec, WholePlacement(1, "cpu", options.threads)) as pool:
        pool.one(compare, options)


def compare(lm: LoadedModel, options: argparse.Namespace) -> None:
    """Pool task: print the table."""
    identity = identify(ModelSpec(options.model, "float32"))
    calibrating = read_spread(
        CorpusSpec(options.corpus), identity.tokenizer, options.tokens, options.texts, shortest=64
    )
    judging = read_spread(CorpusSpec(options.held_out), identity.tokenizer, options.tokens, options.judged, shortest=64)
    series = recall_series(identity.tokenizer, options.tokens, options.prompts, 0)
    seen = [CalibrationPrompts(family, prompts).as_calibration(8192) for family, prompts in series.items()]
    judged = {"text": as_calibration([chunk.request for chunk in chunks(identity.tokenizer, judging)], 8192)}
    asked = recall_prompts(identity, options.tokens, options.prompts, 0)
    judged |= {prompts.name: as_calibration(prompts.requests, 8192) for prompts in asked}
    judged["repeated block"] = _repeated(lm.vocab_size, options.prompts)
    original = _losses(lm, judged, NO_EDITS)

    def calibration(count: int, weight: float) -> Calibration:
        texts = Calibration(*pad([text.ids for text in spread(calibrating, count)]))
        share = min(1.0, count / len(calibrating))
        prompts = [each.first(max(1, round(share * each.tokens))) for each in seen]
        return texts.with_prompts(prompts, weight) if weight else texts

    columns = ("recall weight", "curve tokens", "tries", "texts of the repair", "judged on", "original", "heads zeroed")
    table = Table("## Loss, nats per scored token", (*columns, "repaired", "increase [95 %]"))
    for weight, curve_tokens in product(options.weights, options.curve_tokens):
        work = LongWork(say=show)
        for tries in options.tries:
            effort = SelectionConfig(options.moment_tokens, curve_tokens, tries=tries)
            everything = calibration(len(calibrating), weight)
            removed = HeadSelection(lm, everything, config=effort, work=work).choose(count=options.heads)
            masked = _losses(lm, judged, Edits(removed))
            for count in options.repair_texts or [len(calibrating)]:
                weights = repair(lm, calibration(count, weight), removed, RepairConfig(("o", "down")))
                repaired = _losses(lm, judged, Edits(removed, weights))
                for name, values in original.items():
                    changed = repaired[name] - values
                    half = stats.t.ppf(0.975, len(values) - 1) * changed.std(ddof=1) / len(values) ** 0.5
                    mean = changed.mean()
                    table.row(
                        f"{weight:g}",
                        curve_tokens,
                        tries,
                        count,
                        f"{name} ({len(values)})",
                        f"{values.mean():.3f}",
                        f"{masked[name].mean():.3f}",
                        f"{repaired[name].mean():.3f}",
                        f"{mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]",
                    )


def _repeated(vocabulary: int, count: int) -> Calibration:
    """Return sequences of a random block and the same block again, which is scored."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(100, vocabulary, (count, _BLOCK), generator=generator).tolist()
    return as_calibration([Request((*block, *block), _BLOCK) for block in blocks], 8192)


@torch.no_grad()
def _losses(lm: LoadedModel, judged: Mapping[str, Calibration], edits: Edits) -> dict[str, np.ndarray]:
    """Return the mean loss of each sequence, by task."""
    found = {}
    for name, texts in judged.items():
        means: list[float] = []
        for batch in texts.batches(lm.device):
            with edited(lm, edits):
                predicted = logits(lm, batch)
            targets = batch.ids.roll(-1, 1)[batch.scoring_BN].to(predicted.device)
            losses = F.cross_entropy(predicted.float(), targets, reduction="none").split(
                batch.scoring_BN.sum(1).tolist()
            )
            means += [float(each.mean()) for each in losses]
        found[name] = np.array(means)
    return found


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--corpus", default="python-stdlib-modules", help="texts that choose and repair")
    parser.add_argument("--held-out", default="python-stdlib-heldout", help="texts that judge")
    parser.add_argument("--heads", type=int, default=19, help="number of removed heads")
    parser.add_argument("--weights", type=lambda text: [float(each) for each in text.split(",")], default=[0, 0.3])
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a text and of a recall prompt")
    parser.add_argument("--texts", type=int, default=48, help="texts that choose and repair")
    parser.add_argument("--judged", type=int, default=24, help="texts that judge")
    parser.add_argument(
        "--prompts", type=int, default=16, help="prompts of each recall task, to calibrate and to judge"
    )
    parser.add_argument("--moment-tokens", type=int, default=8192)
    parser.add_argument("--curve-tokens", type=numbers, default=[3072], help="comma-separated")
    parser.add_argument(
        "--tries", type=numbers, default=[0], help="choices compared with the best one, comma-separated"
    )
    parser.add_argument("--repair-texts", type=numbers, help="numbers of repairing texts (default: all)")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
