"""Rankings, roles and comparisons of heads, from the runs in a store.

`head_ranking` orders heads and computes thresholds of rules, `head_roles` gives each head a verdict per role, and
`comparisons` compares scores within a scan and between two scans.
"""
