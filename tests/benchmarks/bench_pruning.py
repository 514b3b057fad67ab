"""Loss of pruned demo models over the number of removed heads, and the time that they save.

    python -m tests.benchmarks.bench_pruning [--seeds 5] [--repair o+v+down]

Heads are chosen and projections repaired on modules of the standard library that are not held out; the loss is that of
held-out modules, 65,536 tokens, of which the demo model has seen none. Each seed draws other calibration texts; seeds
after the first remove 40 % of the heads alone.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import headscan
from headscan.gpu_proof.table import Table, show
from headscan.grid import Head
from headscan.pipelines.corpora.stdlib_files import held_out_files, seen_modules
from headscan.pipelines.demo import MODEL_FOLDER
from headscan.pipelines.pruning.repairs import REPAIRS
from headscan.pruning.calibration import Calibration
from headscan.pruning.edited_model import NO_EDITS, Edits, edited
from headscan.pruning.repair.distill import DistillConfig, distill
from headscan.pruning.repair.repair import RepairConfig, repair
from headscan.pruning.selection.head_selection import HeadSelection, SelectionConfig
from headscan.testing.overhead import processor

TOKENS, HELD_OUT, CALIBRATION = 512, 128, 256
HEADS, GROUPS, FORTY_PERCENT = (10, 14, 24), 5, 19


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--repair", default="o+down", choices=REPAIRS)
    parser.add_argument("--tries", type=int, default=0, help="choices compared with each best one (default: 0)")
    parser.add_argument("--distill", type=int, default=0, help="gradient steps for 40 %% of the heads (default: none)")
    options = parser.parse_args()
    lm = headscan.load(MODEL_FOLDER, device="cpu", dtype="float32")
    print(f"torch {torch.__version__}, {processor('cpu')}, float32, repair {options.repair}\n")
    curves = Curves(lm, RepairConfig(REPAIRS[options.repair]), SelectionConfig(tries=options.tries))
    table = Table(
        "## Loss increase", ("method", "seed", "heads", "loss [95 %]", "accuracy, points", "zeroing", "seconds")
    )
    zeroed = curves.zeroing(table)
    losses = [curves.of_seed(seed, table, zeroed, options.distill) for seed in range(options.seeds)]
    layer = curves.other_sizes(0, table, zeroed)
    show(f"\nloss increase, 40 % removed: {_spread(losses, '')}")
    show(f"heads of zeroing at equal loss: {_spread([FORTY_PERCENT / _heads_at(zeroed, each) for each in losses])}")
    # Two layers cost more than twice as much as one.
    dropped = [FORTY_PERCENT / (8 * each / layer) for each in losses]
    show(f"heads of dropped layers with the same repair at equal loss: {_spread(dropped)}")
    time_prefill(lm, curves.last)


class Curves:
    """Losses of edited demo models.

    Attributes:
        last: The last model with 40 % of the heads removed.
    """

    def __init__(self, lm: headscan.LoadedModel, config: RepairConfig, effort: SelectionConfig) -> None:
        self.lm, self._config, self._effort = lm, config, effort
        self._texts = _chunks(lm, seen_modules())
        chosen = random.Random(99).sample(_chunks(lm, sorted(held_out_files())), HELD_OUT)
        self._held_out = torch.tensor(chosen)
        self._loss, self._right = self._measure(NO_EDITS)
        self.last = NO_EDITS

    def calibration(self, seed: int) -> Calibration:
        ids = torch.tensor(random.Random(seed).sample(self._texts, CALIBRATION))
        return Calibration(ids, torch.full((len(ids),), TOKENS))

    def zeroing(self, table: Table) -> list[float]:
        """Return the loss increase of zeroing 0, 1, 2, ... heads by ``output_norm_ln``."""
        texts = self.calibration(1000).ids[:16]
        scores = headscan.score(headscan.collect(self.lm, texts), "output_norm_ln").mean(0)
        order = sorted(self.lm.grid.heads(), key=lambda head: float(scores[head.layer, head.head]))
        increases = [0.0]
        for count in range(1, 15):
            increases.append(self._row(table, "zeroing", "", Edits(tuple(order[:count]))))
        return increases

    def of_seed(self, seed: int, table: Table, zeroed: Sequence[float], steps: int) -> float:
        """Print the rows of 40 %, and return the loss increase without distillation."""
        texts = self.calibration(seed)
        selection = HeadSelection(self.lm, texts, config=self._effort)
        loss, self.last, seconds = self._chosen(table, seed, FORTY_PERCENT, texts, selection, zeroed)
        if steps:
            begun = time.perf_counter()
            weights = distill(self.lm, texts, self.last.removed, self.last.weights, DistillConfig(steps))
            seconds += time.perf_counter() - begun
            self._row(table, f"damage, {steps} steps", seed, Edits(self.last.removed, weights), zeroed, seconds)
        return loss

    def other_sizes(self, seed: int, table: Table, zeroed: Sequence[float]) -> float:
        """Print the rows of other sizes, units and methods, and return the loss increase of a dropped layer."""
        texts = self.calibration(seed)
        selection = HeadSelection(self.lm, texts, config=self._effort)
        for count in HEADS:
            self._chosen(table, seed, count, texts, selection, zeroed)
        groups = HeadSelection(self.lm, texts, unit="group", config=self._effort).choose(count=GROUPS)
        self._row(table, f"{GROUPS} whole groups", seed, self._repaired(texts, groups), zeroed)
        layers = []
        for count in (1, 2):
            dropped = selection.choose(method="layer-drop", count=count)
            layers.append(self._row(table, f"{count} layers", seed, self._repaired(texts, dropped), zeroed))
        chance = selection.choose(method="random", count=FORTY_PERCENT, seed=seed)
        self._row(table, "random", seed, self._repaired(texts, chance), zeroed)
        return layers[0]

    def _chosen(
        self, table: Table, seed: int, count: int, texts: Calibration, selection: HeadSelection, zeroed: Sequence[float]
    ) -> tuple[float, Edits, float]:
        """Print the row of a choice, and return its loss increase, the edits, and the seconds that they took."""
        begun = time.perf_counter()
        edits = self._repaired(texts, selection.choose(count=count))
        seconds = time.perf_counter() - begun
        return self._row(table, "damage", seed, edits, zeroed, seconds), edits, seconds

    def _repaired(self, texts: Calibration, removed: tuple[Head, ...]) -> Edits:
        return Edits(removed, repair(self.lm, texts, removed, self._config))

    def _row(
        self,
        table: Table,
        method: str,
        seed: int | str,
        edits: Edits,
        zeroed: Sequence[float] = (),
        seconds: float | None = None,
    ) -> float:
        loss, right = self._measure(edits)
        change, accuracy = loss - self._loss, 100 * float((right - self._right).mean())
        mean, half = float(change.mean()), 1.96 * float(change.std() / len(change) ** 0.5)
        times = f"{len(edits.removed) / _heads_at(zeroed, mean):.2f} x" if zeroed else ""
        cells = (f"{mean:+.4f} [{mean - half:.4f}, {mean + half:.4f}]", f"{accuracy:+.2f}", times)
        table.row(method, seed, len(edits.removed), *cells, "" if seconds is None else f"{seconds:.0f}")
        return mean

    @torch.no_grad()
    def _measure(self, edits: Edits) -> tuple[Tensor, Tensor]:
        """Return each text's mean loss and share of right next tokens."""
        losses, right = [], []
        with edited(self.lm, edits):
            for ids in self._held_out.split(16):
                logits = self.lm.model(input_ids=ids, use_cache=False).logits[:, :-1]
                loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
                losses.append(loss.view(len(ids), -1).mean(1))
                right.append((logits.argmax(-1) == ids[:, 1:]).float().mean(1))
        return torch.cat(losses), torch.cat(right)


