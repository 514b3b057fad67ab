"""The verb place."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from headscan.cli.option_parser import UsageError, with_flags
from headscan.cli.verb_base import Devices, StoreOptions, quiet_libraries, say_run
from headscan.cluster.devices import max_threads
from headscan.cluster.placement_base import parse_bytes
from headscan.model_spec import ModelSpec
from headscan.options import Group, Option
from headscan.steps.results import Json, Result
from headscan.text_tables import counted

if TYPE_CHECKING:
    from headscan.cluster.placement_base import ChosenPlacement, Node, Placement
    from headscan.sizing.forward_flops import ForwardFlops
    from headscan.sizing.model_sizes import ModelSizes
    from headscan.store.store import Store

#: Attention calls of each layer in a scan of the fast panel: the output, and the entropy.
SCAN_CALLS = 2


@dataclass(frozen=True)
class ScanHours:
    """Hours of forward passes over a corpus, with the numbers that they follow from.

    Attributes:
        sequence: Length of the sequences in tokens.
        parameters: Parameters in matrix products of a token.
        attention: Operations of one attention call of all layers for a token.
        calls: Attention calls of each layer.
        flops_per_token: Operations of a token.
        flops: Operations per second of one device.
        at_once: Devices of a replica that compute at the same time.
    """

    tokens: int
    sequence: int
    parameters: int
    attention: float
    calls: int
    flops_per_token: float
    flops: float
    replicas: int
    at_once: int

    @classmethod
    def of(
        cls, forward: ForwardFlops, placement: Placement, *, tokens: int, sequence: int, flops: float, evaluates: bool
    ) -> ScanHours:
        """Return the hours on a placement; with ``evaluates`` the passes compute logits and measure nothing."""
        calls = 1 if evaluates else SCAN_CALLS
        return cls(
            tokens=tokens,
            sequence=sequence,
            parameters=forward.parameters + (forward.head if evaluates else 0),
            attention=forward.attention(sequence),
            calls=calls,
            flops_per_token=forward.per_token(sequence, calls=calls, logits=evaluates),
            flops=flops,
            replicas=placement.replicas,
            at_once=placement.devices_at_once,
        )

    @property
    def hours(self) -> float:
        return self.tokens * self.flops_per_token / (self.flops * self.replicas * self.at_once) / 3600

    def lines(self) -> list[str]:
        """Return the hours with their arithmetic as text."""
        twice = "" if self.calls == 1 else f"{self.calls} x "
        why = "with logits" if self.calls == 1 else "without logits; the fast panel calls attention twice"
        return [
            f"operations per token: 2 x {self.parameters / 1e6:,.1f} million parameters + {twice}"
            f"{_amount(self.attention)}FLOP of attention = {_amount(self.flops_per_token)}FLOP ({why})",
            f"hours: {self.tokens:,} tokens x {_amount(self.flops_per_token)}FLOP / ({self.replicas} replica"
            f"{'s' * (self.replicas > 1)} x {self.at_once} device{'s' * (self.at_once > 1)} at once x"
            f" {_amount(self.flops)}FLOP/s) = {self.hours:.3g}",
            f"assumed: full sequences of {self.sequence:,} tokens, stages of equal work, no time for loading weights or"
            " for the store",
        ]


def operations(text: str) -> float:
    """Return operations per second, such as 400T or 4e14."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?(?:[eE]\+?\d{1,2})?)([GTP]?)(?:FLOP/?[sS]|FLOPS)?", text.strip())
    value = float(match[1]) * {"": 1, "G": 1e9, "T": 1e12, "P": 1e15}[match[2]] if match else 0.0
    if not 1e6 <= value <= 1e21:
        raise UsageError(f"{text!r} is no speed from 1e6 to 1e21 operations per second: write 400T or 4e14")
    return value


