"""The files of a checkpoint: headers, tensors, sources, fingerprints."""
