"""What replaces the output of ablated heads, and the texts it is collected on."""
