"""The files of a checkpoint, before anything is loaded.

`source_folder` finds the folder, `sources` reads configuration and tokenizer, `headers` reads tensor headers and
hashes weights, and `decilm_source` reads DeciLM folders that headscan wrote.
"""
