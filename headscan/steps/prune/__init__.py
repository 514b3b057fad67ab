"""The job that prunes, from settings to verdict.

`prune_step` has the options, `run_prune` does the work, `pruning_units` its sizes. `calibration_texts` reads texts,
`build_models` chooses, repairs, slices and saves, `held_out_losses` and `model_costs` measure the result, and
`form_sizes` what it holds in other formats. `work_folder` resumes and delivers, `pruned_arms` makes the models arms
of an evaluation, and `model_card` writes tables and card.
"""
