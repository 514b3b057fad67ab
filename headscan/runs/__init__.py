"""What every run needs.

`run_context` holds model, pool and store of a run, and its `ledger` what a stopped one has finished; `model_identity`
says which model it is, `code_version` which software. `head_orders` reads orders of heads from finished runs;
`progress` writes to the terminal.
"""
