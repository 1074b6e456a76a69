"""Collectives on JAX's arrays, inside and outside of compiled programs."""
