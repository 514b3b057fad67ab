"""Tasks and recall questions of an evaluation."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from headscan.pipelines.cli.shared import arguments

if TYPE_CHECKING:
    from headscan.model_spec import ModelSpec
    from headscan.pipelines.evaluate.run_evaluation import EvaluateConfig


#: Prompt length that placement reserves memory for. Longer prompts run alone, or fail.
TASK_TOKENS = 2048


def add_tasks(parser: argparse.ArgumentParser, *, required: bool = True, recall: bool = True) -> None:
    """Add the options of tasks and recall questions.

    Args:
        required: The verb needs a task.
        recall: The verb asks recall questions.
    """
    group = parser.add_argument_group("tasks")
    group.add_argument(
        "--tasks",
        type=arguments.words,
        required=required,
        help="comma-separated lm-eval tasks, groups or tags" + ("" if required else " (default: none)"),
    )
    group.add_argument(
        "--include-path",
        help="folder with your own lm-eval tasks, such as headscan-demo/task for headscan_demo, the task of the demo; "
        "task files can run code, so name only folders that you trust (default: none)",
    )
    group.add_argument(
        "--num-fewshot", type=arguments.whole(0), help="number of examples in the prompt (default: the task's own)"
    )
    group.add_argument("--limit", type=arguments.count, help="maximum number of questions per task (default: all)")
    group.add_argument("--apply-chat-template", action="store_true", help="prompts in the tokenizer's chat template")
    group.add_argument(
        "--fewshot-as-multiturn",
        action=argparse.BooleanOptionalAction,
        help="examples as turns of the chat (default: yes with a chat template)",
    )
    group.add_argument(
        "--bos",
        choices=("auto", "always", "never"),
        default="auto",
        help="BOS token before each prompt; auto follows the tokenizer (default: auto)",
    )
    group.add_argument(
        "--share-prefixes",
        action=argparse.BooleanOptionalAction,
        help="shared prompt prefixes computed once (default: yes, unless rounding would differ)",
    )
    group.add_argument(
        "--mmlu-cloze",
        action="store_true",
        help="also score MMLU by the likelihood of the answer texts (mmlu_continuation): a model can "
        "lose the letters and keep the knowledge",
    )
    if recall:
        _add_recall(group)
    else:
        parser.set_defaults(recall=False, recall_lengths=None, recall_questions=None)


def _add_recall(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--recall",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also ask needle-in-a-haystack and copying questions (default: yes)",
    )
    group.add_argument(
        "--recall-lengths",
        type=arguments.listed(arguments.count),
        help="comma-separated prompt lengths of recall questions (default: powers of two from 256 to 4096 that fit)",
    )
    group.add_argument(
        "--recall-questions",
        type=arguments.count,
        metavar="N",
        help="number of recall questions per kind and length, a multiple of 4 (default: 400 per kind over all lengths; "
        "more in a sweep if the model recalls little)",
    )


def add_confirm(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the option that splits a sweep's questions."""
    parser.add_argument(
        "--confirm",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="select the best arm of a sweep on one half of the questions and judge it on the other; --no-confirm uses "
        "all questions for both, and the interval is then too narrow (default: --confirm)",
    )


def evaluate_config(options: argparse.Namespace, spec: ModelSpec) -> EvaluateConfig:
    """Return the settings of an evaluation.

    The batch size is missing, because the placement decides it.
    """
    from headscan.pipelines.evaluate.run_evaluation import EvaluateConfig
    from headscan.pipelines.evaluate.tasks import TaskConfig
    from headscan.pipelines.recall import RecallPlan

    return EvaluateConfig(
        model=spec,
        tasks=TaskConfig(
            names=options.tasks,
            include_path=options.include_path,
            num_fewshot=options.num_fewshot,
            limit=options.limit,
            apply_chat_template=options.apply_chat_template,
            fewshot_as_multiturn=options.fewshot_as_multiturn,
            bos=options.bos,
            mmlu_cloze=options.mmlu_cloze,
        ),
        recall=RecallPlan(lengths=options.recall_lengths, questions=options.recall_questions)
        if options.recall
        else None,
        share_prefixes=options.share_prefixes,
    )
