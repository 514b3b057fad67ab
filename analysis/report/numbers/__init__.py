"""Numbers of heads for the map of a report."""
