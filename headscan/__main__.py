"""``python -m headscan`` runs the command line."""

from runpy import run_module

# By name, because the library does not depend on the package of the command line.
run_module("headscan.cli.main", run_name="__main__")
