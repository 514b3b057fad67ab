"""What every job needs: a model with identity, pool and store, and records with the versions that decide numbers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from headscan.analysis.errors import StoreError
from headscan.analysis.store.provenance import provenance_changes, provenance_history, same_model
from headscan.analysis.store.records import SHARDED_KINDS, RunKind, RunRecord, RunState
from headscan.analysis.store.store import Store, refuse_resume, run_identity
from headscan.checkpoints.headers import weights_hash
from headscan.checkpoints.sources import code_files_hash, config_hash, load_tokenizer
from headscan.cluster.tasks.pool import InspectionTask, Pool
from headscan.errors import ModelLoadError, UnsupportedModelError
from headscan.grid import HeadGrid
from headscan.long_work import KnownNumbers
from headscan.model_spec import ModelSpec
from headscan.models.loaded_model import LoadedModel
from headscan.models.model_facts import UNVARYING, RopeLengths, max_tokens
from headscan.pipelines.runs.code_version import code_version
from headscan.pipelines.runs.stored_numbers import StoredNumbers
from headscan.pipelines.runs.text_tables import at_work
from headscan.sizing.model_sizes import NO_CACHE, LayerCache, find_caches

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ModelIdentity:
    """Names and hashes of a model, known before any weight is loaded.

    Attributes:
        name: Folder name or hub name.
        revision: Commit on the hub; None for a folder.
        max_tokens: Number of positions; None if the model has no limit.
        rope_lengths: Sequence lengths at which its rotary frequencies change.
        code_files_hash: Hash of the Python files that come with it; None if it runs transformers' own code.
    """

    name: str
    revision: str | None
    config_hash: str
    weights_hash: str | None
    tokenizer_hash: str | None
    max_tokens: int | None
    found_tokenizer: PreTrainedTokenizerBase | None
    rope_lengths: RopeLengths = UNVARYING
    code_files_hash: str | None = None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        if self.found_tokenizer is None:
            raise _no_tokenizer(self.name)
        return self.found_tokenizer

    def columns(self) -> dict[str, Any]:
        """Return its columns of the table ``runs``."""
        return {
            "model": self.name,
            "model_revision": self.revision,
            "model_config_hash": self.config_hash,
            "weights_hash": self.weights_hash,
            "tokenizer_hash": self.tokenizer_hash,
        }

    def fingerprint(self) -> dict[str, Any]:
        """Return the fields that decide numbers. The name is left out, because a model can be moved. The hash of the
        model's own code is left out, because a run with changed code may resume with ``resume_anyway``.
        """
        return {
            "revision": self.revision,
            "config": self.config_hash,
            "weights": self.weights_hash,
            "tokenizer": self.tokenizer_hash,
        }


def identify(spec: ModelSpec, *, need_tokenizer: bool = True) -> ModelIdentity:
    """Return the identity of a model without loading its weights."""
    config = spec.config()
    tokenizer = load_tokenizer(spec.source, spec.revision, spec.trust_remote_code)
    if tokenizer is None and need_tokenizer:
        raise _no_tokenizer(spec.source)
    folder = Path(spec.source)
    revision = None if folder.is_dir() else getattr(config, "_commit_hash", None) or spec.revision
    return ModelIdentity(
        name=folder.resolve().name if folder.is_dir() else spec.source,
        revision=revision,
        config_hash=config_hash(config),
        weights_hash=weights_hash(spec.source),
        tokenizer_hash=None if tokenizer is None else _tokenizer_hash(tokenizer),
        max_tokens=max_tokens(config),
        rope_lengths=RopeLengths.of(config),
        found_tokenizer=tokenizer,
        code_files_hash=code_files_hash(config, spec.source, revision) if spec.trust_remote_code else None,
    )


@dataclass(frozen=True)
class ModelFacts:
    """Facts that only a loaded model shows. A replica sends them to the driver.

    Attributes:
        device: Device of its token ids.
        hardware: Type and name of the devices that hold its weights, such as ``cuda (NVIDIA H200)``.
        caches: KV cache of each layer, see `headscan.sizing.model_sizes`; None if it cannot be determined.
        max_tokens: Largest number of tokens with positions; None without a limit.
    """

    dtype: str
    device: str
    hardware: str
    grid: HeadGrid
    caches: Mapping[str, Sequence[LayerCache]] | None
    max_tokens: int | None = None

    @property
    def sites(self) -> list[dict[str, Any]]:
        """Attention sites of every kind, their KV cache and their positions, as plain data."""
        sites = [site for kind in self.grid.kinds for site in self.grid.at(kind).as_dicts()]
        return [self._with_cache(site) | {"max_tokens": self.max_tokens} for site in sites]

    def _with_cache(self, site: dict[str, Any]) -> dict[str, Any]:
        if self.caches is None:
            return site
        layers = self.caches.get(site["site"], ())
        cache = layers[site["layer"]] if site["layer"] < len(layers) else NO_CACHE
        return {
            **site,
            # If a model computes its attention weights itself, only the cache shows the width of its keys.
            "head_dim": site["head_dim"] or cache.key_dim,
            "cache_heads": cache.heads,
            "cache_bytes_per_token": cache.bytes_per_token,
            "cache_tokens": cache.tokens,
        }

    @property
    def attention_path(self) -> str:
        """Hook point of attention: transformers' interface, inside the model (watched), or both."""
        reached = {site["by_interface"] for site in self.sites}
        return " and ".join(name for name, seen in (("interface", True), ("watched", False)) if seen in reached)


