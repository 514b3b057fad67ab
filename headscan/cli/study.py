"""The verb study."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, ClassVar

from headscan.cli.option_parser import Given, UsageError, with_flags
from headscan.cli.results import Json, Result
from headscan.cli.verb_base import DEMO_CORPUS, Devices, OptionalModelVerb, quiet_libraries
from headscan.options import Group, Needs, Option
from headscan.settings.evaluation_settings import ResumeAnyway, TaskConfig
from headscan.study.study_config import StudyConfig, read_study, study_from
from headscan.text_tables import say


@dataclass(frozen=True, kw_only=True)
class Study(OptionalModelVerb):
    """find how many heads and how much KV cache can go, and write the smaller files

        headscan study MODEL --corpus texts/ --hours 2 --out study/
        headscan study smollm2 --corpus texts/ --hours 1
        headscan study --config study.yaml

    Scan, probe, importance, plans, pruning and the questions run in one command, on texts of your own or on tasks of
    lm-eval. The first lines say how long each step will take. The same command again resumes. The folder holds the
    answers, the plan, the pruned models, the report and the store.
    """

    common: ClassVar = (
        "MODEL --corpus --tasks --hours --out --max-tokens "
        "--shares --window-shares --prune-shares --questions --max-loss --config-file"
    )

    config_file: Annotated[
        str | None, Option("YAML or JSON file of settings; options replace them", flag="--config-file --config")
    ] = None
    corpus: Annotated[str | None, Option("file, folder, hub data set or built-in corpus")] = None
    judge: Annotated[str | None, Option("another corpus that judges (default: a part of the corpus)")] = None
    tasks: Annotated[
        tuple[str, ...],
        Option("comma-separated lm-eval tasks that judge (default: which passage continues a text of the corpus)"),
    ] = ()
    prompts: Annotated[Given[TaskConfig], Group(needs=(Needs(key="tasks"),))]
    settings: Annotated[Given[StudyConfig], Group()]
    json: Json = False
    devices: Annotated[Devices, Group("devices")]
    resume_anyway: ResumeAnyway = False
    resumes = True

    def run(self) -> Result:
        return study_result(self._config(), self.devices, resume_anyway=self.resume_anyway)

    def _config(self) -> StudyConfig:
        given: dict[str, Any] = dict(self.settings.values)
        given |= {name: value for name, value in (("corpus", self.corpus), ("judge", self.judge)) if value is not None}
        if self.tasks:
            given["tasks"] = {"names": self.tasks, **self.prompts.values}
        if self.model is not None:
            given["model"] = {**asdict(self.full_precision()), "source": self.model}
        if self.config_file is None:
            if self.model is None:
                raise UsageError("MODEL is required: name a model, or give --config with a file of settings")
            if self.is_demo:
                given = {"corpus": DEMO_CORPUS} | given
            if "corpus" not in given:
                raise UsageError("--corpus is required: name a file, a folder, a data set or a built-in corpus")
            return study_from(given)
        if self.model is None and self.loading.values:
            raise UsageError("options of the model need MODEL: name it, too, or set them in the file")
        known = read_study(self.config_file)
        config = study_from({"model": known.model.source, "corpus": known.corpus.name} | given)
        return replace(known, **{name: getattr(config, name) for name in given})


def study_result(config: StudyConfig, devices: Devices, *, resume_anyway: bool) -> Result:
    """Run a study in this process, and return its answers."""
    from headscan.texts import check_corpus

    for corpus in (config.corpus, config.judge):
        if corpus is not None:
            check_corpus(corpus.name)
    # The import loads torch, which takes seconds.
    from headscan.jobs import job_functions

    here = devices.in_this_process()
    quiet_libraries()
    answer = job_functions.study(
        config, devices=here.request, resume_anyway=resume_anyway, say=lambda line: say(with_flags(line, Devices))
    )
    return Result([answer.as_dict()], lambda: str(answer), {"out": str(config.out)})
