"""Files that appear whole: written beside their place under a hidden name, then moved there."""

from __future__ import annotations

import secrets
from contextlib import suppress
from pathlib import Path

from headscan.analysis.errors import AnalysisError


class OutputError(AnalysisError):
    """A file cannot be written where it was asked for."""


def write_text(path: str | Path, text: str) -> Path:
    """Write UTF-8 text to ``path``, whose directory is made if missing; what stood there stays until it is whole.

    Raises:
        OutputError: The directory cannot be made or written, or is full.
    """
    target = Path(path)
    fresh = target.parent / f".{target.name}.{secrets.token_hex(4)}.partial"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(text, encoding="utf-8", newline="\n")
        fresh.replace(target)
    except OSError as error:
        raise OutputError(f"{target} cannot be written ({error.strerror}): name another path or free space") from error
    finally:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
    return target
