"""The folder of a model, checked without importing transformers."""

from __future__ import annotations

from pathlib import Path

from headscan.errors import ModelLoadError


def check_folder(source: str) -> None:
    """Raise if a source is a path without a model.

    Names on the hub pass.

    Raises:
        ModelLoadError: The path does not exist, or its folder has no configuration.
    """
    folder = Path(source)
    if not folder.exists() and (source.startswith((".", "/", "~")) or source.count("/") > 1):
        raise ModelLoadError(f"no model at {source}: there is no such folder. Check the path")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelLoadError(f"no model at {source}: it has no config.json. Give a folder that save_pretrained wrote")
