"""Tasks and recall questions of an evaluation."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from headscan.pipelines.cli.shared import arguments

if TYPE_CHECKING:
    from headscan.model_spec import ModelSpec
    from headscan.pipelines.evaluate.run_evaluation import EvaluateConfig


#: Length of a task's prompt that memory is set aside for; longer ones run alone, or not at all.
TASK_TOKENS = 2048


def add_tasks(parser: argparse.ArgumentParser) -> None:
    """What is asked, and how."""
    group = parser.add_argument_group("tasks")
    group.add_argument(
        "--tasks", type=arguments.words, required=True, help="lm-eval tasks, groups or tags, with commas between"
    )
    group.add_argument("--include-path", help="folder with more tasks")
    group.add_argument(
        "--num-fewshot", type=arguments.whole(0), help="examples in the prompt (default: as the task says)"
    )
    group.add_argument("--limit", type=arguments.count, help="questions a task (default: all)")
    group.add_argument(
        "--apply-chat-template", action="store_true", help="put prompts into the tokenizer's chat template"
    )
    group.add_argument(
        "--fewshot-as-multiturn",
        action=argparse.BooleanOptionalAction,
        help="examples as turns of the chat (default: with a chat template)",
    )
    group.add_argument(
        "--bos", choices=("auto", "always", "never"), default="auto", help="BOS in front of a prompt (default: auto)"
    )
    group.add_argument(
        "--share-prefixes",
        action=argparse.BooleanOptionalAction,
        help="read what prompts begin with alike once (default: where the arms can still be compared)",
    )
    group.add_argument(
        "--mmlu-cloze",
        action="store_true",
        help="also ask the MMLU questions among the tasks without letters, by the likelihood of the answers' texts (as "
        "lm-eval's mmlu_continuation): letters alone can be lost while the knowledge stays",
    )
    group.add_argument(
        "--recall",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also ask for needles in a haystack and for copies of random tokens (default: yes)",
    )
    group.add_argument(
        "--recall-lengths",
        type=arguments.listed(arguments.count),
        help="their lengths in tokens, with commas between (default: powers of two from 256 to 4096 that fit)",
    )
    group.add_argument(
        "--recall-questions",
        type=arguments.count,
        metavar="N",
        help="recall questions of each kind at each length, a multiple of 4 (default: 400 of each kind over all "
        "lengths; an arm that loses none and changes 4 %% of the answers is then shown to keep recall in 99 %% of "
        "cases if the model answers 90 %% right, in 53 %% if 65 %%)",
    )


def add_confirm(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """The option that splits a sweep's questions."""
    parser.add_argument(
        "--confirm",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="select the best arm of a sweep on one half of the questions and judge it on the other half (of the recall"
        " texts one of four selects); --no-confirm uses all questions for both, and does not correct the interval for"
        " the selection (default: --confirm)",
    )


def evaluate_config(options: argparse.Namespace, spec: ModelSpec) -> EvaluateConfig:
    """What an evaluation depends on, but for the tokens of a batch, which follow from the placement."""
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
