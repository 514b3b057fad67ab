"""Where a model runs: devices, demands, and the placement that fits."""
