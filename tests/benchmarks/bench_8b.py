"""A model of the 8B shape whole on one GPU, through all that a study does, within 8 minutes.

    make gpu-8b
    python -m tests.benchmarks.bench_8b --device cuda --dtype bfloat16
    python -m tests.benchmarks.bench_8b --tiny

The weights are random, made on the device; `whole_model` lets the heads differ as those of trained models do. Every step
is a row with its time, its speed, its time over that of a plain forward pass over as many tokens, and its peak memory
over the weights. A step that fails is a row with its error, and so is one for which no time is left. Two tables follow:
ways to the entropy (`entropy_ways`), and the hours of a study by its own arithmetic beside the measured speeds.

``--tiny`` runs the same on a small model on the CPU, which shows that all steps run; its times mean nothing. The
benchmark needs torch, transformers and accelerate alone, and about 45 GiB of GPU memory and 16 GB of disk.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, StaticCache
from transformers.utils import logging

import headscan
from headscan.analysis.store.verdict_limits import QUESTIONS_PER_TEXT
from headscan.analysis.verdicts.paired import enough_questions
from headscan.catalog import RECALL_FAMILIES, head_count
from headscan.gradients.losses import NextTokenLoss
from headscan.grid import Head
from headscan.kv.plan_cache import PlanCache
from headscan.measure.behaviour_probes import Needle
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import LoadedModel
from headscan.models.token_batches import release_memory
from headscan.pipelines.scoring.prefix_tree import tokens_read_once
from headscan.pipelines.settings.corpus_settings import CorpusSpec
from headscan.pipelines.study.study_config import LONGEST_STUDY_TEXT, StudyConfig
from headscan.pipelines.study.study_time import (
    CHANGED,
    PassCosts,
    QuestionCosts,
    TimedPass,
    decided,
    study_seconds,
    time_pass,
)
from headscan.pruning.calibration import Calibration
from headscan.pruning.damage_curve import layer_moments
from headscan.pruning.head_selection import HeadSelection, SelectionConfig
from headscan.pruning.repair import RepairConfig, repair
from tests.benchmarks import entropy_ways
from tests.benchmarks.bench_arms import ABLATED, answers, made_requests, readings
from tests.benchmarks.bench_cache import CacheLoad, fill, half_windows, held_bytes
from tests.benchmarks.bench_instrument import SCAN, verdict_on_goal
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
)
from tests.benchmarks.measuring import wait as wait_for
from tests.benchmarks.overhead import peak_bytes, ways
from tests.benchmarks.whole_model import spread_of_heads, token_ids, whole_model

COLUMNS = ("step", "card", "seconds", "tokens/s", "x plain", "peak, x weights", "note")
HOURS_COLUMNS = ("step of a study", "card", "by its arithmetic, minutes", "by the measured costs, minutes")
#: Share of the heads that are removed.
_SHARE = 0.1
#: Tokens of the short text whose logits are compared, and the largest relative difference of a model that was loaded.
_COMPARED, _SAME = 16, 1e-3
#: Seconds of timed rounds for one setting, and those that the tables after the steps need.
_SECONDS, _LAST_TABLES = 4.0, 75.0
#: Seconds after which a choice of heads is stopped.
_LONGEST_CHOICE = 170.0


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
    selection: SelectionConfig = SelectionConfig()

    @property
    def longest(self) -> int:
        """Tokens that the model must read, in a prompt of MMLU's length, too."""
        return max(2048, self.context + 256, *(tokens for _, tokens in self.scans))


