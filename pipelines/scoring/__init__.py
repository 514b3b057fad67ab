"""Arms, recall tasks, and log-likelihoods, losses and generated text of requests under ablation."""
