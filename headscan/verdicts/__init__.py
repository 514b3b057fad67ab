"""Verdicts: arms (ablated heads, plans, other models) compared with their baseline.

`answer_sheets` reads the answers, `paired` compares those of two arms, `metrics` does so for losses, both by the one
bound of `bounds`, and `controls` ranks an arm among random ones. `arm_verdict` has the rule of verdicts and their
wording, `verdict_table` their table, and `judge` gives the verdicts of a run. `scope_verdicts` judges recall and single
tasks, and `verdict_rows` stores all comparisons with these verdicts.

Several arms: `curves` and `confirmation` judge a sweep, `ordered_shares` a study at planned `looks`, `criterion_points`
a referee, and `head_effects` single heads, with `ratio_estimates`.
"""
