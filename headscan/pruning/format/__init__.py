"""The code of saved pruned models, which can be copied next to their weights.

`pruned_model` holds configuration and model classes, `pruned_attention` removes heads from attention modules,
`attention_parts` says which rows and columns belong to a head, `config_checks` refuses damaged configurations, and
`remote_model` is what a folder names for remote code.
"""
