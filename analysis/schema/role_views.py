"""The view of roles: one row per head of a run and role."""

from __future__ import annotations

from headscan.analysis.role_definitions import ROLES, Role
from headscan.analysis.schema.ddl import literal
from headscan.analysis.schema.effect_tables import ACCURACY, EACH
from headscan.analysis.schema.scan_tables import HEAD, LAYER, RUN, SITE
from headscan.analysis.verdict_limits import INACTIVE_QUANTILE

_KEYS = "run_id, site, layer, head"

# Offsets of the open bins at both ends are not numbers.
_OFFSETS = f"""
    SELECT {_KEYS}, max(share) AS value, arg_max(key_offset, share) AS key_offset
    FROM (
        SELECT {_KEYS}, share, try_cast(label AS SMALLINT) AS key_offset
        FROM all_head_profiles WHERE profile = 'argmax_offsets'
    ) WHERE key_offset IS NOT NULL GROUP BY {_KEYS}
"""


# The numbers of head_summary are computed again here, because reading that view three times takes long to plan.
_LOW_OUTPUT = f"""
    SELECT {_KEYS}, count_if(output_norm_ln < low) / nullif(count(output_norm_ln), 0) AS value,
        NULL::SMALLINT AS key_offset
    FROM head_scores JOIN (
        SELECT run_id, site, quantile_cont(output_norm_ln, {INACTIVE_QUANTILE}) AS low FROM head_scores
        GROUP BY run_id, site
    ) USING (run_id, site) GROUP BY {_KEYS}
"""


def _scanned(statistic: str) -> str:
    return (
        f"SELECT {_KEYS}, avg({statistic}) AS value, NULL::SMALLINT AS key_offset FROM head_statistics GROUP BY {_KEYS}"
    )


def _probed(behaviour: str) -> str:
    return (
        f"SELECT {_KEYS}, value, NULL::SMALLINT AS key_offset FROM head_behaviours"
        f" WHERE behaviour = {literal(behaviour)}"
    )


def _harm(replacement: str) -> str:
    return (
        f"SELECT {_KEYS}, CASE metric WHEN {literal(ACCURACY)} THEN -low WHEN 'bleu' THEN -low / 100"
        " ELSE high / nullif(baseline, 0) END AS value,"
        f" NULL::SMALLINT AS key_offset FROM head_effects"
        f" WHERE mode = {literal(EACH)} AND replacement = {literal(replacement)}"
    )


#: The numbers of each role: run_id, site, layer, head, value, key_offset.
_NUMBERS: dict[str, str] = {
    "positional": _OFFSETS,
    "confident": _scanned("confidence"),
    "previous_token": _probed("previous_token_score"),
    "induction": _probed("induction_score"),
    "retrieval": _probed("retrieval_score"),
    "sink": _scanned("first_token_weight"),
    "low_output": _LOW_OUTPUT,
    "inactive": _harm("zero"),
    "constant": _harm("mean"),
}


def _rows(role: Role) -> str:
    """Return SQL for the rows of one role.

    The cast to REAL, the type of stored statistics, compares a number that equals the threshold as equal.
    """
    return f"""
        SELECT {_KEYS}, {literal(role.name)} AS role, value::DOUBLE AS value, key_offset,
            value::REAL {role.comparison} {role.threshold}::REAL AS holds,
            {literal(role.comparison)} AS comparison, {role.threshold}::DOUBLE AS threshold,
            {literal(role.threshold_source)} AS source
        FROM ({_NUMBERS[role.name]}) WHERE value IS NOT NULL
    """


_HEAD_ROLES = f"""
    SELECT run_id, model, site, layer, head, role, value, key_offset, comparison, threshold, holds, source
    FROM ({" UNION ALL ".join(_rows(role) for role in ROLES.values())}) JOIN runs USING (run_id)
"""

ROLE_VIEWS: dict[str, str] = {"head_roles": _HEAD_ROLES}

ROLE_VIEW_COMMENTS: dict[str, str] = {
    "head_roles": "one row per head and role that a run measured: its number, the threshold, and the verdict (holds)"
}

ROLE_COLUMN_COMMENTS: dict[str, dict[str, str]] = {
    "head_roles": {
        **{column.name: column.comment for column in (RUN, SITE, LAYER, HEAD)},
        "model": "path of the model, or its name on the hub",
        "role": "; ".join(f"{role.name} ({role.measured_by}): {role.formula}" for role in ROLES.values()),
        "value": "the number of the role",
        "key_offset": "position of the key minus that of the query; NULL unless positional",
        "comparison": "comparison of the value with the threshold that gives the role",
        "threshold": "threshold of the role, in the unit of the value",
        "holds": "true if the head has the role",
        "source": "paper that defines the threshold, or headscan",
    }
}
