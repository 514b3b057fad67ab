"""Saving of pruned models, as a stock architecture where head counts allow it, and a check of what was saved.

The check loads saved models in a process that shares nothing, and compares them with the models in memory. The process
is ``python -m headscan.pruning.save_model FOLDER LOGITS ...``.

Shapes: B sequences, N tokens, V words.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from headscan.errors import HeadscanError, PruningError, check_type, one_line
from headscan.layers.blocks import short_text
from headscan.loading import load
from headscan.models.loaded_model import LoadedModel, Sharding, check_loaded
from headscan.pruning.format.pruned_model import MODEL_TYPE, auto_map, heads_of
from headscan.pruning.slice_heads import sharing_copy

#: Model types whose number of heads is free once ``head_dim`` is named.
_STOCK = {"cohere2", "gpt_oss", "granite", "llama", "mistral", "mixtral", "qwen2", "qwen3"}


def save_pruned(
    lm: LoadedModel,
    folder: str | os.PathLike[str],
    *,
    card: str | None = None,
    remote_code: bool = False,
    max_shard_size: int | str = "5GB",
) -> None:
    """Save a model with its tokenizer, so that `headscan.load` and `AutoModelForCausalLM` read it.

    The folder appears when it is complete. If all layers have the same number of heads in equal groups, the result is a
    stock architecture, and needs no code. Otherwise it needs ``import headscan``.

    Args:
        lm: A model, from `slice_heads` or not.
        folder: A folder that does not exist, or is empty.
        card: Text of ``README.md``; None writes none.
        remote_code: Copy the code of pruned models into the folder, so that ``trust_remote_code=True`` loads it without
            headscan.
        max_shard_size: Largest size of a weight file, such as ``5GB``.

    Raises:
        PruningError: The folder is not empty, or cannot be written.
    """
    check_loaded(lm)
    check_type("folder", folder, str | os.PathLike, "the path of a new folder", PruningError)
    with complete_folder(folder, PruningError) as made:
        _write(lm, made, remote_code, max_shard_size)
        if card is not None:
            (made / "README.md").write_text(card, encoding="utf-8")


@contextmanager
def complete_folder(folder: str | os.PathLike[str], error: type[HeadscanError]) -> Iterator[Path]:
    """Yield a folder to fill, which takes the place of ``folder`` when the block ends. ``error`` is raised if it cannot
    be written, and PruningError if ``folder`` holds something.
    """
    target = Path(folder)
    check_output_folder(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
            made = Path(scratch) / "model"
            made.mkdir()
            yield made
            made.replace(target)
    except (OSError, SafetensorError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise error(f"{target} cannot be written: {reason}. Free space, or choose another folder") from problem


def check_output_folder(folder: str | os.PathLike[str]) -> None:
    """Raise if a folder for a model holds something."""
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise PruningError(f"{target} is not empty. Choose a new folder")


def open_weights(folder: Path) -> None:
    """Give the weights of a folder the permissions of its ``config.json``: safetensors writes files that only their
    owner can read, and a server often runs as another user.
    """
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", weights)


def _write(lm: LoadedModel, folder: Path, remote_code: bool, max_shard_size: int | str) -> None:
    model: Any = lm.model
    config = stock_config(model)
    if config is not None:
        stock: Any = AutoModelForCausalLM._model_mapping[type(config)]
        model = sharing_copy(model, config, stock)
    try:
        if model.can_generate():
            model.generation_config.validate(strict=True)
    except ValueError as problem:
        raise PruningError(
            f"{lm.source} cannot be saved: {one_line(problem)} Change lm.model.generation_config"
        ) from problem
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    open_weights(folder)
    if remote_code and heads_of(model.config):
        _add_code(model.config, folder)
    if lm.tokenizer is not None:
        lm.tokenizer.save_pretrained(folder)


def _add_code(config: Any, folder: Path) -> None:
    """Name the code of pruned models in a saved configuration, which copies it into the folder."""
    saved = AutoConfig.from_pretrained(folder)
    saved.architectures = config.architectures
    saved.auto_map = auto_map(saved)
    saved.save_pretrained(folder)


def stock_config(model: Any) -> PreTrainedConfig | None:
    """Return the configuration of a stock architecture that equals a pruned model; None if there is none."""
    config = model.config
    if config.model_type != MODEL_TYPE or config.base_model_type not in _STOCK:
        return None
    layers = heads_of(config)
    shapes = {(len(heads.kept), len(heads.kept_kv), heads.groups_are_equal) for heads in layers.values()}
    if len(layers) != config.num_hidden_layers or len(shapes) != 1:
        return None
    H, K, equal = shapes.pop()
    if not equal or not H:
        return None
    fields = {key: value for key, value in config.to_dict().items() if key not in _OWN_FIELDS}
    kind = config.base_model_type
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    fields |= {"num_attention_heads": H, "num_key_value_heads": K, "head_dim": head_dim}
    if kind == "llama" and config.hidden_size % H:
        if config.attention_bias or config.mlp_bias:
            return None
        kind = "mistral"  # the same computation, without llama's limit on the number of heads
        fields |= {"sliding_window": None}
    stock = AutoConfig.for_model(kind, **fields)
    return stock if _fits(stock, model) else None


_OWN_FIELDS = {
    "architectures",
    "auto_map",
    "base_model_type",
    "model_type",
    "per_layer_config",
    "pruned_attention",
    "transformers_version",
}


def _fits(config: PreTrainedConfig, model: Any) -> bool:
    """Return True if the stock model has the same weights by name and shape."""
    with torch.device("meta"):
        stock = AutoModelForCausalLM.from_config(config)
    config.dtype = model.dtype
    shapes = {name: tensor.shape for name, tensor in stock.state_dict().items()}
    return shapes == {name: tensor.shape for name, tensor in model.state_dict().items()}


_TOKENS = 16
#: Largest relative error of the logits of half of the tokens, by bytes of a weight. Devices round differently, and a
#: near tie of a router can change single tokens; weights of another model give errors of about 1.
_BOUNDS = {8: 1e-3, 4: 1e-2, 2: 0.1}


def save_logits(lm: LoadedModel, file: str | os.PathLike[str]) -> None:
    """Write the logits of a short text into a file, for `check_reload`."""
    save_file({"logits": _logits(lm)}, file)


def run_python(*words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these words in a fresh process, which finds this headscan."""
    here = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": here},
        check=False,
    )


