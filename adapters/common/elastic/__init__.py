"""Elastic training, for every framework: states, and the loop that carries a training through changes."""
