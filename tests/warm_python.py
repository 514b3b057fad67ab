"""Processes that are forked from one that has imported torch and transformers.

These imports take five seconds of CPU. A forked process has nothing of headscan or of the test's process, so it stands
for a new one wherever the import of the libraries is not what is tested.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import types
from collections.abc import Sequence
from functools import cache
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.sources import ROOT

_MODELS = "transformers.models"
_PRELOADED = ["torch", "transformers", f"{_MODELS}.auto.modeling_auto", f"{_MODELS}.llama.modeling_llama"]


@cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def _be_python(words: Sequence[str], out: str, err: str) -> None:
    """Do what ``python`` does with these words, which begin with ``-c`` or ``-m``."""
    os.setsid()
    os.chdir(ROOT)
    for number, path in enumerate((os.devnull, out, err)):
        os.dup2(os.open(path, os.O_WRONLY if number else os.O_RDONLY), number)
    sys.stdin = open(0)  # noqa: SIM115
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = ["-c", *words[2:]]
    exec(compile(words[1], "<string>", "exec"), vars(main))


class WarmProcess:
    """A process that runs ``python`` with these words in the repository's root, in a session of its own."""

    def __init__(self, *words: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.out, self.err = (Path(self._folder.name) / name for name in ("out", "err"))
        for path in (self.out, self.err):
            path.touch()
        self.process: BaseProcess = _context().Process(target=_be_python, args=(words, str(self.out), str(self.err)))
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid

    def line(self, beginning: str = "") -> str | None:
        """Wait for a whole line with this beginning and return the first; return None if the process ends without."""
        while True:
            ended = not self.process.is_alive()
            for line in self.out.read_text("utf-8").splitlines(keepends=True):
                if line.startswith(beginning) and line.endswith("\n"):
                    return line.rstrip("\n")
            if ended:
                return None
            self.process.join(0.02)

    def result(self) -> subprocess.CompletedProcess[str]:
        """Wait for the end; a negative exit code is a signal's."""
        self.process.join()
        code = self.process.exitcode
        assert code is not None
        found = [path.read_text("utf-8") for path in (self.out, self.err)]
        self._folder.cleanup()
        return subprocess.CompletedProcess([], code, *found)


def run_python(*words: str) -> subprocess.CompletedProcess[str]:
    """Run ``python`` with these words to its end."""
    return WarmProcess(*words).result()
