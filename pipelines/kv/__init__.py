"""KV-cache plans.

`run_plan` makes a plan from measured damage, which `damage_measurement` measures. `plan_arms` evaluates plans,
and `run_generate` generates text with and without one.
"""
