"""Plotly figures of what a store holds, one file a figure; none is wider than a report's page."""
