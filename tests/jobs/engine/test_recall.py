"""Recall questions: fair for every tokenizer, and exactly of their length."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from statistics import mean, median
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

import headscan
from headscan.ablation.masks import HeadMask
from headscan.catalog import RECALL_FAMILIES, RecallFamily, recall_family
from headscan.checkpoints.sources import load_tokenizer
from headscan.cli.main import main
from headscan.demo import MODEL_FOLDER
from headscan.engine.answer import AnsweringSettings, answer
from headscan.engine.prompt_losses import recall_prompts
from headscan.errors import NotFiniteError, UnknownNameError
from headscan.runs.model_identity import ModelIdentity
from headscan.settings.evaluation_settings import RecallError, RecallQuestions
from headscan.study.study_answer import ABLATED, Saving, StudyAnswer
from headscan.texts import CorpusError
from headscan.texts.recall_tasks import (
    GENERATORS,
    KEYS,
    VALUES,
    RecallQuestion,
    grade,
    questions_per_length,
    recall_questions,
    recall_series,
    sentences,
)
from headscan.texts.token_requests import LogLikelihood, Request
from headscan.verdicts.arm_verdict import Outcome
from headscan.verdicts.metrics import Increase
from headscan.verdicts.ordered_shares import ShareVerdict
from headscan.verdicts.paired import Interval, PairedDifference
from headscan.verdicts.scope_verdicts import RecallVerdict, least_questions, solves
from tests.jobs.cli.test_cli import fails
from tests.jobs.conftest import make_tokenizer
from tests.small_models import make_model

SMALL = RecallQuestions(questions=8)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """SentencePiece's kind: a mark for blanks, and a vocabulary so small that all letters are bytes."""
    vocabulary = {"<unk>": 0, "<s>": 1, "▁": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    bpe = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", unk_token="<unk>")


def word_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """One token a known word; all others are one and the same."""
    known = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<unk>", *words])}, unk_token="<unk>"))
    known.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=known, unk_token="<unk>")


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerBase | None]] = {
    "bpe": lambda: make_tokenizer(300),
    "without bos": lambda: make_tokenizer(300, bos=False),
    "bytes": byte_tokenizer,
    "words": lambda: word_tokenizer([*KEYS, *VALUES, *"the a of at in and . , it was".split(), *map(str, range(30))]),
    "demo": lambda: load_tokenizer(str(MODEL_FOLDER)),
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    found = TOKENIZERS[request.param]()
    assert found is not None
    return found


def texts(questions: Sequence[RecallQuestion]) -> list[list[RecallQuestion]]:
    """The questions that share a haystack or a passage."""
    found = defaultdict(list)
    for question in questions:
        found[question.task, question.question // 4].append(question)
    assert all(len(group) == 4 for group in found.values())
    return list(found.values())


def family(questions: Sequence[RecallQuestion], name: str) -> list[RecallQuestion]:
    return [question for question in questions if question.task.startswith(name)]


def common_prefix(sequences: Sequence[tuple[int, ...]]) -> int:
    return next((i for i, tokens in enumerate(zip(*sequences, strict=False)) if len(set(tokens)) > 1), 0)


def find(part: tuple[int, ...], whole: tuple[int, ...]) -> list[int]:
    return [i for i in range(len(whole) - len(part) + 1) if whole[i : i + len(part)] == part]


# Lengths


@pytest.mark.parametrize(
    ("max_tokens", "lengths"),
    [
        (None, (256, 512, 1024, 2048, 4096)),
        (131_072, (256, 512, 1024, 2048, 4096)),
        (4096, (256, 512, 1024, 2048, 4096)),
        (3000, (256, 512, 1024, 2048, 3000)),
        (512, (256, 512)),
        (300, (256, 300)),
        (256, (256,)),
        (100, (100,)),
    ],
)
def test_chosen_lengths_suit_the_model(max_tokens: int | None, lengths: tuple[int, ...]) -> None:
    assert RecallQuestions().lengths_within(max_tokens) == lengths
    assert RecallQuestions(lengths=(90,)).lengths_within(max_tokens) == (90,)


def test_every_request_is_read_in_exactly_the_length_of_its_task(tokenizer: PreTrainedTokenizerBase) -> None:
    plan = RecallQuestions(lengths=(256, 301, 1024), questions=4)
    questions = recall_questions(tokenizer, plan, 1024, bos="auto")
    assert [q.task for q in questions] == [
        f"{name}@{length}" for length in (256, 301, 1024) for name in ("needle", "copying") for _ in range(4)
    ]
    for question in questions:
        for ids, scored in question.requests:
            assert len(ids) - 1 == int(question.task.partition("@")[2])
            assert 0 < scored < len(ids)


@pytest.mark.parametrize(("limit", "each"), [(4096, 80), (512, 200), (256, 400), (1000, 136)])
def test_a_family_has_400_questions_over_all_lengths(limit: int, each: int) -> None:
    """Over three lengths that would be 134 each, which four do not divide."""
    plan = RecallQuestions()
    lengths = plan.lengths_within(limit)
    assert questions_per_length(plan, len(lengths)) == {"needle": each, "copying": each}
    assert questions_per_length(replace(plan, questions=12), len(lengths)) == {"needle": 12, "copying": 12}
    of_each = questions_per_length(replace(plan, in_all={"copying": 700}), 5)
    assert of_each == {"needle": 80, "copying": 140}
    if limit == 256:
        questions = recall_questions(make_tokenizer(300), plan, limit, bos="auto")
        assert len(family(questions, "needle")) == len(family(questions, "copying")) == 400


def test_the_least_numbers_of_questions_are_those_of_the_verdicts() -> None:
    needles, copying = (least_questions(100, recall_family(kind).chance) for kind in ("needle", "copying"))
    words = " ".join(str(RecallQuestions.__doc__).split())
    assert f"with fewer than {needles} needles or {copying} copying questions" in words


def test_one_input_answers_a_needle_question_where_names_begin_differently() -> None:
    tokenizer = load_tokenizer(str(MODEL_FOLDER))
    assert tokenizer is not None
    for question in family(recall_questions(tokenizer, SMALL, 512, bos="auto"), "needle"):
        assert len({request.ids[:-1] for request in question.requests}) == 1
        assert len({request.ids[-1] for request in question.requests}) == 4


# What the questions are made of


def test_four_questions_share_a_haystack_that_holds_each_answer_once(tokenizer: PreTrainedTokenizerBase) -> None:
    places = []
    for group in texts(family(recall_questions(tokenizer, SMALL, 512, bos="auto"), "needle")):
        sequences = [request.ids for question in group for request in question.requests]
        shared = common_prefix(sequences)
        assert shared > 0.75 * len(sequences[0])
        sizes = {request.scored_tokens for question in group for request in question.requests}
        assert len(sizes) == 1
        (size,) = sizes
        choices = [request.ids[-size:] for request in group[0].requests]
        assert len(set(choices)) == 4
        for place, question in enumerate(group):
            assert [request.ids[-size:] for request in question.requests] == choices
            assert question.answer == place
            # The wording may have begun inside what is shared; the key and the value are what tells needles apart.
            asked = question.requests[place].ids[shared:]
            (found,) = find(asked, sequences[0][:shared])
            places.append(found / shared)
            for other in set(range(4)) - {place}:
                assert not find(question.requests[other].ids[shared:], sequences[0][:shared])
    assert len(set(places)) > len(places) / 2
    assert [place < 0.5 for place in places].count(True) >= 2
    assert [place > 0.5 for place in places].count(True) >= 2


def test_copied_tokens_follow_the_same_cue_in_the_passage(tokenizer: PreTrainedTokenizerBase) -> None:
    special = set(tokenizer.all_special_ids)
    starts = []
    for group in texts(family(recall_questions(tokenizer, SMALL, 512, bos="never"), "copying")):
        passages = {question.requests[0].ids[:-24] for question in group}
        assert len(passages) == 1
        (passage,) = passages
        assert not special & set(passage)
        for question in group:
            assert (question.answer, question.requests[0].scored_tokens, len(question.requests)) == (None, 16, 1)
            (start,) = find(question.requests[0].ids[-24:], passage)
            starts.append(start / len(passage))
    assert len(set(starts)) > len(starts) / 2
    assert min(starts) < 0.25 and max(starts) > 0.7


@pytest.mark.parametrize("family", RECALL_FAMILIES)
def test_a_series_asks_several_questions_whose_answers_stand_in_its_text(
    tokenizer: PreTrainedTokenizerBase, family: str
) -> None:
    for ids, answers in recall_series(tokenizer, 512, 4, 0)[family]:
        assert len(ids) == 512
        starts = [place for place in answers if place - 1 not in answers]
        assert len(starts) == 4 if family == "copying" else 4 <= len(starts) <= 8
        asked = []
        for start, after in zip(starts, [*starts[1:], 512], strict=True):
            # The key of a needle or the cue of a copy, and the answer's scored tokens.
            asked.append(ids[start - 4 : max(place for place in answers if place < after) + 1])
            assert find(asked[-1], ids[: starts[0] - 4])
        assert len(set(asked)) == len(asked)


def test_series_fit_into_every_length_of_questions() -> None:
    tokenizer = load_tokenizer(str(MODEL_FOLDER))
    assert tokenizer is not None
    shortest = 200
    for length in range(32, 200):
        try:
            recall_questions(tokenizer, RecallQuestions(lengths=(length - 1,), questions=4), 512, bos="auto")
        except RecallError:
            continue
        for prompts in recall_series(tokenizer, length, 2, 0).values():
            assert all(len(ids) == length and answers for ids, answers in prompts)
        shortest = min(shortest, length)
    assert shortest < 100


def test_passages_are_of_common_and_different_tokens_where_there_are_enough() -> None:
    tokenizer = load_tokenizer(str(MODEL_FOLDER))
    assert tokenizer is not None
    for question in family(recall_questions(tokenizer, SMALL, 512, bos="never"), "copying"):
        passage = question.requests[0].ids[:-24]
        assert len(set(passage)) == len(passage)
        assert max(passage) < 1000  # of 4,096
        assert tokenizer.decode(list(passage)).isprintable()


def test_haystacks_do_not_repeat_and_hold_no_key_or_value_of_their_own() -> None:
    drawn = list(islice(sentences(Random(0)), 5000))
    assert len(set(drawn)) == 5000
    words = {word.strip(".,").lower() for sentence in drawn for word in sentence.split()}
    names = [name.lower() for name in (*KEYS, *VALUES)]
    assert not words & set(names)
    assert len(set(names)) == len(names)


def test_questions_are_the_same_for_a_seed_and_do_not_hang_on_other_lengths() -> None:
    tokenizer = make_tokenizer(300)
    questions = recall_questions(tokenizer, SMALL, 512, bos="auto")
    assert recall_questions(tokenizer, SMALL, 512, bos="auto") == questions
    alone = recall_questions(tokenizer, replace(SMALL, lengths=(512,)), 512, bos="auto")
    assert alone == [q for q in questions if q.task.endswith("@512")]
    fewer = recall_questions(tokenizer, replace(SMALL, questions=4), 512, bos="auto")
    assert fewer == [q for q in questions if q.question < 4]
    sized = recall_questions(
        tokenizer, replace(SMALL, questions=None, in_all={"needle": 8, "copying": 16}), 512, bos="auto"
    )
    assert len(family(sized, "needle")) == 8 and len(family(sized, "copying")) == 16
    assert [q for q in sized if q.question < 4] == fewer
    other = recall_questions(tokenizer, replace(SMALL, seed=1), 512, bos="auto")
    assert not {q.requests for q in other} & {q.requests for q in questions}


def test_bos_is_where_it_is_in_a_benchmark() -> None:
    plain, adding = make_tokenizer(300, bos=False), make_tokenizer(300)
    bos = adding.bos_token_id

    def begins(tokenizer: PreTrainedTokenizerBase, policy: str) -> bool:
        questions = recall_questions(tokenizer, replace(SMALL, lengths=(256,)), 512, bos=policy)
        found = {request.ids[0] == bos for question in questions for request in question.requests}
        assert len(found) == 1
        return found.pop()

    assert [begins(adding, policy) for policy in ("auto", "always", "never")] == [True, True, False]
    assert [begins(plain, policy) for policy in ("auto", "always", "never")] == [False, True, False]


# Grades


def accuracy(questions: Sequence[RecallQuestion], likelihood: Callable[[Request], float]) -> float:
    rows = [grade(q, [LogLikelihood(likelihood(request), 0) for request in q.requests]) for q in questions]
    return mean(row["correct"] for row in rows)


def test_who_looks_the_key_up_is_always_right_and_who_does_not_once_in_four(tokenizer: PreTrainedTokenizerBase) -> None:
    questions = family(recall_questions(tokenizer, SMALL, 512, bos="auto"), "needle")

    def looks_up(request: Request) -> float:
        tail = request.ids[-request.scored_tokens - 4 :]  # four tokens tell keys apart
        return float(len(find(tail, request.ids)))

    def prefers_some_values(request: Request) -> float:
        return -float(hash(request.ids[-request.scored_tokens :]) % 1009)

    def prefers_the_last(request: Request) -> float:
        # In the first two thirds: what is asked at the end may hold the same tokens as a value.
        value, haystack = request.ids[-request.scored_tokens :], request.ids[: 2 * len(request.ids) // 3]
        return float((find(value, haystack) or [-1])[-1])

    assert accuracy(questions, looks_up) == 1
    for blind in (prefers_some_values, prefers_the_last, lambda request: -1.0):
        assert accuracy(questions, blind) == 0.25


def test_rows_of_a_choice_and_of_a_continuation() -> None:
    request = Request((1, 2, 3, 4), 2)
    choice = RecallQuestion("needle@3", 7, (request,) * 4, 2, "2")
    common = {"task": "needle@3", "question": 7, "target": "2", "recall": True}
    values = [-3.0, -2.0, -1.0, -4.0]
    right = grade(choice, [LogLikelihood(value, 0) for value in values])
    assert right == common | {"correct": 1.0, "response": "2", "log_likelihoods": values}
    wrong = grade(choice, [LogLikelihood(-value, 0) for value in values])
    assert (wrong["correct"], wrong["response"]) == (0.0, "3")
    shared = grade(choice, [LogLikelihood(value, 0) for value in (-3.0, -1.0, -1.0, -4.0)])
    assert (shared["correct"], shared["response"]) == (0.5, "1")
    continued = RecallQuestion("copying@3", 0, (request,), None, "2")
    row = grade(continued, [LogLikelihood(-5.0, 1)])
    assert (row["correct"], row["target"], row["response"], row["log_likelihoods"]) == (0.5, "2", "1", [-5.0])
    with pytest.raises(NotFiniteError, match=r"question 0 of copying@3 are NaN.*another `dtype`"):
        grade(continued, [LogLikelihood(float("nan"), 1)])


# A third family


def test_a_third_family_costs_an_entry_and_a_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions, prompts, numbers, limits of verdicts and the tables of a study follow from the entry."""

    def parrots(task: str, _: object, beginning: tuple[int, ...], length: int, count: int, seed: int) -> Iterator[Any]:
        for number in range(count):
            request = Request((*beginning, seed, *range(length - len(beginning))), 2)
            yield RecallQuestion(task, number, (request,), None, "2")

    entry = RecallFamily("parrot", "parrots", "parrots {:.0f} % of the words", choices=None, least=50.0)
    monkeypatch.setitem(RECALL_FAMILIES, entry.name, entry)
    monkeypatch.setitem(GENERATORS, entry.name, parrots)
    tokenizer = make_tokenizer(300)
    questions = recall_questions(tokenizer, RecallQuestions(lengths=(256,), questions=4), 512, bos="auto")
    assert [q.task for q in questions[8:]] == ["parrot@256"] * 4
    assert questions_per_length(RecallQuestions(in_all={"needle": 4, "parrot": 16}), 1) == {
        "needle": 4,
        "copying": 400,
        "parrot": 16,
    }
    assert not solves("parrot", 49.0, 400) and solves("parrot", 50.0, 4)
    identity = cast(ModelIdentity, SimpleNamespace(tokenizer=tokenizer, max_tokens=512))
    assert [prompts.name for prompts in recall_prompts(identity, 257, 4, 0)][2:] == ["parrot@256"]
    assert recall_series(tokenizer, 257, 4, 0)["parrot"] == (((0, 2**33, *range(255)), (255, 256)),) * 4

    kept = Interval(91.0, 99.0, 107.0)
    paired = PairedDifference(400, 100, 80.0, 80.0, 0.0, -1.0, 1.0, (), (), 0.5, 4, 4, 1.0, 8, retained=kept)
    loss = Increase("nats per token", 10, 0.0, -0.01, 0.01)
    share = ShareVerdict("arm", 0.1, loss, Outcome.SAFE, "safe", recall=(RecallVerdict("parrot", paired),))
    saving = Saving(ABLATED, (share,), (("arm", 0.1),), units=10)
    answer = StudyAnswer("m", "c", 1, 10, 100, 10, 64, 0.05, 1.0, (saving,), {"arm": loss}, "r", "s", 1.0)
    assert re.search(r"needles +copying +parrots +verdict", str(answer)) and "99 % [91 %, 107 %]" in str(answer)
    assert answer._repr_html_() == f'<pre style="white-space: pre">{answer}</pre>'


# What a user can get wrong


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"lengths": ()}, r"recall lengths are empty. Give at least one"),
        ({"lengths": (0,)}, r"`lengths=0` \(limit 1\)\. Raise `lengths`"),
        ({"lengths": (64, 64)}, "recall lengths 64, 64 repeat. Give each once"),
        ({"questions": 10}, r"`questions=10` \(limit a multiple of 4\)"),
        ({"questions": 0}, r"`questions=0` \(limit 4, a multiple of 4\)"),
        ({"in_all": {"needle": 0}}, r"`in_all` has 0 questions of the family needle \(limit 4, a multiple of 4\)"),
        ({"in_all": {"needle": "400"}}, "`in_all` has '400' questions of the family needle"),
        ({"in_all": {"needle": 400.0}}, r"`in_all` has 400\.0 questions of the family needle"),
        ({"in_all": {"copying": 10}}, r"`in_all` has 10 questions of the family copying"),
        ({"in_all": {"needle": 4}, "questions": 8}, "`in_all` has no effect with `questions`"),
        ({"in_all": (4, 8)}, r"`in_all=\(4, 8\)` names no families. Pass numbers by name, of needle, copying"),
        ({"seed": -1}, r"`seed=-1` \(limit 0\)"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(RecallError, match=says):
        RecallQuestions(**wrong)  # type: ignore[arg-type]


def test_families_are_known_and_identify_a_run() -> None:
    """Runs that are unfinished have the list in their fingerprint."""
    assert RecallQuestions((256,)).settings() == {"lengths": (256,), "questions": None, "seed": 0}
    assert RecallQuestions(in_all={"copying": 700, "needle": 464}).settings()["in_all"] == (464, 700)
    with pytest.raises(UnknownNameError, match="unknown family of recall questions 'needel'; did you mean needle"):
        RecallQuestions(in_all={"needel": 4})
    assert set(GENERATORS) == set(RECALL_FAMILIES)


def test_lengths_that_do_not_fit_name_the_one_that_does() -> None:
    tokenizer = make_tokenizer(300)
    with pytest.raises(RecallError, match=r"600 tokens .limit 512 positions of the model"):
        recall_questions(tokenizer, RecallQuestions(lengths=(256, 600)), 512, bos="auto")
    with pytest.raises(RecallError, match=r"^recall length of 100 tokens .at least \d+ for 4 needles") as refused:
        recall_questions(tokenizer, RecallQuestions(lengths=(100,)), 512, bos="auto")
    least = int(str(refused.value).partition("at least ")[2].partition(" ")[0])
    assert recall_questions(tokenizer, RecallQuestions(lengths=(least,)), 512, bos="auto")
    with pytest.raises(RecallError, match="for 4 needles"):
        recall_questions(tokenizer, RecallQuestions(lengths=(least - 1,)), 512, bos="auto")


def test_tokenizers_that_cannot_write_the_questions_are_refused() -> None:
    with pytest.raises(RecallError, match=r"words with different tokens among Adam, Alice, Andrew, .*: 0 .at least"):
        recall_questions(word_tokenizer(["a"]), SMALL, 512, bos="auto")
    few = word_tokenizer([*KEYS[:4], *VALUES[:4]])
    with pytest.raises(
        RecallError, match=r"does not fit recall tasks: 8 printable tokens \(at least 24 for copying\)$"
    ):
        recall_questions(few, SMALL, 512, bos="auto")
    with pytest.raises(RecallError, match=r"neither BOS nor EOS. Use `bos=auto`"):
        recall_questions(few, SMALL, 512, bos="always")
    with pytest.raises(CorpusError, match="`bos='sometimes'` is unknown"):
        recall_questions(few, SMALL, 512, bos="sometimes")


def dna_tokenizer() -> PreTrainedTokenizerFast:
    """A vocabulary of four letters, as models of DNA have."""
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(("<s>", "<unk>", *"ACGT"))}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", unk_token="<unk>")


def test_a_vocabulary_of_letters_is_refused_with_the_option_of_each_verb(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, store = tmp_path / "dna", ["--store", str(tmp_path / "s.duckdb")]
    make_model("llama", vocabulary=6).save_pretrained(folder)
    dna_tokenizer().save_pretrained(folder)
    (tmp_path / "texts").mkdir()
    for number in range(8):
        (tmp_path / "texts" / f"{number}.txt").write_text("ACGGT"[number % 5 :] * 200 + "ACGT" * number)
    on_texts = [str(folder), "--corpus", str(tmp_path / "texts"), *store, "--device", "cpu"]
    misfit = "the tokenizer does not fit recall tasks: words with different tokens among Adam"
    importance = ["importance", *on_texts, "--recall-prompts", "4", "--max-tokens", "64", "--limit-sequences", "4"]
    fails(capsys, importance, misfit, "Set --recall-prompts to 0")
    fails(capsys, ["plan", *on_texts, "--method", "measured"], misfit, "Set --recall-prompts to 0")
    probe = ["probe", str(folder), *store, "--device", "cpu"]
    fails(
        capsys, probe, "of 99 tokens of the needle ' The baker on Linden", "Leave retrieval_score out of --behaviours"
    )
    probe += ["--behaviours", "induction_score"]
    fails(capsys, probe, "25 (limit 4", "Lower --repeated-tokens")
    assert main([*probe, "--repeated-tokens", "4"]) == 0


def correct(
    lm: headscan.LoadedModel, questions: Sequence[RecallQuestion], mask: HeadMask | None = None
) -> dict[str, float]:
    """Mean grade (0 to 1) of each family."""
    requests = tuple(request for question in questions for request in question.requests)
    (responses,) = answer(lm, requests, [mask], AnsweringSettings(4096, share_prefixes=True))
    answers = iter(responses.values)
    grades = defaultdict(list)
    for question in questions:
        row = grade(question, [next(answers) for _ in question.requests])
        grades[question.task.partition("@")[0]].append(row["correct"])
    return {name: mean(found) for name, found in grades.items()}


@pytest.mark.slow
def test_the_demo_model_recalls_with_its_induction_heads_and_hardly_misses_as_many_others() -> None:
    lm = headscan.load(MODEL_FOLDER, device="cpu", dtype="float32")
    plan = RecallQuestions(lengths=(256,), questions=36)
    questions = recall_questions(lm.require_tokenizer(), plan, lm.max_tokens, bos="auto")
    baseline = correct(lm, questions)
    assert baseline["needle"] > 0.5  # chance is 0.25
    assert baseline["copying"] > 0.35
    induction = headscan.probe(lm, ["induction_score"])["induction_score"]
    ranked = [divmod(head, lm.grid.shape[1]) for head in induction.flatten().argsort(descending=True).tolist()]
    without = correct(lm, questions, HeadMask(ranked[:4]))
    assert without["needle"] < 0.4
    assert without["copying"] < 0.1
    # The median, for a few random masks hit what induction rests on: a previous-token head.
    masks = [HeadMask(Random(seed).sample([*lm.grid.heads()], 4)) for seed in range(5)]
    controls = [correct(lm, questions, mask) for mask in masks]
    for name in ("needle", "copying"):
        assert median(control[name] for control in controls) > without[name] + 0.2
