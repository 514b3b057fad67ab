"""The verb evaluate."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from headscan.cli.option_parser import Given
from headscan.cli.results import Result, arm_row
from headscan.cli.task_options import DemoSize, TaskVerb, evaluation_of, replacement_of
from headscan.cli.verb_base import CORPORA, quiet_libraries
from headscan.options import Group, Needs, Option
from headscan.settings.corpus_settings import CorpusSpec
from headscan.settings.evaluation_settings import COMMON_SCORE, LOSS_LIMITS, ChosenArms, EvaluateConfig, LossTexts

if TYPE_CHECKING:
    from headscan.runs.model_identity import ModelIdentity

_DEMO = DemoSize(questions=400, recall=200, sequences=0)


_READ = (Needs(key="name"),)


@dataclass(frozen=True, kw_only=True)
class _HeldOut:
    """Text whose loss is judged next to the tasks."""

    name: Annotated[
        str | None,
        Option(
            f"text whose loss is judged, too, which needs fewer passes than accuracy: {CORPORA} (default: none)",
            flag="--held-out",
            metavar="CORPUS",
        ),
    ] = None
    texts: Annotated[Given[LossTexts], Group(needs=_READ)]
    max_loss: Annotated[
        float | None,
        Option(
            f"largest increase of that loss of a safe arm, in nats per token (default: {EvaluateConfig.max_loss:g})",
            above=LOSS_LIMITS.above,
            most=LOSS_LIMITS.most,
            needs=_READ,
        ),
    ] = None

    def judging(self, config: EvaluateConfig, identity: ModelIdentity | None) -> EvaluateConfig:
        """Return the settings of an evaluation that also reads the texts."""
        if self.name is None:
            return config
        from headscan.texts.held_out_text import HeldOutText

        texts = self.texts.build(CorpusSpec(self.name))
        text = HeldOutText.of_corpus(
            texts.corpus, config.model, sequences=texts.sequences, max_tokens=texts.max_tokens, identity=identity
        )
        return replace(config, text=text, max_loss=config.max_loss if self.max_loss is None else self.max_loss)


@dataclass(frozen=True, kw_only=True)
class Evaluate(TaskVerb):
    """ablate heads while lm-eval's tasks run, and compare with the baseline

        headscan evaluate MODEL --tasks mmlu --heads 3:5,7:0
        headscan evaluate MODEL --tasks mmlu --mask "gate 20% of texts 1a2b3c"
        headscan evaluate MODEL --tasks mmlu --score output_norm_ln --share 0.1 --rule --controls 19
        headscan evaluate MODEL --tasks mmlu --heads 3:5,7:0 --replace mean --corpus texts/
        headscan evaluate MODEL --tasks mmlu --plan head_plan.json --controls 19
        headscan evaluate MODEL --tasks mmlu --models pruned/,finetuned/
        headscan evaluate MODEL --tasks mmlu --heads 3:5,7:0 --held-out texts/

    An arm's heads are listed by hand, or chosen by a score or another criterion that a run in the store measured on
    the same model. A plan ablates no heads and shortens the KV cache. Other models, such as pruned ones, can answer the
    same questions. Without any of these only the baseline runs. The same command again resumes.
    """

    common: ClassVar = "MODEL --tasks --limit --heads --score --share --rule --plan --models --held-out --store --json"

    arms: Annotated[Given[ChosenArms], Group("arms")]
    held_out: Annotated[_HeldOut, Group("held-out text")]

    def __post_init__(self) -> None:
        super().__post_init__()
        if "plans" not in self.arms.values:
            # With plans, the options are checked when their files are read.
            self.chosen()

    def chosen(self, **others: Any) -> ChosenArms:
        """Return the arms; ``others`` are settings without an option."""
        given = self.arms.values
        if "share" in given or given.get("rule") or given.get("run_id"):
            others = {"criterion": COMMON_SCORE} | given | others
        return self.arms.build(**others)

    def run(self) -> Result:
        chosen = self.chosen(replacement=replacement_of(self.texts.kind, self.texts, self))
        if chosen.mask or chosen.criterion:
            self.store.check_exists()
        # The imports below load torch, which takes seconds.
        from headscan.jobs import job_functions
        from headscan.models.model_facts import check_bounds

        quiet_libraries()
        spec, identity = self.spec(), None
        if self.held_out.name is not None:
            spec, identity = self.identified()
        if chosen.heads:
            check_bounds(spec.config(), chosen.heads)
        options = self.job_options(identity)
        with tempfile.TemporaryDirectory() as scratch:
            config = evaluation_of(self, spec, Path(scratch), _DEMO)
            config = self.held_out.judging(config, identity)
            verdict = job_functions.evaluate(config, self.store.path, chosen, **options)
        facts = {"run_id": verdict.run_id, "store": self.store.path, "unfinished": verdict.unfinished}
        rows = [arm_row(arm) for arm in verdict.by_name.values()]
        return Result(rows, lambda: f"run {verdict.run_id} in {self.store.path}\n\n{verdict}", facts)
