"""Tables declared as data, the tables of scans, and the limits of their summaries."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from textwrap import dedent
from typing import TYPE_CHECKING

from headscan.catalog import PROFILES, RECALL_NAMES, STATISTICS
from headscan.text_tables import percent

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Column:
    """A column of a table; ``type`` is DuckDB's, and ``comment`` the meaning, with the unit."""

    name: str
    type: str
    comment: str
    nullable: bool = False


@dataclass(frozen=True)
class Table:
    """A table; ``comment`` is the meaning of a row, and ``keys`` are the unique keys, the primary one first."""

    name: str
    comment: str
    columns: tuple[Column, ...]
    keys: tuple[tuple[str, ...], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    def schema(self, without: Collection[str] = ()) -> pa.Schema:
        """Return the Arrow types of the columns, of which those ``without`` are left out; JSON is text."""
        import pyarrow as pa  # slow to import, and options name columns without it

        def arrow(kind: str) -> pa.DataType:
            item = kind.removesuffix("[]")
            return pa.type_for_alias(_ARROW_TYPES[kind]) if item == kind else pa.list_(arrow(item))

        return pa.schema({each.name: arrow(each.type) for each in self.columns if each.name not in without})


#: Arrow's names of DuckDB's types.
_ARROW_TYPES = {"VARCHAR": "string", "JSON": "string", "INTEGER": "int32", "DOUBLE": "float64", "BOOLEAN": "bool"}


@dataclass(frozen=True)
class View:
    """A view; ``comment`` is the meaning of a row, and ``columns`` has those of columns by name."""

    query: str
    comment: str
    columns: Mapping[str, str] = field(default_factory=dict)


def columns(text: str) -> tuple[Column, ...]:
    """Return columns declared one a line: name, type (with ``?`` if it may be NULL) and meaning, which indented lines
    continue. A line may also hold names of `SHARED` alone.
    """
    columns = list[Column]()
    for line in re.split(r"\n(?! )", dedent(text).strip()):
        words = line.split()
        if SHARED.keys() >= {*words}:
            columns += [SHARED[name] for name in words]
        else:
            name, kind, comment = " ".join(words).split(" ", 2)
            columns.append(Column(name, kind.removesuffix("?"), comment, nullable=kind.endswith("?")))
    return tuple(columns)


def literal(text: str) -> str:
    """Return ``text`` as an SQL string literal. COMMENT ON takes no parameters."""
    return "'" + text.replace("'", "''") + "'"


def table_statement(table: Table) -> str:
    """Return the CREATE TABLE statement of one table."""
    lines = [f"{c.name} {c.type}{'' if c.nullable else ' NOT NULL'}" for c in table.columns]
    for i, key in enumerate(table.keys):
        lines.append(f"{'UNIQUE' if i else 'PRIMARY KEY'} ({', '.join(key)})")
    return f"CREATE TABLE {table.name} ({', '.join(lines)})"


def comment_statements(table: Table) -> list[str]:
    """Return COMMENT ON statements of one table and its columns."""
    return [
        f"COMMENT ON TABLE {table.name} IS {literal(table.comment)}",
        *(f"COMMENT ON COLUMN {table.name}.{c.name} IS {literal(c.comment)}" for c in table.columns),
    ]


RUN = Column("run_id", "VARCHAR", "id of the run in runs")
SITE = Column("site", "VARCHAR", "attention of the layer: self, encoder or cross")
LAYER = Column("layer", "SMALLINT", "layer, from 0")
HEAD = Column("head", "SMALLINT", "query head, from 0")

#: Columns that several tables have, by name.
SHARED: dict[str, Column] = {
    column.name: column
    for column in (
        RUN,
        SITE,
        LAYER,
        HEAD,
        Column("kv_head", "SMALLINT", "KV head that the query head reads, from 0"),
        Column("sequence", "INTEGER", "index of the sequence in its run, from 0"),
        Column("arm_id", "VARCHAR", "id of the arm in arms"),
        Column("mask_id", "VARCHAR", "id of the mask in masks"),
        Column("recall", "BOOLEAN", f"true for recall tasks ({RECALL_NAMES}), which are not part of the benchmark"),
    )
}

RUNS = Table(
    "runs",
    "one row per run, with its model, corpus, settings and software",
    columns("""
        run_id VARCHAR 12 hexadecimal digits, computed from kind and fingerprint
        kind VARCHAR scan (of a corpus), recording (of the prompts of a sweep), recall (of the whole model
            before a sweep), evaluate, ablate, probe, importance, gates, plan (the damages that a measured plan
            needs) or prune (the damages that choose heads)
        fingerprint VARCHAR hash of everything that decides the numbers; a run with the same hash is resumed
        model VARCHAR path of the model, or its name on the hub
        model_revision VARCHAR? commit of the model on the hub; NULL for a folder
        model_config_hash VARCHAR? hash of the model's configuration
        weights_hash VARCHAR? hash of the weights
        tokenizer_hash VARCHAR? hash of the tokenizer
        bos_policy VARCHAR? rule for the BOS token at the start of a sequence: auto, always or never
        corpus VARCHAR? name of the corpus, or names of the tasks of an evaluation
        corpus_hash VARCHAR? hash of the text that was read; NULL until the corpus was read to its end
        num_layers INTEGER number of layers of the model
        num_heads INTEGER number of query heads of the widest layer
        dtype VARCHAR? dtype of the weights during the run
        attention_path VARCHAR? hook point of attention: interface (of transformers), watched (inside the
            model), or both
        grid JSON one object per site and layer: heads, KV heads, dimensions, window
        config JSON all other settings, including the widths of sink and recent; parts lists the parts of the
            corpus that scans with `--part` began
        packages JSON versions of the packages when the run first began
        code_version VARCHAR? version of headscan when the run first began, with a hash of the source files that
            decide numbers
        started_at TIMESTAMPTZ time when the run first began
        finished_at TIMESTAMPTZ? time when the run last ended
        status VARCHAR running (also after its process was killed), part (the requested part of the corpus is
            complete, other shards are missing), finished or failed
        writer VARCHAR last process that wrote the run: host, boot, namespace, process id, start time
        total_shards INTEGER? number of shards of the whole run; NULL until the corpus was read to its end
        report JSON? counts of empty, undecodable and truncated documents
        provenance JSON packages, code version, device and hash of the model's own code files; one entry per
            change, with its time (since)
    """),
    (("run_id",), ("kind", "fingerprint")),
)

SHARDS = Table(
    "shards",
    "one row per finished shard, written in one transaction with the shard's other rows",
    columns("""
        run_id
        shard INTEGER index of the shard in its run, from 0
        content_hash VARCHAR hash of the shard's tokens
        sequences INTEGER number of sequences of the shard
        head_rows INTEGER number of rows of head_statistics, or of head_importance, of the shard
        nonfinite_rows INTEGER number of rows of head_statistics with NaN or infinite values, stored as NULL
        tokens BIGINT number of tokens of the shard, without padding
        seconds DOUBLE? duration of the measurement, in seconds
        worker VARCHAR? name of the worker that measured the shard
        finished_at TIMESTAMPTZ time when the shard was written
    """),
    (("run_id", "shard"),),
)

SEQUENCES = Table(
    "sequences",
    "one row per token sequence",
    columns("""
        run_id sequence
        shard INTEGER index of the shard with this sequence
        document INTEGER index of the document in the corpus, from 0
        source VARCHAR? file or data set of the document
        tokens INTEGER number of tokens, without padding
        truncated BOOLEAN true if the text was longer and was cut
        content_hash VARCHAR hash of the token ids
        recall_task VARCHAR? recall task of a prompt of an importance run, such as needle@511; NULL for texts
    """),
)

HEAD_STATISTICS = Table(
    "head_statistics",
    "one row per run, sequence, site, layer and query head",
    (
        *columns("run_id sequence site layer head kv_head"),
        *(
            Column(s.name, "REAL", f"{s.formula} [{s.unit}]; NULL if not measured or not finite", True)
            for s in STATISTICS.values()
        ),
        *(
            # Lists of variable length, because pyarrow cannot read fixed-length lists with NULLs from Parquet.
            Column(
                p.name,
                "REAL[]",
                f"{p.formula} [share]; bins {', '.join(p.bins)}; NULL if not measured or not finite",
                True,
            )
            for p in PROFILES.values()
        ),
    ),
)

#: Quantile of the scores of a scan beyond which a head is among the least active of a sequence.
INACTIVE_QUANTILE = 0.1

#: Shares of the pool of (sequence, head) whose thresholds are stored.
THRESHOLDS = (0.05, INACTIVE_QUANTILE, 0.2)

#: A head is inactive by a score if it is so in at least this share of the sequences.
MOSTLY = 0.5

#: Bins of the histogram of a head, and of all heads and sequences together; each of the former has several of these.
HEAD_BINS, POOL_BINS = 16, 80

#: A histogram spans these quantiles of the pool, because a few extreme values would hide the others.
SPAN = (0.002, 0.998)

HEAD_SUMMARIES = Table(
    "head_summaries",
    "one row per finished scan, site, layer, query head and measure (score, statistic or profile): its summary over the"
    " sequences, which head_summary and head_profiles show. A run without rows (unfinished, or before a new score)"
    " is summarised from head_statistics when it is queried",
    columns(f"""
        run_id site layer head kv_head
        measure VARCHAR name of the score, statistic or profile
        sequences INTEGER number of sequences of the head
        measured INTEGER number of sequences with a value
        mean DOUBLE? mean over sequences; NULL for profiles, as all columns up to far_mean
        std DOUBLE? standard deviation over sequences; NULL for a single one
        p10 DOUBLE? 10 % quantile over sequences
        median DOUBLE? median over sequences
        p90 DOUBLE? 90 % quantile over sequences
        inactive DOUBLE? share of sequences in which the score is beyond the pooled quantile (see head_summary),
            0 to 1; NULL for statistics
        histogram INTEGER[]? number of sequences in each of {HEAD_BINS} bins of one width between low and high of
            measure_pools; the outer bins also count the values beyond
        long_mean DOUBLE? mean over the sequences that are longer than sink and recent together; NULL if there
            are none
        far_mean DOUBLE? mean of distant_mass over the queries that have distant keys; NULL for other measures
        shares DOUBLE[]? mean share of each bin of a profile; NULL for other measures
    """),
)

MEASURE_POOLS = Table(
    "measure_pools",
    "one row per finished scan, site and measure (score or statistic): the pool of its values of all heads and"
    " sequences",
    columns(f"""
        run_id site
        measure VARCHAR name of the score or statistic
        low DOUBLE lower end of the histograms: the {percent(SPAN[0])} quantile of the pool, or 0.5 below the only value
        high DOUBLE upper end of the histograms: the {percent(SPAN[1])} quantile of the pool, or 0.5 above the only
            value
        histogram BIGINT[] number of values in each of {POOL_BINS} bins of one width between low and high; the
            outer bins also count the values beyond
        thresholds MAP(DOUBLE,DOUBLE)? by share of the pool ({", ".join(f"{share:g}" for share in THRESHOLDS)}), the
            value beyond which that share lies on the score's inactive side; NULL for statistics
        inactive_heads INTEGER? number of heads beyond the {percent(INACTIVE_QUANTILE)} threshold in at least
            {percent(MOSTLY)} of their sequences; NULL for statistics
        inactive_heads_low INTEGER? lower end of its 95 % interval (bootstrap of whole sequences with the
            threshold fixed); NULL for a single sequence
        inactive_heads_high INTEGER? upper end of the same interval
        picks MAP(VARCHAR,BIGINT)? by score, the number of values beyond the {percent(INACTIVE_QUANTILE)} thresholds of
            both scores; NULL for statistics
    """),
)

HEAD_IMPORTANCE = Table(
    "head_importance",
    "one row per importance run, sequence, site, layer and query head",
    columns(f"""
        run_id sequence
        site layer
        head kv_head
        gate_gradient REAL? derivative of the sequence's loss by a gate of 1 on the head's output [nats]; NULL
            if not finite
        entropy REAL? {STATISTICS["entropy"].formula} [{STATISTICS["entropy"].unit}]
        token_gradient REAL? sum over tokens of the absolute derivative of the sequence's loss by a gate of 1 on
            the head's output of the token [nats]; NULL if not finite
    """),
)

HEAD_BEHAVIOURS = Table(
    "head_behaviours",
    "one row per probe run, site, layer, query head and behaviour",
    columns("""
        run_id site
        layer head
        behaviour VARCHAR name of the behaviour; the comments of behaviour_summary define each
        value REAL strength of the behaviour in the head, 0 to 1: mean over the probe's sequences
    """),
    (("run_id", "site", "layer", "head", "behaviour"),),
)


HEAD_GATES = Table(
    "head_gates",
    "one row per gates run, site, layer and query head (arXiv 1905.09418; two fits: 2505.13737)",
    columns("""
        run_id site
        layer head kv_head
        gate DOUBLE expected value of the gate in the fit that closes gates, 0 to 1
        p_open DOUBLE probability that the gate is above 0, in the same fit
        closed BOOLEAN true if the head is in the run's mask, that of the share
        gate_up DOUBLE? expected value in the fit that opens gates; NULL without this fit
        p_open_up DOUBLE? probability to be above 0, in the same fit; NULL without it
        class VARCHAR? facilitating (gate and gate_up above 0.5), interfering (neither), irrelevant (gate_up
            only) or undecided (gate only); NULL without two fits
    """),
    (("run_id", "site", "layer", "head"),),
)
