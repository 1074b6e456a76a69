"""The framework-neutral layer: the code that all adapters share, without any framework's own code."""
