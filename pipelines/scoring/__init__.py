"""Log-likelihoods and generated text of requests under ablation."""
