"""Training with a next forward pass that begins while gradients of the last step are still in flight."""
