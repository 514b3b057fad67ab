"""Where a model runs: devices, placement, pool."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from headscan.pipelines.cli.shared import arguments

if TYPE_CHECKING:
    from headscan.cluster.placement.choose import Placement, PlacementRequest, Plan
    from headscan.cluster.placement.devices import Node
    from headscan.cluster.tasks.pool import Pool
    from headscan.model_spec import ModelSpec
from headscan.pipelines.cli.shared.options import say

#: Shortest silence of a worker that can be told from a busy machine, in seconds.
_LEAST_SILENCE = 1.0


def add_devices(parser: argparse.ArgumentParser) -> None:
    """Where the replicas run."""
    group = parser.add_argument_group("devices")
    group.add_argument(
        "--device", type=arguments.device, default="auto", help="auto, cpu, cuda or cuda:N (default: auto)"
    )
    group.add_argument(
        "--placement",
        choices=("auto", "whole", "sharded", "pipeline", "streamed"),
        default="auto",
        help="whole: a copy a device; sharded: a copy over GPUs of one node; pipeline: layer ranges on devices of any "
        "nodes; streamed: one range of layers at a time on one device (default: the first of these that fits)",
    )
    group.add_argument(
        "--replicas", type=arguments.count, help="copies of the model (default: as many as the GPUs hold, one on a CPU)"
    )
    group.add_argument(
        "--gpus-per-replica", type=arguments.count, help="GPUs of a sharded copy (default: the fewest that fit)"
    )
    group.add_argument("--stages", type=arguments.count, help="stages of a pipeline (default: the fewest that fit)")
    group.add_argument(
        "--memory",
        type=arguments.byte_size,
        help="what streaming may take of its device, such as 2GiB (default: what is free)",
    )
    group.add_argument(
        "--offload",
        choices=("cpu", "disk"),
        help="where a sharded copy keeps the layers that its devices have no room for (default: nowhere)",
    )
    group.add_argument(
        "--ray-address", help="a running Ray cluster (default: a local Ray when there are several replicas)"
    )
    group.add_argument(
        "--silence-limit",
        type=arguments.seconds(_LEAST_SILENCE),
        default=300.0,
        metavar="SECONDS",
        help="heartbeat timeout of Ray workers, in seconds (default: 300)",
    )
    group.add_argument(
        "--start-timeout",
        type=arguments.seconds(_LEAST_SILENCE),
        default=600.0,
        metavar="SECONDS",
        help="longest wait for a first worker on a Ray cluster, in seconds (default: 600)",
    )
    group.add_argument(
        "--batch-tokens",
        type=arguments.count,
        help="tokens of one forward pass, padding included (default: 8192, or what there is room for within --memory)",
    )


def placement(options: argparse.Namespace, spec: ModelSpec, *, tokens: int, evaluates: bool = False) -> Plan:
    """Where to run, said to the user before anything is loaded, and the tokens of a forward pass.

    They are those that are asked for, whatever is free now, so that the same command resumes a run; where the memory is
    named instead, they follow from that.

    Args:
        tokens: Of the longest sequence.
        evaluates: Tasks are answered.
    """
    from headscan.cluster.placement.choose import BATCH_TOKENS, place

    plan = place(spec.sizes(tokens), nodes(options), placement_request(options, evaluates=evaluates))
    for refusal in plan.why:
        say(f"not {refusal}")
    say(plan.placement.describe())
    if options.batch_tokens is None and options.memory is not None:
        return plan
    asked = options.batch_tokens or BATCH_TOKENS
    if plan.batch_tokens < asked:
        say(f"batches of {plan.batch_tokens} tokens fit; larger ones are halved when memory runs out")
    return replace(plan, batch_tokens=asked)


def nodes(options: argparse.Namespace) -> tuple[Node, ...]:
    """The machines that there are: of the Ray cluster that is named, or this one."""
    from headscan.cluster.placement.devices import ray_nodes, this_machine

    if not options.ray_address:
        return (this_machine(),)
    from headscan.cluster.actors.session import connect, import_ray

    connect(options.ray_address)
    return ray_nodes(import_ray(local=False))


def placement_request(options: argparse.Namespace, *, evaluates: bool = False) -> PlacementRequest:
    """What the user asks of the placement."""
    from headscan.cluster.placement.choose import PlacementRequest
    from headscan.pipelines.runs.openmp import max_threads

    return PlacementRequest(
        placement=options.placement,
        replicas=options.replicas,
        stages=options.stages,
        gpus_per_replica=options.gpus_per_replica,
        memory=options.memory,
        device=options.device,
        batch_tokens=options.batch_tokens,
        offload=options.offload,
        evaluates=evaluates,
        max_threads=max_threads(),
    )


def open_replicas(options: argparse.Namespace, spec: ModelSpec, place: Placement) -> Pool:
    """The pool for a placement."""
    from headscan.cluster.actors.timeouts import Timeouts
    from headscan.cluster.pools.open_pool import open_pool

    return open_pool(
        spec,
        place,
        on_cluster=bool(options.ray_address),
        timeouts=Timeouts(options.silence_limit, options.start_timeout),
    )
