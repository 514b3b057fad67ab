"""The verb export."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from headscan.checkpoints.source_folder import check_folder
from headscan.errors import ExportError
from headscan.model_spec import ModelSpec
from headscan.options import Group, Option
from headscan.pipelines.cli.option_parser import UsageError, check_used
from headscan.pipelines.cli.results import Json, Result
from headscan.pipelines.cli.verb_base import StoreOptions, StoreVerb, quiet_libraries
from headscan.pipelines.runs.text_tables import text_table

if TYPE_CHECKING:
    from headscan.analysis.plans import HeadPlan, SlidingLayers
    from headscan.models.loaded_model import LoadedModel
    from headscan.pipelines.export.servable_model import HeldSize

Format = Literal["gguf", "decilm", "layer-types", "tensorrt-llm", "duoattention", "rlkv", "prulong", "parquet"]


class _Kind(NamedTuple):
    """How a format is written, and from what: a model, a plan, both, or the store."""

    write: Callable[[Export], Result]
    model: Literal["none", "optional", "needed"] = "none"
    plan: bool = False


_KINDS: Mapping[Format, _Kind] = {
    "gguf": _Kind(lambda verb: verb._gguf(), model="needed"),
    "decilm": _Kind(lambda verb: verb._decilm(), model="needed", plan=True),
    "layer-types": _Kind(lambda verb: verb._layer_types(), model="optional", plan=True),
    "tensorrt-llm": _Kind(lambda verb: verb._tensorrt_llm(), plan=True),
    "duoattention": _Kind(lambda verb: verb._pattern("duoattention"), plan=True),
    "rlkv": _Kind(lambda verb: verb._pattern("rlkv"), plan=True),
    "prulong": _Kind(lambda verb: verb._pattern("prulong"), plan=True),
    "parquet": _Kind(lambda verb: verb._parquet()),
}
_OF_MODEL = tuple(name for name, kind in _KINDS.items() if kind.model != "none")
_OF_PLAN = tuple(name for name, kind in _KINDS.items() if kind.plan)
#: File of a plan unless another is named; of decilm none.
_PLAN = "head_plan.json"


@dataclass(frozen=True, kw_only=True)
class Export(StoreVerb):
    """export a model for a serving engine, a plan for a KV-cache tool, or the store as a Parquet data set

        headscan export gguf smaller/ --out smaller.gguf
        headscan export decilm smaller/ --out served/
        headscan export layer-types MODEL --plan layers.json --out served/
        headscan export tensorrt-llm --plan layers.json --out kv_cache.yaml
        headscan export duoattention --plan head_plan.json --out pattern/
        headscan export parquet --store s.duckdb --out tables/

    gguf is for llama.cpp, decilm for vLLM and SGLang; both take Llama-type models, pruned or not, and decilm also a
    plan by layer. layer-types is a model with such a plan for vLLM, or without MODEL the two fields of its
    configuration; tensorrt-llm configures a KV cache. duoattention, rlkv and prulong are tables of layers x KV heads.
    `headscan plan` reads them back with `--method imported`; examples/read_with_kvpress.py reads the first one with
    kvpress.
    """

    format: Annotated[Format, Option("output format", flag="format")]
    model: Annotated[
        str | None,
        Option(
            "model of gguf, decilm or layer-types: folder, name on the hub, `demo` or `smollm2`",
            flag="MODEL",
            parse=check_folder,
            only=_OF_MODEL,
        ),
    ] = None
    out: Annotated[
        str,
        Option(
            "output folder, or the file of gguf, tensorrt-llm and layer-types without MODEL; of parquet also a URL of "
            "fsspec, such as s3://bucket/tables"
        ),
    ]
    json: Json = False
    type: Annotated[Literal["f16", "f32", "q8_0"], Option("type of the matrices in a GGUF file", only=("gguf",))] = (
        "f16"
    )
    tokenizer: Annotated[
        str | None,
        Option(
            "GGUF file whose tokenizer is copied (default: that of `smollm2` for models from there, else the model's "
            "tokenizer.json)",
            metavar="FILE",
            only=("gguf",),
        ),
    ] = None
    architecture: Annotated[
        Literal["llama", "ministral"],
        Option(
            "architecture of layer-types: llama for vLLM, ministral for transformers, whose Llama has no windows",
            only=("layer-types",),
        ),
    ] = "llama"
    plan: Annotated[
        str | None, Option(f"plan to export (default: {_PLAN}; of decilm none)", metavar="FILE", only=_OF_PLAN)
    ] = None
    loading: Annotated[partial[ModelSpec], Group("model", _OF_MODEL)]
    store: Annotated[StoreOptions, Group(only=("parquet",))]

    def __post_init__(self) -> None:
        wrong = "needed" if self.model is None else "none"
        if _KINDS[self.format].model == wrong:
            raise UsageError("MODEL goes with a format of models: give both or neither")
        if self.model is None and self.architecture != "llama":
            raise UsageError("--architecture has no effect without MODEL: leave it out")
        check_used(self, self.format, self.format)

    def run(self) -> Result:
        return _KINDS[self.format].write(self)

    def _plan(self) -> HeadPlan:
        """Return the plan, which is for the model if one is named."""
        from headscan.analysis.plans import check_model, load_plan
        from headscan.pipelines.runs.model_identity import identify

        plan = load_plan(self.plan or _PLAN)
        if self.model is not None:
            identity = identify(self.loading(self.model), need_tokenizer=False)
            check_model(
                plan,
                config_hash=identity.config_hash,
                weights_hash=identity.weights_hash,
                revision=identity.revision,
            )
        return plan

    def _loaded(self) -> LoadedModel:
        from headscan.loading import load_spec

        assert self.model is not None
        quiet_libraries()
        return load_spec(self.loading(self.model), "cpu")

    def _gguf(self) -> Result:
        try:
            from headscan.pipelines.export.gguf_file import write_gguf
        except ModuleNotFoundError as problem:
            raise ExportError("GGUF files need the package gguf. Run `pip install 'headscan[gguf]'`") from problem

        written = write_gguf(self._loaded(), self.out, type=self.type, tokenizer=self._tokenizer())
        facts = {"file": str(written.file), "architecture": written.architecture, "bytes": written.bytes}
        line = f"{written.file}: architecture {written.architecture}, {written.bytes / 2**20:,.1f} MiB"
        return _result(written.sizes, facts, [line])

    def _layer_types(self) -> Result:
        plan = self._plan()
        if self.model is None:
            return self._layer_fields(plan)
        from headscan.pipelines.export.layer_types_folder import write_layer_types

        written = write_layer_types(self._loaded(), plan, self.out, architecture=self.architecture)
        lines = [f"{written.folder}: {written.bytes / 2**20:,.1f} MiB", _windows(written.windows)]
        if self.architecture == "llama":
            lines.append(f"serve it with `vllm serve {written.folder}`; transformers ignores the windows of a Llama")
        else:
            lines.append("transformers loads it as MinistralForCausalLM, with the windows")
        facts = {
            "folder": str(written.folder),
            "bytes": written.bytes,
            "sliding_window": written.windows.sliding_window,
        }
        return Result(_layer_rows(written.windows), lambda: "\n".join(lines), facts)

    def _layer_fields(self, plan: HeadPlan) -> Result:
        """Write the fields alone, for an engine that reads them in addition to a model's own configuration."""
        from headscan.analysis.plans import sliding_layers
        from headscan.analysis.store.output_files import write_text

        windows = sliding_layers(plan)
        path = write_text(self.out, json.dumps(asdict(windows)) + "\n")
        lines = [
            _windows(windows),
            f'written to {path}, for `vllm serve MODEL --hf-overrides "$(cat {path})"` with a MODEL of type llama',
        ]
        facts = {"file": str(path), "sliding_window": windows.sliding_window}
        return Result(_layer_rows(windows), lambda: "\n".join(lines), facts)

    def _tensorrt_llm(self) -> Result:
        from headscan.analysis.plans import cache_windows
        from headscan.analysis.store.output_files import write_text

        windows = cache_windows(self._plan())
        arguments = {name: value for name, value in asdict(windows).items() if value is not None}
        # JSON is YAML, too.
        path = write_text(self.out, json.dumps({"kv_cache_config": arguments}, indent=2) + "\n")
        words = ", ".join(
            f"{name}={list(value) if isinstance(value, tuple) else value}" for name, value in arguments.items()
        )
        lines = [
            f"KvCacheConfig({words})",
            f"written to {path}, for `trtllm-serve MODEL --extra_llm_api_options {path}`",
        ]
        if windows.sink_token_length:
            lines.append("TensorRT-LLM keeps first tokens on its C++ backend alone; the PyTorch backend ignores them")
        return Result([arguments], lambda: "\n".join(lines), {"file": str(path)})

    def _decilm(self) -> Result:
        from headscan.pipelines.export.decilm_folder import write_decilm

        plan = None if self.plan is None else self._plan()
        written = write_decilm(self._loaded(), self.out, plan=plan)
        facts: dict[str, Any] = {"folder": str(written.folder), "heads": written.heads, "bytes": written.bytes}
        lines = [
            f"{written.folder}: {written.heads} query heads in each layer with attention, "
            f"{written.bytes / 2**20:,.1f} MiB",
            f"serve it with `vllm serve {written.folder} --trust-remote-code` (the code is the configuration's class)",
        ]
        if not written.has_ffn_mult:
            lines.append("the width of the MLP is no multiple of 256, so SGLang cannot read it; vLLM can")
        if written.windows is not None:
            facts["sliding_window"] = written.windows.sliding_window
            lines.append(f"{_windows(written.windows)}; vLLM reads them, and the table does not count what they save")
        return _result(written.sizes, facts, lines)

    def _pattern(self, tool: Literal["duoattention", "rlkv", "prulong"]) -> Result:
        from headscan.analysis.plans import write_pattern

        return _files(write_pattern(self._plan(), self.out, tool))

    def _parquet(self) -> Result:
        return _files(self.store.open().export_parquet(self.out))

    def _tokenizer(self) -> str | None:
        """Return the GGUF file whose tokenizer is copied: the one that is named, or the model itself."""
        is_gguf = self.model is not None and self.model.lower().endswith(".gguf")
        return self.tokenizer or (self.model if is_gguf else None)


