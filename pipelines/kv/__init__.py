"""KV-cache plans.

`measured_plan` makes a plan from measured damage, which `damage_measurement` measures. `plan_arms` evaluates plans,
and `compare_generation` generates text with and without one.
"""
