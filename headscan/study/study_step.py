"""The step study, and the file that records its settings."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Unpack

from headscan.catalog import CRITERIA, DEFAULT_SINK, IMPORTANCES, RECALL_NAMES, SCORES
from headscan.errors import HeadscanError
from headscan.grid import Unit
from headscan.options import Group, Option, check_limits, short
from headscan.settings.corpus_settings import DEMO_CORPUS, SHORTEST, CorpusSpec
from headscan.settings.evaluation_settings import LOSS_LIMITS, POINT_LIMITS, RECALL_PROMPTS, TASK_TOKENS, TaskConfig
from headscan.settings.option_values import file_values, make_settings
from headscan.settings.saving_settings import Engine
from headscan.steps.results import Result
from headscan.steps.step import Step
from headscan.store.verdict_limits import MARGIN, MAX_LOSS, MIN_TEXTS_IN_LIMIT
from headscan.text_tables import plain

if TYPE_CHECKING:
    from headscan.runs.model_identity import ModelIdentity
    from headscan.runs.run_context import Run
    from headscan.steps.open_run import JobOptions
    from headscan.store.store import Store
    from headscan.study.study_answer import StudyAnswer

#: Fewest texts that measure, and most if the time decides.
FEWEST_STUDY_TEXTS, MOST_STUDY_TEXTS = 8, 64
#: Longest text by default, in tokens.
LONGEST_STUDY_TEXT = 512
#: Fewest texts that judge if the time decides: more than `MIN_TEXTS_IN_LIMIT`, because some may be of one document.
FEWEST_JUDGED_TEXTS = MIN_TEXTS_IN_LIMIT + 4
#: Settings with the shares of each kind of saving.
SHARE_SETTINGS = ("shares", "window_shares", "prune_shares")


def _shares(of: str, most: float) -> Option:
    """Return the option of a kind of saving; the word ``none`` leaves it out."""
    text = f"comma-separated shares of {of}, or `none` (default: up to {most:g}, as the time allows)"
    return Option(text, above=0, below=1, sets={"none": ()})


class StudyError(HeadscanError):
    """A study that cannot be made with these settings."""


@short
@dataclass(frozen=True)
class Study(Step["StudyAnswer"]):
    """find how many heads and how much KV cache can go, and write the smaller files

        headscan study MODEL --corpus texts/ --hours 2 --out study/
        headscan study smollm2 --corpus texts/ --hours 1 --dry-run
        headscan study --config-file study.yaml

    Scan, probe, importance, plans, pruning and the questions run in one command, on texts of your own or on tasks of
    lm-eval. The first lines say how long each step will take. The same command again resumes. The folder holds the
    answers, the plan, the pruned models, the report and the store.

    Attributes:
        corpus: Texts; one part measures, one chooses between criteria, and one judges.
        out: Folder for the store, the plans, the pruned models, the answers and the report; it becomes a `Path`.
        tasks: Tasks that judge; without names, questions ask which of four passages continues this one, on the judging
            texts.
        criteria: Scores and importances that may rank the heads; the best one on the choosing texts does. Repeated ones
            count once.
        shares: Shares of ablated heads; None tries those that the time allows, an empty tuple none. They are sorted,
            and repeated ones count once. The same holds for ``window_shares`` and ``prune_shares``.
        sequences: Texts that measure, and texts that calibrate plans and repairs; None takes as many as the time
            allows, at most `MOST_STUDY_TEXTS`.
        judge: Texts that judge instead of a part of ``corpus``; None uses the part.
        recall_questions: None asks as many as the time allows; 0 asks none, and measures on texts alone. None becomes 0
            if no question fits the texts or the tokenizer.
        max_questions: Questions up to which later calls with more hours may ask, at looks that are planned before the
            first question (`headscan.verdicts.looks`); None asks no more than ``questions`` where these are given.
        search: Search for better plans with real windows; None does so if the time allows it.
        engine: What serves the result; savings that it does not serve are not tried. None takes vLLM, because
            transformers serves its pruned models and plans, too, and llama.cpp the pruned models; transformers if vLLM
            does not serve all that is tried.
        unit: What is removed at once; None removes groups, because single query heads free no KV cache.
        prune_by: ``damage``, ``criterion`` (the chosen one, which needs ``shares``), or None, which takes damage if the
            time allows it, or if there is no criterion.
    """

    common: ClassVar = (
        "MODEL --corpus --tasks --hours --out --max-tokens "
        "--shares --window-shares --prune-shares --for --questions --max-loss --max-points --config-file"
    )
    stores: ClassVar = ("resume_anyway",)
    evaluates: ClassVar = True

    corpus: Annotated[CorpusSpec | None, Group("corpus")] = None
    out: Annotated[str | Path, Option("output folder")] = "study"
    tasks: Annotated[TaskConfig, Group("tasks")] = field(default_factory=TaskConfig)
    hours: Annotated[float, Option("time limit of all calls in a folder, in hours", above=0, most=1e6)] = 2.0
    max_tokens: Annotated[
        int | None, Option(f"longest text, in tokens (default: at most {LONGEST_STUDY_TEXT})", least=SHORTEST)
    ] = None
    criteria: Annotated[
        tuple[str, ...],
        Option("comma-separated scores that may rank the heads", kind="criterion", names=(*SCORES, *IMPORTANCES)),
    ] = ("output_norm_ln", "importance", "importance_recall")
    shares: Annotated[tuple[float, ...] | None, _shares("heads to ablate", 0.3)] = None
    window_shares: Annotated[tuple[float, ...] | None, _shares("KV heads that get a window", 0.75)] = None
    prune_shares: Annotated[
        tuple[float, ...] | None, _shares("the KV groups, or of --unit, to remove for good", 0.3)
    ] = None
    recent: Annotated[int | None, Option("recent tokens of a window (default: 1/8 of a text)", least=1)] = None
    sequences: Annotated[
        int | None,
        Option(
            f"texts that measure (default: as the time allows, at most {MOST_STUDY_TEXTS})", least=FEWEST_STUDY_TEXTS
        ),
    ] = None
    judged_texts: Annotated[
        int | None,
        Option(
            f"texts whose loss is judged (default: as many as measure, at least {FEWEST_JUDGED_TEXTS})",
            least=MIN_TEXTS_IN_LIMIT,
        ),
    ] = None
    questions: Annotated[
        int | None, Option("number of questions, or 0: loss and recall alone (default: as the time allows)", least=0)
    ] = None
    recall_questions: Annotated[
        int | None,
        Option(
            f"questions of each recall task ({RECALL_NAMES}), a multiple of 4, or 0 (default: as the time allows)",
            least=0,
            multiple=4,
        ),
    ] = None
    max_questions: Annotated[
        int | None,
        Option(
            "number of questions up to which more hours may ask (default: `--questions`; as many as show a harmless "
            "share to be safe if the time decides)",
            least=0,
        ),
    ] = None
    max_recall_questions: Annotated[
        int | None, Option("the same for the questions of each recall task", least=0, multiple=4)
    ] = None
    max_loss: Annotated[
        float,
        Option(
            "largest increase of the held-out loss of a safe arm, in nats per token",
            above=LOSS_LIMITS.above,
            most=LOSS_LIMITS.most,
        ),
    ] = MAX_LOSS
    max_points: Annotated[
        float,
        Option(
            "largest loss of accuracy of a safe arm, in percentage points",
            metavar="POINTS",
            above=POINT_LIMITS.above,
            below=POINT_LIMITS.below,
        ),
    ] = MARGIN
    judge: Annotated[
        CorpusSpec | None,
        Option("another corpus that judges (default: a part of the corpus)", metavar="CORPUS", parse=CorpusSpec),
    ] = None
    search: Annotated[
        bool | None,
        Option("search for windows that cost less than those of least estimated damage (default: if the time allows)"),
    ] = None
    prune_by: Annotated[
        Literal["damage", "criterion"] | None,
        Option("what chooses the heads that are removed (default: damage if the time allows)"),
    ] = None

    engine: Annotated[
        Engine | None,
        Option(
            "serving engine of the result: vllm (transformers serves the same files, and llama.cpp the pruned models), "
            "llama.cpp (pruned models alone), or transformers (default: vllm if it serves all that is tried, else "
            "transformers)",
            flag="--for",
        ),
    ] = None
    unit: Annotated[
        Unit | None,
        Option(
            "unit of removal: head: single query heads, which free no cache; group: KV heads with their query heads; "
            "layer: whole attentions (default: group)"
        ),
    ] = None

    dry_run: Annotated[bool, Option("print the steps and their times, and keep nothing")] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", TaskConfig.of(self.tasks))
        check_limits(self, StudyError)
        object.__setattr__(self, "model", self.model.in_full_precision())
        object.__setattr__(self, "out", Path(self.out))
        if self.corpus is None:
            if not self.model.is_demo:
                raise StudyError("`corpus` is required: name a file, a folder, a data set or a built-in corpus")
            object.__setattr__(self, "corpus", CorpusSpec(DEMO_CORPUS))
        self.tasks.check_effect("bos", "include_path")
        object.__setattr__(self, "criteria", tuple(dict.fromkeys(self.criteria)))
        for name in SHARE_SETTINGS:
            if getattr(self, name) is None:
                continue
            values = tuple(sorted(set(getattr(self, name))))
            object.__setattr__(self, name, values)
        if self.shares != () and not self.criteria:
            raise StudyError("criteria are empty (limit 1). Name a score or an importance")
        if self.shares != () and not self.ranking:
            raise StudyError(f"{self.criteria[0]} needs recall questions (`recall_questions=0`). Name other criteria")
        widest = None if self.max_tokens is None else self.max_tokens - DEFAULT_SINK - 1
        if self.window_shares != () and widest is not None and (self.recent or 1) > widest:
            raise StudyError(
                f"`recent={self.recent}` (limit {widest} in texts of {self.max_tokens} tokens, of which a window also "
                f"keeps the first {DEFAULT_SINK}). Lower `recent`, or raise `max_tokens`"
            )
        for name, most in (("questions", self.max_questions), ("recall_questions", self.max_recall_questions)):
            asked = getattr(self, name)
            if asked is not None and most is not None and most < asked:
                raise StudyError(f"`max_{name}={most}` (limit {asked}, `{name}`). Raise it, or leave it out")
        # A study that decides by itself records `search=False`, and a way to choose the removed heads, in any case.
        for name, shares, is_given in (
            ("criteria", "shares", self.criteria != Study.criteria),
            ("recent", "window_shares", self.recent is not None),
            ("search", "window_shares", bool(self.search)),
            ("unit", "prune_shares", self.unit is not None),
        ):
            if getattr(self, shares) == () and is_given:
                raise StudyError(f"`{name}` has no effect without `{shares}`: leave it out, or set `{shares}`")
        if self.prune_by == "criterion" and self.shares == ():
            raise StudyError(
                "`prune_by='criterion'` needs `shares` of heads to ablate, which choose the criterion. Set `shares`, or"
                " `prune_by='damage'`"
            )
        if not self.kind_count:
            raise StudyError("nothing to study: no shares. Set `shares`, `window_shares` or `prune_shares`")

    @property
    def in_this_process(self) -> bool:
        return True

    @property
    def texts(self) -> CorpusSpec:
        """The corpus, which a study always has."""
        assert self.corpus is not None
        return self.corpus

    def longest(self, identity: ModelIdentity) -> int:
        return max(TASK_TOKENS, self.max_tokens or 0)

    def run(self, store: str | Path | None = None, **options: Unpack[JobOptions]) -> StudyAnswer:
        """Run the study; its store is ``study.duckdb`` in its folder. A dry run returns the times of its steps."""
        if store is not None:
            raise StudyError(f"`store={store}`: a study has its own store, `study.duckdb` in `out`. Leave out `store`")
        if not self.dry_run:
            return super().run(Path(self.out) / "study.duckdb", **options)
        with tempfile.TemporaryDirectory() as folder:
            return super(Study, replace(self, out=folder)).run(Path(folder) / "study.duckdb", **options)

    def execute(self, run: Run) -> StudyAnswer:
        from headscan.steps.prune.work_folder import claimed
        from headscan.study.run_study import planned_study, run_study

        if self.dry_run:
            return planned_study(self, run)
        with claimed(Path(self.out), Path(self.out), StudyError):
            return run_study(self, run)

    def shown(self, result: StudyAnswer, store: Store) -> Result:
        return Result([result.as_dict()], lambda: str(result), {"out": str(self.out)})

    @property
    def ranking(self) -> tuple[str, ...]:
        """The criteria without those that need recall questions, if there are none."""
        return tuple(name for name in self.criteria if self.recall_questions != 0 or not CRITERIA[name].on_recall)

    @property
    def recall_prompts(self) -> int:
        """Number of prompts of each recall task that measure."""
        return 0 if self.recall_questions == 0 else RECALL_PROMPTS

    @property
    def kind_count(self) -> int:
        """Number of kinds of savings; the questions judge all of them, so they divide the error."""
        return sum(getattr(self, name) != () for name in SHARE_SETTINGS)


def read_study(path: str | Path) -> Study:
    """Read settings from a YAML or JSON file."""
    return make_settings(Study, file_values(Study, path))


def write_study(path: Path, config: Study) -> None:
    """Write settings to a YAML file that `read_study` reads."""
    import yaml

    from headscan.store.output_files import write_text

    settings = plain(config)
    settings["for"] = settings.pop("engine")  # a field cannot have the name of this option
    write_text(path, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))


def resumed(path: Path, config: Study) -> Study | None:
    """Return the settings that an earlier call with the same settings wrote, with its decisions; None without an
    earlier call, StudyError for other settings. The hours are those of this call, and so are the places of model, texts
    and folder, whose contents the study compares.
    """
    if not path.exists():
        return None
    known = read_study(path)
    # What was None may have been decided since.
    decided = {each.name: getattr(known, each.name) for each in fields(config) if getattr(config, each.name) is None}
    known = replace(
        known,
        hours=config.hours,
        out=config.out,
        model=replace(known.model, source=config.model.source),
        corpus=replace(known.texts, name=config.texts.name),
    )
    if known.judge is not None and config.judge is not None:
        known = replace(known, judge=replace(known.judge, name=config.judge.name))
    asked = replace(config, **decided)
    if asked != known:
        names = [each.name for each in fields(config) if getattr(asked, each.name) != getattr(known, each.name)]
        raise StudyError(
            f"{path} records another study (differing: {', '.join(names)}). Choose another folder as `out`"
        )
    return known
