"""Failing and stuck workers and nodes: every item is done once, correctly."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headscan.cluster import devices, supervision
from headscan.cluster.placement_base import PlacementError, Timeouts
from headscan.cluster.placements import WholePlacement
from headscan.cluster.pool import InProcessPool, Pool
from headscan.cluster.ray_pool import RayPool
from headscan.cluster.ray_session import _check_port, import_ray, living_nodes
from headscan.cluster.supervision import Replica, SupervisedPool, replicas_that_fit
from headscan.model_spec import ModelSpec
from tests.cluster import tasks
from tests.cluster.conftest import ray_nodes
from tests.cluster.tasks import Job
from tests.sources import ROOT

TWO = WholePlacement(2, "cpu", 1)


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Any]:
    with ray_nodes(1, 1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def pool(two_nodes: Any, spec: ModelSpec) -> Iterator[Pool]:
    with RayPool(spec, TWO, timeouts=Timeouts(heartbeat=1.5)) as pool:
        yield pool


def quiet_values(spec: ModelSpec, jobs: Sequence[Job]) -> dict[int, list[float]]:
    with InProcessPool(spec, WholePlacement(1, "cpu", 1)) as local:
        return {done.item.number: done.value for done in local.map(tasks.measure, jobs)}


def values_of(pool: Pool, task: Any, jobs: Sequence[Job]) -> dict[int, list[float]]:
    done = list(pool.map(task, jobs))
    assert len({finished.item.number for finished in done}) == len(done), "an item came twice"
    return {finished.item.number: finished.value for finished in done}


@contextmanager
def killer(folder: Path, seed: int, kills: int) -> Iterator[list[int]]:
    """Kills workers at random moments while they run `tasks.slow_measure`, no item's twice; yields the killed."""
    generator, killed, left = random.Random(seed), [], threading.Event()

    def run() -> None:
        while len(killed) < kills and not left.wait(generator.uniform(0.05, 0.5)):
            marks = [path.stem.split("-") for path in folder.glob("*.running")]
            if victims := sorted((int(job), int(pid)) for job, pid in marks if int(job) not in killed):
                job, pid = generator.choice(victims)
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue  # the mark of one that died before
                killed.append(job)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield killed
    finally:
        left.set()
        thread.join()


def killed_at_random(pool: Pool, spec: ModelSpec, folder: Path, seed: int, kills: int) -> None:
    jobs = [Job(number, str(folder)) for number in range(5 * kills)]
    with killer(folder, seed, kills) as killed:
        found = values_of(pool, tasks.slow_measure, jobs)
    assert killed
    assert found == quiet_values(spec, jobs)


def test_the_memory_of_every_node_is_read(two_nodes: Any) -> None:
    """Here and not with the other tests of devices, because two nodes take long to start."""
    found = devices.ray_nodes(import_ray(local=True))
    assert [(node.gpus, node.cpus) for node in found] == [((), 1), ((), 1)]  # the head has nothing to share
    assert all(node.memory > 1 << 28 for node in found)


