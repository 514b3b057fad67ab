"""The bundled demo: a small trained decoder, a task that it can do, and the whole pipeline."""

from pathlib import Path

#: Weights, tokenizer and card of the demo model.
MODEL_FOLDER = Path(__file__).parent / "demo-5m"
