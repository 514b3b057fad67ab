"""The bundled demo model, a small decoder of Python."""

from headscan.checkpoints.source_folder import DEMO_FOLDER as MODEL_FOLDER

__all__ = ["MODEL_FOLDER"]
