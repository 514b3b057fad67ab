"""The answers at the top of a report, with interval and evidence."""
