"""Starting, losing and leaving a local Ray."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from headscan.cluster import ray_session
from headscan.cluster.devices import roomiest_names
from headscan.cluster.placement_base import PlacementError, Timeouts
from headscan.cluster.placements import WholePlacement
from headscan.cluster.ray_pool import RayPool
from headscan.cluster.ray_session import _check_answer, _check_port, connect, import_ray, start_local
from headscan.model_spec import ModelSpec
from tests.cluster import tasks
from tests.cluster.conftest import wait_for
from tests.cluster.tasks import Job
from tests.sources import ROOT


class FailingRay:
    """A replacement of Ray whose first starts fail."""

    def __init__(self, *failures: Exception) -> None:
        self.failures, self.starts, self.shutdowns = list(failures), 0, 0

    def init(self, **options: Any) -> SimpleNamespace:
        self.starts += 1
        if self.failures:
            raise self.failures.pop(0)
        return SimpleNamespace(address_info={"session_dir": "/nowhere"})

    def shutdown(self) -> None:
        self.shutdowns += 1


SLOW = "The current node timed out during startup. This could happen because some of the raylet failed to startup"


def test_a_start_that_was_too_slow_is_tried_again() -> None:
    ray = FailingRay(Exception(SLOW))
    start_local(ray, 1)
    assert (ray.starts, ray.shutdowns) == (2, 1)


def test_the_program_s_handler_of_sigterm_stays_and_the_default_is_ray_s_to_replace() -> None:
    class Taking(FailingRay):
        def init(self, **options: Any) -> SimpleNamespace:
            signal.signal(signal.SIGTERM, rays)
            return super().init(**options)

    def own(*_: object) -> None: ...

    def rays(*_: object) -> None: ...

    before = signal.getsignal(signal.SIGTERM)
    try:
        for handler, kept in ((own, own), (signal.SIG_DFL, rays)):
            signal.signal(signal.SIGTERM, handler)
            start_local(Taking(), 1)
            assert signal.getsignal(signal.SIGTERM) == kept
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("folder", "free", "failure", "message", "starts"),
    [
        ("", 1 << 40, Exception(SLOW), r"^a local Ray does not start: .* Run the same command again when", 2),
        ("long" * 30, 1 << 40, OSError("AF_UNIX path length"), "Set TMPDIR to a shorter path than /tmp/longlong", 1),
        ("", 1 << 20, RuntimeError("Timed out"), "has 1 MiB free. Free some space there, or set TMPDIR to another", 1),
    ],
)
def test_a_start_that_fails_is_one_line(
    folder: str, free: int, failure: Exception, message: str, starts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", f"/tmp/{folder}")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    ray = FailingRay(failure, failure)
    with pytest.raises(PlacementError, match=message) as error:
        start_local(ray, 1)
    assert "\n" not in str(error.value)
    assert (ray.starts, ray.shutdowns) == (starts, starts)


def test_without_ray_and_without_a_cluster_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    with pytest.raises(PlacementError, match=r"^no Ray cluster answers at 127\.0\.0\.1:9: .*\. Start one there"):
        _check_port("127.0.0.1:9", "no Ray cluster answers at 127.0.0.1:9")
    assert time.monotonic() - began < 5
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PlacementError, match=r"^cannot import Ray") as error:
        import_ray(local=False)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
@pytest.mark.parametrize("name", ["heartbeat", "start"])
def test_timeouts_are_positive(name: str, seconds: float) -> None:
    with pytest.raises(PlacementError, match=rf"^`{name}=\S+` \(limit "):
        Timeouts(**{name: seconds})


def test_ray_ends_with_a_killed_command() -> None:
    code = "from headscan.cluster.ray_session import RaySession; import time; s = RaySession(1); "
    code += "print('up', flush=True); time.sleep(600)"
    command = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert command.stdout is not None
    assert command.stdout.readline() == "up\n"
    started = psutil.Process(command.pid).children(recursive=True)
    names = {process.name() for process in started}
    assert "raylet" in names
    assert len(started) > 4, names
    command.send_signal(signal.SIGKILL)
    command.wait()
    # The watching process gives the agents 2 seconds to end by themselves; without it they stay for 61 seconds.
    _, left = psutil.wait_procs(started, timeout=20)
    assert not left


@pytest.mark.slow
def test_a_failed_local_ray_is_restarted(
    spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The loss of the node is noticed in seconds; Ray's default takes a quarter of a minute.
    monkeypatch.setenv("RAY_health_check_period_ms", "500")
    jobs = [Job(number, str(tmp_path)) for number in range(60)]
    with RayPool(spec, WholePlacement(1, "cpu", 1)) as pool:
        results = pool.map(tasks.slow_measure, jobs)
        first = next(results)
        for child in psutil.Process().children():
            if child.name() == "raylet":
                os.kill(child.pid, signal.SIGKILL)
        found = {first.item.number: first.value} | {done.item.number: done.value for done in results}
    assert found == tasks.quiet_values(spec, jobs)
    assert "the local Ray failed; restarting it" in caplog.text


class IdleRay(FailingRay):
    """A replacement of Ray that is connected to a cluster, or not."""

    def __init__(self, *, connected: bool) -> None:
        super().__init__()
        self.connected = connected

    def is_initialized(self) -> bool:
        return self.connected


@pytest.mark.parametrize("connected", [False, True])
def test_a_session_is_local_unless_a_cluster_is_connected(monkeypatch: pytest.MonkeyPatch, connected: bool) -> None:
    ray = IdleRay(connected=connected)
    monkeypatch.setitem(sys.modules, "ray", ray)
    # setenv first, so that the variable is restored even if the session sets it.
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "")
    monkeypatch.delenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")
    found = ray_session.RaySession(1)
    assert (ray.starts, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" in os.environ) == (int(not connected), not connected)
    for _ in range(2):
        found.close()
        assert found.local is not connected
    assert ray.shutdowns == int(not connected)


@pytest.mark.parametrize(
    ("before", "count", "seen"),
    [(None, 1, "1"), ("GPU-a,GPU-b", 1, "GPU-b"), ("4,7", 2, "4,7"), (None, 2, None), ("4,7", 0, "4,7")],
)
def test_a_local_ray_has_the_gpus_with_most_room(
    before: str | None, count: int, seen: str | None, two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    class Recording(IdleRay):
        def init(self, **options: Any) -> SimpleNamespace:
            found.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
            return super().init(**options)

    monkeypatch.setitem(sys.modules, "ray", Recording(connected=False))
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before or "")
    if before is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    ray_session.RaySession(1, partial(roomiest_names, count)).close()
    assert (found, os.environ.get("CUDA_VISIBLE_DEVICES")) == ([seen], before)


class ConnectedRay(IdleRay):
    """A replacement of Ray that is connected to the cluster at an address."""

    def __init__(self, address: str | None) -> None:
        super().__init__(connected=True)
        self.context = SimpleNamespace(gcs_address=address) if address else SimpleNamespace()
        self.util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.5")

    def get_runtime_context(self) -> SimpleNamespace:
        return self.context

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 1.0}}]


@pytest.mark.parametrize(
    ("connected", "address"),
    [
        ("first.invalid:6379", "first.invalid:6379"),
        ("10.0.0.5:6379", "auto"),
        ("10.0.0.5:6379", "127.0.0.1:6379"),
        ("10.0.0.5:6379", "localhost:6379"),
        ("127.0.0.1:6379", "[::1]:6379"),
        ("10.0.0.5:6379", "ray://first.invalid:10001"),
        (None, "first.invalid:6379"),
    ],
)
def test_a_connection_is_used_again(monkeypatch: pytest.MonkeyPatch, connected: str | None, address: str) -> None:
    monkeypatch.setitem(sys.modules, "ray", ConnectedRay(connected))
    assert connect(address) == [{"CPU": 1.0}]


@pytest.mark.parametrize("address", ["10.0.0.6:6379", "10.0.0.5:6380", "second.invalid:6379", "127.0.0.1:6380"])
def test_another_cluster_than_the_connected_one_is_refused(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setitem(sys.modules, "ray", ConnectedRay("10.0.0.5:6379"))
    message = f"^this process is connected to the Ray cluster at 10.0.0.5:6379, and cannot connect to {address} "
    with pytest.raises(PlacementError, match=message):
        connect(address)


def test_a_session_that_cannot_watch_its_ray_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def watch() -> None:
        raise OSError("no more processes")

    ray = IdleRay(connected=False)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    monkeypatch.setattr(ray_session, "OrphanWatch", watch)
    with pytest.raises(OSError, match="no more processes"):
        ray_session.RaySession(1)
    assert (ray.starts, ray.shutdowns) == (0, 0)


def test_a_watch_ends_with_a_failed_start(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, marks = IdleRay(connected=False), set(os.environ)
    ray.failures = [OSError("AF_UNIX path length")]
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    monkeypatch.setenv("RAY_worker_niceness", "0")
    before = psutil.Process().children()
    with pytest.raises(PlacementError, match="Set TMPDIR to a shorter path"):
        ray_session.RaySession(1)
    assert "HEADSCAN_LOCAL_RAY" not in {*os.environ} - marks
    wait_for(lambda: psutil.Process().children() == before, "the watching process goes on")


class DyingWorker:
    """A worker whose process ends before its first heartbeat."""

    def __init__(self, spec: ModelSpec, target: str, threads: int) -> None:
        print("cannot open shared library libgpu.so", file=sys.stderr, flush=True)
        os._exit(7)

    def beat(self) -> str:
        return "never"


class DyingPool(RayPool):
    worker = DyingWorker


class RefusingWorker(DyingWorker):
    """A worker that raises an error of its own before its first heartbeat."""

    def __init__(self, spec: ModelSpec, target: str, threads: int) -> None:
        raise RuntimeError("the driver is too old")


class RefusingPool(RayPool):
    worker = RefusingWorker


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "words"),
    [(DyingPool, "cannot open shared library libgpu.so"), (RefusingPool, "RuntimeError: the driver is too old")],
)
def test_a_replica_that_never_starts_shows_the_last_lines_of_its_worker(
    spec: ModelSpec, tmp_path: Path, kind: type[RayPool], words: str
) -> None:
    with (
        kind(spec, WholePlacement(1, "cpu", 1)) as pool,
        pytest.raises(
            PlacementError, match=rf"^a replica failed to start 3 times: .* Its last lines: .*{words}"
        ) as error,
    ):
        list(pool.map(tasks.measure, [Job(0, str(tmp_path))]))
    assert "\n" not in str(error.value) and len(str(error.value)) < 800


def failing_probe(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Let the attempt to connect write lines, as Ray's own log does, and wait for ever."""
    code = f"import os, time\nos.write(2, {chr(10).join(lines).encode()!r})\ntime.sleep(600)"
    monkeypatch.setattr(ray_session, "_PROBE", code)