@dataclass(frozen=True, kw_only=True)
class _Hours:
    tokens: Annotated[int | None, Option("number of tokens of the corpus (default: no hours)", least=1)] = None
    flops: Annotated[
        float | None,
        Option(
            "sustained operations per second of one GPU, or of one replica on a CPU, such as 400T (default: none)",
            metavar="FLOP/S",
            parse=operations,
            one_of="speed",
        ),
    ] = None
    measured: Annotated[
        str | None,
        Option(
            "first characters of the id of a scan of MODEL in --store, whose tokens per second give the speed of one "
            "device (default: none)",
            metavar="RUN",
            one_of="speed",
        ),
    ] = None
    store: Annotated[StoreOptions, Group(needs="--measured")]


@dataclass(frozen=True, kw_only=True)
class _Machines:
    nodes: Annotated[int | None, Option("number of imagined machines (default: the real ones)", least=1)] = None
    gpus: Annotated[int, Option("number of GPUs per machine", least=0, needs="--nodes")] = 0
    gpu_memory: Annotated[int, Option("memory per GPU (default: 80GiB)", parse=parse_bytes, needs="--nodes")] = 80 << 30
    cpu_memory: Annotated[int, Option("RAM per machine (default: 1TiB)", parse=parse_bytes, needs="--nodes")] = 1 << 40
    cpus: Annotated[int, Option("number of CPU cores per machine", least=1, needs="--nodes")] = 64


@dataclass(frozen=True, kw_only=True)
class Place:
    """show where a model would run, on this machine, a cluster or imagined machines; loads nothing

        headscan place MODEL
        headscan place MODEL --ray-address HEAD:6379 --placement pipeline
        headscan place config.json --nodes 8 --gpus 8 --gpu-memory 80GiB --tokens 1000000000 --flops 400T

    MODEL may also be a folder with a configuration and no weights, or the configuration file. --tokens with --flops or
    --measured adds the hours of a scan of so many tokens, with the arithmetic.
    """

    common: ClassVar = "MODEL --evaluate --max-tokens --gpus --gpu-memory --nodes --measured --dtype --json"

    model: Annotated[ModelSpec, Group("model")]
    devices: Annotated[Devices, Group("devices")]
    max_tokens: Annotated[int, Option("maximum sequence length", least=1)] = 2048
    evaluate: Annotated[bool, Option("also count the logits and the KV cache that tasks need")] = False
    json: Json = False
    time: Annotated[_Hours, Group("hours of a scan")]
    machines: Annotated[_Machines, Group("imagined machines")]

    def __post_init__(self) -> None:
        given = self.time.flops is not None or self.time.measured is not None
        if self.time.tokens is not None and not given:
            raise UsageError("--tokens needs a speed: give --flops, or --measured with a finished scan")
        if self.time.tokens is None and given:
            raise UsageError("--flops and --measured need --tokens: give the number of tokens of the corpus")
        if self.machines.nodes is not None and self.devices.ray_address:
            raise UsageError("--nodes imagines a cluster, and --ray-address names a real one. Leave out one of them")

    def run(self) -> Result:
        from headscan.cluster.placements import place
        from headscan.sizing.model_sizes import model_sizes

        quiet_libraries()
        nodes = self._nodes()
        sizes = model_sizes(self.model, self.max_tokens)
        placed = place(sizes, nodes, self.devices.request, evaluates=self.evaluate, max_threads=max_threads())
        hours = None if self.time.tokens is None else self._hours(self.time.tokens, sizes, placed)
        facts = {
            "model": {"name": sizes.name, "parameters": sizes.parameters, "weights": sizes.weights},
            "layers": sizes.num_layers,
            "machines": nodes,
            "placement": placed.placement.name,
            "replicas": placed.placement.replicas,
            "batch_tokens": placed.batch_tokens,
            "sequence_tokens": sizes.tokens,
            "rejected": [with_flags(line, Place) for line in placed.why],
            "time": None if hours is None else {**asdict(hours), "hours": hours.hours},
        }

        def text() -> str:
            lines = [*placement_lines(sizes, nodes, placed), *(["", *hours.lines()] if hours is not None else [])]
            return "\n".join(with_flags(line, Place) for line in lines)

        return Result([{**asdict(device), "total": device.total} for device in placed.devices], text, facts)

    def _nodes(self) -> tuple[Node, ...]:
        from headscan.cluster.devices import imagined, machines

        like = self.machines
        if like.nodes is None:
            return machines(self.devices.ray_address)
        return imagined(like.nodes, like.gpus, like.gpu_memory, like.cpu_memory, like.cpus)

    def _hours(self, tokens: int, sizes: ModelSizes, placed: ChosenPlacement) -> ScanHours:
        from headscan.sizing.forward_flops import forward_flops

        forward = forward_flops(self.model)
        flops = self._measured_flops(forward) if self.time.flops is None else self.time.flops
        return ScanHours.of(
            forward, placed.placement, tokens=tokens, sequence=sizes.tokens, flops=flops, evaluates=self.evaluate
        )

    def _measured_flops(self, forward: ForwardFlops) -> float:
        """Return the operations per second of one device in a scan of the model."""
        from headscan.checkpoints.sources import config_hash

        store = self.time.store.open()
        run = store.resolve_run(self.time.measured, "scan")
        if run["model_config_hash"] != config_hash(self.model.config()):
            raise UsageError(
                f"--measured {run['run_id']} is a scan of {run['model']}, with another configuration than"
                f" {self.model.source}: name a scan of this model, or give --flops"
            )
        say_run(run)
        return measured_flops(store, str(run["run_id"]), forward)


