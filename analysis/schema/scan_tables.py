"""The tables of runs, and of what scans and probes measured; statistics and profiles come from the catalogue."""

from __future__ import annotations

from headscan.analysis.schema.ddl import Column, Table
from headscan.catalog import PROFILES, STATISTICS

RUN = Column("run_id", "VARCHAR", "the run, see runs")
SITE = Column("site", "VARCHAR", "which attention of the layer: self, encoder or cross")
LAYER = Column("layer", "SMALLINT", "layer, from 0")
HEAD = Column("head", "SMALLINT", "query head, from 0")
_SEQUENCE = Column("sequence", "INTEGER", "number of the sequence in its run, from 0")

RUNS = Table(
    "runs",
    "one row per run: what was measured or evaluated, with what",
    (
        Column("run_id", "VARCHAR", "12 hexadecimal digits that follow from kind and fingerprint"),
        Column("kind", "VARCHAR", "scan (of a corpus), recording (of the prompts of a sweep), evaluate or probe"),
        Column("fingerprint", "VARCHAR", "hash of everything that decides the numbers; the same one is resumed"),
        Column("model", "VARCHAR", "path or hub name"),
        Column("model_revision", "VARCHAR", "commit on the hub", nullable=True),
        Column("model_config_hash", "VARCHAR", "hash of the model's configuration", nullable=True),
        Column("weights_hash", "VARCHAR", "hash of the weights", nullable=True),
        Column("tokenizer_hash", "VARCHAR", "hash of the tokenizer", nullable=True),
        Column("bos_policy", "VARCHAR", "how a sequence begins", nullable=True),
        Column("corpus", "VARCHAR", "the corpus, or the tasks of an evaluation", nullable=True),
        Column("corpus_hash", "VARCHAR", "hash of the text really read; known at the end", nullable=True),
        Column("num_layers", "INTEGER", "layers of the model"),
        Column("num_heads", "INTEGER", "query heads of the widest layer"),
        Column("dtype", "VARCHAR", "of the weights while they ran", nullable=True),
        Column(
            "attention_path",
            "VARCHAR",
            "how attention was reached: interface (transformers' own), watched (inside the model), or both",
            nullable=True,
        ),
        Column("grid", "JSON", "one object per site: its layer, heads, KV heads, dimensions, window"),
        Column("config", "JSON", "all other options, the widths of sink and recent among them"),
        Column("packages", "JSON", "versions of the packages at the first begin"),
        Column(
            "code_version",
            "VARCHAR",
            "version of headscan at the first begin, and a hash of the source files that decide numbers",
            nullable=True,
        ),
        Column("started_at", "TIMESTAMPTZ", "first begin"),
        Column("finished_at", "TIMESTAMPTZ", "last end", nullable=True),
        Column("status", "VARCHAR", "running (also when its process is gone), finished or failed"),
        Column("writer", "VARCHAR", "the process that worked on it last: host, boot, namespace, number, start"),
        Column("total_shards", "INTEGER", "shards of the whole run; known at the end", nullable=True),
        Column("report", "JSON", "counts of empty, undecodable and truncated documents", nullable=True),
        Column(
            "provenance",
            "JSON",
            "packages, code version, device and hash of the model's own code files, one entry from each time (since) at"
            " which they changed; NULL in runs from before schema 6",
            nullable=True,
        ),
    ),
    (("run_id",), ("kind", "fingerprint")),
)

SHARDS = Table(
    "shards",
    "the ledger: a shard's rows and its row here land in one transaction",
    (
        RUN,
        Column("shard", "INTEGER", "number of the shard in its run, from 0"),
        Column("content_hash", "VARCHAR", "hash of the shard's tokens"),
        Column("sequences", "INTEGER", "sequences of the shard"),
        Column("head_rows", "INTEGER", "rows of head_statistics of the shard"),
        Column("nonfinite_rows", "INTEGER", "rows of head_statistics where NaN or infinity was met and stored as NULL"),
        Column("tokens", "BIGINT", "real tokens of the shard"),
        Column("seconds", "DOUBLE", "time it took to measure, in seconds", nullable=True),
        Column("worker", "VARCHAR", "who measured it", nullable=True),
        Column("finished_at", "TIMESTAMPTZ", "when it written"),
    ),
    (("run_id", "shard"),),
)

SEQUENCES = Table(
    "sequences",
    "one row per tokenised text",
    (
        RUN,
        _SEQUENCE,
        Column("shard", "INTEGER", "the shard it came with"),
        Column("document", "INTEGER", "number of the document in the corpus, from 0"),
        Column("source", "VARCHAR", "file or data set it came from", nullable=True),
        Column("tokens", "INTEGER", "real tokens"),
        Column("truncated", "BOOLEAN", "whether the text was longer"),
        Column("content_hash", "VARCHAR", "hash of the tokens"),
    ),
)

HEAD_STATISTICS = Table(
    "head_statistics",
    "one row per run, sequence, site, layer and query head",
    (
        RUN,
        _SEQUENCE,
        SITE,
        LAYER,
        HEAD,
        Column("kv_head", "SMALLINT", "KV head that serves the query head, from 0"),
        *(
            Column(s.name, "REAL", f"{s.formula} [{s.unit}]; NULL where not measured or not a finite number", True)
            for s in STATISTICS.values()
        ),
        *(
            # Not of a fixed length: pyarrow cannot read such columns with NULLs back from Parquet.
            Column(p.name, "REAL[]", f"{p.formula} [share]; bins {', '.join(p.bins)}; NULL as above", True)
            for p in PROFILES.values()
        ),
    ),
)

HEAD_BEHAVIOURS = Table(
    "head_behaviours",
    "one row per probe run, site, layer, query head and behaviour",
    (
        RUN,
        SITE,
        LAYER,
        HEAD,
        Column(
            "behaviour", "VARCHAR", "what the head was probed for; behaviour_summary says in its columns what it is"
        ),
        Column("value", "REAL", "how much the head shows it, 0 to 1: mean over the probe's sequences"),
    ),
    (("run_id", "site", "layer", "head", "behaviour"),),
)
