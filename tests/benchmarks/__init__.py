"""What `make bench` measures beside the instrument itself, each a command of its own: ratios within one run."""
