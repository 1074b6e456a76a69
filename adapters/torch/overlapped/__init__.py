"""Training whose next forward pass begins while gradients of the last step are still being exchanged."""
