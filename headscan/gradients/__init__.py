"""Derivatives of a loss: backward passes layer by layer, and the importance of heads."""
