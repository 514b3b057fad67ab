"""lm-eval tasks of an evaluation: loaded once, asked once, and graded by lm-eval for every arm."""

from __future__ import annotations

import hashlib
import inspect
import json
import random
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from headscan.errors import HeadscanError, first_line
from headscan.runs.model_identity import ModelIdentity
from headscan.settings.evaluation_settings import HarnessError, RecallError, RecallQuestions, TaskConfig
from headscan.store.tables import TABLES
from headscan.text_tables import percent
from headscan.texts import CorpusError
from headscan.texts.drawing import draw_items
from headscan.texts.example_questions import ExampleQuestions
from headscan.texts.harness import HeadscanLM, quiet_harness
from headscan.texts.held_out_text import HeldOutText, likelihood_of
from headscan.texts.labelled_texts import ExampleRequest
from headscan.texts.prefix_tree import tokens_read_once
from headscan.texts.recall_tasks import RecallQuestion, grade, recall_questions
from headscan.texts.shared_runs import MOST_SHARED, RUN, shares_with
from headscan.texts.token_requests import GenerationRequest, LogLikelihood, Request, request_hash
from headscan.verdicts.answer_sheets import CLOZE_SUFFIX

AnyRequest = Request | GenerationRequest | ExampleRequest

#: Metrics from 0 to 1 that grade an answer; the first one that a task reports is used.
_CORRECT = ("acc", "exact_match", "acc_norm", "acc_mutual_info", "em", "exact", "f1", "contains")
#: Those by which the choice with the highest stored score is the answer.
_OF_SCORES = {"acc", "acc_mutual_info"}


def answer_table(samples: dict[str, list[dict[str, Any]]], tasks: Mapping[str, Any]) -> pa.Table:
    """Return one row per task and question from lm-eval's samples of ``tasks``. ``correct`` is the first metric that
    grades an answer; NULL for tasks without one, such as a perplexity. ``response`` is the choice that it grades.
    """
    rows = []
    for task, questions in samples.items():
        # The other filters of a task extract the same answers in other ways.
        questions = [sample for sample in questions if sample["filter"] == questions[0]["filter"]]
        metric = _metric(questions)
        for sample in questions:
            # A log-likelihood is a pair; a filter may also return lists of texts.
            responses = [answer for answer in sample["filtered_resps"] if isinstance(answer, tuple | list) and answer]
            values = [answer[0] for answer in responses if isinstance(answer[0], int | float)]
            if "acc_mutual_info" in sample["metrics"]:
                # The second half contains the same choices without their context.
                in_context, alone = values[: len(values) // 2], values[len(values) // 2 :]
                differences = [a - b for a, b in zip(in_context, alone, strict=True)]
                values = differences if metric == "acc_mutual_info" else in_context
            choices = values
            if metric == "acc_norm" and tasks[task].OUTPUT_TYPE == "multiple_choice":
                lengths = map(len, tasks[task].doc_to_choice(sample["doc"]))
                choices = [value / max(1, length) for value, length in zip(values, lengths, strict=True)]
            rows.append(
                {
                    "task": task,
                    "question": int(sample["doc_id"]),
                    "doc_hash": sample["doc_hash"],
                    "document": _document(sample["doc"]),
                    "target": str(sample["target"]),
                    "response": str(choices.index(max(choices))) if choices else str(sample["filtered_resps"][0]),
                    "correct": None if metric is None else float(sample[metric]),
                    "recall": False,
                    "log_likelihoods": [float(value) for value in values],
                    "metrics": json.dumps({name: sample[name] for name in sample["metrics"]}, default=str),
                }
            )
    return pa.Table.from_pylist(rows, schema=ANSWERS)


#: Columns of an arm's answers.
ANSWERS = TABLES["answers"].schema(without=("arm_id",))


def _document(doc: Any) -> str | None:
    """Return the document that a question is made from, as the questions of a study and of the demo name it."""
    return (doc.get("document") or doc.get("module")) if isinstance(doc, Mapping) else None


def _metric(questions: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the metric that grades a task's answers under every arm; None if the task has none."""
    if not questions:
        return None
    first = questions[0]
    return next((name for name in _CORRECT if isinstance(first.get(name), int | float)), None)


def _is_graded(task: Any) -> bool:
    """Return True if a task grades answers; perplexities do not, nor tasks of generated text with BLEU alone."""
    return task.OUTPUT_TYPE != "loglikelihood_rolling" and not set(_CORRECT).isdisjoint(task.aggregation())


def _result_table(output: Mapping[str, Any]) -> pa.Table:
    """Return lm-eval's own aggregation by task and group."""
    groups = output.get("groups", {})
    rows = []
    for name, figures in output["results"].items():
        for key, value in figures.items():
            metric, comma, filtered = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            error = figures.get(f"{metric}_stderr,{filtered}")
            rows.append(
                {
                    "task": name,
                    "is_group": name in groups,
                    "metric": metric,
                    "filter": filtered,
                    "value": float(value) if isinstance(value, int | float) else None,
                    "standard_error": float(error) if isinstance(error, int | float) else None,
                    "questions": figures.get("sample_len"),
                }
            )
    return pa.Table.from_pylist(rows, schema=RESULTS)


#: Columns of an arm's results.
RESULTS = TABLES["arm_results"].schema(without=("arm_id",))


#: Settings of a task that select its questions and examples.
_QUESTIONS = """
    dataset_path dataset_name dataset_kwargs training_split validation_split test_split fewshot_split process_docs
    description num_fewshot fewshot_delimiter
""".split()

_FORM: dict[str, Any] = {
    "output_type": "multiple_choice",
    "doc_to_text": "Question: {{question.strip()}}\nAnswer:",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True}],
    "metadata": {"version": 1.0},
}


