"""The verb demo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from headscan.cli.results import Json, Result
from headscan.cli.study import study_result
from headscan.cli.verb_base import DEMO_CORPUS, Devices
from headscan.cluster.placement_base import PlacementRequest, Timeouts
from headscan.model_spec import ModelSpec
from headscan.options import Option
from headscan.settings.corpus_settings import CorpusSpec
from headscan.settings.evaluation_settings import ResumeAnyway
from headscan.study.study_config import StudyConfig


@dataclass(frozen=True, kw_only=True)
class Demo:
    """study the bundled model: how many of its heads, and how much of its KV cache, can go

        headscan demo
        headscan demo --questions 400 --out quick/

    The same steps as `headscan study MODEL`, with settings that take about four minutes on two CPU cores. It needs no
    GPU and no download. The folder holds the answers, the plan, the pruned models, the report and the store. The same
    command again resumes.
    """

    out: Annotated[str, Option("output folder")] = "headscan-demo"
    questions: Annotated[int, Option("most questions that judge", least=1)] = 750
    json: Json = False
    resume_anyway: ResumeAnyway = False
    resumes = True

    def run(self) -> Result:
        return study_result(
            self.study(), Devices(request=PlacementRequest(), timeouts=Timeouts()), resume_anyway=self.resume_anyway
        )

    def study(self) -> StudyConfig:
        """Return the settings of the study. Modules of the training data measure; those that judge are unseen."""
        return StudyConfig(
            ModelSpec("demo", "float32"),
            CorpusSpec("python-stdlib-modules"),
            judge=CorpusSpec(DEMO_CORPUS),
            out=self.out,
            hours=0.25,
            max_tokens=192,
            shares=(0.02, 0.05),
            window_shares=(0.125, 0.25),
            prune_shares=(0.05,),
            sequences=32,
            judged_texts=48,
            questions=self.questions,
            recall_questions=460,
            search=False,
            prune_by="damage",
        )
