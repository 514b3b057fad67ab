"""Evaluations and sweeps: tasks, arms, answers."""
