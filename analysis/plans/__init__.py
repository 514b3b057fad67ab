"""Head plans: which tokens each KV head keeps in the cache, and plan files.

A method gives each KV head a keep-score (`methods`), a budget turns the scores into a plan (`budgets`), and the plan is
saved (`format`) or exchanged with other tools (`interchange`).
"""

from headscan.analysis.plans.allocate import DEFAULT_RECENT, DEFAULT_SINK, allocate, random_plan
from headscan.analysis.plans.format.budget_records import (
    BUDGET_LENGTHS,
    Budget,
    BudgetRequest,
    KVBytes,
    LengthBudget,
    WindowHeads,
    WindowShare,
    budget_lengths,
)
from headscan.analysis.plans.format.calibrations import Calibration, DamageCalibration, DamageTexts
from headscan.analysis.plans.format.head_plan import HeadPlan, check_model, planned_bytes, planned_layer_bytes
from headscan.analysis.plans.format.plan_files import load_plan
from headscan.analysis.plans.format.plan_records import (
    Evidence,
    HeadClass,
    HeadDamage,
    PlanError,
    PlanMethod,
    PlannedHead,
    PlannedModel,
)
from headscan.analysis.plans.format.plan_schema import plan_schema
from headscan.analysis.plans.format.planned_model import planned_model
from headscan.analysis.plans.interchange.head_pattern import HeadPattern
from headscan.analysis.plans.interchange.pattern_files import TABLE_FILES, read_pattern, write_pattern
from headscan.analysis.plans.methods.damage_scores import damage_scores
from headscan.analysis.plans.methods.imported_scores import imported_scores, own_budget
from headscan.analysis.plans.methods.keep_scores import KeepScores
from headscan.analysis.plans.methods.random_scores import random_scores
from headscan.analysis.plans.methods.scan_scores import distant_mass_scores, retrieval_scores
from headscan.analysis.plans.store_plans import STORE_METHODS, make_plan, store_scores

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
