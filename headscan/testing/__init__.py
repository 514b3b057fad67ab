"""Small random models, a float64 reference, and the cost of measuring."""
