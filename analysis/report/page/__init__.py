"""The HTML page of a report: templates, scripts, and helpers that escape."""
