"""Fits of gates on the heads of a model: the pool task, and the run."""
