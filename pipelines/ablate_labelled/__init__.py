"""Effects of ablated heads of classifiers and encoder-decoders on labelled examples, by site."""
