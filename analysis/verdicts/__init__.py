"""Verdicts: arms (ablated heads, plans, other models) compared with their baseline.

`answer_sheets` reads the answers, `paired` compares those of two arms, `metrics` does so for losses, and `controls`
ranks an arm among random ones. `decision` has the rule of verdicts, `verdict_words` their wording, `verdict_table`
their table, and `judge` gives the verdicts of a run. `verdict_rows` holds the stored comparisons of tasks and recall.

Several arms: `curves` and `confirmation` judge a sweep, `ordered_shares` a study, `criterion_points` a referee, and
`head_effects` single heads.
"""
