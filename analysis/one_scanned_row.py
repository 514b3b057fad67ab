"""The rows of one scanned sequence with the library's own parts, without a store or workers, and a check of one row.

python analysis/one_scanned_row.py

`headscan scan MODEL --corpus texts/ --store s.duckdb` does the same for all sequences of a corpus on any model; there
sequences run in batches, workers share them, and the same command again resumes.
"""

from __future__ import annotations

import inspect
import textwrap

import duckdb
import pyarrow as pa
import torch
from torch import Tensor

import headscan
from headscan.attention.calls import AttentionCall, ScoredCall
from headscan.attention.hooks import attention_hook

lm = headscan.load("demo", device="cpu", dtype="float32")

# 1. One sequence: the beginning of a module that the model has not read (in a scan: headscan/texts/sequences.py).
ids = lm.require_tokenizer()(inspect.getsource(textwrap)[:1000])["input_ids"]

# 2. Statistics of every head (sequences, layers, heads), from one pass of the model, and a score computed from them (in
# a scan: `MeasureShard.run` in headscan/steps/run_scan.py; scores are views of the store).
measured = ("first_token_weight", "entropy", "output_norm")
stats = headscan.collect(lm, [ids], statistics=measured)
score = headscan.score(stats, "output_norm_ln")

# 3. Rows: one per sequence, layer and head (in a scan: `head_table`, and `Store.add_shards`).
rows = pa.Table.from_pylist(lm.grid.rows({**stats, "output_norm_ln": score}))
database = duckdb.connect()
database.register("head_statistics", rows)
least = database.sql("from head_statistics order by output_norm_ln limit 10")
print(f"{rows.num_rows} rows of a sequence of {len(ids)} tokens; the ten with the lowest score:")
print(least)

# 4. The same numbers of the first of these heads from its queries, keys and values, which a hook reads in another pass.
row = dict(zip(least.columns, least.fetchall()[0], strict=True))
seen: dict[int, ScoredCall] = {}


def keep(site: headscan.AttentionSite, call: AttentionCall) -> None:
    assert isinstance(call, ScoredCall)
    seen[site.layer] = call


with torch.no_grad(), attention_hook(lm, keep):
    lm.model(torch.tensor([ids]))


def explicit(call: ScoredCall, head: int) -> dict[str, Tensor]:
    """Return the statistics of a head of a plainly causal attention, from explicit weights in float64."""
    kv_head = head // (call.num_attention_heads // call.num_key_value_heads)
    query, key, value = call.query_BHND[0, head], call.key_BKSD[0, kv_head], call.value_BKSD[0, kv_head]
    scores = call.scale * query.double() @ key.double().T
    later = torch.ones_like(scores).triu(1).bool()
    weights = scores.masked_fill(later, float("-inf")).softmax(-1)
    return {
        "first_token_weight": weights[:, 0].mean(),
        "entropy": -torch.xlogy(weights, weights).sum(-1).mean(),
        "output_norm": (weights @ value.double()).norm(dim=-1).mean(),
    }


print(f"Head {row['layer']}:{row['head']}:")
for name, number in explicit(seen[row["layer"]], row["head"]).items():
    print(f"{name}: row {row[name]:.8f}, explicit {number:.8f}, difference {abs(row[name] - number):.1e}")
