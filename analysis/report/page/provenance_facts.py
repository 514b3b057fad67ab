"""Report sections on what was measured, and with what: facts of runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from headscan.analysis.provenance import provenance_changes, provenance_history
from headscan.analysis.report.page import html_parts as pages
from headscan.analysis.store.store import Store


def stored_sequences(store: Store, run_id: str) -> dict[str, Any]:
    """Return number, tokens, shortest and longest of a run's sequences."""
    return store.query(
        "SELECT count(*) AS sequences, coalesce(sum(tokens), 0)::BIGINT AS tokens, min(tokens) AS shortest,"
        " max(tokens) AS longest FROM sequences WHERE run_id = ?",
        [run_id],
    ).to_pylist()[0]


def measured_section(run: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """Return the facts of a scan; ``row``: of `stored_sequences`."""
    packages = run["packages"] or {}
    versions = [f"{name} {packages[name]}" for name in ("torch", "transformers") if name in packages]
    if run["code_version"]:
        versions.insert(0, f"headscan {run['code_version']}")
    measured = pages.facts(
        [
            ("Model", run["model"] + (f" at {run['model_revision']}" if run["model_revision"] else "")),
            ("Heads", _grid_text(run)),
            ("Corpus", run["corpus"]),
            ("Sequences", f"{row['sequences']:,} of {row['shortest'] or 0:,} to {row['longest'] or 0:,} tokens"),
            ("Tokens", f"{row['tokens']:,}"),
            ("Data type", run["dtype"]),
            ("Attention path", run["attention_path"]),
            ("Sequence start", run["bos_policy"]),
            ("Date", date_text(run["started_at"])),
            ("Versions", ", ".join(versions) or None),
        ]
    )
    return pages.section("What was measured", [measured], "measured")


def _grid_text(run: Mapping[str, Any]) -> str:
    grid = [site for site in run["grid"] or () if site["site"] == "self"]
    text = f"{_counted(run['num_layers'], 'layer')}, {_counted(run['num_heads'], 'query head')}"
    kv_heads = sorted({site["num_key_value_heads"] for site in grid})
    if kv_heads:
        text += f", {' or '.join(map(str, kv_heads))} KV heads"
    if bounded := sum(site["sliding_window"] is not None for site in grid):
        text += f"; {_counted(bounded, 'layer')} with a sliding window"
    if 0 < len(grid) < run["num_layers"]:
        text += f"; {_counted(len(grid), 'layer')} with attention"
    if others := dict.fromkeys(site["site"] for site in run["grid"] or () if site["site"] != "self"):
        text += f"; also {' and '.join(others)} attention"
    return text


def provenance_section(runs: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    """Return the facts of each named run."""
    parts = []
    for name, run in runs:
        parts += [pages.heading(name), _run_facts(run)]
    return pages.section("Provenance", parts, "provenance")


def _run_facts(run: Mapping[str, Any]) -> str:
    history = provenance_history(run)
    resumed = [
        f"{new['since']}: {', '.join(changes)}"
        for old, new in pairwise(history)
        if (changes := provenance_changes(old, new))
    ]
    packages = ", ".join(f"{name} {version}" for name, version in (run["packages"] or {}).items())
    return pages.facts(
        [
            ("Run", run["run_id"]),
            ("Status", run["status"]),
            ("Fingerprint", run["fingerprint"]),
            ("Model", run["model"]),
            ("Revision", run["model_revision"]),
            ("Configuration hash", run["model_config_hash"]),
            ("Weights hash", run["weights_hash"]),
            ("Tokenizer hash", run["tokenizer_hash"]),
            ("Corpus hash", run["corpus_hash"]),
            ("Started", date_text(run["started_at"])),
            ("Ended", date_text(run["finished_at"])),
            ("Options", pages.one_line(run["config"]) if run["config"] else None),
            ("Corpus report", pages.one_line(run["report"]) if run["report"] else None),
            ("headscan", run["code_version"]),
            ("Packages", packages or None),
            ("Device", history[0].get("device")),
            ("Resumed with changes", "; ".join(resumed) or None),
        ]
    )


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def date_text(moment: datetime | None) -> str | None:
    """Return a time in UTC to the minute; None for None."""
    return None if moment is None else moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
