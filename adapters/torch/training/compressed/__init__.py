"""Gradients that are compressed on each rank, with a memory of what is left out."""
