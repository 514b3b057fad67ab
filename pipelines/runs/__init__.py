"""Records, identity, software and progress of a run."""