#: The repair needs more tokens than its widest projection has columns, 14,336.
WHOLE = Sizes(
    "8B", 32, 128_256, ((1, 4096), (1, 32_768), (16, 512)), 16, 512, 16, 64, 36, 2, 40, 32, 32_768, 8, 8
)  # fmt: skip
TINY = Sizes(
    "tiny", 4, 512, ((1, 64), (1, 256), (4, 64)), 4, 64, 8, 16, 8, 1, 2, 4, 512, 2, 2,
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


@dataclass
class WholeRun:
    """The steps in their order, each of which yields rows; later ones use the results of earlier ones.

    Attributes:
        plain: Seconds of a plain pass by its sequences and tokens.
        speed: Tokens per second of a pass as a study times it.
        measured: Costs that were measured, by their names in `PassCosts`.
        ratios: Time of the 15 scores over that of the plain pass, by load.
        removed: Heads to remove.
        weights: Repaired weights.
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
    removed: tuple[Head, ...] = ()
    weights: dict[str, Tensor] = field(default_factory=dict)
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

    def load(self) -> Iterator[Row]:
        sizes = self.sizes
        started = time.perf_counter()
        self._model = whole_model(
            sizes.shape, sizes.longest, self.device, self.dtype, layers=sizes.layers, vocabulary=sizes.vocabulary
        )
        wait_for(self.device)
        parameters = sum(weight.numel() for weight in self.lm.model.parameters())
        note = f"{parameters / 1e9:.3g} billion parameters, {self.weight_bytes / 2**30:.2f} GiB, random, made there"
        yield Row("load", time.perf_counter() - started, note=note)

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
            took = medians(chosen, self.device, _SECONDS, 2)
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

        def run() -> object:
            return headscan.probe(self.lm, settings=settings, haystack=words[24:], needles=needles)

        repeats = settings.sequences * (1 + settings.tokens * settings.repeats)
        yield self._step("probe", run, repeats + length * len(needles) * len(settings.depths))

    def importance(self) -> Iterator[Row]:
        found: dict[str, Tensor] = {}

        def of_texts() -> None:
            found.update(headscan.importance(self.lm, self._texts))

        def of_prompts() -> None:
            headscan.importance(self.lm, self._prompts, loss=self._recall_loss)

        yield self._step("importance, texts", of_texts, self._texts.numel(), cost="importance")
        yield self._step("importance, recall prompts", of_prompts, self._prompts.numel())
        means = found["importance"].mean(0)
        order = means.flatten().argsort()[: self._count].tolist()
        self.removed = tuple(sorted(Head(*divmod(at, means.shape[1])) for at in order))

    def derivatives(self) -> Iterator[Row]:
        scored = list(self._recall_loss.counts)
        recent = self.sizes.recent

        def of_texts() -> None:
            headscan.kv_damage(self.lm, self._texts, recent=recent)

        def of_prompts() -> None:
            headscan.kv_damage(self.lm, self._prompts, recent=recent, scored=scored)

        yield self._step("derivatives for a plan, texts", of_texts, self._texts.numel(), cost="derivatives")
        yield self._step("derivatives for a plan, recall prompts", of_prompts, self._prompts.numel())

    def arms(self) -> Iterator[Row]:
        requests = made_requests(self.sizes.subjects, self.sizes.questions, self.lm.vocab_size)
        tokens, once = sum(len(request.ids) for request in requests), tokens_read_once(r.ids for r in requests)
        budget = self.sizes.batch * max(len(request.ids) for request in requests)
        ablates = {name: make(self.lm) for name, make in ABLATED.items()}
        shared, whole = readings(self.lm, ablates.values())
        for name, ablated in ablates.items():
            kept = {}
            for way, reading in (("whole prompts", whole), ("shared prefixes", shared)):

                def run(reading: Any = reading, ablated: Any = ablated, way: str = way) -> None:
                    kept[way] = answers(self.lm, reading, ablated, requests, budget)  # noqa: B023

                row = self._step(f"{name}, {way}", run, tokens, warm=False)
                if len(kept) == 1:
                    yield row
            others, alike, _ = kept["whole prompts"].differences(kept["shared prefixes"])
            note = f"{once:,} tokens without repeated prefixes; log-likelihoods differ by {alike:.0e}, {others} ablate others"
            yield Row(row.name, row.seconds, tokens, row.plain, row.peak, note)

    def decoding(self) -> Iterator[Row]:
        sizes, lm = self.sizes, self.lm
        load = CacheLoad(sizes.shape, sizes.layers, sizes.context, sizes.rows, sizes.steps, str(self.dtype))
        # The untimed rounds and the timed ones.
        most = sizes.context + 12 * sizes.steps
        token = torch.ones(sizes.rows, 1, dtype=torch.long, device=self.device)
        kinds: dict[str, Callable[[], Cache]] = {
            "whole StaticCache": lambda: StaticCache(config=lm.model.config, max_cache_len=most),
            "PlanCache with half windows": lambda: PlanCache(half_windows(lm), max_tokens=most),
        }
        plain = None
        for name, make in kinds.items():
            cache = make()
            with torch.no_grad():
                fill(cache, lm, load, sizes.context)

                def decode(cache: Cache = cache) -> None:
                    for _ in range(sizes.steps):
                        lm.model(input_ids=token, past_key_values=cache, use_cache=True)

                peak = peak_bytes(lm, decode)
                took = medians({name: decode}, self.device, _SECONDS)[name] / sizes.steps
            plain = plain or took
            note = f"a step; {held_bytes(cache) / 2**30:.2f} GiB of cache"
            yield Row(f"decoding, {sizes.rows} x {sizes.context:,}, {name}", took, sizes.rows, plain, peak, note)
            del cache, decode
            release_memory()

    def moments(self) -> Iterator[Row]:
        part = self._calibration.first(self.sizes.selection.moment_tokens)
        yield self._step("moments of all layers", lambda: layer_moments(self.lm, part), part.tokens, warm=False)

    def choice(self) -> Iterator[Row]:
        def run() -> None:
            selection = HeadSelection(self.lm, self._calibration, config=self.sizes.selection)
            self.removed = selection.choose(count=self._count)

        row = self._step("choice by damage, with its moments", run, self._calibration.tokens, "damage", warm=False)
        yield Row(row.name, row.seconds, None, None, row.peak, f"{self._count} of {self.lm.grid.total_heads} heads")

    def repair(self) -> Iterator[Row]:
        if not self.removed:
            raise RuntimeError("no heads were chosen")

        def run() -> None:
            self.weights = repair(self.lm, self._calibration, self.removed, RepairConfig(("o", "down")))

        # A study counts its texts twice, because both models read them.
        yield self._step("repair of o and down", run, self._calibration.tokens, "repair", counted=2, warm=False)

    def slicing(self) -> Iterator[Row]:
        if not self.removed:
            raise RuntimeError("no heads were chosen")

        def run() -> None:
            self._smaller = headscan.slice_heads(self.lm, self.removed, self.weights)

        yield self._step("slicing", run, None, warm=False)

    def saving(self) -> Iterator[Row]:
        smaller = self._smaller
        if smaller is None:
            raise RuntimeError("no model was sliced")
        size, free = sum(weight.nbytes for weight in smaller.model.parameters()), shutil.disk_usage(self.folder).free
        if free < 1.1 * size:
            raise RuntimeError(f"{free / 2**30:.0f} GiB of disk are free (limit {1.1 * size / 2**30:.0f} GiB)")
        yield self._step("saving", lambda: headscan.save_pruned(smaller, self.folder / "smaller"), None, warm=False)
        loaded: list[LoadedModel] = []

        def run() -> None:
            loaded.append(headscan.load(self.folder / "smaller", device=str(self.device)))

        row = self._step("loading what was saved", run, None, warm=False)
        ids = token_ids(self.lm, 2, _COMPARED)
        with torch.no_grad():
            ours, theirs = (lm.model(input_ids=ids).logits.float() for lm in (smaller, loaded[0]))
        difference = float((ours - theirs).norm() / ours.norm())
        if not difference <= _SAME:
            raise RuntimeError(
                f"the saved model has other logits: relative difference {difference:.1e} (limit {_SAME:g})"
            )
        note = f"logits differ by {difference:.0e}, relative; {size / 2**30:.2f} GiB"
        yield Row(row.name, row.seconds, peak=row.peak, note=note)

    def _step(
        self,
        name: str,
        run: Callable[[], object],
        tokens: int | None,
        cost: str | None = None,
        *,
        counted: int = 1,
        warm: bool = True,
    ) -> Row:
        """Return the row of a call that reads texts.

        Args:
            cost: Field of `PassCosts` that this measures.
            counted: Times that the study's arithmetic counts each text.
            warm: Time a second call instead of the first one, whose kernels are chosen and loaded.
        """
        if warm:
            run()
        seconds = 0.0

        def timed() -> None:
            nonlocal seconds
            wait_for(self.device)
            started = time.perf_counter()
            run()
            wait_for(self.device)
            seconds = time.perf_counter() - started

        peak = peak_bytes(self.lm, timed)
        plain = self.plain.get(self.sizes.scans[-1])
        if tokens is not None and plain is not None:
            sequences, length = self.sizes.scans[-1]
            plain *= tokens / (sequences * length)
        if cost is not None and tokens is not None:
            self._measured(cost, seconds, counted * tokens)
        return Row(name, seconds, tokens, None if tokens is None else plain, peak)

    def _measured(self, cost: str, seconds: float, tokens: int) -> None:
        if self.speed:
            self.measured[cost] = seconds * self.speed / tokens

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


@dataclass(frozen=True)
class Step:
    """A step, and the seconds that it takes a GPU, about; it does not start with fewer. ``most`` ends it."""

    name: str
    run: Callable[[], Iterator[Row]]
    seconds: float
    most: float = float("inf")


def steps_of(run: WholeRun) -> list[Step]:
    """Return the steps in their order."""
    return [
        Step("load", run.load, 15),
        Step("pass as a study times it", run.study_pass, 3),
        Step("scans", run.scans, 45),
        Step("the heads differ", run.heads, 2),
        Step("probe", run.probe, 5),
        Step("importance", run.importance, 15),
        Step("derivatives for a plan", run.derivatives, 15),
        Step("arms", run.arms, 20),
        Step("decoding", run.decoding, 15),
        Step("moments of all layers", run.moments, 5),
        Step("choice by damage", run.choice, 60, _LONGEST_CHOICE),
        Step("repair", run.repair, 40),
        Step("slicing", run.slicing, 5),
        Step("saving", run.saving, 35),
    ]


def run_steps(steps: list[Step], run: WholeRun, clock: Clock, row: Callable[..., object]) -> list[str]:
    """Run steps and pass their rows to ``row`` until the clock ends; return the names of those that failed."""
    failed = []
    for step in steps:
        if clock.left < (step.seconds if run.device.type == "cuda" else 0.0):
            row(*Row(step.name, note=f"left out: {max(0.0, clock.left):.0f} s left").cells(run.card, 0))
            continue
        problem = None
        try:
            with clock.limit(step.most):
                for each in step.run():
                    row(*each.cells(run.card, run.weight_bytes))
        except OutOfTime as late:
            problem = str(late)
        except Exception as error:  # the row has the error, and the other steps may still run
            problem = f"failed: {first_line(error)}"
            failed.append(step.name)
        if problem is not None:
            row(*Row(step.name, note=problem).cells(run.card, 0))
        release_memory()
    return failed


def hours_rows(speed: float, measured: Mapping[str, float], card: str) -> Iterator[tuple[object, ...]]:
    """Yield the cells of `HOURS_COLUMNS` for a study with its defaults, and questions of MMLU's length.

    Args:
        speed: Tokens per second of the study's timed pass.
        measured: Costs by their names in `PassCosts`; the arithmetic's own are kept for the others.
    """
    requests = made_requests(1, 57)
    config = StudyConfig(ModelSpec("8B"), CorpusSpec("texts/"), max_tokens=LONGEST_STUDY_TEXT)
    enough = enough_questions(CHANGED, config.kind_count)
    costs = QuestionCosts(
        tokens=tokens_read_once(request.ids for request in requests) / 57,
        recall_tokens=len(RECALL_FAMILIES) * LONGEST_STUDY_TEXT / QUESTIONS_PER_TEXT,
        enough=enough,
        available=enough,
        enough_recall=enough,
        recalls="not asked",
        repair_texts=WHOLE.calibration,
    )
    config = decided(config, speed, costs, lambda line: None)
    by_arithmetic = study_seconds(config, costs, speed)
    by_measured = study_seconds(config, costs, speed, PassCosts(**measured))
    for name, seconds in by_arithmetic.items():
        yield name, card, f"{seconds / 60:.1f}", f"{by_measured[name] / 60:.1f}"
    hours = [sum(each.values()) / 3600 for each in (by_arithmetic, by_measured)]
    about = f"in all, hours: {config.sequences} texts, {config.questions:,} questions, {config.recall_questions} of each recall task"
    yield about, card, *(f"{each:.2f} h" for each in hours)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU in float32")
    parser.add_argument("--minutes", type=float, default=7.5, help="time for everything (default: 7.5)")
    options = parser.parse_args()
    if options.tiny:
        options.device, options.dtype = "cpu", "float32"
    sizes = TINY if options.tiny else WHOLE
    clock = Clock(60 * options.minutes)
    logging.set_verbosity_error()
    device = device_of(options)
    card = processor(options.device)
    with tempfile.TemporaryDirectory() as folder:
        run = WholeRun(sizes, device, getattr(torch, options.dtype), card, Path(folder))
        title = f"## A study's steps on the {sizes.shape} shape, {sizes.layers} layers"
        failed = run_steps(steps_of(run), run, clock.until(_LAST_TABLES), Table(title, COLUMNS).row)

    table = Table("## Ways to the entropy of one layer", entropy_ways.COLUMNS)

    def entropy() -> Iterator[Row]:
        for sequences, tokens in sizes.scans:
            if sequences == 1:
                inputs = entropy_ways.attention_inputs(run.lm, token_ids(run.lm, 1, tokens), sizes.layers // 2)
                for cells in entropy_ways.entropy_rows(*inputs, card, _SECONDS):
                    table.row(*cells)
        yield from ()

    failed += run_steps([Step("ways to the entropy", entropy, 5)], run, clock, Table("## Not timed", COLUMNS).row)
    if run.speed:
        show(
            f"\nA study reads {run.speed:,.0f} tokens per second. Measured costs, in plain passes: {_words(run.measured)}."
        )
        hours = Table("## A whole study", HOURS_COLUMNS)
        for cells in hours_rows(run.speed, run.measured, card):
            hours.row(*cells)
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
