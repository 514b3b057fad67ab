"""Recall tasks, and log-likelihoods and generated text of requests under ablation."""
