"""Accuracy and speed of multiple-choice answers with shared prefixes.

The requests are random tokens laid out as MMLU's with five examples are: a long prefix for each subject, and for each
of its questions four short endings, whose log-likelihood is asked for. A mask continues from a prefix's KV cache; a
rule, which needs whole inputs, reads shared rows that hold the prefix once.

Shapes: B sequences, N tokens, M places whose logits are wanted, E width of a hidden state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

import headscan
from headscan.ablation.intervene import intervene
from headscan.ablation.masks import HeadMask
from headscan.ablation.rules import HeadRule
from headscan.gpu_proof.checks import Check, Comparer, Difference
from headscan.gpu_proof.timing import medians
from headscan.layers.blocks import Blocks, find_blocks
from headscan.layers.prefix_cache import read_prefix, shares_prefixes
from headscan.layers.shared_rows import SharedRow, can_share_rows, read_shared_row
from headscan.models.forward_inputs import run
from headscan.models.loaded_model import LoadedModel
from headscan.testing.overhead import VOCABULARY, make_model, peak_bytes

GROUP = "answers"
COLUMNS = ("arm", "way", "requests", "seconds", "arms/s", "questions/s", "x faster", "peak GiB")
_ANSWERS = 4
#: Largest mean error of the log-likelihoods relative to the largest one: in bfloat16 through all layers, in float32.
_HALF, _SINGLE = 0.02, 1e-3
#: Largest share of heads for which rounding may change a rule's decision.
_FLIPPED = 0.02


@dataclass(frozen=True)
class Load:
    """The model and the number of requests.

    Attributes:
        shape, layers: Shape of the model in `overhead`, and its layers; None uses the whole depth of 8B.
        subjects, questions: Number of prefixes, and of questions for each.
        prefix, question, ending: Smallest and largest number of tokens of each part.
        batch_tokens: Tokens of one plain pass.
        row: Sequences in a shared row.
        seconds: Time for the rounds of one arm.
    """

    shape: str
    layers: int
    subjects: int
    questions: int
    prefix: tuple[int, int]
    question: tuple[int, int]
    ending: tuple[int, int]
    batch_tokens: int
    row: int
    seconds: float


LARGE = Load("8B", 32, 2, 12, (600, 900), (60, 170), (2, 8), 32768, 16, 25.0)
SMALL = Load("135M", 2, 2, 2, (30, 40), (5, 9), (1, 3), 256, 4, 0.0)


class Subject(NamedTuple):
    """Requests with a common prefix, their endings and numbers of scored tokens."""

    prefix: tuple[int, ...]
    rests: tuple[tuple[int, ...], ...]
    scored: tuple[int, ...]


class Answered(NamedTuple):
    """Log-likelihoods per scored token in nats, and shares of ablated heads."""

    likelihoods: Tensor
    shares: Tensor


class Answering:
    """Two arms on one model, each computed in two ways."""

    def __init__(self, load: Load, device: torch.device) -> None:
        self._load, self._device = load, device

    @cached_property
    def lm(self) -> LoadedModel:
        """The model, built at first use."""
        dtype = torch.float32 if self._device.type == "cpu" else torch.bfloat16
        longest = self._load.prefix[1] + self._load.question[1] + self._load.ending[1]
        return make_model(self._load.shape, longest, str(self._device), dtype, self._load.layers)

    def drop_model(self) -> None:
        """Free the model; the next use builds it again."""
        for name in ("lm", "blocks"):
            self.__dict__.pop(name, None)

    @cached_property
    def blocks(self) -> Blocks:
        """The blocks of the model."""
        return find_blocks(self.lm)

    @cached_property
    def subjects(self) -> tuple[Subject, ...]:
        """The requests."""
        generator = torch.Generator().manual_seed(0)

        def number(bounds: tuple[int, int]) -> int:
            return int(torch.randint(bounds[0], bounds[1] + 1, (1,), generator=generator))

        def draw(bounds: tuple[int, int]) -> tuple[int, ...]:
            return tuple(torch.randint(1, VOCABULARY, (number(bounds),), generator=generator).tolist())

        found = []
        for _ in range(self._load.subjects):
            prefix, rests, scored = draw(self._load.prefix), [], []
            for _ in range(self._load.questions):
                question = draw(self._load.question)
                for _ in range(_ANSWERS):
                    ending = draw(self._load.ending)
                    rests.append((*question, *ending))
                    scored.append(len(ending))
            found.append(Subject(prefix, tuple(rests), tuple(scored)))
        return tuple(found)

    @cached_property
    def mask(self) -> HeadMask:
        """A mask of two heads."""
        return HeadMask([(0, 0), (len(self.lm.grid.sites) // 2, 1)])

    @cached_property
    def rule(self) -> HeadRule:
        """A rule that ablates some heads.

        Its threshold is in the widest gap of one text's lowest scores.
        """
        subject = self.subjects[0]
        ids = torch.tensor([[*subject.prefix, *subject.rests[0]]], device=self.lm.device)
        score = "output_norm_ln"
        scores = headscan.score(headscan.collect(self.lm, ids, statistics=["output_norm"]), score)
        lowest = scores[scores.isfinite()].sort().values
        lowest = lowest[: max(3, len(lowest) // 5)]
        widest = int(lowest.diff().argmax())
        return HeadRule(score, float(lowest[widest : widest + 2].mean()))

    def ways(self) -> dict[str, dict[str, Callable[[], Answered]]]:
        """Return both ways of each arm: plain, then with shared prefixes."""
        return {
            "mask": {"full passes": lambda: self._plain(self.mask), "shared prefixes": self._behind_prefixes},
            "rule": {"full passes": lambda: self._plain(self.rule), "shared rows": self._in_rows},
        }

    def check(self, compare: Comparer) -> Iterator[Difference]:
        """Compare both ways of each arm."""
        bound = _SINGLE if self._device.type == "cpu" else _HALF
        yield compare.same("shares prefixes", torch.tensor(shares_prefixes(self.lm)), torch.tensor(True))
        yield compare.same("reads rows", torch.tensor(can_share_rows(self.lm)), torch.tensor(True))
        for arm, ways in self.ways().items():
            expected, found = (way() for way in ways.values())
            what = f"{arm}, {found.likelihoods.numel()} log-likelihoods"
            yield compare.close(what, found.likelihoods, expected.likelihoods, bound, mean=True, smallest=1.0)
            yield compare.close(
                f"{arm}, ablated share", found.shares, expected.shares, _FLIPPED, mean=True, smallest=1.0
            )

    def rows(self) -> Iterator[tuple[object, ...]]:
        """Time both ways of each arm and yield the cells of `COLUMNS`."""
        questions = self._load.subjects * self._load.questions
        for arm, ways in self.ways().items():
            took = medians(ways, self._device, self._load.seconds)
            slowest = took["full passes"]
            for name, seconds in took.items():
                peak = f"{peak_bytes(self.lm, ways[name]) / 2**30:.2f}" if self._device.type == "cuda" else ""
                times = (
                    f"{seconds:.3f}",
                    f"{1 / seconds:.3f}",
                    f"{questions / seconds:.1f}",
                    f"{slowest / seconds:.2f}",
                )
                yield (arm, name, questions * _ANSWERS, *times, peak)

    def _plain(self, what: HeadMask | HeadRule) -> Answered:
        """Run every whole request, in padded batches."""
        found, shares = [], []
        with intervene(self.lm, what) as record:
            for subject in self.subjects:
                longest = len(subject.prefix) + max(map(len, subject.rests))
                for chosen in _parts(len(subject.rests), max(1, self._load.batch_tokens // longest)):
                    ids, lengths = _padded([(*subject.prefix, *subject.rests[i]) for i in chosen])
                    record.lengths = lengths
                    hidden = self._hidden(ids, use_cache=False)
                    starts = [(row, len(subject.prefix)) for row in range(len(chosen))]
                    found.append(self._likelihoods(hidden, starts, subject, chosen))
                    shares.append(record.zeroed_shares)
        return Answered(torch.cat(found), torch.cat(shares))

    def _behind_prefixes(self) -> Answered:
        """Run each prefix once, and the rests from its KV cache."""
        found, shares = [], []
        with intervene(self.lm, self.mask) as record:
            for subject in self.subjects:
                prefix = read_prefix(self.lm, [subject.prefix])
                longest = max(map(len, subject.rests))
                for chosen in _parts(len(subject.rests), max(1, self._load.batch_tokens // (4 * longest))):
                    ids, _ = _padded([subject.rests[i] for i in chosen])
                    hidden = self._hidden(ids, past_key_values=prefix.continued([0] * len(chosen)), use_cache=True)
                    found.append(self._likelihoods(hidden, [(row, 0) for row in range(len(chosen))], subject, chosen))
                    shares.append(record.zeroed_shares)
        return Answered(torch.cat(found), torch.cat(shares))

    def _in_rows(self) -> Answered:
        """Run shared rows, which hold each prefix once."""
        found: dict[int, tuple[Tensor, float]] = {}
        total = 0
        for subject in self.subjects:
            for chosen in _parts(len(subject.rests), self._load.row):
                row = SharedRow(subject.prefix, tuple(subject.rests[i] for i in chosen))

                def forward(
                    part: SharedRow, members: list[int], subject: Subject = subject, chosen: Sequence[int] = chosen
                ) -> Tensor:
                    inputs = part.inputs(self.lm.device)
                    hidden = self._hidden(inputs.pop("input_ids"), use_cache=False, **inputs)
                    starts = [(0, start) for start in part.starts]
                    return self._likelihoods(hidden, starts, subject, [chosen[member] for member in members])

                for reading in read_shared_row(self.blocks, self.rule, row, forward):
                    for member, likelihood in zip(reading.sequences, reading.value, strict=True):
                        found[total + chosen[member]] = (likelihood, reading.zeroed_share)
            total += len(subject.rests)
        answers = [found[index] for index in range(total)]
        return Answered(
            torch.stack([each[0] for each in answers]), torch.tensor([each[1] for each in answers]).double()
        )

    def _hidden(self, ids: Tensor, **kwargs: Any) -> Tensor:
        """Return the last hidden states (B, N, E)."""
        hidden: Tensor = run(self.lm.model, {"input_ids": ids.to(self.lm.device), **kwargs})[0]
        return hidden

    def _likelihoods(
        self, hidden_BNE: Tensor, starts: Sequence[tuple[int, int]], subject: Subject, chosen: Sequence[int]
    ) -> Tensor:
        """Return log-likelihoods per scored token, on the CPU.

        The endings begin at ``starts`` (row, column).
        """
        rows: list[int] = []
        columns: list[int] = []
        targets: list[int] = []
        counts: list[int] = []
        for (row, start), index in zip(starts, chosen, strict=True):
            rest, scored = subject.rests[index], subject.scored[index]
            end = start + len(rest)
            rows += [row] * scored
            columns += range(end - scored - 1, end - 1)  # a token is predicted by the one before it
            targets += rest[-scored:]
            counts.append(scored)
        head: Any = self.lm.model.get_output_embeddings()
        logits = head(hidden_BNE[rows, columns]).float()
        values = logits.log_softmax(-1).gather(-1, torch.tensor(targets, device=logits.device)[:, None])[:, 0]
        return torch.stack([part.mean() for part in values.cpu().double().split(counts)])


def answer_checks(answering: Answering) -> list[Check]:
    """Return the check that both ways of both arms agree."""
    return [Check(GROUP, "shared prefixes and rows answer as full passes do", answering.check)]


def _parts(count: int, size: int) -> list[list[int]]:
    """Yield indices in groups."""
    return [list(range(start, min(start + size, count))) for start in range(0, count, size)]


def _padded(sequences: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    """Return ids (B, N), padded on the right, and lengths (B,)."""
    lengths = torch.tensor([len(ids) for ids in sequences])
    longest = int(lengths.max())
    return torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in sequences]), lengths