class _ModelFacts(InspectionTask[object, ModelFacts]):
    def __call__(self, lm: LoadedModel, item: object) -> ModelFacts:
        return ModelFacts(lm.dtype, str(lm.device), _hardware(lm), lm.grid, _caches(lm), lm.max_tokens)


model_facts = _ModelFacts("model_facts")


def _caches(lm: LoadedModel) -> dict[str, tuple[LayerCache, ...]] | None:
    try:
        return find_caches(lm.model)
    except UnsupportedModelError:  # plans need the caches and raise for a run without them
        return None


def fingerprint(facts: Mapping[str, Any]) -> str:
    """Return a hash of plain data, independent of key order."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _hardware(lm: LoadedModel) -> str:
    # Weights that are offloaded or not loaded yet are on the meta device, which is not where they run.
    devices = {lm.device, *(weight.device for weight in lm.model.parameters() if not weight.is_meta)}
    return ", ".join(sorted({_device_name(device) for device in devices}))


def _device_name(device: torch.device) -> str:
    return f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type


def _no_tokenizer(source: str) -> ModelLoadError:
    return ModelLoadError(f"{source} has no tokenizer. Save one in the model's folder with `save_pretrained`")


def _tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    specials = json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)
    return hashlib.sha256(f"{type(tokenizer).__name__}{specials}{text}".encode()).hexdigest()[:16]


_PACKAGES = ("torch", "transformers", "accelerate", "ray", "datasets", "lm-eval", "duckdb", "numpy")


def package_versions() -> dict[str, str]:
    """Return the installed versions of the packages that decide numbers."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


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


#: Opens the pool of a model.
OpenModel = Callable[[ModelSpec], Pool]


