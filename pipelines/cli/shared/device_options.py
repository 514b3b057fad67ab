"""Where a model runs: devices, placement, pool."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from headscan.cluster.placement.choose import PLACEMENTS
from headscan.pipelines.cli.shared import arguments
from headscan.pipelines.cli.shared.flag_names import with_flags

if TYPE_CHECKING:
    from headscan.analysis.store.store import Store
    from headscan.cluster.placement.placement_base import Node, Placement, PlacementRequest, Plan
    from headscan.cluster.tasks.pool import Pool
    from headscan.model_spec import ModelSpec
    from headscan.pipelines.runs.identity import ModelIdentity
    from headscan.pipelines.runs.run_options import RunOptions
from headscan.pipelines.cli.shared.options import say

#: Shortest heartbeat timeout, in seconds: a busy machine must not look like a failed worker.
_LEAST_SILENCE = 1.0


def add_devices(parser: argparse.ArgumentParser) -> None:
    """Add the options of devices, placement and Ray."""
    group = parser.add_argument_group("devices")
    group.add_argument(
        "--device", type=arguments.device, default="auto", help="device: auto, cpu, cuda or cuda:N (default: auto)"
    )
    group.add_argument(
        "--placement",
        choices=("auto", *PLACEMENTS),
        default="auto",
        help="whole: one copy per device; sharded: one copy over the GPUs of a node; pipeline: layer ranges on devices "
        "of several nodes; streamed: one layer range at a time on one device (default: the first of these that fits)",
    )
    group.add_argument(
        "--replicas",
        type=arguments.count,
        help="number of model copies (default: as many as the GPUs hold, one on a CPU)",
    )
    group.add_argument(
        "--gpus-per-replica",
        type=arguments.count,
        help="number of GPUs per sharded copy (default: the fewest that fit)",
    )
    group.add_argument(
        "--stages", type=arguments.count, help="number of pipeline stages (default: the fewest that fit)"
    )
    group.add_argument(
        "--memory",
        type=arguments.byte_size,
        help="memory limit of streaming, such as 2GiB (default: all free memory)",
    )
    group.add_argument(
        "--offload",
        choices=("cpu", "disk"),
        help="place for layers of a sharded copy that exceed its devices (default: none)",
    )
    group.add_argument(
        "--ray-address", help="address of a running Ray cluster (default: a local Ray if there are several replicas)"
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
        help="timeout for the first worker on a Ray cluster, in seconds (default: 600)",
    )
    group.add_argument(
        "--batch-tokens",
        type=arguments.count,
        help="maximum tokens of one forward pass, with padding (default: 8192, or as many as fit into --memory)",
    )


def placement(options: argparse.Namespace, spec: ModelSpec, *, tokens: int, evaluates: bool = False) -> Plan:
    """Return and print the plan of a run, before anything loads.

    The tokens of a forward pass are part of a run's identity. They do not depend on the memory that is free now, so
    that the same command resumes the run; only `--memory` changes them.

    Args:
        tokens: Length of the longest sequence.
        evaluates: The run answers tasks, which takes logits and a KV cache.
    """
    from headscan.cluster.placement.choose import place
    from headscan.cluster.placement.placement_base import BATCH_TOKENS

    plan = place(spec.sizes(tokens), nodes(options), placement_request(options, evaluates=evaluates))
    for refusal in plan.why:
        say(with_flags(f"not {refusal}", vars(options)))
    say(plan.placement.describe())
    if options.batch_tokens is None and options.memory is not None:
        return plan
    asked = options.batch_tokens or BATCH_TOKENS
    if plan.batch_tokens < asked:
        say(f"batches of {plan.batch_tokens} tokens fit; larger ones are halved when memory runs out")
    return replace(plan, batch_tokens=asked)


def nodes(options: argparse.Namespace) -> tuple[Node, ...]:
    """Return the nodes of the Ray cluster, or this machine without one."""
    from headscan.cluster.placement.devices import ray_nodes, this_machine

    if not options.ray_address:
        return (this_machine(),)
    from headscan.cluster.actors.session import connect, import_ray

    connect(options.ray_address)
    return ray_nodes(import_ray(local=False))


def placement_request(options: argparse.Namespace, *, evaluates: bool = False) -> PlacementRequest:
    """Return the placement request of a command line."""
    from headscan.cluster.placement.placement_base import PlacementRequest
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


def open_model(options: argparse.Namespace, spec: ModelSpec, *, tokens: int) -> Pool:
    """Return the pool of another model that answers tasks; its placement is printed.

    Args:
        tokens: Length of the longest sequence.
    """
    return open_replicas(options, spec, placement(options, spec, tokens=tokens, evaluates=True).placement)


def open_replicas(options: argparse.Namespace, spec: ModelSpec, place: Placement) -> Pool:
    """Return the pool of a placement."""
    from headscan.cluster.actors.timeouts import Timeouts
    from headscan.cluster.pools.open_pool import open_pool

    return open_pool(
        spec,
        place,
        on_cluster=bool(options.ray_address),
        timeouts=Timeouts(options.silence_limit, options.start_timeout),
    )


def run_options(
    options: argparse.Namespace, store: Store, spec: ModelSpec, place: Placement, identity: ModelIdentity
) -> RunOptions:
    """Return the store, pool and messages of a run on a placement."""
    from headscan.pipelines.runs.run_options import RunOptions

    return RunOptions(
        store,
        lambda: open_replicas(options, spec, place),
        identity=identity,
        resume_anyway=options.resume_anyway,
        say=say,
    )
