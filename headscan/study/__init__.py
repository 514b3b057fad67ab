"""A study: the largest safe savings of a model, within a number of hours.

`run_study` runs the steps, `study_step` has the options, `question_costs` asks a few questions, `study_time` decides
what the hours allow, `study_clock` counts them, `study_texts` splits the texts, `study_engines` says what an engine
serves, `study_candidates` makes the arms, and `study_answer` is the result.

`job_costs` has the hours and the memory of a study and of other jobs, for `headscan place`.
"""
