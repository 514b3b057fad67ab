"""End the processes that a killed command's local Ray leaves.

Ray's servers end with the command, but the two agents of its node retry for a minute to report that failure to a server
that has ended. A separate small process, which runs this file, ends them after a few seconds.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress

import psutil

#: Seconds to wait for the agents to end on their own, and then after a request to end.
_GRACE = 2.0


class OrphanWatch:
    """A process that ends the agents of this process's local Ray."""

    def __init__(self) -> None:
        raylets = [child for child in psutil.Process().children() if child.name() == "raylet"]
        agents = [str(agent.pid) for raylet in raylets for agent in raylet.children()]
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, *agents],  # by path: it imports nothing of this package
            stdin=subprocess.PIPE,  # closes when this process ends, in any way
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that an interrupt from the terminal does not end it
        )

    def close(self) -> None:
        """End the remaining agents and the watching process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(4 * _GRACE)


def end_with_command(agents: list[psutil.Process]) -> None:
    """Wait until standard input closes, then end the remaining agents."""
    sys.stdin.read()
    _, left = psutil.wait_procs(agents, _GRACE)
    for agent in left:
        with suppress(psutil.NoSuchProcess):
            agent.terminate()
    _, left = psutil.wait_procs(left, _GRACE)
    for agent in left:
        with suppress(psutil.NoSuchProcess):
            agent.kill()


if __name__ == "__main__":
    end_with_command([psutil.Process(int(pid)) for pid in sys.argv[1:] if psutil.pid_exists(int(pid))])
