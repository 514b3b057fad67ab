"""Loss of pruned demo models next to the strongest simple alternatives, and the time that they save.

    python -m tests.benchmarks.bench_pruning [--seeds 5] [--repair o+v+down]
    python -m tests.benchmarks.bench_pruning --model FOLDER --corpus NOVEL.txt --held-out NOVEL.txt,ANOTHER.txt

Heads are chosen and projections repaired on modules of the standard library that are not held out, or on a corpus; the
loss is that of held-out modules, of which the demo model has seen none, or of other texts. Every alternative removes
as many heads: those with the least score, zeroed or with the same repair, random ones, and whole layers. Differences
are paired, with 95 % intervals over documents. Each further seed draws other calibration texts, for 40 % of the heads.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F

import headscan
from headscan.demo import MODEL_FOLDER
from headscan.grid import Head
from headscan.pruning.calibration import Calibration
from headscan.pruning.edited_model import NO_EDITS, Edits, edited
from headscan.pruning.head_selection import HeadSelection
from headscan.pruning.head_values import head_values, ranked
from headscan.pruning.repair import DistillConfig, RepairConfig, distill, repair
from headscan.pruning.selection_settings import SelectionConfig
from headscan.settings.saving_settings import REPAIRS
from headscan.texts.sequences import spread
from headscan.texts.stdlib_files import held_out_files, seen_modules
from tests.benchmarks.measuring import Table, machine, numbers, show, wait

TOKENS = 512
#: Scores that rank heads from few passes. ``importance`` is the gate gradient.
SCORES = ("output_norm_ln", "importance", "importance_ln")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODEL_FOLDER), help="folder of a model (default: the demo model)")
    parser.add_argument("--corpus", type=_paths, help="comma-separated calibration texts (default: modules)")
    parser.add_argument("--held-out", type=_paths, help="comma-separated held-out texts (default: held-out modules)")
    parser.add_argument("--texts", type=int, default=256, help="calibration texts of 512 tokens (default: 256)")
    parser.add_argument("--judging", type=int, default=128, help="held-out texts of 512 tokens (default: 128)")
    parser.add_argument("--moment-tokens", type=int, default=SelectionConfig.moment_tokens)
    parser.add_argument("--curve-tokens", type=int, default=SelectionConfig.curve_tokens)
    parser.add_argument("--heads", type=numbers, help="comma-separated numbers of heads (default: 20, 30, 50 %%)")
    parser.add_argument(
        "--zeroed", type=numbers, help="further numbers of heads that scores zero (default: 5 to 30 %%)"
    )
    parser.add_argument(
        "--compare", type=int, help="heads by damage that are compared with zeroed ones (default: 40 %%)"
    )
    parser.add_argument("--layers", type=numbers, default=(1, 2), help="numbers of dropped layers (default: 1,2)")
    parser.add_argument("--scores", type=lambda text: tuple(text.split(",")), default=SCORES)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--repair", default="o+down", choices=REPAIRS)
    parser.add_argument("--tries", type=int, default=0, help="choices compared with each best one (default: 0)")
    parser.add_argument("--distill", type=int, default=0, help="gradient steps for the compared heads (default: none)")
    parser.add_argument("--no-time", action="store_true", help="skip the timing of prefill")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 (default: cpu)")
    options = parser.parse_args()
    lm = headscan.load(options.model, device=options.device, dtype="float32")
    total = lm.grid.total_heads
    show(f"{machine(lm.device)}, float32, settings:")
    print(", ".join(f"{name} {value}" for name, value in vars(options).items() if value is not None) + "\n", flush=True)
    effort = SelectionConfig(options.moment_tokens, options.curve_tokens, tries=options.tries)
    sources = options.corpus or seen_modules(), options.held_out or sorted(held_out_files())
    bench = Comparison(lm, RepairConfig(REPAIRS[options.repair]), effort, *sources, options.texts, options.judging)
    compared = options.compare or round(0.4 * total)
    per_layer = total // lm.grid.num_layers
    sizes = options.heads or tuple(round(share * total) for share in (0.2, 0.3, 0.5))
    zeroed = options.zeroed or tuple(round(share * total) for share in (0.05, 0.1, 0.15, 0.2, 0.25, 0.3))
    sizes = sorted({*sizes, compared, *(per_layer * layers for layers in options.layers)})
    for count in sizes:
        bench.alternatives(count, options.scores, count // per_layer if count % per_layer == 0 else 0)
    for seed in range(1, options.seeds):
        bench.chosen(seed, compared)
    bench.ratio(compared, zeroed)
    if options.distill:
        bench.distilled(compared, options.distill)
    if not options.no_time:
        time_prefill(lm, bench.edits[0, compared])


@dataclass(frozen=True)
class Measured:
    """Loss increase and change of next-token accuracy by text (T,)."""

    loss: Tensor
    right: Tensor


class Comparison:
    """Losses of edited models on the same held-out texts.

    Attributes:
        edits: Models chosen by damage, by seed and number of removed heads.
    """

    def __init__(
        self,
        lm: headscan.LoadedModel,
        config: RepairConfig,
        effort: SelectionConfig,
        corpus: Iterable[Path],
        held_out: Iterable[Path],
        texts: int,
        judging: int,
    ) -> None:
        self.lm, self._config, self._effort, self._count = lm, config, effort, texts
        self._texts = [ids for of_document in _chunks(lm, corpus) for ids in of_document]
        documents = _chunks(lm, held_out)
        every = [(number, ids) for number, of_document in enumerate(documents) for ids in of_document]
        chosen = random.Random(99).sample(every, judging) if len(documents) > judging else spread(every, judging)
        self._documents = np.array([number for number, _ in chosen])
        self._held_out = torch.tensor([ids for _, ids in chosen], device=lm.device)
        self._loss, self._right = self._measure(NO_EDITS)
        show(f"held out: {len(chosen)} texts of {len(set(self._documents))} documents, loss {self._loss.mean():.4f}\n")
        self._table = Table(
            "## Loss increase", ("removed", "heads", "seed", "loss [95 %]", "points", "minus damage, repaired [95 %]")
        )
        self._selections: dict[int, HeadSelection] = {}
        self._found: dict[tuple[str, int], Measured] = {}
        self._orders: dict[str, list[Head]] = {}
        self.edits: dict[tuple[int, int], Edits] = {}

    def calibration(self, seed: int) -> Calibration:
        ids = torch.tensor(random.Random(seed).sample(self._texts, min(self._count, len(self._texts))))
        return Calibration(ids, torch.full((len(ids),), TOKENS))

    def chosen(self, seed: int, count: int) -> Measured:
        """Print the row of the heads with the least damage, repaired."""
        texts = self.calibration(seed)
        if seed not in self._selections:
            self._selections[seed] = HeadSelection(self.lm, texts, config=self._effort)
        self.edits[seed, count] = self._repaired(texts, self._selections[seed].choose(count=count))
        return self._row("damage, repaired", self.edits[seed, count], seed=seed)

    def alternatives(self, count: int, scores: Sequence[str], layers: int) -> None:
        """Print the rows of one number of heads.

        Args:
            layers: Whole layers with as many heads; 0 if there are none.
        """
        own = self.chosen(0, count)
        texts = self.calibration(0)
        if not self._orders:
            values = head_values(self.lm, texts.first(self._effort.moment_tokens), scores)
            self._orders = {name: ranked(values[name]) for name in scores}
        self._row("damage, zeroed", Edits(self.edits[0, count].removed), own)
        for name, order in self._orders.items():
            removed = tuple(sorted(order[:count]))
            self._row(f"{name}, zeroed", Edits(removed), own)
            self._row(f"{name}, same repair", self._repaired(texts, removed), own)
        if layers:
            dropped = self._selections[0].choose(method="layer-drop", count=layers)
            self._row(f"{layers} layers, same repair", self._repaired(texts, dropped), own)
        chance = self._selections[0].choose(method="random", count=count)
        self._row("random, same repair", self._repaired(texts, chance), own)
        for kind in ("zeroed", "same repair"):
            names = [name for name, heads in self._found if heads == count and name in {f"{s}, {kind}" for s in scores}]
            best = min(names, key=lambda name: float(self._found[name, count].loss.mean()))
            ratio = float(self._found[best, count].loss.mean() / own.loss.mean())
            show(f"best score, {kind}, {count} heads: {best}, {ratio:.2f} times the loss increase of damage, repaired")

    def distilled(self, count: int, steps: int) -> None:
        """Print the row of distillation after the repair."""
        edits = self.edits[0, count]
        weights = distill(self.lm, self.calibration(0), edits.removed, edits.weights, DistillConfig(steps))
        self._row(f"damage, {steps} steps", Edits(edits.removed, weights), self._found["damage, repaired", count])

    def ratio(self, count: int, zeroed: Sequence[int]) -> None:
        """Print how many heads the best score zeroes at the loss of heads chosen by damage and repaired.

        Args:
            zeroed: Further numbers of zeroed heads, between which losses are interpolated.
        """
        least = {0: 0.0}
        for size in sorted({*zeroed, count}):
            rows = (self._zeroed(name, size) for name in self._orders)
            least[size] = min(float(found.loss.mean()) for found in rows)
        loss = float(self._found["damage, repaired", count].loss.mean())
        heads = float(np.interp(loss, np.maximum.accumulate(list(least.values())), list(least)))
        show(f"{count} heads by damage, repaired, cost as much as {heads:.1f} zeroed heads: {count / heads:.2f} x")

    def _zeroed(self, name: str, count: int) -> Measured:
        row = f"{name}, zeroed"
        return self._found.get((row, count)) or self._row(row, Edits(tuple(sorted(self._orders[name][:count]))))

    def _repaired(self, texts: Calibration, removed: tuple[Head, ...]) -> Edits:
        return Edits(removed, repair(self.lm, texts, removed, self._config))

    def _row(self, name: str, edits: Edits, own: Measured | None = None, seed: int = 0) -> Measured:
        loss, right = self._measure(edits)
        found = Measured(loss - self._loss, 100 * (right - self._right))
        difference = "" if own is None else self._interval(found.loss - own.loss)
        cells = (self._interval(found.loss), f"{found.right.mean():+.2f}", difference)
        self._table.row(name, len(edits.removed), seed, *cells)
        if not seed:
            self._found[name, len(edits.removed)] = found
        return found

    def _interval(self, values_T: Tensor) -> str:
        """Return a mean with its interval; texts of one document are a cluster."""
        values = values_T.double().numpy()
        mean = values.mean()
        clusters = [float((values[self._documents == each] - mean).sum()) for each in sorted(set(self._documents))]
        if len(clusters) < 2:
            return f"{mean:+.4f}"
        error = (sum(each**2 for each in clusters) * len(clusters) / (len(clusters) - 1)) ** 0.5 / len(values)
        half = float(stats.t.ppf(0.975, len(clusters) - 1)) * error
        return f"{mean:+.4f} [{mean - half:+.4f}, {mean + half:+.4f}]"

    @torch.no_grad()
    def _measure(self, edits: Edits) -> tuple[Tensor, Tensor]:
        """Return each text's mean loss and share of right next tokens."""
        losses, right = [], []
        with edited(self.lm, edits):
            for ids in self._held_out.split(4):
                logits = self.lm.model(input_ids=ids, use_cache=False).logits[:, :-1]
                loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
                losses.append(loss.view(len(ids), -1).mean(1))
                right.append((logits.argmax(-1) == ids[:, 1:]).float().mean(1))
        return torch.cat(losses).cpu(), torch.cat(right).cpu()


