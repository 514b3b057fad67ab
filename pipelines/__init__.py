"""The jobs that a person runs. `jobs` has them as functions, `cli` as verbs of the command line.

A folder for each job: `measure` (scan, probe, importance, gates), `ablate`, `evaluate` (and sweep), `referee`, `kv`
(plans), `pruning`, `study`, `export`, and `demo` with the bundled model.

What they share: `settings` (options and defaults), `corpora` (texts as sequences), `runs` (records of a run),
`scoring` (arms and their answers). `lm_eval_model` is headscan as a model of lm-eval.
"""