def check_reload(logits: Mapping[Path, Path]) -> None:
    """Load saved models in a fresh process on the CPU, and raise if their logits differ from those in the file of
    `save_logits`. A model that is larger than half of the free memory is read from disk layer by layer.
    """
    done = run_python(
        "-m", "headscan.pruning.save_model", *(str(path.absolute()) for pair in logits.items() for path in pair)
    )
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise PruningError(
            f"{', '.join(map(str, logits))} cannot be checked: the process that loads it failed ({why}). Free memory"
        )
    problems = json.loads(done.stdout.splitlines()[-1])
    if problems:
        raise PruningError(f"{problems[0]}. The saved model was not used; report this with the model's architecture")


def _logits(lm: LoadedModel) -> Tensor:
    """Return the logits (B, N, V) of a short text as float32 on the CPU."""
    with torch.no_grad():
        predicted: Tensor = lm.model(input_ids=short_text(lm, _TOKENS), use_cache=False).logits
    return predicted.detach().float().cpu().contiguous()


def _problem(folder: Path, file: Path) -> str | None:
    """Return what is wrong with a saved model, or None."""
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        lm = load(folder, device="cpu" if 2 * size <= free else Sharding(("cpu",), ((0, 0),), "disk"))
    except HeadscanError as problem:
        return f"{folder} does not load in a fresh process: {problem}"
    want, got = load_file(file)["logits"], _logits(lm)
    if got.shape != want.shape:
        return (
            f"{folder}, loaded in a fresh process, has logits of shape {tuple(got.shape)} (limit {tuple(want.shape)})"
        )
    error = float(((got - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-12)).median())
    bound = _BOUNDS[lm.model.dtype.itemsize]
    if not error <= bound:
        return f"{folder}, loaded in a fresh process, has other logits: relative error {error:.2g} (limit {bound:g})"
    return None


if __name__ == "__main__":
    paths = [Path(word) for word in sys.argv[1:]]
    found = [_problem(folder, file) for folder, file in zip(paths[::2], paths[1::2], strict=True)]
    print(json.dumps([each for each in found if each is not None]))
