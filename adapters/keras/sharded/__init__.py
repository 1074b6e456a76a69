"""Optimizers whose state is divided among the ranks (ZeRO-1, arXiv 1910.02054)."""
