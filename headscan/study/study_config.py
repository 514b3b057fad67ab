"""Settings of a study, and the file that records them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from headscan.catalog import CRITERIA, DEFAULT_SINK, IMPORTANCES, RECALL_NAMES, SCORES
from headscan.checkpoints.source_folder import portable_source
from headscan.errors import HeadscanError
from headscan.model_spec import ModelSpec
from headscan.options import BATCH_TOKENS, Count, Option, check_limits
from headscan.settings.corpus_settings import SHORTEST, CorpusSpec
from headscan.settings.evaluation_settings import MaxLoss, TaskConfig
from headscan.settings.measure_settings import RECALL_PROMPTS
from headscan.settings.settings_file import build_settings, settings_file
from headscan.store.verdict_limits import MAX_LOSS, MIN_TEXTS_IN_LIMIT
from headscan.text_tables import plain

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


@dataclass(frozen=True)
class StudyConfig:
    """Settings of a study.

    Attributes:
        corpus: Texts; one part measures, one chooses between criteria, and one judges.
        out: Folder for the store, the plans, the pruned models, the answers and the report; it becomes a `Path`.
        tasks: Tasks that judge; None asks which of four passages continues this one, on the judging texts.
        criteria: Scores and importances that may rank the heads; the best one on the choosing texts does. Repeated ones
            count once.
        shares: Shares of ablated heads; None tries those that the time allows, an empty tuple none. They are sorted,
            and repeated ones count once. The same holds for ``window_shares`` and ``prune_shares``.
        sequences: Texts that measure, and texts that calibrate plans and repairs; None takes as many as the time
            allows, at most `MOST_STUDY_TEXTS`.
        judge: Texts that judge instead of a part of ``corpus``; None uses the part.
        recall_questions: None asks as many as the time allows; 0 asks none, and measures on texts alone. None becomes 0
            if no question fits the texts or the tokenizer.
        search: Search for better plans with real windows; None does so if the time allows it.
        prune_by: ``damage``, ``criterion`` (the chosen one, which needs ``shares``), or None, which takes damage if the
            time allows it, or if there is no criterion.
        batch_tokens: Tokens of one forward pass, padding included.
    """

    model: ModelSpec
    corpus: CorpusSpec
    out: Annotated[str | Path, Option("output folder")] = "study"
    tasks: TaskConfig | None = None
    hours: Annotated[float, Option("time limit, in hours", above=0, most=1e6)] = 2.0
    max_tokens: Annotated[
        int | None,
        Option(f"longest text, in tokens (default: at most {LONGEST_STUDY_TEXT})", metavar="TOKENS", least=SHORTEST),
    ] = None
    criteria: Annotated[
        tuple[str, ...],
        Option("comma-separated scores that may rank the heads", kind="criterion", names=(*SCORES, *IMPORTANCES)),
    ] = ("output_norm_ln", "importance", "importance_recall")
    shares: Annotated[tuple[float, ...] | None, _shares("heads to ablate", 0.3)] = None
    window_shares: Annotated[tuple[float, ...] | None, _shares("KV heads that get a window", 0.75)] = None
    prune_shares: Annotated[tuple[float, ...] | None, _shares("heads to remove for good", 0.3)] = None
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
    questions: Annotated[int | None, Option("number of questions (default: as the time allows)", least=1)] = None
    recall_questions: Annotated[
        int | None,
        Option(
            f"questions of each recall task ({RECALL_NAMES}), a multiple of 4, or 0 (default: as the time allows)",
            least=0,
            multiple=4,
        ),
    ] = None
    max_loss: MaxLoss = MAX_LOSS
    judge: CorpusSpec | None = None
    search: Annotated[
        bool | None,
        Option("search for windows that cost less than those of least estimated damage (default: if the time allows)"),
    ] = None
    prune_by: Annotated[
        Literal["damage", "criterion"] | None,
        Option("what chooses the heads that are removed (default: damage if the time allows)"),
    ] = None
    batch_tokens: Count = BATCH_TOKENS

    def __post_init__(self) -> None:
        check_limits(self, StudyError)
        object.__setattr__(self, "out", Path(self.out))
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
        # A study that decides by itself records `search=False`, and a way to choose the removed heads, in any case.
        for name, shares, is_given in (
            ("criteria", "shares", self.criteria != StudyConfig.criteria),
            ("recent", "window_shares", self.recent is not None),
            ("search", "window_shares", bool(self.search)),
        ):
            if getattr(self, shares) == () and is_given:
                raise StudyError(f"`{name}` has no effect without `{shares}`: leave it out, or set `{shares}`")
        if self.tasks is not None and not self.tasks.names:
            raise StudyError("`tasks.names` is empty (limit 1 task). Name tasks, or leave out `tasks`")
        if self.prune_by == "criterion" and self.shares == ():
            raise StudyError(
                "`prune_by='criterion'` needs `shares` of heads to ablate, which choose the criterion. Set `shares`, or"
                " `prune_by='damage'`"
            )
        if not self.kind_count:
            raise StudyError("nothing to study: no shares. Set `shares`, `window_shares` or `prune_shares`")

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


#: Names of settings, by those that earlier versions wrote.
_RENAMED = {"tokens": "max_tokens"}


def study_from(settings: Mapping[str, Any]) -> StudyConfig:
    """Return settings from plain values, such as those of a file; settings by names of earlier versions, too."""
    for earlier in settings.keys() & _RENAMED.keys():
        if _RENAMED[earlier] in settings:
            raise StudyError(
                f"`{earlier}` is an earlier name of `{_RENAMED[earlier]}` (limit one of them). Leave it out"
            )
    return build_settings(StudyConfig, {_RENAMED.get(name, name): settings[name] for name in settings}, StudyError)


def read_study(path: str | Path) -> StudyConfig:
    """Read settings from a YAML or JSON file."""
    return study_from(settings_file(path, StudyError))


def write_study(path: Path, config: StudyConfig) -> None:
    """Write settings to a YAML file that `read_study` reads, in another installation, too."""
    import yaml

    from headscan.store.output_files import write_text

    settings = plain(config)
    settings["model"]["source"] = portable_source(config.model.source)
    write_text(path, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))


def resumed(path: Path, config: StudyConfig) -> StudyConfig | None:
    """Return the settings that an earlier call with the same settings wrote, with its decisions; None without an
    earlier call, StudyError for other settings. The hours are those of each call, and so are the places of model, texts
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
        corpus=replace(known.corpus, name=config.corpus.name),
    )
    if known.judge is not None and config.judge is not None:
        known = replace(known, judge=replace(known.judge, name=config.judge.name))
    asked = replace(config, **decided)
    if asked != known:
        names = [each.name for each in fields(config) if getattr(asked, each.name) != getattr(known, each.name)]
        raise StudyError(f"{path} records another study ({', '.join(names)} differ). Choose another folder as `out`")
    return known
