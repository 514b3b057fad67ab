"""Plans by measured damage: what a window on each KV head costs."""
