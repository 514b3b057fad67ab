"""Evaluations and sweeps.

`evaluate_chosen` makes the arms that settings name, `run_sweep` those of a sweep, and `run_evaluation` lets them
answer questions. `tasks` and `held_out_text` hold
the questions, `checks` refuses what cannot be answered, `answering` runs requests and stores answers, `harness`
adapts lm-eval, and `continuation_task` makes a task from any texts.
"""