def test_a_port_that_never_answers_is_one_line(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(ray_session, "_ANSWER_TIMEOUT", 4.0)
    with socket.create_server(("127.0.0.1", 0)) as server:  # the backlog accepts, and nothing reads
        address = f"127.0.0.1:{server.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(
            PlacementError, match=f"^no Ray cluster answers at {address}: the port is open, but nothing"
        ):
            connect(address)
    assert time.monotonic() - began < 15
    assert capfd.readouterr() == ("", "")
    assert ray_session._ANSWER_TIMEOUT < 30


REFUSED = (
    "[W 1 1] gcs_client.cc:210: Failed to get cluster ID: RPC error: InvalidAuthToken: Authentication token is missing"
)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "needs a token, but here RAY_AUTH_MODE is not set and there is no /home/me/.ray/auth_token. Set RAY_AUTH"),
        ({"RAY_AUTH_MODE": "token"}, "RAY_AUTH_MODE is token and there is no /home/me/.ray/auth_token. Set RAY_AUTH_M"),
        ({"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "x"}, "but here RAY_AUTH_MODE is disabled. Set RAY_AUTH_MODE"),
        ({"RAY_AUTH_TOKEN_PATH": "/keys/mine"}, "RAY_AUTH_MODE is not set and there is no /keys/mine. Set RAY_AUTH_MO"),
        (
            {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "x"},
            "refuses the token in the variable RAY_AUTH_TOKEN. Put the",
        ),
        ({"RAY_AUTH_TOKEN_PATH": __file__}, f"refuses the token in {__file__}. Put the token there that `ray get-auth"),
    ],
)
def test_a_cluster_with_tokens_is_named(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)
    failing_probe(monkeypatch, REFUSED)
    began = time.monotonic()
    with pytest.raises(PlacementError, match=r"^the Ray cluster at 10\.1\.2\.3:6379 ") as error:
        _check_answer("10.1.2.3:6379", "no answer", began + 30)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert time.monotonic() - began < 20
    assert capfd.readouterr() == ("", "")


