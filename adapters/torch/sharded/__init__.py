"""Optimizers whose state, and gradients, are divided among the ranks (ZeRO, arXiv 1910.02054)."""