@torch.no_grad()
def time_prefill(lm: headscan.LoadedModel, edits: Edits, rounds: int = 15) -> None:
    """Print the time of attention in prefill, of the original and of the sliced model in turn."""
    smaller = headscan.slice_heads(lm, edits.removed, edits.weights)
    ids = torch.randint(5, lm.vocab_size, (16, TOKENS), generator=torch.Generator().manual_seed(0))
    models = {"original": lm, "pruned": smaller}
    whole: dict[str, list[float]] = {name: [] for name in models}
    attention: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(rounds + 1):
        for name, model in models.items():
            seconds = _Stopwatch(model)
            begun = time.perf_counter()
            with seconds:
                model.model.base_model(input_ids=ids, use_cache=False)
            if turn:  # the first round warms up
                whole[name].append(time.perf_counter() - begun)
                attention[name].append(seconds.total)
    shares = {name: _attention_flops(model) / _attention_flops(lm) for name, model in models.items()}
    ratio = median(attention["original"]) / median(attention["pruned"])
    saved = (1 - 1 / ratio) / (1 - shares["pruned"])
    both = median(whole["original"]) / median(whole["pruned"])
    show(
        f"\nprefill of {ids.shape[0]} x {TOKENS} tokens, {len(edits.removed)} heads removed: attention {ratio:.2f} x"
        f" faster, whole model {both:.2f} x; {saved:.2f} of the removed"
        f" {1 - shares['pruned']:.0%} of attention's FLOPs show up as time"
    )


