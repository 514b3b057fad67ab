"""How often whole studies err, and how often they show a harmless saving: ``python -m`` this prints the tables.

A study has one kind of saving or three, on the same questions. In *error* every kind loses exactly what the limit
allows, and the number is the percentage of studies that call at least one of them safe (promised: 2.5). In *power* no
kind loses anything, and the number is the percentage of kinds that are shown to be safe. With looks, *asked* is the
mean percentage of the questions that a kind is asked if it loses nothing, one point, and two.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from headscan.store.tables import LOSS
from headscan.store.verdict_limits import MARGIN, MAX_LOSS
from headscan.verdicts.answer_sheets import BENCHMARK
from headscan.verdicts.looks import Look, is_hopeless, planned_looks
from headscan.verdicts.metrics import RATES, is_within, rate_increase
from headscan.verdicts.paired import PairedDifference, QuestionClusters, paired_difference
from headscan.verdicts.scope_verdicts import widened_differences

#: Answers (questions,) of the baseline and of an arm, and the documents of the questions if they are known.
Answers = tuple[np.ndarray, np.ndarray, np.ndarray | None]
#: Draws answers: ``(rng, questions, lost)``, where ``lost`` is the number of points, 0 to 2, that the arm loses.
Draw = Callable[[np.random.Generator, int, int], Answers]
#: Draws whether a kind is shown to be safe: ``(rng, size, kinds, lost)``, where ``lost`` is the part of the limit, 0 or
#: 1, that the kind loses. Kinds are independent.
Kind = Callable[[np.random.Generator, int, int, int], bool]


#: Mean probability of the right choice in `probabilities`.
_MEAN_PROBABILITY = float((1 / (1 + np.exp(-np.random.default_rng(0).normal(1.0, (4 + 1 / 16) ** 0.5, 10**6)))).mean())


def _paired(answers: Answers) -> PairedDifference:
    baseline, arm, documents = answers
    return paired_difference(baseline, arm, QuestionClusters(len(arm), documents=documents))


def asked_once(draw: Draw) -> Kind:
    """Return a kind that is judged when all questions are answered."""

    def kept(rng: np.random.Generator, questions: int, kinds: int, lost: int) -> bool:
        paired = widened_differences({BENCHMARK: _paired(draw(rng, questions, lost))}, kinds, kinds)
        return paired[BENCHMARK].low > -MARGIN

    return kept


def asked_at_looks(draw: Draw, rng: np.random.Generator, looks: Sequence[Look], lost: int) -> tuple[bool, float]:
    """Return whether a kind is shown to be safe at a look, and the share of the questions that it is asked."""
    baseline, arm, documents = draw(rng, looks[-1].questions, lost)
    for look in looks:
        part = slice(look.questions)
        paired = _paired((baseline[part], arm[part], None if documents is None else documents[part]))
        low, difference, high = paired.simultaneous_interval(look.comparisons)
        hopeless = is_hopeless(difference, paired.standard_error, looks, look.questions, MARGIN)
        if low > -MARGIN or high < -MARGIN or hopeless:
            return low > -MARGIN, look.questions / looks[-1].questions
    return False, 1.0


def counted(rng: np.random.Generator, questions: int, lost: int, changed: float) -> Answers:
    """Right or wrong answers of which a share changes, in both directions."""
    changed = max(changed, lost * 0.01)
    down = changed / 2 + lost * 0.005
    delta = rng.choice([-1, 0, 1], questions, p=[down, 1 - changed, changed - down])
    baseline = np.where(delta, delta < 0, rng.random(questions) < 0.6).astype(float)
    return baseline, baseline + delta, None


def credit(rng: np.random.Generator, questions: int, lost: int, jitter: float) -> Answers:
    """Partial credit that jitters on most questions, while one question in a hundred is lost whole."""
    baseline = rng.uniform(jitter, 1 - jitter, questions)
    arm = baseline + rng.uniform(-jitter, jitter, questions) * (rng.random(questions) < 0.8)
    whole = rng.random(questions) < 0.02 * lost  # of 0.5 credit on average
    return baseline, np.where(whole, 0, arm), None


def probabilities(rng: np.random.Generator, questions: int, lost: int, expected: bool) -> Answers:
    """Probabilities of the right choice, which two draws of the same noise change; the right answers are drawn from
    them. A loss takes one question in fifty. Judged by the probabilities, or by the answers.
    """
    ease = rng.normal(1.0, 2.0, questions)
    baseline, arm = 1 / (1 + np.exp(-ease - rng.normal(0, 0.25, (2, questions))))
    arm = np.where(rng.random(questions) < 0.02 * lost, arm * (1 - 0.5 / _MEAN_PROBABILITY), arm)
    if not expected:
        drawn = rng.random(questions)
        baseline, arm = 1.0 * (drawn < baseline), 1.0 * (drawn < arm)
    return baseline, arm, None


def of_documents(rng: np.random.Generator, questions: int, lost: int, documents: int) -> Answers:
    """Answers on few documents, which lose different shares of their answers."""
    loses = np.clip(0.01 * lost + rng.normal(0, 0.02, documents), -0.045, 0.045)[np.arange(questions) % documents]
    draw = rng.random(questions)
    delta = np.where(draw < 0.025 + loses / 2, -1, np.where(draw < 0.05, 1, 0))
    baseline = np.where(delta, delta < 0, rng.random(questions) < 0.6).astype(float)
    return baseline, baseline + delta, np.arange(questions) % documents


def rises(rng: np.random.Generator, texts: int, kinds: int, lost: int, deviation: float) -> bool:
    """Rises of a text's loss: lognormal with this deviation of the logarithm, normal if it is 0. A harmless kind has
    the same spread around a fifth of the limit.
    """
    mean = MAX_LOSS if lost else MAX_LOSS / 5
    if deviation:
        drawn = mean * np.exp(deviation * rng.normal(size=texts) - deviation**2 / 2)
    else:
        drawn = rng.normal(mean, 0.03, texts)
    sizes = np.full(texts, 500.0)
    found = rate_increase(RATES[LOSS], np.zeros(texts), -drawn * sizes, sizes, np.arange(texts), comparisons=kinds)
    return is_within(found, MAX_LOSS)


DRAWS: dict[str, tuple[Draw, tuple[int, ...]]] = {
    "2 % of answers change": (partial(counted, changed=0.02), (400, 750, 2000, 5000)),
    "5 % of answers change": (partial(counted, changed=0.05), (400, 750, 2000, 5000)),
    "answers are only lost": (partial(counted, changed=0.01), (400, 750, 2000, 5000)),
    "partial credit, jitter 0.02": (partial(credit, jitter=0.02), (400, 750, 2000)),
    "partial credit, jitter 0.1": (partial(credit, jitter=0.1), (400, 750, 2000)),
    "answers drawn from probabilities": (partial(probabilities, expected=False), (400, 750, 2000)),
    "their probabilities": (partial(probabilities, expected=True), (400, 750, 2000)),
    "8 documents": (partial(of_documents, documents=8), (750, 2000)),
    "40 documents": (partial(of_documents, documents=40), (750, 2000)),
}
CASES: dict[str, tuple[Kind, tuple[int, ...]]] = {
    **{name: (asked_once(draw), sizes) for name, (draw, sizes) in DRAWS.items()},
    "rises, normal": (partial(rises, deviation=0.0), (20, 48, 64)),
    "rises, lognormal 1": (partial(rises, deviation=1.0), (20, 48, 64)),
    "rises, lognormal 1.5": (partial(rises, deviation=1.5), (20, 48, 64)),
}


def error_and_power(kind: Kind, size: int, kinds: int, runs: int) -> tuple[float, float]:
    """Return the percentages of `CASES`: studies that err, and harmless kinds that are shown to be safe."""
    rng = np.random.default_rng(0)
    erred = sum(any(kind(rng, size, kinds, 1) for _ in range(kinds)) for _ in range(runs))
    shown = sum(kind(rng, size, kinds, 0) for _ in range(runs))
    return 100 * erred / runs, 100 * shown / runs


def rates_with_looks(
    draw: Draw, questions: int, later: int, kinds: int, runs: int
) -> tuple[float, float, tuple[float, ...]]:
    """Return error and power as `error_and_power` does, and the percentages of the questions that are asked, if the
    answers are read at looks: up to ``questions``, and at later ones up to ``later``.
    """
    looks, rng = planned_looks((questions, 0), (later, 0), kinds), np.random.default_rng(0)
    erred = [any(asked_at_looks(draw, rng, looks, 1)[0] for _ in range(kinds)) for _ in range(runs)]
    found = [[asked_at_looks(draw, rng, looks, lost) for _ in range(runs)] for lost in (0, 1, 2)]
    asked = tuple(100 * float(np.mean([share for _, share in each])) for each in found)
    return 100 * float(np.mean(erred)), 100 * float(np.mean([safe for safe, _ in found[0]])), asked


def main(runs: int) -> None:
    kinds = (1, 3)
    print(f"| of {runs} studies, in percent: error, power | size | one kind | three kinds |\n|---|---:|---|---|")
    for name, (kind, sizes) in CASES.items():
        for size in sizes:
            cells = [f"{e:.1f}, {p:.0f}" for e, p in (error_and_power(kind, size, each, runs) for each in kinds)]
            print(f"| {name} | {size:,} | {' | '.join(cells)} |", flush=True)
    print("\n| with looks: error, power; asked | questions | one kind | three kinds |\n|---|---:|---|---|")
    for name, (draw, numbers) in DRAWS.items():
        for size, later in ((size, times * size) for size in numbers[-2:] for times in (1, 4)):
            rates = [rates_with_looks(draw, size, later, each, runs) for each in kinds]
            cells = [f"{e:.1f}, {p:.0f}; {', '.join(f'{share:.0f}' for share in asked)}" for e, p, asked in rates]
            print(f"| {name} | {size:,}{f' to {later:,}' * (later > size)} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
