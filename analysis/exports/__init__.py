"""Head plans in the formats of other tools, one file a format."""
