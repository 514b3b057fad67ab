"""The tables of a store, declared once as data.

The DDL, the column comments in the database, the checks on incoming Arrow tables and the documentation read these
declarations; the columns of statistics and profiles come from ``headscan.catalog``.
"""

from __future__ import annotations

from dataclasses import dataclass

from headscan.catalog import PROFILES, STATISTICS

#: To be raised with every change of a table or a view. A store of another version is refused, never altered.
SCHEMA_VERSION = 2

#: What ``meta`` holds under the key ``format``: how a store is told from any other DuckDB file.
FORMAT = "headscan store"


@dataclass(frozen=True)
class Column:
    """A column: its name, DuckDB type, meaning (with unit), and whether it may be NULL."""

    name: str
    type: str
    comment: str
    nullable: bool = False


@dataclass(frozen=True)
class Table:
    """A table: its name, meaning, columns, and its keys (the first of them is the primary key)."""

    name: str
    comment: str
    columns: tuple[Column, ...]
    keys: tuple[tuple[str, ...], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Column names in order."""
        return tuple(column.name for column in self.columns)


_RUN = Column("run_id", "VARCHAR", "the run, see runs")
_ARM = Column("arm_id", "VARCHAR", "the arm, see arms")
_MASK = Column("mask_id", "VARCHAR", "the mask, see masks")
_SEQUENCE = Column("sequence", "INTEGER", "number of the sequence in its run, from 0")
_SITE = Column("site", "VARCHAR", "which attention of the layer: self, encoder or cross")
_LAYER = Column("layer", "SMALLINT", "layer, from 0")
_HEAD = Column("head", "SMALLINT", "query head, from 0")

_META = Table(
    "meta",
    "what this file is",
    (Column("key", "VARCHAR", "format or schema_version"), Column("value", "VARCHAR", "its value")),
    (("key",),),
)

_RUNS = Table(
    "runs",
    "one row per run: what was measured or evaluated, with what",
    (
        Column("run_id", "VARCHAR", "12 hexadecimal digits that follow from kind and fingerprint"),
        Column("kind", "VARCHAR", "scan, evaluate or probe"),
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
        Column("packages", "JSON", "versions of the packages"),
        Column("code_version", "VARCHAR", "version of headscan", nullable=True),
        Column("started_at", "TIMESTAMPTZ", "first begin"),
        Column("finished_at", "TIMESTAMPTZ", "last end", nullable=True),
        Column("status", "VARCHAR", "running, finished or failed"),
        Column("total_shards", "INTEGER", "shards of the whole run; known at the end", nullable=True),
        Column("report", "JSON", "counts of empty, undecodable and truncated documents", nullable=True),
    ),
    (("run_id",), ("kind", "fingerprint")),
)

_SHARDS = Table(
    "shards",
    "the ledger: a shard's rows and its row here land in one transaction",
    (
        _RUN,
        Column("shard", "INTEGER", "number of the shard in its run, from 0"),
        Column("content_hash", "VARCHAR", "hash of the shard's tokens"),
        Column("sequences", "INTEGER", "sequences of the shard"),
        Column("head_rows", "INTEGER", "rows of head_statistics of the shard"),
        Column("nonfinite_rows", "INTEGER", "rows of head_statistics where NaN or infinity was met and stored as NULL"),
        Column("tokens", "BIGINT", "real tokens of the shard"),
        Column("seconds", "DOUBLE", "time it took to measure, in seconds", nullable=True),
        Column("worker", "VARCHAR", "who measured it", nullable=True),
        Column("finished_at", "TIMESTAMPTZ", "when it landed"),
    ),
    (("run_id", "shard"),),
)

_SEQUENCES = Table(
    "sequences",
    "one row per tokenised text",
    (
        _RUN,
        _SEQUENCE,
        Column("shard", "INTEGER", "the shard it came with"),
        Column("document", "INTEGER", "number of the document in the corpus, from 0"),
        Column("source", "VARCHAR", "file or data set it came from", nullable=True),
        Column("tokens", "INTEGER", "real tokens"),
        Column("truncated", "BOOLEAN", "whether the text was longer"),
        Column("content_hash", "VARCHAR", "hash of the tokens"),
    ),
)

_HEAD_STATISTICS = Table(
    "head_statistics",
    "one row per run, sequence, site, layer and query head",
    (
        _RUN,
        _SEQUENCE,
        _SITE,
        _LAYER,
        _HEAD,
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

_HEAD_BEHAVIOURS = Table(
    "head_behaviours",
    "one row per probe run, site, layer, query head and behaviour",
    (
        _RUN,
        _SITE,
        _LAYER,
        _HEAD,
        Column(
            "behaviour", "VARCHAR", "what the head was probed for; behaviour_summary says in its columns what it is"
        ),
        Column("value", "REAL", "how much the head shows it, 0 to 1: mean over the probe's sequences"),
    ),
    (("run_id", "site", "layer", "head", "behaviour"),),
)

_MASKS = Table(
    "masks",
    "fixed sets of heads",
    (
        Column("mask_id", "VARCHAR", "12 hexadecimal digits that follow from the mask"),
        Column("run_id", "VARCHAR", "the scan it was chosen from", nullable=True),
        Column("name", "VARCHAR", "name, unique in the store"),
        Column("score", "VARCHAR", "the score it was chosen by", nullable=True),
        Column("share", "DOUBLE", "share of all heads that was asked for, 0 to 1", nullable=True),
        Column("config", "JSON", "how it was made"),
        Column("created_at", "TIMESTAMPTZ", "when it was made"),
    ),
    (("mask_id",), ("name",)),
)

_MASK_HEADS = Table(
    "mask_heads", "the heads of each mask", (_MASK, _SITE, _LAYER, _HEAD), (("mask_id", "site", "layer", "head"),)
)

_ARMS = Table(
    "arms",
    "what an evaluate run compares",
    (
        Column("arm_id", "VARCHAR", "12 hexadecimal digits that follow from the arm"),
        _RUN,
        Column("name", "VARCHAR", "name, unique in its run"),
        Column("kind", "VARCHAR", "baseline, mask, rule or random"),
        Column("mask_id", "VARCHAR", "the heads that were silenced", nullable=True),
        Column("score", "VARCHAR", "the score of a rule", nullable=True),
        Column("threshold", "DOUBLE", "the threshold of a rule, in the score's unit", nullable=True),
        Column("config", "JSON", "everything else, the seed of a random arm among it"),
        Column("zeroed_share", "DOUBLE", "share of heads really silenced, 0 to 1", nullable=True),
        Column("started_at", "TIMESTAMPTZ", "last begin"),
        Column("finished_at", "TIMESTAMPTZ", "end", nullable=True),
        Column("status", "VARCHAR", "running, finished or failed"),
    ),
    (("arm_id",), ("run_id", "name")),
)

_ANSWERS = Table(
    "answers",
    "one row per arm, task and question: what lets arms be compared in pairs",
    (
        _ARM,
        Column("task", "VARCHAR", "name of the task"),
        Column("question", "INTEGER", "number of the question in its task, from 0"),
        Column("doc_hash", "VARCHAR", "hash of the question's text", nullable=True),
        Column("target", "VARCHAR", "the right answer", nullable=True),
        Column("response", "VARCHAR", "the model's answer", nullable=True),
        Column("correct", "DOUBLE", "1 for right, 0 for wrong, between them for partial credit"),
        Column("log_likelihoods", "DOUBLE[]", "of the choices, in nats", nullable=True),
        Column("metrics", "JSON", "all metrics of the question", nullable=True),
    ),
    (("arm_id", "task", "question"),),
)

TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        _META,
        _RUNS,
        _SHARDS,
        _SEQUENCES,
        _HEAD_STATISTICS,
        _HEAD_BEHAVIOURS,
        _MASKS,
        _MASK_HEADS,
        _ARMS,
        _ANSWERS,
    )
}


def literal(text: str) -> str:
    """``text`` as an SQL string literal: COMMENT ON and COPY take no parameters."""
    return "'" + text.replace("'", "''") + "'"


def table_statements(table: Table) -> list[str]:
    """CREATE TABLE and COMMENT ON statements of one table."""
    lines = [f"{c.name} {c.type}{'' if c.nullable else ' NOT NULL'}" for c in table.columns]
    for i, key in enumerate(table.keys):
        lines.append(f"{'UNIQUE' if i else 'PRIMARY KEY'} ({', '.join(key)})")
    return [
        f"CREATE TABLE {table.name} ({', '.join(lines)})",
        f"COMMENT ON TABLE {table.name} IS {literal(table.comment)}",
        *(f"COMMENT ON COLUMN {table.name}.{c.name} IS {literal(c.comment)}" for c in table.columns),
    ]


def schema_statements() -> list[str]:
    """Every statement that makes an empty store's tables, in order."""
    return [
        *(statement for table in TABLES.values() for statement in table_statements(table)),
        f"INSERT INTO meta VALUES ('format', {literal(FORMAT)}), ('schema_version', '{SCHEMA_VERSION}')",
    ]
