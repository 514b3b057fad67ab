"""The folder of a model, checked without importing transformers."""

from __future__ import annotations

from pathlib import Path

from headscan.checkpoints.gguf_file import SMOLLM2, gguf_folder, packaged_file
from headscan.errors import ModelLoadError

#: Name of the bundled model, and its folder.
DEMO_MODEL = "demo"
DEMO_FOLDER = Path(__file__).parents[1] / "pipelines" / "demo" / "demo-5m"


def locate(source: str) -> str:
    """Return the folder of a model that is named or a GGUF file; other sources stay as they are.

    ``demo`` is the bundled model, ``smollm2`` that of an installed package; a GGUF file is converted once.
    """
    path = Path(source)
    if source == DEMO_MODEL and not path.exists():
        return str(DEMO_FOLDER)
    if (source == SMOLLM2 and not path.exists()) or _is_gguf(path):
        return str(gguf_folder(packaged_file() if source == SMOLLM2 else path))
    return source


def check_folder(source: str) -> None:
    """Raise if a source is a path without a model. Names on the hub pass."""
    folder = Path(source)
    if not folder.exists() and (source.startswith((".", "/", "~")) or source.count("/") > 1 or _is_gguf(folder)):
        kind = "file" if _is_gguf(folder) else "folder"
        raise ModelLoadError(f"no model at {source}: there is no such {kind}. Check the path")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelLoadError(f"no model at {source}: it has no config.json. Give a folder that save_pretrained wrote")


def _is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf" and not path.is_dir()
