"""Measurements of every head: `collect` (statistics and profiles on given texts) and `behaviour_probes` (scores on
sequences made for a behaviour, with `probe_settings`).
"""
