"""``headscan``: finds the verb, runs it, and turns what a user can mend into one line and exit code 2."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from headscan.pipelines.cli.deliver import export, plan
from headscan.pipelines.cli.intervene import evaluate, sweep
from headscan.pipelines.cli.measure import probe, scan
from headscan.pipelines.cli.query import compare, rank, report, sql, status
from headscan.pipelines.cli.shared import arguments
from headscan.pipelines.cli.start import demo, models, place
from headscan.pipelines.runs.openmp import share_cores
from headscan.pipelines.runs.terminal import printable

_VERBS = (place, scan, status, sql, rank, compare, probe, evaluate, sweep, plan, export, report, models, demo)


def build_parser() -> argparse.ArgumentParser:
    """The parser with all verbs; building it imports nothing heavy."""
    parser = arguments.Parser(
        prog="headscan",
        description="Measure, ablate and rank the attention heads of a language model.",
        epilog="Begin with `headscan demo`. Every verb explains itself: `headscan scan --help`.",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    for module in _VERBS:
        name = module.__name__.rpartition(".")[2]
        help_line = (module.__doc__ or "").strip().splitlines()[0]
        verb = verbs.add_parser(
            name, help=help_line, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(verb)
        verb.set_defaults(command=module.run)
    return parser


def main(command_line: Sequence[str] | None = None) -> int:
    """Run a command line; None takes that of the process.

    Returns:
        The exit code: 0, 2 for what a user can mend, 3 when all but some named parts is done, 130 when interrupted.
    """
    share_cores()
    parser = build_parser()
    try:
        options = parser.parse_args(command_line)
    except arguments.UsageError as problem:
        return _fail(str(problem), problem.exit_code)
    if options.version:
        from headscan.pipelines.runs.software import code_version

        print(f"headscan {code_version()}")
        return 0
    if options.verb is None:
        parser.print_help()
        return 2
    from headscan.analysis.errors import AnalysisError
    from headscan.errors import HeadscanError

    try:
        options.command(options)
        sys.stdout.flush()
    except (HeadscanError, AnalysisError) as problem:
        return _fail(str(problem), problem.exit_code if isinstance(problem, HeadscanError) else 2)
    except OSError as problem:
        if isinstance(problem, BrokenPipeError):
            # Whoever read our output has enough; Python would complain once more at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        place = f" ({problem.filename})" if problem.filename else ""
        return _fail(f"{problem.strerror or problem}{place}")
    except KeyboardInterrupt:
        print("interrupted: what is stored stays, and the same command goes on from there", file=sys.stderr)
        return 130
    return 0


def _fail(message: str, code: int = 2) -> int:
    print(f"headscan: {printable(' '.join(message.split()))}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