def test_the_address_that_ray_tries_is_named_next_to_that_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    failing_probe(monkeypatch, "[W 1 1] rpc_client.h:153: Failed to connect to GCS at address 10.9.9.9:6379 within 5 s")
    with pytest.raises(
        PlacementError, match=r"^no Ray cluster answers at localhost:6379: .* \(Ray tried 10.9.9.9:6379\)"
    ):
        _check_answer("localhost:6379", "no Ray cluster answers at localhost:6379", time.monotonic() + 2)


@pytest.mark.slow
def test_a_real_cluster_with_tokens(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "token").write_text("0123456789abcdef" * 2)
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    own["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    own["HOME"] = str(tmp_path)  # which has no token of an earlier Ray
    tokens = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    words = f"start --head --node-ip-address 127.0.0.1 --port {port} --num-cpus 1 --object-store-memory 80000000"
    words += " --include-dashboard false --disable-usage-stats --block --temp-dir"
    code = "import sys; from ray.scripts.scripts import main; main()"
    with tempfile.TemporaryDirectory(prefix="rs", dir="/tmp") as folder:  # a longer path exceeds that of a socket
        head = subprocess.Popen(
            [sys.executable, "-c", code, *words.split(), folder], env=own | tokens, stdout=-3, stderr=-3, cwd=ROOT
        )
        try:
            ask = "import sys; from headscan.cluster.ray_session import connect; print(len(connect(sys.argv[1])))"
            ask = [sys.executable, "-c", ask, f"127.0.0.1:{port}"]  # type: ignore[assignment]
            deadline = time.monotonic() + 120
            while True:
                done = subprocess.run(ask, env=own | tokens, capture_output=True, text=True, cwd=ROOT)
                if done.returncode == 0 or time.monotonic() > deadline:
                    break
                time.sleep(1)
            assert done.stdout == "1\n", done.stderr
            done = subprocess.run(ask, env=own, capture_output=True, text=True, cwd=ROOT)
            assert f"the Ray cluster at 127.0.0.1:{port} needs a token" in done.stderr
            assert "InvalidAuthToken" not in done.stderr
        finally:
            family = [*psutil.Process(head.pid).children(recursive=True), psutil.Process(head.pid)]
            for process in family:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            head.wait()
            psutil.wait_procs(family, timeout=20)
