"""The parts of a run's questions: half select, half judge, and the same document is always in the same part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import duckdb
import pyarrow as pa
import pytest

from headscan.analysis.schema.tables import schema_statements
from headscan.analysis.schema.views import view_statements
from headscan.analysis.store import arm_writer as arms
from headscan.analysis.store.records import ArmRecord, RunRecord
from headscan.analysis.store.run_writer import begin_run


def _asked(task: str, documents: list[str | None], recall: bool = False) -> list[dict[str, object]]:
    return [
        {"task": task, "question": number, "recall": recall, "doc_hash": document}
        for number, document in enumerate(documents)
    ]


@pytest.fixture(scope="module")
def memory() -> Iterator[duckdb.DuckDBPyConnection]:
    """An empty store in memory."""
    with duckdb.connect() as connection:
        for statement in (*schema_statements(), *view_statements()):
            connection.execute(statement)
        yield connection


def _parts(
    memory: duckdb.DuckDBPyConnection, questions: list[dict[str, object]], correct: float = 1.0
) -> dict[tuple[str, int], str]:
    """The part of each question of a run, by task and number."""
    runs = memory.execute("SELECT count(*) FROM runs").fetchall()
    run_id = begin_run(memory, RunRecord("evaluate", f"run {runs}", "tiny", 3, 8)).run_id
    arm_id = arms.begin_arm(memory, ArmRecord(run_id, "baseline", "baseline")).arm_id
    rows = pa.Table.from_pylist([question | {"correct": correct} for question in questions])
    arms.finish_arm(memory, arm_id, rows, None, 0.0)
    found = memory.execute("SELECT task, question, part FROM all_question_split WHERE run_id = ?", [run_id]).fetchall()
    assert len(found) == len(questions)
    return {(task, question): part for task, question, part in found}


QUESTIONS = [
    *_asked("letters", [f"doc {i}" for i in range(101)]),
    *_asked("sums", [f"sum {i}" for i in range(40)]),
    *_asked("unhashed", [None] * 30),
    *_asked("one", ["alone"]),
    *_asked("needle@512", [None] * 36, recall=True),
    *_asked("copying@512", [None] * 36, recall=True),
]


def test_half_of_every_task_selects_and_a_quarter_of_the_recall_texts(memory: duckdb.DuckDBPyConnection) -> None:
    parts = _parts(memory, QUESTIONS)
    counts = Counter((task, part) for (task, _), part in parts.items())
    assert counts["letters", "confirmation"] == 51 and counts["letters", "selection"] == 50
    assert counts["sums", "confirmation"] == counts["sums", "selection"] == 20
    assert counts["unhashed", "confirmation"] == counts["unhashed", "selection"] == 15
    assert counts["one", "confirmation"] == 1
    # Nine texts of four questions each: what is asked about one text stays together.
    for task in ("needle@512", "copying@512"):
        assert (counts[task, "confirmation"], counts[task, "selection"]) == (28, 8)
        assert all(len({parts[task, 4 * text + i] for i in range(4)}) == 1 for text in range(9))
    first = [parts["letters", number] for number in range(50)]
    assert 15 < first.count("selection") < 35  # not by the order of the questions


def test_the_parts_depend_on_the_documents_alone(memory: duckdb.DuckDBPyConnection) -> None:
    """Not on the order of the questions, their numbers, the answers, or the other tasks of a run."""
    parts = _parts(memory, QUESTIONS)
    assert _parts(memory, QUESTIONS[::-1], correct=0.0) == parts
    backwards = _parts(memory, _asked("letters", [f"doc {i}" for i in reversed(range(101))]))
    assert {("letters", 100 - number): part for (_, number), part in backwards.items()} == {
        key: part for key, part in parts.items() if key[0] == "letters"
    }


def test_a_document_in_two_tasks_is_in_one_part(memory: duckdb.DuckDBPyConnection) -> None:
    """Such as the letter and the cloze form of one question: the one would select by the other's answer."""
    documents: list[str | None] = [f"doc {i}" for i in range(60)]
    cloze = [*_asked("b letters", documents), *_asked("a cloze", [*documents[10:], "new 1", "new 2", documents[20]])]
    parts = _parts(memory, cloze)
    for number in range(10, 60):
        assert parts["b letters", number] == parts["a cloze", number - 10]
    assert parts["a cloze", 52] == parts["a cloze", 10]
    counts = Counter((task, part) for (task, _), part in parts.items())
    assert abs(counts["b letters", "selection"] - 30) <= 2 and abs(counts["a cloze", "selection"] - 26) <= 2
