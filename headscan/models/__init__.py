"""A loaded model, its parts, and the inputs of its passes."""
