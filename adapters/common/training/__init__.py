"""The training engine: what the optimizers of all frameworks share."""
