"""Defaults of the command line are those of the settings that it fills."""

from __future__ import annotations

import argparse
import dataclasses
import inspect

import pytest

from headscan.analysis.plans import make_plan
from headscan.cluster.actors.timeouts import Timeouts
from headscan.cluster.placement.placement_base import PlacementRequest
from headscan.pipelines.cli.main import build_parser
from headscan.pipelines.corpora import TokenPlan
from headscan.pipelines.demo.run_demo import DemoConfig
from headscan.pipelines.evaluate.run_sweep import SweepConfig
from headscan.pipelines.evaluate.tasks import TaskConfig
from headscan.pipelines.scan.run_scan import ScanConfig

NEEDED = {
    "scan": ["demo", "--corpus", "x"],
    "evaluate": ["demo", "--tasks", "x"],
    "sweep": ["demo", "--tasks", "x"],
    "demo": [],
    "plan": [],
}
#: Verb, settings, and names that differ: option -> field.
CASES = [
    ("scan", ScanConfig, {}),
    ("scan", TokenPlan, {}),
    ("scan", PlacementRequest, {}),
    ("scan", Timeouts, {"silence_limit": "heartbeat", "start_timeout": "start"}),
    ("evaluate", TaskConfig, {}),
    ("evaluate", PlacementRequest, {}),
    ("sweep", SweepConfig, {}),
    ("demo", DemoConfig, {}),
]


@pytest.mark.parametrize(("verb", "settings", "names"), CASES)
def test_defaults_are_those_of_the_settings(verb: str, settings: type, names: dict[str, str]) -> None:
    fields = {field.name: field.default for field in dataclasses.fields(settings)}
    compare(parsed(verb), {option: fields[names.get(option, option)] for option in shared(verb, fields, names)})


def test_defaults_of_a_plan_are_those_of_its_function() -> None:
    given = inspect.signature(make_plan).parameters
    compare(parsed("plan"), {name: given[name].default for name in ("sink", "recent")})


def parsed(verb: str) -> argparse.Namespace:
    return build_parser().parse_args([verb, *NEEDED[verb]])


def shared(verb: str, fields: dict[str, object], names: dict[str, str]) -> list[str]:
    """Options that fill a field with a default of its own; a batch size of None follows from the placement."""
    found = [option for option in vars(parsed(verb)) if names.get(option, option) in fields]
    asked = [option for option in found if fields[names.get(option, option)] is not dataclasses.MISSING]
    assert asked
    return [option for option in asked if option != "batch_tokens"]


def compare(options: argparse.Namespace, expected: dict[str, object]) -> None:
    found = {name: getattr(options, name) for name in expected}
    assert found == expected
