"""Run records of every kind, with the model and the versions that decide numbers, and messages about runs."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import headscan
from headscan.analysis.store.provenance import provenance_changes, provenance_history, same_model
from headscan.analysis.store.records import SHARDED_KINDS, RunKind, RunRecord, RunState
from headscan.analysis.store.store import Store, refuse_resume
from headscan.cluster.tasks.pool import Pool
from headscan.pipelines.runs.identity import ModelFacts, ModelIdentity, model_facts


@dataclass(frozen=True)
class RunContext:
    """The model of a run.

    Attributes:
        identity: Names and hashes; computing them reads the weight files.
        pool: Replicas of the model.
    """

    identity: ModelIdentity
    pool: Pool

    @cached_property
    def facts(self) -> ModelFacts:
        """Grid, dtype and devices of the model, loaded at first access."""
        return self.pool.one(model_facts, None)


_PACKAGES = ("torch", "transformers", "accelerate", "ray", "datasets", "lm-eval", "duckdb", "numpy")

#: Folders with measuring code, by their path in the package, and their subfolders that decide no stored number.
_MEASURING = {
    ".": ("analysis", "cluster", "pipelines", "architectures.py"),
    "cluster": (),
    "pipelines": ("cli", "demo"),
}


def package_versions() -> dict[str, str]:
    """Return the installed versions of the packages that decide numbers."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


@cache
def code_version() -> str:
    """Return the version and 8 digits of the code's hash, such as ``0.1.0+3f9a2c1d``.

    The hash covers the statements of every Python file of ``headscan``, ``headscan.cluster`` and ``headscan.pipelines``
    except the command line, the demo and the code for tests. Comments, docstrings and line breaks do not count.
    ``headscan.analysis`` only stores and judges.
    """
    digest = hashlib.sha256()
    for name, path in _measuring_files():
        digest.update(f"{name}\n{_statements(path.read_text(encoding='utf-8'))}\0".encode())
    return f"{headscan.__version__}+{digest.hexdigest()[:8]}"


