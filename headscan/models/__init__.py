"""A loaded model, its parts by name, and the arguments of its forward pass."""
