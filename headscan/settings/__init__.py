"""Settings that several steps share, with options, defaults and help, which load no library.

`corpus_settings` for texts, `evaluation_settings` for tasks, recall questions and arms, `saving_settings` for texts and
prompts of a pruning. `option_values` makes settings of words and files.
"""
