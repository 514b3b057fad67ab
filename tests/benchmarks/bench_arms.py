"""Questions per second of an arm, relative to lm-eval's Hugging Face model.

    python -m tests.benchmarks.bench_arms [--device cuda] [--dtype bfloat16] [--shapes 10M 135M] [--subjects 4]
    python -m tests.benchmarks.bench_arms --tasks mmlu_local --include-path FOLDER --num-fewshot 5
    python -m tests.benchmarks.bench_arms --beside whole --device cuda --dtype bfloat16 --shapes 8B

Both answer the same tokens with the same heads ablated and the same batch budget, in turn, in one process. Models are
Llama shapes with random weights. Without ``--tasks`` the requests are random tokens as long as MMLU's with five
examples: a prefix for each subject, four one-token answers to each question. With ``--beside whole``, arms are compared
with whole prompts instead of lm-eval; then the benchmark needs torch, transformers and accelerate alone, and counts the
requests in which rounding led a rule to ablate another number of heads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

import headscan
from headscan.ablation.masks import HeadMask
from headscan.ablation.rules import HeadRule
from headscan.checkpoints.sources import load_tokenizer
from headscan.demo import MODEL_FOLDER
from headscan.engine.answer import AnsweringSettings, answer, settings_for
from headscan.settings.evaluation_settings import TaskConfig
from headscan.texts.token_requests import Request
from tests.benchmarks.measuring import Table, device_of, parser_of, show
from tests.benchmarks.overhead import make_model, peak_bytes

#: Layers of the shapes in `overhead`. Of 10M the embedding is another 12.6M.
_LAYERS = {"10M": 10, "135M": 30, "8B": 32}
#: Subjects whose questions are asked unless told otherwise: lm-eval's own model takes seconds a question.
SUBJECTS = {"10M": 3, "135M": 1, "8B": 2}
_VOCABULARY = 49152
_CONTEXT = 8192
#: Tokens of an MMLU prompt: what the five examples take, and a question with its choices.
_EXAMPLES, _QUESTION = (350, 950), (60, 170)
_ANSWERS = 4

COLUMNS = (
    "shape",
    "arm",
    "questions",
    "beside",
    "its questions/s",
    "headscan",
    "ratio",
    "peak memory",
    "other heads",
    "difference of the others",
    "largest difference",
)
#: What is ablated: on models with random weights a rule by this threshold takes a part of the heads of most layers.
ABLATED: dict[str, Callable[[headscan.LoadedModel], HeadMask | HeadRule]] = {
    "mask": lambda lm: HeadMask([(0, 0), (len(lm.grid.sites) // 2, 1)]),
    "rule": lambda lm: HeadRule("output_norm_ln", threshold=0.97),
}


def make_whole(shape: str, device: str, dtype: torch.dtype) -> headscan.LoadedModel:
    """Return a whole model of a shape with random weights, and a tokenizer."""
    lm = make_model(shape, _CONTEXT, device, dtype, _LAYERS[shape], _VOCABULARY, tied=True)
    return headscan.LoadedModel(lm.model, load_tokenizer(str(MODEL_FOLDER)), lm.grid, shape)


def made_requests(subjects: int, questions: int, vocabulary: int = _VOCABULARY) -> list[Request]:
    """Random tokens of MMLU's lengths. No token is 0, which pads."""
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    found = []
    answers = draw(1, vocabulary, _ANSWERS)
    for examples in draw(*_EXAMPLES, subjects):
        prefix = draw(1, vocabulary, examples)
        for question in draw(*_QUESTION, questions):
            context = prefix + draw(1, vocabulary, question)
            found += [Request((*context, answer), 1) for answer in answers]
    return found


def task_requests(tasks: TaskConfig, tokenizer: PreTrainedTokenizerBase) -> list[Request]:
    """The log-likelihood requests of real tasks."""
    from headscan.runs.model_identity import ModelIdentity
    from headscan.texts.harness import HeadscanLM
    from headscan.texts.tasks import Tasks

    identity = ModelIdentity("bench", None, "", None, None, _CONTEXT, tokenizer)
    collector = HeadscanLM(identity)
    Tasks(tasks).collect(collector)
    return [request for request in collector.requests.values() if isinstance(request, Request)]


