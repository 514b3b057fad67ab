"""The verb demo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from headscan.cli.verb_base import quiet_libraries
from headscan.model_spec import ModelSpec
from headscan.options import Option
from headscan.settings.corpus_settings import DEMO_CORPUS, CorpusSpec
from headscan.settings.evaluation_settings import ResumeAnyway
from headscan.steps.results import Json, Result
from headscan.study.study_step import Study


@dataclass(frozen=True, kw_only=True)
class Demo:
    """study the bundled model: how many of its heads, and how much of its KV cache, can go

        headscan demo
        headscan demo --questions 400 --out quick/

    The same steps as `headscan study MODEL`, with settings that take about eight minutes on two CPU cores. It needs no
    GPU and no download. The folder holds the answers, the plan, the pruned models, the report and the store. The same
    command again resumes.
    """

    out: Annotated[str, Option("output folder")] = "headscan-demo"
    questions: Annotated[int, Option("most questions that judge", least=1)] = 750
    json: Json = False
    resume_anyway: ResumeAnyway = False
    resumes = True

    def run(self) -> Result:
        quiet_libraries()
        answer = self.study().run(resume_anyway=self.resume_anyway)
        return Result([answer.as_dict()], lambda: str(answer), {"out": self.out})

    def study(self) -> Study:
        """Return the settings of the study. Modules of the training data measure; those that judge are unseen."""
        return Study(
            ModelSpec("demo", "float32"),
            CorpusSpec("python-stdlib-modules"),
            judge=CorpusSpec(DEMO_CORPUS),
            out=self.out,
            hours=1.0,
            max_tokens=192,
            shares=(0.02, 0.05),
            window_shares=(0.125, 0.33),
            prune_shares=(0.08,),  # one step of a layer: 2 of 24 KV groups
            sequences=32,
            judged_texts=48,
            questions=self.questions,
            recall_questions=460,
            search=False,
            prune_by="damage",
        )
