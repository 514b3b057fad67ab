"""Head plans: which tokens each KV head keeps in the cache, and plan files.

A method gives each KV head a keep-score (`methods`), a budget turns the scores into a plan (`budgets`), and the plan is
saved (`format`) or exchanged with other tools (`interchange`).
"""

from headscan.analysis.plans.allocate import (
    DEFAULT_RECENT,
    DEFAULT_SINK,
    STORE_METHODS,
    allocate,
    make_plan,
    random_plan,
    store_scores,
)
from headscan.analysis.plans.head_plan import (
    HeadPlan,
    check_model,
    load_plan,
    plan_schema,
    planned_bytes,
    planned_layer_bytes,
)
from headscan.analysis.plans.keep_scores import KeepScores, damage_scores, imported_scores, own_budget, random_scores
from headscan.analysis.plans.pattern_files import TABLE_FILES, HeadPattern, read_pattern, write_pattern
from headscan.analysis.plans.plan_records import (
    BUDGET_LENGTHS,
    Budget,
    BudgetRequest,
    Calibration,
    DamageCalibration,
    DamageTexts,
    Evidence,
    HeadClass,
    HeadDamage,
    KVBytes,
    LengthBudget,
    PlanError,
    PlanMethod,
    PlannedHead,
    PlannedModel,
    WindowHeads,
    WindowShare,
    budget_lengths,
    planned_model,
)
from headscan.analysis.plans.scan_scores import distant_mass_scores, retrieval_scores

__all__ = [
    "BUDGET_LENGTHS",
    "DEFAULT_RECENT",
    "DEFAULT_SINK",
    "STORE_METHODS",
    "TABLE_FILES",
    "Budget",
    "BudgetRequest",
    "Calibration",
    "DamageCalibration",
    "DamageTexts",
    "Evidence",
    "HeadClass",
    "HeadDamage",
    "HeadPattern",
    "HeadPlan",
    "KVBytes",
    "KeepScores",
    "LengthBudget",
    "PlanError",
    "PlanMethod",
    "PlannedHead",
    "PlannedModel",
    "WindowHeads",
    "WindowShare",
    "allocate",
    "budget_lengths",
    "check_model",
    "damage_scores",
    "distant_mass_scores",
    "imported_scores",
    "load_plan",
    "make_plan",
    "own_budget",
    "plan_schema",
    "planned_bytes",
    "planned_layer_bytes",
    "planned_model",
    "random_plan",
    "random_scores",
    "read_pattern",
    "retrieval_scores",
    "store_scores",
    "write_pattern",
]
