"""The table of fitted gates on heads."""

from __future__ import annotations

from headscan.analysis.schema.ddl import Column, Table
from headscan.analysis.schema.scan_tables import HEAD, KV_HEAD, LAYER, RUN, SITE

HEAD_GATES = Table(
    "head_gates",
    "one row per gates run, site, layer and query head (arXiv 1905.09418; two fits: 2505.13737)",
    (
        RUN,
        SITE,
        LAYER,
        HEAD,
        KV_HEAD,
        Column("gate", "DOUBLE", "expected value of the gate in the fit that closes gates, 0 to 1"),
        Column("p_open", "DOUBLE", "probability that the gate is above 0, in the same fit"),
        Column("closed", "BOOLEAN", "true if the head is in the run's mask, that of the share"),
        Column("gate_up", "DOUBLE", "expected value in the fit that opens gates; NULL without this fit", nullable=True),
        Column("p_open_up", "DOUBLE", "probability to be above 0, in the same fit; NULL without it", nullable=True),
        Column(
            "class",
            "VARCHAR",
            "facilitating (gate and gate_up above 0.5), interfering (neither), irrelevant (gate_up only) or undecided"
            " (gate only); NULL without two fits",
            nullable=True,
        ),
    ),
    (("run_id", "site", "layer", "head"),),
)
