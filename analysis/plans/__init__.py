"""Head plans: which tokens each KV head keeps in the cache, and plan files.

Methods score the KV heads (`keep_scores`, `scan_scores`). `allocate` turns scores and a budget (`plan_budgets`) into a
plan (`head_plan`), which is made of `plan_records`. `pattern_files` reads and writes the formats of other tools, and
`layer_windows` plans that hold one window per layer, for serving engines.
"""

from headscan.analysis.plans.allocate import (
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
from headscan.analysis.plans.keep_scores import (
    KeepScores,
    by_layer,
    damage_scores,
    imported_scores,
    own_budget,
    random_scores,
)
from headscan.analysis.plans.layer_windows import CacheWindows, SlidingLayers, cache_windows, sliding_layers
from headscan.analysis.plans.pattern_files import TABLE_FILES, HeadPattern, read_pattern, write_pattern
from headscan.analysis.plans.plan_budgets import (
    BUDGET_LENGTHS,
    Budget,
    BudgetRequest,
    KVBytes,
    LengthBudget,
    WindowHeads,
    WindowShare,
    budget_lengths,
)
from headscan.analysis.plans.plan_records import (
    DamageCalibration,
    DamageTexts,
    Evidence,
    Granularity,
    HeadClass,
    HeadDamage,
    PlanError,
    PlanMethod,
    PlannedHead,
    PlannedModel,
    PlanSource,
    planned_model,
)
from headscan.analysis.plans.scan_scores import distant_mass_scores, retrieval_scores

__all__ = [
    "BUDGET_LENGTHS",
    "STORE_METHODS",
    "TABLE_FILES",
    "Budget",
    "BudgetRequest",
    "CacheWindows",
    "DamageCalibration",
    "DamageTexts",
    "Evidence",
    "Granularity",
    "HeadClass",
    "HeadDamage",
    "HeadPattern",
    "HeadPlan",
    "KVBytes",
    "KeepScores",
    "LengthBudget",
    "PlanError",
    "PlanMethod",
    "PlanSource",
    "PlannedHead",
    "PlannedModel",
    "SlidingLayers",
    "WindowHeads",
    "WindowShare",
    "allocate",
    "budget_lengths",
    "by_layer",
    "cache_windows",
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
    "sliding_layers",
    "store_scores",
    "write_pattern",
]
