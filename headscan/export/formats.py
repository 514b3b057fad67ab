"""The formats of exports: models for serving engines, plans for KV-cache tools, the store as a Parquet data set.

A format is a function here and its entry in `EXPORT_FORMATS`, from which the help and the sizes that `headscan prune`
prints follow. Functions import their writers, which load torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, cast

from headscan.cluster.placement_base import format_bytes
from headscan.errors import ExportError
from headscan.model_spec import ModelSpec
from headscan.options import Group, Option, check_limits, short
from headscan.settings.saving_settings import Architecture, GgufType
from headscan.text_tables import counted

if TYPE_CHECKING:
    from headscan.export.servable_model import HeldSize
    from headscan.models.loaded_model import LoadedModel
    from headscan.plans import HeadPlan
    from headscan.plans.pattern_files import PatternFormat
    from headscan.store.store import Store

#: File of a plan unless another is named; of decilm none.
_PLAN = "head_plan.json"


@dataclass(frozen=True)
class Exported:
    """What an export wrote.

    Attributes:
        files: The file or folder; of plans as tables and of Parquet every file.
        facts: Further values by name, such as ``bytes``.
        lines: Sentences for the user, such as how to serve the files.
        rows: Layers with their windows, the arguments of TensorRT-LLM, or the files.
        sizes: What the original, the model and the exported form hold; empty for plans and Parquet.
    """

    files: tuple[str, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    lines: tuple[str, ...] = ()
    rows: tuple[Mapping[str, Any], ...] = ()
    sizes: tuple[HeldSize, ...] = ()


def _gguf(config: ExportConfig, store: Store | None) -> Exported:
    try:
        from headscan.export.gguf_file import write_gguf
    except ModuleNotFoundError as problem:
        raise ExportError("GGUF files need the package gguf. Run `pip install 'headscan[gguf]'`") from problem

    written = write_gguf(_loaded(config), config.out, type=config.type, tokenizer=config.tokenizer)
    file = str(written.file)
    return Exported(
        (file,),
        {"file": file, "architecture": written.architecture, "bytes": written.bytes},
        (f"{file}: architecture {written.architecture}, {format_bytes(written.bytes)}",),
        sizes=written.sizes,
    )


def _decilm(config: ExportConfig, store: Store | None) -> Exported:
    from headscan.export.decilm_folder import write_decilm

    plan = None if config.plan is None else _plan(config)
    written = write_decilm(_loaded(config), config.out, plan=plan)
    folder = str(written.folder)
    facts: dict[str, Any] = {"folder": folder, "heads": written.heads, "bytes": written.bytes}
    lines = [
        f"{folder}: {counted(written.heads, 'query head')} in each layer with attention, {format_bytes(written.bytes)}",
        f"serve it with `vllm serve {quote(folder)} --trust-remote-code` (the code is the configuration's class)",
    ]
    if not written.has_ffn_mult:
        lines.append("the width of the MLP is no multiple of 256, so SGLang cannot read it; vLLM can")
    if written.windows is not None:
        facts["sliding_window"] = written.windows["sliding_window"]
        lines.append(f"{_windows(written.windows)}; vLLM reads them, and the table does not count what they save")
    return Exported((folder,), facts, tuple(lines), sizes=written.sizes)


def _layer_types(config: ExportConfig, store: Store | None) -> Exported:
    plan = _plan(config)
    if config.model is None:
        return _layer_fields(plan, config.out)
    from headscan.export.layer_types_folder import write_layer_types

    written = write_layer_types(_loaded(config), plan, config.out, architecture=config.architecture)
    folder, windows = str(written.folder), written.windows
    use = "transformers loads it as MinistralForCausalLM, with the windows"
    if config.architecture == "llama":
        use = f"serve it with `vllm serve {quote(folder)}`; transformers ignores the windows of a Llama"
    return Exported(
        (folder,),
        {"folder": folder, "bytes": written.bytes, "sliding_window": windows["sliding_window"]},
        (f"{folder}: {format_bytes(written.bytes)}", _windows(windows), use),
        _layer_rows(windows),
    )


def _layer_fields(plan: HeadPlan, out: str | Path) -> Exported:
    """Write the fields alone, for an engine that reads them in addition to a model's own configuration."""
    from headscan.plans import sliding_layers
    from headscan.store.output_files import write_text

    windows = sliding_layers(plan)
    path = str(write_text(out, json.dumps(windows) + "\n"))
    use = f'written to {path}, for `vllm serve MODEL --hf-overrides "$(cat {quote(path)})"` with a MODEL of type llama'
    return Exported(
        (path,),
        {"file": path, "sliding_window": windows["sliding_window"]},
        (_windows(windows), use),
        _layer_rows(windows),
    )


