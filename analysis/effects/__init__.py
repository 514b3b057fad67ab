"""Effects of ablated heads: paired differences, false discovery rate, confirmation on other questions."""
