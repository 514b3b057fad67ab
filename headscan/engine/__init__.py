"""Arms, and how a replica answers their requests.

`arms` and `replacements` say what an arm ablates. `answer` is the call that answers requests, and chooses the way:
`likelihood` for one arm, `bundles` for several masks, `shared_row_likelihood` for prompts that share rows, such as
those of a rule, `eviction` from a cache that evicts, `generation` for generated text, `examples` for labelled examples.

`answering` runs the requests of all arms and stores their answers. `prompt_losses` measures losses under windows.
"""
