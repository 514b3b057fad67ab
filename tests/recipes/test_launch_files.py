"""The launch files of cluster/: each runs with stand-ins for Slurm, Ray and SSH, and the command line understands the
commands of headscan that it makes.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from headscan.cli.main import read_command
from headscan.demo import MODEL_FOLDER
from headscan.steps.scan import Part
from tests.sources import ROOT

FOLDER = ROOT / "cluster"
SCRIPTS = ("slurm.sh", "slurm_array.sh", "ray_nodes.sh")

#: Options of sbatch, which reads them from the lines before the first command.
SBATCH = {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "requeue"}

#: Writes its own name and arguments as a line of JSON.
_RECORD = """#!/bin/bash
python3 -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$(basename "$0")" "$@" >> "$RECORD"
"""
#: Commands that record, and then run the command in their arguments, behind their options or the name of a machine.
_RUNS = {"srun": 'while [[ "$1" == -* ]]; do shift; done\n"$@"\n', "ssh": 'shift\n"$@"\n'}
_PRINTS = {"scontrol": "echo node1\necho node2\n", "sbatch": "echo 17\n"}


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder with stand-ins for the commands of a cluster, and for headscan."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("headscan", "ray", "sleep", *_RUNS, *_PRINTS):
        path = folder / name
        path.write_text(_RECORD + _RUNS.get(name, "") + _PRINTS.get(name, ""))
        path.chmod(0o755)
    return folder


def run(script: Path, commands: Path, **variables: str) -> list[list[str]]:
    """Run a script, and return the commands that it ran, each with its arguments."""
    record = commands.parent / "record"
    record.unlink(missing_ok=True)
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "RAY_"))}
    env = plain | {"PATH": f"{commands}:{os.environ['PATH']}", "RECORD": str(record)} | variables
    done = subprocess.run(["bash", str(script)], cwd=commands.parent, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in record.read_text("utf-8").splitlines()]


def variables(script: str) -> dict[str, str]:
    """Return the variables at the top of a script, which users edit."""
    top = (FOLDER / script).read_text("utf-8").partition("set -euo pipefail")[0]
    return {name: "".join(shlex.split(value, comments=True)) for name, value in re.findall(r"(?m)^(\w+)=(.*)$", top)}


def only(name: str, ran: list[list[str]]) -> list[str]:
    """Return the arguments of the only command of a name."""
    [found] = [words for command, *words in ran if command == name]
    return found


def paths_of(scan: Any) -> tuple[str, str, str]:
    """Return model, corpus and store of a scan's command."""
    return scan.step.model.source, scan.step.corpus.name, scan.store.path


