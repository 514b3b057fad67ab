"""What the numbers of runs say, without torch.

`store` is the DuckDB file, `heads` ranks heads and names their roles, `verdicts` compares arms with their baseline,
`plans` makes plans of the KV cache, and `report` writes the HTML page. `notebook_tables` opens a store in Python,
`text_tables` writes tables for a terminal, and `errors` holds the errors of this package.
"""
