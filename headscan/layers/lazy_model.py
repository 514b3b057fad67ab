"""A model on the meta device that loads weights by module, each tensor into a memory map of its own.

``from_pretrained`` builds the model on the meta device, which reads only the headers of the checkpoint and reports
missing tensors. Weights are loaded by transformers' own code, with the conversions of the architecture (for example,
experts that are saved one by one and merged). The heap keeps holes of freed tensors; a map is unmapped as soon as its
tensor is freed, so that a range of weights can replace another in the same memory.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable, Iterable, Mapping
from io import FileIO
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from headscan.checkpoints.headers import FileHeader, read_header
from headscan.checkpoints.source_folder import no_progress_bar
from headscan.checkpoints.sources import commit_of, source_options
from headscan.errors import ModelLoadError, first_line
from headscan.loading import check_device, read_model
from headscan.model_spec import ModelSpec

#: Smallest tensor in a map of its own, in bytes.
_LEAST = 1 << 20


def empty_mmap(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised CPU tensor."""
    size = math.prod(shape) * dtype.itemsize
    if size < _LEAST:
        return torch.empty(shape, dtype=dtype)
    # Private maps merge with their neighbours; a process may have only 65,530 separate areas.
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def mmap_copy(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a CPU copy of a tensor; ``dtype=None`` keeps its dtype."""
    return empty_mmap(tuple(tensor.shape), dtype or tensor.dtype).copy_(tensor)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data


#: Dtypes of weights, by name in safetensors.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def tensor_files(source: str, revision: str | None = None) -> dict[str, Path]:
    """Return the safetensors file of each tensor of a folder, or of a hub name, whose missing files are downloaded."""
    if index := _find(source, SAFE_WEIGHTS_INDEX_NAME, revision):
        names: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        paths = {name: _find(source, name, revision) for name in set(names.values())}
        if lacking := sorted(name for name, path in paths.items() if path is None):
            raise ModelLoadError(f"{source} lacks {lacking[0]}, which its index names. Copy or download it again")
        return {tensor: path for tensor, name in names.items() if (path := paths[name]) is not None}
    if whole := _find(source, SAFE_WEIGHTS_NAME, revision):
        return dict.fromkeys(read_header(whole).tensors, whole)
    raise ModelLoadError(
        f"{source} has no safetensors weights, and others cannot be read layer by layer. Convert them with "
        "save_pretrained, or choose placement whole"
    )


def read_tensors(
    files: Mapping[str, Path], names: Iterable[str], keep: Callable[[str, Tensor], Tensor]
) -> dict[str, Tensor]:
    """Read tensors of `tensor_files` into memory, and keep what ``keep`` returns of each.

    The tensors are not views of a mapped file: the system may drop and read the pages of a view again at any time. The
    original of a tensor is freed before the next one is read.
    """
    tensors: dict[str, Tensor] = {}
    for path, of_file in groupby(sorted(names, key=lambda name: (files[name], name)), key=files.__getitem__):
        header = read_header(path)
        try:
            with path.open("rb", buffering=0) as file:
                for name in of_file:
                    tensors[name] = keep(name, _read_tensor(file, header, name))
        except (OSError, EOFError, KeyError) as problem:
            raise ModelLoadError(
                f"{path} cannot be read: {first_line(problem)}. Copy or download it again"
            ) from problem
    return tensors


def _read_tensor(file: FileIO, header: FileHeader, name: str) -> Tensor:
    """Read one tensor; other threads run meanwhile."""
    saved = header.tensors[name]
    tensor = empty_mmap(saved.shape, _DTYPES[saved.dtype])
    if tensor.nbytes:
        left = bytes_of(tensor)
        file.seek(header.nbytes + saved.begin)
        while left:
            count = file.readinto(left)
            if not count:
                raise EOFError(f"it ends in {name}")
            left = left[count:]
    return tensor


def _find(source: str, name: str, revision: str | None) -> Path | None:
    path = cached_file(source, name, _raise_exceptions_for_missing_entries=False, **source_options(source, revision))
    return None if path is None else Path(path)


#: Tensors by name in the checkpoint, in the dtype and on the device of the model.
RawTensors = dict[str, Tensor]


class LazyModel:
    """A model on the meta device whose weights are loaded onto a device and dropped.

    Weights are named as in the model's ``state_dict``; a weight with several names (a tied head) by its first one.
    Small tables that no checkpoint contains (rotary frequencies) are always on the device.
    """

    def __init__(self, spec: ModelSpec, device: str) -> None:
        self.source = spec.folder
        check_device(device)
        self.device = torch.device(device)
        config = spec.config()
        if getattr(config, "quantization_config", None) is not None:
            raise ModelLoadError(
                f"{self.source} is quantised and cannot be read layer by layer. Choose placement whole or sharded"
            )
        with no_progress_bar():
            self.model = read_model(spec, config, {"": "meta"})
        self.commit = commit_of(self.source, spec.revision)
        self._make_tables()
        self._files = tensor_files(self.source, spec.revision)
        self._aliases = _aliases(self.model)
        self._conversions = get_model_conversion_mapping(self.model)
        self._saved_as = self._find_sources()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all weights, each weight once."""
        return tuple(self._aliases)

    def aliases(self, name: str) -> tuple[str, ...]:
        """Return all names of a weight, including the first."""
        return self._aliases[name]

    def tensor(self, name: str) -> Tensor:
        weight = self.model.get_parameter_or_buffer(name)
        assert isinstance(weight, Tensor)
        return weight

    def size(self, names: Iterable[str]) -> int:
        """Return the bytes of weights once they are loaded."""
        return sum(tensor.numel() * tensor.element_size() for tensor in map(self.tensor, names))

    def read(self, names: Iterable[str]) -> RawTensors:
        """Read weights onto the device without changing the model; another thread may call it while the model runs."""
        dtypes = {saved: self.tensor(name).dtype for name in names for saved in self._saved_as.get(name, ())}

        def keep(name: str, raw: Tensor) -> Tensor:
            if self.device.type != "cpu":
                return raw.to(device=self.device, dtype=dtypes[name])
            return raw if raw.dtype == dtypes[name] else mmap_copy(raw, dtypes[name])

        return read_tensors(self._files, dtypes, keep)

    def put(self, names: Iterable[str], raw: RawTensors) -> None:
        """Put weights that `read` returned into the model; ``raw`` is consumed."""
        names = list(names)
        state = {name: _Once(raw, name) for name in list(raw)}
        # transformers' own conversion from tensors of a checkpoint to weights. Its only caller, `from_pretrained`,
        # builds a whole model each time and fills missing weights with random numbers.
        conversions: Any = self._conversions
        config = LoadStateDictConfig(device_map={"": str(self.device)}, weight_mapping=conversions)
        with no_progress_bar():  # it would appear for each range of layers
            loading, _ = convert_and_load_state_dict_in_model(self.model, state, config)
        for name in names:
            self.assign(name, self.tensor(name))  # under its other names
            if self.tensor(name).is_meta:
                why = next(
                    iter(loading.conversion_errors.values()), "tensors are missing or have another shape"
                ).strip()
                raise ModelLoadError(
                    f"{self.source} does not load: {name}: {why.splitlines()[-1]}. Copy or download it again"
                )

    def assign(self, name: str, value: Tensor) -> None:
        """Put one weight into the model, under all its names."""
        for alias in self._aliases[name]:
            self._set(alias, value)

    def blank(self, name: str) -> None:
        """Put zeros without memory under one name of a weight. Its other names keep their tensor."""
        own = self.tensor(name)
        self._set(name, torch.zeros(1, dtype=own.dtype, device=self.device).expand(own.shape))

    def drop(self, names: Iterable[str]) -> None:
        """Replace weights by meta tensors, which frees them."""
        for name in names:
            self.assign(name, torch.empty_like(self.tensor(name), device="meta"))

    def _set(self, name: str, value: Tensor) -> None:
        path, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(path)
        if leaf in module._buffers:
            module._buffers[leaf] = value
        elif isinstance(value, nn.Parameter):
            module._parameters[leaf] = value
        else:
            module._parameters[leaf] = nn.Parameter(value, requires_grad=False)

    def _make_tables(self) -> None:
        """Compute the tables that no checkpoint contains, as ``from_pretrained`` does."""
        for name, table in list(self.model.named_non_persistent_buffers()):
            self._set(name, torch.empty_like(table, device=self.device))
        # Modules on the meta device are marked as initialised. Weights keep that mark, so they stay unchanged.
        for module in self.model.modules():
            module._is_hf_initialized = False  # type: ignore[assignment]
        self.model.initialize_weights()

    def _find_sources(self) -> dict[str, list[str]]:
        """Return the tensors of the checkpoint from which each weight is built."""
        renamings = [entry for entry in self._conversions if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self._conversions if isinstance(entry, WeightConverter)]
        state = self.model.state_dict()
        first = {alias: name for name, aliases in self._aliases.items() for alias in aliases}
        sources: dict[str, dict[str, list[str]]] = {}
        for saved in self._files:
            name, _ = rename_source_key(saved, renamings, converters, self.model.base_model_prefix, state)
            if name not in first and saved in first:
                name = saved
            if name in first:
                sources.setdefault(first[name], {}).setdefault(name, []).append(saved)
        # A weight that is saved under several names is read once.
        return {name: next(iter(by_alias.values())) for name, by_alias in sources.items()}


class _Once:
    """A tensor that transformers reads by slicing. Reading removes it from ``raw``."""

    def __init__(self, raw: RawTensors, name: str) -> None:
        self._raw, self._name = raw, name

    def __getitem__(self, _: Any) -> Tensor:
        return self._raw.pop(self._name)


def _aliases(model: PreTrainedModel) -> dict[str, tuple[str, ...]]:
    """Return all names of each weight, by its first name."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return {aliases[0]: tuple(aliases) for aliases in names.values()}
