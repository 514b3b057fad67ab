"""show where a model would run, on this machine, a cluster or imagined machines; loads nothing

    headscan place MODEL
    headscan place MODEL --ray-address HEAD:6379 --placement pipeline
    headscan place config.json --nodes 8 --gpus 8 --gpu-memory 80GiB

MODEL may also be a folder with a configuration and no weights, or the configuration file.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from headscan.pipelines.cli.shared import arguments, device_options
from headscan.pipelines.cli.shared import options as shared
from headscan.pipelines.cli.shared.flag_names import with_flags
from headscan.pipelines.runs.terminal import show

if TYPE_CHECKING:
    from headscan.cluster.placement.choose import Plan
    from headscan.cluster.placement.devices import Node
    from headscan.sizing.model_sizes import ModelSizes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_model(parser)
    device_options.add_devices(parser)
    parser.add_argument(
        "--max-tokens", type=arguments.count, default=2048, help="maximum sequence length (default: 2048)"
    )
    parser.add_argument(
        "--evaluate", action="store_true", help="also count the logits and the KV cache that tasks need"
    )
    imagined = parser.add_argument_group("imagined machines")
    imagined.add_argument("--nodes", type=arguments.count, help="number of imagined machines (default: the real ones)")
    imagined.add_argument("--gpus", type=arguments.whole(0), default=0, help="number of GPUs per machine (default: 0)")
    imagined.add_argument(
        "--gpu-memory", type=arguments.byte_size, default="80GiB", help="memory per GPU (default: 80GiB)"
    )
    imagined.add_argument(
        "--cpu-memory", type=arguments.byte_size, default="1TiB", help="RAM per machine (default: 1TiB)"
    )
    imagined.add_argument(
        "--cpus", type=arguments.count, default=64, help="number of CPU cores per machine (default: 64)"
    )


def run(options: argparse.Namespace) -> None:
    from headscan.cluster.placement.choose import place

    shared.quiet_libraries()
    request = device_options.placement_request(options, evaluates=options.evaluate)
    nodes = _nodes(options)
    sizes = shared.model_spec(options).sizes(options.max_tokens)
    for line in plan_lines(sizes, nodes, place(sizes, nodes, request)):
        show(with_flags(line, vars(options)))


def plan_lines(sizes: ModelSizes, nodes: tuple[Node, ...], plan: Plan) -> list[str]:
    """Return the plan as text: model, machines, placement, devices, rejected placements."""
    from headscan.cluster.placement.byte_sizes import format_bytes
    from headscan.pipelines.runs.text_tables import text_table

    def size(count: int | None) -> str:
        return "" if count is None else format_bytes(count)

    rows: list[dict[str, Any]] = []
    for device in plan.devices:
        first, last = device.layers
        rows.append(
            {
                "device": device.name,
                "layers": f"{first}-{last - 1}" if last > first else "none",
                "weights": size(device.weights),
                "KV cache": size(device.cache),
                "activations": size(device.activations),
                "panel": size(device.panel),
                "together": size(device.total),
                "usable": size(device.usable),
            }
        )
    layers = f"{sizes.num_layers} layers of up to {size(max(sizes.blocks))}" if sizes.blocks else "no list of blocks"
    return [
        f"model: {sizes.parameters / 1e6:,.1f} million parameters, {size(sizes.weights)}; {layers}, embedding "
        f"{size(sizes.embedding)}, head {'tied to it' if sizes.tied else size(sizes.head)}",
        *_machine_lines(nodes),
        plan.placement.describe(),
        f"batches: {plan.batch_tokens} tokens, sequences of up to {sizes.tokens}",
        "",
        "One replica, while a batch runs:",
        "",
        text_table(rows),
        *(["", "Rejected:", *(f"  {line}" for line in plan.why)] if plan.why else []),
    ]


def _machine_lines(nodes: tuple[Node, ...]) -> list[str]:
    """Return one line per kind of machine."""
    from headscan.cluster.placement.byte_sizes import format_bytes

    kinds: dict[tuple[Any, ...], list[str]] = {}
    for node in nodes:
        kinds.setdefault((node.gpus, node.memory, node.cpus), []).append(node.name)
    lines = []
    for (gpus, memory, cpus), names in kinds.items():
        smallest = f"{len(gpus)} GPU{'s' * (len(gpus) > 1)} of {format_bytes(min(gpus))}" if gpus else "no GPU"
        machine = names[0] if len(names) == 1 else f"{len(names)} nodes"
        lines.append(f"machines: {machine} with {smallest}, {cpus} CPU cores and {format_bytes(memory)} of RAM usable")
    return lines


def _nodes(options: argparse.Namespace) -> tuple[Node, ...]:
    from headscan.cluster.placement.choose import PlacementError
    from headscan.cluster.placement.devices import imagined

    if options.nodes is None:
        if options.gpus:
            raise PlacementError(
                f"--gpus {options.gpus} without --nodes. Give the number of such machines with --nodes"
            )
        return device_options.nodes(options)
    if options.ray_address:
        raise PlacementError("--nodes imagines a cluster, and --ray-address names a real one. Leave out one of them")
    return imagined(options.nodes, options.gpus, options.gpu_memory, options.cpu_memory, options.cpus)
