"""End the processes that a killed command's local Ray leaves.

Ray's servers end with the command, but the two agents of its node retry for a minute to report that failure to a server
that has ended. A separate small process, which runs this file, ends them after a few seconds. It starts before Ray and
finds the agents by a variable in their environment, so that a command that is killed while Ray starts leaves none.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

#: Seconds to wait for the processes to end on their own, and then after a request to end.
_GRACE = 2.0
#: Variable in the environment of every process of a local Ray.
_MARK = "HEADSCAN_LOCAL_RAY"


class OrphanWatch:
    """A process that ends what is left of this process's local Ray, which starts within `marking`."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, self._mark],  # by path: it imports nothing of this package
            stdin=subprocess.PIPE,  # closes when this process ends, in any way
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that an interrupt from the terminal does not end it
        )

    @contextmanager
    def marking(self) -> Iterator[None]:
        """Mark the processes that start meanwhile, and theirs."""
        # The agents change their titles, which overwrites the environment that others see unless SPT_NOENV is set.
        marks = {_MARK: self._mark, "SPT_NOENV": "1"}
        before = {name: os.environ.get(name) for name in marks}
        os.environ.update(marks)
        try:
            yield
        finally:
            for name, value in before.items():
                del os.environ[name]
                os.environ.update({} if value is None else {name: value})

    def close(self) -> None:
        """End the remaining processes and the watching one."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(4 * _GRACE)


def _marked(mark: str) -> list[psutil.Process]:
    """Return Ray's processes with a mark. Others that the command started while Ray did may have it, too."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(_MARK) == mark and "ray" in " ".join(process.cmdline()):
                found.append(process)
    return found


def end_with_command(mark: str) -> None:
    """Wait until standard input closes, then end the remaining processes of the local Ray with this mark."""
    sys.stdin.read()
    psutil.wait_procs(_marked(mark), _GRACE)
    for end in (psutil.Process.terminate, psutil.Process.kill):
        left = _marked(mark)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                end(process)
        psutil.wait_procs(left, _GRACE)


if __name__ == "__main__":
    end_with_command(sys.argv[1])
