"""A loaded model, its parts by name, and the inputs of its forward pass."""
