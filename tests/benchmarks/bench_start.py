"""Start of the command line, relative to that of Python.

    python -m tests.benchmarks.bench_start

Commands run in turn as processes of their own; times are medians.
"""

from __future__ import annotations

import subprocess
import sys
import time
from statistics import median

#: Commands by name; the first is what the others are compared with.
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "headscan --help": ["-m", "headscan.cli.main", "--help"],
    "headscan scan --help": ["-m", "headscan.cli.main", "scan", "--help"],
    "import headscan": ["-c", "import headscan"],
}
ROUNDS = 11


def main() -> None:
    took: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(ROUNDS):
        for name, arguments in COMMANDS.items():
            started = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
            took[name].append(time.perf_counter() - started)
    plain = median(next(iter(took.values())))
    print("| command | ms | x python |\n|---|---|---|")
    for name, times in took.items():
        print(f"| {name} | {1e3 * median(times):.0f} | {median(times) / plain:.1f} |")


if __name__ == "__main__":
    main()
