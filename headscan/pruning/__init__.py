"""Removal of heads from a model.

`calibration` holds the texts. `head_selection` chooses heads, by `damage_curve` or by `head_values`, with the effort of
`selection_settings`; `repair` and `value_repair` solve the remaining projections; until then `edited_model` runs the
model as if the heads were gone. `slice_heads` removes them, `save_model` writes the result, and `format` is the code
that a saved model needs.
"""
