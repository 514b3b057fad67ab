"""The bundled demo: a small decoder, its task, the pipeline."""

from headscan.checkpoints.source_folder import DEMO_FOLDER as MODEL_FOLDER

__all__ = ["MODEL_FOLDER"]
