"""The command line: verbs that run a step, and one file for each verb that runs no model, named after it.

`main` runs a verb. `option_parser` makes its options from settings; `verb_base` makes the verb of a step, and holds
what verbs share.
"""

import headscan.cluster  # noqa: F401  # before torch, whose idle threads then sleep
