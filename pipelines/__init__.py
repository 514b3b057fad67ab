"""The jobs that a person runs: functions in `job_functions`, which the verbs of the command line (`cli`) call. `jobs`
exports them to Python, with their settings and results.

A folder for each job: `measure` (scan, probe, importance, gates), `ablate`, `evaluate` (and sweep), `referee`, `kv`
(plans), `pruning`, `study`, `export`, and `demo` with the bundled model.

What they share: `settings` (options and defaults), `corpora` (texts as sequences), `runs` (records of a run),
`scoring` (arms and their answers). `lm_eval_model` is headscan as a model of lm-eval.

The import lets idle threads of torch sleep (`share_cores`): it sets ``GOMP_SPINCOUNT``, unless the user chose how
threads wait. That has no effect if torch was imported before.
"""

from headscan.cluster.devices import share_cores

share_cores()
