"""Arms, and how a replica answers their requests.

`arms` and `replacements` say what an arm ablates. `reading` chooses how the arms of a run read prompts: `likelihood`
for one arm, `bundles` for several masks, `shared_row_likelihood` for prompts that share rows, such as those of a rule,
`staged_likelihood` by layer ranges, `eviction` from a cache that evicts, `generation` for generated text.

`answering` runs the requests of all arms and stores their answers. `prompt_losses` measures losses under windows.
"""
