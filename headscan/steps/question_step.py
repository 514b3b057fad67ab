"""What steps share whose arms answer questions: tasks, recall questions, and text whose loss is judged."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeVar

from headscan.catalog import RECALL_NAMES
from headscan.errors import HeadscanError
from headscan.options import Group, Option
from headscan.settings.evaluation_settings import LOSS_LIMITS, TASK_TOKENS, HarnessError, RecallQuestions, TaskConfig
from headscan.steps.step import Step
from headscan.store.verdict_limits import MAX_LOSS

if TYPE_CHECKING:
    from headscan.runs.model_identity import ModelIdentity
    from headscan.texts.held_out_text import HeldOutText

R = TypeVar("R")

#: Recall questions on the command line.
RECALL_GROUP = Group("tasks", switch=Option(f"also ask recall questions: {RECALL_NAMES} (default: yes)"))
#: Length of the demo's recall questions.
_DEMO_RECALL = 256


@dataclass(frozen=True)
class QuestionStep(Step[R]):
    """A step whose arms answer questions, and how prompts are read.

    Attributes:
        recall: Recall questions; None omits them.
        share_prefixes: Read common prefixes of prompts once. None does so, unless arms would then use different kernels
            in half precision, whose rounding differs.
        text: Ordinary text whose loss is measured; None omits it.
        max_loss: Largest increase of that loss of a safe arm, in nats per token.
        demo_questions: Questions of the demo's own task, and of each of its recall tasks, on the command line.

    Raises:
        HarnessError: ``max_loss`` is out of range, or a setting has no effect.
    """

    evaluates: ClassVar = True
    demo_questions: ClassVar[tuple[int, int]]
    error: ClassVar[type[HeadscanError]] = HarnessError

    tasks: Annotated[TaskConfig, Group("tasks")] = field(default_factory=TaskConfig)
    recall: Annotated[RecallQuestions | None, RECALL_GROUP] = field(default_factory=RecallQuestions)
    share_prefixes: Annotated[
        bool | None, Option("shared prompt prefixes computed once (default: yes, unless rounding would differ)")
    ] = None
    text: HeldOutText | None = None
    max_loss: Annotated[float, LOSS_LIMITS] = MAX_LOSS

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", TaskConfig.of(self.tasks))
        super().__post_init__()
        if not self.model.is_demo:
            self.tasks.check_effect()

    def check_max_loss(self) -> None:
        """Raise HarnessError if ``max_loss`` is set without ``text``; steps that add a text do not call this."""
        if self.text is None and self.max_loss != MAX_LOSS:
            raise HarnessError("`max_loss` has no effect without `text`: set `text`, or leave it out")

    def longest(self, identity: ModelIdentity) -> int:
        """Return the tokens of the longest recall question or held-out text, at least those of a task, whose prompts
        are not known yet.
        """
        recall = () if self.recall is None else self.recall.lengths_within(identity.max_tokens)
        texts = () if self.text is None else (len(chunk.ids) for chunk in self.text.chunks)
        return max((TASK_TOKENS, *recall, *texts))

    def for_demo(self, scratch: Path) -> Self:
        if self.tasks.names:
            return self
        questions, recalled = self.demo_questions
        step: Any = self
        tasks = replace(self.tasks, **demo_task(scratch, questions))
        recall = self.recall
        if recall is not None:
            recall = replace(recall, lengths=recall.lengths or (_DEMO_RECALL,), questions=recall.questions or recalled)
        new: Self = replace(step, tasks=tasks, recall=recall)
        return new


def demo_task(scratch: Path, questions: int = 400) -> dict[str, Any]:
    """Write the demo's own task into a folder, and return the settings that name it."""
    from headscan.texts.continuation_task import DEMO_TASK, write_task
    from headscan.texts.stdlib_files import held_out_files

    return {"names": (DEMO_TASK,), "include_path": str(write_task(scratch / "task", held_out_files(), questions))}