class ModelContext:
    """A model that jobs measure; a context manager that closes its pool. Identity, facts and pool are made when they
    are first needed, so that a job with nothing to measure loads no model; ``identity`` None reads the weight files
    then. ``open_model`` opens the pool of this model, and of others that a job needs.
    """

    def __init__(
        self,
        model: ModelSpec,
        open_model: OpenModel,
        *,
        identity: ModelIdentity | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.model, self.open_model, self.say = model, open_model, say
        self._pool: Pool | None = None
        if identity is not None:
            self.identity = identity

    @cached_property
    def identity(self) -> ModelIdentity:
        """Names and hashes of the model; pass those of a model without a tokenizer."""
        return identify(self.model)

    @cached_property
    def facts(self) -> ModelFacts:
        with at_work(f"loading {self.model.source}"):
            return self.pool.one(model_facts, None)

    @property
    def pool(self) -> Pool:
        """Replicas of the model; a pool that was closed is opened again."""
        if self._pool is None:
            self._pool = self.open_model(self.model)
        return self._pool

    @contextmanager
    def keeping(
        self,
        kind: RunKind,
        fingerprint: str,
        *,
        config: Mapping[str, Any],
        corpus: str | None,
        corpus_hash: str | None,
    ) -> Iterator[KnownNumbers]:
        """Yield the numbers that a job measures, by unit of work. They are in memory alone, which is reported; those of
        a `Run` are in its store.
        """
        self.say("without a store, a job that stops keeps nothing of what it measured")
        yield KnownNumbers()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()


class Run(ModelContext):
    """A model, as in `ModelContext`, and the store that receives what jobs measure on it. ``resume_anyway`` resumes
    runs even if the software or the device changed, and records both.
    """

    def __init__(
        self,
        model: ModelSpec,
        store: Store,
        open_model: OpenModel,
        *,
        identity: ModelIdentity | None = None,
        resume_anyway: bool = False,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        super().__init__(model, open_model, identity=identity, say=say)
        self.store, self.resume_anyway = store, resume_anyway

    def on(self, model: ModelSpec, identity: ModelIdentity) -> Run:
        """Return a run of another model. The pool of this one is closed, so that two are never loaded together."""
        self.close()
        return Run(
            model, self.store, self.open_model, identity=identity, resume_anyway=self.resume_anyway, say=self.say
        )

    def known(self, kind: RunKind, fingerprint: str) -> dict[str, Any] | None:
        runs = self.store.runs(kind) if self.store.path.exists() else []
        return next((run for run in runs if run["fingerprint"] == fingerprint), None)

    def finished(self, kind: RunKind, fingerprint: str) -> str | None:
        """Return the finished run with this fingerprint, or None; a run with other software is reported. The device is
        not compared, because the model is not loaded yet.
        """
        run = self.known(kind, fingerprint)
        if run is None:
            return None
        changes = provenance_changes(provenance_history(run)[-1], _software(self.identity))
        if run["status"] != "finished":
            if changes and not self.resume_anyway:
                raise refuse_resume(run["run_id"], changes)
            return None
        if changes:
            self.say(_finished_with(run["run_id"], changes))
        return str(run["run_id"])

    def record(
        self,
        kind: RunKind,
        fingerprint: str,
        *,
        config: Mapping[str, Any],
        bos_policy: str | None,
        corpus: str | None,
        corpus_hash: str | None,
        total_shards: int | None = None,
    ) -> RunRecord:
        facts = self.facts
        return RunRecord(
            kind=kind,
            fingerprint=fingerprint,
            **self.identity.columns(),
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
            **_software(self.identity),
        )

    def begin(self, record: RunRecord, *, extends: bool = False) -> RunState:
        """Begin or resume a run and report changes; see `Store.begin_run`. For a new run, report the unfinished runs of
        the same model and corpus with the differences.
        """
        state = self.store.begin_run(record, resume_anyway=self.resume_anyway, extends=extends)
        if state.changes and state.status == "finished" and not extends:
            self.say(_finished_with(state.run_id, state.changes))
        elif state.changes:
            self.say(
                f"run {state.run_id} resumes with {', '.join(state.changes)}; both are recorded in runs.provenance"
            )
        if not state.resumed:
            for line in _unfinished(self.store, record, state.run_id):
                self.say(line)
        return state

    @contextmanager
    def keeping(
        self,
        kind: RunKind,
        fingerprint: str,
        *,
        config: Mapping[str, Any],
        corpus: str | None,
        corpus_hash: str | None,
    ) -> Iterator[KnownNumbers]:
        """Yield the numbers of a plan or prune run: those that the store has, and new ones, which are stored within
        seconds. A run that measures nothing leaves no trace. A finished run of other software is measured again, unless
        ``resume_anyway`` is set.
        """
        record = self.record(
            kind, fingerprint, config=config, bos_policy="auto", corpus=corpus, corpus_hash=corpus_hash
        )
        known = self.known(kind, fingerprint)
        if known is not None and known["status"] == "finished" and not self.resume_anyway:
            changes = provenance_changes(provenance_history(known)[-1], record.provenance)
            if changes:
                self.say(f"run {known['run_id']} is measured again with {', '.join(changes)}")
                self.store.restart_run(record)

        def begin() -> str:
            state = self.begin(record, extends=True)
            if not state.resumed:
                self.say(f"run {state.run_id}")
            return state.run_id

        numbers = StoredNumbers(self.store, begin)
        if known is not None:
            numbers.resume()
            self.say(f"run {known['run_id']}: the store has {numbers.units} units of this work")
        try:
            try:
                yield numbers
            finally:
                numbers.write()
        except Exception:
            self._fail(numbers.run_id)
            raise
        if numbers.run_id is not None:
            self.store.finish_run(numbers.run_id)

    @contextmanager
    def recording(self, record: RunRecord, *, arms: Collection[str] = ()) -> Iterator[RunState]:
        """Begin or resume a run, which fails if the block does; the caller finishes it. A finished run that lacks one
        of ``arms``, the names of all arms that will answer, is extended.
        """
        finished: set[str] = set()
        if arms and self.store.path.exists():
            known = [run_identity(record.kind, record.fingerprint)]
            rows = self.store.query("SELECT name FROM arms WHERE run_id = ? AND status = 'finished'", known)
            finished.update(rows["name"].to_pylist())
        state = self.begin(record, extends=not finished.issuperset(arms))
        try:
            yield state
        except Exception:
            self._fail(state.run_id)
            raise

    def _fail(self, run_id: str | None) -> None:
        with suppress(StoreError):  # a full disk may also prevent this write
            if run_id is not None:
                self.store.finish_run(run_id, status="failed")
