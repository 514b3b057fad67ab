"""Evaluations and sweeps.

`run_evaluation` lets arms answer questions, `run_sweep` builds the arms of a sweep. `tasks` and `held_out_text` hold
the questions, `checks` refuses what cannot be answered, `answering` runs requests and stores answers, `harness`
adapts lm-eval, and `continuation_task` makes a task from any texts.
"""
