"""Scan the demo model, list its least active heads, and see what one of them does on a text.

python pipelines/scan_and_query.py [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

import headscan

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "headscan-results")
folder.mkdir(parents=True, exist_ok=True)
store = folder / "scan.duckdb"

# 1. One row of statistics per sequence, layer and head. The same call again resumes.
corpus = headscan.CorpusSpec("python-stdlib-heldout", limit_documents=8)
tokens = headscan.TokenConfig(256, mode="chunk", limit_sequences=64)
headscan.Scan(headscan.ModelSpec("demo"), corpus, tokens).run(store)

# 2. SQL, as relations: .df() and .pl() give frames.
tables = headscan.open_store(store)
least = tables.heads().order("output_norm_ln").limit(5).project("layer, head, output_norm_ln, first_token_weight")
print("The least active heads:")
print(least)

layers = tables.query(
    "select layer, avg(first_token_weight) as to_first_token, avg(distant_mass) as to_distant_keys"
    " from head_summary group by layer order by layer"
)
print("Attention by layer:")
print(layers)

# 3. The same statistics for any text, without a store.
lm = headscan.load("demo", device="cpu")
layer, head = least.fetchall()[0][:2]
stats = headscan.collect(lm, ["def area(width, height):\n    return width * height\n"])
weight = float(stats["first_token_weight"][0, layer, head])
print(f"On one function, head {layer}:{head} puts {100 * weight:.0f} % of its attention on the first token.")
