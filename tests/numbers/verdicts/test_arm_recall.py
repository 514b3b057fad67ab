from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom, binomtest

from headscan.catalog import recall_family
from headscan.store.records import ArmKind, ArmRecord
from headscan.verdicts.arm_verdict import ArmVerdict
from headscan.verdicts.bounds import LEVELS
from headscan.verdicts.paired import Interval, PairedDifference, retained_share, wilson_low
from headscan.verdicts.scope_verdicts import RecallVerdict, least_questions, recall_needed, solves
from tests.numbers.conftest import compare


def _verdict(
    family: str,
    *,
    baseline: float = 90.0,
    questions: int = 100,
    high: float = 2.0,
    retained: tuple[float, float] = (91.0, 105.0),
) -> RecallVerdict:
    paired = PairedDifference(
        questions=questions,
        texts=questions // 4,
        baseline=baseline,
        arm=baseline,
        difference=0.0,
        low=-10,
        high=high,
        gained=0,
        lost=0,
        p_value=1.0,
        texts_differ=0,
        lows=(-10.0,) * len(LEVELS),
        highs=(high,) * len(LEVELS),
        standard_error=1.0,
        retained=Interval(retained[0], 97.6, retained[1]),
    )
    return RecallVerdict(family, paired)


@pytest.mark.parametrize(
    ("retained", "high", "kept", "failed"),
    [
        ((90.0, 105.0), 2.0, True, False),
        ((89.9, 105.0), 2.0, False, False),  # neither shown to be kept nor to be lost
        ((80.0, 90.0), 2.0, False, False),
        ((80.0, 89.9), 2.0, False, True),
        ((90.0, 99.0), -1.0, True, False),
        ((90.0, 99.0), -1.1, False, True),  # a tenth at most, but more than one point
    ],
)
def test_recall_is_kept_or_lost_by_its_interval(
    retained: tuple[float, float], high: float, kept: bool, failed: bool
) -> None:
    for family in ("needle", "copying"):
        verdict = _verdict(family, retained=retained, high=high)
        assert (verdict.kept, verdict.failed) == (kept, failed)


@pytest.mark.parametrize(
    ("family", "baseline", "questions", "informative"),
    [
        # Wilson's lower ends by texts: 39 of 100 0.3002, 38 of 100 0.291, 330 of 1000 0.3016, 4 of 10 0.168.
        ("needle", 39.0, 400, True),
        ("needle", 39.0, 100, False),
        ("needle", 38.0, 400, False),
        ("needle", 40.0, 40, False),
        ("needle", 33.0, 4000, True),
        ("needle", 25.0, 40_000, False),
        ("copying", 10.0, 24, True),
        ("copying", 9.9, 10_000, False),
    ],
)
def test_a_baseline_at_chance_is_not_informative(
    family: str, baseline: float, questions: int, informative: bool
) -> None:
    lost = _verdict(family, baseline=baseline, questions=questions, retained=(10.0, 20.0))
    kept = _verdict(family, baseline=baseline, questions=questions)
    assert (lost.informative, lost.failed, kept.kept) == (informative, informative, informative)


@pytest.mark.parametrize(
    ("family", "baseline", "questions", "needed"),
    [
        # No number of questions shows that recall is kept that the baseline does not have.
        ("needle", 20.0, 400, None),
        ("needle", 25.0, 400, None),
        ("needle", 25.0, 4, None),
        ("copying", 0.0, 400, None),
        ("needle", 90.0, 100, recall_needed("needle", 90.0)),
        ("needle", 90.0, 400, None),  # these are enough
        ("copying", 90.0, 40, recall_needed("copying", 90.0)),
    ],
)
def test_more_questions_are_needed_only_of_recall_that_the_baseline_has(
    family: str, baseline: float, questions: int, needed: int | None
) -> None:
    assert _verdict(family, baseline=baseline, questions=questions).questions_needed == needed


def test_a_baseline_at_the_least_number_of_needles_is_rarely_informative() -> None:
    """If the four questions of a text are right or wrong together, 3.4 % of baselines that find the least number, 30 %,
    seem to find more; by questions, 16 % of them do.
    """
    solving = [right for right in range(101) if solves("needle", right, 400)]
    assert binom.pmf(solving, 100, 0.3).sum() <= 0.035


