"""The referee: every published criterion removes heads from one model.

`run_referee` compares them on tasks and texts, `run_labelled_referee` on labelled examples; `referee_table` is the
result.
"""
