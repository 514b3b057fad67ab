"""Plotly figures of a store's data, one file per figure.

Each fits the width of the report.
"""
