"""The choice of heads to remove: damage after repair, measured curves, an optimum over layers."""
