"""Generate with kvpress and a plan that headscan exported.

    headscan export duoattention --plan head_plan.json --out pattern/
    python pipelines/read_with_kvpress.py MODEL pattern/ long.txt

kvpress reads patterns of six models from the hub alone, so a subclass of its press names the exported files. kvpress
0.5.5 needs transformers before 5.3: install it in an environment of its own. headscan is not needed there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from kvpress import DuoAttentionPress


def exported_press(folder: str | Path) -> DuoAttentionPress:
    """Return the press of an exported plan: window heads lose the context between their first and last tokens."""
    config = json.loads((Path(folder) / "config.json").read_text())
    keep = np.loadtxt(Path(folder) / "full_attention_heads.tsv", delimiter="\t", ndmin=2)

    class ExportedPress(DuoAttentionPress):
        def load_attention_pattern(self, model: Any) -> tuple[int, int, np.ndarray]:
            return config["sink_size"], config["recent_size"], keep

    return ExportedPress(head_compression_ratio=config["sparsity"])


def main(model_name: str, folder: str, text_file: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_name, attn_implementation="sdpa").eval()
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    inputs = tokenizer(Path(text_file).read_text(), return_tensors="pt")
    with exported_press(folder)(model):
        written = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    print(tokenizer.decode(written[0, inputs["input_ids"].shape[1] :]))


if __name__ == "__main__":
    main(*sys.argv[1:])