@pytest.mark.parametrize(("right", "questions"), [(0, 5), (5, 5), (39, 100), (330, 1000)])
def test_wilson_s_interval_is_scipy_s(right: int, questions: int) -> None:
    expected = binomtest(right, questions).proportion_ci(0.95, method="wilson").low
    assert wilson_low(right, questions) == pytest.approx(float(expected), abs=1e-12)


def test_words_name_the_share_that_is_left_and_a_loss_says_so() -> None:
    assert _verdict("needle").words() == "needle 98 % [91 %, 105 %]"
    lost = _verdict("needle", retained=(25.0, 56.0))
    assert lost.failed and lost.loss_words() == "needle (98 % [25 %, 56 %] left)"
    points = _verdict("copying", high=-1.3)
    assert points.words() == "copying 98 % [91 %, 105 %] (+0.0 points [-10.0, -1.3])"
    assert points.loss_words() == "copying (98 % [91 %, 105 %] left, +0.0 points [-10.0, -1.3])"
    mask = ArmRecord(name="a", kind=ArmKind.MASK, ablated_share=0.1)
    arm = ArmVerdict(arm=mask, accuracy=_verdict("needle").paired, recall=(lost,))
    assert arm.why == "needle (98 % [25 %, 56 %] left)"


@pytest.mark.parametrize(("family", "baseline"), [("needle", 65.0), ("needle", 98.0), ("copying", 34.0)])
def test_identical_answers_to_the_least_number_of_questions_keep_recall(family: str, baseline: float) -> None:
    """The number holds for equal texts; different texts need a few more."""
    least = least_questions(baseline, recall_family(family).chance)
    for questions, kept in ((int(0.9 * least) // 4 * 4, False), (int(1.1 * least) // 4 * 4 + 4, True)):
        answers = np.full(questions, baseline / 100)
        found = retained_share(answers, answers, np.arange(questions) // 4, recall_family(family).chance)
        assert (found.low >= 90) is kept


# The interval, in simulations


def _answers(
    rng: np.random.Generator, questions: int, baseline: float, lost: float, *, whole_texts: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Needles of texts of four, of which the arm loses a share ``lost`` of those found: one by one, or text by text."""
    found = rng.random((questions // 4, 4)) < baseline
    drawn = rng.random((len(found), 1 if whole_texts else 4)) < lost / baseline
    return found.ravel().astype(float), (found & ~drawn).ravel().astype(float)


def _rates(questions: int, baseline: float, lost: float, *, runs: int = 150, whole_texts: bool = False) -> np.ndarray:
    """Return how often recall is judged kept, and lost."""
    rng = np.random.default_rng(0)
    texts = np.arange(questions) // 4
    said = np.zeros(2)
    for _ in range(runs):
        pair = _answers(rng, questions, baseline, lost, whole_texts=whole_texts)
        paired = compare(*pair, texts=texts)
        verdict = RecallVerdict("needle", replace(paired, retained=retained_share(*pair, texts, 25.0)))
        said += verdict.kept, verdict.failed
    return said / runs


@pytest.mark.parametrize(("texts", "runs"), [(2, 300), (4, 300), (10, 300), (20, 300), (100, 200), (400, 200)])
def test_an_arm_without_effect_has_a_right_interval_for_any_number_of_texts(texts: int, runs: int) -> None:
    """Copied shares of 16 tokens that the arm redraws. A percentile interval holds 0 for 2 texts in 61 % of cases and
    calls the recall lost in 17 %."""
    rng, numbers = np.random.default_rng(1), np.arange(4 * texts) // 4
    held = lost = 0
    for _ in range(runs):
        ease = rng.beta(2, 2, (texts, 1))
        pair = [rng.binomial(16, np.clip(ease + rng.normal(0, 0.1, (texts, 4)), 0, 1)).ravel() / 16 for _ in range(2)]
        paired = compare(*pair, texts=numbers)
        verdict = RecallVerdict("copying", replace(paired, retained=retained_share(*pair, numbers, 0.0)))
        held += paired.low <= 0 <= paired.high
        lost += verdict.failed
    assert held / runs >= 0.92
    assert lost / runs <= 0.04


@pytest.mark.parametrize("texts", [2, 3, 4, 5])
def test_few_texts_that_are_lost_whole_show_nothing(texts: int) -> None:
    """If each text is gained or lost by chance, all are lost in 1 of 2^texts cases."""
    paired = compare(np.ones(4 * texts), np.zeros(4 * texts), texts=np.arange(4 * texts) // 4)
    assert paired.high > -1
    verdict = RecallVerdict("needle", replace(paired, retained=Interval(-100.0, 0.0, 0.0)))
    assert verdict.informative and not verdict.failed and not verdict.kept
    more = compare(np.ones(24), np.zeros(24), texts=np.arange(24) // 4)
    assert RecallVerdict("needle", replace(more, retained=Interval(-100.0, 0.0, 0.0))).failed


@pytest.mark.parametrize("questions", [200, 300, 352, 400])
def test_identical_answers_are_never_judged_worse_than_changed_ones(questions: int) -> None:
    """Without a limit, an arm that gains answers keeps recall where identical answers are too few to show it."""
    rng, texts = np.random.default_rng(0), np.arange(questions) // 4
    for _ in range(20):
        baseline = (rng.random(questions) < 0.65).astype(float)
        changed = np.where(rng.random(questions) < 0.1, 1.0, baseline)
        same, other = retained_share(baseline, baseline, texts, 25.0), retained_share(baseline, changed, texts, 25.0)
        assert same.low >= other.low and other.value >= 100


@pytest.mark.parametrize(("family", "baseline", "least"), [("needle", 0.65, 0.75), ("needle", 0.9, 0.85)])
def test_the_questions_of_a_sweep_show_that_recall_is_kept(family: str, baseline: float, least: float) -> None:
    """Three quarters of the texts judge; the arm loses nothing and changes 4 % of the answers."""
    rng, needed = np.random.default_rng(0), recall_needed(family, 100 * baseline)
    texts, chance = np.arange(needed) // 4, recall_family(family).chance
    kept = 0
    for _ in range(60):
        answers = rng.random(needed) < baseline
        redrawn = rng.random(needed) < 0.04 / (2 * baseline * (1 - baseline))
        arm = np.where(redrawn, rng.random(needed) < baseline, answers)
        kept += retained_share(answers.astype(float), arm.astype(float), texts, chance).low >= 90
    assert kept / 60 >= least


@pytest.mark.parametrize("questions", [72, 180, 400])
@pytest.mark.parametrize("whole_texts", [False, True])
def test_recall_with_a_tenth_lost_is_rarely_judged_kept(questions: int, whole_texts: bool) -> None:
    kept, _ = _rates(questions, 0.9, 0.065, whole_texts=whole_texts)
    assert kept <= 0.03


def test_five_points_lost_are_not_kept() -> None:
    """With 72 to 180 questions, and no interval asked for, this was called kept in about half of the cases."""
    for questions in (72, 180, 400):
        assert _rates(questions, 0.9, 0.05)[0] <= 0.03


def test_the_default_number_of_questions_shows_that_recall_is_kept() -> None:
    """Of 400 needles a model finds 90 %, and an arm loses half a point and nothing else; 72 never show it."""
    assert _rates(400, 0.9, 0.005)[0] >= 0.9
    assert _rates(72, 0.9, 0.0)[0] == 0


def test_copying_that_falls_by_half_is_not_kept() -> None:
    """11.0 to 6.1 % of the tokens is a loss of 4.9 points, and of nearly half of the ability."""
    rng = np.random.default_rng(0)
    baseline = rng.binomial(16, 0.11, 180) / 16
    arm = baseline * (rng.random(180) < 0.55)
    paired = compare(baseline, arm, texts=np.arange(180) // 4)
    verdict = RecallVerdict(
        "copying", replace(paired, retained=retained_share(baseline, arm, np.arange(180) // 4, 0.0))
    )
    assert verdict.informative and not verdict.kept
    assert verdict.paired.retained is not None and verdict.paired.retained.value < 65


def test_texts_that_are_kept_or_lost_whole_have_clopper_and_pearsons_interval() -> None:
    baseline, arm = np.ones(100), np.repeat([1.0, 0.0], [93, 7])
    found = retained_share(baseline, arm, np.arange(100), 0.0)
    exact = binomtest(93, 100).proportion_ci(0.95, method="exact")
    assert found.value == pytest.approx(93)
    assert found.low == pytest.approx(100 * exact.low, abs=0.5)


def test_a_model_without_ability_has_a_share_without_meaning_but_within_bounds() -> None:
    found = retained_share(np.zeros(8), np.ones(8), np.arange(8), 25.0)
    assert found == Interval(-100.0, 200.0, 200.0)
