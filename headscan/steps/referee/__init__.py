"""The referee: every published criterion removes heads from one model.

`referee_step` has the options. `run_referee` compares the criteria on tasks and texts, `run_labelled_referee` on
labelled examples; `referee_table` is the result.
"""