@pytest.mark.slow
def test_workers_killed_at_random_moments(pool: Pool, spec: ModelSpec, tmp_path: Path) -> None:
    killed_at_random(pool, spec, tmp_path, seed=0, kills=2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
def test_workers_killed_at_random_moments_many_times(pool: Pool, spec: ModelSpec, tmp_path: Path, seed: int) -> None:
    killed_at_random(pool, spec, tmp_path, seed=seed, kills=5)


# Either worker sends no heartbeat, so the pool replaces it in the same way.
@pytest.mark.parametrize("task", [pytest.param(tasks.stop_once, marks=pytest.mark.slow), tasks.stick_once])
def test_a_worker_that_hangs_is_replaced(pool: Pool, spec: ModelSpec, jobs: list[Job], task: Any) -> None:
    assert values_of(pool, task, jobs) == quiet_values(spec, jobs)
    hung = int((Path(jobs[0].folder) / "stopped").read_text())
    wait_for(lambda: not Path(f"/proc/{hung}").exists(), "the hung process is left")


def test_a_worker_that_takes_long_is_left_alone(pool: Pool, jobs: list[Job]) -> None:
    assert sorted(done.value for done in pool.map(tasks.take_long, jobs)) == list(range(6))
    assert len(list(Path(jobs[0].folder).glob("began-1-*"))) == 1


@pytest.mark.slow
def test_a_lost_node_leaves_the_other_one(
    two_nodes: Any,
    pool: Pool,
    spec: ModelSpec,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture,
) -> None:
    """Lost items run on the other node, which is reported; a later node is used."""
    jobs = [Job(number, str(tmp_path)) for number in range(60)]
    expected = quiet_values(spec, jobs)
    results = pool.map(tasks.slow_measure, jobs)
    found = {done.item.number: done.value for done in islice(results, 10)}
    lost = next(iter(two_nodes.worker_nodes))
    lost.kill_raylet()
    found |= {done.item.number: done.value for done in results}
    assert found == expected
    assert "room for 1 of 2 replicas; the run continues" in caplog.text
    printed = "".join(capfd.readouterr())
    assert "raylet" not in printed and "state-dump" not in printed and len(printed) < 2000
    two_nodes.remove_node(lost)
    two_nodes.add_node(num_cpus=1)
    workers = set()
    for done in pool.map(tasks.slow_measure, jobs * 5):
        workers.add(done.worker)
        if len(workers) == 2:
            break
    assert len(workers) == 2


def test_no_cluster_is_one_line_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(PlacementError, match=r"^no Ray cluster answers at 127\.0\.0\.1:9: .*\. Start one there"):
        _check_port("127.0.0.1:9", "no Ray cluster answers at 127.0.0.1:9")
    assert time.monotonic() - began < 5


@pytest.mark.slow
def test_without_ray_there_is_one_line() -> None:
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "from headscan.cli.main import main\n"
        "sys.exit(main(['scan', 'demo', '--corpus', 'python-stdlib', '--replicas', '2', '--limit-documents', '1']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("headscan: cannot import Ray")


def test_how_many_replicas_fit() -> None:
    nodes = [{"CPU": 4.0}, {"CPU": 2.0, "GPU": 1.0}]
    assert replicas_that_fit(nodes, [{"CPU": 2}], 8) == 3
    assert replicas_that_fit(nodes, [{"CPU": 3}], 8) == 1
    assert replicas_that_fit(nodes, [{"CPU": 3}, {"CPU": 2}], 8) == 1  # the stages of a pipeline on two nodes
    assert replicas_that_fit(nodes, [{"CPU": 0, "GPU": 1}], 8) == 1
    assert replicas_that_fit(nodes, [{"CPU": 0}], 8) == 8


def test_without_any_node_the_run_ends_with_one_line(two_nodes: Any, pool: Pool, jobs: list[Job]) -> None:
    for node in list(two_nodes.worker_nodes):
        node.kill_raylet()
    ray = import_ray(local=True)
    wait_for(lambda: not any(node.get("CPU") for node in living_nodes(ray)), "the nodes are not noticed to be lost")
    with pytest.raises(PlacementError, match=r"^no node of the Ray cluster has had room for a replica for \d+ s"):
        list(pool.map(tasks.measure, jobs))


def wait_for(reached: Any, what: str, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


class _SilentRay:
    """A replacement of Ray, with a clock: a node has room for an actor, but no actor ever answers."""

    exceptions = SimpleNamespace(
        **{
            name: type(name, (Exception,), {})
            for name in (
                "RayActorError",
                "OutOfMemoryError",
                "ObjectLostError",
                "ActorUnschedulableError",
                "RuntimeEnvSetupError",
            )
        }
    )

    def __init__(self) -> None:
        self.now, self.killed, self.closed = 0.0, 0, False
        self.ray = self  # the session, too

    def monotonic(self) -> float:
        return self.now

    def wait(self, references: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        self.now += 1.1 * timeout
        return [], references

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {}}]

    def available_resources(self) -> dict[str, float]:
        return {}

    def kill(self, actor: Any) -> None:
        self.killed += 1

    def lost(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True


class _SilentReplica(Replica):
    def __init__(self, ray: Any) -> None:
        super().__init__(ray, [SimpleNamespace(beat=self)])

    def options(self, **options: Any) -> Any:
        return SimpleNamespace(remote=object)

    def wants_more(self) -> bool:
        return True

    def submit(self, task: Any, job: Any) -> None:
        raise AssertionError("no item is sent before the first heartbeat")

    def references(self) -> list[Any]:
        return []

    def take(self, reference: Any) -> None:
        raise AssertionError("no result can arrive")

    def drop(self) -> None:
        self.jobs.clear()


class _SilentPool(SupervisedPool):
    """A pool whose replicas never start; ``room`` of them can be made."""

    def __init__(self, ray: Any, count: int, room: int) -> None:
        self.room = room
        super().__init__(ray, count, [{"GPU": 0, "CPU": 0}], Timeouts(start=300))

    def new_replica(self) -> Replica:
        if not self.room:
            raise PlacementError("no room")
        self.room -= 1
        return _SilentReplica(self._ray)


def test_every_minute_without_a_replica_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ray = _SilentRay()
    monkeypatch.setattr(supervision, "time", ray)
    pool = _SilentPool(ray, 1, 1)
    for _ in range(2):  # a second map begins to count again
        caplog.clear()
        with pytest.raises(PlacementError, match=r"^waiting for a replica on the Ray cluster: 30. s"):
            list(pool.map(tasks.measure, [Job(0, "")]))
        minutes = [re.search(r"since (\d+) s", message) for message in caplog.messages]
        assert [int(found[1]) // 60 for found in minutes if found is not None] == [1, 2, 3, 4]


def test_a_replica_that_cannot_be_made_closes_the_session() -> None:
    ray = _SilentRay()
    with pytest.raises(PlacementError, match="no room"):
        _SilentPool(ray, 3, 2)
    assert (ray.killed, ray.closed) == (2, True)
