"""Import Ray, start it here, or connect to a cluster."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from headscan.cluster.orphan_watch import OrphanWatch
from headscan.cluster.placement_base import PlacementError
from headscan.errors import TERMINAL_COLOURS, first_line

#: Timeouts of a connection to a port, and of an answer of a cluster since the connection began, in seconds.
_CONNECT_TIMEOUT, _ANSWER_TIMEOUT = 10.0, 25.0
#: What Ray prints on standard output about lost nodes and workers, up to 8 kB long, where the pool logs one line, and
#: about many workers that start at once.
_NOISE = (
    r"^Raylet is terminated|^The node with node id|^A worker died or was killed|^WARNING: \d+ PYTHON worker processes"
)
#: Python code that connects to a cluster. Ray retries for minutes, and writes its log to file descriptor 2.
_PROBE = """
import logging, sys
import ray
try:
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level=logging.ERROR)
except Exception as problem:
    sys.exit("failed: " + (str(problem).strip().splitlines() or [type(problem).__name__])[0])
"""
#: What Ray writes if a token is missing or wrong, and where it reads tokens and their use from.
_TOKEN_REFUSED = re.compile(r"InvalidAuthToken|no authentication token was found|authentication token is invalid")
_TOKEN_MODE, _TOKEN, _TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
#: What Ray writes about the address that it tries, which may differ from that of the user.
_TRIED = re.compile(r"at address (\S+?:\d+)")
#: Ray's own timeout for a start is 30 seconds, which a busy machine may exceed once.
_START_ATTEMPTS = 2
#: With fewer free bytes in the temporary folder, a failed start of Ray is blamed on the full folder.
_LEAST_FREE = 64 * 2**20


def import_ray(*, local: bool) -> Any:
    """Import and return the module ``ray``; ``local`` means that Ray runs on this machine only."""
    if local:
        # Ray reads this variable when it is imported. With 0 everything listens on 127.0.0.1; a node address of
        # 127.0.0.1 alone would be replaced by the machine's public one.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", _NOISE)
    try:
        import ray
    except ImportError as problem:
        raise PlacementError(
            f"cannot import Ray: {first_line(problem)}. Install it (pip install ray), or run one replica on this "
            "machine, which does not need Ray"
        ) from problem
    return ray


class RaySession:
    """The connected cluster, or a ``local`` Ray that ends with the session, listens on the loopback interface and has
    no dashboard. A local Ray has ``cpus`` CPUs, and the GPUs in ``choose_gpus()``, a value of CUDA_VISIBLE_DEVICES;
    None leaves it as it is.
    """

    def __init__(self, cpus: int, choose_gpus: Callable[[], str | None] = lambda: None) -> None:
        connected = (loaded := sys.modules.get("ray")) is not None and loaded.is_initialized()
        self.local = not connected
        self.ray = import_ray(local=self.local)
        self._cpus = cpus
        self._closed = False
        self._watch: OrphanWatch | None = None
        self._logs: Path | None = None
        # Chosen once: on a restart, actors of the lost Ray may still fill the memory of these GPUs.
        self._gpus = choose_gpus() if self.local else None
        if self.local:
            self._start()

    def lost(self) -> bool:
        """Return True if this is a local Ray whose node failed; only this session can restart it."""
        return self.local and not living_nodes(self.ray)

    def restart(self) -> None:
        """Restart a lost local Ray. Every actor and result of the old one is lost."""
        self._stop()
        self._start()

    def _start(self) -> None:
        # By default Ray gives its workers the lowest priority, but they do the command's own work.
        os.environ.setdefault("RAY_worker_niceness", "0")
        self._watch = OrphanWatch()
        try:
            with _visible_gpus(self._gpus), self._watch.marking():
                self._logs = start_local(self.ray, self._cpus)
        except BaseException:
            self._stop()
            raise

    def last_lines(self, failure: BaseException) -> str:
        """Return the last lines that the worker of a failed actor wrote, or else those of Ray's message, as one line.
        Workers of a cluster write on their own nodes.
        """
        pid = re.search(r"\bpid[:=]\s*(\d+)", str(failure))
        logs = [] if pid is None or self._logs is None else sorted(self._logs.glob(f"worker-*-{pid[1]}.err"))
        with suppress(OSError):
            for log in logs:
                if lines := _last(log.read_text(encoding="utf-8", errors="replace")):
                    return lines
        return _last(str(failure).partition("\n")[2])

    def _stop(self) -> None:
        self.ray.shutdown()
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def check(self, replicas: int, **amounts: float) -> None:
        """Raise, and close the session, if the cluster can never hold the replicas."""
        total = self.ray.cluster_resources()
        for kind, amount in amounts.items():
            if amount * replicas > total.get(kind, 0):
                self.close()
                raise PlacementError(
                    f"`replicas={replicas}` need {amount * replicas:g} {kind}s (limit {total.get(kind, 0):g} of the "
                    "Ray cluster). Lower `replicas`" + (", or use `device=cpu`" if kind == "GPU" else "")
                )

    def close(self) -> None:
        """End a local Ray."""
        if self.local and not self._closed:
            self._closed = True
            self._stop()


#: Last lines of a worker that a message shows, and their characters.
_LAST_LINES, _LAST_CHARACTERS = 3, 300


def _last(text: str) -> str:
    """Return the last lines of a text as one line, with the end of what is too long."""
    lines = [" ".join(line.split()) for line in TERMINAL_COLOURS.sub("", text).splitlines()]
    shown = " / ".join([line for line in lines if line][-_LAST_LINES:])
    return shown if len(shown) <= _LAST_CHARACTERS else f"...{shown[-_LAST_CHARACTERS:]}"


@contextmanager
def _visible_gpus(names: str | None) -> Iterator[None]:
    """Set CUDA_VISIBLE_DEVICES for the processes that start meanwhile; None leaves it as it is."""
    variable = "CUDA_VISIBLE_DEVICES"
    before = os.environ.get(variable)
    if names is not None:
        os.environ[variable] = names
    try:
        yield
    finally:
        if names is not None:
            del os.environ[variable]
            os.environ.update({} if before is None else {variable: before})


def connect(address: str) -> list[dict[str, float]]:
    """Connect to a running cluster; return each living node's resources. A process has one connection, which stays."""
    ray = import_ray(local=False)
    if ray.is_initialized():
        _check_same(ray, address)
    else:
        failure, began = f"no Ray cluster answers at {address}", time.monotonic()
        _check_port(address, failure)
        _check_answer(address, failure, began + _ANSWER_TIMEOUT)
        _init(ray, failure, address=address)
    return living_nodes(ray)


