"""Shares of runs of 20 words that texts have in common, against sets of tuples."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

from headscan.texts import shared_runs
from headscan.texts.shared_runs import SharedRuns, shares_with


def runs(text: str) -> list[tuple[str, ...]]:
    """Return the runs of a text; a repeated character is one word, and a short text of 100 characters one run."""
    words = [found[0].lower() for found in re.finditer(r"[a-zA-Z0-9_]+|([^\w\s])\1*", text)]
    if len(words) < 20:
        return [tuple(words)] if words and len(text) >= 100 else []
    return [tuple(words[at : at + 20]) for at in range(len(words) - 19)]


def by_hand(texts: list[str], others: list[str]) -> list[float]:
    known = {run for text in others for run in runs(text)}
    return [float(np.mean([run in known for run in runs(text)])) if runs(text) else 0.0 for text in texts]


def story(draw: random.Random, words: int) -> str:
    parts = [draw.choice(["the", "a", f"w{draw.randrange(300)}", "x = y", "-----", "==", "it's", "\n", "Word"])]
    while len(parts) < words:
        parts.append(draw.choice([*parts[-3:], f"w{draw.randrange(300)}", "(", ")\n\n", "---", "The"]))
    return " ".join(parts)


@pytest.mark.parametrize("batch", [1, 1_000, 1 << 21])
def test_shares_are_those_of_sets_of_tuples(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_runs, "_BATCH_BYTES", batch)
    draw = random.Random(batch)
    others = [story(draw, draw.randrange(200)) for _ in range(12)]
    cuts = [text[draw.randrange(40) :].replace(" ", "\n\n", 3).upper() for text in others]
    texts = [*cuts, *(story(draw, length) for length in (0, 1, 19, 20, 21, 300)), "-" * 500, *others[:2], ""]
    expected = by_hand(texts, others)
    assert max(expected) == 1 and sum(0 < share < 1 for share in expected) > 0
    assert shares_with(texts, others).tolist() == pytest.approx(expected, abs=1e-12)
    assert shares_with([], others).tolist() == [] and shares_with(texts, []).tolist() == [0.0] * len(texts)


def test_short_texts_are_one_run_and_headings_none() -> None:
    long = "a sentence of eleven words that is somewhat longer than a hundred characters, counting everything in it"
    assert len(long) >= 100
    texts = [long.replace(" ", "  "), long[:90], long + " and more", "Notes"]
    assert shares_with(texts, [long, "Notes"]).tolist() == [1.0, 0.0, 0.0, 0.0]


def test_scripts_without_spaces_have_a_word_for_each_character() -> None:
    draw = random.Random(0)
    text = "".join(chr(0x4E00 + draw.randrange(3_000)) for _ in range(400))
    assert shares_with([text[:100] + "新" + text[100:200], text[200:][::-1]], [text]).tolist() == [
        pytest.approx((81 + 81) / (201 - 19)),
        0.0,
    ]
    greek = " ".join(f"λέξη{number}" for number in range(60))
    assert shares_with([greek.replace(" ", "\n")], [greek]).tolist() == [1.0]


def test_a_form_of_most_documents_does_not_count() -> None:
    words = [" ".join(f"{number}w{at}" for at in range(100)) for number in range(30)]
    form = " ".join(f"licence{at}" for at in range(40))
    half = np.arange(30) < 15
    for many, share in ((30, 0.0), (16, 0.0), (15, 21 / 121)):
        texts = [f"{form} {text}" if number % 30 < many else text for number, text in enumerate(words)]
        shares = SharedRuns(texts).shares(half)
        assert shares[15:many].max(initial=0) == pytest.approx(share if many > 15 else 0)
    # Fewer documents have no form, and a document that is mostly form is a copy.
    assert SharedRuns([f"{form} {text}" for text in words[:19]]).shares(half[:19])[15:].min() > 0.1
    assert SharedRuns([f"{form} {text}" for text in words] + [form]).shares(np.arange(31) < 15)[30] == 1.0
    # Blocks of one document count once.
    blocks = [f"{form} {text}" for text in words]
    assert SharedRuns(blocks, [number // 2 for number in range(30)]).shares(half)[15:].min() > 0.1


def test_copies_are_of_earlier_texts() -> None:
    one, other = (" ".join(f"{name}{at}" for at in range(60)) for name in "ab")
    texts = [one, other, f"{one}\n", f"{one} {other}", other]
    earlier = SharedRuns(texts).earlier(np.array([True, True, True, True, False]))
    assert earlier.tolist() == [0.0, 0.0, 1.0, pytest.approx(82 / 101), 1.0]
    assert SharedRuns(texts).earlier(np.array([False, True, True, False, True])).tolist()[2:] == [
        0.0,
        pytest.approx(82 / 101),
        1.0,
    ]
