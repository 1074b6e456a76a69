"""Optimizers that divide their state among the ranks (ZeRO-1, arXiv 1910.02054)."""