def _files(paths: Iterable[object]) -> Result:
    files = [{"file": str(path)} for path in paths]
    return Result(files, lambda: "\n".join(each["file"] for each in files))


def _layer_rows(windows: SlidingLayers) -> list[dict[str, Any]]:
    return [{"layer": layer, "layer_type": kind} for layer, kind in enumerate(windows.layer_types)]


def _windows(windows: SlidingLayers) -> str:
    layers = [layer for layer, kind in enumerate(windows.layer_types) if kind == "sliding_attention"]
    return (
        f"{len(layers)} of {len(windows.layer_types)} layers see {windows.sliding_window} tokens: "
        f"{', '.join(map(str, layers))}"
    )


def _result(sizes: tuple[HeldSize, ...], facts: Mapping[str, Any], lines: list[str]) -> Result:
    """Return what the original, the model and the exported form hold, and what that form saves."""
    original, model, exported = sizes
    table = [
        {
            "model": each.model,
            "query heads": each.query_heads,
            "KV heads": each.kv_heads,
            "layers with attention": each.attention_layers,
            "KV bytes per token (16 bits)": f"{each.kv_bytes:,}",
            "parameters": f"{each.parameters:,}",
        }
        for each in sizes
    ]
    saved = [
        f"saved in the engine: {_share(original.kv_bytes, exported.kv_bytes)} of the KV cache, "
        f"{_share(original.parameters, exported.parameters)} of the weights"
    ]
    if exported.kv_heads != model.kv_heads or exported.query_heads != model.query_heads:
        saved.append(
            f"padding with zeros gives back {exported.kv_bytes - model.kv_bytes:,} KV bytes per token and "
            f"{exported.parameters - model.parameters:,} parameters"
        )
    return Result([asdict(each) for each in sizes], lambda: "\n".join([text_table(table), *saved, *lines]), facts)


def _share(before: int, after: int) -> str:
    return f"{1 - after / before:.1%}"
