"""Collectives on TensorFlow's tensors, in graphs and eagerly."""
