"""The steps: a verb that runs a model is a class with its options, its work, and what the command line prints.

`step` is the base, and `open_run` opens the run of a step. The classes import no library: `scan` and `importance`,
which share `corpus_step`; `probe`; `gates`; `evaluate`, `sweep` and `ablate`, which share `question_step`; `plan`;
`generate`; and, with the files of their work, `prune` and `referee`. `results` prints rows as tables or JSON.

A step imports its work when it runs. On texts: `run_scan` and `run_importance`, which share `run_corpus`, `run_probe`
and `run_gates`. Evaluations: `evaluate_chosen` makes the arms of settings, `run_ablate` those of single heads,
`run_sweep` those of a sweep, and `run_evaluation` lets them answer; `checks` refuses what cannot be answered. Plans:
`run_plan` from damages that `damage_measurement` measures, `plan_arms` evaluates plans, and `run_generate` generates
text. `lm_eval_model` is headscan as a model of lm-eval.
"""