def test_every_file_is_tested() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {*SCRIPTS, "kuberay.yaml", "README.md"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_bash_reads_a_script(name: str) -> None:
    text = (FOLDER / name).read_text("utf-8")
    assert text.startswith("#!/bin/bash\n")
    subprocess.run(["bash", "-n", str(FOLDER / name)], check=True)
    # sbatch reads no line behind the first command.
    before_commands = text.partition("\n\n")[0].splitlines()
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert all(line.startswith("#") for line in before_commands) and set(lines) <= set(before_commands)
    options = [re.fullmatch(r"#SBATCH --([a-z-]+)(?:=[\w:]+)?", line) for line in lines]
    assert all(option and option[1] in SBATCH for option in options)
    assert bool(lines) == name.startswith("slurm")


def test_slurm_starts_ray_on_each_node_and_scans(commands: Path) -> None:
    given = variables("slurm.sh")
    ran = run(FOLDER / "slurm.sh", commands, SLURM_JOB_NODELIST="node[1-2]")
    scan = read_command(only("headscan", ran))
    assert paths_of(scan) == (given["MODEL"], given["CORPUS"], given["STORE"])
    assert scan.devices.ray_address == "node1:6379"
    started = sorted(words for command, *words in ran if command == "ray")
    assert started == [["start", "--address=node1:6379", "--block"], ["start", "--head", "--port=6379", "--block"]]
    steps = [words for command, *words in ran if command == "srun"]
    assert sorted(option for words in steps for option in words if option.startswith(("--nodelist", "--exclude"))) == [
        "--exclude=node1",
        "--nodelist=node1",
        "--nodelist=node1",
    ]


def test_slurm_on_one_node_starts_no_others(commands: Path) -> None:
    (commands / "scontrol").write_text("#!/bin/bash\necho node1\n")
    ran = run(FOLDER / "slurm.sh", commands, SLURM_JOB_NODELIST="node1")
    assert only("ray", ran)[:2] == ["start", "--head"] and read_command(only("headscan", ran))


def test_an_array_submits_itself_scans_parts_and_merges(commands: Path) -> None:
    script, given = FOLDER / "slurm_array.sh", variables("slurm_array.sh")
    parts = int(given["PARTS"])
    (first, array), (second, merge) = ((command, words) for command, *words in run(script, commands))
    assert first == second == "sbatch" and array == ["--parsable", f"--array=1-{parts}", str(script)]
    assert "--dependency=afterok:17" in merge
    stores = []
    for number in range(1, parts + 1):
        scan = read_command(only("headscan", run(script, commands, SLURM_ARRAY_TASK_ID=str(number))))
        assert paths_of(scan)[:2] == (given["MODEL"], given["CORPUS"])
        assert scan.step.part == Part(number, parts)
        stores.append(scan.store.path)
        (commands.parent / scan.store.path).touch()
    wrapped = commands.parent / "wrapped.sh"
    wrapped.write_text(merge[-1].removeprefix("--wrap="))
    merged = read_command(only("headscan", run(wrapped, commands)))
    assert sorted(map(str, merged.stores)) == sorted(stores) and len(stores) == parts
    assert str(merged.into) == f"{given['STORES']}/all.duckdb"


@pytest.mark.parametrize("token", ["", "/shared/ray_token"])
def test_machines_without_a_scheduler_start_ray_scan_and_stop(token: str, commands: Path) -> None:
    given = variables("ray_nodes.sh")
    script = commands.parent / "ray_nodes.sh"
    text = (FOLDER / script.name).read_text("utf-8")
    script.write_text(re.sub(r"(?m)^TOKEN_FILE=", f"TOKEN_FILE={token} ", text))
    ran = run(script, commands)
    scan = read_command(only("headscan", ran))
    assert paths_of(scan)[::2] == (given["MODEL"], given["STORE"])
    assert scan.devices.ray_address == f"{given['FIRST']}:6379"
    others = shlex.split((re.search(r'(?m)^OTHERS="(.*)"', text) or [""])[1])
    assert [words[0] for command, *words in ran if command == "ssh"] == others * 2
    started = [words for command, *words in ran if command == "ssh" and "start" in words]
    assert all((f"RAY_AUTH_TOKEN_PATH={token}" in words) == bool(token) for words in started)
    order = [" ".join([command, *words[:2]]) for command, *words in ran if command in ("ray", "headscan")]
    assert order[0] == "ray start --head" and order[1 : 1 + len(others)] == ["ray start --address=node1:6379"] * len(
        others
    )
    assert order[-2 - len(others)].startswith("headscan scan") and order[-1 - len(others) :] == ["ray stop"] * (
        1 + len(others)
    )


def test_ray_stops_where_the_scan_fails(commands: Path) -> None:
    (commands / "headscan").write_text("#!/bin/bash\nexit 3\n")
    record = commands.parent / "record"
    env = os.environ | {"PATH": f"{commands}:{os.environ['PATH']}", "RECORD": str(record)}
    done = subprocess.run(["bash", str(FOLDER / "ray_nodes.sh")], cwd=commands.parent, env=env, capture_output=True)
    assert done.returncode == 3
    assert [json.loads(line) for line in record.read_text("utf-8").splitlines()][-1] == ["ray", "stop"]


def test_kuberay_runs_a_command_on_pods_that_share_image_and_volume(tmp_path: Path) -> None:
    """The command line looks for the folder of the model, so a folder stands for the volume."""
    (tmp_path / "model").symlink_to(MODEL_FOLDER)
    job = yaml.safe_load((FOLDER / "kuberay.yaml").read_text("utf-8").replace("/data", str(tmp_path)))
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    program, *words = shlex.split(job["spec"]["entrypoint"])
    scan = read_command(words)
    assert program == "headscan" and scan.devices.ray_address == "auto"
    cluster = job["spec"]["rayClusterSpec"]
    pods: list[dict[str, Any]] = [
        group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
    ]
    assert len(pods) == 2
    for pod in pods:
        [container] = pod["containers"]
        assert container["image"] == "registry.example/headscan"
        [mount], [volume] = container["volumeMounts"], pod["volumes"]
        assert mount["name"] == volume["name"]
        for path in paths_of(scan):
            assert path.startswith(f"{mount['mountPath']}/")
    assert pods[1]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] > 0
