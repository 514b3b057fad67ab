"""The work of each verb, one file a verb.

On texts: `run_scan` and `run_importance`, which share `run_corpus`, `run_probe` and `run_gates`. Ablations:
`run_ablate`, and `run_labelled_ablate` on labelled examples. Evaluations: `evaluate_chosen` makes the arms of settings,
`run_sweep` those of a sweep, and `run_evaluation` lets them answer; `checks` refuses what cannot be answered. Plans:
`run_plan` from damages that `damage_measurement` measures, `plan_arms` evaluates plans, and `run_generate` generates
text. Verbs of several files have folders, `prune` and `referee`. `lm_eval_model` is headscan as a model of lm-eval.
"""
