"""Files of settings: options of a verb, or a study."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headscan.errors import HeadscanError


def settings_file(path: str | Path, error: type[HeadscanError]) -> dict[str, Any]:
    """Return the settings in a YAML or JSON file. Raise ``error`` if the file cannot be read or holds none."""
    import yaml

    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as problem:
        what = problem.strerror if isinstance(problem, OSError) else " ".join(str(problem).split())
        raise error(f"{path} cannot be read: {what}. Give a YAML or JSON file") from problem
    if not isinstance(found, dict):
        raise error(f"{path} holds no settings. Write lines such as `model: demo`")
    return found
