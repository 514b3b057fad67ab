"""A study as a list of steps, to print, time and edit: what `headscan study` does with sizes and shares of your own.

python pipelines/own_study.py [FOLDER] [--dry-run]

Every step resumes, so the same command goes on where it stopped; a step that is added or changed runs alone.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Any

import headscan
from headscan.texts import held_out_files

paths = [each for each in sys.argv[1:] if each != "--dry-run"]
folder = Path(paths[0] if paths else "headscan-results/own-study")
folder.mkdir(parents=True, exist_ok=True)
store, plan, smaller = folder / "study.duckdb", folder / "plan.json", folder / "smaller"

# For another model give two folders of texts that share no document.
model = headscan.ModelSpec("demo", dtype="float32")
for number, file in enumerate(held_out_files()):
    part = folder / ("measuring", "judging")[number % 2]
    part.mkdir(exist_ok=True)
    shutil.copy(file, part)
measuring, judging = (headscan.CorpusSpec(str(folder / part)) for part in ("measuring", "judging"))
tokens = headscan.TokenConfig(max_tokens=192, mode="chunk", limit_sequences=48)

steps: list[Any] = [
    headscan.Scan(model, measuring, tokens),
    headscan.Importance(model, measuring, tokens),
    headscan.Plan(
        model,
        method="measured",
        corpus=measuring,
        window_share=0.25,
        recent=(28,),
        max_tokens=192,
        sequences=16,
        out=plan,
    ),
    headscan.Prune(
        model,
        out=smaller,
        share=0.05,
        texts=headscan.PruneTexts(measuring, judging, sequences=32, max_tokens=192),
        timing=None,
        skip_verdict=True,
    ),
    headscan.Evaluate(
        model,
        recall=headscan.RecallQuestions(questions=24),
        held_out=headscan.LossTexts(judging, sequences=64, max_tokens=192),
        arms=headscan.ChosenArms(criterion="importance", share=0.05, plans=(str(plan),), models=(str(smaller),)),
    ),
]

for number, step in enumerate(steps, 1):
    print(f"{number}. {type(step).__name__}: {(step.__doc__ or '').splitlines()[0]}")
    if "--dry-run" in sys.argv or (isinstance(step, headscan.Prune) and smaller.exists()):  # a built model stays
        continue
    began = time.monotonic()
    result = step.run(store)
    print(f"   {time.monotonic() - began:.0f} s")
print("" if "--dry-run" in sys.argv else result)
