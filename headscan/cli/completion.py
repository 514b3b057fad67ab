"""The verb completion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from headscan.cli.option_parser import Parser, VerbParser
from headscan.options import Option


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

        from headscan.cli.main import VERBS, summary, verb_class

        parser = Parser(prog="headscan")
        verbs = parser.add_subparsers(parser_class=VerbParser)
        for verb in VERBS:
            verbs.add_parser(verb, cls=verb_class(verb), help=summary(verb))
        print(shtab.complete(parser, self.shell))
