"""The states and timelines of ranks, and the servers that show them."""
