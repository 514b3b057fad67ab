"""The sections of a report that show numbers, each as HTML, one file a subject."""
