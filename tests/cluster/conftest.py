"""A small model, and several Ray nodes on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from headscan.cluster import devices
from headscan.cluster.ray_session import import_ray
from headscan.model_spec import ModelSpec
from tests.cluster.tasks import Job
from tests.small_models import make_model


@pytest.fixture(scope="session")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    folder = tmp_path_factory.mktemp("pool") / "model"
    make_model("llama").save_pretrained(folder)
    return ModelSpec(str(folder))


@pytest.fixture
def jobs(tmp_path: Path) -> list[Job]:
    return [Job(number, str(tmp_path)) for number in range(6)]


@contextmanager
def ray_nodes(*cpus: int) -> Iterator[Any]:
    """A connected Ray cluster of a head without CPUs and nodes with so many."""
    ray = import_ray(local=True)
    from ray.cluster_utils import Cluster

    # A lost node is to be noticed in seconds, and one that is only slow is not lost.
    noticing = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 8}
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": noticing}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for count in cpus:
            cluster.add_node(num_cpus=count)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def wait_for(reached: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were two GPUs, the second with more free memory."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(devices, "_ASK_GPUS", "print(1000); print(2000)")