def _check_same(ray: Any, address: str) -> None:
    """Raise if Ray is connected to another cluster than that at ``address``."""
    # Ray Client (ray://) has ports of its own and reports no address, so there is nothing to compare.
    connected = getattr(ray.get_runtime_context(), "gcs_address", None)
    if address in ("auto", connected) or address.startswith("ray://") or connected is None:
        return
    here = ray.util.get_node_ip_address()
    if not _machines(address, here) & _machines(connected, here):
        raise PlacementError(
            f"this process is connected to the Ray cluster at {connected}, and cannot connect to {address} (limit 1"
            f" cluster). Pass `ray_address={connected}`, or call `ray.shutdown()` first"
        )


def _machines(address: str, here: str) -> set[tuple[str, str]]:
    """Return the IP addresses of a host, each with the port; ``here`` replaces those of the loopback interface."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        found = {str(each[4][0]) for each in socket.getaddrinfo(host, None)}
    except OSError:
        found = {host}
    return {(here if ip == "::1" or ip.startswith("127.") else ip, port) for ip in found}


def living_nodes(ray: Any) -> list[dict[str, float]]:
    """Return the resources of each living node."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _check_port(address: str, failure: str) -> None:
    """Raise if no process listens at ``host:port``. Ray itself would retry for many minutes."""
    if (named := re.fullmatch(r"(?:ray://)?\[?(.+?)\]?:(\d+)", address)) is None:
        return  # "auto" and similar: Ray finds the cluster or fails at once
    try:
        socket.create_connection((named[1], int(named[2])), timeout=_CONNECT_TIMEOUT).close()
    except (OSError, OverflowError) as problem:
        raise PlacementError(
            f"{failure}: {first_line(problem)}. Start one there with `ray start --head`, or run without a cluster"
        ) from problem


