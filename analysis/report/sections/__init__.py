"""The sections of a report as HTML, one file a subject."""
