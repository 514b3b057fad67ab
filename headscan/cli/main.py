"""The command ``headscan``: run a verb, and report an error of the user as one line, with exit code 2."""

from __future__ import annotations

import os
import platform
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib import import_module, metadata
from types import FrameType
from typing import Any

from headscan.cli.option_parser import Parser, UsageError, read_settings, with_flags
from headscan.cli.verb_base import check_inputs, step_verb
from headscan.errors import HeadscanError, unknown_name
from headscan.text_tables import printable

#: The verbs by group, in the order in which a user needs them: a step, or a file of this folder and its class.
_GROUPS = {
    "start": ("demo", "study", "models", "place", "completion"),
    "measure": ("scan", "probe", "importance", "gates"),
    "query": ("status", "sql", "merge", "rank", "roles", "compare", "report"),
    "intervene": ("evaluate", "sweep", "ablate", "referee"),
    "deliver": ("prune", "plan", "generate", "export"),
}
VERBS = tuple(verb for group in _GROUPS.values() for verb in group)
#: Modules of the verbs that are steps.
STEPS = {
    **{
        verb: f"headscan.steps.{verb}"
        for verb in ("scan", "probe", "importance", "gates", "evaluate", "sweep", "ablate", "plan", "generate")
    },
    "referee": "headscan.steps.referee.referee_step",
    "prune": "headscan.steps.prune.prune_step",
    "study": "headscan.study.study_step",
}


def verb_class(verb: str) -> type:
    """Return the class of a verb; only its file is imported."""
    if verb in STEPS:
        return step_verb(getattr(import_module(STEPS[verb]), verb.capitalize()))
    cls: type = getattr(import_module(f"headscan.cli.{verb}"), verb.capitalize())
    return cls


def read_command(words: Sequence[str]) -> Any:
    """Return the verb of a command line with its settings."""
    cls = verb_class(words[0])
    return read_settings(words[0], cls, words[1:])


def summary(verb: str) -> str:
    """Return the help line of a verb."""
    return (verb_class(verb).__doc__ or "").strip().splitlines()[0]


def verb_list() -> str:
    """Return the verbs by group, each with its help line; their files are imported, but no torch."""
    lines = []
    for group, verbs in _GROUPS.items():
        lines.append(f"{group}:")
        lines += [f"  {verb:<12}{summary(verb)}" for verb in verbs]
    return "\n".join([*lines, "", "Begin with `headscan demo`. Each verb has its own help: `headscan scan --help`."])


def main(command_line: Sequence[str] | None = None) -> int:
    """Run a command line (None: the arguments of the process). Return the exit code: 0; 2 for an error of the user; 3
    if some named parts failed and the rest is done; 130 if interrupted, by Ctrl-C or by SIGTERM.
    """
    with _sigterm_interrupts():
        return _run_words(sys.argv[1:] if command_line is None else list(command_line))


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM, with which Slurm and `timeout` end a command, interrupt it as Ctrl-C does. A handler that the
    process has stays.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    process, interrupted = os.getpid(), False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if os.getpid() != process:  # forked children end as without a handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not interrupted:  # `timeout` sends the signal twice, and the second would stop the storing of results
            interrupted = True
            raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _run_words(words: list[str]) -> int:
    """Run the words of a command line; see `main`."""
    try:
        if not words or words[0] not in VERBS:
            return _without_verb(words)
        verb = read_command(words)
    except UsageError as problem:
        return _fail(str(problem), problem.exit_code)
    try:
        _run(verb)
        sys.stdout.flush()
    except HeadscanError as problem:
        return _fail(with_flags(str(problem), type(verb)), problem.exit_code)
    except OSError as problem:
        if isinstance(problem, BrokenPipeError):
            # The reader closed the pipe. Python would report that again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        place = f" ({problem.filename})" if problem.filename else ""
        return _fail(f"{problem.strerror or problem}{place}")
    except KeyboardInterrupt:
        resumes = getattr(verb, "resumes", False)
        kept = ": stored results are kept; run the same command again to resume" if resumes else ""
        print(f"interrupted{kept}", file=sys.stderr)
        return 130
    return 0


def _without_verb(words: Sequence[str]) -> int:
    """Answer a command line that does not begin with a verb: help, the version, or an error."""
    if words and not words[0].startswith("-"):
        raise UsageError(str(unknown_name("verb", words[0], VERBS)))
    parser = Parser(prog="headscan", usage="headscan VERB [options]", add_help=False)
    parser.description = "Measure, ablate and rank the attention heads of a language model."
    parser.add_argument("-h", "--help", action="store_true", help="this page")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.add_argument("--verbose", action="store_true", help="with --version: libraries and devices")
    options = parser.parse_args(words)
    if options.version:
        from headscan.runs.code_version import code_version

        print(f"headscan {code_version()}")
        if options.verbose:
            print("\n".join(_surroundings()))
        return 0
    parser.epilog = verb_list()
    parser.print_help()
    if options.help:
        parser.exit()
    return 2


def _surroundings() -> list[str]:
    """Return lines about the libraries, the devices and the threads."""
    import torch

    from headscan.cluster.devices import this_machine
    from headscan.cluster.placement_base import format_bytes

    lines = [f"Python {platform.python_version()} on {platform.platform()}"]
    for name in ("torch", "transformers", "accelerate", "ray", "datasets", "lm-eval", "duckdb", "gguf"):
        try:
            lines.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            lines.append(f"{name} is not installed")
    here = this_machine()
    lines.append(
        f"{here.cpus} CPU cores, {torch.get_num_threads()} torch threads, {format_bytes(here.memory)} usable RAM"
    )
    gpus = [f"GPU {torch.cuda.get_device_name(i)}, {format_bytes(free)} usable" for i, free in enumerate(here.gpus)]
    return lines + (gpus or ["no GPU"])


def _run(verb: Any) -> None:
    check_inputs(verb)
    as_json = getattr(verb, "json", False)
    if as_json:
        # Libraries print, too; standard output holds the JSON object alone.
        with redirect_stdout(sys.stderr):
            result = verb.run()
    else:
        result = verb.run()
    if result is not None:
        result.print(as_json=as_json)


def _fail(message: str, code: int = 2) -> int:
    print(f"headscan: {printable(' '.join(message.split()))}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
