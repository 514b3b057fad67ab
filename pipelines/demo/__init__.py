"""The bundled demo: a small trained decoder, a task it can do, and the whole pipeline run on both."""

from pathlib import Path

#: Weights, tokenizer and card of the demo model.
MODEL_FOLDER = Path(__file__).parent / "demo-5m"