def _vllm(config: ExportConfig, store: Store | None) -> Exported:
    from headscan.export.vllm_overrides import vllm_command, vllm_overrides
    from headscan.store.output_files import write_text

    assert config.model is not None
    plan, model, source = _plan(config), config.model.config(), config.model.folder
    overrides, is_decilm = vllm_overrides(plan, model, source)
    path = str(write_text(config.out, json.dumps(overrides, separators=(",", ":")) + "\n"))
    windows = overrides["head_plan"]["windows"]
    kept = [window for row in overrides["head_plan"]["heads"] for window in row]
    windowed = sum(window > 0 for window in kept)
    widths = ", ".join(f"{sink} first and {recent} last tokens" for sink, recent in windows[:3])
    more = len(windows) - 3
    lines = [f"{windowed} of {len(kept)} KV heads keep {widths}" + (f", or {more} more" if more > 0 else "")]
    folder = source
    if is_decilm:
        folder = f"{source.rstrip('/')}-served"
        lines.append(f"write the folder with `headscan export decilm {quote(source)} --out {quote(folder)}`")
    use = vllm_command(folder, path, plan.block, is_decilm=is_decilm)
    lines.append(f"written to {path}; with the plugin headscan-vllm serve it with `{use}`")
    return Exported((path,), {"file": path, "windowed": windowed, "kv_heads": len(kept)}, tuple(lines))


def _tensorrt_llm(config: ExportConfig, store: Store | None) -> Exported:
    from headscan.plans import cache_windows
    from headscan.store.output_files import write_text

    arguments = cache_windows(_plan(config))
    # JSON is YAML, too.
    path = str(write_text(config.out, json.dumps({"kv_cache_config": arguments}, indent=2) + "\n"))
    words = ", ".join(f"{name}={value}" for name, value in arguments.items())
    use = f"written to {path}, for `trtllm-serve MODEL --extra_llm_api_options {quote(path)}`"
    lines = [f"KvCacheConfig({words})", use]
    if "sink_token_length" in arguments:
        lines.append("TensorRT-LLM keeps first tokens on its C++ backend alone; the PyTorch backend ignores them")
    return Exported((path,), {"file": path}, tuple(lines), (arguments,))


def _pattern(config: ExportConfig, store: Store | None) -> Exported:
    from headscan.plans import write_pattern

    return _files(write_pattern(_plan(config), config.out, cast("PatternFormat", config.format)))


def _parquet(config: ExportConfig, store: Store | None) -> Exported:
    assert store is not None
    return _files(store.export_parquet(config.out))


class _Form(NamedTuple):
    """A format that holds pruned heads in another shape.

    Attributes:
        name: Name in tables.
        size: Function in `headscan.export` from a `ServableModel` to its `ServedForm`.
        extra: Extra of headscan, named like its package, that the function needs.
    """

    name: str
    size: str
    extra: str = ""


class _Format(NamedTuple):
    """An export format: the phrase of its help, the ``options`` of `ExportConfig` that it uses, and True if it is
    written from the store.
    """

    write: Callable[[ExportConfig, Store | None], Exported]
    help: str
    model: Literal["none", "optional", "needed"] = "none"
    options: tuple[str, ...] = ()
    store: bool = False
    form: _Form | None = None


#: All formats by name, in the order of the help.
EXPORT_FORMATS: Mapping[str, _Format] = {
    "gguf": _Format(
        _gguf,
        "file of a Llama-type model, pruned or not, for llama.cpp",
        "needed",
        ("type", "tokenizer"),
        form=_Form("GGUF", "gguf_file:gguf_form", extra="gguf"),
    ),
    "decilm": _Format(
        _decilm,
        "folder of such a model for vLLM and SGLang, also with a plan by layer",
        "needed",
        ("plan",),
        form=_Form("DeciLM", "decilm_folder:decilm_form"),
    ),
    "layer-types": _Format(
        _layer_types,
        "folder of a model with a plan by layer for vLLM, or without MODEL a file of two fields of its configuration",
        "optional",
        ("plan", "architecture"),
    ),
    "vllm": _Format(
        _vllm, "file of fields of MODEL's configuration for vLLM, with a plan by KV head", "needed", ("plan",)
    ),
    "tensorrt-llm": _Format(_tensorrt_llm, "file that configures a KV cache", options=("plan",)),
    "duoattention": _Format(_pattern, "table of layers x KV heads for DuoAttention", options=("plan",)),
    "rlkv": _Format(_pattern, "such a table for RLKV", options=("plan",)),
    "prulong": _Format(_pattern, "such a table for PruLong", options=("plan",)),
    "parquet": _Format(
        _parquet, "the store as a data set, in a folder or at a URL of fsspec such as s3://bucket/tables", store=True
    ),
}
#: Formats that a model can go into, and those of the store.
OF_MODEL = tuple(name for name, each in EXPORT_FORMATS.items() if each.model != "none")
OF_STORE = tuple(name for name, each in EXPORT_FORMATS.items() if each.store)


