"""The store: one DuckDB file.

`store` reads and writes it, through `connection`, which creates and checks the file. `tables` and
`scan_tables` declare the tables, `views`, `arm_views` and `macros` the SQL on them, `records` the rows that go in and
out, `provenance` the software of a run.

When a scan ends, `summaries` stores a summary of it, from `site_rows` and `head_spread`. `parquet_store` and
`output_files` read and write Parquet, `merge_stores` joins stores, and `verdict_limits` holds the limits that views
and verdicts share.
"""
