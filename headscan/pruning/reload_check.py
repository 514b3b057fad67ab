"""A comparison of saved models, loaded in a process that shares nothing, with the models in memory.

The process is ``python -m headscan.pruning.reload_check FOLDER LOGITS ...``.

Shapes: B sequences, N tokens, V words.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headscan.errors import HeadscanError, PruningError
from headscan.layers.blocks import short_text
from headscan.loading import load
from headscan.models.layout import Sharding
from headscan.models.loaded_model import LoadedModel

_TOKENS = 16
#: Largest relative error of the logits of half of the tokens, by bytes of a weight. Devices round differently, and a
#: near tie of a router can change single tokens; weights of another model give errors of about 1.
_BOUNDS = {8: 1e-3, 4: 1e-2, 2: 0.1}


def save_logits(lm: LoadedModel, file: str | os.PathLike[str]) -> None:
    """Write the logits of a short text into a file, for `check_reload`."""
    save_file({"logits": _logits(lm)}, file)


def check_reload(logits: Mapping[Path, Path]) -> None:
    """Load saved models in a fresh process on the CPU, and raise if their logits differ. A model that is larger than
    half of the free memory is read from disk layer by layer.

    Args:
        logits: By folder of a model the file that `save_logits` wrote for the model in memory.
    """
    here = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    words = [str(path.absolute()) for pair in logits.items() for path in pair]
    done = subprocess.run(
        [sys.executable, "-m", "headscan.pruning.reload_check", *words],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": here},
        check=False,
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
        found: Tensor = lm.model(input_ids=short_text(lm, _TOKENS), use_cache=False).logits
    return found.detach().float().cpu().contiguous()


def _problem(folder: Path, file: Path) -> str | None:
    """Return what is wrong with a saved model, or None."""
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        lm = load(folder, device="cpu" if 2 * size <= free else Sharding(("cpu",), ((0, 0),), "disk"))
    except HeadscanError as problem:
        return f"{folder} does not load in a fresh process: {problem}"
    want, found = load_file(file)["logits"], _logits(lm)
    if found.shape != want.shape:
        return (
            f"{folder}, loaded in a fresh process, has logits of shape {tuple(found.shape)} (limit {tuple(want.shape)})"
        )
    error = float(((found - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-12)).median())
    bound = _BOUNDS[lm.model.dtype.itemsize]
    if not error <= bound:
        return f"{folder}, loaded in a fresh process, has other logits: relative error {error:.2g} (limit {bound:g})"
    return None


if __name__ == "__main__":
    paths = [Path(word) for word in sys.argv[1:]]
    found = [_problem(folder, file) for folder, file in zip(paths[::2], paths[1::2], strict=True)]
    print(json.dumps([each for each in found if each is not None]))
