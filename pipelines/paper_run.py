"""Parts that the scripts share: options, the printed plan, the commands, and the table beside the paper's.

A script is a list of `Step`, each a command line of headscan, and a table that compares its results with the paper.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headscan.cli.main import main as headscan
from headscan.cli.place import placement_lines
from headscan.cluster.devices import imagined, this_machine
from headscan.cluster.placement_base import PlacementRequest, format_bytes, parse_bytes
from headscan.cluster.placements import place
from headscan.errors import HeadscanError
from headscan.model_spec import ModelSpec
from headscan.sizing.forward_flops import forward_flops
from headscan.sizing.model_sizes import model_sizes
from headscan.text_tables import text_table

#: A backward pass takes twice the operations of a forward pass.
FORWARD, FORWARD_AND_BACKWARD = 1, 3


@dataclass(frozen=True)
class Step:
    """One command of a script.

    Attributes:
        words: The command line, without ``headscan`` or the script.
        tokens: Tokens that pass through the whole model if nothing is shared: an upper bound.
        passes: Operations per token, in forward passes.
        downloads: What the step downloads, in addition to the model.
        script: Script of this folder that runs instead of ``headscan``.
    """

    words: tuple[str, ...]
    tokens: int
    passes: int = FORWARD
    downloads: str = ""
    script: str = ""

    @property
    def shown(self) -> str:
        """The command line as a shell takes it."""
        return shlex.join((*(("python", f"pipelines/{self.script}") if self.script else ("headscan",)), *self.words))

    def run(self) -> int:
        """Run the command and return its exit code."""
        if not self.script:
            return headscan(self.words)
        return subprocess.run([sys.executable, str(Path(__file__).parent / self.script), *self.words]).returncode


def parser(text: str, model: str) -> argparse.ArgumentParser:
    """Return a parser with the options of all scripts.

    Args:
        text: Documentation of the script.
        model: The paper's model, which is the default.
    """
    found = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--model", default=model, help=f"folder or name on the hub (default: {model})")
    found.add_argument("--out", type=Path, default=Path("reproduced"), help="folder of results (default: reproduced)")
    found.add_argument("--dry-run", action="store_true", help="print the plan: downloads, memory, hours, commands")
    found.add_argument("--stand-in", action="store_true", help="run on the bundled demo model, in minutes on a CPU")
    found.add_argument("--gpus", type=int, help="GPUs of an imagined machine in the plan (default: this machine)")
    found.add_argument(
        "--gpu-memory", type=parse_bytes, default=parse_bytes("80GiB"), help="memory of each (default: 80GiB)"
    )
    found.add_argument(
        "--teraflops",
        type=float,
        default=200.0,
        help="sustained speed of one GPU, in 10^12 operations per second (default: 200)",
    )
    return found


def run(options: argparse.Namespace, steps: Sequence[Step], compare: Callable[[], Sequence[str]]) -> int:
    """Print the plan, and without ``--dry-run`` run the steps and print the comparison.

    Args:
        compare: Returns the lines of the comparison with the paper.

    Returns:
        The exit code of the first step that fails, else 0.
    """
    print("\n".join(plan_text(options, steps)))
    if options.dry_run:
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    for step in steps:
        print(f"\n$ {step.shown}", flush=True)
        if code := step.run():
            return code
    print("\n" + "\n".join(compare()))
    return 0


def plan_text(options: argparse.Namespace, steps: Sequence[Step]) -> list[str]:
    """Return what the script downloads, where the model runs, the hours of each step, and the commands."""
    longest = 2048
    cluster = options.gpus is not None
    nodes = imagined(1, options.gpus, options.gpu_memory, 2**40, 64) if cluster else (this_machine(),)
    try:
        spec = ModelSpec(options.model)
        sizes = model_sizes(spec, longest)
        placed = place(sizes, nodes, PlacementRequest(), evaluates=True)
        forward = forward_flops(spec)
    except (HeadscanError, OSError) as problem:
        return [f"no plan for {options.model}: {problem}", *(f"$ {step.shown}" for step in steps)]
    local = Path(options.model).exists() or options.model == "demo"
    downloads = [] if local else [f"{options.model}: {format_bytes(sizes.weights)}"]
    downloads += [step.downloads for step in steps if step.downloads]
    at_work = placed.placement.replicas * placed.placement.devices_at_once
    rate = options.teraflops * 1e12 * at_work
    each = forward.per_token(sizes.tokens, logits=True)
    hours = [step.tokens * step.passes * each / rate / 3600 for step in steps]
    rows = [
        {"step": number, "tokens at most": f"{step.tokens:,}", "hours at most": hour}
        for number, (step, hour) in enumerate(zip(steps, hours, strict=True), 1)
    ]
    # GPUs of a sharded replica take turns.
    devices = f"{at_work} device{'s' * (at_work > 1)} at once"
    speed = f"{devices}, each with {options.teraflops:g} x 10^12 operations per second"
    return [
        f"downloads: {'; '.join(downloads) or 'none'}",
        *placement_lines(sizes, nodes, placed),
        "",
        f"Time on {speed}, if questions shared no prefix and arms no layer: {sum(hours):.3g} hours",
        "",
        text_table(rows),
        "",
        *(f"$ {step.shown}" for step in steps),
    ]


def beside(title: str, rows: Sequence[Mapping[str, Any]], source: str) -> list[str]:
    """Return a table of the paper's and the measured numbers, with the source of the paper's."""
    return [title, "", text_table(rows), "", f"Paper: {source}"]
