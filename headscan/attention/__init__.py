"""Attention calls: how they are intercepted, computed and reduced to statistics."""
