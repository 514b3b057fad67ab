"""KV-cache plans: measuring them, evaluating them, and generating with them."""
