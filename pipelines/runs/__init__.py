"""What every run needs.

`run_context` holds model, pool and store of a run, `model_identity` says which model it is, `code_version` which
software, and `stored_numbers` keeps what a stopped run has measured. `head_orders` reads orders of heads from finished
runs; `progress` and `text_tables` write to the terminal.
"""