def measured_flops(store: Store, run_id: str, forward: ForwardFlops) -> float:
    """Return the operations per second of one worker in a finished scan."""
    from headscan.errors import StoreError

    [row] = store.query(
        "select sum(tokens) as tokens, sum(seconds) as seconds, sum(sequences) as sequences from shards"
        " where run_id = ? and seconds > 0",
        [run_id],
    ).to_pylist()
    if not row["tokens"]:
        raise StoreError(f"scan {run_id} has 0 timed shards (limit 1). Scan again, or give `flops`")
    tokens, seconds = int(row["tokens"]), float(row["seconds"])
    length = max(1, round(tokens / int(row["sequences"])))
    return tokens / seconds * forward.per_token(length, calls=SCAN_CALLS)


def _amount(value: float) -> str:
    """Return a number with a prefix of the SI, and a space."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:,.4g} {prefix}"
    return f"{value:,.4g} "


def placement_lines(sizes: ModelSizes, nodes: tuple[Node, ...], placed: ChosenPlacement) -> list[str]:
    """Return a chosen placement as text: model, machines, placement, devices, rejected placements."""
    from headscan.cluster.placement_base import format_bytes
    from headscan.text_tables import text_table

    def size(count: int | None) -> str:
        return "" if count is None else format_bytes(count)

    rows: list[dict[str, Any]] = []
    for device in placed.devices:
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
    layers = (
        f"{counted(sizes.num_layers, 'layer')} of up to {size(max(sizes.blocks))}"
        if sizes.blocks
        else "no list of blocks"
    )
    return [
        f"model: {sizes.parameters / 1e6:,.1f} million parameters, {size(sizes.weights)}; {layers}, embedding "
        f"{size(sizes.embedding)}, head {'tied to it' if sizes.tied else size(sizes.head)}",
        *_machine_lines(nodes),
        placed.placement.describe(),
        f"batches: {placed.batch_tokens} tokens, sequences of up to {sizes.tokens}",
        "",
        "One replica, while a batch runs:",
        "",
        text_table(rows),
        *(["", "Rejected:", *(f"  {line}" for line in placed.why)] if placed.why else []),
    ]


def _machine_lines(nodes: tuple[Node, ...]) -> list[str]:
    from headscan.cluster.placement_base import format_bytes

    kinds: dict[tuple[Any, ...], list[str]] = {}
    for node in nodes:
        kinds.setdefault((node.gpus, node.memory, node.cpus), []).append(node.name)
    lines = []
    for (gpus, memory, cpus), names in kinds.items():
        smallest = f"{counted(len(gpus), 'GPU')} of {format_bytes(min(gpus))}" if gpus else "no GPU"
        machine = names[0] if len(names) == 1 else f"{len(names)} nodes"
        lines.append(f"machines: {machine} with {smallest}, {cpus} CPU cores and {format_bytes(memory)} of RAM usable")
    return lines
