"""Gates on the heads of a frozen model: `fit_gates` fits them by gradient steps, with `gate_settings`."""