def cloze_tasks(tasks: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cloze form of every MMLU task that asks for letters by name, such as ``mmlu_anatomy_continuation``."""
    from lm_eval.api.task import ConfigurableTask

    variants = {}
    for name, task in tasks.items():
        if _asks_for_letters(name, task):
            settings = {key: getattr(task.config, key) for key in _QUESTIONS}
            # Examples are sampled as in the letter form.
            sampler = {"sampler": task.config.fewshot_config.sampler}
            config = _FORM | settings | {"task": name + CLOZE_SUFFIX, "fewshot_config": sampler}
            variants[name + CLOZE_SUFFIX] = ConfigurableTask(config=config)
    if not variants:
        raise HarnessError(
            f"`mmlu_cloze=True` needs a task with the letters of MMLU, not only {', '.join(list(tasks)[:3])}. Add mmlu"
            " or a subject of it to `tasks`, or omit `mmlu_cloze`"
        )
    return {name: task for name, task in variants.items() if name not in tasks}


def _asks_for_letters(name: str, task: Any) -> bool:
    letters = task.config.doc_to_choice
    return (
        "mmlu" in name
        and task.OUTPUT_TYPE == "multiple_choice"
        and isinstance(letters, list)
        and all(len(letter) == 1 for letter in letters)
        and {"question", "choices", "answer"} <= set(next(iter(task.eval_docs), {}))
    )


#: Settings of a task that determine grading; those that determine prompts are visible in the requests.
_GRADING = "output_type doc_to_target doc_to_choice process_results metric_list filter_list".split()
#: lm-eval's own default.
_FEWSHOT_SEED = 1234
#: Bootstrap draws for standard errors without a formula, such as a perplexity's. lm-eval's default of 100,000 takes
#: minutes per arm.
_BOOTSTRAP = 1000


@dataclass(frozen=True)
class TaskResults:
    answers: pa.Table
    results: pa.Table


class Tasks:
    """The tasks of lm-eval: `collect` asks once for all requests, and `results` grades the answers of each arm.
    ``part`` takes a range of each task's drawn questions; None takes those up to the limit.
    """

    def __init__(self, config: TaskConfig, part: range | None = None) -> None:
        self._config, self._part = config, part
        self._without_examples: list[str] = []
        self._cloze: dict[str, Any] = {}
        self._loaded: Any = {"tasks": {}, "groups": {}}
        if not config.names:
            return
        config.check_folder()
        with quiet_harness():
            manager = _manager(config)
            task_names = set(manager.all_tasks)
            for name in config.names:
                if name not in task_names and not Path(name).is_file():
                    raise _unknown_task(name, task_names, config.include_path)
            with _named_failure(f"{', '.join(config.names)} cannot be loaded"), _seeded():
                self._loaded = manager.load(list(config.names))
                self._cloze = cloze_tasks(self._loaded["tasks"]) if config.mmlu_cloze else {}
                self._loaded["tasks"] |= self._cloze
        for name, task in self._loaded["tasks"].items():
            # As in lm-eval: a task with 0 examples keeps 0.
            if task.get_config("num_fewshot") == 0:
                self._without_examples.append(name)
            else:
                task_examples = task.get_config("num_fewshot") or 0
                task.set_config("num_fewshot", task_examples if config.num_fewshot is None else config.num_fewshot)
            task.set_fewshot_seed(seed=_FEWSHOT_SEED)

    @cached_property
    def _drawn(self) -> dict[str, list[int]]:
        """The numbers of each task's questions that a hash of their content draws; empty without a limit."""
        if self._config.limit is None and self._part is None:
            return {}
        part, drawn = range(self._config.limit or 0) if self._part is None else self._part, {}
        for name, task in self._loaded["tasks"].items():
            contents = [*map(_content, task.eval_docs)]
            drawn[name] = sorted({*draw_items(contents, part.stop)} - {*draw_items(contents, part.start)})
        return drawn

    @cached_property
    def _asking(self) -> dict[str, Any]:
        """The tasks that have questions to ask."""
        return {name: task for name, task in self._loaded["tasks"].items() if self._drawn.get(name, True)}

    @property
    def notes(self) -> list[str]:
        tasks = self._without_examples
        if not self._config.num_fewshot or not tasks:
            return []
        names = ", ".join(tasks[:3]) + (f" and {len(tasks) - 3} more" if len(tasks) > 3 else "")
        return [f"{names}: no examples in the prompt, as the task specifies; num_fewshot is ignored"]

    @property
    def groups(self) -> dict[str, list[str]]:
        """The requested groups and the names of their tasks; the cloze forms of a group are a group."""
        groups: dict[str, list[str]] = {}
        for name in self._config.names:
            if name in self._loaded.get("groups", {}):
                members = [task.task_name for task in self._loaded["groups"][name].get_all_tasks()]
                cloze = [task + CLOZE_SUFFIX for task in members if task + CLOZE_SUFFIX in self._cloze]
                groups |= {name: members} | ({name + CLOZE_SUFFIX: cloze} if cloze else {})
        return groups

    def fingerprint(self, *, undrawn: bool = False) -> str:
        """Return a hash of the questions and their grading, or with ``undrawn`` of all that the tasks have."""
        digest = hashlib.sha256(version("lm_eval").encode())
        for name, task in sorted(self._loaded["tasks"].items()):
            grading = {key: getattr(task.config, key, None) for key in _GRADING}
            digest.update(json.dumps([name, grading], sort_keys=True, default=_source).encode())
            for question in self._contents(name, undrawn=undrawn):
                digest.update(question.encode())
        return digest.hexdigest()

    def _contents(self, name: str, *, undrawn: bool = False) -> list[str]:
        """Return the contents of a task's questions that are asked, or with ``undrawn`` of all."""
        every = [_content(question) for question in self._loaded["tasks"][name].eval_docs]
        return [every[number] for number in self._drawn[name]] if self._drawn and not undrawn else every

    def collect(self, adapter: HeadscanLM) -> None:
        """Build all requests and pass them to the adapter, which collects them."""
        requests: dict[str, list[Any]] = {}
        for name, task in self._asking.items():
            if getattr(task, "MULTIMODAL", False) or getattr(task, "UNSAFE_CODE", False):
                what = "shows images" if getattr(task, "MULTIMODAL", False) else "runs code that the model writes"
                raise HarnessError(f"task {name} {what}, but only text tasks are supported. Use another task")
            with quiet_harness(), _named_failure(f"the requests of {name} cannot be made"):
                task.build_all_requests(
                    samples=self._drawn.get(name),
                    rank=adapter.rank,
                    world_size=adapter.world_size,
                    apply_chat_template=self._config.apply_chat_template,
                    fewshot_as_multiturn=self._config.multiturn,
                    chat_template=adapter.apply_chat_template if self._config.apply_chat_template else None,
                    tokenizer_name=adapter.tokenizer_name,
                )
            # lm-eval would build the requests again for each arm.
            task.build_all_requests = _built_already
            for instance in task.instances:
                requests.setdefault(instance.request_type, []).extend([instance] * instance.repeats)
        for kind, instances in requests.items():
            names = dict.fromkeys(str(instance.task_name) for instance in instances)
            with _named_failure(f"the requests of {', '.join(names)} cannot be made"):
                getattr(adapter, kind)(instances)

    @property
    def questions(self) -> int:
        """Number of questions with right answers; 0 before ``collect``."""
        return sum(
            len({instance.doc_id for instance in task.instances}) for task in self._asking.values() if _is_graded(task)
        )

    @property
    def available(self) -> dict[str, int]:
        """Number of questions that each task with right answers has, whatever the limit."""
        return {
            name: sum(1 for _ in task.eval_docs) for name, task in self._loaded["tasks"].items() if _is_graded(task)
        }

    @property
    def by_probability(self) -> bool:
        """True if every graded task has choices, of which the likeliest is the answer: verdicts count the probability
        of the right one.
        """
        graded = [task for task in self._loaded["tasks"].values() if _is_graded(task)]
        metrics = [next(name for name in _CORRECT if name in task.aggregation()) for task in graded]
        return {task.OUTPUT_TYPE for task in graded} <= {"multiple_choice"} and set(metrics) <= _OF_SCORES

    def overlap(self, texts: Sequence[str], what: str) -> str:
        """Return in a sentence how many questions are partly in texts, which ``what`` describes."""
        questions = [
            "\n".join(_strings(json.loads(question)))
            for name in self._loaded["tasks"]
            for question in self._contents(name)
        ]
        shares = shares_with(questions, texts)
        return (
            f"questions of {', '.join(self._config.names)} with more than {percent(MOST_SHARED)} of their runs of {RUN}"
            f" words in {what}: {(shares > MOST_SHARED).sum():,} of {len(questions):,} (at most"
            f" {percent(shares.max(initial=0.0))})"
        )

    def results(self, adapter: HeadscanLM, responses: Mapping[str, LogLikelihood | str]) -> TaskResults:
        if not self._asking:
            return TaskResults(answer_table({}, {}), _result_table({"results": {}}))
        from lm_eval.evaluator import evaluate as run_tasks

        for task in self._asking.values():
            for instance in task.instances:
                instance.resps.clear()
                instance.filtered_resps.clear()
        adapter.answers = responses  # lm-eval asks every request again, and the adapter gives these answers
        names = ", ".join(self._config.names)
        with quiet_harness(), _named_failure(f"the answers to {names} cannot be graded"):
            output: Any = run_tasks(
                lm=adapter,
                task_dict=self._loaded if self._part is None else {"tasks": self._asking, "groups": {}},
                samples=self._drawn or None,
                bootstrap_iters=_BOOTSTRAP,
                log_samples=True,
                apply_chat_template=self._config.apply_chat_template,
                fewshot_as_multiturn=self._config.multiturn,
            )
        return TaskResults(answer_table(output["samples"], self._loaded["tasks"]), _result_table(output))


def _content(question: Any) -> str:
    """Return the content of a question, by which it is drawn and known."""
    return json.dumps(question, sort_keys=True, default=str)


def _strings(content: Any) -> Iterator[str]:
    """Yield all strings of JSON data."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict | list):
        for value in content.values() if isinstance(content, dict) else content:
            yield from _strings(value)


def _unknown_task(name: str, task_names: Set[str], include_path: str | None) -> HarnessError:
    """Return an error with the names that may be meant: those of the own folder, and similar ones."""
    near = get_close_matches(name, task_names, n=3)
    unknown = f"unknown task {name!r}" + (f": did you mean {', '.join(near)}?" if near else ".")
    own = [] if include_path is None else sorted(_folder_manager(include_path).all_tasks)
    if own:
        named = ", ".join(own[:5]) + (f" and {len(own) - 5} more" if len(own) > 5 else "")
        return HarnessError(f"{unknown} {include_path} has {named}. Name a task of it or of lm-eval")
    set_folder = "If it is your own, set" if near else "Set"
    return HarnessError(f"{unknown} {set_folder} `include_path` to the folder of its YAML file")


def _folder_manager(include_path: str) -> Any:
    """Return lm-eval's index of the tasks of a folder alone."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include_path, include_defaults=False)


def _manager(config: TaskConfig) -> Any:
    """Return lm-eval's index of tasks: that of the own folder alone, if it has all the tasks. lm-eval's own tasks fill
    thousands of files, whose index takes seconds. Groups may have members among them.
    """
    from lm_eval.tasks import TaskManager

    if config.include_path is not None:
        folder_manager = _folder_manager(config.include_path)
        if set(config.names) <= set(folder_manager.all_subtasks):
            return folder_manager
    return TaskManager(include_path=config.include_path)


@contextmanager
def _named_failure(what: str) -> Iterator[None]:
    """Re-raise exceptions of lm-eval, datasets and a task's code as HarnessError; ours pass unchanged."""
    try:
        yield
    except HeadscanError:
        raise
    except Exception as problem:
        raise HarnessError(f"{what}: {first_line(problem)}") from problem


@contextmanager
def _seeded() -> Iterator[None]:
    """Seed tasks that shuffle questions as lm-eval's command does, and restore the generators."""
    python, arrays = random.getstate(), np.random.get_state()
    try:
        random.seed(0)
        np.random.seed(_FEWSHOT_SEED)
        yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)


