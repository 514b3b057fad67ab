"""Settings that load no library: options of corpora, measurements, evaluations and savings, with defaults and help."""
