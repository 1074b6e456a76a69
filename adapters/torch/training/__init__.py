"""Training with torch: the distributed optimizer, the exchange of its gradients, and the techniques."""
