"""Training with JAX: optimizers, equal parameters, local steps, and divided states."""
