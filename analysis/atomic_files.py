"""Atomic file writes through a temporary file in the same folder."""

from __future__ import annotations

import secrets
from contextlib import suppress
from pathlib import Path

from headscan.analysis.errors import AnalysisError


class OutputError(AnalysisError):
    """An output file cannot be written."""


def write_text(path: str | Path, text: str) -> Path:
    """Write UTF-8 text to ``path`` atomically; a missing directory is created.

    Raises:
        OutputError: The directory cannot be created or written, or is full.
    """
    target = Path(path)
    fresh = target.parent / f".{target.name}.{secrets.token_hex(4)}.partial"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(text, encoding="utf-8", newline="\n")
        fresh.replace(target)
    except OSError as error:
        raise OutputError(
            f"cannot write {target} ({error.strerror}). Choose another path, or free disk space"
        ) from error
    finally:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
    return target
