"""The bundled demo: a small decoder, its task, the pipeline."""

from pathlib import Path

#: Weights, tokenizer and card of the demo model.
MODEL_FOLDER = Path(__file__).parent / "demo-5m"
