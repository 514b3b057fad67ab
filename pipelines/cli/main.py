"""The command ``headscan``: run a verb, and report errors.

An error of the user is one line, with exit code 2.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from types import ModuleType

from headscan.pipelines.cli.deliver import export, generate, plan, prune
from headscan.pipelines.cli.intervene import ablate, evaluate, referee, sweep
from headscan.pipelines.cli.measure import gates, importance, probe, scan
from headscan.pipelines.cli.query import compare, rank, report, roles, sql, status
from headscan.pipelines.cli.shared import arguments
from headscan.pipelines.cli.shared.flag_names import with_flags
from headscan.pipelines.cli.start import completion, demo, models, place
from headscan.pipelines.runs.openmp import share_cores
from headscan.pipelines.runs.text_tables import printable

#: Verbs in the order in which a user needs them.
_GROUPS = {
    "start": (demo, models, place, completion),
    "measure": (scan, probe, importance, gates),
    "query": (status, sql, rank, roles, compare, report),
    "intervene": (evaluate, sweep, ablate, referee),
    "deliver": (prune, plan, generate, export),
}
_VERBS = tuple(module for group in _GROUPS.values() for module in group)


def build_parser(*, lists_verbs: bool = False) -> argparse.ArgumentParser:
    """Return the parser of all verbs, built without importing torch.

    Args:
        lists_verbs: argparse lists the verbs, as shell completion needs it; the help page has its own list by group.
    """
    parser = arguments.Parser(
        prog="headscan",
        usage="headscan VERB [options]",
        description="Measure, ablate and rank the attention heads of a language model.",
        epilog=_verb_list(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    listed = "verb" if lists_verbs else argparse.SUPPRESS
    verbs = parser.add_subparsers(dest="verb", prog="headscan", metavar="VERB", help=listed)
    for module in _VERBS:
        verb = verbs.add_parser(
            _name(module),
            help=_summary(module),
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(verb)
        verb.usage = _usage(verb)
        verb.set_defaults(command=module.run, build_parser=build_parser)
    return parser


def _name(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2]


def _summary(module: ModuleType) -> str:
    """Return the help line of a verb."""
    return (module.__doc__ or "").strip().splitlines()[0]


def _verb_list() -> str:
    """Return the verbs by group, each with its help line."""
    lines = []
    for group, modules in _GROUPS.items():
        lines.append(f"{group}:")
        lines += [f"  {_name(module):<12}{_summary(module)}" for module in modules]
    return "\n".join([*lines, "", "Begin with `headscan demo`. Each verb has its own help: `headscan scan --help`."])


def _usage(parser: argparse.ArgumentParser) -> str:
    """Return a usage line with the required arguments only.

    The options of a verb fill a screen.
    """
    needed = [
        " ".join([*action.option_strings[-1:], str(action.metavar or action.dest.upper())])
        for action in parser._actions
        if action.required
    ]
    return " ".join([parser.prog, *needed, "[options]"])


def main(command_line: Sequence[str] | None = None) -> int:
    """Run a command line; None uses the arguments of the process.

    Returns:
        The exit code: 0; 2 for an error of the user; 3 if some named parts failed and the rest is done; 130 if
        interrupted.
    """
    share_cores()
    parser = build_parser()
    try:
        options = parser.parse_args(command_line)
    except arguments.UsageError as problem:
        return _fail(str(problem), problem.exit_code)
    if options.version:
        from headscan.pipelines.runs.run_records import code_version

        print(f"headscan {code_version()}")
        return 0
    if options.verb is None:
        parser.print_help()
        return 2
    from headscan.errors import HeadscanError

    try:
        _run(options)
        sys.stdout.flush()
    except HeadscanError as problem:
        return _fail(with_flags(str(problem), vars(options)), problem.exit_code)
    except OSError as problem:
        if isinstance(problem, BrokenPipeError):
            # The reader closed the pipe. Python would report that again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        place = f" ({problem.filename})" if problem.filename else ""
        return _fail(f"{problem.strerror or problem}{place}")
    except KeyboardInterrupt:
        print("interrupted: stored results are kept; run the same command again to resume", file=sys.stderr)
        return 130
    return 0


def _run(options: argparse.Namespace) -> None:
    """Run a verb and print its result, if it returns one."""
    as_json = getattr(options, "json", False)
    if as_json:
        # Libraries print, too; standard output holds the JSON object alone.
        with redirect_stdout(sys.stderr):
            result = options.command(options)
    else:
        result = options.command(options)
    if result is not None:
        result.print(as_json=as_json)


def _fail(message: str, code: int = 2) -> int:
    print(f"headscan: {printable(' '.join(message.split()))}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
