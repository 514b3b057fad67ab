"""The folder of a model, checked without importing transformers."""

from __future__ import annotations

from pathlib import Path

from headscan.errors import ModelLoadError

#: Name of the bundled model, and its folder.
DEMO_MODEL = "demo"
DEMO_FOLDER = Path(__file__).parents[1] / "pipelines" / "demo" / "demo-5m"


def locate(source: str) -> str:
    """Return the folder of the bundled model for its name; other sources stay as they are."""
    return str(DEMO_FOLDER) if source == DEMO_MODEL and not Path(source).exists() else source


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
