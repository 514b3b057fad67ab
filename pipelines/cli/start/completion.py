"""print the script that completes verbs and options in a shell

    headscan completion bash > ~/.local/share/bash-completion/completions/headscan
    headscan completion zsh > ~/.zfunc/_headscan
    headscan completion fish > ~/.config/fish/completions/headscan.fish

A new shell reads the file. zsh needs `fpath=(~/.zfunc $fpath)` before `compinit` in ~/.zshrc. Make the file again
after an update of headscan.
"""

from __future__ import annotations

import argparse

#: Shells for which scripts can be written.
SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=f"shell: {', '.join(SHELLS)}")


def run(options: argparse.Namespace) -> None:
    import shtab

    print(shtab.complete(options.build_parser(lists_verbs=True), options.shell))
