"""Derivatives of a loss, and what they say of heads.

`losses` defines the losses, `backward` takes derivatives layer by layer, and `head_importance` computes the
importance of every head.
"""