@torch.no_grad()
def time_prefill(lm: headscan.LoadedModel, edits: Edits, rounds: int = 15) -> None:
    """Print the time of attention in prefill, of the original and of the sliced model in turn."""
    smaller = headscan.slice_heads(lm, edits.removed, edits.weights)
    ids = torch.randint(5, lm.vocab_size, (16, TOKENS), generator=torch.Generator().manual_seed(0)).to(lm.device)
    models = {"original": lm, "pruned": smaller}
    whole: dict[str, list[float]] = {name: [] for name in models}
    attention: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(rounds + 1):
        for name, model in models.items():
            seconds = _Stopwatch(model)
            begun = time.perf_counter()
            with seconds:
                model.model.base_model(input_ids=ids, use_cache=False)
                wait(lm.device)
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
        self._device = lm.device
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
        wait(self._device)
        self._begun = time.perf_counter()

    def _end(self, _: nn.Module, __: object, ___: object) -> None:
        wait(self._device)
        self.total += time.perf_counter() - self._begun


def _attention_flops(lm: headscan.LoadedModel) -> float:
    """Return the multiplications of attention for one text: projections, logits and weighted sums."""
    total = 0.0
    for site in lm.grid.sites:
        weights = sum(p.numel() for p in lm.module(site.path).parameters() if p.ndim == 2)
        total += TOKENS * weights + site.num_attention_heads * TOKENS**2 * site.head_dim
    return total


def _chunks(lm: headscan.LoadedModel, paths: Iterable[Path]) -> list[list[list[int]]]:
    """Return the texts of each document, all of the same length and beginning with BOS."""
    tokenizer = lm.require_tokenizer()
    first = tokenizer.bos_token_id or 0
    found = []
    for path in paths:
        ids = tokenizer(path.read_text(errors="replace"), add_special_tokens=False)["input_ids"]
        size = TOKENS - 1
        found.append([[first, *ids[start : start + size]] for start in range(0, len(ids) - size + 1, size)])
    return [each for each in found if each]


def _paths(text: str) -> list[Path]:
    return [Path(each) for each in text.split(",")]


if __name__ == "__main__":
    main()
