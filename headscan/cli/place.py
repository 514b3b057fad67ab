"""The verb place."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from headscan.cli.option_parser import UsageError, with_flags
from headscan.cli.verb_base import Devices, StoreOptions, quiet_libraries, say_run
from headscan.cluster.devices import max_threads
from headscan.cluster.placement_base import PlacementError, ReplicaPlacement, parse_bytes
from headscan.model_spec import ModelSpec
from headscan.options import Group, Option
from headscan.settings.corpus_settings import LONGEST_TEXT
from headscan.steps.results import Json, Result
from headscan.study.job_costs import (
    BACKWARD_JOBS,
    DEFAULT_TOKENS,
    GPU_FLOPS,
    READING_JOBS,
    SINGLE_JOBS,
    Job,
    JobModel,
    default_tokens,
    job_steps,
)
from headscan.study.study_step import Study
from headscan.text_tables import counted

if TYPE_CHECKING:
    from headscan.cluster.placement_base import ChosenPlacement, Node, Placement
    from headscan.sizing.forward_flops import ForwardFlops
    from headscan.sizing.model_sizes import ModelSizes
    from headscan.store.store import Store


@dataclass(frozen=True)
class JobHours:
    """Hours of a job, with the numbers that they follow from.

    Attributes:
        sequence: Length of the texts in tokens.
        parameters: Parameters in matrix products of a token.
        attention: Operations of the attention of all layers for a token, the mean over a text.
        flops_per_token: Operations of a token in a plain forward pass.
        flops: Operations per second of one device.
        at_once: Devices of a replica that compute at the same time.
        amount: What the job reads, in words.
        steps: By step, the tokens that a plain forward pass reads in as much time.
    """

    job: str
    sequence: int
    parameters: int
    attention: float
    flops_per_token: float
    flops: float
    replicas: int
    at_once: int
    amount: str
    steps: dict[str, float]

    def seconds(self, tokens: float) -> float:
        """Return the seconds of plain passes over so many tokens."""
        return tokens * self.flops_per_token / (self.flops * self.replicas * self.at_once)

    @property
    def hours(self) -> float:
        return self.seconds(sum(self.steps.values())) / 3600

    def lines(self) -> list[str]:
        """Return the hours with their arithmetic as text."""
        from headscan.runs.progress import time_text
        from headscan.text_tables import text_table

        rows = [
            {"step": name, "tokens of a plain pass": f"{tokens:,.0f}", "time": time_text(self.seconds(tokens))}
            for name, tokens in self.steps.items()
        ]
        return [
            f"a plain pass: 2 x {self.parameters / 1e6:,.1f} million parameters + {_amount(self.attention)}FLOP of"
            f" attention = {_amount(self.flops_per_token)}FLOP per token; at {_amount(self.flops)}FLOP/s,"
            f" {self.flops / self.flops_per_token:,.0f} tokens per second and device",
            f"job: {self.job}, {self.amount}",
            "",
            text_table(rows),
            "",
            f"hours: {sum(self.steps.values()):,.0f} tokens x {_amount(self.flops_per_token)}FLOP / ({self.replicas}"
            f" replica{'s' * (self.replicas > 1)} x {self.at_once} device{'s' * (self.at_once > 1)} at once x"
            f" {_amount(self.flops)}FLOP/s) = {self.hours:.3g}",
            "assumed: full texts, stages of equal work, no time for loading weights or for the store",
        ]


def operations(text: str) -> float:
    """Return operations per second, such as 400T, 4e14, or those of a GPU by its name."""
    if text.strip().upper() in GPU_FLOPS:
        return GPU_FLOPS[text.strip().upper()]
    match = re.fullmatch(r"(\d+(?:\.\d*)?(?:[eE]\+?\d{1,2})?)([GTP]?)(?:FLOP/?[sS]|FLOPS)?", text.strip())
    value = float(match[1]) * {"": 1, "G": 1e9, "T": 1e12, "P": 1e15}[match[2]] if match else 0.0
    if not 1e6 <= value <= 1e21:
        raise UsageError(
            f"{text!r} is no speed from 1e6 to 1e21 operations per second: write 400T, 4e14, or a measured GPU"
            f" ({', '.join(GPU_FLOPS)})"
        )
    return value


@dataclass(frozen=True, kw_only=True)
class _Hours:
    tokens: Annotated[int | None, Option(f"number of tokens of the corpus of {', '.join(READING_JOBS)}", least=1)] = (
        None
    )
    sequences: Annotated[
        int | None, Option("number of texts of a plan or a pruning (default: that of the verb)", least=2)
    ] = None
    hours: Annotated[
        float | None, Option(f"time limit of a study, in hours (default: {Study.hours:g})", above=0, most=1e6)
    ] = None
    flops: Annotated[
        float | None,
        Option(
            "sustained operations per second of one GPU, or of one replica on a CPU, such as 400T, or a GPU whose speed"
            f" was measured: {', '.join(GPU_FLOPS)} (default: none)",
            metavar="FLOP/S",
            parse=operations,
            one_of="speed",
        ),
    ] = None
    pass_speed: Annotated[
        float | None,
        Option(
            "tokens per second of a forward pass over a text of --max-tokens tokens on one device (default: none)",
            above=0,
            most=1e12,
            one_of="speed",
        ),
    ] = None
    time_pass: Annotated[bool, Option("load MODEL here, and time such a pass", one_of="speed")] = False
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

    @property
    def has_speed(self) -> bool:
        return self.time_pass or any(each is not None for each in (self.flops, self.pass_speed, self.measured))


@dataclass(frozen=True, kw_only=True)
class _Machines:
    nodes: Annotated[int | None, Option("number of imagined machines (default: the real ones)", least=1)] = None
    gpus: Annotated[int, Option("number of GPUs per machine", least=0, needs="--nodes")] = 0
    gpu_memory: Annotated[int, Option("memory per GPU (default: 80GiB)", parse=parse_bytes, needs="--nodes")] = 80 << 30
    cpu_memory: Annotated[int, Option("RAM per machine (default: 1TiB)", parse=parse_bytes, needs="--nodes")] = 1 << 40
    cpus: Annotated[int, Option("number of CPU cores per machine", least=1, needs="--nodes")] = 64


@dataclass(frozen=True, kw_only=True)
class Place:
    """show where a job would run, in how many hours and with how much memory; loads nothing

        headscan place MODEL
        headscan place MODEL --job plan --max-tokens 32768 --flops H200
        headscan place MODEL --job study --max-tokens 512 --hours 4 --time-pass
        headscan place MODEL --ray-address HEAD:6379 --placement pipeline
        headscan place config.json --nodes 8 --gpus 8 --gpu-memory 80GiB --tokens 1000000000 --flops 400T

    The devices are those of this machine, of a cluster, or of imagined machines. MODEL may also be a folder with a
    configuration and no weights, or the configuration file. A job has the defaults of its verb, but for the length and
    number of texts. A speed adds the hours, with the arithmetic; a scan, an evaluation and an importance also need the
    tokens of their corpus. The memory of backward passes counts.
    """

    common: ClassVar = (
        "MODEL --job --max-tokens --tokens --flops --time-pass --gpus --gpu-memory --nodes --dtype --json"
    )

    model: Annotated[ModelSpec, Group("model")]
    job: Annotated[Job, Option("job to place")] = "scan"
    devices: Annotated[Devices, Group("devices")]
    max_tokens: Annotated[
        int | None,
        Option(
            "longest text, in tokens (default: that of the job: "
            f"{', '.join(f'{name} {tokens}' for name, tokens in DEFAULT_TOKENS.items())}, others {LONGEST_TEXT}; at "
            "most the model's context)",
            least=1,
        ),
    ] = None
    json: Json = False
    time: Annotated[_Hours, Group("hours")]
    machines: Annotated[_Machines, Group("imagined machines")]

    def __post_init__(self) -> None:
        time, job = self.time, self.job
        if job in READING_JOBS and (time.tokens is None) == time.has_speed:
            if time.has_speed:
                raise UsageError(f"the hours of --job {job} need --tokens: give the number of tokens of the corpus")
            raise UsageError("--tokens needs a speed: give --flops, --pass-speed, --time-pass or --measured")
        for name, jobs in (("tokens", READING_JOBS), ("sequences", ("plan", "prune")), ("hours", ("study",))):
            if getattr(time, name) is not None and job not in jobs:
                raise UsageError(f"--{name} has no effect on --job {job} (only on {', '.join(jobs)}). Leave it out")
        if self.machines.nodes is not None and self.devices.ray_address:
            raise UsageError("--nodes imagines a cluster, and --ray-address names a real one. Leave out one of them")
        if time.time_pass and (self.machines.nodes is not None or self.devices.ray_address):
            raise UsageError("--time-pass times this machine. Leave out --nodes and --ray-address, or give --flops")

    def run(self) -> Result:
        from headscan.cluster.placements import place
        from headscan.kv.damage_bytes import backward_bytes
        from headscan.sizing.model_sizes import model_sizes

        quiet_libraries()
        tokens = self._tokens()
        nodes, sizes = self._nodes(), model_sizes(self.model, tokens)
        model = self._job_model(sizes)
        backward, of_loss = backward_bytes(self.model, tokens) if self.job in BACKWARD_JOBS else (0, 0)
        request = self.devices.request
        placed = place(
            sizes,
            nodes,
            request.in_this_process() if self.job in SINGLE_JOBS else request,
            evaluates=self.job not in ("scan", "importance"),
            max_threads=max_threads(),
            backward=backward,
            kept=of_loss + model.kept_bytes(self.job),
        )
        if self.job in SINGLE_JOBS and placed.placement.staged:
            whole = "; ".join(placed.why)
            raise PlacementError(f"--job {self.job} needs all layers in one process ({whole}). Use larger devices")
        hours = self._hours(tokens, model, placed) if self.time.has_speed else None
        facts = {
            "model": {"name": sizes.name, "parameters": sizes.parameters, "weights": sizes.weights},
            "job": self.job,
            "layers": sizes.num_layers,
            "machines": nodes,
            "placement": placed.placement.name,
            "replicas": placed.placement.replicas,
            "batch_tokens": placed.batch_tokens,
            "sequence_tokens": sizes.tokens,
            "peak_bytes": max(device.total for device in placed.devices),
            "rejected": [with_flags(line, Place) for line in placed.why],
            "time": None if hours is None else {**asdict(hours), "hours": hours.hours},
        }

        def text() -> str:
            lines = placement_lines(sizes, nodes, placed)
            if hours is not None:
                lines += ["", *hours.lines()]
            elif self.job not in READING_JOBS:
                lines += ["", "hours: give a speed, by --flops, --pass-speed, --time-pass or --measured"]
            return "\n".join(with_flags(line, Place) for line in lines)

        return Result([{**asdict(device), "total": device.total} for device in placed.devices], text, facts)

    def _tokens(self) -> int:
        """Return the length of the texts, never another one than that of --max-tokens."""
        from headscan.models.model_facts import max_tokens

        limit = max_tokens(self.model.config())
        if self.max_tokens is None:
            longest = default_tokens(self.job)
            return min(longest, limit or longest)
        if limit is not None and self.max_tokens > limit:
            raise UsageError(
                f"--max-tokens: {self.max_tokens} (limit {limit} positions of {self.model.source}). Lower --max-tokens,"
                " or place a model with a longer context"
            )
        return self.max_tokens

    def _job_model(self, sizes: ModelSizes) -> JobModel:
        from headscan.models.model_facts import max_tokens
        from headscan.sizing.forward_flops import forward_flops

        config, forward = self.model.config(), forward_flops(self.model)
        text = config.get_text_config()
        heads = getattr(text, "num_attention_heads", 0)
        layers, hidden = getattr(text, "num_hidden_layers", 1), text.hidden_size
        return JobModel(
            kv_heads=layers * (getattr(text, "num_key_value_heads", None) or heads),
            layers=layers,
            context=max_tokens(config),
            head_columns=sum(forward.widths.values()) // (2 * layers),
            mlp_columns=getattr(text, "intermediate_size", None) or 4 * hidden,
            hidden=hidden,
            itemsize=sizes.hidden // hidden,
            forward=forward,
        )

    def _nodes(self) -> tuple[Node, ...]:
        from headscan.cluster.devices import imagined, machines

        like = self.machines
        if like.nodes is None:
            return machines(self.devices.ray_address)
        return imagined(like.nodes, like.gpus, like.gpu_memory, like.cpu_memory, like.cpus)

    def _hours(self, tokens: int, model: JobModel, placed: ChosenPlacement) -> JobHours:
        placement, forward = placed.placement, model.forward
        of_token = model.pass_flops(self.job, tokens)
        flops = self._flops(tokens, of_token, forward, placement)
        amount, steps = job_steps(
            self.job,
            model,
            tokens,
            corpus_tokens=self.time.tokens,
            sequences=self.time.sequences,
            hours=self.time.hours,
            speed=flops / of_token,
            staged=placement.staged,
        )
        return JobHours(
            job=self.job,
            sequence=tokens,
            parameters=forward.parameters + (0 if self.job == "scan" else forward.head),
            attention=forward.attention(tokens),
            flops_per_token=of_token,
            flops=flops,
            replicas=placement.replicas,
            at_once=placement.devices_at_once,
            amount=amount,
            steps=steps,
        )

    def _flops(self, tokens: int, of_token: float, forward: ForwardFlops, placement: Placement) -> float:
        """Return the operations per second of one device."""
        if self.time.flops is not None:
            return self.time.flops
        if self.time.pass_speed is not None:
            return self.time.pass_speed * of_token
        if self.time.time_pass:
            from headscan.loading import load_spec
            from headscan.study.study_time import TimedPass, time_pass

            if not isinstance(placement, ReplicaPlacement):
                raise PlacementError(f"--time-pass loads all layers, which {placement.name} does not. Give --flops")
            # The timed pass computes logits.
            lm = load_spec(self.model, placement.local_target())
            return time_pass(lm, TimedPass(1, tokens)) * forward.per_token(tokens, logits=True)
        return self._measured_flops(forward)

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
    """Return the operations per second of plain passes of one worker, from a finished scan."""
    from headscan.errors import StoreError
    from headscan.study.study_time import PassCosts

    [row] = store.query(
        "select sum(tokens) as tokens, sum(seconds) as seconds, sum(sequences) as sequences from shards"
        " where run_id = ? and seconds > 0",
        [run_id],
    ).to_pylist()
    if not row["tokens"]:
        raise StoreError(f"scan {run_id} has 0 timed shards (limit 1). Scan again, or give `flops`")
    tokens, seconds = int(row["tokens"]), float(row["seconds"])
    length = max(1, round(tokens / int(row["sequences"])))
    return PassCosts.scan * tokens / seconds * forward.per_token(length)


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