class Theirs:
    """lm-eval's own model, with heads ablated by plain hooks."""

    def __init__(self, lm: headscan.LoadedModel, batch: int) -> None:
        from lm_eval.models.huggingface import HFLM

        from headscan.texts.harness import quiet_harness

        self._lm = lm
        self._tokens: Tensor | None = None
        with quiet_harness():
            self._hflm = HFLM(pretrained=lm.model, tokenizer=lm.tokenizer, batch_size=batch, max_length=_CONTEXT)

    def answer(self, requests: Sequence[Request], ablated: HeadMask | HeadRule) -> Answers:
        pairs: list[Any] = [
            (("", ""), list(r.ids[: -r.scored_tokens]), list(r.ids[-r.scored_tokens :])) for r in requests
        ]
        with self._hooks(ablated):
            values = [value for value, _ in self._hflm._loglikelihood_tokens(pairs, disable_tqdm=True)]
        return Answers(values, (0.0,) * len(values))

    @contextmanager
    def _hooks(self, ablated: HeadMask | HeadRule) -> Iterator[None]:
        handles = [self._lm.model.register_forward_pre_hook(self._look)]
        for site in self._lm.grid.sites:
            projection = self._lm.module(site.output_projection)
            ablate = self._mask(site.layer, ablated) if isinstance(ablated, HeadMask) else self._rule(ablated)
            handles.append(projection.register_forward_pre_hook(ablate))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _look(self, module: object, args: tuple[Tensor, ...]) -> None:
        self._tokens = args[0]

    def _mask(self, layer: int, mask: HeadMask) -> Callable[[object, tuple[Tensor]], tuple[Tensor]]:
        heads = self._lm.grid.sites[0].num_attention_heads
        gate = torch.ones(heads, 1, dtype=self._lm.model.dtype, device=self._lm.device)
        for of_layer, head in mask.heads:
            if of_layer == layer:
                gate[head] = 0
        return lambda module, args: ((args[0].unflatten(-1, (heads, -1)) * gate).flatten(-2),)

    def _rule(self, rule: HeadRule) -> Callable[[object, tuple[Tensor]], tuple[Tensor]]:
        heads = self._lm.grid.sites[0].num_attention_heads

        def ablate(module: object, args: tuple[Tensor]) -> tuple[Tensor]:
            assert self._tokens is not None and rule.score == "output_norm_ln"
            # Zeros behind the last other token are padding; one in front may be the BOS.
            real = (self._tokens != 0).flip(1).cummax(1).values.flip(1)[..., None]
            outputs = args[0].unflatten(-1, (heads, -1))
            norms = (outputs.float().norm(dim=-1) * real).sum(1) / real.sum(1)
            kept = norms / norms.mean(-1, keepdim=True) >= rule.threshold
            return ((outputs * kept[:, None, :, None]).flatten(-2),)

        return ablate


def timed(ways: Mapping[str, Callable[[], Answers]], rounds: int) -> tuple[dict[str, float], dict[str, Answers]]:
    """Median time of each way, run in turn, and the log-likelihoods that it gave last."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    values = {}
    for _ in range(rounds):
        for name, way in ways.items():
            started = time.perf_counter()
            values[name] = way()
            times[name].append(time.perf_counter() - started)
    return {name: median(of_way) for name, of_way in times.items()}, values


def readings(
    lm: headscan.LoadedModel, ablates: Collection[HeadMask | HeadRule], budget: int
) -> tuple[AnsweringSettings, AnsweringSettings]:
    """Return how arms read shared prefixes, and whole prompts; a pass reads ``budget`` tokens."""
    shared, whole = (
        settings_for(list(ablates), budget, share, dtype=lm.dtype, rope=lm.rope_lengths, say=show)
        for share in (None, False)
    )
    for ablated in ablates:  # short passes show what the model can do, before the time is measured
        answer(lm, [Request((1, 2), 1)], [ablated], shared)
    return shared, whole


class Answers(NamedTuple):
    """The log-likelihood of each request under an arm, and the share of heads that were ablated in it."""

    values: list[float]
    shares: tuple[float, ...]

    def differences(self, other: Answers) -> tuple[int, float, float]:
        """Return the number of requests with other numbers of ablated heads, the largest difference of the others'
        log-likelihoods, and that of all.
        """
        pairs = list(zip(self.values, other.values, self.shares, other.shares, strict=True))
        alike = [abs(a - b) for a, b, ours, theirs in pairs if ours == theirs]
        return len(pairs) - len(alike), max(alike, default=0.0), max(abs(a - b) for a, b, *_ in pairs)


def answers(
    lm: headscan.LoadedModel, settings: AnsweringSettings, ablated: HeadMask | HeadRule, asked: Sequence[Request]
) -> Answers:
    """Return an arm's answers."""
    [result] = answer(lm, asked, [ablated], settings)
    return Answers([each.log_likelihood for each in result.values], result.ablated_shares)


