"""Further benchmarks of `make bench`: ratios within one run."""
