"""Arms (ablated heads, plans, other models) against their baseline: differences, controls, recall, curves."""
