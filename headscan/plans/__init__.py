"""Head plans: which tokens each KV head keeps in the cache, and plan files.

Methods score the KV heads (`keep_scores`, `scan_scores`). `allocate` turns scores and a budget (`plan_budgets`) into a
plan (`head_plan`), which is made of `plan_records`; `window_search` finds the heads that lose least together.
`pattern_files` reads and writes the formats of other tools, and `engine_windows` writes plans for serving engines.
"""

# Names imported `as` themselves are public: type checkers let others import these alone from here.
from headscan.plans.allocate import STORE_METHODS as STORE_METHODS
from headscan.plans.allocate import allocate as allocate
from headscan.plans.allocate import make_plan as make_plan
from headscan.plans.allocate import random_plan as random_plan
from headscan.plans.allocate import store_scores as store_scores
from headscan.plans.engine_windows import cache_windows as cache_windows
from headscan.plans.engine_windows import head_windows as head_windows
from headscan.plans.engine_windows import sliding_layers as sliding_layers
from headscan.plans.head_plan import HeadPlan as HeadPlan
from headscan.plans.head_plan import check_chunk as check_chunk
from headscan.plans.head_plan import check_is_plan as check_is_plan
from headscan.plans.head_plan import check_model as check_model
from headscan.plans.head_plan import load_plan as load_plan
from headscan.plans.head_plan import plan_schema as plan_schema
from headscan.plans.head_plan import planned_bytes as planned_bytes
from headscan.plans.head_plan import planned_layer_bytes as planned_layer_bytes
from headscan.plans.keep_scores import KeepScores as KeepScores
from headscan.plans.keep_scores import by_layer as by_layer
from headscan.plans.keep_scores import damage_scores as damage_scores
from headscan.plans.keep_scores import imported_scores as imported_scores
from headscan.plans.keep_scores import own_budget as own_budget
from headscan.plans.keep_scores import random_scores as random_scores
from headscan.plans.pattern_files import TABLE_FILES as TABLE_FILES
from headscan.plans.pattern_files import HeadPattern as HeadPattern
from headscan.plans.pattern_files import read_pattern as read_pattern
from headscan.plans.pattern_files import write_pattern as write_pattern
from headscan.plans.plan_budgets import BUDGET_LENGTHS as BUDGET_LENGTHS
from headscan.plans.plan_budgets import Budget as Budget
from headscan.plans.plan_budgets import BudgetRequest as BudgetRequest
from headscan.plans.plan_budgets import KVBytes as KVBytes
from headscan.plans.plan_budgets import LengthBudget as LengthBudget
from headscan.plans.plan_budgets import LossLimit as LossLimit
from headscan.plans.plan_budgets import WindowHeads as WindowHeads
from headscan.plans.plan_budgets import WindowShare as WindowShare
from headscan.plans.plan_budgets import budget_lengths as budget_lengths
from headscan.plans.plan_records import METHOD_SHOWS as METHOD_SHOWS
from headscan.plans.plan_records import DamageCalibration as DamageCalibration
from headscan.plans.plan_records import DamageTexts as DamageTexts
from headscan.plans.plan_records import Granularity as Granularity
from headscan.plans.plan_records import HeadClass as HeadClass
from headscan.plans.plan_records import HeadDamage as HeadDamage
from headscan.plans.plan_records import PlanError as PlanError
from headscan.plans.plan_records import PlanMethod as PlanMethod
from headscan.plans.plan_records import PlannedHead as PlannedHead
from headscan.plans.plan_records import PlannedModel as PlannedModel
from headscan.plans.plan_records import PlanSource as PlanSource
from headscan.plans.plan_records import planned_model as planned_model
from headscan.plans.scan_scores import distant_mass_scores as distant_mass_scores
from headscan.plans.scan_scores import retrieval_scores as retrieval_scores
