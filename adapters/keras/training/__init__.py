"""Training with Keras: the distributed optimizer and its gradients."""
