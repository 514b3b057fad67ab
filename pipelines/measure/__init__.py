"""Jobs that measure heads on texts and write to the store: `run_scan`, `run_probe`, `run_importance` and `run_gates`.
Scans and importances share `run_corpus`; `labelled_texts` reads labelled examples instead of a corpus.
"""