def compared(
    lm: headscan.LoadedModel, requests: Sequence[Request], arms: Sequence[str], batch: int, rounds: int, beside: str
) -> Iterator[tuple[object, ...]]:
    """Yield the cells of `COLUMNS` after the shape for each kind of arm. ``beside`` is what the arms are compared
    with.
    """
    questions = len({request.ids[:-1] for request in requests})
    budget = batch * max(len(request.ids) for request in requests)
    theirs = Theirs(lm, batch) if beside == "lm-eval" else None
    ablates = {name: ABLATED[name](lm) for name in arms}
    shared, whole = readings(lm, ablates.values(), budget)

    def ways(ablated: HeadMask | HeadRule, asked: Sequence[Request]) -> dict[str, Callable[[], Answers]]:
        other = partial(theirs.answer, asked, ablated) if theirs else partial(answers, lm, whole, ablated, asked)
        return {beside: other, "headscan": partial(answers, lm, shared, ablated, asked)}

    # The longest make the peak, and counting every tensor of all of them would take long.
    longest = sorted(requests, key=lambda request: -len(request.ids))[: 4 * _ANSWERS * batch]
    for name, ablated in ablates.items():
        took, values = timed(ways(ablated, requests), rounds)
        others, of_same, largest = values[beside].differences(values["headscan"])
        peaks = {way: peak_bytes(lm, run) for way, run in ways(ablated, longest).items()}
        yield (
            name,
            questions,
            beside,
            f"{questions / took[beside]:.2f}/s",
            f"{questions / took['headscan']:.2f}/s",
            f"{took[beside] / took['headscan']:.2f}",
            f"{peaks['headscan'] / peaks[beside]:.2f}",
            *(("-", "-") if theirs else (others, f"{of_same:.0e}")),
            f"{largest:.0e}",
        )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", nargs="+", default=["10M", "135M"], choices=_LAYERS)
    parser.add_argument("--beside", default="lm-eval", choices=("lm-eval", "whole"), help="default: lm-eval")
    parser.add_argument("--arms", nargs="+", default=list(ABLATED), choices=ABLATED)
    parser.add_argument("--batch", type=int, default=8, help="lm-eval's batch; ours holds as many tokens (default: 8)")
    parser.add_argument("--subjects", type=int, help="of the made requests (default: 3, of 135M 1)")
    parser.add_argument("--questions", type=int, default=20, help="a subject of the made requests (default: 20)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tasks", help="lm-eval tasks in the place of made requests, with commas between")
    parser.add_argument("--include-path", help="folder with more tasks")
    parser.add_argument("--num-fewshot", type=int, help="examples in the prompt")
    parser.add_argument("--limit", type=int, help="questions a task")
    options = parser.parse_args()
    logging.set_verbosity_error()
    device_of(options)
    table = Table("## Arms", COLUMNS)
    for shape in options.shapes:
        lm = make_whole(shape, options.device, getattr(torch, options.dtype))
        if options.tasks:
            names = tuple(options.tasks.split(","))
            tasks = TaskConfig(names, options.include_path, options.num_fewshot, options.limit)
            requests = task_requests(tasks, lm.require_tokenizer())
        else:
            requests = made_requests(options.subjects or SUBJECTS[shape], options.questions)
        for cells in compared(lm, requests, options.arms, options.batch, options.rounds, options.beside):
            table.row(shape, *cells)


if __name__ == "__main__":
    main()
