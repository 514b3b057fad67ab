"""Measure which KV heads of the demo model need the whole cache, and generate with a cache that keeps less.

python pipelines/plan_and_generate.py [FOLDER]
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path

import torch

import headscan
from headscan.plans import write_pattern

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "headscan-results")
folder.mkdir(parents=True, exist_ok=True)

# 1. How much loss does a window of 4 first and 60 last tokens add, for each KV head? Half of the heads get it.
# With recall_prompts=8, the default, it is measured on copying and needles, too.
plan = headscan.Plan(
    model=headscan.ModelSpec("demo", dtype="float32"),
    method="measured",
    corpus=headscan.CorpusSpec("python-stdlib-heldout", limit_documents=8),
    recent=(60,),
    window_share=0.5,
    max_tokens=192,
    sequences=8,
    recall_prompts=0,
    out=folder / "head_plan.json",
).run(folder / "s.duckdb")
write_pattern(plan, folder / "duoattention", "duoattention")
print("\n".join(plan.summary()))

# 2. Generate with the full cache and with the plan's.
lm = headscan.load("demo", device="cpu", dtype="float32")
tokenizer = lm.require_tokenizer()
ids = torch.tensor([tokenizer(inspect.getsource(json)[:1200])["input_ids"]])
plan = headscan.load_plan(folder / "head_plan.json")
for name, cache in (("full cache", None), ("plan", headscan.PlanCache(plan))):
    with torch.no_grad():
        written = lm.model.generate(  # type: ignore[operator]  # transformers mixes it in without a type
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=24, do_sample=False
        )
    print(f"--- {name}\n{tokenizer.decode(written[0, ids.shape[1] :])}")
