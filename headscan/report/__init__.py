"""The HTML report of a store.

`write_report` makes the page. Its parts: `answers` at the top, `sections` on heads, `ablation_costs` and
`saving_costs` on arms, `page_parts` for HTML elements. `head_measures` and `head_data` hold the numbers of the head
map. The charts are `arm_chart`, `share_chart` and `profile_charts`, in one `chart_style`. `notebook_tables` gives
notebooks the tables of a store.
"""
