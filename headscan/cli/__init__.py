"""The command line: one file a verb, named after it.

`main` runs a verb. `option_parser` makes its options from settings; `verb_base`, `corpus_verb` and `task_options`
hold what verbs share, and `results` prints tables and JSON.
"""

import headscan.cluster  # noqa: F401  # before torch, whose idle threads then sleep