def _statements(source: str) -> str:
    """Return the syntax tree of a file without docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return ast.dump(tree)


def _measuring_files() -> Iterator[tuple[str, Path]]:
    """The measuring code: relative names and paths, in fixed order."""
    root = Path(headscan.__path__[0])
    for folder, left_out in _MEASURING.items():
        for path in sorted((root / folder).rglob("*.py")):
            # In a checkout the folders inside the package are links.
            if path.relative_to(root / folder).parts[0] not in left_out:
                yield path.relative_to(root).as_posix(), path


#: Columns of ``runs`` that identify a command's inputs, and their names in messages.
_INPUTS = {
    "corpus_hash": "corpus",
    "model_revision": "revision",
    "model_config_hash": "model configuration",
    "weights_hash": "weights",
    "tokenizer_hash": "tokenizer",
    "dtype": "dtype",
}
#: Runs whose ``corpus_hash`` is not of a corpus.
_TEXTS = {"recording": "prompts", "evaluate": "questions", "ablate": "questions"}
#: Options that decide no numbers: locations, and the panel, whose statistics are listed separately.
_PLACES = ("model.source", "model.revision", "model.trust_remote_code", "model.safetensors", "corpus.name", "panel")


def run_record(
    kind: RunKind,
    fingerprint: str,
    context: RunContext,
    *,
    config: Mapping[str, Any],
    bos_policy: str | None,
    corpus: str | None,
    corpus_hash: str | None,
    total_shards: int | None = None,
) -> RunRecord:
    """Build the record of a run that begins or resumes now."""
    identity, facts = context.identity, context.facts
    return RunRecord(
        kind=kind,
        fingerprint=fingerprint,
        **identity.columns(),
        bos_policy=bos_policy,
        corpus=corpus,
        corpus_hash=corpus_hash,
        num_layers=facts.grid.num_layers,
        num_heads=facts.grid.max_heads,
        dtype=facts.dtype,
        attention_path=facts.attention_path,
        grid=facts.sites,
        config=config,
        device=facts.hardware,
        total_shards=total_shards,
        **_software(identity),
    )


def finished_run(
    store: Store,
    kind: RunKind,
    fingerprint: str,
    identity: ModelIdentity,
    *,
    resume_anyway: bool,
    say: Callable[[str], None],
) -> str | None:
    """Return the finished run with this fingerprint, or None. It is reported if it used other software.

    This runs before the model is loaded, so the device is not compared.
    """
    runs = store.runs(kind) if store.path.exists() else []
    run = next((run for run in runs if run["fingerprint"] == fingerprint), None)
    if run is None:
        return None
    changes = provenance_changes(provenance_history(run)[-1], _software(identity))
    if run["status"] != "finished":
        if changes and not resume_anyway:
            raise refuse_resume(run["run_id"], changes)
        return None
    if changes:
        say(_finished_with(run["run_id"], changes))
    return str(run["run_id"])


def begin_run(
    store: Store,
    record: RunRecord,
    *,
    resume_anyway: bool,
    extends: bool = False,
    say: Callable[[str], None],
) -> RunState:
    """Begin or resume a run and report changes; see `Store.begin_run`. For a new run, report the unfinished runs of the
    same model and corpus with the differences.
    """
    state = store.begin_run(record, resume_anyway=resume_anyway, extends=extends)
    if state.changes and state.status == "finished" and not extends:
        say(_finished_with(state.run_id, state.changes))
    elif state.changes:
        say(f"run {state.run_id} resumes with {', '.join(state.changes)}; both are recorded in runs.provenance")
    if not state.resumed:
        for line in _unfinished(store, record, state.run_id):
            say(line)
    return state


def _software(identity: ModelIdentity) -> dict[str, Any]:
    """Return the provenance that is known before the model is loaded."""
    return {
        "packages": package_versions(),
        "code_version": code_version(),
        "code_files_hash": identity.code_files_hash,
    }


def _finished_with(run_id: str, changes: tuple[str, ...]) -> str:
    return f"run {run_id} is complete, with other software or another device ({', '.join(changes)}); its rows stay"


def _unfinished(store: Store, record: RunRecord, run_id: str) -> Iterator[str]:
    """Yield a line for each similar unfinished run. The user may have meant to resume it with this command."""
    model = {column: getattr(record, column) for column in (*_INPUTS, "model")}
    for run in store.runs(record.kind):
        if run["run_id"] == run_id or run["status"] == "finished" or run["corpus"] != record.corpus:
            continue
        if run["model"] != record.model and not same_model(model, run):
            continue
        shards = ""
        if record.kind in SHARDED_KINDS:
            shards = f", {run['finished_shards']} of {run['total_shards'] or '?'} shards"
        yield (
            f"{', '.join(_differences(run, record)) or 'settings'} changed since run {run['run_id']} ({run['status']}"
            f"{shards}). A new run begins; the old rows stay, and summary views leave out unfinished runs"
        )


def _differences(run: Mapping[str, Any], record: RunRecord) -> list[str]:
    """Return the names of inputs and options that differ. Values unknown to either run count as equal."""
    pairs = {column: (run[column], getattr(record, column)) for column in _INPUTS}
    names = _INPUTS | ({"corpus_hash": _TEXTS[record.kind]} if record.kind in _TEXTS else {})
    inputs = [names[column] for column, pair in pairs.items() if None not in pair and pair[0] != pair[1]]
    theirs, ours = _options(run["config"]), _options(record.config)
    options = [name.rpartition(".")[2] for name in ours if name in theirs and ours[name] != theirs[name]]
    return list(dict.fromkeys(inputs + options))


def _options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that decide numbers, by dotted names. The values are as read from JSON."""
    flat: dict[str, Any] = {}
    for name, value in json.loads(json.dumps(config)).items():
        flat |= {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    return {name: value for name, value in flat.items() if name not in _PLACES}
