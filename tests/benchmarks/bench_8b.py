"""A model of the 8B shape whole on one GPU, through all that a study does, within 8 minutes.

    make gpu-8b
    python -m tests.benchmarks.bench_8b --device cuda --dtype bfloat16
    python -m tests.benchmarks.bench_8b --tiny

The weights are random, made on the device; `whole_model` lets the heads differ as those of trained models do. Every
step is a row with its time, its speed, its time over that of a plain forward pass over as many tokens, and its peak
memory over the weights. A step that fails is a row with its error, and so is one for which no time is left. Two tables
follow: ways to the entropy (`entropy_ways`), and the time of a study by its own arithmetic beside the measured costs.

``--tiny`` runs the same on a small model on the CPU, which shows that all steps run; its times mean nothing. The
benchmark needs torch, transformers and accelerate alone, at most 60 GiB of GPU memory, and 16 GB of disk.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, StaticCache
from transformers.utils import logging

import headscan
from headscan.catalog import RECALL_FAMILIES, head_count
from headscan.gradients.losses import NextTokenLoss
from headscan.grid import Head
from headscan.kv.plan_cache import PlanCache
from headscan.long_work import LongWork
from headscan.measure.behaviour_probes import Needle
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import LoadedModel
from headscan.models.token_batches import release_memory
from headscan.pruning.calibration import Calibration
from headscan.pruning.damage_curve import best_subsets, layer_moments
from headscan.pruning.edited_model import read_weight
from headscan.pruning.head_selection import HeadSelection
from headscan.pruning.repair import RepairConfig, repair
from headscan.pruning.selection_settings import SelectionConfig
from headscan.runs.progress import time_text
from headscan.settings.corpus_settings import CorpusSpec
from headscan.store.verdict_limits import QUESTIONS_PER_TEXT
from headscan.study.study_step import LONGEST_STUDY_TEXT, Study
from headscan.study.study_time import PassCosts, QuestionCosts, TimedPass, decided, enough_for, study_seconds, time_pass
from headscan.texts.prefix_tree import tokens_read_once
from tests.benchmarks.bench_arms import ABLATED, answers, made_requests, readings
from tests.benchmarks.bench_cache import CacheLoad, fill, half_windows, held_bytes
from tests.benchmarks.bench_instrument import SCAN, verdict_on_goal
from tests.benchmarks.entropy_ways import COLUMNS as ENTROPY_COLUMNS
from tests.benchmarks.entropy_ways import attention_inputs, entropy_rows
from tests.benchmarks.measuring import (
    Clock,
    OutOfTime,
    Table,
    device_of,
    first_line,
    medians,
    parser_of,
    processor,
    show,
    wait,
)
from tests.benchmarks.overhead import gpu_peak_bytes, peak_bytes, ways
from tests.benchmarks.whole_model import spread_of_heads, token_ids, whole_model

COLUMNS = ("step", "card", "seconds", "tokens/s", "x plain", "peak, x weights", "note")
HOURS_COLUMNS = ("step of a study", "card", "by its own arithmetic", "by the measured costs")
#: Share of the heads that are removed.
_SHARE = 0.1
#: Tokens of the short text whose logits are compared, and the largest relative difference by bytes of a weight.
_COMPARED, _SAME = 16, {4: 1e-3, 2: 2e-2}
#: Seconds after which a choice of heads is stopped, and the ways to the entropy, of which some are compiled.
_LONGEST_CHOICE, _LONGEST_ENTROPY = 170.0, 90.0


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of its inputs.

    Attributes:
        scans: Sequences and tokens of scans; the last ones are texts of a study.
        texts, tokens: Texts that are measured, and recall prompts, and their length.
        scored: Scored tokens at the end of a recall prompt.
        recent: Recent tokens of the windows whose derivatives are taken.
        calibration: Texts that choose heads and repair.
        subjects, questions, batch: Questions of arms: subjects, questions of each, and prompts of a pass.
        context, rows, steps: Tokens and sequences before a decoding step, and steps of a round.
        seconds: Time after which no further round of a setting starts.
        selection: Effort of the choice.
    """

    shape: str
    layers: int
    vocabulary: int
    scans: tuple[tuple[int, int], ...]
    texts: int
    tokens: int
    scored: int
    recent: int
    calibration: int
    subjects: int
    questions: int
    batch: int
    context: int
    rows: int
    steps: int
    seconds: float
    selection: SelectionConfig

    @property
    def longest(self) -> int:
        """Tokens that the model must read, in a prompt of MMLU's length, too."""
        return max(2048, self.context + 256, *(tokens for _, tokens in self.scans))


