"""Training in which each rank takes steps of its own, and the ranks synchronize after a number of them."""
