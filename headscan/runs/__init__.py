"""What every run needs.

`open_run` opens a run for the options of a step; `run_context` holds its model, pool and store, and keeps what a
stopped one has measured; `model_identity` says
which model it is, `code_version` which software. `head_orders` reads orders of heads from finished runs; `progress`
writes to the terminal.
"""
