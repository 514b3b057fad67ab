"""Options of verbs that answer questions: tasks, texts of a calibration, labelled examples, and a model held whole."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from headscan.catalog import RECALL_NAMES, ReplacementKind
from headscan.checkpoints.source_folder import DEMO_MODEL
from headscan.cli.option_parser import Given, UsageError
from headscan.cli.results import Json
from headscan.cli.verb_base import CORPORA, CorpusOptions, ModelVerb, RunVerb, quiet_libraries
from headscan.model_spec import ModelSpec
from headscan.options import Group, Needs, Option
from headscan.settings.corpus_settings import CorpusSpec, ExamplesSpec, LabelledMetric
from headscan.settings.evaluation_settings import (
    EvaluateConfig,
    RecallQuestions,
    ReplacementConfig,
    ReplacementOption,
    TaskConfig,
)
from headscan.settings.saving_settings import PruneTexts

if TYPE_CHECKING:
    from headscan.jobs.job_functions import LocalJobOptions
    from headscan.steps.run_labelled_ablate import LabelledEvaluateConfig

_NAMED = Needs(key="names", of=("include_path",))
#: Options that change the questions of tasks alone, not those of recall. The demo has a task of its own.
_ASKED = Needs(
    key="names",
    of=("num_fewshot", "limit", "apply_chat_template", "fewshot_as_multiturn", "mmlu_cloze"),
    unless=Needs(key="model", values=(DEMO_MODEL,)),
)
#: Condition of options of tasks and texts, which labelled examples replace.
NO_DATA = Needs(key="data.path", absent=True)
#: Condition of options of texts whose outputs replace those of ablated heads.
_REPLACED = Needs(key="texts.kind", values=("mean", "resample"), of=("name", "data_set"))
#: Length of the demo's recall questions.
_DEMO_RECALL = 256


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """Tasks of a verb that needs some."""

    names: Annotated[
        tuple[str, ...],
        Option(
            "comma-separated lm-eval tasks, groups or tags (default: required, except for `demo`, which has its own)",
            flag="--tasks",
        ),
    ] = ()
    prompts: Annotated[Given[TaskConfig], Group(needs=(_NAMED,))]
    evaluation: Annotated[Given[EvaluateConfig], Group()]

    def config(self, spec: ModelSpec, *, recall: RecallQuestions | None = None, **prompts: Any) -> EvaluateConfig:
        """Return the settings of an evaluation, without the batch size, which the placement decides; ``prompts``
        replaces settings of the command line.
        """
        tasks = self.prompts.build(**{"names": self.names, **prompts})
        return self.evaluation.build(model=spec, tasks=tasks, recall=recall)


@dataclass(frozen=True, kw_only=True)
class OptionalTaskOptions(TaskOptions):
    """Tasks of a verb that can do without."""

    names: Annotated[
        tuple[str, ...], Option("comma-separated lm-eval tasks, groups or tags (default: none)", flag="--tasks")
    ] = ()
    prompts: Annotated[Given[TaskConfig], Group(needs=(_NAMED, _ASKED))]


@dataclass(frozen=True, kw_only=True)
class RecallOptions:
    """Recall questions."""

    asked: Annotated[bool, Option(f"also ask recall questions: {RECALL_NAMES} (default: yes)", flag="--recall")] = True
    questions: Annotated[Given[RecallQuestions], Group(needs=(Needs(key="asked"),))]

    def config(self, **defaults: Any) -> RecallQuestions | None:
        """Return the questions (None without any), with ``defaults`` for settings that the command line leaves out."""
        if not self.asked:
            return None
        asked = self.questions.build()
        return replace(asked, **{name: value for name, value in defaults.items() if getattr(asked, name) is None})


@dataclass(frozen=True, kw_only=True)
class DemoSize:
    """Sizes of a verb on the demo: its questions, its recall questions of each kind, and its texts."""

    questions: int
    recall: int
    sequences: int


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions(CorpusOptions):
    """Texts that choose, repair and judge."""

    name: Annotated[str | None, Option(f"{CORPORA} (default: required, except for `demo`)", flag="--corpus")] = None
    texts: Annotated[Given[PruneTexts], Group()]


@dataclass(frozen=True, kw_only=True)
class WholeModelVerb(RunVerb):
    """A verb that removes heads: one replica in this process holds the model whole."""

    tasks: Annotated[OptionalTaskOptions, Group("tasks")]
    recall: Annotated[RecallOptions, Group("tasks")]
    calibration: Annotated[CalibrationOptions, Group("calibration")]

    def check_texts(self) -> None:
        """Raise UsageError if a corpus is missing."""
        if self.calibration.name is None and not self.is_demo:
            raise UsageError("--corpus is required: name a text to calibrate on")

    def prune_texts(self, demo: DemoSize) -> PruneTexts:
        calibration = self.calibration
        if calibration.name is not None:
            return calibration.texts.build(corpus=calibration.spec())
        # The demo model has read the standard library, but not these modules.
        config = calibration.texts.build(
            corpus=CorpusSpec("python-stdlib-modules"), held_out=CorpusSpec("python-stdlib-heldout")
        )
        return replace(config, sequences=config.sequences or demo.sequences)

    def whole_model_options(self) -> LocalJobOptions:
        """Return the options of a job that runs in this process."""
        return replace(self, devices=self.devices.in_this_process()).job_options()


def evaluation_of(verb: WholeModelVerb | TaskVerb, spec: ModelSpec, scratch: Path, demo: DemoSize) -> EvaluateConfig:
    """Return the settings of an evaluation; the demo has its own recall questions, and its task in ``scratch``."""
    if verb.tasks.names or not verb.is_demo:
        return verb.tasks.config(spec, recall=verb.recall.config())
    asked = verb.recall.config(lengths=(_DEMO_RECALL,), questions=demo.recall)
    return verb.tasks.config(spec, recall=asked, **demo_task(scratch, demo.questions))


@dataclass(frozen=True, kw_only=True)
class ReplaceTexts(CorpusOptions):
    """Outputs that replace those of ablated heads, and the texts that they are collected on."""

    kind: ReplacementOption = "zero"

    name: Annotated[
        str | None, Option(f"texts of --replace mean and resample: {CORPORA} (default: none)", flag="--corpus")
    ] = None


@dataclass(frozen=True, kw_only=True)
class TaskVerb(RunVerb):
    """A verb that ablates heads while tasks run."""

    json: Json = False
    tasks: Annotated[TaskOptions, Group("tasks")]
    recall: Annotated[RecallOptions, Group("tasks")]
    arms: Any
    texts: Annotated[ReplaceTexts, Group("texts", needs=(_REPLACED,))]

    def __post_init__(self) -> None:
        if not self.tasks.names and not self.is_demo:
            raise UsageError("--tasks is required: name lm-eval tasks, groups or tags, such as arc_easy")


def demo_task(scratch: Path, questions: int = 400) -> dict[str, Any]:
    """Write the demo's own task into a folder, and return the settings that name it."""
    from headscan.texts.continuation_task import DEMO_TASK, write_task
    from headscan.texts.stdlib_files import held_out_files

    return {"names": (DEMO_TASK,), "include_path": str(write_task(scratch / "task", held_out_files(), questions))}


def replacement_of(kind: ReplacementKind, texts: CorpusOptions, verb: ModelVerb) -> ReplacementConfig:
    """Return what replaces the output of ablated heads."""
    if kind == "zero":
        return ReplacementConfig(kind)
    return ReplacementConfig(kind, texts.required(verb) if verb.is_demo else texts.spec())


#: Option of verbs on labelled examples.
Metric = Annotated[
    LabelledMetric | None,
    Option(
        "metric on --data (default: accuracy for classifiers, bleu for encoder-decoders)",
        needs=(Needs(key="data.path"),),
    ),
]


def labelled_evaluation(
    verb: RunVerb, data: ExamplesSpec, metric: LabelledMetric | None, max_tokens: int | None
) -> LabelledEvaluateConfig:
    """Return the settings of the examples and the model that a command line names."""
    from headscan.steps.run_labelled_ablate import LabelledEvaluateConfig

    quiet_libraries()
    return LabelledEvaluateConfig(verb.spec(), data, metric, max_tokens)
