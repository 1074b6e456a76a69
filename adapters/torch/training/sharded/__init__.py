"""Optimizers that divide their state, and optionally gradients, among the ranks (ZeRO, arXiv 1910.02054)."""