class _Stopwatch:
    """The time inside all attention modules, as a context manager."""

    def __init__(self, lm: headscan.LoadedModel) -> None:
        self._modules = [lm.module(site.path) for site in lm.grid.sites]
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._begun = 0.0
        self.total = 0.0

    def __enter__(self) -> None:
        for module in self._modules:
            self._handles.append(module.register_forward_pre_hook(self._begin))
            self._handles.append(module.register_forward_hook(self._end))

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self, _: nn.Module, __: object) -> None:
        self._begun = time.perf_counter()

    def _end(self, _: nn.Module, __: object, ___: object) -> None:
        self.total += time.perf_counter() - self._begun


def _attention_flops(lm: headscan.LoadedModel) -> float:
    """Return the multiplications of attention for one text: projections, logits and weighted sums."""
    total = 0.0
    for site in lm.grid.sites:
        weights = sum(p.numel() for p in lm.module(site.path).parameters() if p.ndim == 2)
        total += TOKENS * weights + site.num_attention_heads * TOKENS**2 * site.head_dim
    return total


def _chunks(lm: headscan.LoadedModel, paths: Iterable[Path]) -> list[list[int]]:
    """Return texts of the same length that begin with BOS."""
    tokenizer = lm.require_tokenizer()
    found = []
    for path in paths:
        ids = tokenizer(path.read_text(errors="replace"), add_special_tokens=False)["input_ids"]
        size = TOKENS - 1
        found += [[0, *ids[start : start + size]] for start in range(0, len(ids) - size + 1, size)]
    return found


def _heads_at(increases: Sequence[float], loss: float) -> float:
    """Return the number of removed heads, or layers, at a loss increase, between the measured numbers."""
    return max(float(np.interp(loss, np.maximum.accumulate(increases), np.arange(len(increases)))), 1e-3)


def _spread(values: Sequence[float], unit: str = " x") -> str:
    if len(values) < 2:
        return f"{values[0]:.3g}{unit}"
    half = 2.776 * float(np.std(values, ddof=1)) / len(values) ** 0.5 if len(values) == 5 else float("nan")
    mean = np.mean(values)
    return f"{mean:.3g}{unit} [{mean - half:.3g}, {mean + half:.3g}] over {len(values)} seeds"


if __name__ == "__main__":
    main()
