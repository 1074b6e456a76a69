"""Training with TensorFlow: tapes, optimizers, equal variables, and synchronized layers."""
