"""A loaded model, and the inputs of its passes.

`loaded_model` holds the model, its tokenizer and its parts; `model_facts` reads its configuration. `token_batches`
groups sequences, and `forward_inputs` makes the arguments of a pass from them.
"""
