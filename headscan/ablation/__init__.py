"""Ablating heads: masks, rules, random heads, and the record of what was ablated."""
