"""Remove the least needed heads of the demo model, repair it, save it, and load it again.

python pipelines/prune_and_reload.py [FOLDER]
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import headscan

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "headscan-results")
out = folder / "smaller"
shutil.rmtree(out, ignore_errors=True)

# 1. Choose a fifth of the heads, repair what is left, and save. `headscan prune` also gives a verdict.
pruning = headscan.Prune(
    headscan.ModelSpec("demo"),
    share=0.2,
    texts=headscan.PruneTexts(sequences=24, max_tokens=128),
    timing=None,
    skip_verdict=True,
    out=out,
)
(built,) = pruning.run(folder / "prune.duckdb").models

# 2. The folder loads in headscan and, after `import headscan`, in transformers.
before, after = headscan.load("demo", device="cpu", dtype="float32"), headscan.load(built.folder, device="cpu")
print(f"{len(list(before.grid.heads()))} heads became {len(list(after.grid.heads()))}")
sizes = [sum(weight.numel() for weight in lm.model.parameters()) for lm in (before, after)]
print(f"{sizes[0]:,} parameters became {sizes[1]:,}")

model = AutoModelForCausalLM.from_pretrained(built.folder)
tokenizer = before.require_tokenizer()
ids = torch.tensor([tokenizer("def area(width, height):\n    return")["input_ids"]])
for name, each in (("original", before.model), ("smaller", model)):
    with torch.no_grad():
        written = each.generate(  # type: ignore[operator]  # transformers mixes it in without a type
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
        )
    print(f"--- {name}\n{tokenizer.decode(written[0])}")
