"""The verbs demo and completion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from headscan.options import Group, Option
from headscan.pipelines.cli.verb_base import quiet_libraries, say
from headscan.pipelines.settings.evaluation_settings import DemoConfig


@dataclass(frozen=True, kw_only=True)
class Demo:
    """run the whole pipeline on the bundled model: scan, rank, plan, ablate, evaluate, judge, generate, report

        headscan demo
        headscan demo --share 0.2 --controls 19

    It needs no GPU and no download, and takes about four minutes on two CPU cores. The folder headscan-demo holds the
    store, the plan and the report. The same command again resumes.
    """

    settings: Annotated[DemoConfig, Group()]

    def run(self) -> None:
        from headscan.pipelines.demo.run_demo import run_demo

        quiet_libraries()
        run_demo(self.settings, say=say)


@dataclass(frozen=True, kw_only=True)
class Completion:
    """print the script that completes verbs and options in a shell

        headscan completion bash > ~/.local/share/bash-completion/completions/headscan
        headscan completion zsh > ~/.zfunc/_headscan
        headscan completion fish > ~/.config/fish/completions/headscan.fish

    A new shell reads the file. zsh needs `fpath=(~/.zfunc $fpath)` before `compinit` in ~/.zshrc. Make the file again
    after an update of headscan.
    """

    shell: Annotated[Literal["bash", "zsh", "fish"], Option("shell: bash, zsh, fish", flag="shell", metavar="SHELL")]

    def run(self) -> None:
        import shtab

        from headscan.pipelines.cli.main import build_parser

        print(shtab.complete(build_parser(lists_verbs=True), self.shell))