def _using(option: str) -> tuple[str, ...]:
    return tuple(name for name, each in EXPORT_FORMATS.items() if option in each.options)


def _only(formats: Iterable[str]) -> str:
    """Return the condition of options that other formats do not use."""
    return f"format {','.join(formats)}"


@short
@dataclass(frozen=True)
class ExportConfig:
    """Settings of an export.

    Attributes:
        format: A key of `EXPORT_FORMATS`, such as ``gguf``.
        model: Model of a format that holds one, which is loaded on the CPU; a plan must be for it. None with
            layer-types writes two fields of a configuration alone.
        plan: File of the plan. None reads ``head_plan.json``; decilm then writes no windows.
        tokenizer: GGUF file whose tokenizer is copied. None uses that of the model, which may be a GGUF file itself.
    """

    format: Annotated[
        str,
        Option(
            "; ".join(f"{name}: {each.help}" for name, each in EXPORT_FORMATS.items()),
            flag="format",
            names=tuple(EXPORT_FORMATS),
        ),
    ]
    out: Annotated[str | Path, Option("output file or folder, as the format states")]
    model: Annotated[ModelSpec | None, Group("model", needs=_only(OF_MODEL))] = None
    type: Annotated[GgufType, Option("type of the matrices in a GGUF file", needs=_only(_using("type")))] = "f16"
    tokenizer: Annotated[
        str | Path | None,
        Option(
            "GGUF file whose tokenizer is copied (default: MODEL if it is such a file, `smollm2` for models from "
            "there, else the model's tokenizer.json)",
            metavar="FILE",
            needs=_only(_using("tokenizer")),
        ),
    ] = None
    architecture: Annotated[
        Architecture,
        Option(
            "architecture of layer-types: llama for vLLM, ministral for transformers, whose Llama has no windows",
            needs=_only(_using("architecture")),
        ),
    ] = "llama"
    plan: Annotated[
        str | Path | None,
        Option(f"plan to export (default: {_PLAN}; of decilm none)", metavar="FILE", needs=_only(_using("plan"))),
    ] = None

    def __post_init__(self) -> None:
        check_limits(self, ExportError)
        wrong = "needed" if self.model is None else "none"
        if EXPORT_FORMATS[self.format].model == wrong:
            raise ExportError("`model` goes with a format of models: give both or neither")
        if self.model is None and self.architecture != "llama":
            raise ExportError("`architecture` has no effect without `model`: leave it out")
        for each in fields(self):
            used = _using(each.name)
            if used and self.format not in used and getattr(self, each.name) != each.default:
                raise ExportError(
                    f"`{each.name}` has no effect on {self.format} (only on {', '.join(used)}): leave it out"
                )


def run_export(config: ExportConfig, store: str | Path | Store | None = None) -> Exported:
    """Write a model for a serving engine, a plan for a KV-cache tool, or a store as a Parquet data set.

    Args:
        store: DuckDB file of the format parquet; None for all other formats.

    Raises:
        ExportError: The format has no place for the model, or needs another package.
        PlanError: The format has no place for the plan, or the plan is of another model.
    """
    from headscan.store.store import Store

    if (store is None) == EXPORT_FORMATS[config.format].store:
        raise ExportError(f"`store` goes with {' or '.join(OF_STORE)}: give both or neither")
    return EXPORT_FORMATS[config.format].write(config, Store(store) if isinstance(store, str | Path) else store)


def _plan(config: ExportConfig) -> HeadPlan:
    """Return the plan, which is for the model if one is named."""
    from headscan.plans import check_model, load_plan
    from headscan.runs.model_identity import identify

    plan = load_plan(config.plan or _PLAN)
    if config.model is not None:
        identity = identify(config.model, need_tokenizer=False)
        check_model(
            plan, config_hash=identity.config_hash, weights_hash=identity.weights_hash, revision=identity.revision
        )
    return plan


def _loaded(config: ExportConfig) -> LoadedModel:
    from headscan.loading import load_spec

    assert config.model is not None
    return load_spec(config.model, "cpu")


def _files(paths: Iterable[object]) -> Exported:
    files = tuple(map(str, paths))
    return Exported(files, lines=files, rows=tuple({"file": file} for file in files))


def _layer_rows(windows: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    return tuple({"layer": layer, "layer_type": kind} for layer, kind in enumerate(windows["layer_types"]))


def _windows(windows: Mapping[str, Any]) -> str:
    layers = [layer for layer, kind in enumerate(windows["layer_types"]) if kind == "sliding_attention"]
    return (
        f"a window of {windows['sliding_window']} tokens in {len(layers)} of {len(windows['layer_types'])} layers: "
        f"{', '.join(map(str, layers))}"
    )
