"""Observations of a rank: counters, timelines, the program's stack, and the files that show them."""
