"""Small random models, a float64 reference, and the overhead of measuring."""