def _source(thing: object) -> object:
    """Return a function as its name and its file's hash, because its address differs in every process."""
    if isinstance(thing, partial):
        return [thing.func, thing.args, thing.keywords]
    name = getattr(thing, "__qualname__", type(thing).__qualname__)
    try:
        file = Path(inspect.getfile(thing))  # type: ignore[arg-type]
        return [name, hashlib.sha256(file.read_bytes()).hexdigest()]
    except (OSError, TypeError):
        return name


def _built_already(**options: Any) -> None:
    """Replace a task's own method once its requests exist."""


class Questions:
    """Requests by their hash, built once, and the grading of an arm's answers. ``recall``, ``text`` and ``examples``
    None omit recall questions, ordinary text and labelled examples; with ``recall_only``, recall questions alone are
    enough. ``part`` are the ranges of the drawn questions of each task, and of each recall task, that a look asks; None
    asks all, up to the limits.
    """

    def __init__(
        self,
        tasks: TaskConfig,
        recall: RecallQuestions | None,
        identity: ModelIdentity,
        text: HeldOutText | None = None,
        *,
        examples: ExampleQuestions | None = None,
        recall_only: bool = False,
        part: tuple[range, range] | None = None,
    ) -> None:
        if not tasks.names and text is None and examples is None and not recall_only:
            raise HarnessError("no tasks. Name at least one in `tasks`")
        self.config = tasks
        self._part = part
        self.tasks = Tasks(tasks, *(part or ())[:1])
        self._lm = HeadscanLM(identity, bos=tasks.bos)
        self.tasks.collect(self._lm)
        self._identity = identity
        self.text = text
        self.examples = examples
        self.ask_recall(recall)

    def ask_recall(self, recall: RecallQuestions | None) -> None:
        """Make recall questions, in place of earlier ones; None makes none."""
        self.recall = recall
        self._recall: list[RecallQuestion] = []
        self._notes: list[str] = []
        identity = self._identity
        if recall is not None:
            try:
                self._recall = recall_questions(identity.tokenizer, recall, identity.max_tokens, bos=self.config.bos)
                if self._part is not None:
                    self._recall = [each for each in self._recall if each.question in self._part[1]]
            except (RecallError, CorpusError) as problem:  # the context or the tokenizer does not fit
                if recall.lengths is not None:
                    raise RecallError(f"{problem}. Change the recall lengths, or ask no recall questions") from problem
                self._notes.append(f"recall questions are omitted: {problem}")
        recall_requests = {request_hash(request): request for question in self._recall for request in question.requests}
        self.requests: dict[str, AnyRequest] = {**self._lm.requests, **recall_requests}
        for source in self._sources:
            self.requests |= source.requests

    @property
    def of_look(self) -> bool:
        """True if these are the questions of one look, and other looks have more."""
        return self._part is not None

    @property
    def _sources(self) -> list[HeldOutText | ExampleQuestions]:
        return [source for source in (self.text, self.examples) if source is not None]

    def settings(self) -> dict[str, Any]:
        """Return the JSON settings that identify a run."""
        return {
            **{name: value for name, value in asdict(self.config).items() if name not in ("names", "include_path")},
            "fewshot_as_multiturn": self.config.multiturn,
            "tasks": self.config.names,
            "recall": None if self.recall is None else self.recall.settings(),
            **({} if self.text is None else {"text": self.text.settings()}),
            **({} if self.examples is None else self.examples.settings()),
        }

    def fingerprint(self) -> dict[str, str]:
        """Return hashes of everything that determines the answers and their grades. Of a look they are those of all
        questions that the tasks have.
        """
        if self.of_look:
            return {"tasks": self.tasks.fingerprint(undrawn=True)}
        requests = hashlib.sha256("".join(self.requests).encode()).hexdigest()
        recall = hashlib.sha256(repr([(q.task, q.question, q.answer) for q in self._recall]).encode()).hexdigest()
        text = {} if self.text is None else {"text": self.text.fingerprint()}
        examples = {} if self.examples is None else {"examples": self.examples.texts.fingerprint()}
        return {"tasks": self.tasks.fingerprint(), "requests": requests, "recall": recall} | text | examples

    @property
    def name(self) -> str | None:
        """Names of the tasks, or of the texts without tasks."""
        sources = [source.corpus for source in self._sources]
        return ",".join(self.config.names) or next(iter(sources), None)

    def tokens_to_read(self) -> int:
        """Return the tokens that pass through the model, if every prefix is read once."""
        return tokens_read_once(tuple(request.ids) for request in self.requests.values())

    @property
    def notes(self) -> list[str]:
        # The choices of a question are often one input.
        cut = len({_input(self.requests[key]) for key in self._lm.truncated})
        notes = self.tasks.notes + self._notes
        return notes + [f"prompts longer than the context, whose beginning is cut off: {cut:,}"] * bool(cut)

    def longest_input(self, *, generated: bool = False) -> int:
        """Return the tokens of the longest input; ``generated`` counts those that a prompt's answer may add."""
        lengths = [
            len(_input(request))
            + (request.max_new_tokens if generated and isinstance(request, GenerationRequest) else 0)
            for request in self.requests.values()
        ]
        return max(lengths, default=0)

    def prompts(self) -> list[tuple[int, ...]]:
        """Return the distinct inputs of the benchmark, in task order."""
        return list(dict.fromkeys(map(_input, self._lm.requests.values())))

    def ablated_share(self, shares: Mapping[str, float]) -> float:
        """Return the mean ablated share, 0 to 1, of the benchmark's requests, or of all requests without one."""
        counted = self._lm.requests or self.requests
        return sum(shares[key] for key in counted) / len(counted)

    def grade(self, responses: Mapping[str, LogLikelihood | str]) -> TaskResults:
        """Grade one arm's answers, given by request hash; benchmark rows come before those of recall and texts."""
        graded = self.tasks.results(self._lm, responses)
        recall_rows = [
            grade(question, [likelihood_of(request, responses) for request in question.requests])
            for question in self._recall
        ]
        other_rows = [row for source in self._sources for row in source.answers(responses)]
        answers = pa.Table.from_pylist([*recall_rows, *other_rows], schema=ANSWERS)
        other_results = [row for source in self._sources for row in source.results(responses)]
        results = pa.Table.from_pylist(other_results, schema=graded.results.schema)
        return TaskResults(pa.concat_tables([graded.answers, answers]), pa.concat_tables([graded.results, results]))


def _input(request: AnyRequest) -> tuple[int, ...]:
    """Return the input of a request: the last token of a continuation is predicted, not read."""
    return request.ids[:-1] if isinstance(request, Request) else request.ids