def _check_answer(address: str, failure: str, deadline: float) -> None:
    """Raise if another process cannot connect by ``deadline`` (`time.monotonic`); its output is not shown."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        attempt = subprocess.Popen(
            [sys.executable, "-c", _PROBE, address], stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        said = ""
        try:
            while attempt.poll() is None and time.monotonic() < deadline and not _TOKEN_REFUSED.search(said):
                time.sleep(0.1)
                said = _content(output)
            ended = attempt.poll()
        finally:
            attempt.kill()
            attempt.wait()
        said = _content(output)
    if ended == 0:
        return
    if _TOKEN_REFUSED.search(said):
        raise PlacementError(_token_needed(address))
    failed = re.search(r"^failed: (.*)", said, re.MULTILINE)
    reason = "the port is open, but nothing answers as Ray does" if failed is None else failed[1]
    others = sorted(set(_TRIED.findall(said)) - {address.removeprefix("ray://")})
    reason += f" (Ray tried {', '.join(others)})" * bool(others)
    raise PlacementError(
        f"{failure}: {reason}. Check the address with `ray status --address {address}`, and that both sides have one"
        " version of Ray"
    )


def _content(file: Any) -> str:
    file.seek(0)
    return str(file.read())


def _token_needed(address: str) -> str:
    """Return the message for a cluster that refuses a connection without its token."""
    mode, file = os.environ.get(_TOKEN_MODE), os.environ.get(_TOKEN_PATH) or str(Path.home() / ".ray" / "auth_token")
    place = f"the variable {_TOKEN}" if os.environ.get(_TOKEN) else file
    if (mode or "token").lower() == "token" and (os.environ.get(_TOKEN) or Path(file).is_file()):
        return (
            f"the Ray cluster at {address} refuses the token in {place}. Put the token there that `ray get-auth-token`"
            " prints on the cluster's first machine"
        )
    here = f"{_TOKEN_MODE} is {mode or 'not set'} and there is no {file}"
    if (mode or "token").lower() != "token":
        here = f"{_TOKEN_MODE} is {mode}"
    return (
        f"the Ray cluster at {address} needs a token, but here {here}. Set {_TOKEN_MODE}=token, and copy the token of"
        f" the cluster's first machine (`ray get-auth-token`) to {file}, or name its file in {_TOKEN_PATH}"
    )


def start_local(ray: Any, cpus: int) -> Path:
    """Start a local Ray on the loopback interface, without a dashboard; return the folder of its logs."""
    options = {"address": "local", "num_cpus": cpus, "include_dashboard": False}
    for attempt in range(1, _START_ATTEMPTS + 1):
        try:
            started = _init(ray, "a local Ray does not start", **options)
            return Path(started.address_info["session_dir"]) / "logs"
        except PlacementError as problem:
            ray.shutdown()
            remedy = _start_remedy(problem)
            if remedy is None and attempt < _START_ATTEMPTS:
                continue
            remedy = remedy or "Run the same command again when the machine is less busy, or use one replica (no Ray)"
            raise PlacementError(f"{problem}. {remedy}") from problem
    raise AssertionError("every attempt returns or raises")


def _start_remedy(problem: PlacementError) -> str | None:
    """Return the fix for a permanent failure; None if retrying may help."""
    folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    if "AF_UNIX" in str(problem):
        return f"Set TMPDIR to a shorter path than {folder}, for example /tmp"
    free = shutil.disk_usage(folder).free
    if free < _LEAST_FREE:
        return f"{folder} has {free >> 20} MiB free. Free some space there, or set TMPDIR to another folder"
    return None


def _init(ray: Any, failure: str, **options: Any) -> Any:
    handler = signal.getsignal(signal.SIGTERM)
    try:
        return ray.init(log_to_driver=False, logging_level=logging.ERROR, configure_logging=True, **options)
    except Exception as problem:  # Ray raises bare Exception, RuntimeError, OSError and others for a failed start
        raise PlacementError(f"{failure}: {first_line(problem)}") from problem
    finally:
        # Ray replaces the handler of the process by one that exits at once; one that the program has set stays.
        if callable(handler) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
