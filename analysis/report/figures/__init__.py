"""Plotly figures of a store's data, one file per figure; each fits the width of the report."""