#: The repair needs more tokens than its widest projection has columns, 14,336.
WHOLE = Sizes(
    "8B", 32, 128_256, ((1, 4096), (1, 32_768), (16, 512)), 16, 512, 16, 64, 36, 2, 40, 32, 32_768, 8, 8, 4.0,
    SelectionConfig(),
)  # fmt: skip
TINY = Sizes(
    "tiny", 4, 512, ((1, 64), (1, 256), (4, 64)), 4, 64, 8, 16, 8, 1, 2, 4, 512, 2, 2, 0.0,
    SelectionConfig(moment_tokens=256, curve_tokens=128),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """What a step took.

    Attributes:
        tokens: Tokens that were read or generated; None if the step reads none.
        plain: Seconds of a plain forward pass over as many tokens; None if there is no such pass.
        peak: Peak bytes of all tensors; None if not measured.
    """

    name: str
    seconds: float | None = None
    tokens: int | None = None
    plain: float | None = None
    peak: int | None = None
    note: str = ""

    def cells(self, card: str, weights: int) -> tuple[object, ...]:
        """Return the cells of `COLUMNS`; ``weights`` are the bytes of the model."""
        if self.seconds is None:
            return self.name, card, "", "", "", "", self.note
        speed = "" if self.tokens is None else f"{self.tokens / self.seconds:,.0f}"
        ratio = "" if self.plain is None else f"{self.seconds / self.plain:.2f}"
        peak = "" if self.peak is None or not weights else f"{self.peak / weights:.2f}"
        return self.name, card, f"{self.seconds:.3f}", speed, ratio, peak, self.note


@dataclass(frozen=True)
class Step:
    """A step of the run.

    Attributes:
        seconds: Approximate time on a GPU; the step does not start with less.
        most: Time after which the step is stopped.
    """

    name: str
    rows: Callable[[], Iterator[Row]]
    seconds: float
    most: float = float("inf")


@dataclass
class WholeRun:
    """The steps in their order, each of which yields rows; later ones use the results of earlier ones.

    Attributes:
        folder: Folder for the smaller model.
        plain: Seconds of a plain pass by its sequences and tokens.
        speed: Tokens per second of a pass as a study times it.
        measured: Costs that were measured, by their names in `PassCosts`.
        ratios: Time of the 15 scores over that of the plain pass, by load.
        entropy: Cells of `ENTROPY_COLUMNS`.
        removed, chosen_by: Heads to remove, and what chose them.
        weights: Repaired weights.
        at: What a long step is at, in words.
    """

    sizes: Sizes
    device: torch.device
    dtype: torch.dtype
    card: str
    folder: Path
    plain: dict[tuple[int, int], float] = field(default_factory=dict)
    speed: float = 0.0
    measured: dict[str, float] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    entropy: list[tuple[object, ...]] = field(default_factory=list)
    removed: tuple[Head, ...] = ()
    chosen_by: str = ""
    weights: dict[str, Tensor] = field(default_factory=dict)
    at: str = ""
    _model: LoadedModel | None = None
    _smaller: LoadedModel | None = None

    @property
    def lm(self) -> LoadedModel:
        if self._model is None:
            raise RuntimeError("the model was not made")
        return self._model

    @property
    def weight_bytes(self) -> int:
        return 0 if self._model is None else sum(weight.nbytes for weight in self._model.model.parameters())

    def steps(self) -> list[Step]:
        """Return the steps in their order, the longest last."""
        return [
            Step("load", self.load, 15),
            Step("pass as a study times it", self.study_pass, 3),
            Step("scans", self.scans, 45),
            Step("the heads differ", self.heads, 2),
            Step("probe", self.probe, 5),
            Step("importance", self.importance, 15),
            Step("derivatives for a plan", self.derivatives, 15),
            Step("arms", self.arms, 20),
            Step("decoding", self.decoding, 15),
            Step("ways to the entropy", self.entropies, 20, _LONGEST_ENTROPY),
            Step("moments", self.moments, 10),
            Step("choice by damage", self.choice, 60, _LONGEST_CHOICE),
            Step("repair", self.repair, 40),
            Step("slicing", self.slicing, 5),
            Step("saving", self.saving, 35),
        ]

    def load(self) -> Iterator[Row]:
        sizes = self.sizes

        def make() -> None:
            self._model = whole_model(
                sizes.shape, sizes.longest, self.device, self.dtype, layers=sizes.layers, vocabulary=sizes.vocabulary
            )

        started, peak = time.perf_counter(), None
        if self.device.type == "cuda":
            peak = gpu_peak_bytes(self.device, make)
        else:
            make()
        parameters = sum(weight.numel() for weight in self.lm.model.parameters())
        note = f"{parameters / 1e9:.3g} billion random parameters, {self.weight_bytes / 2**30:.2f} GiB, made there"
        yield Row("load", time.perf_counter() - started, peak=peak, note=note)

    def study_pass(self) -> Iterator[Row]:
        sequences, tokens = 4, self.sizes.tokens
        self.speed = time_pass(self.lm, TimedPass(sequences, tokens))
        seconds = sequences * tokens / self.speed
        yield Row(f"pass as a study times it, {sequences} x {tokens}, with logits", seconds, sequences * tokens)

    def scans(self) -> Iterator[Row]:
        for sequences, tokens in self.sizes.scans:
            ids = token_ids(self.lm, sequences, tokens)
            chosen = ways(self.lm, ids, eager=False)
            del chosen["full panel"]
            peaks = {name: peak_bytes(self.lm, way) for name, way in chosen.items()}
            took = medians(chosen, self.device, self.sizes.seconds, 2)
            self.plain[sequences, tokens] = took["plain"]
            size = f"{tokens:,} tokens" if sequences == 1 else f"{sequences} x {tokens} tokens"
            for name, seconds in took.items():
                yield Row(f"{name}, {size}", seconds, ids.numel(), took["plain"], peaks[name])
            self.ratios[size] = took[SCAN] / took["plain"]
            if (sequences, tokens) == self.sizes.scans[-1]:
                self._measured("scan", took["fast panel"], ids.numel())

    def heads(self) -> Iterator[Row]:
        names = ("relative_entropy", "first_token_weight")
        found = headscan.collect(self.lm, token_ids(self.lm, *self.sizes.scans[0]), statistics=names)
        yield Row("the heads differ", note=spread_of_heads(found))

    def probe(self) -> Iterator[Row]:
        length, vocabulary = self.sizes.tokens, self.lm.vocab_size
        words = torch.randint(3, vocabulary, (length + 24,), generator=torch.Generator().manual_seed(0)).tolist()
        needles = [Needle(tuple(words[:8]), tuple(words[8:12])), Needle(tuple(words[12:20]), tuple(words[20:24]))]
        settings = headscan.BehaviourProbe(lengths=(length,))
        call = partial(headscan.probe, self.lm, settings=settings, haystack=words[24:], needles=needles)
        repeats = settings.sequences * (1 + settings.tokens * settings.repeats)
        row, _ = self._timed("probe", call, repeats + length * len(needles) * len(settings.depths))
        yield row

    def importance(self) -> Iterator[Row]:
        of_texts = partial(headscan.importance, self.lm, self._texts)
        row, found = self._timed("importance, texts", of_texts, self._texts.numel(), cost="importance")
        yield row
        of_prompts = partial(headscan.importance, self.lm, self._prompts, loss=self._recall_loss)
        row, _ = self._timed("importance, recall prompts", of_prompts, self._prompts.numel())
        yield row
        means_LH = found["importance"].mean(0)
        least = means_LH.flatten().argsort()[: self._count].tolist()
        # The heads that are repaired and removed if there is no time for a choice by damage.
        self.removed = tuple(sorted(Head(*divmod(at, means_LH.shape[1])) for at in least))
        self.chosen_by = "importance"

    def derivatives(self) -> Iterator[Row]:
        damage = partial(headscan.kv_damage, self.lm, recent=self.sizes.recent)
        of_texts = partial(damage, self._texts)
        row, _ = self._timed("derivatives for a plan, texts", of_texts, self._texts.numel(), cost="derivatives")
        yield row
        of_prompts = partial(damage, self._prompts, scored=list(self._recall_loss.counts))
        row, _ = self._timed("derivatives for a plan, recall prompts", of_prompts, self._prompts.numel())
        yield row

    def arms(self) -> Iterator[Row]:
        requests = made_requests(self.sizes.subjects, self.sizes.questions, self.lm.vocab_size)
        prompts = {request.ids[:-1] for request in requests}
        tokens, once = sum(map(len, prompts)), tokens_read_once(prompts)
        budget = self.sizes.batch * max(len(request.ids) for request in requests)
        ablates = {name: make(self.lm) for name, make in ABLATED.items()}
        shared, whole = readings(self.lm, ablates.values(), budget)
        for name, ablated in ablates.items():
            of_whole = partial(answers, self.lm, whole, ablated, requests)
            row, expected = self._timed(f"{name}, whole prompts", of_whole, tokens, warm=False)
            yield row
            of_shared = partial(answers, self.lm, shared, ablated, requests)
            row, found = self._timed(f"{name}, shared prefixes", of_shared, tokens, warm=False)
            others, alike, _ = expected.differences(found)
            note = f"{once:,} tokens if prefixes are read once; log-likelihoods differ by {alike:.0e}"
            if others:
                note += f", without {others} of {len(requests)} with other heads"
            yield replace(row, note=note)

    def decoding(self) -> Iterator[Row]:
        sizes, lm = self.sizes, self.lm
        load = CacheLoad(sizes.shape, sizes.layers, sizes.context, sizes.rows, sizes.steps, str(self.dtype))
        most = sizes.context + 12 * sizes.steps  # two untimed rounds and up to ten timed ones
        token = torch.ones(sizes.rows, 1, dtype=torch.long, device=self.device)
        kinds: dict[str, Callable[[], Cache]] = {
            "whole StaticCache": lambda: StaticCache(config=lm.model.config, max_cache_len=most),
            "PlanCache with half windows": lambda: PlanCache(half_windows(lm), max_tokens=most),
        }
        whole = None
        for name, make in kinds.items():
            cache = make()
            with torch.no_grad():
                fill(cache, lm, load, sizes.context)

                def decode(cache: Cache = cache) -> None:
                    for _ in range(sizes.steps):
                        lm.model(input_ids=token, past_key_values=cache, use_cache=True)

                peak = peak_bytes(lm, decode)
                took = medians({name: decode}, self.device, self.sizes.seconds)[name] / sizes.steps
            whole = whole or took
            note = f"one step; its ratio is to the whole cache; {held_bytes(cache) / 2**30:.2f} GiB of cache"
            yield Row(f"decoding, {sizes.rows} x {sizes.context:,}, {name}", took, sizes.rows, whole, peak, note)
            del cache, decode
            release_memory()

    def entropies(self) -> Iterator[Row]:
        for sequences, tokens in self.sizes.scans:
            if sequences > 1:
                continue
            started = time.perf_counter()
            inputs = attention_inputs(self.lm, token_ids(self.lm, 1, tokens), self.sizes.layers // 2)
            for cells in entropy_rows(*inputs, self.card, self.sizes.seconds):
                self.entropy.append(cells)
            yield Row(f"ways to the entropy, {tokens:,} tokens", time.perf_counter() - started, note="see below")

    def moments(self) -> Iterator[Row]:
        part = self._calibration.first(self.sizes.selection.moment_tokens)
        row, found = self._timed(
            "moments of all layers", partial(layer_moments, self.lm, part), part.tokens, warm=False
        )
        yield row
        site = self.lm.grid.sites[len(self.lm.grid.sites) // 2]
        weight = read_weight(self.lm.module(site.output_projection))
        columns = [
            range(head * site.value_dim, (head + 1) * site.value_dim) for head in range(site.num_attention_heads)
        ]
        subsets = partial(best_subsets, found[site.layer], weight, columns, most=len(columns))
        row, _ = self._timed("best subsets of one layer's heads", subsets, None, warm=False)
        yield row

    def choice(self) -> Iterator[Row]:
        work = LongWork(steps=self._noted)

        def choose() -> tuple[Head, ...]:
            selection = HeadSelection(self.lm, self._calibration, config=self.sizes.selection, work=work)
            return selection.choose(count=self._count)

        tokens = self._calibration.tokens
        row, self.removed = self._timed("choice by damage, with its moments", choose, tokens, "damage", warm=False)
        self.chosen_by = "damage"
        yield replace(row, tokens=None, plain=None, note=f"{self._count} of {self.lm.grid.total_heads} heads")

    def repair(self) -> Iterator[Row]:
        call = partial(repair, self.lm, self._calibration, self._chosen, RepairConfig(("o", "down")))
        # A study counts its texts twice, because both models read them.
        row, self.weights = self._timed(
            "repair of o and down", call, self._calibration.tokens, "repair", counted=2, warm=False
        )
        yield replace(row, note=f"without {self._count} heads by {self.chosen_by}")

    def slicing(self) -> Iterator[Row]:
        call = partial(headscan.slice_heads, self.lm, self._chosen, self.weights)
        row, self._smaller = self._timed("slicing", call, None, warm=False)
        self.weights = {}
        yield row

    def saving(self) -> Iterator[Row]:
        smaller, target = self._smaller, self.folder / "smaller"
        if smaller is None:
            raise RuntimeError("no model was sliced")
        size, free = sum(weight.nbytes for weight in smaller.model.parameters()), shutil.disk_usage(self.folder).free
        if free < 1.1 * size:
            raise RuntimeError(f"{free / 2**30:.0f} GiB of disk are free (limit {1.1 * size / 2**30:.0f} GiB)")
        row, _ = self._timed("saving", partial(headscan.save_pruned, smaller, target), None, warm=False)
        yield replace(row, note=f"{size / 2**30:.2f} GiB")
        call = partial(headscan.load, target, device=str(self.device))
        row, loaded = self._timed("loading what was saved", call, None, warm=False)
        ids = token_ids(self.lm, 2, _COMPARED)
        with torch.no_grad():
            ours, theirs = (lm.model(input_ids=ids).logits.float() for lm in (smaller, loaded))
        difference = float((ours - theirs).norm() / ours.norm())
        limit = _SAME[self.dtype.itemsize]
        if not difference <= limit:
            raise RuntimeError(f"the saved model's logits differ by {difference:.1e}, relative (limit {limit:g})")
        yield replace(row, note=f"logits differ by {difference:.0e}, relative")

    def _timed(
        self,
        name: str,
        call: Callable[[], Any],
        tokens: int | None,
        cost: str | None = None,
        *,
        counted: int = 1,
        warm: bool = True,
    ) -> tuple[Row, Any]:
        """Return the row of a call that reads ``tokens`` tokens, and its result.

        Args:
            cost: Field of `PassCosts` that this measures.
            counted: Times that the study's arithmetic counts each token.
            warm: Time a second call: the first one loads kernels, and cuDNN plans them.
        """
        if warm:
            call()
        seconds, result = 0.0, None

        def timed() -> None:
            nonlocal seconds, result
            wait(self.device)
            started = time.perf_counter()
            result = call()
            wait(self.device)
            seconds = time.perf_counter() - started

        peak = peak_bytes(self.lm, timed)
        plain = None
        sequences, length = self.sizes.scans[-1]
        if tokens is not None and (sequences, length) in self.plain:
            plain = self.plain[sequences, length] * tokens / (sequences * length)
        if cost is not None and tokens is not None:
            self._measured(cost, seconds, counted * tokens)
        return Row(name, seconds, tokens, plain, peak), result

    def _measured(self, cost: str, seconds: float, tokens: int) -> None:
        if self.speed:
            self.measured[cost] = seconds * self.speed / tokens

    @contextmanager
    def _noted(self, title: str, total: int, unit: str) -> Iterator[Callable[[], object]]:
        """Note the progress of a long step, for the row of a step that is stopped."""
        steps = count(1)

        def done() -> None:
            self.at = f"{title}: {next(steps)} of {total} {unit}"

        yield done
        self.at = ""

    @property
    def _chosen(self) -> tuple[Head, ...]:
        if not self.removed:
            raise RuntimeError("no heads were chosen")
        return self.removed

    @property
    def _count(self) -> int:
        return head_count(_SHARE, self.lm.grid.total_heads)

    @cached_property
    def _texts(self) -> Tensor:
        return token_ids(self.lm, self.sizes.texts, self.sizes.tokens, seed=1)

    @cached_property
    def _prompts(self) -> Tensor:
        """Prompts whose last tokens, which are scored, stand in their first half, too."""
        ids = token_ids(self.lm, self.sizes.texts, self.sizes.tokens, seed=2)
        scored = self.sizes.scored + 1
        ids[:, -scored:] = ids[:, 1 : 1 + scored]
        return ids

    @cached_property
    def _recall_loss(self) -> NextTokenLoss:
        B, N = self._prompts.shape
        return NextTokenLoss.of(self._prompts, [N] * B, [self.sizes.scored] * B)

    @cached_property
    def _calibration(self) -> Calibration:
        ids = token_ids(self.lm, self.sizes.calibration, self.sizes.tokens, seed=3).cpu()
        return Calibration(ids, torch.full((len(ids),), ids.shape[1]))


def run_steps(run: WholeRun, steps: Sequence[Step], clock: Clock, table: Table) -> list[str]:
    """Run steps until the clock ends, each with its rows, and return the names of those that failed."""
    failed = []
    for step in steps:
        note = run.at = ""
        if clock.left < (step.seconds if run.device.type == "cuda" else 0.0):
            note = f"left out: {max(0.0, clock.left):.0f} s left"
        else:
            try:
                with clock.limit(step.most):
                    for row in step.rows():
                        table.row(*row.cells(run.card, run.weight_bytes))
            except OutOfTime as late:
                note = f"{late}; {run.at}".rstrip("; ")
            except Exception as problem:  # its row has the error, and the other steps may still run
                note = f"failed: {first_line(problem)}"
                failed.append(step.name)
        if note:
            table.row(*Row(step.name, note=note).cells(run.card, 0))
        release_memory()
    return failed


def hours_rows(speed: float, measured: Mapping[str, float], card: str) -> Iterator[tuple[object, ...]]:
    """Yield the cells of `HOURS_COLUMNS` for a study with its defaults, and questions of MMLU's length.

    Args:
        speed: Tokens per second of the study's timed pass.
        measured: Costs by their names in `PassCosts`; the arithmetic's own are kept for the others.
    """
    requests = made_requests(1, 57)
    config = Study(ModelSpec("8B"), CorpusSpec("texts/"), max_tokens=LONGEST_STUDY_TEXT)
    enough, _ = enough_for(config, by_probability=True)
    costs = QuestionCosts(
        tokens=tokens_read_once(request.ids for request in requests) / 57,
        recall_tokens=len(RECALL_FAMILIES) * LONGEST_STUDY_TEXT / QUESTIONS_PER_TEXT,
        by_probability=True,
        enough=(enough, enough),
        available=enough,
        enough_recall=(enough, enough),
        recalls="not asked",
        repair_texts=WHOLE.calibration,
    )
    config = decided(config, speed, costs, lambda line: None)
    by_arithmetic = study_seconds(config, costs, speed)
    by_measured = study_seconds(config, costs, speed, PassCosts(**measured))
    for name, seconds in by_arithmetic.items():
        yield name, card, time_text(seconds), time_text(by_measured[name])
    in_all = (
        f"in all: {config.sequences} texts, {config.questions:,} questions, {config.recall_questions:,} of each recall"
        " task"
    )
    yield in_all, card, *(time_text(sum(each.values())) for each in (by_arithmetic, by_measured))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU in float32")
    parser.add_argument("--minutes", type=float, default=7.5, help="time for everything (default: 7.5)")
    options = parser.parse_args()
    if options.tiny:
        options.device, options.dtype = "cpu", "float32"
    sizes = TINY if options.tiny else WHOLE
    clock = Clock(60 * options.minutes)
    gc.freeze()  # the collections between the steps then leave out the objects of the imports
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device = device_of(options)
    card = processor(options.device) if device.type == "cuda" else "CPU"
    with tempfile.TemporaryDirectory() as folder:
        run = WholeRun(sizes, device, getattr(torch, options.dtype), card, Path(folder))
        steps = Table(f"## A study's steps on the {sizes.shape} shape, {sizes.layers} layers", COLUMNS)
        failed = run_steps(run, run.steps(), clock, steps)
    ways_to_entropy = Table("## Ways to the entropy of one layer", ENTROPY_COLUMNS)
    for cells in run.entropy:
        ways_to_entropy.row(*cells)
    if run.speed:
        hours = Table("## The time of a study", HOURS_COLUMNS)
        for cells in hours_rows(run.speed, run.measured, card):
            hours.row(*cells)
        show(f"\nCosts in passes as a study times them, {run.speed:,.0f} tokens/s: {_words(run.measured)}.")
    if run.ratios:
        show(f"\n{verdict_on_goal(run.ratios)}")
    if failed:
        show(f"\nSteps that failed: {', '.join(failed)}.")
        raise SystemExit(1)


def _words(measured: Mapping[str, float]) -> str:
    own = vars(PassCosts())
    return ", ".join(f"{name} {value:.1f} instead of {own[name]:g}" for name, value in measured.items()) or "none"


if __name__ == "__main__":
    main()
